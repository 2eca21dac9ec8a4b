"""`bench precision` on tiny sizes: every row is right, stands beside a peer, and says what the processor can do."""

from types import SimpleNamespace

import torch

from fourwalls import bench
from fourwalls.bench.instructions import WORDS, instructions
from fourwalls.bench.precision_study import PrecisionStudy, gaps
from fourwalls.nn.gpt import GPTConfig


def test_each_row_is_right_and_stands_beside_a_peer():
    config = GPTConfig(length=8, width=16, layers=1, heads=2)
    threads = torch.get_num_threads()
    study = PrecisionStudy(config=config, steps=2, rows=1)
    found = list(bench.load("precision").rows(SimpleNamespace(pairs=2), sizes=(16,), config=config, study=study))
    studied = [row for row in found if row.case["what"] == "held-out loss"]
    found = [row for row in found if row not in studied]
    assert {row.case["form"] for row in studied} == {"fp32", "bf16", "fp32, last bit"} and all(row.ok for row in studied)
    assert torch.get_num_threads() == threads
    assert all(row.ok and row.time_ratio > 0 and row.peer and row.unit == "s" for row in found)
    assert {row.machine["instructions"] for row in found} == {instructions()}
    products = {(row.case["n"], row.case["format"]) for row in found if row.case["what"] == "product"}
    assert products == {(16, "bf16"), (16, "fp16")}
    steps = {(row.case["way"], row.case["beside"]) for row in found if row.case["what"] == "step"}
    assert len(steps) == 8 and {peer for _, peer in steps} == {"fp32", "torch.amp"}
    assert sum(row.case["what"] in ("conversion there and back", "round_to") for row in found) == 8


def test_a_study_of_bf16_sees_a_gap_and_the_twin_that_starts_a_bit_away():
    study = PrecisionStudy(config=GPTConfig(length=8, width=16, layers=1, heads=2), steps=3, rows=1, lr=1e-2)
    found = gaps(1, study)
    assert 5 < found["fp32"] < 6.5 and found == gaps(1, study)
    assert 0 < abs(found["bf16"]) < 0.1 and abs(found["fp32, last bit"]) < abs(found["bf16"])


def test_instructions_are_read_from_the_list():
    text = "processor : 0\nflags\t\t: fpu avx2 amx_int8 avx512_bf16 f16c\nprocessor : 1\nflags : none\n"
    assert instructions(text) == "f16c avx2 avx512_bf16 amx_int8"
    assert instructions("Features : fp asimd bf16") == "asimd bf16"
    assert instructions("model name : x") == "unknown" == instructions("flags : fpu")
    assert set(instructions().split()) <= {*WORDS, "unknown"}
