"""The theatre's scenes are true to the history, a run that fails is a scene too, and without a front end the words remain."""

import json
from types import SimpleNamespace

import pytest

from fourwalls.viz import widgets
from fourwalls.viz.widgets import Stage, goal_of, scene_of, theatre_words

FULL = {0: 1, 1: 1}


def history(*afters, name="canned"):
    """A history of 2 ranks and 2 cells from the cells after each step, a message r0 → r1 in each step."""
    steps, before = [], None
    for k, after in enumerate(afters):
        changed = (
            frozenset()
            if before is None
            else frozenset((r, c) for r in range(2) for c in range(2) if after[r][c] != before[r][c])
        )
        messages = (SimpleNamespace(src=0, dst=1, bytes=8, start=0, end=k, carried=((0, {0: 1}),)),) if k else ()
        steps.append(SimpleNamespace(end=k * 10**6, messages=messages, changed=changed, after=after))
        before = after
    out = SimpleNamespace(ranks=2, cells=2, name=name, source="modelled", steps=tuple(steps), makespan=steps[-1].end)
    out.bytes_sent = lambda rank=None: 8 * (len(steps) - 1) if rank in (None, 0) else 0
    out.first_step = lambda holds: next((k for k, s in enumerate(steps) if holds(s.after)), None)
    return out


START = (({0: 1}, {0: 1}), ({1: 1}, {1: 1}))
SCATTERED = ((FULL, {0: 1}), ({1: 1}, FULL))
DONE = ((FULL, FULL), (FULL, FULL))
WRONG = (({0: 1}, {0: 1}), ({0: 2, 1: 1}, {1: 1}))
ROOTED = ((FULL, FULL), ({1: 1}, {1: 1}))


def test_a_scene_is_plain_data_and_says_what_the_history_says():
    scene = scene_of(history(START, SCATTERED, DONE), algorithm="ring", slow="0>1", number=7)
    assert json.loads(json.dumps(scene)) == scene
    assert (scene["id"], scene["ranks"], scene["cells"], scene["slow"]) == (7, 2, 2, "0>1")
    assert scene["steps"][1]["after"][0] == [["r0+r1", "finished", "r0+r1"], ["r0", "own", "r0"]]
    assert scene["steps"][1]["changed"] == [[0, 0], [1, 1]]
    assert scene["steps"][1]["messages"] == [[0, 1, "8 B", "chunk 0: r0"]]
    assert scene["total"] == "2 µs, at most 16 B from a rank"


@pytest.mark.parametrize(
    ("afters", "step", "words"),
    [
        ((START, SCATTERED, DONE), 1, "exactly one finished chunk"),
        ((START, ROOTED, DONE), 1, "one rank holds the whole result"),
        ((START, WRONG), 1, "counts some rank twice"),
        ((START, START), 1, "never finishes"),
    ],
)
def test_the_goal_is_the_insight_that_this_run_can_show(afters, step, words):
    goal = goal_of(history(*afters))
    assert goal["step"] == step and words in goal["text"]


def test_words_for_each_step():
    lines = theatre_words(history(START, SCATTERED, DONE))
    assert lines[0] == "At the start each of the 2 ranks holds its own part in 2 chunks."
    assert lines[1] == "Step 1 of 2, at 1 µs: r0 → r1 brings 8 B; 2 cells change; 2 of 4 are finished."
    assert lines[2].endswith("4 of 4 are finished. All ranks hold the sum.")
    wrong = theatre_words(history(START, WRONG))[1]
    assert "1 cell changes; 0 of 4 are finished, 1 wrong. Rank 1, chunk 0 holds 2·r0+r1." in wrong and "not everywhere" in wrong


def test_a_stage_runs_each_setting_once_and_answers_with_the_number_asked():
    calls = []

    def record(*setting):
        calls.append(setting)
        return history(START, DONE)

    stage = Stage(record, ["ring"])
    assert stage.scene("ring", 2, "0>1", 1)["id"] == 1 and stage.scene("ring", 2, "0>1", 2)["id"] == 2
    assert calls == [("ring", 2, (0, 1, widgets.SLOW_FACTOR))]
    assert stage.scene("ring", 2, "6>7")["slow"] == "", "a link that these ranks do not have is no link"


@pytest.mark.parametrize(
    ("algorithm", "ranks", "words"), [("ring", 2, "mine"), ("other", 2, "choose one of"), ("ring", 99, "2 to 8 ranks")]
)
def test_a_run_that_fails_is_a_scene_with_its_message(algorithm, ranks, words):
    def record(*setting):
        raise RuntimeError("mine: rank 1 waits")

    scene = Stage(record, ["ring"]).scene(algorithm, ranks)
    assert words in scene["error"] and len(scene["steps"]) == 1 and scene["goal"]["step"] is None


def test_without_a_front_end_every_step_is_said_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert widgets.theatre(lambda *_: history(START, SCATTERED, DONE), ["ring"], ranks=2) is None
    out = capsys.readouterr().out
    assert out.count("Step ") == 2 and "All ranks hold the sum." in out and "ring, 2 ranks" in out


def test_nobody_can_press_a_button_in_a_test(monkeypatch):
    monkeypatch.delenv("FOURWALLS_WIDGETS", raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    assert not widgets.live(), "no kernel, whatever the environment says"
    monkeypatch.setenv("FOURWALLS_WIDGETS", "1")
    assert widgets.live() == (widgets.anywidget is not None)
    monkeypatch.setattr(widgets, "anywidget", None)
    assert not widgets.live(), "nothing to draw with"


def test_the_kernel_answers_a_request_with_a_new_scene():
    pytest.importorskip("anywidget")
    seen = []

    def record(name, ranks, link):
        seen.append((name, ranks, link))
        return history(START, DONE, name=name)

    stage = Stage(record, ["ring", "star"])
    widget = widgets._theatre_class()(stage, choices=stage.choices, scene=stage.scene("ring", 2))
    widget.request = {"algorithm": "star", "ranks": 2, "slow": "1>0", "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["algorithm"] == "star"
    assert seen[-1] == ("star", 2, (1, 0, widgets.SLOW_FACTOR))
    assert repr(widget) == "The message theatre (star, 2 ranks): run this cell to get it back.", (
        "the plain twin of a saved output must not change from run to run"
    )


def test_the_front_end_needs_no_network():
    for name in ("frame.js", "theatre.js", "widgets.css"):
        text = (widgets.FRONT / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text and "import " not in text and "@import" not in text, name
