"""The sharding map: one slab a rank where a tensor is cut, one where it is whole, a sheet a rank for a sum; words; refusals."""

import pytest
from matplotlib.patches import Rectangle

from fourwalls.viz.mirrored import plot_mirrored
from fourwalls.viz.sharding import HOW, Slabs, describe_sharding, plot_sharding

LINE = [
    Slabs("X", "whole", 4, 8, ("s", "h")),
    "@",
    Slabs("A", "columns", 8, 32, ("h", "4h/t")),
    "=",
    Slabs("Y", "rows", 4, 32),
    "then",
    Slabs("Z", "parts", 4, 8, ("s", "h")),
]


def boxes(ax, name):
    return [p for p in ax.patches if isinstance(p, Rectangle) and (p.get_gid() or "").startswith(f"fw-{name}-")]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_slabs_fill_the_tensor_without_overlap(ranks):
    ax = plot_sharding(LINE, ranks, title="t", note="n")
    assert [len(boxes(ax, name)) for name in "XAYZ"] == [1, ranks, ranks, ranks]
    for name, along, across in (("A", "get_x", "get_height"), ("Y", "get_y", "get_width")):
        found = sorted(boxes(ax, name), key=lambda b: getattr(b, along)())
        size = "get_width" if along == "get_x" else "get_height"
        for a, b in zip(found, found[1:], strict=False):
            assert getattr(a, along)() + getattr(a, size)() == pytest.approx(getattr(b, along)())
        assert len({round(getattr(b, across)(), 9) for b in found}) == 1
    if ranks > 1:  # a rank is known by colour and by hatch
        looks = {(b.get_facecolor(), b.get_hatch()) for b in boxes(ax, "A")}
        assert len(looks) == ranks and len({b.get_hatch() for b in boxes(ax, "A")}) == ranks
    tops = sorted(boxes(ax, "Y"), key=lambda b: -b.get_y())
    assert [b.get_gid() for b in tops] == [f"fw-Y-{r}" for r in range(ranks)]  # rank 0 has the first rows


def test_words():
    said = describe_sharding(LINE, 4)
    assert said.startswith("4 ranks. X (s x h, whole on every rank) @ A (h x 4h/t, cut by columns) =")
    assert all(word in said for word in HOW.values())


def test_refusals():
    with pytest.raises(ValueError, match="allowed: whole, rows, columns, parts"):
        plot_sharding([Slabs("X", "diagonal", 1, 1)], 2)
    with pytest.raises(ValueError, match="1 to 8"):
        plot_sharding(LINE, 9)
    assert plot_sharding([], 2) is not None


def test_a_message_and_its_mirror_image():
    gather = [[1, 0], [0, 1], [1, 0], [0, 1]]  # what two ranks receive of what two ranks bring
    axes = plot_mirrored([("all-gather", gather, "reduce-scatter"), ("broadcast", [[1], [1]], "reduce")], 2)
    assert axes.shape == (2, 2) and [ax.get_title() for ax in axes[:, 0]] == ["all-gather", "reduce-scatter"]
    above, below = ([p.get_xy() for p in ax.patches if p.get_gid() == "fw-cell"] for ax in axes[:, 0])
    assert sorted(above) == sorted((y, x) for x, y in below) and len(above) == 4
