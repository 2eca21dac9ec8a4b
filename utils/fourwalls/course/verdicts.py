"""What grading one submission came to, as plain data: sent between processes, kept in a file, written into the gradebook.

    verdict = "graded" with points for each task, or "not graded" with the reason: never a zero that nobody can explain

Reference: labs/README.md, "What to do about each verdict".
"""

import base64
import hashlib
import io
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .grade import Graded

__all__ = ["GRADED", "NOT_GRADED", "Book", "Task", "Verdict", "verdict_of", "version_of"]

GRADED, NOT_GRADED = "graded", "not graded"
CHECKS = Path(__file__).resolve().parent
JUDGING = ("problem.py", "judge.py", "stand_in.py", "grade.py", "restore.py", "submissions.py", "carry.py", "drivers*.py")
JUDGING += ("expect.py", "arrivals.py", "probe.py", "process_memory.py", "lab_ring.py")
JUDGING += ("../ranks/apart.py", "../ranks/remote.py", "../ranks/plain.py")


@dataclass
class Task:
    """One task: points of `most`, the report in lines and as HTML, a picture of the learner's own run (PNG in base64), or ""."""

    points: float
    most: float
    lines: list[str]
    html: str = field(default="", repr=False)
    picture: str = field(default="", repr=False)


@dataclass
class Verdict:
    """One submission. key: hash of the file and version of the lab, by which a second run knows what is done already.

    reason, errors and notes hold what students wrote: no character in them acts on a terminal, or cannot be stored.
    """

    student: str
    verdict: str
    reason: str = ""
    tasks: dict[str, Task] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    number: str = ""
    key: str = ""
    seconds: float = 0.0

    def __post_init__(self):
        self.reason, self.notes = _printable(self.reason), [_printable(note) for note in self.notes]
        self.errors = {_printable(name): _printable(text) for name, text in self.errors.items()}


def verdict_of(student: str, graded: Graded, *, pictures: bool = True) -> Verdict:
    """The Verdict of what grade_notebook found. pictures: of the tasks that are not solved."""
    if graded.reason:
        return Verdict(student, NOT_GRADED, graded.reason, errors=graded.errors)
    tasks, notes = {}, []
    for name, report in graded.reports.items():
        note = graded.notes.get(name, "")
        lines = report.lines()
        if note:
            notes.append(f"{name}: {note}")
            lines.insert(-1, f"      {note}")
        picture = "" if report.passed or not pictures else _picture(report)
        tasks[name] = Task(float(report.points), float(report.problem.points), lines, report._repr_html_(), picture)
    notes += [f"cell {name}: {(text.splitlines() or [''])[-1][:160]}" for name, text in graded.errors.items()]
    return Verdict(student, GRADED, "", tasks, graded.errors, notes)


def version_of(release: dict, module: str, twist: int | None) -> str:
    """A short name for all that decides on the points of a submission: the lab, its checks (`module`), its twist, the judge."""
    files = sorted({path for form in (*JUDGING, f"{module}*.py") for path in CHECKS.glob(form)})
    parts = [json.dumps([release, twist], sort_keys=True).encode(), *(path.read_bytes() for path in files)]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


class Book:
    """The verdicts so far, in a file to which each is added when it is safe in the gradebook: one line of JSON each."""

    def __init__(self, path: Path):
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError, TypeError, KeyError):  # a last line that was cut off
                fields = json.loads(line)
                fields["tasks"] = {name: Task(**task) for name, task in fields["tasks"].items()}
                self.verdicts[fields["student"]] = Verdict(**fields)

    def add(self, verdict: Verdict) -> None:
        """Keep one more, on the disk too. Pictures and HTML stand in the feedback and are not kept twice."""
        fields = asdict(verdict)
        for task in fields["tasks"].values():
            task["html"] = task["picture"] = ""
        line = json.dumps(fields, ensure_ascii=False)
        with open(self.path, "a+b") as file:
            if file.tell() and (file.seek(-1, io.SEEK_END), file.read(1))[1] != b"\n":
                line = "\n" + line  # behind one that was cut off
            file.write((line + "\n").encode())
            file.flush()
        self.verdicts[verdict.student] = verdict


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _picture(report) -> str:
    """The learner's own run, or "" where it cannot be drawn: what they call their work may be anything."""
    with suppress(Exception):
        from matplotlib import pyplot

        axes = report.timeline()
        if axes is not None:
            drawn = io.BytesIO()
            axes.figure.savefig(drawn, format="png", dpi=80)
            pyplot.close(axes.figure)
            return base64.b64encode(drawn.getvalue()).decode()
    return ""
