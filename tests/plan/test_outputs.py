"""What is wanted outside: an output that cannot be held as asked is refused before anything is planned."""

import pytest

from fourwalls.cost.hardware import uniform
from fourwalls.plan.choose import brute_force, choose_layouts
from fourwalls.plan.cuts import plan_of
from fourwalls.plan.layouts import ALIKE, Prices, split
from fourwalls.plan.operators import Graph, Signature

WIRE = uniform(1e-6, 1e9)


def wanted(layout, shape=(3, 6)):
    graph = Graph(itemsize=8)
    graph.output(graph.op("gelu", graph.input("x", shape, needs_grad=True), name="y"), layout)
    return graph


@pytest.mark.parametrize("layout", [split(0), split(2)], ids=str)
def test_an_output_that_cannot_be_cut_so_is_refused(layout):
    graph, two = wanted(layout), Prices(2, WIRE)
    calls = (
        lambda: choose_layouts(graph, two),
        lambda: choose_layouts(graph, two, limit=10**9),
        lambda: brute_force(graph, two),
        lambda: plan_of(graph, two, {"x": ALIKE}, {"y": Signature((ALIKE,), ALIKE)}),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"output y \(3, 6\) cannot be split\(.\) on 2 ranks; it can be broadcast, part"):
            call()


def test_one_that_can_be_is_planned():
    assert choose_layouts(wanted(split(1)), Prices(2, WIRE)).rows["y"].output == split(1)
    assert choose_layouts(wanted(split(0)), Prices(3, WIRE)).memory == 2 * 3 * 6 * 8 // 3


def test_a_graph_of_nothing_and_one_of_a_weight_alone():
    empty = choose_layouts(Graph(), Prices(2, WIRE))
    assert (empty.memory, empty.bytes, empty.picoseconds) == (0, 0, 0)
    graph = Graph()
    graph.weight("w", (4, 4))
    assert choose_layouts(graph, Prices(2, WIRE), limit=128).layouts == {"w": split(0)}
    with pytest.raises(ValueError, match="nothing fits in 127: the least that any choice weighs is 128"):
        choose_layouts(graph, Prices(2, WIRE), limit=127)
