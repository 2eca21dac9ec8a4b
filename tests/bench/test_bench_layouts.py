"""The benchmark of automatic cuts: its rows are right, and a plan that is not Megatron's is not ok."""

from types import SimpleNamespace

from fourwalls import bench
from fourwalls.bench import layouts as bench_layouts
from fourwalls.plan.cuts import Plan
from fourwalls.plan.layouts import ALIKE
from fourwalls.plan.operators import Signature

OPTIONS = SimpleNamespace(pairs=1)


def test_rows():
    found = list(bench.load("layouts").rows(OPTIONS, layers=(1, 2)))
    assert [(r.metric, r.case["operators"]) for r in found] == [
        (m, n) for n in (26, 52) for m in ("time", "activation_bytes_of_a_rank", "step")
    ]
    assert all(r.ok and r.benchmark == "layouts" for r in found) and found[0].value > 0 and found[1].time_ratio == 1
    assert found[4].value == 2 * found[1].value


def test_another_plan_is_not_ok(monkeypatch):
    def nothing_cut(graph, prices):
        return Plan(
            graph, prices, dict.fromkeys(graph.sources, ALIKE),
            {op.name: Signature((ALIKE,) * len(op.inputs), ALIKE) for op in graph.ops},
        )  # fmt: skip

    monkeypatch.setattr(bench_layouts, "choose_layouts", nothing_cut)
    assert not any(r.ok for r in bench_layouts.rows(OPTIONS, layers=(1,)))
