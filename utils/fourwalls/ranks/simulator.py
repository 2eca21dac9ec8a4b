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
import time
import traceback
from contextlib import contextmanager, nullcontext

import torch

from ..cost.hardware import Cluster, get_cluster
from .agreement import Table
from .arguments import rank_arguments
from .comm import MAX_TAG, Call, Comm, DeadlockError, MismatchError, RankError, Request, call_site
from .diagnose import describe, explain_deadlock, explain_mismatch
from .groups import barrier, split_groups
from .machine import seed_of
from .meter import Meter
from .places import place
from .result import Run
from .scheduler import Scheduler
from .trace import PS, Trace

__all__ = ["MAX_RANKS", "SimulatedComm", "simulate_ranks"]

MAX_RANKS = 4096
_OWN_FILES = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(torch.__file__))
CLOCKS = ("stated", "roofline", "measured")


class _Post(Request):
    """One side of a message in the simulator. `time`: when it was posted; `done_at`: when it has arrived; `site`: where it was
    called.
    """

    __slots__ = ("comm", "done_at", "finished", "message", "nbytes", "payload", "peer", "sending", "site", "tag", "tensor", "time", "version")

    def wait(self):
        if not self.finished:
            self.comm._finish(self)
        return None if self.sending else self.tensor

    @property
    def done(self) -> bool:
        comm = self.comm
        if not self.finished and (self.done_at is None or self.done_at > comm.clock()):
            comm._idle(_POLL)  # a loop that asks again and again must let time pass
        return self.finished or (self.done_at is not None and self.done_at <= comm.clock())

    @property
    def call(self) -> Call:
        """This call as error messages name it."""
        op, tag, comm = "send" if self.sending else "recv", self.tag, self.comm
        if isinstance(tag, str):  # an internal channel: name what the learner called
            op, tag = tag, 0
        return Call(comm._me, op, comm._members[self.peer], tag, self.tensor.shape, self.tensor.dtype, self.site)


_POLL = PS // 10**6  # asking whether a message is done takes a microsecond


class SimulatedComm(Comm):
    """A simulated rank's view of its communicator; `members` are the ranks of the whole run that belong to it."""

    simulated = True

    def __init__(self, world: "_World", me: int, members: tuple[int, ...], context: tuple):
        self._world, self._me, self._members, self._context = world, me, members, context
        self.rank, self.size = members.index(me), len(members)
        self.device, self.seed, self.checks = torch.device("cpu"), world.seed, world.checks
        self._splits, self._channels, self._statements = 0, {}, 0
        self._scheduler = world.scheduler
        self._clock = world.scheduler.clock

    # --- messages --------------------------------------------------------------------------------------------------
    def isend(self, x, to, tag=0):
        if to.__class__ is not int or not 0 <= to < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(to, tag, "send to")
        return self._post(x, to, tag, True)

    def irecv(self, buf, frm, tag=0):
        if frm.__class__ is not int or not 0 <= frm < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(frm, tag, "receive from")
        return self._post(buf, frm, tag, False)

    def _post(self, x, peer, tag, sending):
        if x.__class__ is not torch.Tensor or not x.is_cpu or x.layout is not torch.strided:
            self._check_tensor(x, "send" if sending else "receive into")
        world, me = self._world, self._me
        if world.lazy_clock is not None:
            world.lazy_clock(me)
        post = _Post()
        post.comm, post.tensor, post.peer, post.tag, post.sending, post.finished = self, x, peer, tag, sending, False
        post.done_at = post.message = post.payload = None
        post.time, post.nbytes = self._clock[me], x.nbytes
        post.site = call_site(3) if self.checks else None
        if sending:
            if self.checks:
                post.payload = x.detach().clone() if x.requires_grad else x.clone()  # what was given now is what travels
                post.version = None if x.is_inference() else x._version  # torch counts writes, except in inference mode
            else:
                post.payload = x.detach()
        elif not x.is_contiguous() and _overlaps(x):
            raise ValueError(f"rank {self.rank}: receive into an expanded tensor, whose elements share memory; use .contiguous() or torch.empty")
        channel = self._channels.get((peer, tag, sending))
        if channel is None:
            src, dst = (me, self._members[peer]) if sending else (self._members[peer], me)
            channel = self._channels[peer, tag, sending] = self._scheduler.channel((src, dst, self._context, tag), src, dst)
        message = self._scheduler.post(channel, post, sending)
        if message is not None:
            a, b = message.send.tensor, message.receive.tensor
            if a.shape != b.shape or a.dtype != b.dtype:
                self._mismatch(message.send, message.receive)
            self._scheduler.matched(message)
        return post

    def _mismatch(self, send, receive):
        raise MismatchError(explain_mismatch(send.call, receive.call), rank=self._me)

    def _finish(self, post):
        me = self._me
        if self._world.lazy_clock is not None:
            self._world.lazy_clock(me)
        before = self._clock[me]
        self._scheduler.wait(me, post)
        after = self._clock[me]
        if after > before:
            name = "wait to send" if post.sending else "wait to receive"
            self._world.events[me].append((me, "compute", "wait", name, before, after, 0, self._members[post.peer], None, None, "modelled"))
        post.finished = True
        if post.sending:
            if self.checks and post.version is not None and post.version != post.tensor._version and not _same_bits(post.tensor, post.payload):
                raise MismatchError(f"the buffer of an isend was changed before its wait()\n  {describe(post.call)}", rank=me)
        else:
            x = post.tensor
            (x.detach() if x.requires_grad else x).copy_(post.payload)
        post.payload = None

    def _idle(self, picoseconds):
        self._clock[self._me] += picoseconds
        self._scheduler.give_way(self._me)

    # --- everybody together ----------------------------------------------------------------------------------------
    def barrier(self):
        barrier(self, self._internal)

    def split(self, color, key=0):
        self._splits += 1
        members = split_groups(self, self._internal, color, key)
        if members is None:
            return None
        return SimulatedComm(self._world, self._me, tuple(self._members[r] for r in members), (*self._context, self._splits, color))

    def agree(self, call):
        self._statements += 1
        self._world.statements.compare(self._context, self._statements, self._me, self.size, call, call_site(2))

    def _internal(self, x, to, buf, frm, name):
        """Exchange on a channel of its own, which no tag of the learner's can reach."""
        incoming = self._post(buf, frm, name, False)
        outgoing = self._post(x, to, name, True)
        incoming.wait()
        outgoing.wait()

    # --- work and time ---------------------------------------------------------------------------------------------
    @contextmanager
    def compute(self, label, *, flops=None, bytes=None, seconds=None, kind="compute", microbatch=None, stage=None):
        world, me = self._world, self._me
        stated = not (flops is None and bytes is None and seconds is None)
        if world.lazy_clock is not None:
            world.lazy_clock(me)
        start = self._clock[me]
        meter = Meter(each=lambda f, b, dtype: world.work(me, f, b, dtype)) if world.counting and not stated else nullcontext()
        with meter, world.paused(me) if stated else nullcontext():
            yield
        if world.lazy_clock is not None:
            world.lazy_clock(me, discard=stated)
        if seconds is not None:
            self._clock[me] += round(seconds * PS * world.cluster.straggler.get(me, 1))
        elif stated:
            world.work(me, flops or 0, bytes or 0, torch.float32)
        if self._clock[me] > start:
            source = "measured" if world.clock_kind == "measured" and not stated else "modelled"
            world.events[me].append((me, "compute", kind, label, start, self._clock[me], 0, None, microbatch, stage, source))

    def clock(self):
        return self._clock[self._me]

    def mark_live(self, bytes):
        now = self._clock[self._me]
        self._world.events[self._me].append((self._me, "memory", "live", "live", now, now, int(bytes), None, None, None, "modelled"))

    @property
    def native(self):
        raise RuntimeError("comm.native is torch.distributed, which simulated ranks do not have; use fw.run, or test `comm.simulated` first")


def _overlaps(x) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _same_bits(a, b) -> bool:
    if a.is_meta:
        return True
    a, b = a.detach().contiguous().reshape(-1), b.reshape(-1)
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8))) if a.numel() else True


class _World:
    """What all ranks of one simulation share."""

    def __init__(self, size, cluster, seed, checks, clock, on_message):
        self.cluster, self.seed, self.checks, self.clock_kind, self.on_message = cluster, seed, checks, clock, on_message
        self.events: list[list[tuple]] = [[] for _ in range(size)]
        self.statements = Table()
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

        self.scheduler = Scheduler(size, cost=cost, ports=ports, deliver=self._deliver, in_order=on_message is not None)
        self._cpu = [0] * size
        self.lazy_clock = self._advance_cpu if clock == "measured" else None

    def _deliver(self, message):
        channel, start, end, send = message.channel, message.start, message.end, message.send
        src, dst, nbytes = channel.src, channel.dst, send.nbytes
        self.events[src].append((src, "send", "send", "send", start, end, nbytes, dst, None, None, "modelled"))
        self.events[dst].append((dst, "recv", "recv", "recv", start, end, nbytes, src, None, None, "modelled"))
        message.receive.payload = send.payload if self.checks else send.payload.clone()  # the sender may go on and change its tensor
        if self.on_message is not None:
            self.on_message(src=src, dst=dst, tag=send.tag, start=start, end=end, tensor=send.payload)

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


def simulate_ranks(program, args, kwargs, *, ranks, cluster=None, seed=0, checks=True, clock="stated", on_message=None) -> Run:
    """Run `program(comm, *args, **kwargs)` on `ranks` simulated ranks of `cluster`; a Run whose trace is modelled.

    cluster: a preset's name or a Cluster (default "a100-selene"). clock: "stated" prices compute blocks only, "roofline" every operation,
    "measured" this machine's CPU time (not deterministic). on_message(src=, dst=, tag=, start=, end=, tensor=) is called in
    order of time. Raises ValueError for bad arguments; RankError, DeadlockError, MismatchError with the rank and the learner's
    line.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks={ranks!r}: simulate takes 1 to {MAX_RANKS} ranks")
    if clock not in CLOCKS:
        raise ValueError(f"clock={clock!r}: one of {', '.join(CLOCKS)}")
    cluster = get_cluster("a100-selene" if cluster is None else cluster)
    given = rank_arguments(program, args, kwargs, ranks)
    world = _World(ranks, cluster, seed, checks, clock, on_message)
    everyone = tuple(range(ranks))
    values = [None] * ranks
    began = time.perf_counter()

    def body(rank):
        torch.manual_seed(seed_of(seed, rank))
        if world.lazy_clock is not None:
            world.lazy_clock(rank, discard=True)
        positional, named = given(rank)
        comm = SimulatedComm(world, rank, everyone, ())
        with Meter(each=lambda f, b, d: world.work(rank, f, b, d)) if clock == "roofline" and cluster.device else nullcontext():
            values[rank] = program(comm, *positional, **named)

    threads, generator = torch.get_num_threads(), torch.default_generator.get_state()
    scheduler = world.scheduler
    torch.set_num_threads(1)  # one rank runs at a time, and the same bits as on real ranks
    collector = gc.get_threshold()
    gc.set_threshold(20_000, 20, 10**6)  # a trace is millions of tuples: do not go through all of it again and again
    try:
        scheduler.run(body, stack_bytes=(16 if ranks <= 16 else 4 if ranks <= 64 else 1) * 2**20, cpu=_this_cpu())
        if scheduler.errors:
            raise _failure(scheduler, ranks)
        if scheduler.stuck():
            raise _deadlock(scheduler, ranks)
    finally:
        scheduler.release()
        gc.set_threshold(*collector)
        torch.set_num_threads(threads)
        torch.default_generator.set_state(generator)
    trace = Trace([e for of_rank in world.events for e in of_rank], ranks=ranks)
    return Run(values=values, trace=trace, outputs=[""] * ranks, seconds=time.perf_counter() - began, backend="simulator", ranks=ranks)


def _failure(scheduler, ranks):
    rank, error = scheduler.errors[0]
    if isinstance(error, MismatchError):
        return error
    learner = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN_FILES)]
    where = "".join(f"\n  {place(f.filename, f.lineno, f.name)}" for f in learner)
    said = {r: f"{type(e).__name__}: {e}" for r, e in scheduler.errors}
    wrapped = RankError(f"rank {rank} of {ranks} raised {said[rank]}{where}", rank=rank, kind=type(error).__name__, errors=said)
    wrapped.__cause__ = error
    return wrapped


def _deadlock(scheduler, ranks):
    posts = {rank: scheduler.blocked_on[rank] for rank in scheduler.stuck()}
    waits = {rank: post.call for rank, post in posts.items()}
    finished = {r for r in range(ranks) if r not in waits}
    pending = [p.call for c in scheduler.channels.values() for p in (*c.sends, *c.receives) if p not in posts.values()]
    return DeadlockError(explain_deadlock(waits, finished, pending), rank=min(waits), waits=waits)


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
