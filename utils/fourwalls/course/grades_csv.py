"""Writes the grades as tables: one that says everything, one for Canvas, one in Gradescope's form.

What nobody has decided is an empty field, in every file: a submission that was not graded, and a task that waits for a person.

    total = sum of the scores that are there,     open = points that a person has still to give

Reference: Canvas, lib/gradebook_importer.rb: "Student", "ID", "SIS User ID", "SIS Login ID", "Section", then assignments, and a
row "Points Possible"; a student is found by ID, then by SIS ids, then by name. Gradescope's export of an assignment's grades:
"First Name" ... "Status", then "1: question (4.0 pts)".
"""

import csv
import os
from pathlib import Path

from .gradebook import Row
from .verdicts import GRADED, Verdict

__all__ = ["write_tables"]


def write_tables(folder: Path, lab: str, tasks: dict, verdicts: dict[str, Verdict], rows: list[Row]) -> list[Path]:
    """Write grades.csv, grades_canvas.csv and grades_gradescope.csv into `folder`; their paths.

    tasks: cell -> (points, by hand?), in order. rows: what the gradebook has.
    """
    scores: dict[str, dict[str, float | None]] = {}
    for row in rows:
        scores.setdefault(row.student, {})[row.cell] = row.score
    people = [(verdicts[name], scores.get(name, {})) for name in sorted(verdicts)]
    most = sum(points for points, _ in tasks.values())
    whole = [["student", "verdict", "reason", *(_short(cell, lab) for cell in tasks), "total", "max", "open", "notes"]]
    canvas = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", f"{lab} (tests)", f"{lab} (by hand)"]]
    canvas.append(["    Points Possible", "", "", "", "", *(_sum(tasks, by_hand) for by_hand in (False, True))])
    head = ["First Name", "Last Name", "SID", "Email", "Total Score", "Max Points", "Status"]
    scope = [[*head, *(f"{k}: {_short(c, lab)} ({points:.1f} pts)" for k, (c, (points, _)) in enumerate(tasks.items(), 1))]]
    for verdict, got in people:
        graded = verdict.verdict == GRADED
        points = [got.get(cell) if graded else None for cell in tasks]
        known = [p for p in points if p is not None]
        waiting = sum(most for p, (most, _) in zip(points, tasks.values(), strict=True) if p is None)
        total = sum(known) if graded else None
        notes = "; ".join(verdict.notes)
        whole.append([verdict.student, verdict.verdict, verdict.reason, *points, total, most, waiting if graded else None, notes])
        name = verdict.student.removesuffix(f"_{verdict.number}") if verdict.number else verdict.student
        parts = [[p for p, (_, hand) in zip(points, tasks.values(), strict=True) if hand == by_hand] for by_hand in (False, True)]
        columns = [sum(part) if part and None not in part else None for part in parts]
        canvas.append([name, verdict.number, "", "" if verdict.number else name, "", *columns])
        status = "Ungraded" if not graded or waiting else "Graded"
        first, _, last = name.rpartition(" ")
        mail = name if "@" in name else ""
        scope.append([first, last, verdict.number or name, mail, total if not waiting else None, most, status, *points])
    files = {"grades.csv": whole, "grades_canvas.csv": canvas, "grades_gradescope.csv": scope}
    return [_write(folder / name, table) for name, table in files.items()]


def _short(cell: str, lab: str) -> str:
    return cell.removeprefix(f"{lab}-").removeprefix("check-")


def _sum(tasks, by_hand):
    return sum(points for points, hand in tasks.values() if hand == by_hand)


def _write(path, table):
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["" if value is None else _plain(value) for value in line] for line in table])
    os.replace(temporary, path)
    return path


def _plain(value):
    """Whole points without a fraction; a text that a spreadsheet would compute stays a text."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return f"{value:g}" if isinstance(value, float) else value
