"""The rounding bench's scenes: plain data, questions that give nothing away and are judged, goals, and tensors of any kind."""

import json
import math

import pytest
import torch

from fourwalls.course.rounding_bench import Bench, rounding_bench
from fourwalls.numerics.formats import FORMATS
from fourwalls.numerics.rounding import lost
from fourwalls.viz import rounding_bench as board
from fourwalls.viz import widgets

FORMATS_SHOWN = [name for name in FORMATS if name not in ("fp32", "tf32")]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So many small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors():
    dice = torch.Generator().manual_seed(0)
    gradient = torch.randn(64, 64, generator=dice) * torch.exp(2 * torch.randn(64, 64, generator=dice)) * 1e-6
    weights = 0.1 * torch.randn(32, 64, generator=dice) * torch.exp(torch.randn(32, 64, generator=dice) / 2)
    outlier = torch.randn(512, 64, generator=dice)
    outlier[7] *= 60
    return {"gradient": gradient, "weights": weights, "outlier channel": outlier}


def loss(name, rounded):
    """Stands for a model that minds small weights more than large ones: another clip than the least RMS error."""
    if name != "weights":
        return None
    small = tensors()["weights"]
    return 1 + float(((rounded - small).abs() / (small.abs() + 0.01)).mean())


@pytest.fixture(scope="module")
def bench():
    return Bench(tensors(), loss)


@pytest.fixture(scope="module")
def made(bench):
    return board.RoundingBoard(bench.model, bench.best, bench.tensors, FORMATS_SHOWN)


def test_a_scene_is_plain_data_with_its_words(made):
    scene = made.answer(
        {"mode": "explore", "setting": {"tensor": "weights", "format": "int4", "scale": 3.1}, "loss": True, "id": 4}
    )
    assert json.loads(json.dumps(scene))["id"] == 4 and not scene["curtain"] and scene["error"] == ""
    assert scene["setting"]["scale"] == 3.0 and scene["words"].startswith("Weights in int4, scale 2^3: ")
    assert f"Loss of the model {scene['loss']:.4f}, unrounded 1.0000." in scene["words"] and scene["loss"] > 1
    assert sum(share for _, _, share, _ in scene["bins"]) == pytest.approx(1)
    quiet = made.answer({"mode": "explore", "setting": {"tensor": "weights"}})
    assert quiet["loss"] is None and "Loss of" not in quiet["words"] and quiet["base"] == 1


@pytest.mark.parametrize("point", range(3))
def test_a_question_shows_the_numbers_and_no_ticks(made, point):
    scene = made.answer({"mode": "ask", "point": point})
    assert scene["curtain"] and scene["question"]["text"] == board.QUESTIONS[point].text and scene["bins"]
    assert scene["ticks"] == [] and all(scene[word] is None for word in ("zero", "top", "underflowed", "clipped", "rms", "loss"))
    answers = [made.answer({"mode": "answer", "point": point, "name": key}) for key in board.QUESTIONS[point].choices]
    assert [a["verdict"] for a in answers].count(True) == 1
    assert all(a["words"].startswith("Right: " if a["verdict"] else "No, not “") for a in answers)
    assert all((a["before"] is not None) == bool(board.QUESTIONS[point].change) for a in answers)


def test_answers_are_measured(made):
    right = [next(k for k in board.QUESTIONS[p].choices if made.judged(p, k)["verdict"]) for p in range(3)]
    x = tensors()["gradient"]
    share = lost(x, "fp8_e5m2")["underflowed"]
    assert right == ["b" if share < 0.01 else "c" if share < 0.2 else "d", "c", "c"]
    huge = Bench({"gradient": x * 2.0**20}, None)
    other = board.RoundingBoard(huge.model, huge.best, ["gradient"], FORMATS_SHOWN)
    assert len(other.questions) == 1 and other.judged(0, "a")["verdict"] is True


@pytest.mark.parametrize("scale", [-4.0, 0.0, 6.0, 12.0])
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3", "int8"])
def test_counters_are_those_of_the_scaled_tensor(bench, format, scale):
    x = tensors()["weights"]
    found, want = (
        bench.counts({"tensor": "weights", "format": format, "scale": scale, "split": "tensor"}),
        lost(x * 2.0**scale, format),
    )
    assert (found["underflowed"], found["clipped"]) == (want["underflowed"], want["clipped"])
    own = float(x.double().square().mean().sqrt())
    assert found["rms"] == pytest.approx(want["rms"] / 2.0**scale / own, rel=1e-5, abs=1e-9)


def test_ticks_and_sides_move_against_the_scale(bench):
    at = [bench.model({"tensor": "weights", "format": "int4", "scale": k, "split": "tensor"}, False) for k in (0.0, 2.0)]
    assert [t - 2 for t in at[0]["ticks"]] == pytest.approx(at[1]["ticks"])
    assert at[0]["ticks"] == pytest.approx([math.log2(k) for k in range(1, 8)])
    assert (at[0]["zero"], at[0]["top"]) == (-1, math.log2(7)) and at[1]["zero"] == -3
    assert at[0]["bins"] == at[1]["bins"] and at[0]["span"] == at[1]["span"]
    many = bench.model({"tensor": "weights", "format": "fp16", "scale": 0.0, "split": "tensor"}, False)
    assert 5 < len(many["ticks"]) < 60 and all(t == round(t) for t in many["ticks"])


def test_units_reach_as_far_as_the_largest(bench):
    x = tensors()["outlier channel"]
    for split, shape in (("channel", (512, 1, 64)), ("group", (512, 2, 32))):
        seen = (x * bench.factors("outlier channel", split)).abs().view(shape).amax(2)
        assert torch.allclose(seen, x.abs().max().expand_as(seen), rtol=1e-6)
    assert (bench.factors("outlier channel", "tensor") == 1).all()
    odd = Bench({"weights": torch.tensor([[1.0] * 40, [0.0] * 40])})
    assert odd.factors("weights", "group").shape == (2, 40) and odd.factors("weights", "group").isfinite().all()


def test_goals_turn_green_and_not_by_themselves(made, bench):
    def reached(**setting):
        return made.scene(setting, loss=True)["reached"]

    assert reached(tensor="gradient", format="fp8_e5m2", scale=0) == [False] * 4
    good = [k for k in range(40) if reached(tensor="gradient", format="fp8_e5m2", scale=k)[0]]
    assert good and good == list(range(good[0], good[-1] + 1))
    least = bench.best({"tensor": "weights", "format": "int4", "split": "tensor"})
    assert reached(tensor="weights", format="int4", scale=least["scale"])[1:3] == [True, False]
    losses = {k / 4: made.scene({"tensor": "weights", "format": "int4", "scale": k / 4}, loss=True) for k in range(60)}
    best = min(losses, key=lambda k: losses[k]["loss"])
    assert best != least["scale"] and losses[best]["reached"][2] and losses[best]["loss"] == least["loss"]
    assert not made.scene({"tensor": "weights", "format": "int4", "scale": best}, loss=False)["reached"][2]  # not asked
    channel = bench.best({"tensor": "outlier channel", "format": "int8", "split": "channel"})["scale"]
    assert reached(tensor="outlier channel", format="int8", split="channel", scale=channel)[3]
    whole = bench.best({"tensor": "outlier channel", "format": "int8", "split": "tensor"})["scale"]
    assert not reached(tensor="outlier channel", format="int8", split="tensor", scale=whole)[3]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"setting": {"format": "fp32"}}, "one of bf16"),
        ({"setting": {"tensor": "bias"}}, "one of gradient"),
        ({"setting": {"zoom": 3}}, "not zoom"),
        ({"setting": {"scale": "much"}}, "much"),
        ({"mode": "answer", "point": 0, "name": "z"}, "one of a, b, c, d"),
        ({"mode": "ask"}, "KeyError"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_scene_with_its_message(made, ask, says):
    scene = made.answer({**ask, "id": 9})
    assert says in scene["error"] and scene["id"] == 9 and json.dumps(scene)


def test_what_is_out_of_reach_is_brought_near(made):
    assert made.scene({"scale": 99})["setting"]["scale"] == 40 and made.scene({"scale": -99})["setting"]["scale"] == -20
    assert [board.share_text(s) for s in (0, 0.123, 4e-5)] == ["none", "12.3%", "0.004%"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "got none"),
        ({"bias": torch.ones(2)}, "got \\['bias'\\]"),
        ({"weights": torch.ones(2, dtype=torch.int64)}, "float tensor"),
        ({"weights": torch.tensor([1.0, torch.nan])}, "finite"),
        ({"weights": torch.zeros(3)}, "all zeros"),
    ],
)
def test_tensors_that_cannot_be_shown_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        rounding_bench(given)


def test_without_a_front_end_the_questions_are_answered_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert rounding_bench(tensors(), loss) is None
    first, *lines = capsys.readouterr().out.splitlines()
    assert "in words" in first and len(lines) == 3 and all("RMS error" in line for line in lines)


def test_the_kernel_answers_and_the_script_asks_for_nothing_outside(made):
    pytest.importorskip("anywidget")
    widget = widgets.widget_class("Rounding", "guessed.js+rounding.js")(made, scene=made.answer({"mode": "ask", "point": 0}))
    widget.request = {"mode": "explore", "setting": {"tensor": "weights"}, "loss": True, "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["loss"] is not None and "run this cell" in repr(widget)
    text = (widgets.FRONT / "rounding.js").read_text(encoding="utf-8")
    assert "http" not in text and "import " not in text
