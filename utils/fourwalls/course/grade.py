"""Grades one notebook of a lab: its cells are run apart, then each task is judged; the notebook's own checks say nothing.

A student's cells never run in the process that decides: they are loaded into the learner's process (judge.py), and the judge
calls the functions that they define. Test cells are not run at all, so what was done to them changes no grade.

    points of a task = those of its test cell if every check passes, else 0

Reference: nbgrader's autograde, whose place in the course this takes.
"""

import importlib
from dataclasses import dataclass

from .judge import Apart
from .lab import LABS
from .problem import Report, apart_for
from .stand_in import Failed

__all__ = ["Graded", "code_cells", "grade_notebook"]

CELLS_SECONDS = 60.0  # all cells of a notebook together


@dataclass(frozen=True)
class Graded:
    """One notebook: a Report for each task by name, or `reason` why there is none. errors: of cells, by their id."""

    reports: dict[str, Report]
    errors: dict[str, str]
    reason: str = ""


def code_cells(notebook: dict) -> list[tuple[str, str]]:
    """(id, source) of the cells to run: code, but no test cells. IPython's own lines (% and !) are left out."""
    found = []
    for k, cell in enumerate(notebook.get("cells", ())):
        mark = cell.get("metadata", {}).get("nbgrader", {})
        if cell.get("cell_type") == "code" and not (mark.get("grade") and not mark.get("solution")):
            source = "".join(cell["source"])
            kept = [line if not line.lstrip().startswith(("%", "!")) else "" for line in source.splitlines()]
            found.append((str(mark.get("grade_id") or cell.get("id") or f"cell-{k}"), "\n".join(kept)))
    return found


def grade_notebook(
    notebook: dict,
    lab: str,
    *,
    twist: int | None = None,
    reference: bool = False,
    only: str | None = None,
    base: Apart | None = None,
    **apart,
) -> Graded:
    """Judge every task of `lab` (or `only` that one) on a notebook (as nbformat has it).

    reference: it is our own solution, which may ask for the twist. base: a process of this lab with nothing loaded, to be copied
    for code of our own; else one is started with the options `apart` (paths, wrap).
    """
    problems = importlib.import_module(f".{LABS[lab]}", __package__).problems(twist)
    first = next(iter(problems.values()))
    cells = code_cells(notebook)
    with base.copy() if base is not None else apart_for(problems.values(), **apart) as made:
        try:
            said = made.load_cells(cells, limit=CELLS_SECONDS, reference=first.twist if reference else None)
        except Failed as failed:
            return Graded({}, {}, str(failed))
        errors = {name: text for (name, _), text in zip(cells, said, strict=True) if text}
        wanted = {name: problem for name, problem in problems.items() if only in (None, name)}
        return Graded({name: problem.judge(made) for name, problem in wanted.items()}, errors)
