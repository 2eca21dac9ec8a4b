"""Proves that a lab cannot be fooled: wrong and cheating solutions, each of which must fail at the check it is aimed at.

A mutant is a file in tests/labs/mutants/LAB/ that stands behind the reference solution, as one more cell, and replaces what it
defines. Its first line says where it is aimed: "aimed at: TASK: CHECK", the beginning of the check's name. The reference itself
must pass, and the copy without solutions must score nothing.

    a mutant is caught  <=>  its task scores 0, and the check that it is aimed at failed

Reference: DeMillo, Lipton, Sayward, "Hints on Test Data Selection", Computer 11 (1978): mutation testing.
"""

import importlib
import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .grade import Graded, grade_notebook
from .judge import Apart
from .lab import LABS
from .problem import apart_for
from .release import student_copy

__all__ = ["Row", "mutants_of", "print_table", "rows_of", "source_of", "started", "table"]

AIMED = re.compile(r'"""aimed at: (\w+): ([^."]+)')
TWIST = 7  # any class's ring would do; the plain one hides mistakes that cancel


@dataclass(frozen=True)
class Row:
    """One line of the table. caught: as it should be. said: the findings of the task by check, "ok" or the first words."""

    lab: str
    name: str
    task: str
    aim: str
    caught: bool
    said: dict[str, str]
    points: float


def mutants_of(root: Path, lab: str) -> list[Path]:
    """The files of a lab's mutants."""
    return sorted((root / "tests" / "labs" / "mutants" / lab).glob("*.py"))


def source_of(root: Path, lab: str) -> dict:
    """The lab's notebook with solutions."""
    return json.loads((root / "labs" / "source" / lab / f"{lab}.ipynb").read_text(encoding="utf-8"))


def table(root: Path, labs=None, *, workers: int = 2) -> list[Row]:
    """Every mutant of the labs (default: all), the reference and the unsolved copy of each, in `workers` processes."""
    shares = []
    for lab in labs or LABS:
        rows = [None, "unsolved", *mutants_of(root, lab)]
        shares += [(root, lab, rows[k::workers]) for k in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [row for share in pool.map(_share, shares) for row in share]
    return sorted(found, key=lambda row: (list(LABS).index(row.lab), row.name not in ("reference", "unsolved"), row.name))


def _share(share) -> list[Row]:
    root, lab, paths = share
    with started(lab) as base:
        return [row for path in paths for row in rows_of(root, lab, path, base)]


def started(lab: str) -> Apart:
    """A process for the lab's code with nothing loaded, to be copied."""
    return apart_for(importlib.import_module(f".{LABS[lab]}", __package__).problems().values())


def print_table(rows: list[Row]) -> int:
    """Print the table; the exit code: 0 if everything is as it should be."""
    for row in rows:
        checks = "; ".join(f"{name}: {said}" for name, said in row.said.items())
        print(f"{'ok ' if row.caught else 'NO '} {row.lab}/{row.name:24} {row.task:16} {row.points:g} points  {checks}")
    wrong = [row for row in rows if not row.caught]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be")
    return 1 if wrong or not rows else 0


def rows_of(root: Path, lab: str, path, base: Apart, *, whole: bool = True) -> list[Row]:
    """The rows of one mutant (a file), of "unsolved", or of the reference (None).

    whole: all checks are tried; else, of a mutant, none behind the one that it is aimed at. Whether it is caught is the same.
    """
    notebook = source_of(root, lab)
    if path is None:
        graded = grade_notebook(notebook, lab, twist=TWIST, reference=True, base=base)
        return [_row(lab, "reference", t, "", graded, right=True) for t in graded.reports] or [_lost(lab, "reference", graded)]
    if path == "unsolved":
        graded = grade_notebook(student_copy(notebook, twist=TWIST), lab, twist=TWIST, base=base)
        return [_row(lab, path, t, "", graded) for t in graded.reports] or [_lost(lab, path, graded)]
    text = path.read_text(encoding="utf-8")
    task, aim = AIMED.match(text).groups()
    notebook["cells"].append({"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None})
    graded = grade_notebook(notebook, lab, twist=TWIST, reference=True, only=task, until="" if whole else aim, base=base)
    return [_row(lab, path.stem, task, aim, graded)] if task in graded.reports else [_lost(lab, path.stem, graded)]


def _row(lab, name, task, aim, graded: Graded, *, right=False):
    report = graded.reports[task]
    said = {check.name: "ok" if finding.passed else _brief(finding.said) for check, finding in report.verdicts}
    aimed = [finding for check, finding in report.verdicts if check.name.startswith(aim)]
    caught = report.passed if right else report.points == 0 and bool(aimed) and not any(f.passed for f in aimed)
    return Row(lab, name, task, aim, caught, said, report.points)


def _lost(lab, name, graded):
    return Row(lab, name, "(none)", "", False, {"not graded": graded.reason}, 0)


def _brief(text: str) -> str:
    first = text.splitlines()[0] if text else "failed"
    return first if len(first) <= 60 else first[:57] + "..."
