"""The data-parallel benchmark: its rows, overlap from the Trace, bytes = formula, and what it says of a step that is wrong."""

from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import data_parallel
from fourwalls.ranks.trace import Event, Trace


def measured():
    options = SimpleNamespace(ranks=[2], sizes=[25 * 2**20], pairs=1, algorithms=["ring"])
    return {row.metric: row for row in bench.load("data-parallel").rows(options)}


@pytest.fixture(scope="module")
def rows():
    return measured()


def test_rows_and_units(rows):
    units = {"time": "s", "exposed": "s", "summing": "s", "exposed_share": "", "bytes_sent": "B"}
    units["first_sum_before_backward_ends"] = ""
    assert {metric: row.unit for metric, row in rows.items()} == units
    time = rows["time"]
    assert time.peer.startswith("torch.nn.parallel.DistributedDataParallel") and time.pairs == 1 and time.time_ratio > 0
    assert all(row.ok and row.case["bucket_bytes"] == 25 * 2**20 and row.case["algorithm"] == "ring" for row in rows.values())


def test_the_first_sum_starts_before_backward_ends_and_bytes_are_the_formula(rows):
    tries = [rows]
    while tries[-1]["first_sum_before_backward_ends"].value != 1 and len(tries) < 4:
        tries.append(measured())  # on a busy machine the second thread may get no core before backward is over
    assert tries[-1]["first_sum_before_backward_ends"].value == 1
    gradients = 6 * (512 * 2048 * 2 + 2048 + 512)
    assert rows["bytes_sent"].value == 4 * gradients  # 2 (n-1)/n of everything, n = 2
    assert 0 < rows["exposed_share"].value < 1 and 50e6 < 4 * gradients < 51e6


def trace(begin):
    events = [
        Event(0, "compute", "backward", "backward", 100, 200),
        Event(0, "mark", "mark", "bucket 0 begins", begin, begin),
        Event(1, "compute", "backward", "backward", 100, 200),
    ]
    return Trace(events, ranks=2)


def test_overlap_is_read_from_the_trace():
    assert data_parallel.overlapping(trace(150), 0) == [True]
    assert data_parallel.overlapping(trace(200), 0) == [False] and data_parallel.overlapping(trace(150), 1) == [False]
    made = SimpleNamespace(values=[{"ours": [1.0], "theirs": [2.0], "wrong": 3}] * 2, backend="gloo")
    seen = SimpleNamespace(values=[[{"exposed": 0.1, "step": 1.0, "summing": 0.2}] * 5] * 2, trace=trace(250))
    case = {"ranks": 2, "bucket_bytes": 2**20, "algorithm": "native"}
    found = {row.metric: row for row in data_parallel._rows_of(case, made, seen)}
    assert not found["time"].ok and found["time"].time_ratio == 0.5  # three elements were wrong
    assert not found["first_sum_before_backward_ends"].ok and found["exposed_share"].value == pytest.approx(0.1)
    one = {row.metric: row for row in data_parallel._rows_of(case | {"bucket_bytes": 2**30}, made, seen)}
    assert one["first_sum_before_backward_ends"].ok  # a single bucket has nothing to begin early


def test_a_gradient_ten_times_the_rounding_apart_is_counted():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    assert data_parallel._apart(x, y) == 0
    y[7] += 80 * torch.finfo(torch.float32).eps * x.abs().max()
    assert data_parallel._apart(x, y) == 1 and data_parallel._apart(x, x * float("nan")) == 100


def test_a_wrong_name_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ring"):
        next(bench.load("data_parallel").rows(SimpleNamespace(ranks=None, sizes=None, pairs=1, algorithms=["rign"])))
    assert fw.bench.load("data-parallel") is data_parallel
