"""The mesh over the network: every pair of neighbours is a line, and those that leave their node are the thick ones."""

import itertools

import pytest

from fourwalls.viz.mesh import crossing_lines, describe_mesh, plot_mesh


def laid(order, sizes):
    """Places of the ranks when the axes are counted through in this order, the last one fastest."""
    grid = itertools.product(*(range(sizes[axis]) for axis in order))
    return [dict(zip(order, at, strict=True)) for at in grid]


SIZES = {"d": 2, "p": 2, "t": 2}


@pytest.mark.parametrize("order", ["dpt", "pdt", "tdp"])
def test_only_the_outermost_axis_crosses(order):
    places = laid(order, SIZES)
    assert crossing_lines(places, 4) == {axis: ((0, 4) if axis == order[0] else (4, 0)) for axis in "dpt"}
    ax = plot_mesh(places, node=4, title="t", note="n")
    thick = {line.get_gid()[3] for line in ax.lines if line.get_linewidth() > 3}
    arcs = [p.get_gid() for p in ax.patches if (p.get_gid() or "").startswith("fw-") and p.get_gid() != "fw-node"]
    assert thick == {order[0]} and len(arcs) == 8 and len(ax.lines) == 4
    assert {text.get_text().split("\n")[0] for text in ax.texts} >= {f"r{k}" for k in range(8)}
    assert f"{order[0]}: 0 lines inside, 4 between" in describe_mesh(places, node=4)


def test_a_group_longer_than_a_node_crosses_once_a_node():
    assert crossing_lines(laid("dt", {"d": 1, "t": 8}), 4, "dt") == {"d": (0, 0), "t": (6, 1)}


def test_refusals():
    with pytest.raises(ValueError, match="rank 1 has no place"):
        plot_mesh([{"d": 0, "t": 0}, {"d": 1}], node=2, axes="dt")
    with pytest.raises(ValueError, match="two ranks stand at one place"):
        plot_mesh([{"d": 0}, {"d": 0}], node=2, axes="d")
    with pytest.raises(ValueError, match="5 axes; at most 4"):
        plot_mesh([dict.fromkeys("abcde", 0)], node=2, axes="abcde")
