"""Plans on ranks: outputs and every gradient as on one device, bytes as planned, for cheapest and for random plans; mutants."""

import random

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import get_cluster, uniform
from fourwalls.plan import execute, operators
from fourwalls.plan.blocks import attention, mlp, transformer
from fourwalls.plan.choose import choose_layouts
from fourwalls.plan.cuts import Plan, plan_of
from fourwalls.plan.execute import on_one_device, own_part, run_plan
from fourwalls.plan.layouts import ALIKE, COPIED, PARTIAL, Layout, Prices, cut_dim, split
from fourwalls.plan.operators import Graph, Signature, legal_signatures

from .graphs import prices, random_graph

torch.set_num_threads(1)
NETWORK = uniform(1e-6, 1e9)
BOUND = 1e-10  # float64, sums of a few hundred terms of size about 1: 2**-53 x terms x depth leaves a thousand to spare


def drawn(graph, seed=0):
    """A value for every source: ids within their table, everything else of size 1."""
    generator, values = torch.Generator().manual_seed(seed), {}
    for name, source in graph.sources.items():
        if source.itemsize == 8 and name == "ids":
            rows = next(op.inputs[1].shape[0] for op in graph.ops if op.kind == "embedding")
            values[name] = torch.randint(0, rows, source.shape, generator=generator)
        else:
            values[name] = torch.randn(source.shape, generator=generator, dtype=torch.float64)
    return values


def whole(parts, half, name="it"):
    """The whole of what all ranks hold; they must agree where each holds all of it."""
    if half == "partial":
        return torch.stack(parts).sum(0)
    if half == "broadcast":
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=BOUND, msg=lambda m: f"{name}, ranks differ: {m}")
        return parts[0]
    return torch.cat(parts, cut_dim(half))


def check(plan, *, seed=0):
    """Run `plan` on simulated ranks: outputs, gradients and bytes as they must be."""
    values, graph = drawn(plan.graph, seed), plan.graph
    oracle = on_one_device(graph, values)
    run = fw.simulate(run_plan, plan, values, ranks=plan.prices.n, cluster=NETWORK)
    for name, layout in graph.outputs.items():
        layout = layout or plan.made(graph.tensor(name))
        found = whole([v["outputs"][name] for v in run.values], layout.value, name)
        torch.testing.assert_close(
            found, oracle["outputs"][name], rtol=BOUND, atol=BOUND, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert set(run.values[0]["gradients"]) == set(oracle["gradients"])
    for name, right in oracle["gradients"].items():
        parts = [v["gradients"][name] for v in run.values]
        if right is None:
            assert parts == [None] * plan.prices.n
            continue
        found = whole(parts, plan.layouts[name].gradient, f"gradient of {name}")
        torch.testing.assert_close(found, right, rtol=BOUND, atol=BOUND, msg=lambda m, name=name: f"gradient of {name}: {m}")
    assert tuple(run.trace.bytes_sent(r) for r in range(plan.prices.n)) == plan.bytes_by_rank


def chain(n, kinds=("matmul", "gelu", "matmul", "add_bias", "layer_norm"), size=(12, 12)):
    graph = Graph(itemsize=8)
    x = graph.input("x", size, needs_grad=True, layout=ALIKE)
    for k, kind in enumerate(kinds):
        more = {"matmul": [(size[1], size[1])], "add_bias": [size[1:]], "layer_norm": [size[1:]] * 2}.get(kind, [])
        x = graph.op(kind, x, *(graph.weight(f"w{k}.{i}", shape) for i, shape in enumerate(more)), name=f"{kind}{k}")
    graph.output(x, ALIKE)
    return graph


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_plan_of_a_chain_is_right_and_sends_what_it_says(n):
    fast = uniform(1e-9, 1e13, get_cluster("laptop").device)  # a wire so fast that cutting pays at this size
    plan = choose_layouts(chain(n), Prices(n, fast))
    assert plan.bytes > 0
    check(plan)


@pytest.mark.parametrize(
    ("block", "n"), [("mlp", 2), ("attention", 2), ("attention", 4), ("layer", 2), ("layer pinned", 4), ("embedding", 4)]
)
def test_the_blocks_that_it_plans_are_right(block, n):
    fast = Prices(n, uniform(1e-9, 1e13, get_cluster("laptop").device))
    if block.startswith("layer"):
        layout = ALIKE if "pinned" in block else None
        graph = transformer(1, batch=1, length=8, width=16, heads=4, layout=layout, itemsize=8)
    else:
        graph = Graph(itemsize=8)
        if block == "embedding":
            x = graph.op("embedding", graph.input("ids", (2, 8), ids=True, layout=ALIKE), graph.weight("table", (20, 16)))
            graph.output(mlp(graph, x, 32), ALIKE)
        else:
            x = graph.input("x", (2, 8, 16), needs_grad=True, layout=ALIKE)
            graph.output(mlp(graph, x, 64) if block == "mlp" else attention(graph, x, 4), ALIKE)
    plan = choose_layouts(graph, fast)
    assert plan.bytes > 0, "nothing is cut, nothing is tried"
    check(plan)


@pytest.mark.parametrize("seed", range(8))
def test_every_legal_plan_is_right(seed):
    """Not only the cheapest: layouts drawn at random from what is legal, over all kinds of operators."""
    rng = random.Random(100 + seed)
    for k in range(5):
        n = rng.choice((2, 2, 3, 4))
        graph = random_graph(rng, n, most=10**7)
        layouts = {name: rng.choice(graph.layouts_of(s, n)) for name, s in graph.sources.items()}
        rows = {op.name: rng.choice(legal_signatures(op, n)) for op in graph.ops}
        check(plan_of(graph, prices(rng, n), layouts, rows), seed=k)


@pytest.mark.parametrize("kind", operators.KINDS)
def test_every_signature_of_every_operator_is_right(kind):
    """Each row of the table by itself, between a linear operator before and a product with something uneven behind."""
    shapes = {
        "add_bias": [(4, 6), (6,)], "add": [(4, 6), (4, 6)], "layer_norm": [(4, 6), (6,), (6,)], "embedding": [(4,), (6, 2)],
        "merge_heads": [(4, 2, 6)], "permute": [(4, 6, 2)],
    }  # fmt: skip
    cases = [[(4, 6), (6, 2)], [(2, 4, 6), (6, 2)], [(2, 4, 6), (2, 6, 4)]] if kind == "matmul" else [shapes.get(kind, [(4, 6)])]
    options = {"scale": {"by": 0.3}, "split_heads": {"heads": 2}, "permute": {"dims": (2, 0, 1)}}.get(kind, {})
    for sizes in cases:
        graph = Graph(itemsize=8)
        if kind == "embedding":
            taken = [graph.input("ids", sizes[0], ids=True), graph.weight("table", sizes[1])]
        else:
            taken = [graph.weight(f"w{k}", shape) for k, shape in enumerate(sizes)]
        graph.output(graph.op("square", graph.op(kind, *taken, name="it", **options), name="squares"), ALIKE)
        rows = legal_signatures(graph.ops[0], 2)
        assert len(rows) >= 3
        for row in rows:
            layouts = dict.fromkeys(graph.sources, ALIKE)
            check(plan_of(graph, Prices(2, NETWORK), layouts, {"it": row, "squares": Signature((ALIKE,), ALIKE)}))


def test_real_ranks_run_the_same_plan():
    """Two real ranks: the simulator's bits, and the plan's bytes."""
    plan = megatron()
    values = drawn(plan.graph)
    real = fw.run(run_plan, plan, values, ranks=2, stream=False)
    modelled = fw.simulate(run_plan, plan, values, ranks=2, cluster=NETWORK)
    for mine, theirs in zip(real.values, modelled.values, strict=True):
        for part in ("outputs", "gradients"):
            assert set(mine[part]) == set(theirs[part]) and all(torch.equal(mine[part][n], theirs[part][n]) for n in mine[part])
    assert tuple(real.trace.bytes_sent(r) for r in range(2)) == plan.bytes_by_rank


def test_what_cannot_run():
    plan = choose_layouts(chain(2), Prices(2, NETWORK))
    values = drawn(plan.graph)
    with pytest.raises(fw.RankError, match="a plan for 2 ranks cannot run on 3"):
        fw.simulate(run_plan, plan, values, ranks=3, cluster=NETWORK)
    with pytest.raises(ValueError, match=r"x is \(3, 12\); a tensor of shape \(12, 12\) is wanted"):
        on_one_device(plan.graph, {**values, "x": torch.zeros(3, 12)})
    with pytest.raises(ValueError, match="x is missing"):
        on_one_device(plan.graph, {})


# --- mutants ----------------------------------------------------------------------------------------------------------


def megatron(*, bias=(ALIKE, ALIKE, ALIKE)):
    """Column then row by hand; `bias`: the signature of the last bias."""
    graph = Graph(itemsize=8)
    graph.output(mlp(graph, graph.input("x", (4, 6), needs_grad=True, layout=ALIKE), 8), ALIKE)
    layouts = {"x": ALIKE, "W1": split(1), "b1": split(0), "W2": split(0), "b2": ALIKE}
    rows = {
        "up": Signature((COPIED, split(1)), split(1)),
        "up+bias": Signature((split(1), split(0)), split(1)),
        "gelu": Signature((split(1),), split(1)),
        "down": Signature((split(1), split(0)), PARTIAL),
        "down+bias": Signature(bias[:2], bias[2]),
    }
    return Plan(graph, Prices(2, NETWORK), layouts, rows)


def test_megatron_by_hand_is_right():
    check(megatron())
    check(megatron(bias=(PARTIAL, PARTIAL, PARTIAL)))  # the bias on one rank, before the sum


MISTAKES = {
    "bias added t times": lambda: megatron(bias=(PARTIAL, COPIED, PARTIAL)),
    "gelu of parts of a sum": lambda: _pointwise("gelu"),
    "softmax over a cut dim": lambda: _pointwise("softmax", split(1)),
    "norm over a cut dim": lambda: _pointwise("square", split(1), norm=True),
    "parts taken for the sum": lambda: _row(ALIKE),
    "a column cut in place of a row cut": lambda: _row(split(1)),
}


def _pointwise(kind, layout=PARTIAL, *, norm=False):
    graph = Graph(itemsize=8)
    x = graph.input("x", (4, 6), needs_grad=True, layout=ALIKE)
    made = graph.op("layer_norm", x, graph.weight("g", (6,)), graph.weight("s", (6,)), name="it") if norm else None
    made = made or graph.op(kind, x, name="it")
    graph.output(graph.op("square", made, name="squares"), ALIKE)
    rest = (split(0), split(0)) if norm else ()
    rows = {"it": Signature((layout, *rest), layout), "squares": Signature((ALIKE,), ALIKE)}
    return Plan(graph, Prices(2, NETWORK), dict.fromkeys(graph.sources, ALIKE), rows)


def _row(output):
    graph = Graph(itemsize=8)
    x, w = graph.input("x", (4, 6), needs_grad=True, layout=ALIKE), graph.weight("w", (6, 4))
    graph.output(graph.op("matmul", x, w, name="y"), ALIKE if output == ALIKE else None)
    inputs = (split(1), split(0)) if output == ALIKE else (split(1), split(1))
    return Plan(graph, Prices(2, NETWORK), {"x": ALIKE, "w": ALIKE}, {"y": Signature(inputs, output)})


@pytest.mark.parametrize("name", MISTAKES)
def test_an_illegal_plan_is_wrong_and_refused(name):
    """What the table leaves out is wrong on ranks, and cannot be asked for."""
    plan = MISTAKES[name]()
    with pytest.raises((AssertionError, fw.RankError)):
        check(plan)
    with pytest.raises(ValueError, match="on 2 ranks it can be"):
        plan_of(plan.graph, plan.prices, plan.layouts, plan.rows)


def _no_backward(patch):
    patch.setattr(execute._Change, "backward", staticmethod(lambda ctx, grad: (grad, None, None, None)))


def _all_keep(patch):
    patch.setattr(execute, "own_part", lambda comm, whole, half: whole if half == "partial" else own_part(comm, whole, half))


def _local_mean(patch):
    real = execute._local
    patch.setattr(execute, "_local", lambda op, held, first: held[0].mean() if op.kind == "mean" else real(op, held, first))


def _no_mask(patch):
    table = execute.F.embedding
    patch.setattr(execute, "_embedding", lambda held, first: table((held[0] - (first or 0)).clamp(0, len(held[1]) - 1), held[1]))


def _first_piece(patch):
    patch.setattr(execute, "own_part", lambda comm, whole, half: own_part(SimpleRank(0, comm.size), whole, half))


def _meaned(patch):
    real = execute.ring.all_reduce
    patch.setattr(execute.ring, "all_reduce", lambda comm, x: real(comm, x) / comm.size)


def _vocabulary():
    graph = Graph(itemsize=8)
    rows = graph.op("embedding", graph.input("ids", (6,), ids=True, layout=ALIKE), graph.weight("table", (8, 3)), name="rows")
    graph.output(graph.op("square", rows, name="squares"), ALIKE)
    rows = {"rows": Signature((COPIED, split(0)), PARTIAL), "squares": Signature((ALIKE,), ALIKE)}
    return plan_of(graph, Prices(2, NETWORK), {"ids": ALIKE, "table": split(0)}, rows)


def _mean_of_rows():
    graph = Graph(itemsize=8)
    x = graph.input("x", (4, 3), needs_grad=True, layout=split(0))
    graph.op("mean", x, name="loss")
    return plan_of(graph, Prices(2, NETWORK), {"x": split(0)}, {"loss": Signature((split(0),), PARTIAL)})


# name: (what is broken, a plan on which it shows, what is said)
MUTANTS = {
    "no sum of the input's gradient": (_no_backward, megatron, "gradient of x"),
    "every rank keeps the bias": (_all_keep, lambda: megatron(bias=(PARTIAL,) * 3), "down"),
    "mean of the local count": (_local_mean, _mean_of_rows, "loss"),
    "rows of other ranks not masked": (_no_mask, _vocabulary, "squares"),
    "every rank takes the first piece": (_first_piece, megatron, "down"),
    "a mean in place of a sum": (_meaned, megatron, "down"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_executor_are_caught(name, monkeypatch):
    break_it, plan, says = MUTANTS[name]
    check(plan())
    break_it(monkeypatch)
    with pytest.raises((AssertionError, fw.RankError), match=says):
        check(plan())


def test_both_ways_summed_is_seen():
    """An all-reduce in both directions, where all ranks go on alike: the gradients are t times too large."""
    plan = megatron()
    twice = Layout("broadcast", "partial")
    wrong = Plan(plan.graph, plan.prices, plan.layouts, plan.rows | {"down+bias": Signature((twice, ALIKE), ALIKE)})
    with pytest.raises(AssertionError, match="gradient of|Tuples differ|!="):
        check(wrong)


def test_a_gradient_off_in_one_place_is_seen():
    parts = [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    parts[1][2] += 10 * BOUND
    with pytest.raises(AssertionError):
        whole(parts, "broadcast")
    assert torch.equal(own_part(SimpleRank(), parts[0], "partial"), torch.zeros(4, dtype=torch.float64))


class SimpleRank:
    def __init__(self, rank=1, size=2):
        self.rank, self.size = rank, size
