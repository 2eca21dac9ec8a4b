"""A simulated rank's side: its messages, its clock, its groups.

A message is a post on a channel of the scheduler; it carries a copy of what was sent at the moment it was sent, and reaches the
receiver's buffer only at `wait()`, so that a forgotten wait and a buffer changed too early show themselves in every run.

    done  =  the scheduler has delivered the message, and this rank's clock has reached the delivery

Reference: the MPI standard, "Nonblocking Communication" (a buffer belongs to the message until it is complete).
"""

from contextlib import contextmanager, nullcontext
from threading import get_ident

import torch

from .buffers import overlaps, reach, share_memory
from .comm import MAX_TAG, Call, Comm, MismatchError, Request, call_site
from .diagnose import describe, explain_mismatch, explain_shared
from .groups import barrier, split_groups
from .meter import Meter
from .trace import PS

__all__ = ["SimulatedComm"]


class _Post(Request):
    """One side of a message in the simulator. `time`: when it was posted; `done_at`: when it has arrived; `site`: where it was
    called.
    """

    __slots__ = (
        "comm",
        "done_at",
        "finished",
        "message",
        "nbytes",
        "op",
        "payload",
        "peer",
        "sending",
        "site",
        "tag",
        "tensor",
        "time",
        "version",
    )

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
        comm, tag = self.comm, self.tag
        if isinstance(tag, str):  # an internal channel, which has a name instead of a tag
            tag = 0
        return Call(comm._me, self.op, comm._members[self.peer], tag, self.tensor.shape, self.tensor.dtype, self.site)


class _OneCall:
    """While it is open, every message of `comm` is noted with `site`: to find that anew takes as long as to copy 4 KiB."""

    __slots__ = ("comm", "outer", "site")

    def __init__(self, comm, site):
        self.comm, self.site = comm, site

    def __enter__(self):
        self.outer, self.comm._site = self.comm._site, self.site

    def __exit__(self, *error):
        self.comm._site = self.outer


_TENSOR, _STRIDED = torch.Tensor, torch.strided  # looked up for every message
_POLL = PS // 10**6  # asking whether a message is done takes a microsecond


class SimulatedComm(Comm):
    """A simulated rank's view of its communicator; `members` are the ranks of the whole run that belong to it."""

    simulated = True

    def __init__(self, world, me: int, members: tuple[int, ...], context: tuple):
        self._world, self._me, self._members, self._context = world, me, members, context
        self.rank, self.size = members.index(me), len(members)
        self.device, self.seed, self.checks = torch.device("cpu"), world.seed, world.checks
        self.records_work = world.cluster.device is not None or world.clock_kind != "stated"
        self._splits, self._channels, self._statements, self._thread = 0, {}, 0, get_ident()
        self._scheduler, self._clock = world.scheduler, world.scheduler.clock
        self._open, self._receiving = world.open[me], world.receiving[me]
        self._site = None  # the learner's line, while a collective says that all it sends belongs to one call

    # --- messages --------------------------------------------------------------------------------------------------
    def isend(self, x, to, tag=0):
        if to.__class__ is not int or not 0 <= to < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(to, tag, "send to")
        return self._post(x, to, tag, True, "isend")

    def irecv(self, buf, frm, tag=0):
        if frm.__class__ is not int or not 0 <= frm < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(frm, tag, "receive from")
        return self._post(buf, frm, tag, False, "irecv")

    def send(self, x, to, tag=0):
        self._check_peer(to, tag, "send to")
        self._post(x, to, tag, True, "send").wait()

    def recv(self, buf, frm, tag=0):
        self._check_peer(frm, tag, "receive from")
        self._post(buf, frm, tag, False, "recv").wait()
        return buf

    def exchange(self, x, to, buf, frm, tag=0):
        if to.__class__ is not int or not 0 <= to < self.size or frm.__class__ is not int or not 0 <= frm < self.size or tag != 0:
            self._check_peer(to, tag, "send to")
            self._check_peer(frm, tag, "receive from")
        if x is buf or (x.is_cpu and buf.is_cpu and share_memory(x, buf)):
            x = x.clone()  # what was there before the receive is what travels
        incoming = self._post(buf, frm, tag, False, "exchange recv")
        outgoing = self._post(x, to, tag, True, "exchange send")
        incoming.wait()
        outgoing.wait()
        return buf

    def _post(self, x, peer, tag, sending, op):
        if x.__class__ is not _TENSOR or not x.is_cpu or x.layout is not _STRIDED:
            self._check_tensor(x, "send" if sending else "receive into")
        world, me = self._world, self._me
        if get_ident() != self._thread:
            raise RuntimeError(
                f"rank {self.rank}: {op} in another thread than its program's; simulated ranks have one thread each, use fw.run"
            )
        if world.lazy_clock is not None:
            world.lazy_clock(me)
        checks, contiguous, nbytes = self.checks, x.is_contiguous(), x.nbytes  # asked once: torch takes long to answer
        post = _Post()
        post.comm, post.tensor, post.peer, post.tag, post.sending, post.op, post.finished = self, x, peer, tag, sending, op, False
        post.done_at = post.message = post.payload = None
        post.time, post.nbytes = self._clock[me], nbytes
        post.site = (self._site or call_site(3)) if checks else None
        if sending:
            if checks:
                post.payload = x.detach().clone() if x.requires_grad else x.clone()  # what was given now is what travels
                post.version = None if x.is_inference() else x._version  # torch counts writes, except in inference mode
            else:
                post.payload = x.detach()
        elif not contiguous and overlaps(x):
            raise ValueError(f"rank {self.rank}: receive into an expanded tensor, whose elements share memory; try torch.empty")
        channel = self._channels.get((peer, tag, sending))
        if channel is None:
            src, dst = (me, self._members[peer]) if sending else (self._members[peer], me)
            channel = self._channels[peer, tag, sending] = self._scheduler.channel((src, dst, self._context, tag), src, dst)
        receiving = self._receiving
        if checks and (receiving or not sending) and peer != self.rank and x.is_cpu and x.__class__ is _TENSOR:
            # a receive that is not done yet must not touch the same bytes: real ranks refuse that too
            start = x.data_ptr()
            start, end = (start, start + nbytes) if contiguous else reach(x)
            for other, (first, last) in receiving.items():
                if start < last and first < end and share_memory(x, other.tensor):
                    raise MismatchError(explain_shared(other.call, post.call), rank=me)
            if not sending:
                receiving[post] = start, end
        self._open[post] = None
        message = self._scheduler.post(channel, post, sending)
        if message is not None:
            other = message.receive.tensor if sending else message.send.tensor
            if x.shape != other.shape or x.dtype != other.dtype or (x.is_cpu != other.is_cpu and message.send.tensor.is_meta):
                self._mismatch(message.send, message.receive)
            self._scheduler.matched(message)
        return post

    def _mismatch(self, send, receive):
        more = "\nThe sender's tensor is a meta tensor, which has no numbers." if send.tensor.is_meta else ""
        raise MismatchError(explain_mismatch(send.call, receive.call) + more, rank=self._me)

    def _finish(self, post):
        world, me = self._world, self._me
        if world.lazy_clock is not None:
            world.lazy_clock(me)
        clock, scheduler = self._clock, self._scheduler
        before, done_at = clock[me], post.done_at
        if done_at is None or scheduler.stopping:
            scheduler.wait(me, post)
        elif done_at > before:  # as wait() does; most messages have arrived before anybody asks
            clock[me] = done_at
        after = clock[me]
        if after > before and me not in world.aside:
            name = "wait to send" if post.sending else "wait to receive"
            world.events[me].append(
                (me, "compute", "wait", name, before, after, 0, self._members[post.peer], None, None, "modelled")
            )
        post.finished = True
        self._open.pop(post, None)
        if post.sending:
            if (
                self.checks
                and post.version is not None
                and post.version != post.tensor._version
                and not _same_bits(post.tensor, post.payload)
            ):
                raise MismatchError(f"the buffer of an isend was changed before its wait()\n  {describe(post.call)}", rank=me)
        else:
            self._receiving.pop(post, None)
            x = post.tensor
            if x.is_inference():
                with torch.inference_mode():
                    x.copy_(post.payload)
            else:
                (x.detach() if x.requires_grad else x).copy_(post.payload)
        post.payload = post.message = None  # the message knows its posts: a circle would keep the tensors until a collection

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
        return SimulatedComm(
            self._world, self._me, tuple(self._members[r] for r in members), (*self._context, self._splits, color)
        )

    def one_call(self):
        return _OneCall(self, self._site or call_site(2)) if self.checks else nullcontext()

    def agree(self, call):
        self._statements += 1
        self._world.statements.compare(self._context, self._statements, self._me, self.size, call, call_site(2))

    def _internal(self, x, to, buf, frm, name):
        """Exchange on a channel of its own, which no tag of the learner's can reach."""
        incoming = self._post(buf, frm, name, False, name)
        outgoing = self._post(x, to, name, True, name)
        incoming.wait()
        outgoing.wait()

    # --- work and time ---------------------------------------------------------------------------------------------
    @contextmanager
    def compute(self, label, *, flops=None, bytes=None, seconds=None, kind="compute", microbatch=None, stage=None):
        world, me = self._world, self._me
        self._check_cost(label, flops, bytes, seconds)
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
        if self._clock[me] > start and me not in world.aside:
            source = "measured" if world.clock_kind == "measured" and not stated else "modelled"
            world.events[me].append((me, "compute", kind, label, start, self._clock[me], 0, None, microbatch, stage, source))

    def clock(self):
        return self._clock[self._me]

    def mark_live(self, bytes):
        now = self._clock[self._me]
        self._world.events[self._me].append(
            (self._me, "memory", "live", "live", now, now, int(bytes), None, None, None, "modelled")
        )

    @property
    def native(self):
        raise RuntimeError(
            "comm.native is torch.distributed, which simulated ranks do not have; use fw.run, or test `comm.simulated` first"
        )


def _same_bits(a, b) -> bool:
    if a.is_meta:
        return True
    a, b = a.detach().contiguous().reshape(-1), b.reshape(-1)
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8))) if a.numel() else True
