"""Work beside a rank's program: messages that travel while the program computes.

On real ranks a second thread does the jobs, in the order in which they were begun. A simulated rank has one thread, so there the
jobs are done when they are joined, but on a second clock: dated as if a second thread had begun each one as soon as it could.
Ports that other messages of the same rank held in between are not looked back at, which is exact as long as the program sends
nothing while jobs are under way.

    begin of job k  =  max(when it was given, end of job k-1),      after join:  clock = max(now, end of the last job)

Reference: "progress threads" of MPI implementations, such as Hoefler and Lumsdaine, "Message progression in parallel computing:
to thread or not to thread?", Cluster 2008.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from . import book as lines
from .comm import BESIDE, Call, Comm, CommError, call_site
from .diagnose import explain_forgotten, message_of

__all__ = ["Beside", "Job", "begun", "mark", "refuse_forgotten"]


def mark(comm: Comm, name: str, at: int, nbytes: int = 0) -> None:
    """Put an instant into the trace: something without length happened on this rank at `at` (picoseconds)."""
    source = "modelled" if comm.simulated else "measured"
    _record(comm, ("mark", "mark", name, at, at, nbytes, None, None, None, source))


def begun(comm: Comm) -> dict:
    """The jobs of this rank that were begun, on whatever lane, and not waited for yet: job -> None."""
    world = getattr(comm, "_world", None)
    if world is None:  # a communicator that only wraps another one
        return {}
    return world.begun[comm._me] if comm.simulated else world.begun


def refuse_forgotten(jobs: dict, rank: int) -> None:
    """This rank's program has returned: raise CommError, which names the learner's lines, if jobs are left in `begun`."""
    if not jobs:
        return
    calls = []
    for job in jobs:
        error = job.error
        own = error is not None and not isinstance(error, CommError)  # a lost connection says nothing about this rank
        calls.append(Call(rank, job.label + f" (it raised {type(error).__name__}: {message_of(error)})" * own, site=job.site))
    jobs.clear()
    error = CommError(explain_forgotten(*calls), rank=rank)
    error.about, error.calls = "forgotten", tuple(calls)
    raise error


def _record(comm: Comm, row: tuple) -> None:
    world = getattr(comm, "_world", None)
    if world is None:  # a communicator that only wraps another one: its owner records
        return
    if comm.simulated:
        world.events[comm._me].append((comm._me, *row))
    else:
        world.events.append((world.rank, *row))


class Job:
    """One piece of work. Picoseconds: `given`, `begin`, `end`; `error`: what it raised, or None."""

    def __init__(self, label: str, work: Callable[[], object], given: int, site: tuple | None = None):
        self.label, self.work, self.given, self.site = label, work, given, site
        self.begin = self.end = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self, comm: Comm) -> None:
        self.begin = comm.clock()
        try:
            self.work()
        except BaseException as error:
            self.error = error
        self.end = comm.clock()
        self.work = None  # lets go of the tensors
        mark(comm, f"{self.label} begins", self.begin)
        mark(comm, f"{self.label} is there", self.end)


class Beside:
    """`start` jobs while the program computes, `join` them before it needs what they bring.

    `comm` must be one that the program itself does not use meanwhile: `comm.split(0, comm.rank)` makes one. Jobs begin in order,
    one at a time; after one has failed the rest are left out, and `join` raises its error. A program that returns before it has
    joined what it began is refused (CommError): what it returned would be half done.
    """

    def __init__(self, comm: Comm):
        self.comm, self.jobs = comm, []
        self._queue: SimpleQueue | None = None
        if not comm.simulated:
            comm.records_work = False  # additions in the second thread would cover what the program does meanwhile

    def start(self, label: str, work: Callable[[], object]) -> Job:
        """Give a job; returns at once."""
        job = Job(label, work, self.comm.clock(), call_site(2))
        self.jobs.append(job)
        begun(self.comm)[job] = None
        if not self.comm.simulated:
            if self._queue is None:
                self._queue = SimpleQueue()
                threading.Thread(target=_serve, args=(self._queue, self.comm), daemon=True, name="beside").start()
                weakref.finalize(self, self._queue.put, None)
            self._queue.put(job)
        return job

    def join(self) -> list[Job]:
        """Wait for all jobs given so far and return them. What the program waits is in the trace."""
        jobs, self.jobs = self.jobs, []
        if not jobs:
            return jobs
        open_ = begun(self.comm)
        for job in jobs:
            open_.pop(job, None)
        before = self.comm.clock()
        (self._join_simulated if self.comm.simulated else self._join_real)(jobs)
        after = self.comm.clock()
        if after > before:
            source = "modelled" if self.comm.simulated else "measured"
            _record(self.comm, ("compute", "wait", f"wait for {jobs[-1].label}", before, after, 0, None, None, None, source))
        for job in jobs:
            if job.error is not None:
                raise job.error
        return jobs

    def _join_real(self, jobs):
        world = self.comm._world
        world.joined = True  # from now on a wait of the second thread is a wait of this rank
        behind = world.behind
        if behind is not None:
            world.book.say(lines.WAITING, *behind, behind[1] < 0)
        try:
            for job in jobs:
                job.over.wait()
        finally:
            world.joined = False
            world.book.say(lines.RUNNING, _now(world))

    def _join_simulated(self, jobs):
        comm, world, me = self.comm, self.comm._world, self.comm._me
        clock = comm._clock
        now, free = clock[me], 0
        world.aside.add(me)
        try:
            for job in jobs:
                clock[me] = max(job.given, free)
                job.run(comm)
                free = clock[me]
                if job.error is not None:
                    break
        finally:
            world.aside.discard(me)
            clock[me] = max(now, free)


def _now(world) -> int:
    return world.now() // 1000 + world.start


def _serve(queue: SimpleQueue, comm: Comm) -> None:
    """The second thread: job after job, until it is told to stop. It holds on to nothing but the queue and the communicator."""
    broken = False
    me = threading.get_ident()
    while (job := queue.get()) is not None:
        if not broken:
            BESIDE[me] = job.site
            job.run(comm)
            broken = job.error is not None
        job.over.set()
        job = None
    BESIDE.pop(me, None)
