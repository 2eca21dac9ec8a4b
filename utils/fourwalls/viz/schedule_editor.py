"""The schedule editor: type a schedule as a grid of actions, have it checked, timed, drawn, and run on real ranks.

The first illegal cell is outlined with the input that it misses. Four goals in a row lead from any legal schedule to one that has
no bubble but the unavoidable, within the memory of 1F1B: W is filler, and place is everything.

    text -> cells -> legal? -> slots and peak        goals at p = 4, m = 8, F = I = W: legal, 33, 30 with peak 4, 27 with peak 4

Reference: Qi et al. 2023 (arXiv:2401.10241), figures 2 and 3, for the last steps.
"""

from collections.abc import Callable, Mapping

from .bubble_explorer import number_text

__all__ = ["GOALS", "EditorBoard", "schedule_editor"]

SIZES = (4, 8)  # p, m of the goals
GOALS = (  # (text, most slots, most held)
    ("write any legal schedule for p = 4, m = 8.", None, None),
    ("at most 33 slots.", 33, None),
    ("at most 30 slots, holding at most 4.", 30, 4),
    ("at most 27 slots, holding at most 4.", 27, 4),
)
SAME = 1e-9


class EditorBoard:
    """The kernel's side.

    read(text, times) -> as the model of the bubble explorer, with "stages", "microbatches", "cells" (for each rank the texts of
    its cells) and "times_equal"; or {"cells", "bad": (rank, place), "reason"} for one that is illegal; ValueError: the text is no
    grid.  load(name) -> the text of a known schedule.  run(text) -> words, or None: not here.
    """

    def __init__(self, read: Callable, load: Callable, names: Mapping[str, str], run: Callable | None = None):
        self.read, self.load, self.names, self.run = read, load, dict(names), run

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "check", text, times, guess}, {mode: "load", name} or {mode: "run", text, times}."""
        number, text, times = ask.get("id", 0), str(ask.get("text", "")), ask.get("times") or {}
        try:
            times = {word: min(max(float(times.get(word, 1.0)), 0.25), 4.0) for word in ("F", "I", "W")}
            if ask.get("mode") == "load":
                return {**self.scene(self.load(str(ask["name"])), times), "checked": False, "id": number}
            scene = self.scene(text, times, guess=ask.get("guess"))
            if ask.get("mode") == "run" and not scene["bad"] and not scene["error"]:
                scene["ran"] = self.run(text) if self.run else "Running on ranks is not possible here."
                scene["words"] = f"{scene['ran']} {scene['words']}"
            return {**scene, "checked": True, "id": number}
        except Exception as error:  # ranks may raise anything
            said = str(error) or type(error).__name__
            frame = self._frame(text, ask.get("times") or {})
            return {**frame, "error": said, "words": "This did not work.", "checked": True, "id": number}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output."""
        return "The schedule editor: run this cell to get it back."

    def scene(self, text: str, times: Mapping, *, guess=None) -> dict:
        """What the front end draws: the timeline of a legal schedule, or the grid with the bad cell outlined."""
        frame = self._frame(text, times)
        try:
            found = self.read(text, times)
        except ValueError as error:
            return {**frame, "error": str(error), "words": "This is not a grid of actions yet."}
        if found.get("bad") is not None:
            rank, place = found["bad"]
            said = f"Not legal. Rank {rank}, cell {place + 1}: {found['reason']}."
            return {**frame, **found, "bad": [rank, place], "words": said}
        sizes = (found["stages"], found["microbatches"])
        slots, peak = found["makespan"], max(found["peaks"])
        said = f"Legal. {number_text(slots)} slots, holding at most {number_text(peak)}."
        said += f" Bubble: {found['of_total']:.1%} of total, {found['of_ideal']:.1%} of ideal."
        if guess is not None:
            said += f" You guessed {number_text(float(guess))}: {'right.' if abs(float(guess) - slots) < SAME else 'not quite.'}"
        fits = sizes == SIZES and len(found["cells"]) == SIZES[0] and found["times_equal"]
        if not fits:
            said += " The goals are for 4 ranks, 8 micro-batches and F = I = W = 1."
        limits = [(most or slots, held or peak) for _, most, held in GOALS]
        reached = [fits and slots <= most + SAME and peak <= held + SAME for most, held in limits]
        return {**frame, **found, "bad": None, "words": said, "reached": reached}

    def _frame(self, text: str, times: Mapping) -> dict:
        return {
            "text": text, "times": dict(times), "names": [[name, title] for name, title in self.names.items()],
            "goals": [goal for goal, _, _ in GOALS], "reached": [False] * len(GOALS), "source": "modelled", "rows": [],
            "cells": [], "bad": None, "error": "", "ran": "", "can_run": self.run is not None, "curtain": False, "checked": False,
        }  # fmt: skip


def schedule_editor(read: Callable, load: Callable, names: Mapping, run: Callable | None = None, *, start: str = "gpipe"):
    """Widget 5. Shows itself where somebody can press buttons, else says what known schedules reach; the widget or None."""
    from . import widgets

    board = EditorBoard(read, load, names, run)
    lines = []
    for name, title in board.names.items():
        lines.append(f"{title}: {board.scene(board.load(name), {'F': 1.0, 'I': 1.0, 'W': 1.0})['words']}")
    headings = (
        "Schedule editor, in words (run this notebook in JupyterLab to write one yourself)",
        "The same in words, for when no kernel runs; to get the widget back, run this cell",
    )
    first = board.answer({"mode": "load", "name": start})
    return widgets.stand(board, first, "pipeline.js+schedule.js", headings=headings, lines=lines)
