"""Grades one notebook of a lab: its cells are run apart, then each task is judged; the notebook's own checks say nothing.

A student's cells never run in the process that decides: they are loaded into the learner's process (judge.py), and the judge
calls the functions that they define. Test cells are not run at all, so what was done to them changes no grade. A cell that never
ends is left out; a task that ends the process, or leaves others behind, costs itself alone: the next one gets a fresh process.

    points of a task = those of its test cell if every check passes, else 0

Reference: nbgrader's autograde, whose place in the course this takes.
"""

import ast
import contextlib
import importlib
import re
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from .judge import Apart
from .lab import LABS
from .problem import Finding, Problem, Report, apart_for
from .stand_in import Failed, Failure

__all__ = ["Graded", "code_cells", "grade_notebook"]

CELLS_SECONDS, CELL_SECONDS = 60.0, 30.0  # all cells of a notebook together, and one of them
MAGIC = re.compile(r"\s*([%!?]|[\w, .]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")  # %time, !ls, files = !ls, ?f, f??
MOST_LEFT_OUT = 2  # cells that never end
MOST_LEFT_BEHIND = 8  # processes that the cells may leave running: a pool of ranks is no attack


@dataclass(frozen=True)
class Graded:
    """One notebook: a Report for each task by name, or `reason` why there is none. errors: of cells, by their id.

    notes: what else happened in a task, by its name: ended from outside, not tried for want of time.
    """

    reports: dict[str, Report]
    errors: dict[str, str]
    reason: str = ""
    notes: dict[str, str] = field(default_factory=dict)


def code_cells(notebook: dict) -> list[tuple[str, str]]:
    """(id, source) of the cells to run: code, but no test cells. IPython's own lines (%, ! and ?) are left out."""
    found = []
    for k, cell in enumerate(notebook.get("cells", ())):
        mark = cell.get("metadata", {}).get("nbgrader", {})
        if cell.get("cell_type") == "code" and not (mark.get("grade") and not mark.get("solution")):
            name = str(mark.get("grade_id") or cell.get("id") or f"cell-{k}")
            found.append((name, _without_magics("".join(cell["source"]))))
    return found


def _without_magics(source: str) -> str:
    """What is Python stays as it is: its lines may begin with the % of a remainder. Elsewhere IPython's lines become `pass`."""
    try:
        ast.parse(source)
        return source
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        kept, inside = [], 0  # brackets that are open
    for line in source.splitlines():
        if not inside and MAGIC.match(line):
            line = line[: len(line) - len(line.lstrip())] + "pass"
        code = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", line)
        inside = max(0, inside + sum(code.count(c) for c in "([{") - sum(code.count(c) for c in ")]}"))
        kept.append(line)
    return "\n".join(kept)


def grade_notebook(
    notebook: dict,
    lab: str,
    *,
    twist: int | None = None,
    reference: bool = False,
    only: str | None = None,
    until: str = "",
    base: Apart | None = None,
    box=None,
    seconds: float = 600.0,
    **apart,
) -> Graded:
    """Judge every task of `lab` (or `only` that one) on a notebook (as nbformat has it), in at most about `seconds`.

    until: the last check to be tried (Problem.judge), where no more is to be known; a task that is cut short has no points.
    reference: it is our own solution, which may ask for the twist. base: a process of this lab with nothing loaded, to be copied
    for code of our own; else one is started with the options `apart` (paths, wrap). box: where it runs (sandbox.py), which tells
    what was ended from outside and what was left behind.
    """
    problems = importlib.import_module(f".{LABS[lab]}", __package__).problems(twist)
    twisted = next(iter(problems.values())).twist if reference else None
    start = base.copy if base is not None else partial(apart_for, problems.values(), **apart)
    end, reports, notes = time.monotonic() + seconds, {}, {}
    with _Learner(start, code_cells(notebook), twisted, box) as learner:
        watchdog = threading.Timer(seconds, learner.kill)
        watchdog.start()
        try:
            learner.begin()
            for name, problem in problems.items():
                if only in (None, name):
                    reports[name], notes[name] = _judged(problem, learner, end, seconds, until)
        except Failed as failed:
            return Graded({}, learner.errors, str(failed))
        finally:
            watchdog.cancel()
        return Graded(reports, learner.errors, notes={name: note for name, note in notes.items() if note})


def _judged(problem: Problem, learner: "_Learner", end: float, seconds: float, until: str = "") -> tuple[Report, str]:
    """The Report of one task, in a process that is sound; and what else is to be said."""
    late = f"the {seconds:g} s of this notebook were over"
    if time.monotonic() >= end:
        return _not_tried(problem, late), late
    try:
        learner.renew()
    except Failed as failed:
        return _not_tried(problem, f"the cells could not be run again: {failed}"), ""
    try:
        report = problem.judge(learner.apart, until=until)
    except Exception as error:  # what the other side says is not to be trusted: nonsense ends this task alone
        learner.end()
        return _not_tried(problem, f"the process with this code talked nonsense ({type(error).__name__})"), learner.news()
    return report, late if time.monotonic() >= end and not report.passed else learner.news()


def _not_tried(problem, why):
    return Report(problem, tuple((check, Finding(False, f"not tried: {why}")) for check in problem.checks))


class _Learner:
    """The process with a notebook's cells in it, started again when it is dead or no longer alone."""

    def __init__(self, start, cells, reference, box):
        self.start, self.cells, self.reference, self.box = start, cells, reference, box
        self.apart: Apart | None = None
        self.errors: dict[str, str] = {}
        self.usual = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def begin(self) -> None:
        """Run the cells. One that never ends is left out from then on. Raises Failed when that cannot be."""
        endless = 0
        while True:
            self.apart = self.start()
            stuck = self._load()
            if stuck is None:
                break
            endless += 1
            self.end()
            if endless > MOST_LEFT_OUT:
                raise _dead(f"{endless} cells never ended, the last of them {stuck}")
            self.cells = [cell for cell in self.cells if cell[0] != stuck]
        self.usual = self.box.size() if self.box else 0
        if self.usual > MOST_LEFT_BEHIND:
            raise _dead(f"its cells left {self.usual} processes running")

    def renew(self) -> None:
        """Start again and run the cells once more, if the process is dead or there are more of them than there were."""
        if self.apart is not None and self.apart.alive and not (self.box and self._crowded()):
            return
        self.end()
        self.begin()

    def news(self) -> str:
        """Why something was ended from outside, if it was."""
        return self.box.news() if self.box else ""

    def kill(self) -> None:
        """End it from another thread: whoever waits for it hears that it is dead."""
        if self.apart is not None:
            with contextlib.suppress(OSError):
                self.apart.kill()

    def end(self) -> None:
        """End the process and all that it has started."""
        if self.apart is not None:
            self.kill()
            if self.box:
                self.box.kill()
            self.apart.close()
            self.apart = None

    def _crowded(self):
        """Whether something is left behind. Ranks that were just ended may still be going."""
        deadline = time.monotonic() + 1.0
        while (more := self.box.size() > self.usual) and time.monotonic() < deadline:
            time.sleep(0.02)
        return more

    def _load(self):
        """Run the cells one after the other. The id of one that did not end, or None. Raises Failed when one ends the process."""
        over = time.monotonic() + CELLS_SECONDS
        for name, source in self.cells:
            limit = max(0.1, min(CELL_SECONDS, over - time.monotonic()))
            try:
                (said,) = self.apart.load_cells([(name, source)], limit=limit, reference=self.reference)
            except Failed as failed:
                if failed.failure.kind == "hang":
                    self.errors[name] = f"was still running after {limit:.0f} s and was left out"
                    return name
                raise _dead(f"{self.news() or 'the process ended'} in cell {name}") from None
            except Exception as error:
                raise _dead(f"the process talked nonsense ({type(error).__name__}) in cell {name}") from None
            if said:
                self.errors[name] = said
            else:
                self.errors.pop(name, None)
        return None


def _dead(text):
    return Failed(Failure("dead", f"dead kernel: {text}"))
