"""The schedule editor's scenes, and the static grid: the bad cell is marked, goals are judged, errors of ranks are shown."""

import json

import pytest

from fourwalls.viz.schedule_editor import GOALS, EditorBoard, schedule_editor
from fourwalls.viz.schedule_grid import grid_words, plot_schedule_grid

ONES = {"F": 1.0, "I": 1.0, "W": 1.0}


def read(text, times):
    """As much of a reader as the board looks at: "legal SLOTS PEAK", "bad", else no grid."""
    word, *numbers = text.split()
    if word == "bad":
        return {"cells": [["0F0"], ["1B3"]], "bad": (1, 0), "reason": "B3 on stage 1 needs B3 from stage 2"}
    if word != "legal":
        raise ValueError("line 1, cell 1: no action")
    slots, peak = map(float, numbers)
    shares = {"of_total": 0.25, "of_ideal": 1 / 3, "waits": [0.0]}
    sizes = {"stages": 4, "microbatches": 8, "cells": [["0F0"]] * 4, "times_equal": times == ONES}
    return {**shares, **sizes, "rows": [[("F", 0.0, 1.0, 0, 0)]], "live": [[(0.0, 1.0)]], "makespan": slots, "peaks": [peak]}


def load(name):
    return {"gpipe": "legal 33 8"}[name]


def run(text):
    if "27" in text:
        raise RuntimeError("rank 2 was lost")
    return "Ran on 4 ranks."


def board():
    return EditorBoard(read, load, {"gpipe": "GPipe"}, run)


@pytest.mark.parametrize(
    ("text", "reached"),
    [("40 8", 1), ("33 8", 2), ("30 5", 2), ("30 4", 3), ("27 5", 2), ("27 4", 4), ("27.5 4", 3)],
)
def test_goals(text, reached):
    text = f"legal {text}"
    scene = board().answer({"mode": "check", "text": text, "times": ONES, "guess": 30, "id": 2})
    assert scene["reached"] == [k < reached for k in range(len(GOALS))] and scene["checked"] and scene["id"] == 2
    assert scene["words"].startswith("Legal. ") and "You guessed 30: " + ("right" if " 30 " in text else "not") in scene["words"]
    assert json.dumps(scene)
    slow = board().answer({"mode": "check", "text": text, "times": {**ONES, "W": 0.5}})
    assert not any(slow["reached"]) and "The goals are for 4 ranks" in slow["words"]


def test_the_bad_cell_is_pointed_at():
    scene = board().answer({"mode": "check", "text": "bad"})
    assert scene["bad"] == [1, 0] and scene["cells"] == [["0F0"], ["1B3"]] and not any(scene["reached"]) and not scene["rows"]
    assert scene["words"] == "Not legal. Rank 1, cell 1: B3 on stage 1 needs B3 from stage 2."


def test_what_is_no_grid_and_what_ranks_raise_are_shown():
    assert board().answer({"mode": "check", "text": "x"})["error"] == "line 1, cell 1: no action"
    assert board().answer({"mode": "run", "text": "legal 33 8"})["words"].startswith("Ran on 4 ranks. Legal.")
    assert board().answer({"mode": "run", "text": "legal 27 8"})["error"] == "rank 2 was lost"
    assert board().answer({"mode": "run", "text": "bad"})["ran"] == "", "what is illegal does not run"
    assert "unknown" in board().answer({"mode": "load", "name": "unknown"})["error"]
    assert board().answer({"mode": "check", "text": "legal 1 1", "times": {"F": "x"}})["error"]


def test_a_loaded_schedule_hides_its_slots_until_it_is_checked():
    scene = board().answer({"mode": "load", "name": "gpipe"})
    assert scene["text"] == "legal 33 8" and not scene["checked"]
    assert EditorBoard(read, load, {}).answer({"mode": "check", "text": "legal 33 8"})["can_run"] is False


def test_words_without_a_front_end(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert schedule_editor(read, load, {"gpipe": "GPipe"}, run) is None
    assert "GPipe: Legal. 33 slots, holding at most 8." in capsys.readouterr().out


def patches(ax, start):
    return [p for p in ax.patches if str(p.get_gid()).startswith(start)]


def test_the_static_grid():
    ax = plot_schedule_grid([["0F0", "0F1", None, "0B0", "0B1"], ["1F0", "1F1+1B0", "1B1"]], mark=(1, 1), reason="why")
    assert len(patches(ax, "fw-cell-")) == 4 + 4 + 1 and len(patches(ax, "fw-cell-marked")) == 1
    edge = patches(ax, "fw-cell-marked")[0]
    assert edge.get_x() == pytest.approx(0.97) and edge.get_y() == pytest.approx(0.95)
    texts = {t.get_text() for t in ax.texts}
    assert {"F0", "F1", "B0", "B1"} <= texts and "why" in ax.get_xlabel()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["F  forward", "B  backward"]
    two = plot_schedule_grid([["0F0", "1F0", "1I0", "1W0", "0B0"]])
    assert {"0F0", "1I0", "1W0"} <= {t.get_text() for t in two.texts}
    assert grid_words([["0F0", None, "0B0"]]) == "1 ranks. Rank 0: 2 cells, 0F0 0B0."


def test_a_timeline_says_activations_where_it_counts_them():
    from fourwalls.ranks.trace import PS, Event, Trace
    from fourwalls.viz import plot_timeline

    live = [Event(0, "memory", "live", "activations", t, t, n) for t, n in ((0, 2.0), (PS, 0.0))]
    trace = Trace([Event(0, "compute", "input", "0I0", 0, PS, microbatch=0), *live])
    assert "peak 2 activations" in plot_timeline(trace, held="activations").get_xlabel()
    plain = plot_timeline(trace)
    assert "peak 2 B" in plain.get_xlabel() and "I0" in {t.get_text() for t in plain.texts}
