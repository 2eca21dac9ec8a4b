"""The bubble explorer's scenes: plain data, questions that give nothing away and are judged, goals, limits that hold."""

import json

import pytest

from fourwalls.viz import widgets
from fourwalls.viz.bubble_explorer import LIMITS, QUESTIONS, START, BubbleBoard, bubble_explorer, number_text

NAMES = {"gpipe": ("GPipe", False), "1f1b": ("1F1B", False), "interleaved": ("interleaved 1F1B", True)}


def model(setting):
    """Not a pipeline: as much of one as the board looks at. 1F1B holds p, and is slower by the link."""
    if setting["m"] == 13:
        raise ValueError("13 micro-batches are refused")
    m, p = setting["m"], setting["p"]
    each = setting["F"] + setting["I"] + setting["W"]
    link = setting["link"] * (10 if setting["schedule"] == "1f1b" else 2)
    slow = m * each * (setting["factor"] - 1) if setting["slow"] >= 0 else 0.0
    parts = {"work": m * each, "warm-up": (p - 1) * each, "imbalance": slow, "link": link}
    makespan = sum(parts.values())
    rows = [[("F", 0.0, setting["F"], r, 0), ("B", setting["F"], each, r, 0)] for r in range(p)]
    peaks = [p - r if setting["schedule"] == "1f1b" else m for r in range(p)]
    shares = {"of_total": 1 - m * each / makespan, "of_ideal": makespan / (m * each) - 1}
    return {
        "rows": rows, "live": [[(0.0, 1.0), (each, 0.0)]] * p, "makespan": makespan, "peaks": peaks, "waits": [1.0] * p,
        "parts": parts, **shares,
    }  # fmt: skip


def board():
    return BubbleBoard(model, NAMES)


def test_a_scene_is_plain_data_with_its_words():
    scene = board().answer({"mode": "explore", "setting": {"schedule": "1f1b", "link": 0.25, "cap": 3}, "id": 4})
    assert json.loads(json.dumps(scene))["id"] == 4 and scene["id"] == 4 and not scene["curtain"] and scene["error"] == ""
    assert scene["words"].startswith("1F1B: 35.5 long, holds 4 (most on rank 0). Bubble: 32.4% of total, 47.9% of ideal.")
    assert "Lost: warm-up 9, link 2.5." in scene["words"] and scene["words"].endswith("Over the cap of 3: 1 rank.")
    assert scene["setting"] == {**START, "schedule": "1f1b", "link": 0.25, "cap": 3}
    assert board().scene({"schedule": "1f1b", "cap": 4})["words"].endswith("All within the cap of 4.")


@pytest.mark.parametrize("point", range(len(QUESTIONS)))
def test_a_question_shows_only_what_was_before(point):
    scene = board().answer({"mode": "ask", "point": point})
    assert scene["curtain"] and scene["question"]["text"] == QUESTIONS[point].text and scene["verdict"] is None
    assert scene["setting"] == {**START, **QUESTIONS[point].before}
    answers = [board().answer({"mode": "answer", "point": point, "name": key}) for key in QUESTIONS[point].choices]
    assert [a["verdict"] for a in answers].count(True) == 1
    for answer, key in zip(answers, QUESTIONS[point].choices, strict=True):
        assert not answer["curtain"] and answer["before"]["setting"] == {**START, **QUESTIONS[point].before}
        assert answer["words"].startswith("Right" if answer["verdict"] else f"No, not “{QUESTIONS[point].choices[key]}”")


def test_the_answers_are_measured_and_not_written_down():
    right = {p: next(k for k in QUESTIONS[p].choices if board().judged(p, k)["verdict"]) for p in range(3)}
    assert right == {0: "c", 1: "d", 2: "c"}
    turned = BubbleBoard(lambda s: model({**s, "schedule": {"gpipe": "1f1b", "1f1b": "gpipe"}[s["schedule"]]}), NAMES)
    assert turned.judged(1, "d")["verdict"] is False and turned.judged(1, "a")["verdict"] is True


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"setting": {"schedule": "zb-q"}}, "one of gpipe"),
        ({"setting": {"q": 3}}, "not q"),
        ({"setting": {"p": "many"}}, "many"),
        ({"setting": {"m": 13}}, "13 micro-batches are refused"),
        ({"mode": "answer", "point": 0, "name": "z"}, "one of a, b, c, d"),
        ({"mode": "ask"}, "KeyError"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_scene_with_its_message(ask, says):
    scene = board().answer({**ask, "id": 9})
    assert says in scene["error"] and scene["id"] == 9 and json.dumps(scene)


def test_what_is_out_of_reach_is_brought_near():
    scene = board().scene({"p": 99, "m": 0, "F": 100, "link": -1, "slow": 15, "factor": 9})
    found = scene["setting"]
    assert (found["p"], found["m"], found["F"], found["link"], found["slow"], found["factor"]) == (16, 1, 4, 0, 15, 3)
    assert board().scene({"p": 3, "slow": 15})["setting"]["slow"] == 2 and LIMITS["p"] == (1, 16)


def test_numbers_are_short():
    assert [number_text(x) for x in (33.0, 34.5, 1 / 3, 1234.5678)] == ["33", "34.5", "0.3333", "1235"]


def test_without_a_front_end_the_questions_are_answered_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert bubble_explorer(model, NAMES) is None
    first, *lines = capsys.readouterr().out.splitlines()
    assert "in words" in first and len(lines) == len(QUESTIONS)
    assert all(" Before: " in line and " After: " in line for line in lines)


def test_the_kernel_answers_and_the_scripts_ask_for_nothing_outside():
    pytest.importorskip("anywidget")
    made = board()
    widget = widgets.widget_class("Bubble", "pipeline.js+bubble.js")(made, scene=made.answer({"mode": "ask", "point": 0}))
    widget.request = {"mode": "answer", "point": 0, "name": "c", "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["verdict"] is True
    assert "run this cell" in repr(widget)
    for name in ("pipeline.js", "bubble.js", "schedule.js"):
        text = (widgets.FRONT / name).read_text(encoding="utf-8")
        assert "http" not in text and "import " not in text
