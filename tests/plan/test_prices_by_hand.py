"""What a plan's time and memory are made of, by hand: search and brute force share these numbers, so neither checks them."""

from fourwalls.cost.hardware import Device, uniform
from fourwalls.plan.cuts import plan_of
from fourwalls.plan.layouts import ALIKE, COPIED, PARTIAL, Prices, split
from fourwalls.plan.operators import Graph, Signature, legal_signatures, passes_and_work

WIRE = uniform(1e-6, 1e9)
SLOW = Device("toy", {"float32": 1e6}, 10**9, 1e12)  # bytes cost nothing beside 10^6 FLOPs a second


def product(needs_grad):
    graph = Graph(itemsize=8)
    x = graph.input("x", (4, 6), needs_grad=needs_grad, layout=ALIKE)
    graph.output(graph.op("matmul", x, graph.weight("w", (6, 2)), name="y"), ALIKE)
    return graph


COLUMN = Signature((COPIED, split(1)), split(1))


def test_a_product_is_done_once_more_for_each_gradient():
    """2 s k n FLOPs, halved by the cut; backward one product for the weight, one for the input where it has a gradient."""
    for needs_grad, passes in ((False, 2), (True, 3)):
        graph = product(needs_grad)
        (op,) = graph.ops
        assert passes_and_work(op, COLUMN, 2) == (passes, 4 * 6 * 2, 8 * (4 * 6 + 6 * 1 + 4 * 1))
        assert passes_and_work(op, Signature((ALIKE, ALIKE), ALIKE), 2) == (passes, 2 * 4 * 6 * 2, 8 * (24 + 12 + 8))
        plan = plan_of(graph, Prices(2, WIRE, SLOW), {"x": ALIKE, "w": split(1)}, {"y": COLUMN})
        assert plan.work(op) == plan.compute_picoseconds == passes * 48 * 10**6


def test_memory_holds_states_outputs_and_every_copy():
    """x and its copy for other work are the same numbers; y cut, and its whole beside it."""
    plan = plan_of(product(True), Prices(2, WIRE), {"x": ALIKE, "w": split(1)}, {"y": COLUMN}, state_bytes=16)
    assert plan.memory == 8 * 4 * 6 + 16 * 6 * 1 + 8 * 4 * 1 + 8 * 4 * 2
    (entrance, exit_) = plan.changes
    assert (entrance.start, entrance.end) == (ALIKE, COPIED) and (exit_.start, exit_.end) == (split(1), ALIKE)


def test_elementwise_and_gathering_operators():
    graph = Graph(itemsize=8)
    ids = graph.input("ids", (5,), ids=True)
    rows = graph.op("embedding", ids, graph.weight("table", (1000, 6)), name="rows")
    graph.op("gelu", rows, name="act")
    embedding, act = graph.ops
    assert passes_and_work(embedding, legal_signatures(embedding, 1)[0], 1) == (2, 0, 8 * (5 + 2 * 30)), "the rows read, not all"
    assert passes_and_work(embedding, Signature((COPIED, split(0)), PARTIAL), 2) == (2, 0, 8 * (5 + 2 * 30))
    assert passes_and_work(act, legal_signatures(act, 1)[0], 1) == (2, 8 * 30, 2 * 8 * 30)
