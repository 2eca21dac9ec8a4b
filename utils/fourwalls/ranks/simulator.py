"""Hundreds of ranks in one process, under a virtual clock: the same rank program, no second core needed.

Each rank is a thread with its own clock and its own random state, and messages carry real tensors, so values are real and only
time is modelled. Sends wait for their receive, a receive leaves its buffer untouched until `wait()`, and a run with the same
seed is the same to the last picosecond. What a message costs is the cluster's link; what work costs is the roofline of its
device.

    clock of a rank = work done + messages waited for

Reference: Hockney's alpha-beta model (cost/hardware.py); scheduler.py gives the order of events.
"""

import ctypes
import gc
import os
import threading
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext

import torch

from ..cost.hardware import get_cluster
from .agreement import Table
from .arguments import rank_arguments, whole_seed
from .beside import refuse_forgotten
from .comm import CommError, DeadlockError, MismatchError, RankError
from .diagnose import explain_deadlock, explain_failure, explain_unanswered, explain_unwaited, message_of, outside
from .failures import interrupted
from .machine import repeatable, seed_of
from .meter import Meter
from .output import Output
from .posts import as_tensor
from .prints import apart
from .result import Run
from .scheduler import Scheduler
from .servers import scratch_folder
from .simulated import SimulatedComm
from .trace import Trace

__all__ = ["MAX_RANKS", "simulate_ranks"]

MAX_RANKS = 4096
_OWN_FILES = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(torch.__file__))
CLOCKS = ("stated", "roofline", "measured")


class _World:
    """What all ranks of one simulation share."""

    def __init__(self, size, cluster, seed, checks, clock, on_message):
        self.cluster, self.seed, self.checks, self.clock_kind, self.on_message = cluster, seed, checks, clock, on_message
        # posts not waited for yet, a dict for each rank: sends -> None, receives -> (first byte, behind the last) or None
        self.sends_open: list[dict] = [{} for _ in range(size)]
        self.receives_open: list[dict] = [{} for _ in range(size)]
        # where such receives lie: both ends of those without gaps, sorted; the others, each as in receives_open
        self.spans: list[list[int]] = [[] for _ in range(size)]
        self.scattered: list[dict] = [{} for _ in range(size)]
        self.begun: list[dict] = [{} for _ in range(size)]  # jobs beside the program that it has not waited for (beside.py)
        self.statements = Table()
        self.aside: set[int] = set()  # ranks on their second clock (beside.py): what they wait there is not the program's
        self.counting = clock == "stated" and cluster.device is not None
        ports = None
        if cluster.shared_nic:
            node = [cluster.node(r) for r in range(size)]
            ports = lambda src, dst: () if node[src] == node[dst] else (("out", node[src]), ("in", node[dst]))  # noqa: E731
        costs: dict = {}

        def cost(src, dst, nbytes):
            found = costs.get((src, dst, nbytes))
            if found is None:
                found = costs[src, dst, nbytes] = 0 if src == dst else cluster.link(src, dst).picoseconds(nbytes)
            return found

        watch = self._watch if on_message is not None or not checks else None
        self.scheduler = Scheduler(size, cost=cost, ports=ports, watch=watch, in_order=on_message is not None)
        self.events = self.scheduler.rows
        self._cpu = [0] * size
        self.lazy_clock = self._advance_cpu if clock == "measured" else None

    def _watch(self, channel, send, start, end):
        if not self.checks:
            with self.paused(self.scheduler.running) if self.scheduler.running is not None else nullcontext():
                send.receive.payload = send.payload.clone()  # the sender may go on and change its tensor
        if self.on_message is not None:
            about = {"src": channel.src, "dst": channel.dst, "tag": channel.tag, "start": start, "end": end}
            self.on_message(**about, tensor=as_tensor(send.payload, send))

    def work(self, rank, flops, nbytes, dtype):
        self.scheduler.clock[rank] += self.cluster.compute_picoseconds(rank, flops, nbytes, dtype)

    def _advance_cpu(self, rank, discard=False):
        now = time.thread_time_ns() * 1000
        if not discard:
            self.scheduler.clock[rank] += round((now - self._cpu[rank]) * self.cluster.straggler.get(rank, 1))
        self._cpu[rank] = now

    @contextmanager
    def paused(self, rank):
        """Operations inside a block whose cost is stated are not counted a second time."""
        if self.clock_kind != "roofline":
            yield
            return
        before = self.scheduler.clock[rank]
        yield
        self.scheduler.clock[rank] = before


def simulate_ranks(
    program, args, kwargs, *, ranks, cluster=None, seed=0, checks=True, clock="stated", stream=True, on_message=None
) -> Run:
    """Run `program(comm, *args, **kwargs)` on `ranks` simulated ranks of `cluster`; a Run whose trace is modelled.

    cluster    a preset's name or a Cluster (default "a100-selene")
    clock      "stated" prices compute blocks only, "roofline" every operation, "measured" this machine's CPU
               time (not deterministic)
    seed       of every rank's torch generator, mixed with its number; `random` and numpy have one for all ranks together
    stream     False: what ranks print is kept in run.outputs and not shown
    on_message is called with src=, dst=, tag=, start=, end=, tensor= of every message, in order of time
    Raises ValueError for bad arguments; RankError, DeadlockError, MismatchError with the rank and the learner's line.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks={ranks!r}: simulate takes 1 to {MAX_RANKS} ranks")
    if clock not in CLOCKS:
        raise ValueError(f"clock={clock!r}: one of {', '.join(CLOCKS)}")
    cluster = get_cluster("a100-selene" if cluster is None else cluster)
    given = rank_arguments(program, args, kwargs, ranks)
    seed = whole_seed(seed)
    world = _World(ranks, cluster, seed, checks, clock, on_message)
    everyone = tuple(range(ranks))
    values = [None] * ranks
    began = time.perf_counter()

    def body(rank):
        torch.default_generator.manual_seed(seed_of(seed, rank))
        if world.lazy_clock is not None:
            world.lazy_clock(rank, discard=True)
        positional, named = given(rank)
        comm = SimulatedComm(world, rank, everyone, ())
        with Meter(each=lambda f, b, d: world.work(rank, f, b, d)) if clock == "roofline" and cluster.device else nullcontext():
            values[rank] = program(comm, *positional, **named)
            refuse_forgotten(world.begun[rank], rank)

    scheduler, output = world.scheduler, Output(ranks, stream=False, scratch=scratch_folder)
    try:
        with _borrowed_process(), repeatable(seed_of(seed, 0)), apart(scheduler.rank_of, output.feed):
            try:
                scheduler.run(body, stack_bytes=(16 if ranks <= 16 else 4) * 2**20, cpu=_this_cpu())
                if scheduler.errors:
                    raise _failure(scheduler, ranks)
                if scheduler.stuck():
                    raise _deadlock(scheduler, ranks)
                if not all(scheduler.returned):
                    raise RankError(f"rank {scheduler.returned.index(False)} ended without returning", kind="Released")
                _settle(world)
            except KeyboardInterrupt:
                raise _interrupted(scheduler, ranks) from None
            finally:
                scheduler.release()
    finally:
        output.finish()
        if stream:
            output.show()
    trace = Trace(_events(world.events), ranks=ranks)
    return Run(values, trace, output.texts, time.perf_counter() - began, "simulator", ranks, output.files)


def _events(rows: list[list[tuple]]):
    """The rows of all ranks as Event's tuples: a message stands as (src, dst, start, end, bytes) with both its ranks, a wait as
    (name, peer, start, end).
    """
    for rank, of_rank in enumerate(rows):
        sent = None  # the last message that this rank sent: one to itself stands there twice
        for row in of_rank:
            if len(row) == 5:
                src, dst, start, end, nbytes = row
                if src == rank and row is not sent:
                    sent = row
                    yield (rank, "send", "send", "send", start, end, nbytes, dst, None, None, "modelled")
                else:
                    yield (rank, "recv", "recv", "recv", start, end, nbytes, src, None, None, "modelled")
            elif len(row) == 4:
                name, peer, start, end = row
                yield (rank, "compute", "wait", name, start, end, 0, peer, None, None, "modelled")
            else:
                yield row


@contextmanager
def _borrowed_process():
    """Settings of the whole process that a simulation needs otherwise, put back at the end."""
    threads, generator, collector = torch.get_num_threads(), torch.default_generator.get_state(), gc.get_threshold()
    torch.set_num_threads(1)  # one rank runs at a time, and the same bits as on real ranks
    gc.set_threshold(20_000, 20, 10**6)  # a trace is millions of tuples: do not go through all of it again and again
    try:
        yield
    finally:
        gc.set_threshold(*collector)
        torch.set_num_threads(threads)
        torch.default_generator.set_state(generator)


def _failure(scheduler, ranks):
    rank, error = scheduler.errors[0]
    if isinstance(error, MismatchError) or getattr(error, "about", None) == "forgotten":
        return error
    said = {r: f"{type(e).__name__}: {message_of(e)}" for r, e in scheduler.errors}
    wrapped = RankError(explain_failure(rank, ranks, error), rank=rank, kind=type(error).__name__, errors=said)
    wrapped.__cause__ = error
    return wrapped


def _deadlock(scheduler, ranks):
    posts = {rank: scheduler.blocked_on[rank] for rank in scheduler.stuck()}
    waits = {rank: post.call for rank, post in posts.items()}
    finished = {r for r in range(ranks) if r not in waits}
    pending = [p.call for c in scheduler.channels.values() for p in (*c.sends, *c.receives) if p not in posts.values()]
    return DeadlockError(explain_deadlock(waits, finished, pending), rank=min(waits), waits=waits)


def _settle(world):
    """All programs have returned: a message that nobody answered is an error, one that nobody waited for a warning."""
    left = sorted((p for posts in (*world.sends_open, *world.receives_open) for p in posts), key=lambda p: (p.comm._me, p.time))
    lost = [p.call for p in left if p.done_at is None]
    if lost:
        raise CommError(explain_unanswered(lost), rank=lost[0].rank)
    if left:
        warnings.warn(explain_unwaited([p.call for p in left]), RuntimeWarning, stacklevel=outside())


def _interrupted(scheduler, ranks):
    waits = {rank: scheduler.blocked_on[rank].call for rank in scheduler.stuck()}
    stacks = {rank: traceback.extract_stack(frame) for rank, frame in scheduler.frames().items() if rank not in waits}
    own = {
        rank: [(f.filename, f.lineno, f.name) for f in stack if not f.filename.startswith((*_OWN_FILES, threading.__file__))]
        for rank, stack in stacks.items()
    }
    return interrupted(ranks, waits, own)


def _this_cpu() -> int | None:
    """The core to keep all ranks' threads on: handing over is several times cheaper there. None where that cannot be asked
    for.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    try:
        cpu = ctypes.CDLL(None).sched_getcpu()
    except (OSError, AttributeError):
        cpu = -1
    return cpu if cpu in allowed else min(allowed)
