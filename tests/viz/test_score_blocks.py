"""Who computes which scores: the picture has a block for each pair that the mask leaves, and bars that are the formula's."""

import matplotlib.pyplot as plt
import pytest

from fourwalls.cost.context import work
from fourwalls.viz import describe_scores, plot_score_blocks


@pytest.mark.parametrize("cut, c, chunks", [("equal", 4, 4), ("zigzag", 4, 8), ("zigzag", 1, 1), ("equal", 7, 7)])
def test_blocks_and_bars(cut, c, chunks):
    square, bars = plot_score_blocks(cut, c, length=56 * c)
    shaded = [p for p in square.patches if p.get_facecolor()[:3] != (1, 1, 1)]
    assert len(shaded) == chunks * (chunks + 1) // 2 and len(square.patches) == chunks**2 + len(shaded)
    found = work(cut, 56 * c, c)
    mean = sum(map(sum, found)) / c
    widths = {r: 0.0 for r in range(c)}
    for bar in bars.patches:
        widths[round(bar.get_y() + 0.3)] += bar.get_width()
    assert widths == pytest.approx({r: sum(row) / mean for r, row in enumerate(found)})
    plt.close(square.figure)


def test_words():
    said = describe_scores("equal", 4)
    assert "rank 0 0.25" in said and "rank 3 1.75" in said and "last over first 6.99" in said
    for cut, c in (("striped", 4), ("equal", 8), ("equal", 0)):
        with pytest.raises(ValueError, match="for 1 to 7 ranks"):
            plot_score_blocks(cut, c)
