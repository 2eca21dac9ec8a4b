"""The ZeRO benchmark: its rows, collectives and payload beside FSDP2's, bytes = formula, and what it says of a wrong step."""

from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import zero
from fourwalls.parallel.zero import bytes_sent

FORM = (3, (32, 64, 32))
PARAMETERS = 3 * (32 * 64 * 2 + 64 + 32)


@pytest.fixture(scope="module")
def rows():
    options = SimpleNamespace(ranks=[2], sizes=None, pairs=1, algorithms=["ring", "native"])
    return {(row.case["algorithm"], row.metric): row for row in bench.load("zero").rows(options, form=FORM)}


def test_rows_and_units(rows):
    own = {("ring", "bytes_sent"): "B"}
    times = {(a, m): "s" for a in ("ring", "native") for m in ("time", "time_without_optimizer")}
    counts = {("native", f"{c}{m}"): u for c in ("all_gather", "reduce_scatter") for m, u in (("s", "calls"), ("_payload", "B"))}
    assert {key: row.unit for key, row in rows.items()} == own | times | counts
    assert all(row.ok and row.case["stage"] == 3 for row in rows.values())
    for key in times:
        assert rows[key].peer.startswith("torch.distributed.fsdp.fully_shard") and rows[key].time_ratio > 0


def test_as_many_collectives_and_as_much_payload_as_fsdp2(rows):
    assert rows["native", "all_gathers"].value == 6 and rows["native", "reduce_scatters"].value == 3
    assert rows["native", "all_gather_payload"].value == 2 * 4 * PARAMETERS
    assert rows["native", "reduce_scatter_payload"].value == 4 * PARAMETERS
    assert rows["ring", "bytes_sent"].value == 3 * 4 * PARAMETERS // 2  # 3 (n-1)/n, n = 2


def test_what_is_wrong_is_said():
    made = SimpleNamespace(values=[{"ours": [1.0], "theirs": [2.0], "wrong": 3}] * 2, backend="gloo")
    row = zero.time_row("zero", {"ranks": 2}, made, peer=zero.PEER)
    assert not row.ok and row.time_ratio == 0.5
    more = {"ours": {"all_gather": [8, 8]}, "theirs": {"all_gather": [8]}}
    found = {row.metric: row.ok for row in zero._count_rows({}, SimpleNamespace(values=[more] * 2, backend="gloo"))}
    assert not found["all_gathers"] and not found["all_gather_payload"] and found["reduce_scatters"]
    x = torch.ones(10)
    y = x.clone()
    y[3] += 80 * torch.finfo(torch.float32).eps
    assert zero._apart(x, x) == 0 and zero._apart(x, y) == 1


def uneven(comm):
    """torch's collectives on 7 elements and 2 or 3 ranks."""
    x = torch.arange(7.0) * (comm.rank + 1)
    chunk = zero.native_reduce_scatter(comm, x)
    return chunk, zero.native_all_gather(comm, chunk, numel=7), zero.native_all_gather(comm, chunk, numel=7, out=torch.empty(7))


def test_native_collectives_cut_as_ours_do():
    for n in (1, 2, 3):
        whole = torch.arange(7.0) * (n * (n + 1) // 2)
        for rank, (chunk, joined, again) in enumerate(fw.run(uneven, ranks=n, stream=False).values):
            assert torch.equal(chunk, whole.tensor_split(n)[rank])
            assert torch.equal(joined, whole) and torch.equal(again, whole)


def test_the_formula_knows_one_rank():
    assert bytes_sent([], 1, 0, stage=3) == 0
