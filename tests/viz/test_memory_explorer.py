"""The memory explorer's scenes: plain data, presets that say what papers say, questions, goals, requests that make no sense."""

import json

import pytest

import fourwalls as fw
from fourwalls.viz import memory_explorer as explorer
from fourwalls.viz import widgets
from fourwalls.viz.memory_explorer import LOOKS, QUESTIONS, TARGETS, MemoryBoard
from fourwalls.viz.memory_settings import OPTIONS, PRESETS, START, SWITCHES, read, tallest, training_of

BOARD = MemoryBoard()


def reached(**setting):
    return [k for k, is_there in enumerate(BOARD.scene(setting)["reached"]) if is_there]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_scene_with_its_words(name):
    scene = BOARD.answer({"mode": "preset", "name": name, "id": 3})
    assert json.loads(json.dumps(scene))["id"] == 3 and not scene["error"] and not scene["curtain"]
    assert len(scene["stages"]) == scene["setting"]["p"] and set(scene["stages"][0]) == set(LOOKS) == set(scene["parts"])
    totals = [sum(stage.values()) for stage in scene["stages"]]
    assert scene["total"] == max(totals) and scene["tall"] == totals.index(max(totals))
    assert f"stage {scene['tall']} is tallest" in scene["words"] and "Extra FLOPs" in scene["words"]
    assert scene["fits"] is (max(totals) <= scene["limit"]) is ("Everything fits" in scene["words"])
    assert read(PRESETS[name]) == scene["setting"], "a preset lies within what can be chosen"


def test_what_the_presets_are_for():
    """2.8 TB of states; ZeRO's 120 GB; GPT-3's tallest stage is the first (trial d08: the start shows what it is about)."""
    states = {name: dict(BOARD.scene(PRESETS[name])["table"])["states together"] for name in PRESETS}
    assert states["2.8 TB: GPT-3 on one card"] == "2.79 TB" and states["ZeRO's 7.5B on 64 ranks"] == "119 GB"
    scene = BOARD.scene({})
    assert scene["setting"] == START and scene["tall"] == 0 and not scene["fits"] and "3 of 8 stages do not fit" in scene["words"]
    assert "It does not fit into 16 GB" in BOARD.scene(PRESETS["BERT-Large on 16 GB"])["words"]


def test_logits_and_attention_kind_are_told_apart():
    last = BOARD.scene({})["stages"][-1]
    assert last["logits"] > 0 and BOARD.scene({})["stages"][0]["logits"] == 0
    core = 5 * 96 * 2048**2 // 8 * 12 * 8  # bytes of (s, s) matrices in flight on the first stage (trial i20)
    tiles = 4 * 96 * 2048 // 8 * 12 * 8
    assert tallest(START) - tallest({**START, "attention": "tiled"}) == core - tiles


@pytest.mark.parametrize("point", range(len(QUESTIONS)))
def test_a_question_shows_only_what_was_before(point):
    scene = BOARD.answer({"mode": "ask", "point": point})
    assert scene["curtain"] and scene["verdict"] is None and scene["setting"] == read(QUESTIONS[point].before)
    assert not any(scene["reached"]) and [name for _, name in scene["question"]["choices"]] == list(QUESTIONS[point].changes)
    answers = [BOARD.answer({"mode": "answer", "point": point, "name": letter}) for letter in "abcd"]
    assert [a["verdict"] for a in answers].count(True) == 1
    best = next(a for a in answers if a["verdict"])
    assert best["total"] == min(a["total"] for a in answers) < best["before"]["total"] and best["words"].startswith("Right: ")
    assert all(a["words"].startswith("No: ") for a in answers if a is not best)


def test_the_best_switch_turns_on_the_colour():
    right = [next(name for letter, name in zip("abcd", q.changes, strict=True) if BOARD.judged(k, letter)["verdict"])
             for k, q in enumerate(QUESTIONS)]  # fmt: skip
    assert right == ["selective recomputation", "ZeRO 1", "micro-batch 2 in place of 4"]
    fullest = [max((s := BOARD.curtain(k))["stages"][s["tall"]], key=s["stages"][s["tall"]].get) for k in range(3)]
    assert fullest == ["activations", "optimizer", "logits"]


def test_the_answers_are_computed_and_not_written_down(monkeypatch):
    twice = dict(zip(QUESTIONS[0].changes, [{"recompute": "full"}, *list(QUESTIONS[0].changes.values())[1:]], strict=True))
    monkeypatch.setattr(explorer, "QUESTIONS", (explorer.Question("other", {}, twice), *QUESTIONS[1:]))
    assert BOARD.judged(0, "a")["verdict"] is True and BOARD.judged(0, "b")["verdict"] is False


def test_the_goals_can_be_reached_and_not_by_the_way():
    assert reached() == [] and reached(recompute="full") == [], "full recomputation fits, and costs a third more FLOPs"
    assert reached(recompute="selective", sequence="gather again") == [0]
    assert reached(recompute="selective") == reached(attention="tiled") == [1], "either forgets the same matrices"
    assert (
        reached(sequence="gather again") == reached(zero=1) == reached(schedule="interleaved") == reached(sequence="keep") == []
    )
    assert 0 not in reached(precision="half", recompute="selective"), "numbers that do not train are no answer"
    bert = PRESETS["BERT-Large on 16 GB"] | {"batch": 16, "b": 16}
    assert reached(**bert) == [] and reached(**bert, attention="tiled") == reached(**bert, recompute="selective") == [2]
    zero = PRESETS["ZeRO's 7.5B on 64 ranks"]
    assert reached(**zero, attention="tiled") == [] and reached(**{**zero, "attention": "tiled", "zero": 2}) == [3]
    assert len(TARGETS) == 4 and set(SWITCHES) > set(QUESTIONS[0].changes) - {"x"}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"setting": {"t": 16, "model": "gpt2"}}, "cannot be shared"),
        ({"setting": {"q": 3}}, "not q"),
        ({"setting": {"t": 3}}, "t is 3; allowed: 1, 2, 4, 8, 16"),
        ({"setting": {"gated": 1}}, "gated is 1"),
        ({"setting": {"t": True}}, "t is True"),
        ({"setting": {"kv": 16, "model": "175B", "t": 1, "batch": 63}}, "batch is 63"),
        ({"mode": "preset", "name": "GPT-5"}, "one of GPT-3 on 64 A100s"),
        ({"mode": "answer", "point": 0, "name": "z"}, "one of a, b, c, d"),
        ({"mode": "ask"}, "KeyError"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_scene_with_its_message(ask, says):
    scene = BOARD.answer({"mode": "explore", **ask, "id": 9})
    assert says in scene["error"] and scene["id"] == 9 and scene["stages"] == [] and json.dumps(scene)


def test_every_option_can_be_turned_alone():
    """Each value of each control is a training, or is refused with what is legal."""
    for word, values in OPTIONS.items():
        for value in values:
            scene = BOARD.answer({"mode": "explore", "setting": {word: value}})
            assert scene["stages"] or "nearest" in scene["error"], (word, value, scene["error"])
    assert training_of({"gated": True}).shape.ff == 32768 and training_of({"kv": 8}).shape.kv_heads == 8


def test_without_a_front_end_presets_and_questions_are_said_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert fw.memory_explorer() is None
    first, *lines = capsys.readouterr().out.splitlines()
    assert "in words" in first and len(lines) == len(PRESETS) + len(QUESTIONS)
    assert lines[0].startswith("GPT-3 on 64 A100s: 175B on 64 ranks") and "adds 24.5 GB" in lines[-3]


def test_the_kernel_answers_and_the_scripts_ask_for_nothing_outside():
    pytest.importorskip("anywidget")
    widget = widgets.widget_class("Memory", "guessed.js+memory.js")(BOARD, scene=BOARD.answer({"mode": "ask", "point": 0}))
    before = repr(widget)
    widget.request = {"mode": "answer", "point": 0, "name": "b", "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["verdict"] is True and repr(widget) == before
    for name in ("guessed.js", "memory.js"):
        text = (widgets.FRONT / name).read_text(encoding="utf-8")
        assert "http" not in text and "import " not in text
