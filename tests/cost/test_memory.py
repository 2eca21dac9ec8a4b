"""Bytes against the papers' tables, term by term."""

import dataclasses
from fractions import Fraction

import pytest

from fourwalls.cost.memory import (
    OPTIMIZERS,
    PRECISIONS,
    bytes_per_parameter,
    end_activations,
    inference_memory,
    interleave_factor,
    kv_cache,
    layer_activations,
    state_memory,
    training_memory,
)
from fourwalls.cost.published import published
from fourwalls.cost.shape import MODELS, Shape
from fourwalls.cost.units import gib

CONFIGS = published("korthikanti2022_table3_configs")
TABLE2 = {r["configuration"]: r["bytes_per_layer"] for r in published("korthikanti2022_table2_memory")}
FORMS = {
    "no parallelism": {},
    "tensor parallel (baseline)": {"tp": 8},
    "tensor + sequence parallel": {"tp": 8, "sequence_parallel": True},
    "tensor parallel + selective": {"tp": 8, "recompute": "selective"},
    "tensor + sequence + selective": {"tp": 8, "sequence_parallel": True, "recompute": "selective"},
    "full recompute": {"recompute": "full"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", CONFIGS.rows, ids=lambda r: r["model"])
def test_korthikanti_table_2(row, form):
    shape, b = MODELS[row["model"]], int(row["micro_batch"])
    names = {"s": Fraction(2048), "b": b, "h": shape.width, "a": shape.heads, "t": Fraction(FORMS[form].get("tp", 1))}
    printed = eval(TABLE2[form], {"__builtins__": {}}, names)  # the table's own formula
    assert layer_activations(shape, b, **FORMS[form]).total == printed


@pytest.mark.parametrize("row", CONFIGS.rows, ids=lambda r: r["model"])
def test_korthikanti_figure_1(row):
    """Every value exactly, in GiB."""
    shape, b, pp, v = MODELS[row["model"]], int(row["micro_batch"]), int(row["pp"]), int(row["interleave"])
    printed = {
        r["mode"]: float(r["value"])
        for r in published("korthikanti_fig1_fig7_memory")
        if r["figure"] == "fig1" and r["model"] == row["model"]
    }
    states = state_memory(12 * shape.layers * shape.width**2, precision="mixed-fp32-gradients").total / Fraction(8 * pp)
    often = shape.layers * interleave_factor(pp, v)
    baseline = layer_activations(shape, b, tp=8).times(often).total
    present = layer_activations(shape, b, tp=8, sequence_parallel=True, recompute="selective").times(often).total
    assert gib(states) == printed["none_params_opt"] == printed["seqsel_params_opt"]
    assert gib(baseline) == printed["none_activations"] and gib(present) == printed["seqsel_activations"]


@pytest.mark.parametrize("row", CONFIGS.rows, ids=lambda r: r["model"])
def test_korthikanti_figure_7(row):
    shape = MODELS[row["model"]]
    forms = {
        "none": {"tp": 8},
        "seq": FORMS["tensor + sequence parallel"],
        "sel": FORMS["tensor parallel + selective"],
        "seqsel": FORMS["tensor + sequence + selective"],
        "full": FORMS["full recompute"],
    }
    base = layer_activations(shape, 1, tp=8).total
    for r in published("korthikanti_fig1_fig7_memory"):
        if r["figure"] == "fig7" and r["model"] == row["model"]:
            assert float(100 * layer_activations(shape, 1, **forms[r["mode"]]).total / base) == pytest.approx(
                float(r["value"]), abs=0.15
            )


def test_kept_input_form():
    """34/t + 4 (1 - 1/t): 7.75 sbh at t = 8 instead of 4.25."""
    shape, sbh = MODELS["175B"], 2048 * 12288
    kept = layer_activations(shape, 1, tp=8, sequence_parallel=True, regather=False, recompute="selective").total
    assert kept == sbh * (Fraction(34, 8) + 4 * (1 - Fraction(1, 8))) == sbh * Fraction(31, 4)


ZERO_STAGES = {"os": 1, "os_g": 2, "os_g_p": 3}
CUT_NOT_ROUNDED = {
    # (ranks, column): the paper prints fewer than rounding gives
    ("64", "1T_os"): 4187.5,
    ("64", "1T_os_g"): 2218.75,
    ("256", "1T_os"): 4046.875,
    ("256", "1T_os_g"): 2054.6875,
    ("1024", "128B_os"): 513.5,
    ("1024", "128B_os_g"): 257.75,
    ("1024", "1T_os"): 4011.71875,
    ("1024", "1T_os_g"): 2013.671875,
}


def test_zero_table_1():
    """54 cells, each within one unit of its last printed digit; 46 are rounded half up, exactly these 8 are cut."""
    table = published("zero_table1")
    cut = {}
    for row in table:
        for column in table.columns[1:]:
            model, _, split = column.partition("_")
            size = {"7.5B": 7_500_000_000, "128B": 128 * 10**9, "1T": 10**12}[model]
            exact = Fraction(state_memory(size, dp=int(row["dp"]), stage=ZERO_STAGES[split]).total) / 10**9
            unit = Fraction(1, 10 ** len(row[column].partition(".")[2]))
            printed = Fraction(row[column])
            assert abs(exact - printed) < unit, (row["dp"], column)
            rounded = (exact / unit + Fraction(1, 2)).__floor__() * unit
            if rounded != printed:
                assert (exact / unit).__floor__() * unit == printed
                cut[row["dp"], column] = float(exact)
    assert cut == CUT_NOT_ROUNDED


def test_zero_7_billion_on_8_ranks():
    """Trial i08: 38.5, 26.25 and 14 GB, without multipliers."""
    assert [state_memory(7 * 10**9, dp=8, stage=k).total for k in range(4)] == [
        112 * 10**9,
        38_500_000_000,
        26_250_000_000,
        14 * 10**9,
    ]


def test_bytes_a_parameter():
    """Trials i10 and i13: the table adds up, and the optimiser matters."""
    totals = {(o, p): bytes_per_parameter(o, p).total for o in OPTIMIZERS for p in PRECISIONS}
    assert totals["adam", "mixed"] == 16 == totals["adam", "fp32"] and totals["adam", "mixed-fp32-gradients"] == 18
    assert totals["sgd", "mixed"] == 8 and totals["momentum", "mixed"] == 12 and totals["none", "mixed"] == 2
    assert totals["adam", "half"] == 8 and totals["sgd", "fp32"] == 8
    assert 16 * 175 * 10**9 == state_memory(175 * 10**9).total == 2_800_000_000_000  # 2.8 TB


def test_trial_i01_norms():
    layer = layer_activations(Shape(1, 4096, 32, 2048, 51200), 1)
    assert layer["norm inputs"].each == 2 * 2048 * 4096 and layer["norm inputs"].bytes == 4 * 2048 * 4096
    assert layer["norm inputs"].formula == "2sbh" and layer["norm inputs"].count == 2


def test_trial_i02_what_tensor_parallel_ranks_share():
    """Norms are on every rank, whole; the two ranks' parameters sum to the model and the copies."""
    shape = Shape(3, 8, 2, 4, 16, tied=False)
    two = shape.rank_parameters(2)
    assert two["norms"].total == shape.parameters()["norms"].total and two["last norm"].total == 16
    assert two["MLP down"].each == 8 * 32 // 2 + 8 and two["query, key, value"].each == 9 * 24 // 2
    copies = 3 * (4 * 8 + 2 * 8) + 4 * 8 + 16  # norms, two biases; positions; last norm
    assert 2 * two.total == shape.parameter_count + copies
    assert training_memory(shape, 1, tp=2)["momentum"].bytes == 4 * two.total
    first = shape.rank_parameters(2, 3)
    assert first.total == two.total - 2 * shape.layer_parameters(2).total - 16 - 16 * 8 // 2


def test_trial_i04_units_and_modes():
    shape = Shape(32, 4096, 32, 2048, 51200)
    assert layer_activations(shape, 1, recompute="selective").total == 34 * 2048 * 4096 == 285_212_672
    assert layer_activations(shape, 1).total / 1e9 == pytest.approx(0.956, abs=5e-4)
    assert not any("cache" in t.name for t in training_memory(shape, 1))
    assert inference_memory(shape, 1).total == 2 * shape.parameter_count + kv_cache(shape, 1).total


def test_trial_i05_grouped_queries():
    many = Shape(4, 8192, 64, 1024, 32000)
    few = dataclasses.replace(many, kv_heads=8)
    assert kv_cache(many, 3).total == 8 * kv_cache(few, 3).total
    assert layer_activations(many, 1)["key, value"].bytes == 8 * layer_activations(few, 1)["key, value"].bytes


def test_trial_i11_only_some_lines_grow_with_the_batch():
    shape = MODELS["gpt2"]
    one, two = training_memory(shape, 1), training_memory(shape, 2)
    states = {"weights", "gradients", "master weights", "momentum", "variance"}
    for a, b in zip(one, two, strict=True):
        assert b.bytes == (a.bytes if a.name in states else 2 * a.bytes), a.name
    assert "micro-batch 1" in one.title and "s=1024" in one.title and "mixed" in one.title


def test_trial_i20_attention_kind():
    shape = Shape(1, 1280, 20, 1024, 50257)
    plain, flash = layer_activations(shape, 1), layer_activations(shape, 1, flash=True)
    assert plain.total - flash.total == 5 * 20 * 1024**2 - 4 * 1024 * 20
    assert flash["log-sum-exp of scores"].bytes == 4 * 1024 * 20
    assert layer_activations(shape, 1, dropout=False)["softmax output"].bytes == 2 * 20 * 1024**2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage, dp", [(0, 1), (1, 3), (3, 8)])
def test_parts_sum_to_total(optimizer, precision, stage, dp):
    terms = training_memory(MODELS["bert-large"], 2, optimizer=optimizer, precision=precision, stage=stage, dp=dp, tp=2, pp=3)
    assert terms.total == sum(t.bytes for t in terms) == sum(t.each * t.count for t in terms)


def test_ends():
    """The table's line: sbhL/t (p/L + [p=1] 4/L (1 + v/h))."""
    shape, b, t = MODELS["22B"], 4, 8
    sbh = 2048 * b * shape.width
    assert end_activations(shape, b, tp=t).total == Fraction(sbh, t) * (1 + 4 * (1 + Fraction(51200, shape.width)))
    assert end_activations(shape, b, tp=t, pp=6).total == Fraction(sbh, t) * 6


def test_interleave_multiplier():
    """1 + (p - 1) / (p v); at p = 8: 1.4375 for v = 2."""
    assert interleave_factor(8, 2) == Fraction(23, 16) and interleave_factor(8) == 1


@pytest.mark.parametrize(
    "call, hint",
    [
        (lambda s: layer_activations(s, 1, tp=5), "tp: 4 or 6"),
        (lambda s: layer_activations(s, 1, tp=0), "at least 1"),
        (lambda s: layer_activations(s, 1, recompute="half"), "selective"),
        (lambda s: state_memory(5, stage=4), "0, 1, 2, 3"),
        (lambda s: state_memory(-5), "parameters is -5; it is a whole number of at least 0"),
        (lambda s: layer_activations(s, -1), "batch is -1"),
        (lambda s: layer_activations(s, 1.5), "batch is 1.5"),
        (lambda s: bytes_per_parameter("adagrad"), "momentum"),
        (lambda s: bytes_per_parameter("adam", "int4"), "fp32"),
        (lambda s: training_memory(s, 1, pp=5), "pp: 4 or 6"),
        (lambda s: training_memory(s, 1, tp=2), "vocabulary 50257 cannot be shared by tp 2"),
    ],
)
def test_bad_arguments(call, hint):
    with pytest.raises(ValueError, match=hint):
        call(MODELS["gpt2"])
