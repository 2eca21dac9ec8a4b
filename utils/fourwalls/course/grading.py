"""`start.py grade DIR --lab NAME`: from what was handed in to a gradebook, feedback and tables, in one command.

Each submission is read without trusting it, put back into the form of the release, judged in a box, and stored by nbgrader; only
then is it noted as done. So an interrupt, a crash or a full disk loses nothing that was noted, and the same command goes on.

    find -> read -> restore -> judge (in a box) -> nbgrader's gradebook and feedback -> note -> tables

Reference: labs/README.md, "From clone to grades".
"""

import contextlib
import errno
import hashlib
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nbgrader.utils import parse_utc
from tqdm import tqdm

from .box import Bounds
from .gradebook import Course, NotSaved
from .grades_csv import write_tables
from .judging import Judges
from .lab import LABS
from .mutants import source_of
from .release import student_copy
from .restore import restore
from .sandbox import MARK, Sandbox, library_without_answers, tidy
from .submissions import Submission, Unreadable, find, read
from .verdicts import GRADED, NOT_GRADED, Book, Verdict, version_of

__all__ = ["Grading", "Stopped"]


class Stopped(Exception):
    """The end before everything is graded: one sentence. What was graded so far is kept."""


@dataclass
class Grading:
    """One command. `Grading(root, folder, lab, ...).run()` gives the verdicts by student.

    root     the checkout
    folder   what was handed in (submissions.py tells how it may look)
    twist    the class's, as the student copies have it
    out      nbgrader's course directory; None: `graded` in `folder`
    workers  notebooks judged at a time; None: as many as cores, at most two
    again    also what was graded before
    """

    root: Path
    folder: Path
    lab: str
    twist: int | None = None
    out: Path | None = None
    workers: int | None = None
    again: bool = False
    bounds: Bounds = Bounds()
    say: Callable[[str], None] = print

    def run(self) -> dict[str, Verdict]:
        """Grade what is not graded yet. Raises Stopped where it cannot go on, KeyboardInterrupt when interrupted.

        Both leave the gradebook and the tables whole.
        """
        try:
            found = find(self.folder, self.lab)
            self._open()
        except (ValueError, NotSaved) as error:
            raise Stopped(str(error)) from None
        except OSError as error:
            raise Stopped(_trouble(error, self.folder)) from None
        with _alone(self.course.folder):
            self._go_on(found)
        return {one.student: self.book.verdicts[one.student] for one in found}

    def _go_on(self, found):
        todo = [one for one in found if self.again or not self._is_done(one)]
        if len(todo) < len(found):
            self.say(f"{len(found) - len(todo)} of {len(found)} are graded already")
        try:
            with _terminable():
                self._grade(todo)
        except OSError as error:
            raise Stopped(_trouble(error, self.course.folder)) from None
        finally:
            with _undisturbed():
                self._sum_up(found)

    def _open(self):
        self.release = student_copy(source_of(self.root, self.lab), twist=self.twist)
        self.course = Course(self.out or self.folder / "graded", self.lab, self.release)
        self.course.register()
        self.book = Book(self.course.folder / self.lab / "verdicts.jsonl")
        self.version = version_of(self.release, LABS[self.lab], self.twist)

    def _grade(self, todo):
        """Read, judge and keep each; what cannot be read first, since that costs nothing."""
        jobs = {}
        with tqdm(total=len(todo), unit="notebook", file=sys.stderr, mininterval=0.5, disable=not todo) as bar:
            for one in todo:
                verdict, notebook, notes = self._read(one)
                if verdict is None:
                    jobs[one.student] = one, notebook, notes
                else:
                    self._keep(verdict, one, None, bar)
            if not jobs:
                return
            with self._judges(len(jobs), bar) as judges:
                for verdict in judges.judge((student, notebook) for student, (_, notebook, _) in jobs.items()):
                    one, notebook, notes = jobs[verdict.student]
                    self._keep(replace(verdict, notes=[*one.notes, *notes, *verdict.notes]), one, notebook, bar)

    @contextlib.contextmanager
    def _judges(self, count, bar):
        tidy()
        problems = importlib.import_module(f".{LABS[self.lab]}", __package__).problems(self.twist)
        forbidden = {name for problem in problems.values() for name in problem.forbidden}
        with tempfile.TemporaryDirectory(prefix=f"{MARK}{os.getpid()}-", ignore_cleanup_errors=True) as name:
            place = Path(name)
            place.chmod(0o711)  # another user may pass through, and see nothing
            sandbox = Sandbox(place, library_without_answers(place / "library", forbidden), bounds=self.bounds)
            for line in sandbox.describe():
                bar.write(line, file=sys.stderr)
            workers = min(self.workers or min(2, os.cpu_count() or 1), count)
            try:
                with Judges(sandbox, self.lab, self.twist, workers) as judges:
                    yield judges
            finally:
                tidy()  # a worker that was ended leaves its control group

    def _read(self, one: Submission):
        """(the Verdict if there is nothing to judge, notebook, notes)."""
        if one.path is None:
            return Verdict(one.student, NOT_GRADED, one.reason, notes=list(one.notes)), None, ()
        try:
            return None, *restore(read(one.path), self.release)
        except Unreadable as error:
            return Verdict(one.student, NOT_GRADED, str(error), notes=list(one.notes)), None, ()

    def _keep(self, verdict, one, notebook, bar):
        """Into the gradebook, then into the book: in this order, so that what is noted is stored."""
        verdict = replace(verdict, number=one.number)
        if verdict.verdict == GRADED:
            try:
                self.course.save(verdict, notebook, _timestamp(one.path))
                verdict.key = _key(one.path, self.version)
            except NotSaved as error:
                verdict = Verdict(one.student, NOT_GRADED, str(error), notes=verdict.notes, number=one.number)
        if verdict.verdict != GRADED:
            self.course.save_nothing(verdict)
        self.book.add(verdict)
        bar.set_postfix_str(f"{verdict.student[:20]}: {verdict.verdict}", refresh=False)
        bar.update()

    def _is_done(self, one: Submission) -> bool:
        """Whether this very file was graded by this very version of the lab, and is in the gradebook."""
        before = self.book.verdicts.get(one.student)
        if before is None or before.verdict != GRADED or one.path is None:
            return False
        try:
            return before.key == _key(one.path, self.version) and self.course.has(one.student)
        except (OSError, NotSaved):
            return False

    def _sum_up(self, found):
        verdicts = [self.book.verdicts[one.student] for one in found if one.student in self.book.verdicts]
        not_graded = [v for v in verdicts if v.verdict != GRADED]
        self.say(f"{len(verdicts) - len(not_graded)} of {len(found)} graded, {len(not_graded)} not graded")
        for verdict in not_graded:
            self.say(f"  {verdict.student}: {verdict.reason}")
        if len(verdicts) < len(found):
            self.say(f"{len(found) - len(verdicts)} are still to be done: run the same command again")
        try:
            folder = self.course.folder / self.lab
            for path in write_tables(folder, self.lab, self.course.tasks(), self.book.verdicts, self.course.rows()):
                self.say(f"  {path}")
        except (OSError, NotSaved) as error:
            self.say(f"The tables could not be written: {error}")


def _key(path: Path, version: str) -> str:
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}-{version}"


def _timestamp(path: Path) -> str:
    """nbgrader's note of when it was handed in, if it lies beside the notebook."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        beside = path.with_name("timestamp.txt")
        if beside.is_file() and not beside.is_symlink() and beside.stat().st_size < 100:
            text = beside.read_text(encoding="utf-8").strip()
            parse_utc(text)  # what nbgrader cannot read would be no submission to it
            return text
    return ""


def _trouble(error: OSError, folder: Path) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    wrong = f"The disk that holds {folder} is full" if full else str(error)
    return f"{wrong}. What was graded before is kept; {'free some' if full else 'mend that'}, then run the same command again"


@contextlib.contextmanager
def _alone(folder: Path):
    """One grader at a time in a course directory. The system lets go of it with the process, however that ends."""
    with open(folder / ".grader", "w", encoding="utf-8") as lock:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stopped(f"another grader is at work in {folder}: wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks
        yield


@contextlib.contextmanager
def _terminable():
    """Being asked to end is like Ctrl-C: what is under way is given up, once, and what is done is kept."""

    def stop(*_):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # start.py and the terminal both send one
        raise KeyboardInterrupt

    with _handled({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield


@contextlib.contextmanager
def _undisturbed():
    """The tables are written to the end, however often Ctrl-C is pressed."""
    with _handled({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextlib.contextmanager
def _handled(handlers):
    """Other signal handlers for a while; only the main thread may have them."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if mine else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
