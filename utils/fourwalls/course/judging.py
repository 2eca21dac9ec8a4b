"""Judges many notebooks at a time, each in a process that is not the one that keeps the grades.

A worker is started afresh, imports torch once, and judges one notebook after another, each in a box (sandbox.py). One that dies
or does not come back costs one notebook, which is then not graded, with the reason; another takes its place.

    verdicts arrive as they are ready,     at most `workers` at work

Reference: Python documentation, multiprocessing, "Contexts and start methods".
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait

from .grade import grade_notebook
from .sandbox import Sandbox
from .verdicts import NOT_GRADED, Verdict, verdict_of
from .watch import adopt_orphans

__all__ = ["Judges"]

GRACE = 120.0  # seconds beyond a notebook's own, before a worker is given up: the start, and pictures


class Judges:
    """`with Judges(sandbox, lab, twist, workers) as judges: for verdict in judges.judge([(student, notebook), ...]): ...`."""

    def __init__(self, sandbox: Sandbox, lab: str, twist: int | None, workers: int):
        self._make = lambda: _Worker(sandbox, lab, twist)
        self._seconds = sandbox.bounds.seconds + GRACE
        self._workers = [self._make() for _ in range(workers)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self._workers:
            worker.end()

    def judge(self, notebooks: Iterable[tuple[str, dict]]) -> Iterator[Verdict]:
        """The Verdict of each, in the order in which they are ready."""
        waiting, idle, busy = iter(notebooks), list(self._workers), {}
        while True:
            while idle and (job := next(waiting, None)) is not None:
                worker = idle.pop()
                busy[worker.begin(*job)] = worker
            if not busy:
                return
            patience = min(worker.until for worker in busy.values()) - time.monotonic()
            for pipe in wait(list(busy), timeout=max(0.0, patience)):
                worker = busy.pop(pipe)
                verdict = worker.verdict()
                idle.append(worker if verdict is not None else self._renew(worker))
                yield verdict or worker.lost("the process that judges it has ended")
            for pipe, worker in list(busy.items()):
                if time.monotonic() > worker.until:
                    del busy[pipe]
                    idle.append(self._renew(worker))
                    yield worker.lost("the process that judges it did not come back")

    def _renew(self, worker):
        worker.end()
        self._workers[self._workers.index(worker)] = fresh = self._make()
        fresh.seconds = self._seconds
        return fresh


class _Worker:
    """A process that judges, seen from the one that keeps the grades."""

    def __init__(self, sandbox, lab, twist):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.seconds = sandbox.bounds.seconds + GRACE
        self.process = context.Process(target=_work, args=(theirs, os.getpid(), sandbox, lab, twist))
        self.process.start()
        theirs.close()

    def begin(self, student, notebook):
        self.student, self.began = student, time.monotonic()
        self.until = self.began + self.seconds
        with suppress(OSError):  # it has ended: the answer will say so
            self.pipe.send((student, notebook))
        return self.pipe

    def verdict(self):
        try:
            verdict = self.pipe.recv()
        except (EOFError, OSError):
            return None
        verdict.seconds = round(time.monotonic() - self.began, 1)
        return verdict

    def lost(self, why):
        return Verdict(self.student, NOT_GRADED, f"dead kernel: {why}", seconds=round(time.monotonic() - self.began, 1))

    def end(self):
        """End it and what it has started: closing the pipe lets it end by itself, and it gets two seconds for that."""
        self.pipe.close()
        self.process.terminate()
        self.process.join(2.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)


def _work(pipe, keeper, sandbox, lab, twist):
    """Judge what comes through the pipe until it closes, or until the process that keeps the grades is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that keeps the grades
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    adopt_orphans()
    threading.Thread(target=_end_with, args=(keeper,), daemon=True).start()
    while True:
        try:
            student, notebook = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with sandbox.box(f"{abs(hash(student)) % 10**8}", alone=True) as box:
                graded = grade_notebook(
                    notebook, lab, twist=twist, box=box, seconds=sandbox.bounds.seconds, paths=box.paths, wrap=box.wrap
                )
            verdict = verdict_of(student, graded)
        except Exception as error:  # whatever it is, the others are still to be judged
            verdict = Verdict(student, NOT_GRADED, f"the judge could not go on: {type(error).__name__}: {str(error)[:300]}")
        with suppress(OSError):
            pipe.send(verdict)


def _end_with(keeper):
    while os.getppid() == keeper:
        time.sleep(0.3)
    os._exit(0)
