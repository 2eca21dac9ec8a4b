"""The benchmark record and its three formats, the timer's honesty, and each benchmark on tiny sizes."""

import csv
import io
import json
import math
import random
import subprocess
import sys
import time
import warnings

import pytest
import torch

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import record, timer
from fourwalls.bench.__main__ import main
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import uniform

FIELDS = [
    "benchmark",
    "case",
    "metric",
    "value",
    "unit",
    "low",
    "high",
    "pairs",
    "peer",
    "time_ratio",
    "time_ratio_low",
    "time_ratio_high",
    "source",
    "ok",
    "machine",
]


def run_main(capsys, *arguments):
    code = main([*arguments, "--quiet"])
    return code, capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny():
    """A tiny all-reduce benchmark in a fresh interpreter: its JSON from standard output, and what came on standard error."""
    command = [sys.executable, "-m", "fourwalls.bench", "all-reduce", "--ranks", "2", "--sizes", "64,4KiB", "--pairs", "6"]
    done = subprocess.run(
        [*command, "--algorithms", "ring,star", "--format", "json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_json_alone_on_stdout_with_the_fields_of_the_record(tiny):
    rows, progress = tiny
    assert all(list(row) == FIELDS for row in rows)
    assert "all-reduce" in progress  # the bar
    measured = [r for r in rows if r["metric"] != "best_of_ours"]
    assert {(r["case"]["bytes"], r["case"]["algorithm"], r["case"]["checks"]) for r in measured} == {
        (size, algorithm, checks)
        for size in (64, 4096)
        for algorithm, checks in (("ring", False), ("ring", True), ("star", False))
    }
    assert {row["metric"] for row in measured} == {"time", "algbw", "busbw", "wrong"}
    assert [r["case"] for r in rows if r["metric"] == "best_of_ours"] == [
        {"ranks": 2, "bytes": size, "fastest": _fastest(measured, size)} for size in (64, 4096)
    ]
    assert all(row["ok"] and row["machine"]["torch"] and row["machine"]["cores"] >= 1 for row in rows)
    for row in rows:
        assert row["low"] is None or row["low"] <= row["value"] <= row["high"]
        if row["metric"] == "time":
            assert row["pairs"] == 6 and "torch.distributed" in row["peer"] and row["source"] == "measured"
            assert row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]


def _fastest(rows, size):
    times = [r for r in rows if r["metric"] == "time" and r["case"]["bytes"] == size and not r["case"]["checks"]]
    return min(times, key=lambda r: r["time_ratio"])["case"]["algorithm"]


def test_bus_and_algorithm_bandwidth_come_from_the_time(tiny):
    found = {(str(r["case"]), r["metric"]): r["value"] for r in tiny[0]}
    for (case, metric), value in found.items():
        if metric == "busbw":  # 2 ranks: the factor is 1
            assert value == pytest.approx(found[case, "algbw"]) == pytest.approx(eval(case)["bytes"] / found[case, "time"] / 1e9)


def sample_rows():
    here = {"benchmark": "b", "machine": {"cpu": "c, with comma", "cores": 2}}
    yield record.Row(
        case={"ranks": 2, "bytes": 2048},
        metric="time",
        value=1.5,
        unit="s",
        low=1.0,
        high=2.0,
        pairs=7,
        peer="torch",
        time_ratio=0.5,
        **here,
    )
    yield record.Row(case={"ranks": 2, "bytes": 2048}, metric="busbw", value=3.25, unit="GB/s", **here)
    yield record.Row(case={"ranks": 4, "bytes": 512}, metric="time", value=None, unit="s", ok=False, source="paced", **here)


def test_formats_say_the_same(tmp_path):
    rows = list(sample_rows())
    for name in record.FORMATS:
        record.write_rows(rows, format=name, out=str(tmp_path / name))
    as_json = json.loads((tmp_path / "json").read_text())
    as_csv = list(csv.DictReader(io.StringIO((tmp_path / "csv").read_text())))
    assert len(as_json) == len(as_csv) == 3
    for a, b in zip(as_json, as_csv, strict=True):
        for name in FIELDS:
            if name in ("case", "machine"):
                assert {f"{name}.{k}": str(v) for k, v in a[name].items()} == {
                    k: v for k, v in b.items() if k.startswith(f"{name}.")
                }
            else:
                assert b[name] == ("" if a[name] is None else str(a[name]))
    table = (tmp_path / "table").read_text().splitlines()
    assert "cpu c, with comma" in table[0] and len(table) == 5  # machine, blank, header, one line a case
    assert "2 KiB" in table[3] and "1.5" in table[3] and "3.25" in table[3] and "0.500" in table[3] and table[3].endswith("ok")
    assert table[4].endswith("WRONG")


def test_a_row_cannot_contradict_itself():
    with pytest.raises(ValueError, match="lies outside its own spread"):
        record.Row(benchmark="b", case={}, metric="m", value=3.0, unit="s", low=1.0, high=2.0)
    with pytest.raises(ValueError, match="source is 'guessed'; it is one of measured, modelled, paced"):
        record.Row(benchmark="b", case={}, metric="m", value=3.0, unit="s", source="guessed")


def test_the_exit_code_tells_a_wrong_result(capsys, monkeypatch):
    monkeypatch.setattr(bench.load("launch"), "rows", lambda options, say: sample_rows())
    code, out = run_main(capsys, "launch", "--format", "json")
    assert code == 1 and len(json.loads(out)) == 3
    monkeypatch.setattr(bench.load("launch"), "rows", lambda options, say: list(sample_rows())[:2])
    assert run_main(capsys, "launch", "--format", "csv")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-redoce"], "did you mean 'all-reduce'"),
        (["all-reduce", "--sizes", "16M"], "write 16MiB or 16MB"),
        (["all-reduce", "--ranks", "0"], "whole numbers from 1 on"),
        (["all-reduce", "--pairs", "0"], "at least 1"),
        (["all-reduce", "--format", "xml"], "table"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_a_wrong_algorithm_is_refused_before_ranks_start(capsys):
    with pytest.raises(ValueError, match="no algorithm 'rings' for all_reduce.*did you mean 'ring'"):
        main(["all-reduce", "--algorithms", "rings", "--quiet"])


def test_all_benchmarks_have_a_line_of_help():
    for name in bench.BENCHMARKS:
        assert bench.load(name).describe


def test_a_wrong_sum_is_counted(monkeypatch):
    """The benchmark itself must not be blind: an algorithm that loses one element is not ok."""
    from fourwalls.bench.all_reduce import _wrong

    def program(comm, lost):
        def work():
            fw.collectives.all_reduce(comm, x, out=x)
            if lost and comm.rank == 1:
                x[3] += 1

        x = torch.empty(100)
        return _wrong(comm, work, x)

    assert fw.simulate(program, False, ranks=3, cluster=uniform(1e-6, 1e9)).values == [0, 0, 0]
    assert fw.simulate(program, True, ranks=3, cluster=uniform(1e-6, 1e9)).values == [0, 1, 0]


def test_simulator_benchmark_is_exact_and_repeats():
    options = type("Options", (), {"ranks": [8], "sizes": [4096]})
    rows = {(r.case.get("ring"), r.metric): r for r in bench.load("simulator").rows(options, repeats=2)}
    for ring in ("blocking", "posted ahead"):
        assert rows[ring, "virtual_time_error"].value == 0 and rows[ring, "twice_the_same"].value == 1 and rows[ring, "rate"].ok
        assert rows[ring, "rate"].value > 0 and rows[ring, "virtual_time"].time_ratio == 1
    assert rows[None, "peak_memory"].value is None or rows[None, "peak_memory"].value > 2**20


def test_launch_benchmark():
    options = type("Options", (), {"ranks": [2]})
    rows = {r.metric: r for r in bench.load("launch").rows(options, repeats=2)}
    assert all(r.ok for r in rows.values())
    assert rows["round_trip"].value > 0 and rows["first_round_trip"].value <= rows["first_process"].value
    if sys.platform == "linux":
        assert 2**20 < rows["private_dirty"].value < rows["proportional_set_size"].value


def test_calibration_puts_forecast_beside_measurement():
    algorithms = ["ring", "tree", "shared_memory"]
    options = type("Options", (), {"ranks": [2], "sizes": [4096, 2**20], "pairs": 3, "algorithms": algorithms})
    rows = list(bench.load("calibrate").rows(options))
    found = {(r.case.get("bytes"), r.case.get("algorithm"), r.metric): r for r in rows}
    assert len(found) == len(rows) == 4 + 2 * (3 * 3 - 1) and all(r.ok for r in rows)
    for size in (4096, 2**20):
        for algorithm in ("ring", "tree"):
            forecast, measured, error = (found[size, algorithm, m] for m in ("simulated_time", "measured_time", "error"))
            assert forecast.source == error.source == "modelled" and measured.source == "measured"
            assert forecast.peer.startswith("measured (gloo)") and error.unit == "%"
            assert forecast.time_ratio == forecast.value / measured.value == pytest.approx(1 + error.value / 100)
        assert found[size, "shared_memory", "simulated_time"].value is None  # no message: nothing to simulate
        assert found[size, "shared_memory", "measured_time"].value > 0
    # by tree the second of two ranks sends all of it and waits for all of it; by ring halves, both at once
    link = uniform(found[None, None, "alpha"].value, found[None, None, "bandwidth"].value * 1e9)
    by_tree = collective_cost("all_reduce", "tree", 2, 2**18, link).seconds
    assert by_tree < found[2**20, "tree", "simulated_time"].value < 1.5 * by_tree  # and the additions
    fitted = {r.metric: r.value for r in rows}
    assert 0 <= fitted["alpha"] < 0.1 and 0.01 < fitted["bandwidth"] < 1000


# --- the timer -------------------------------------------------------------------------------------------------------


def test_interval_of_the_median_is_that_of_the_table():
    """Le Boudec's table for 95%: n = 10 takes the 2nd and 9th, n = 20 the 6th and 15th, n = 50 the 18th and 33rd value."""
    for n, low, high in ((5, 1, 5), (6, 1, 6), (10, 2, 9), (15, 4, 12), (20, 6, 15), (50, 18, 33)):
        values = list(range(1, n + 1))
        random.Random(n).shuffle(values)
        found = timer.spread(values)
        assert (found.value, found.low, found.high, found.count) == ((n + 1) / 2, low, high, n)
    with pytest.raises(ValueError, match="nothing was timed"):
        timer.spread([])


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    generator = random.Random(0)
    hits = sum((s := timer.spread(generator.expovariate(1) for _ in range(15))).low <= math.log(2) <= s.high for _ in range(1000))
    assert 935 <= hits <= 990  # at least 95%; 15 values give 96.5%


def test_pairs_alternate_and_the_ratio_is_taken_pair_by_pair():
    calls = []
    ours, theirs = timer.alternate(
        lambda: calls.append("a"), lambda: calls.append("b"), 3, before=lambda: calls.append("|"), repeats=2
    )
    assert "".join(calls) == "|aa|bb|bb|aa|aa|bb" and len(ours) == len(theirs) == 3
    assert timer.time_ratio([1, 20, 300], [2, 40, 100]).value == 0.5
    with pytest.raises(ValueError, match="pairs are needed"):
        timer.time_ratio([1], [1, 2])


def test_the_first_call_stands_apart():
    slow = iter([0.03, 0, 0, 0, 0])
    timing = timer.time_call(lambda: time.sleep(next(slow)), warmup=1, repeats=3)
    assert timing.first >= 0.03 > timing.rest.high and timing.rest.count == 3


def own_clock(comm):
    return timer.repeats_for(comm, 1e-3 * (comm.rank + 1), target=10e-3)


def test_all_ranks_agree_how_often_to_repeat():
    assert fw.simulate(own_clock, ranks=5, cluster=uniform(1e-6, 1e9)).values == [10] * 5


def test_times_faster_than_the_device_are_called_out():
    with pytest.warns(RuntimeWarning, match="wait for the result"):
        assert not timer.check_plausible(0.02e-3, flops=2 * 4096**3, peak_flops=1e14, what="matmul")
    with pytest.warns(RuntimeWarning, match="all_reduce took"):
        assert not timer.check_plausible(1e-6, bytes=2**26, peak_bandwidth=1e11, what="all_reduce")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert timer.check_plausible(1.29e-3, flops=2 * 4096**3, peak_flops=2e14)
