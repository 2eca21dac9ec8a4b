"""bench int8 and bench quantize on tiny sizes: each row right and complete, each fault seen."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from fourwalls import bench
from fourwalls.bench import int8 as bench_int8
from fourwalls.bench import quantize as bench_quantize
from fourwalls.bench.__main__ import main
from fourwalls.numerics.product import dot_instructions

torch.set_num_threads(1)


def test_rows_of_int8():
    rows = list(bench.load("int8").rows(SimpleNamespace(pairs=2, algorithms=None), shapes=((3, 40, 7), (1, 64, 32)), tried=60))
    assert all(row.ok for row in rows) and rows[0].metric == "wrong" and rows[0].value == 0
    timed = rows[1:]
    assert {row.case["form"] for row in timed} <= set(bench_int8.FORMS) and len(timed) >= 2 * (len(bench_int8.FORMS) - 1)
    assert all(row.peer == "fp32 linear" and row.pairs == 2 and row.time_ratio > 0 for row in timed)
    assert all(row.machine["dot_instructions"] == list(dot_instructions()) and row.machine["threads"] == 1 for row in rows)
    with pytest.raises(ValueError, match="no form 'fast'; there are blocks"):
        list(bench_int8.rows(SimpleNamespace(pairs=2, algorithms=["fast"])))


def test_f08_small_and_thin_layers_are_measured_too_and_the_product_apart_from_the_conversions():
    """Batches of 200 and of 1 from 100 to 60,000, and 1 x 64 x 32: where int8 cannot win must be seen, and why."""
    assert {(200, 100, 60000), (1, 100, 60000), (1, 64, 32)} <= set(bench_int8.SHAPES)
    assert {"product", "blocks", "fake"} <= set(bench_int8.FORMS) and "loses" in bench_int8.describe
    rows = list(bench.load("int8").rows(SimpleNamespace(pairs=2, algorithms=["product", "fake"]), shapes=((1, 64, 32),), tried=1))
    assert [row.case["form"] for row in rows[1:]] == ["product", "fake"] and all(row.peer == "fp32 linear" for row in rows[1:])


@pytest.mark.parametrize("form", bench_int8.FORMS)
def test_a_wrong_result_is_not_ok(form):
    case = bench_int8.Case(5, 40, 7)
    if form == "onednn" and case.packed is None:
        pytest.skip("this build of torch has no oneDNN")
    assert case.right(form)
    real = case.forms[form]

    def wrong():
        y = real().clone()
        y[2, 3] += 1 if y.dtype == torch.int32 else 1.0
        return y

    case.forms[form] = wrong
    assert not case.right(form)


def test_rows_of_quantize():
    study = bench_quantize.Study(width=16, layers=1, length=8, batch=4, steps=8, more=2, calm=2, windows=4, group=8)
    study_rows = list(bench_quantize.summary("gpt", [bench_quantize.of_gpt(seed, study) for seed in (1, 2)]))
    found = {(row.case["what"], row.case["form"]): row for row in study_rows}
    assert len(found) == len(study_rows) and all(row.low <= row.value <= row.high for row in study_rows)
    assert found["outliers", "float32"].low == found["outliers", "float32"].high == 0  # the rescale changes nothing
    assert abs(found["W8A8", "true int8"].value - found["W8A8", "fake"].value) < 1e-4
    assert found["rounded to zero", "per tensor"].value > 0.5 > found["rounded to zero", "per channel"].value
    for bits in (3, 4):
        forms = {form for what, form in found if what == f"weights of {bits} bits"}
        assert forms == {"per tensor", "per channel", "per group", "GPTQ, per group"}
    assert 5 < found["loss", "float32"].value < 6


@pytest.mark.parametrize("ended", ("interrupt", "kill"))
def test_the_seeds_that_are_done_are_kept_when_a_later_one_is_ended(ended, tmp_path, monkeypatch):
    """A study of half an hour that is ended in its third seed has written the first two."""
    asked = []

    def measure(seed, study=None, say=None):
        asked.append(seed)
        if seed == 3:
            if ended == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return {("loss", "float32"): float(seed)}

    monkeypatch.setattr(bench_quantize, "of_digits", lambda seed: {("accuracy", "float32"): 90.0 + seed})
    monkeypatch.setattr(bench_quantize, "of_gpt", measure)
    before, out = signal.getsignal(signal.SIGTERM), tmp_path / "rows.json"
    assert main(["quantize", "--quiet", "--format", "json", "--out", str(out), "--seeds", "1,2,3,4"]) == 0
    rows = {row["case"]["model"]: row for row in json.loads(out.read_text())}
    assert rows["digits"]["case"]["seeds"] == 4 and rows["digits"]["value"] == 92.5
    assert rows["gpt"]["case"]["seeds"] == 2 and (rows["gpt"]["value"], rows["gpt"]["high"]) == (1.5, 2.0)
    assert asked == [1, 2, 3] and signal.getsignal(signal.SIGTERM) is before
