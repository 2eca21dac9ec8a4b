"""bench winograd and bench gathered-product on tiny sizes: each row right and complete, each fault seen."""

from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import gathered_product as bench_gathered
from fourwalls.bench import winograd as bench_winograd

torch.set_num_threads(1)


def test_rows_of_winograd():
    options = SimpleNamespace(pairs=2, algorithms=None)
    rows = list(bench.load("winograd").rows(options, shapes=((1, 2, 8), (1, 3, 7)), errors=(1, 4, 12)))
    assert all(row.ok for row in rows) and torch.get_num_threads() == 1
    timed, errors = rows[:4], rows[4:]
    assert [(row.case["size"], row.case["tile"], row.case["fewer"]) for row in timed[:2]] == [(8, 2, 2.25), (8, 4, 4.0)]
    assert all(row.time_ratio > 0 and row.pairs == 2 and "conv2d" in row.peer for row in timed)
    assert timed[0].case["waste"] == 0 < timed[2].case["waste"]
    assert [(row.case["tile"], row.case["stored"]) for row in errors] == [(t, s) for s in ("fp32", "fp16") for t in (0, 2, 4, 6)]
    with pytest.raises(ValueError, match="no tile '3'; there are 2, 4, 6"):
        list(bench_winograd.rows(SimpleNamespace(pairs=2, algorithms=["3"])))


def test_a_wrong_output_is_not_ok():
    case = bench_winograd.WinogradCase(1, 2, 8)
    assert case.right(4)
    case.transformed[4][5, 1, 1] += 1e-3
    assert not case.right(4) and case.right(2)
    assert bench_winograd.relative_error(case.exact * 1.01, case.exact) == pytest.approx(0.01)


def test_rows_of_gathered_product():
    with fw.pool(ranks=2) as ranks:
        rows = [
            row
            for share in (0.5, 1.0)
            for row in bench_gathered.rows_of(*bench_gathered.compare(ranks, 2, share, 2, pace=0.02), 2, share)
        ]
    assert [row.metric for row in rows] == ["speed_up", "apart"] * 2 and all(row.source == "paced" for row in rows)
    assert "simulated: 1.250" in rows[0].peer and "simulated: 1.500" in rows[2].peer  # (c + 2p) / (max(c, p) + p)
    assert all(rows[k].ok is rows[k + 1].ok is (abs(rows[k + 1].value) < 40) for k in (0, 2))
    wrong = list(bench_gathered.rows_of([1.5, 1.5], 1.5, False, 2, 1.0))
    assert not any(row.ok for row in wrong)
    far = list(bench_gathered.rows_of([0.8, 0.8], 1.5, True, 2, 1.0))
    assert not any(row.ok for row in far)
