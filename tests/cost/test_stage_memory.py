"""Memory by stage: sums against the papers' figures and the other formulas, stages in flight, what is sent, what is refused."""

from dataclasses import replace
from fractions import Fraction

import pytest

from fourwalls.cost.flops import iteration_flops
from fourwalls.cost.memory import layer_activations, training_memory
from fourwalls.cost.published import published
from fourwalls.cost.shape import MODELS, Shape
from fourwalls.cost.stage_memory import PARTS, Training, extra_flops, gated_width, stage_memory, stage_parameters, wire_bytes

GPT3 = Training(MODELS["175B"], 64, tp=8, pp=8)
SMALL = Shape(8, 64, 4, 32, 128)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("sequence", "regather"), [("gather again", True), ("keep", False)])
def test_the_first_stage_is_what_training_memory_says(recompute, sequence, regather):
    for pp, chunks in ((1, 1), (4, 1)):
        c = Training(MODELS["175B"], 64, 2, tp=8, pp=pp, sequence=sequence, recompute=recompute, dp=2, zero=1)
        bar = stage_memory(c, 0)
        again = bar["recomputed"].total if recompute != "none" else 0
        other = training_memory(
            c.shape, 2, dp=2, stage=1, tp=8, pp=pp, chunks=chunks, sequence_parallel=True, regather=regather, recompute=recompute
        )
        assert bar.total - again == other.total and {t.name for t in bar} <= set(PARTS)


@pytest.mark.parametrize("model", ["22B", "175B", "530B", "1T"])
def test_figure_1_of_korthikanti(model):
    """Activations of the first stage in GiB: none with tensor parallelism alone, and sequence + selective."""
    row = published("korthikanti2022_table3_configs").row(model=model)
    t, p, v = (int(row[word]) for word in ("tp", "pp", "interleave"))
    base = Training(
        MODELS[model], int(row["global_batch"]), int(row["micro_batch"]), tp=t, pp=p, dropout=True,
        schedule="interleaved" if v > 1 else "1f1b", chunks=max(v, 2),
    )  # fmt: skip
    figures = published("korthikanti_fig1_fig7_memory")
    for mode, change in (("none", {}), ("seqsel", {"sequence": "gather again", "recompute": "selective"})):
        c = base.turned(**change)
        held = 2 * p - 1 if c.looped else c.in_flight(0)
        mask = Fraction(c.microbatch * c.length * c.shape.width, t if c.sequence != "off" else 1) * held
        activations = stage_memory(c, 0)["activations"].total - mask
        assert activations / 2**30 == Fraction(figures.row(figure="fig1", model=model, mode=f"{mode}_activations")["value"])


def test_parameters_add_up_over_the_stages():
    """All stages together hold the model, and the last one a copy of the tied table."""
    shape = MODELS["175B"]
    whole = sum(stage_parameters(GPT3.turned(tp=1), k) for k in range(8))
    assert whole == shape.parameter_count + shape.vocabulary * shape.width
    untied = Training(replace(SMALL, tied=False), 8, pp=4)
    assert sum(stage_parameters(untied, k) for k in range(4)) == untied.shape.parameter_count
    assert stage_parameters(Training(SMALL, 8), 0) == SMALL.parameter_count


def test_zero_of_the_paper():
    """ZeRO's Table 1 at 64 ranks: 120, 31.4, 16.6 and 1.88 GB for 7.5e9 parameters; ours has a few less."""
    c = Training(MODELS["7.5B"], 64, dp=64)
    rows = published("zero_table1").row(dp="64")
    for stage, word in ((1, "7.5B_os"), (2, "7.5B_os_g"), (3, "7.5B_os_g_p")):
        bar = stage_memory(c.turned(zero=stage), 0)
        states = sum(bar[part].total for part in PARTS[:3]) * Fraction(7_500_000_000, c.shape.parameter_count)
        assert float(states) / 1e9 == pytest.approx(float(rows[word]), rel=0.005)
    assert stage_memory(GPT3.turned(tp=1, pp=1), 0).total > 2.79e12


def test_states_add_up_in_every_precision():
    for precision, each in (("fp32", 16), ("mixed", 16), ("mixed-fp32-gradients", 18), ("half", 8)):  # trial i10
        bar = stage_memory(Training(SMALL, 8, precision=precision), 0)
        assert sum(bar[part].total for part in PARTS[:3]) == each * SMALL.parameter_count


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_in_flight_are_the_simulators(schedule):
    from fourwalls.course.pipeline_widgets import model

    ones = {"F": 1.0, "I": 1.0, "W": 1.0, "link": 0.0, "slow": -1, "factor": 1.0, "cap": 0}
    found = model({"schedule": schedule, "p": 4, "m": 8, "v": 2, **ones})["peaks"]
    c = Training(SMALL, 8, pp=4, schedule=schedule, chunks=2)
    assert [c.in_flight(k) for k in range(4)] == pytest.approx(found)


def test_the_ends_are_a_colour_of_their_own():
    bar = stage_memory(GPT3, 7)
    assert "logits" not in stage_memory(GPT3, 0) and bar["logits"].total == 2048 * (4 * 12288 + 4 * 51200 // 8)
    assert stage_memory(GPT3.turned(schedule="gpipe"), 7)["logits"].total == 64 * bar["logits"].total
    again = stage_memory(GPT3.turned(recompute="full"), 0)["recomputed"].total
    assert again == layer_activations(GPT3.shape, 1, tp=8).total - 2 * 2048 * 12288


def test_doubling_the_batch_moves_only_activations_and_logits():
    one, two = (Training(SMALL, 8 * b, b) for b in (1, 2))  # trial i11
    for name in PARTS[:3]:
        assert stage_memory(one, 0)[name].total == stage_memory(two, 0)[name].total
    for name in ("activations", "logits"):
        assert 2 * stage_memory(one, 0)[name].total == stage_memory(two, 0)[name].total


def test_wire_bytes():
    whole = 2 * 2048 * 12288
    changes = {"t": {}, "again": {"sequence": "gather again"}, "keep": {"sequence": "keep"}, "full": {"recompute": "full"}}
    tensor = {name: wire_bytes(GPT3.turned(**change), 3)["tensor"] for name, change in changes.items()}
    assert tensor["t"] == 12 * 64 * 4 * 2 * Fraction(7, 8) * whole
    assert tensor["again"] == Fraction(5, 4) * tensor["t"] and tensor["keep"] == tensor["t"]
    assert tensor["full"] == Fraction(3, 2) * tensor["t"]
    pipeline = [wire_bytes(GPT3, k)["pipeline"] for k in (0, 3, 7)]
    assert pipeline == [64 * whole, 128 * whole, 64 * whole]
    assert wire_bytes(GPT3.turned(schedule="interleaved", chunks=3), 3)["pipeline"] == 3 * 128 * whole
    assert wire_bytes(GPT3.turned(sequence="keep"), 3)["pipeline"] == 16 * whole
    c = Training(SMALL, 64, dp=16)
    p, share = SMALL.parameter_count, Fraction(15, 16)
    assert [wire_bytes(c.turned(zero=z))["data"] for z in range(4)] == [share * p * 2 * n for n in (2, 2, 4 + 1, 4 + 2 * 4)], (
        "4 micro-batches: from stage 2 each is scattered, with stage 3 parameters are gathered twice for each"
    )
    assert wire_bytes(Training(SMALL, 8))["tensor"] == wire_bytes(Training(SMALL, 8))["data"] == 0


def test_extra_flops():
    assert extra_flops(GPT3) == 0
    selective = GPT3.turned(recompute="selective")
    assert extra_flops(selective) == float(
        iteration_flops(GPT3.shape, 64, recompute="selective") / iteration_flops(GPT3.shape, 64) - 1
    )
    assert 0.0089 < extra_flops(selective) < 0.0091 and 0.33 < extra_flops(GPT3.turned(recompute="full")) < 0.334
    assert extra_flops(GPT3.turned(flash=True)) == pytest.approx(extra_flops(selective) / 2), "tiles make the scores again"


def test_the_gate_that_costs_no_parameters():
    assert [gated_width(h) for h in (4096, 12288)] == [11008, 32768]
    gated = replace(MODELS["175B"], gated=True, ff=32768)
    assert gated.layer_parameters().total == pytest.approx(MODELS["175B"].layer_parameters().total, rel=1e-4)
    heads = stage_memory(GPT3.turned(shape=replace(MODELS["175B"], kv_heads=8)), 0)  # trial i05
    assert heads["activations"].total < stage_memory(GPT3, 0)["activations"].total


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 63, "microbatch": 2}, "batch 63 cannot be shared by dp x micro-batch 2; nearest legal batch: 62 or 64"),
        ({"pp": 7}, "layers 96 cannot be shared by stages 7"),
        ({"tp": 5}, "heads 96 cannot be shared by tp 5; nearest legal heads: 95 or 100"),
        ({"sequence": "keep", "length": 2047}, "length 2047 cannot be shared by tp 8"),
        ({"zero": 4}, "zero is 4; allowed: 0, 1, 2, 3"),
        ({"schedule": "1F1B"}, "schedule is '1F1B'; allowed: gpipe, 1f1b"),
        ({"precision": "bf16"}, "precision is 'bf16'"),
        ({"tp": 0}, "tp is 0; it is a whole number"),
    ],
)
def test_what_cannot_be(change, says):
    with pytest.raises(ValueError, match=says):
        GPT3.turned(**change)


def test_stages_and_groups_that_are_not():
    with pytest.raises(ValueError, match="stage 8 of 8; allowed: 0 to 7"):
        stage_memory(GPT3, 8)
    with pytest.raises(ValueError, match="whole groups of 8 micro-batches; there are 12, nearest: 8 or 16"):
        GPT3.turned(batch=12, schedule="interleaved").in_flight(0)
