"""Widgets: a guess unlocks Run, Pin keeps a ghost, a stated goal turns green, one line says the state in words.

The kernel computes plain data (a scene), the front end draws it and steps through it alone, so a step costs no round trip and
what is shown goes on working when the kernel has stopped. With no front end the same is said in words, for each step.

    scene = f(setting)        picture = g(scene, step)

Reference: Bret Victor, "Explorable Explanations", 2011. The only file here that needs ipywidgets (by way of anywidget).
"""

import html
import json
import os
from pathlib import Path

from . import who_holds, words
from .show import show

try:
    import anywidget
    import traitlets
except ImportError:  # pictures and words still work
    anywidget = traitlets = None

__all__ = ["MISSING", "goal_of", "live", "scene_of", "stand", "theatre", "theatre_words", "widget_class"]

FRONT = Path(__file__).parent / "front"
MISSING = "The widget needs the packages anywidget and ipywidgets, which this kernel cannot import. The picture shows the same."
SLOW_FACTOR = 10


def live() -> bool:
    """Whether somebody may be there to press a button: a kernel started for a notebook by a front end, with widgets installed.

    Scripts, pytest, nbval and nbconvert are not live. The environment variable FOURWALLS_WIDGETS (1 or 0) overrides.
    """
    forced = os.environ.get("FOURWALLS_WIDGETS", "")
    if forced in ("0", "1"):
        return forced == "1" and anywidget is not None
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    opened = any(name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG"))
    return anywidget is not None and shell is not None and getattr(shell, "kernel", None) is not None and opened


def goal_of(history) -> dict:
    """The goal for this run as {"text", "step"}: the insight that it can show, and the step at which it is true (None: never)."""
    n = history.ranks

    def finished(row):
        return sum(who_holds.cell_state(cell, -2, n) == "finished" for cell in row)

    wrong = history.first_step(
        lambda after: any(who_holds.cell_state(c, r, n) == "wrong" for r, row in enumerate(after) for c in row)
    )
    if wrong is not None:
        return {"text": "stop at the first step after which a cell counts some rank twice.", "step": wrong}
    each = history.first_step(lambda after: all(finished(row) == 1 for row in after))
    if each is not None and history.cells > 1:
        return {
            "text": "stop at the step after which every rank owns exactly one finished chunk (the reduce-scatter is done).",
            "step": each,
        }
    first = history.first_step(lambda after: any(finished(row) == len(row) for row in after))
    if first is not None:
        return {"text": "stop at the first step after which one rank holds the whole result.", "step": first}
    return {"text": "this run never finishes a buffer; find out which cells stay incomplete.", "step": len(history.steps) - 1}


def step_words(history, k: int) -> str:
    """Step `k` in one or two sentences."""
    step, n, last = history.steps[k], history.ranks, len(history.steps) - 1
    cells = [(r, c, cell) for r, row in enumerate(step.after) for c, cell in enumerate(row)]
    states = [who_holds.cell_state(cell, r, n) for r, _, cell in cells]
    done, wrong = states.count("finished"), states.count("wrong")
    if k == 0:
        return f"At the start each of the {n} ranks holds its own part in {words.count_text(history.cells, 'chunk')}."
    said = [f"Step {k} of {last}, at {words.time_text(step.end)}:"]
    if len(step.messages) > 3:
        said.append(f"{len(step.messages)} messages of {words.bytes_text(step.messages[0].bytes)} arrive,")
    elif step.messages:
        said.append(", ".join(f"r{m.src} → r{m.dst} brings {words.bytes_text(m.bytes)}" for m in step.messages) + ";")
    said.append(f"{words.count_text(len(step.changed), 'cell')} change{'s' if len(step.changed) == 1 else ''};")
    said.append(f"{done} of {len(cells)} are finished" + (f", {wrong} wrong." if wrong else "."))
    if wrong:
        r, c, cell = next(row for row, state in zip(cells, states, strict=True) if state == "wrong")
        said.append(f"Rank {r}, chunk {c} holds {who_holds.cell_text(cell, n)}.")
    if k == last:
        said.append("All ranks hold the sum." if done == len(cells) else "The run is over, and the sum is not everywhere.")
    return " ".join(said)


def theatre_words(history) -> list[str]:
    """The whole run in words, a line for each step: the text alternative of the theatre."""
    return [step_words(history, k) for k in range(len(history.steps))]


def scene_of(history, *, algorithm: str, slow: str = "", number: int = 0) -> dict:
    """What the front end draws, as plain data: texts and states of all cells after every step, messages, goal, words."""
    n = history.ranks
    most, steps = max(history.bytes_sent(r) for r in range(n)), []
    for k, step in enumerate(history.steps):
        after = [
            [
                [who_holds.cell_text(cell, n, short=True), who_holds.cell_state(cell, r, n), who_holds.cell_text(cell, n)]
                for cell in row
            ]
            for r, row in enumerate(step.after)
        ]  # fmt: skip
        messages = [
            [
                m.src,
                m.dst,
                words.bytes_text(m.bytes),
                ", ".join(f"chunk {c}: {who_holds.cell_text(h, n)}" for c, h in m.carried) or "nothing known",
            ]
            for m in step.messages
        ]
        steps.append(
            {
                "time": words.time_text(step.end) if k else "0",
                "words": step_words(history, k),
                "changed": [list(place) for place in sorted(step.changed)],
                "messages": messages,
                "after": after,
            }
        )
    return {
        "id": number,
        "algorithm": algorithm,
        "ranks": n,
        "cells": history.cells,
        "slow": slow,
        "source": history.source,
        "steps": steps,
        "goal": goal_of(history),
        "total": f"{words.time_text(history.makespan)}, at most {words.bytes_text(most)} from a rank",
        "error": "",
    }


def error_scene(message: str, *, algorithm: str, ranks: int, slow: str, number: int) -> dict:
    """A scene for a run that failed: its message in place of the picture."""
    blank = {"time": "0", "words": "This run stopped with an error.", "changed": [], "messages": [], "after": []}
    return {
        "id": number, "algorithm": algorithm, "ranks": ranks, "cells": ranks, "slow": slow, "source": "modelled",
        "steps": [blank], "goal": {"text": "a run without an error.", "step": None}, "total": "", "error": message,
    }  # fmt: skip


class Stage:
    """The kernel's side of the theatre: from a setting to a scene. Each setting is run once and remembered."""

    def __init__(self, record, choices):
        self.record, self.choices, self._scenes = record, list(choices), {}

    def scene(self, algorithm: str, ranks: int, slow: str = "", number: int = 0) -> dict:
        """The scene of one setting; `slow` is "" or "0>1". A run that raises gives its message instead."""
        key = (algorithm, ranks, slow)
        if key not in self._scenes:
            try:
                if algorithm not in self.choices or not 2 <= ranks <= 8:
                    raise ValueError(f"algorithm {algorithm!r} with {ranks} ranks; choose one of {self.choices} and 2 to 8 ranks")
                src, _, dst = slow.partition(">")
                link = (
                    (int(src), int(dst), SLOW_FACTOR) if slow and int(dst) < ranks and int(src) < ranks and src != dst else None
                )
                self._scenes[key] = scene_of(self.record(algorithm, ranks, link), algorithm=algorithm, slow=slow if link else "")
            except Exception as error:  # the reader's own function may raise anything
                text = str(error) or type(error).__name__
                self._scenes[key] = error_scene(text, algorithm=algorithm, ranks=ranks, slow=slow, number=0)
        return {**self._scenes[key], "id": number}

    def answer(self, ask: dict) -> dict:
        """The scene for a request of the front end."""
        return self.scene(str(ask.get("algorithm")), int(ask.get("ranks", 4)), str(ask.get("slow", "")), int(ask.get("id", 0)))

    def title(self, scene: dict) -> str:
        """The same from run to run, and readable where no kernel runs."""
        return f"The message theatre ({scene['algorithm']}, {scene['ranks']} ranks): run this cell to get it back."


def _text_of(scene: dict, _widget) -> str:
    return json.dumps(scene, separators=(",", ":"))


def widget_class(name: str, script: str):
    """An anywidget class that draws with `script`: the kernel's side, `stage`, answers each request with a scene.

    script: a file of front/, or several joined by "+", which are read in that order.
    stage.answer(request) -> scene, with the request's id;  stage.title(scene) -> the plain twin of a saved output. A scene goes
    out as text: a nested one would be walked and copied several times over on its way, for each number in it. No echo is sent.
    """

    class Front(anywidget.AnyWidget):
        _esm = "".join((FRONT / one).read_text(encoding="utf-8") for one in ("frame.js", *script.split("+")))
        _css = (FRONT / "widgets.css").read_text(encoding="utf-8")
        choices = traitlets.List(traitlets.Unicode()).tag(sync=True)
        scene = traitlets.Dict().tag(sync=True, to_json=_text_of)
        request = traitlets.Dict().tag(sync=True, echo_update=False)

        def __init__(self, stage, **kwargs):
            self._stage = stage
            super().__init__(**kwargs)
            self.observe(self._answer, "request")

        def _answer(self, change):
            self.scene = self._stage.answer(change["new"])

        def __repr__(self):
            return self._stage.title(self.scene)

    Front.__name__ = Front.__qualname__ = name
    return Front


def _theatre_class():
    return widget_class("Theatre", "theatre.js")


def stand(stage, scene: dict, script: str, *, headings: tuple[str, str], lines: list[str], choices=()):
    """Put a widget on screen where somebody can press buttons, and its words under it, folded; else only the words. Returns the
    widget or None. headings: over the words where there is no widget, and where there is one.
    """
    if not live():
        _show_words(headings[0], lines)
        return None
    widget = widget_class(Path(script.rpartition("+")[2]).stem.title(), script)(stage, choices=list(choices), scene=scene)
    from IPython.display import display

    display(widget)
    _show_words(headings[1], lines)
    return widget


def theatre(record, choices, *, algorithm: str | None = None, ranks: int = 4):
    """Widget 1. Shows itself where somebody can press buttons, else says every step in words; returns the widget or None.

    record(name, ranks, slow_link) -> History;  choices: the names that `record` knows;  slow_link: (src, dst, factor) or None.
    """
    stage = Stage(record, choices)
    algorithm = stage.choices[0] if algorithm is None else algorithm
    scene = stage.scene(algorithm, ranks)
    if scene["error"]:
        print(scene["error"])
    what = f"{scene['algorithm']}, {words.count_text(scene['ranks'], 'rank')}"
    headings = (
        f"Message theatre, in words (run this notebook in JupyterLab to step through it yourself): {what}",
        f"The same in words, for when no kernel runs; to get the widget back, run this cell: {what}",
    )
    lines = [step["words"] for step in scene["steps"]]
    return stand(stage, scene, "theatre.js", headings=headings, lines=lines, choices=stage.choices)


def _show_words(heading: str, lines: list[str]) -> None:
    """A folded list as HTML, and the same as plain text."""
    body = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    markup = f'<details class="fw-words-list"><summary>{html.escape(heading)}</summary><ol start="0">{body}</ol></details>'
    show("\n".join([heading, *lines]), markup)
