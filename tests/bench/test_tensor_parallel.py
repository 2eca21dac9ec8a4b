"""The tensor-parallel benchmark on tiny sizes: right on both sides, the same collectives, and what it says of a wrong one."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import tensor_parallel
from fourwalls.bench.beside import measure


@pytest.fixture(scope="module")
def ranks():
    with fw.pool(ranks=2, backend="gloo") as open_ranks:
        yield open_ranks


@pytest.mark.parametrize("algorithm", tensor_parallel.ALL_REDUCES)
def test_rows(ranks, algorithm):
    tiny = {"width": 16, "ff": 24}
    run = ranks.run(measure, partial(tensor_parallel.job, **tiny), algorithm, 6, 3, checks=False, stream=False)
    seen = ranks.run(partial(tensor_parallel.counted, **tiny), algorithm, 6, checks=False, stream=False)
    assert [value["wrong"] for value in run.values] == [0, 0]
    case = {"ranks": 2, "tokens": 6, "algorithm": algorithm, **tiny}
    rows = {row.metric: row for row in tensor_parallel._rows_of(case, run, seen)}
    assert list(rows) == ["time", "collectives", "all_reduced"] and all(row.ok for row in rows.values())
    assert rows["collectives"].value == 2 and rows["all_reduced"].value == 4 * 2 * 6 * 16
    assert rows["time"].pairs == 3 and "DTensor" in rows["time"].peer and rows["time"].time_ratio > 0
    more = SimpleNamespace(values=[seen.values[0] | {"ours": 3}] * 2)
    assert not {row.metric: row for row in tensor_parallel._rows_of(case, run, more)}["collectives"].ok


def test_one_wrong_element_is_counted():
    want = torch.linspace(-1, 1, 100, dtype=torch.float64)
    got = want.float()
    assert tensor_parallel._apart(got, want, 8) == 0
    got[3] += 10 * 8 * torch.finfo(torch.float32).eps
    assert tensor_parallel._apart(got, want, 8) == 1 and tensor_parallel._apart(got * float("nan"), want, 8) == 100


def test_a_wrong_name_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="did you mean 'ring'"):
        next(bench.load("tensor_parallel").rows(SimpleNamespace(ranks=None, sizes=None, pairs=1, algorithms=["rign"])))
