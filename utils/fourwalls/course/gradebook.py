"""nbgrader's course directory: its autograding, database and feedback, for one lab and as many students as there are.

    graded/gradebook.db   source/LAB   submitted/STUDENT/LAB   autograded/STUDENT/LAB   feedback/STUDENT/LAB

The database is nbgrader's own, so that its formgrader opens it for what is graded by hand. Every submission passes nbgrader's
converter and its preprocessors; only Execute is replaced (nbgrader_preprocessor.py).

    row in the database = (student, cell) -> score of the judge, or nothing where a person has to look

Reference: nbgrader documentation, "The command line tools" and "API"; nbgrader 0.9, converters/autograde.py.
"""

import errno
import html
import json
import logging
import os
import re
import shutil
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nbgrader.api import Gradebook, InvalidEntry, MissingEntry
from nbgrader.converters import Autograde, GenerateAssignment, GenerateFeedback
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import (
    AssignLatePenalties,
    CheckCellMetadata,
    ClearOutput,
    ComputeChecksums,
    IgnorePattern,
    LimitOutput,
    LockCells,
    SaveAutoGrades,
    SaveCells,
)
from sqlalchemy.exc import SQLAlchemyError

from .nbgrader_preprocessor import JudgedCells
from .verdicts import Verdict

__all__ = ["Course", "NotSaved", "Row"]

# A notebook is somebody else's: what it would load or run in the reader's browser, it does not.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:; form-action 'none'; base-uri 'none'"


class NotSaved(Exception):
    """nbgrader or the disk did not take it. The text is for the teacher."""


@dataclass(frozen=True)
class Row:
    """One cell of one student in the database. score: None where nobody has decided yet; by_hand: whether a person decides."""

    student: str
    cell: str
    score: float | None
    most: float
    by_hand: bool


class Course:
    """The course directory `folder` and one lab in it. release: the student copy of the lab, which is what was handed out."""

    def __init__(self, folder: Path, lab: str, release: dict):
        self.folder, self.lab, self.release = folder.resolve(), lab, release
        self.directory = CourseDirectory(root=str(self.folder), assignment_id=lab)

    def register(self) -> None:
        """Tell the database of the lab's cells. Raises NotSaved where it knows another lab of this name."""
        for part in ("source", "submitted", "autograded", "feedback", self.lab):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.release, indent=1, ensure_ascii=False)
        path = self.folder / "source" / self.lab / f"{self.lab}.ipynb"
        if path.exists() and path.read_text(encoding="utf-8") == text and self._known():
            return
        _write(path, text)
        maker = _Assign(coursedir=self.directory)
        maker.only = os.path.join(self.folder, "source", ".", self.lab)
        maker.force, maker.create_assignment = True, True
        maker.preprocessors = [LockCells, ClearOutput, CheckCellMetadata, ComputeChecksums, SaveCells, CheckCellMetadata]
        with self._logged("the lab"), _tools_found():
            maker.start()

    def save(self, verdict: Verdict, notebook: dict, timestamp: str = "") -> None:
        """Autograde a student's notebook with the judge's verdict, and make the feedback. Raises NotSaved."""
        self._forget_files(verdict.student)
        place = self.folder / "submitted" / verdict.student / self.lab
        _write(place / f"{self.lab}.ipynb", json.dumps(notebook, indent=1, ensure_ascii=False))
        if timestamp:
            _write(place / "timestamp.txt", timestamp)
        grader = _Autograde(coursedir=self.directory)
        grader.only, grader.force = str(place), True
        grader.autograde_preprocessors = [
            JudgedCells(verdict, notebook),
            IgnorePattern,
            LimitOutput,
            SaveAutoGrades,
            AssignLatePenalties,
            CheckCellMetadata,
        ]
        with self._logged(verdict.student):
            grader.start()
            self._check(verdict)
            teller = _Feedback(coursedir=self.directory)
            teller.only, teller.force = str(self._autograded(verdict.student).parent), True
            teller.start()

    def save_nothing(self, verdict: Verdict) -> None:
        """Note a submission that was not graded: no score in the database, a person has to look, and feedback with the reason."""
        with self._logged(verdict.student):
            self._forget_files(verdict.student)
            with self._open() as book:
                book.update_or_create_student(verdict.student)
                submission = book.update_or_create_submission(self.lab, verdict.student)
                for notebook in submission.notebooks:
                    notebook.flagged = True
                    for grade in notebook.grades:
                        grade.auto_score, grade.needs_manual_grade = None, True
                book.db.commit()
            words = [f"{self.lab}: not graded", verdict.reason, *verdict.notes]
            body = "".join(f"<p>{html.escape(word)}</p>" for word in words)
            page = f'<!DOCTYPE html><html><head>{_policy()}<meta charset="utf-8"><title>{html.escape(words[0])}</title></head>'
            place = self.folder / "feedback" / verdict.student / self.lab
            _write(place / f"{self.lab}.html", f"{page}<body>{body}</body></html>")

    def has(self, student: str) -> bool:
        """Whether the database has a score for every cell of this student's that no person has to grade."""
        try:
            with self._logged(student), self._open() as book:
                rows = _rows(book, self.lab, student)
        except MissingEntry:
            return False
        return bool(rows) and all(row.score is not None or row.by_hand for row in rows)

    def rows(self) -> list[Row]:
        """All cells of all students. Raises NotSaved where the database cannot be read."""
        with self._logged("a question"), self._open() as book:
            students = [submission.student.id for submission in book.assignment_submissions(self.lab)]
            return [row for student in students for row in _rows(book, self.lab, student)]

    def tasks(self) -> dict[str, tuple[float, bool]]:
        """cell -> (points, whether a person decides), in the order of the lab."""
        marks = [cell["metadata"].get("nbgrader", {}) for cell in self.release["cells"]]
        return {m["grade_id"]: (float(m["points"]), bool(m.get("solution"))) for m in marks if m.get("grade")}

    def _check(self, verdict):
        """What nbgrader stored is what the judge said."""
        scores = {}
        for cell in json.loads(self._autograded(verdict.student).read_text(encoding="utf-8"))["cells"]:
            if "fourwalls" in cell["metadata"]:
                scores[cell["metadata"]["nbgrader"]["grade_id"]] = cell["metadata"]["fourwalls"]["points"]
        with self._open() as book:
            stored = {row.cell: row.score for row in _rows(book, self.lab, verdict.student, auto=True) if not row.by_hand}
        if stored != scores or sum(scores.values()) != sum(task.points for task in verdict.tasks.values()):
            raise NotSaved(f"the gradebook has {stored} for {verdict.student}, the judge said {scores}")

    def _autograded(self, student):
        return self.folder / "autograded" / student / self.lab / f"{self.lab}.ipynb"

    def _forget_files(self, student):
        """Remove what an earlier submission of this student has left."""
        for part in ("submitted", "autograded", "feedback"):
            shutil.rmtree(self.folder / part / student / self.lab, ignore_errors=True)

    def _known(self):
        with self._open() as book:
            try:
                return bool(book.find_notebook(self.lab, self.lab))
            except MissingEntry:
                return False

    @contextmanager
    def _open(self):
        with _tools_found(), Gradebook(self.directory.db_url) as book:
            yield book

    @contextmanager
    def _logged(self, what):
        """nbgrader's words go to a file; what it cannot do becomes NotSaved, and a full disk OSError."""
        log, words = logging.getLogger("traitlets"), _Words(self.folder / self.lab / "nbgrader.log")
        log.addHandler(words)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what nbgrader uses: no teacher can mend them
                yield
        except (NbGraderException, InvalidEntry, SQLAlchemyError) as error:
            said = f"{error} {words.last}"
            if "No space left" in said or "disk is full" in said or "Disk quota" in said:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise NotSaved(f"nbgrader did not take {what} (its words: {words.path}): {words.last or error}"[:400]) from None
        finally:
            log.removeHandler(words)


class _Words(logging.Handler):
    """Keeps nbgrader's warnings in a file, and the last error. A file that cannot be written is no reason to stop."""

    def __init__(self, path):
        super().__init__(logging.WARNING)
        self.path, self.last = path, ""

    def emit(self, record):
        text = record.getMessage()
        if record.levelno >= logging.ERROR and not text.startswith(("There was an error processing", "Please see")):
            self.last = text.strip().rpartition("\n")[2][:200] or self.last
        with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{record.levelname} {text}\n")


class _One:
    """A converter that works on one folder, whatever stands in the names: nbgrader's own looks for them as patterns."""

    only: str

    def init_notebooks(self):
        self.assignments = {self.only: [f"{self.only}{os.sep}{self.coursedir.assignment_id}.ipynb"]}


class _Autograde(_One, Autograde):
    pass


class _Assign(_One, GenerateAssignment):
    pass


class _Feedback(_One, GenerateFeedback):
    def write_single_notebook(self, output, resources):
        head, end, body = output.partition("</head>")
        body = re.sub(r"<(?=\s*(?:meta|base|link)\b)", "&lt;", body, flags=re.I)  # a student's, for which no policy stands
        super().write_single_notebook(head.replace("<head>", f"<head>{_policy()}", 1) + end + body, resources)


def _policy():
    return f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def _rows(book, lab, student, *, auto=False):
    found = []
    for notebook in book.find_submission(lab, student).notebooks:
        for grade in notebook.grades:
            score = grade.auto_score if auto or grade.manual_score is None else grade.manual_score
            extra = 0 if auto or score is None else grade.extra_credit or 0
            by_hand = grade.cell.cell_type != "code"
            found.append(Row(student, grade.name, None if score is None else score + extra, grade.max_score, by_hand))
    return found


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def _tools_found():
    """nbgrader calls alembic by name when it makes a database: look for it beside this Python first."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + before
    try:
        yield
    finally:
        os.environ["PATH"] = before
