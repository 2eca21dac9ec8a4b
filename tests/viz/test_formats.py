"""Pictures of formats: bars, curves and shares stand where the data says."""

import math

import pytest

from fourwalls.viz.formats import plot_drift, plot_range, plot_spacing, plot_underflow

ROWS = [("bf16", 2.0**-133, 2.0**-126, 2.0**127, 7), ("fp16", 2.0**-24, 2.0**-14, 65504.0, 10)]


def test_a_bar_goes_from_the_smallest_to_the_largest():
    ax = plot_range(ROWS)
    spans = [(round(path.get_extents().x0, 3), round(path.get_extents().x1, 3)) for c in ax.collections for path in c.get_paths()]
    assert spans == [(-126, 127), (-133, -126), (-14, round(math.log2(65504), 3)), (-24, -14)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["bf16", "fp16"]
    assert sum(bool(c.get_hatch()) for c in ax.collections) == 2


def test_what_becomes_zero_is_hatched_and_summed():
    bins = [(-30, 0.25), (-25, 0.25), (-24, 0.5)]
    ax = plot_underflow(bins, [("last tick", 2.0**-24)], zero_below=2.0**-24)
    bars = {int(bar.get_x() + 0.5 * bar.get_width() - 0.5): (round(bar.get_height(), 6), bar.get_hatch()) for bar in ax.patches}
    assert bars == {-30: (25, "////"), -25: (25, "////"), -24: (50, "")}
    assert "50.0% of them round to zero" in ax.get_xlabel() and ax.get_title() == ""


def test_a_bar_too_thin_to_be_seen_takes_no_room_and_every_limit_is_in_sight():
    bins = [(-60, 1e-5), (-20, 0.1), (-10, 0.89999)]
    ax = plot_underflow(bins, [("last tick", 2.0**-24), ("largest", 0.5)], zero_below=2.0**-24)
    left, right = ax.get_xlim()
    assert -30 < left < -24 and -1 < right < 4 and len(ax.patches) == 3
    assert "0.0% of them round to zero" in ax.get_xlabel()


@pytest.mark.parametrize("plot", [plot_spacing, plot_drift])
def test_a_line_for_each(plot):
    data = {"a": [(1.0, 0.1), (2.0, 0.05)], "b": [(1.0, 0.2), (4.0, 0.1)]} if plot is plot_spacing else {"a": [1, 2], "b": [1, 1]}
    ax = plot(data)
    assert [line.get_label() for line in ax.lines] == ["a", "b"]
    if plot is plot_spacing:
        assert list(ax.lines[1].get_xdata()) == [0, 2] and ax.get_yscale() == "log"
