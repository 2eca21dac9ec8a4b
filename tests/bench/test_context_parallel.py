"""The benchmark of context parallelism on tiny sizes: right on both sides, bytes and share as their formulas, wrong ones said."""

from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import context_parallel
from fourwalls.bench.beside import measure
from fourwalls.ranks.trace import Trace


@pytest.fixture(scope="module")
def ranks():
    with fw.pool(ranks=2, backend="gloo") as open_ranks:
        yield open_ranks


@pytest.mark.parametrize("form", context_parallel.FORMS)
def test_rows(ranks, form):
    run = ranks.run(measure, context_parallel.job, form, 16, 3, checks=False, stream=False)
    assert [value["wrong"] for value in run.values] == [0, 0]  # torch's own, too
    seen = ranks.run(context_parallel.counted, form, 16, stream=False)
    case = {"ranks": 2, "tokens": 16, "form": form}
    found = list(context_parallel._counts(case, seen, {}))
    assert all(row.ok for row in found) and found[0].metric == "bytes" and found[1].value == 1
    assert len(found) == (5 if form == "ring" else 2)
    off = SimpleNamespace(values=[9, 1], trace=Trace(ranks=2))
    assert [row.ok for row in context_parallel._counts(case, off, {})][:2] == [False, False]


def test_one_wrong_element_is_counted():
    want = torch.linspace(-1, 1, 100, dtype=torch.float64)
    got = want.float()
    assert context_parallel._apart(got, want, 8) == 0
    got[3] += 10 * 8 * torch.finfo(torch.float32).eps
    assert context_parallel._apart(got, want, 8) == 1 and context_parallel._apart(got * float("nan"), want, 8) == 100


def test_a_wrong_name_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="allowed: ring, gather, ulysses"):
        next(bench.load("context_parallel").rows(SimpleNamespace(ranks=None, sizes=None, pairs=1, algorithms=["star"])))
