"""The search for cuts: equal to looking at every plan; Megatron's choice found by itself; what is legal, and what is refused."""

import random

import pytest

from fourwalls.cost.hardware import get_cluster, uniform
from fourwalls.plan.blocks import attention, mlp, transformer
from fourwalls.plan.choose import brute_force, choose_layouts
from fourwalls.plan.cuts import explain, plan_of
from fourwalls.plan.layouts import ALIKE, COPIED, PARTIAL, Prices, is_cut, split
from fourwalls.plan.operators import KINDS, Graph, Signature, legal_signatures

from .graphs import prices, random_graph

A100 = get_cluster("a100-selene")


@pytest.mark.parametrize("part", range(10))
def test_equal_to_every_plan_on_200_random_graphs(part):
    rng = random.Random(part)
    met = set()
    for _ in range(20):
        n = rng.choice((2, 2, 3))
        graph, price = random_graph(rng, n, most=300), prices(rng, n)
        best = brute_force(graph, price)
        found = choose_layouts(graph, price)
        assert found.picoseconds == best.picoseconds, "\n".join([*explain(found), *explain(best)])
        met.update(op.kind for op in graph.ops)
        limit = best.memory - 1
        lighter = brute_force(graph, price, limit=limit)
        if lighter is None:
            with pytest.raises(ValueError, match="nothing fits"):
                choose_layouts(graph, price, limit=limit)
            continue
        within = choose_layouts(graph, price, limit=limit)
        assert within.picoseconds == lighter.picoseconds and within.memory <= limit
        fewest = choose_layouts(graph, price, limit=limit, objective="bytes")
        assert fewest.bytes == brute_force(graph, price, limit=limit, objective="bytes").bytes
    assert {"matmul", "add"} < met


def test_megatron_finds_itself_in_the_mlp():
    """Column then row, the bias of the first cut with it, that of the second added after the sum: one all-reduce each way."""
    graph = Graph()
    x = graph.input("x", (2048, 4096), needs_grad=True, layout=ALIKE)
    graph.output(mlp(graph, x, 16384), ALIKE)
    plan = choose_layouts(graph, Prices(8, A100))
    assert plan.layouts == {"x": ALIKE, "W1": split(1), "b1": split(0), "W2": split(0), "b2": ALIKE}
    assert plan.rows["up"] == ((COPIED, split(1)), split(1)) and plan.rows["gelu"] == ((split(1),), split(1))
    assert plan.rows["down"] == ((split(1), split(0)), PARTIAL) and plan.rows["down+bias"].output == ALIKE
    assert plan.collectives() == {"forward all_reduce": 1, "backward all_reduce": 1}
    assert plan.bytes_by_rank == (2 * 2 * 7 * 2048 * 4096 * 2 // 8,) * 8, "two all-reduces of s h numbers, 2 (t-1)/t each"


def test_megatron_finds_itself_in_the_layer():
    """Heads cut in attention, then rows: 4 all-reduces a layer, of which the entrance of query, key and value needs one."""
    plan = choose_layouts(transformer(1, batch=1, length=2048, width=12288, heads=96, layout=ALIKE), Prices(8, A100))
    cuts = {name: plan.layouts[f"W_{name}"] for name in ("query", "key", "value", "out")}
    assert cuts == {"query": split(1), "key": split(1), "value": split(1), "out": split(0)}
    assert plan.layouts["W1"] == split(1) and plan.layouts["W2"] == split(0) and plan.rows["softmax"].output == split(1)
    assert plan.collectives() == {"forward all_reduce": 2, "backward all_reduce": 2}
    assert plan.bytes_by_rank == (4 * 2 * 7 * 2048 * 12288 * 2 // 8,) * 8
    (entrance,) = (c for c in plan.changes if c.tensor.name == "attention norm")
    assert entrance.users == ("query", "key", "value") and (entrance.start, entrance.end) == (ALIKE, COPIED)


def test_sequence_parallelism_finds_itself():
    """Free to cut the activations in between, it does: 2 + 2 gathers and scatters each way, and norms' gradients are added."""
    plan = choose_layouts(transformer(1, batch=1, length=2048, width=12288, heads=96), Prices(8, A100))
    assert plan.layouts["x"] == split(1) and plan.rows["mlp norm"].output == split(1) and plan.layouts["W1"] == split(1)
    found = plan.collectives()
    assert found["forward all_gather"] == found["backward reduce_scatter"] == 2
    assert found["forward reduce_scatter"] == found["backward all_gather"] == 2
    norms = [c for c in plan.changes if "gain" in c.tensor.name or "shift" in c.tensor.name or c.tensor.name.startswith("b")]
    assert len(norms) == found["backward all_reduce"] == 6, "four of norms, two of biases behind an exit"


def test_data_parallelism_finds_itself_and_a_limit_turns_it_into_sharded_weights():
    graph = transformer(1, batch=64, length=512, width=256, heads=4)
    plan = choose_layouts(graph, Prices(8, A100))
    assert plan.layouts["x"] == split(0) and all(plan.layouts[w] == ALIKE for w in graph.sources if w != "x")
    assert set(plan.collectives()) == {"backward all_reduce", "forward all_reduce"}, "weights' gradients, and the loss"
    graph = Graph()
    x = graph.input("x", (65536, 1024), layout=split(0))
    graph.op("mean", graph.op("square", graph.op("matmul", x, graph.weight("W", (1024, 1024)), name="y")), name="loss")
    free = choose_layouts(graph, Prices(8, A100))
    tight = choose_layouts(graph, Prices(8, A100), limit=free.memory - 1)
    assert free.layouts["W"] == ALIKE and is_cut(tight.layouts["W"]) and tight.memory < free.memory
    assert tight.collectives() == {"forward all_gather": 1, "backward reduce_scatter": 1, "forward all_reduce": 1}
    assert tight.picoseconds == free.picoseconds and tight.bytes == free.bytes, "a gather and a scatter are an all-reduce"


def test_cutting_everything_can_be_worse():
    """A small layer on a slow wire: whole on every rank is fastest, and the same layer cut as Megatron cuts is slower."""
    graph = Graph()
    x = graph.input("x", (16, 32), needs_grad=True, layout=ALIKE)
    graph.output(mlp(graph, x, 128), ALIKE)
    price = Prices(4, uniform(3e-5, 1.25e9, A100.device))
    plan = choose_layouts(graph, price)
    assert plan.bytes == 0 and not any(is_cut(row.output) for row in plan.rows.values())
    large = Graph()
    x = large.input("x", (2048, 4096), needs_grad=True, layout=ALIKE)
    large.output(mlp(large, x, 16384), ALIKE)
    cut = choose_layouts(large, Prices(4, A100))
    forced = plan_of(graph, price, cut.layouts, cut.rows)
    assert forced.picoseconds > 20 * plan.picoseconds and forced.compute_picoseconds < plan.compute_picoseconds


def test_the_vocabulary_is_cut_where_the_table_is_large():
    graph = Graph()
    ids = graph.input("ids", (1024,), ids=True, layout=ALIKE)
    graph.output(graph.op("embedding", ids, graph.weight("table", (51200, 1024)), name="rows"), ALIKE)
    whole = choose_layouts(graph, Prices(8, A100), objective="bytes")
    assert whole.bytes == 0 and whole.layouts["table"] == ALIKE
    cut = choose_layouts(graph, Prices(8, A100), objective="bytes", limit=whole.memory // 2)
    assert cut.rows["rows"] in (((COPIED, split(0)), PARTIAL), ((COPIED, split(1)), split(1)))


# --- legal and illegal ------------------------------------------------------------------------------------------------


def small(kind, *shapes, **options):
    graph = Graph()
    sources = [graph.weight(f"w{k}", shape) for k, shape in enumerate(shapes)]
    graph.op(kind, *sources, name="it", **options)
    return graph


@pytest.mark.parametrize(
    ("kind", "shapes"), [("gelu", [(4, 4)]), ("square", [(4, 4)]), ("softmax", [(4, 4)]), ("layer_norm", [(4, 4), (4,), (4,)])]
)
def test_a_nonlinear_operator_refuses_parts_of_a_sum(kind, shapes):
    graph = small(kind, *shapes)
    rows = legal_signatures(graph.ops[0], 2)
    assert rows and not any(PARTIAL in row.inputs for row in rows)
    asked = {"it": Signature((PARTIAL,) + (COPIED,) * (len(shapes) - 1), PARTIAL)}
    with pytest.raises(ValueError, match=r"it \(\w+\) is partial.* -> partial; on 2 ranks it can be broadcast"):
        plan_of(graph, Prices(2, A100), {name: ALIKE for name in graph.sources}, asked)


@pytest.mark.parametrize("kind", ["softmax", "layer_norm"])
def test_the_dim_that_a_norm_runs_over_cannot_be_cut(kind):
    graph = small(kind, (4, 4), *([(4,), (4,)] if kind == "layer_norm" else []))
    assert {row.output for row in legal_signatures(graph.ops[0], 2)} == {ALIKE, COPIED, split(0)}


def test_sizes_that_do_not_divide_cannot_be_cut():
    graph = small("matmul", (6, 8), (8, 9))
    outputs = {n: {row.output for row in legal_signatures(graph.ops[0], n)} for n in (2, 3, 4, 5)}
    assert outputs[2] == {ALIKE, COPIED, PARTIAL, split(0)}, "9 columns cannot be shared by 2"
    assert outputs[3] == {ALIKE, COPIED, PARTIAL, split(0), split(1)} and outputs[4] == outputs[5] | {PARTIAL}
    assert [r for r in legal_signatures(graph.ops[0], 3) if r.inputs[0] == split(1)] == [], "8 cannot be summed in 3 parts"
    assert graph.layouts_of(graph.sources["w0"], 3) == [ALIKE, split(0)] and graph.layouts_of(graph.sources["w0"], 1) == [ALIKE]
    with pytest.raises(ValueError, match=r"w0 is split\(0\); on 4 ranks it can be broadcast, split\(1\)"):
        plan_of(graph, Prices(4, A100), {"w0": split(0), "w1": ALIKE}, {"it": Signature((ALIKE, ALIKE), ALIKE)})
    pinned = Graph()
    pinned.op("gelu", pinned.input("x", (6, 8), layout=split(0)))
    with pytest.raises(ValueError, match=r"x \(6, 8\) cannot be split\(0\) on 4 ranks"):
        choose_layouts(pinned, Prices(4, A100))


def test_heads_are_cut_whole():
    """6 heads of 4: the width divides by 8, the heads do not."""
    graph = small("split_heads", (2, 24), heads=6)
    assert {row.inputs[0] for row in legal_signatures(graph.ops[0], 8)} == {ALIKE, COPIED, PARTIAL}
    assert split(1) in {row.inputs[0] for row in legal_signatures(graph.ops[0], 3)}
    merge = small("merge_heads", (2, 6, 4))
    assert {row.inputs[0] for row in legal_signatures(merge.ops[0], 4)} == {ALIKE, COPIED, PARTIAL}, "not within a head"


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "says"),
    [
        ("matmull", [(2, 2)], {}, "did you mean 'matmul'"),
        ("matmul", [(2, 3), (2, 3)], {}, r"matmul cannot take \(2, 3\) and \(2, 3\)"),
        ("add", [(2, 3), (3,)], {}, "add cannot take"),
        ("add_bias", [(2, 3), (2,)], {}, "add_bias cannot take"),
        ("split_heads", [(2, 6)], {"heads": 4}, "with {'heads': 4}"),
        ("permute", [(2, 6)], {"dims": (0, 0)}, "permute cannot take"),
        ("scale", [(2, 6)], {}, "scale cannot take"),
        ("layer_norm", [(2, 6)], {}, "layer_norm cannot take"),
        ("gelu", [(2, 6), (2, 6)], {}, "gelu cannot take"),
    ],
)
def test_what_no_operator_takes(kind, shapes, options, says):
    with pytest.raises(ValueError, match=says):
        small(kind, *shapes, **options)


def test_names_are_taken_once_and_tensors_stay_at_home():
    graph = small("gelu", (2, 2))
    with pytest.raises(ValueError, match="a tensor 'it' already"):
        graph.op("gelu", graph.sources["w0"], name="it")
    other = small("gelu", (3, 3))
    with pytest.raises(ValueError, match="another graph"):
        graph.op("gelu", other.sources["w0"])
    with pytest.raises(ValueError, match="no tensor 'z' in this graph; there are w0, it"):
        graph.tensor("z")
    with pytest.raises(ValueError, match="objective is 'speed'; allowed: time, bytes"):
        choose_layouts(graph, Prices(2, A100), objective="speed")
    assert set(KINDS) >= {"matmul", "add_bias", "gelu", "layer_norm", "softmax", "embedding", "mean", "permute", "split_heads"}


def test_the_plan_explains_itself():
    graph = Graph()
    x = graph.input("x", (2048, 4096), needs_grad=True, layout=ALIKE)
    graph.output(mlp(graph, x, 16384), ALIKE)
    plan = choose_layouts(graph, Prices(8, A100))
    lines = explain(plan)
    assert len(lines) == len(graph.sources) + len(graph.ops) + len(plan.changes) + 1 and str(plan) == "\n".join(lines)
    assert any(line.split() == ["W1", "weight", "split(1)", "16.00", "MiB", "a", "rank"] for line in lines)
    place = next(k for k, line in enumerate(lines) if line.startswith("up "))
    assert lines[place].split()[:6] == ["up", "matmul", "copied,", "split(1)", "->", "split(1)"]
    assert lines[place - 1] == "    x: broadcast -> copied: backward all-reduce 224.00 MiB", "2 (8 - 1) times 16 MiB"
    assert lines[-1].startswith("8 ranks: ") and "448.00 MiB in all" in lines[-1]


def test_attention_alone_and_one_rank():
    graph = Graph()
    x = graph.input("x", (2, 8, 16), needs_grad=True, layout=ALIKE)
    graph.output(attention(graph, x, 4), ALIKE)
    plan = choose_layouts(graph, Prices(1, A100))
    assert plan.bytes == 0 and plan.changes == [] and plan.bytes_by_rank == (0,)


@pytest.mark.measured
def test_100_operators_take_less_than_a_second():
    import time

    graph = transformer(4, batch=8, length=2048, width=1024, heads=16)
    assert len(graph.ops) > 100
    price, times = Prices(8, A100), []
    for _ in range(5):
        start = time.perf_counter()
        choose_layouts(graph, price)
        times.append(time.perf_counter() - start)
    assert sorted(times)[2] < 1
