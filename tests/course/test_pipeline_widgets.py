"""The two pipeline widgets with real schedules: what their questions, goals and sources promise is true, and it is quick."""

import json

import pytest

from fourwalls.course.pipeline_widgets import _load, bubble_explorer, model, read, schedule_editor
from fourwalls.parallel.pipeline.actions import grid
from fourwalls.parallel.pipeline.catalogue import SCHEDULES, build
from fourwalls.viz.bubble_explorer import QUESTIONS, START, BubbleBoard
from fourwalls.viz.schedule_editor import EditorBoard

NAMES = {n: (e.title, e.chunks is None) for n, e in SCHEDULES.items() if not e.forward_only}
ONES = {"F": 1.0, "I": 1.0, "W": 1.0}


@pytest.fixture
def board():
    return BubbleBoard(model, NAMES)


def test_what_the_curriculum_says_about_the_bubble_explorer(board):
    """GPipe to 1F1B: only memory moves; a link: 1F1B falls behind, doubled recovers, live 4 -> 7; the slow stage's cost stays."""
    assert [board.judged(k, key)["verdict"] for k, key in enumerate("cdc")] == [True] * 3
    gpipe, one = board.scene({}), board.scene({"schedule": "1f1b"})
    assert gpipe["makespan"] == one["makespan"] == 33 and (max(gpipe["peaks"]), max(one["peaks"])) == (8, 4)
    slow = {name: board.scene({"schedule": name, "link": 0.25}) for name in ("gpipe", "1f1b", "1f1b-doubled")}
    assert [s["makespan"] for s in slow.values()] == [34.5, 37, 34.5]
    assert [max(s["peaks"]) for s in slow.values()] == [8, 4, 7]
    few, many = (board.scene({"schedule": "1f1b", "slow": 2, "m": m})["parts"] for m in (8, 64))
    assert many["imbalance"] / 64 >= few["imbalance"] / 8 > 0.5 and many["warm-up"] == few["warm-up"]


def test_the_goals_can_be_reached(board):
    assert board.scene({"schedule": "1f1b-doubled", "link": 0.25})["reached"] == [True, False, False]
    assert board.scene({"schedule": "fill", "cap": 4})["reached"] == [False, True, False]
    assert board.scene({"schedule": "1f1b", "slow": 2, "m": 64})["reached"] == [False, False, True]
    assert board.scene({})["reached"] == [False] * 3 and START["schedule"] == "gpipe"


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_draws_and_its_parts_add_up(board, name):
    setting = {"schedule": name, "link": 0.2, "slow": 1, "factor": 1.5, "p": 3, "m": 7}
    scene = board.answer({"mode": "explore", "setting": setting})
    assert not scene["error"] and len(scene["rows"]) == 3
    assert sum(scene["parts"].values()) == pytest.approx(scene["makespan"])
    for row, curve in zip(scene["rows"], scene["live"], strict=True):
        assert all(a[2] <= b[1] + 1e-9 for a, b in zip(row, row[1:], strict=False)) and curve[-1][1] == pytest.approx(0)
    busy = [sum(b - a for _, a, b, _, _ in row) for row in scene["rows"]]
    assert busy[1] == pytest.approx(1.5 * busy[0]) and busy[0] == pytest.approx(21), "the slow rank, and no other"


def test_what_a_schedule_refuses_is_said(board):
    scene = board.answer({"mode": "explore", "setting": {"schedule": "dualpipe-v", "p": 8, "m": 8}})
    assert "nearest legal: 16" in scene["error"] and scene["words"] == "This setting cannot be run."


def test_the_editor_and_its_ladder_of_goals():
    editor = EditorBoard(read, _load, {})
    reached = {}
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "fill"):
        scene = editor.answer({"mode": "check", "text": grid(build(name, 4, 8)), "times": ONES})
        reached[name] = sum(scene["reached"])
    assert reached == {"naive": 1, "gpipe": 2, "1f1b": 2, "zb-h1": 4, "fill": 4}
    schedule = build("1f1b", 4, 8)
    schedule[1].insert(1, schedule[1].pop())
    scene = editor.answer({"mode": "check", "text": grid(schedule), "times": ONES})
    assert scene["bad"] == [1, 1] and scene["words"].startswith("Not legal. Rank 1, cell 2: B7 on stage 1 needs B7 from stage 2;")
    assert all(sum(editor.answer({"mode": "check", "text": _load(name)})["reached"]) <= 2 for name in ("zb-v", "interleaved"))


def test_words_and_bad_arguments(project, capsys):
    assert bubble_explorer() is None and "GPipe" in capsys.readouterr().out
    assert schedule_editor() is None and "1F1B: Legal. 33 slots, holding at most 4." in capsys.readouterr().out
    with pytest.raises(ValueError, match="start is 'x'"):
        schedule_editor(start="x")
    with pytest.raises(ValueError, match="function of the schedule's text"):
        schedule_editor(3)


def test_a_change_is_answered_with_one_message_of_text(board):
    """16 x 64, 3072 actions: no echo, no second message, nothing nested that would be walked number by number on its way."""
    pytest.importorskip("anywidget")
    from fourwalls.viz import widgets

    widget = widgets.widget_class("Bubble", "pipeline.js+bubble.js")(board, scene=board.answer({"mode": "ask", "point": 0}))
    sent, setting = [], {"schedule": "fill", "p": 16, "m": 64, "cap": 4, "link": 0.25}
    widget._send = lambda message, buffers=None: sent.append(message)
    widget.set_state({"request": {"mode": "explore", "setting": setting, "id": 1}})
    assert [message["method"] for message in sent] == ["update"] and list(sent[0]["state"]) == ["scene"]
    text = sent[0]["state"]["scene"]
    assert isinstance(text, str) and json.loads(text) == json.loads(json.dumps(widget.scene, allow_nan=False))
    assert sum(map(len, widget.scene["rows"])) == 3 * 16 * 64 and len(text) < 100_000


@pytest.mark.measured
@pytest.mark.parametrize("name", NAMES)
def test_16_by_64_takes_less_than_100_ms(board, name):
    import time

    setting = {"schedule": name, "p": 16, "m": 64, "v": 2, "link": 0.1, "slow": 2}
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert not board.answer({"mode": "explore", "setting": setting})["error"] and QUESTIONS
        times.append(time.perf_counter() - begin)
    assert sorted(times)[2] < 0.1
