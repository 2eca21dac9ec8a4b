"""bench fusion on tiny sizes: each row right and complete, each fault seen; what a compiler takes is a row of its own."""

from types import SimpleNamespace

import pytest
import torch

from fourwalls import bench
from fourwalls.bench import fusion
from fourwalls.kernels import formulas

torch.set_num_threads(1)
TINY = {"numel": 2**12, "columns": 64, "lengths": (24,)}


class Pretended:
    """In place of the compiler: the function itself, after four seconds."""

    def __init__(self, fn, *, say, fresh):
        assert fresh  # a cache on disk would hide the price
        self.fn, self.seconds, self.fell_back = fn, 4.0, None

    def __call__(self, *args):
        return self.fn(*args)


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "Compiled", Pretended)
        patch.setattr(fusion, "compiler", lambda: "a compiler")
        return list(bench.load("fusion").rows(SimpleNamespace(pairs=2, algorithms=None), **TINY))


def test_each_row_is_right_and_stands_beside_a_peer(found):
    assert all(row.ok and row.benchmark == "fusion" and row.machine["threads"] == 1 for row in found)
    times = [row for row in found if row.metric == "time"]
    assert all(row.unit == "s" and row.time_ratio > 0 and row.peer and row.pairs == 2 for row in times)
    forms = {(row.case["operator"], row.case["form"]) for row in times if "operator" in row.case}
    for operator in formulas.OPERATORS:
        assert {(operator, form) for form in ("separate", "row blocks", "compiled", "torch's own")} <= forms
    assert {form for name, form in forms if name.endswith("gradient")} == {"separate", "row blocks", "in place", "torch's own"}
    assert {form for name, form in forms if name == "softmax"} == set(fusion.FORMS)
    kept = {form for name, form in forms if name == "softmax in kept memory"}
    assert kept == {*fusion.FORMS, "arithmetic alone"}
    attention = {(row.case["form"], row.case["way"]) for row in times if "what" in row.case}
    assert len(attention) == 6 and {form for form, _ in attention} == set(fusion.ATTENTION)


def test_bytes_stand_beside_times_and_the_compilers_price_apart(found):
    moved = {(row.case["operator"], row.case["form"]): row for row in found if row.metric == "bytes"}
    for operator in formulas.OPERATORS:
        separate, blocks = moved[operator, "separate"], moved[operator, "row blocks"]
        assert separate.value == formulas.separate_bytes(operator, 64, 64) and separate.source == "measured"
        assert blocks.value == formulas.one_pass_bytes(operator, 64, 64) == moved[operator, "compiled"].value
        assert blocks.source == "modelled" and separate.value > 2.8 * blocks.value
    assert [row.value for row in found if row.metric == "compile_time"] == [4.0] * len(formulas.OPERATORS)
    peaks = {(row.case["form"], row.case["way"]): row.value for row in found if row.metric == "peak_bytes" and "what" in row.case}
    assert len(peaks) == 6 and all(value > 0 for value in peaks.values())


def test_without_a_compiler_the_other_forms_are_measured(monkeypatch):
    monkeypatch.setattr(fusion, "compiler", lambda: None)
    options = SimpleNamespace(pairs=1, algorithms=["compiled", "separate"])
    rows = [row for row in fusion.rows(options, **TINY | {"lengths": ()}) if row.case["operator"] == "softmax"]
    assert {row.case["form"] for row in rows} == {"separate"}
    with pytest.raises(ValueError, match="no form 'fast'; there are separate, row blocks"):
        list(fusion.rows(SimpleNamespace(pairs=1, algorithms=["fast"])))


@pytest.mark.parametrize("operator", formulas.OPERATORS)
def test_a_wrong_result_is_not_ok(operator):
    case = fusion.Case(operator, 8, 32)
    form = case.forms["row blocks"]
    assert fusion.right(case, form)
    off = 10 * fusion.bound(32) * 16

    def wrong(*given):
        y = form(*given).clone()
        y.view(-1)[-1] += off
        return y

    assert not fusion.right(case, wrong)
