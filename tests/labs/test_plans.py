"""The guide's class hours add up, each lab has one, and its answers are what the library computes."""

import re
from pathlib import Path

import pytest
import torch

from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import uniform
from fourwalls.cost.memory import state_memory
from fourwalls.course.lab import LABS
from fourwalls.numerics.formats import get_format
from fourwalls.parallel.pipeline import schedules
from fourwalls.parallel.pipeline.simulate import Times, simulate

TEXT = (Path(__file__).resolve().parents[2] / "labs" / "PLANS.md").read_text(encoding="utf-8")
PARTS = dict(zip(re.findall(r"^## (\w+)$", TEXT, flags=re.M), re.split(r"^## \w+$", TEXT, flags=re.M)[1:], strict=True))


def says(lab, *texts):
    plain = " ".join(PARTS[lab].split())
    for text in texts:
        assert text in plain, (lab, text)


@pytest.mark.parametrize("lab", LABS)
def test_each_lab_has_fifty_minutes_and_three_questions_with_answers(lab):
    part = PARTS[lab]
    assert sum(int(n) for n in re.findall(r"^\| (\d+) \|", part, flags=re.M)) == 50
    questions = re.split(r"^\d\. ", part, flags=re.M)[1:]
    assert len(questions) == 3 and all(re.search(r"\*[^*]{10,}\*", " ".join(q.split())) for q in questions)


def test_ring_answers():
    cluster = uniform(5e-6, 12.5e9)
    cost = collective_cost("all_reduce", "ring", 8, 2**24, cluster)
    assert max(cost.bytes_sent) == 112 * 2**20 and round(cost.picoseconds / 1e9, 1) == 9.5
    says("ring", "112 MiB", "= 9.5 ms", "S = 3.59 alpha / beta = 224 kB")
    meeting = 22 / (8 - 30 / 16)
    assert round(meeting, 2) == 3.59 and round(meeting * 5e-6 * 12.5e9 / 1e3) == 224


def test_data_answers():
    assert ((20 / 10 + 90 / 30) / 2, 110 / 40) == (2.5, 2.75)
    bucket = collective_cost("all_reduce", "ring", 4, 25_000_000 // 4, uniform(0.0, 12.5e9)).picoseconds / 1e9
    assert bucket == pytest.approx(3.0) and bucket < 40 / 8
    says("data", "2.5; 110 / 40 = 2.75", "3 ms and is filled in 5 ms")


def test_zero_answers():
    held = [state_memory(10**9, dp=16, stage=stage).total / 1e9 for stage in (1, 2, 3)]
    assert held == pytest.approx([4.75, 2.875, 1.0])
    says("zero", "4.75, 2.875 and 1 GB", "= 3.75 GB", "= 5.625 GB")
    assert (2 * 15 / 16 * 2, 3 * 15 / 16 * 2) == (3.75, 5.625)


def test_recompute_and_tensor_answers():
    assert min(range(1, 65), key=lambda k: k + 64 / k) == 8
    core = 5 * 96 * 2048 / 12288
    assert core == 80 and round(100 * core / (34 + core)) == 70
    sent = max(collective_cost("all_reduce", "ring", 8, 2048 * 4096 // 2, uniform(0.0, 1e9)).bytes_sent)
    assert sent == 28 * 2**20
    says("recompute", "80 of 114, 70%")
    says("tensor", "2 · 7/8 · 16 MiB = 28 MiB; four of them: 112 MiB")


def test_schedules_answers():
    times = Times(forward=1, input=0.5, weight=0.5)
    runs = [simulate(make(8, 32), times) for make in (schedules.gpipe, schedules.one_f_one_b)]
    assert [run.makespan for run in runs] == [78, 78] and [run.peak for run in runs] == [32, 8]
    assert {round(run.bubble_of_total, 4) for run in runs} == {0.1795}
    short = simulate(schedules.gpipe(4, 8), times)
    assert round(short.bubble_of_total, 3) == 0.273
    says("schedules", "78 and 0.1795 for both; 32 and 8", "3/8 = 37.5%", "3/11 = 27.3%")


def test_precision_and_quantize_answers():
    assert get_format("bf16").epsilon / 2 == 2**-8 and 6e-4 < 2**-9
    x = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(100):
        x = x - 6e-4
    assert x.item() == 1.0
    scale = 3 / 127
    assert [round(v / scale) for v in (-0.5, 0.02, 3.0)] == [-21, 1, 127] and round(scale, 4) == 0.0236
    assert (2**31 - 1) // 127**2 == 133144 and (4 + 16 / 32, 4 + 16 / 128) == (4.5, 4.125)
    says("precision", "0.00195", "112 GB")
    says("quantize", "−21, 1, 127", "4.5 and 4.125", "133,144")
