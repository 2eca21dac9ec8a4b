"""The benchmarks of recomputation and of memory on tiny sizes: each row right, each fault seen."""

from types import SimpleNamespace

import pytest
import torch

from fourwalls import bench
from fourwalls.bench import memory as bench_memory
from fourwalls.bench import recompute as bench_recompute
from fourwalls.nn.gpt import GPTConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recomputed():
    return list(bench.load("recompute").rows(SimpleNamespace(pairs=2), layers=8, width=96))


def test_recompute_rows(recomputed):
    a, found = 96 * 96 * 4, {}
    for row in recomputed:
        assert row.ok and row.benchmark == "recompute"
        found[row.case["plan"], row.case["segments"], row.case.get("checks"), row.metric] = row
    assert found["keep all", 0, None, "kept"].value == 9 * a + 4
    for k in (1, 2, 4, 8):
        kept, peak, number = (found["segments", k, None, m] for m in ("kept", "peak", "runs"))
        assert kept.value == k * a + 4 and kept.peer == "forecast" and abs(kept.time_ratio - 1) < 0.001
        assert (k + 8 // k + 1) * a <= peak.value <= (k + 8 // k + 2) * a + 6000 and number.value == 16
        best = found["best", k, None, "runs"]
        assert best.value < 16 and found["best", k, None, "peak"].value <= peak.value + 8
    timed = [row for row in recomputed if row.metric == "time"]
    assert [(r.case["plan"], r.case["segments"], r.case["checks"]) for r in timed] == [
        ("segments", 1, False),
        ("segments", 1, True),
        ("segments", 8, False),
        ("segments", 8, True),
        ("best", 8, False),
    ]
    assert all(r.pairs == 2 and r.peer in ("torch.utils.checkpoint", "8 segments") for r in timed)


def test_a_wrong_gradient_is_not_ok(monkeypatch):
    """A recomputation that runs something else the second time."""
    real = bench_recompute.run_plan

    def wrong(functions, x, plan):
        return real([lambda x, f=f: f(x) * (1 + 1e-6) for f in functions], x, plan)

    case = bench_recompute.Case(4, 16, 16)
    case.step(case.ours(bench_recompute.keep_all(4)))
    right = [g.clone() for g in case.gradients()]
    monkeypatch.setattr(bench_recompute, "run_plan", wrong)
    chain = [bench_recompute.step_of(case.layers[0], case.x)] * 4

    def told(plan):
        return bench_recompute.forecast(chain, plan, input=case.x.nbytes, output_grad=0)

    rows = list(bench_recompute._bytes_rows(case, {}, bench_recompute.segments(4, 2), told, right))
    assert [row.ok for row in rows if row.metric != "runs"] == [False, False]


def test_memory_rows():
    config = GPTConfig(width=16, heads=2, length=8, layers=2, dropout=0.1)
    rows = list(bench.load("memory").rows(SimpleNamespace(), config=config))
    found = {(*row.case.values(), row.metric): row for row in rows}
    assert len(found) == len(rows) == 6 * 8 and all(row.ok for row in rows)
    assert all(row.value == 0 for row in rows if row.metric == "unexplained")
    for name in ("parameters", "gradients"):  # trial i11: only tokens' lines grow with the batch
        assert found["adam", "none", 4, 8, "float32", name].value == found["adam", "none", 8, 8, "float32", name].value
    four, eight = (found["adam", "none", b, 8, "float32", "activations"].value for b in (4, 8))
    assert eight - 4 == 2 * (four - 4)
    none, full = (found["adam", how, 4, 8, "float32", "activations"].value for how in ("none", "full"))
    assert full < none
    with pytest.raises(ValueError, match="optimizer is 'lion'; allowed: sgd, momentum, adam"):
        bench_memory.explain(GPTConfig(), batch=1, optimizer="lion")


def test_a_wrong_formula_is_not_ok(monkeypatch):
    monkeypatch.setitem(bench_memory.MOMENTS, "adam", 3)
    rows = list(bench_memory.rows(SimpleNamespace(), config=GPTConfig(width=16, heads=2, length=8, layers=1)))
    assert {row.metric for row in rows if not row.ok} == {"optimizer"}
    assert any(row.value < 0 for row in rows if row.metric == "unexplained")
