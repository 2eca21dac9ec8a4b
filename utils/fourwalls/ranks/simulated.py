"""A simulated rank's side: its messages, its clock, its groups.

A message is two posts (posts.py) on a channel of the scheduler. What cannot be right is refused here: no such rank, bytes that
a receive under way will write, two sides that do not fit. A run is hundreds of thousands of messages, so torch is asked nothing
twice.

    done  =  the scheduler has delivered the message, and this rank's clock has reached the delivery

Reference: the MPI standard, "Nonblocking Communication" (a buffer belongs to the message until it is complete).
"""

from bisect import bisect
from contextlib import contextmanager, nullcontext
from threading import get_ident

import torch

from .buffers import overlaps, raw_address, reach, share_memory, take_bytes
from .comm import Comm, MismatchError, call_site
from .diagnose import explain_mismatch, explain_shared
from .groups import barrier, split_groups
from .meter import Meter
from .posts import Receive, Send
from .trace import PS

__all__ = ["SimulatedComm"]

_TENSOR, _STRIDED = torch.Tensor, torch.strided


class _Name(str):
    """What an internal channel has instead of a tag; no string of the learner's is one."""


class _OneCall:
    """While it is open, every message of `comm` is noted with `site`: to find that anew takes as long as to copy 4 KiB."""

    __slots__ = ("comm", "outer", "site")

    def __init__(self, comm, site):
        self.comm, self.site = comm, site

    def __enter__(self):
        self.outer, self.comm._site = self.comm._site, self.site

    def __exit__(self, *error):
        self.comm._site = self.outer


class SimulatedComm(Comm):
    """A simulated rank's view of its communicator; `members` are the ranks of the whole run that belong to it."""

    simulated = True

    def __init__(self, world, me: int, members: tuple[int, ...], context: tuple):
        self._world, self._me, self._members, self._context = world, me, members, context
        self.rank, self.size = members.index(me), len(members)
        self.device, self.seed, self.checks = torch.device("cpu"), world.seed, world.checks
        self.records_work = world.cluster.device is not None or world.clock_kind != "stated"
        self._splits, self._statements = 0, 0
        self._thread = get_ident() if world.lazy_clock is None else None  # whose calls need no second look
        self._outgoing, self._incoming = {}, {}  # (peer, tag) -> channel
        self._last_pair = None, None  # whom the last exchange was with: mostly the next one is the same
        self._scheduler, self._clock, self._lazy_clock = world.scheduler, world.scheduler.clock, world.lazy_clock
        self._sends_open, self._receives_open = world.sends_open[me], world.receives_open[me]
        self._spans, self._scattered = world.spans[me], world.scattered[me]
        self._rows, self._aside = world.scheduler.rows[me], world.aside
        self._site = None  # the learner's line, while a collective says that all it sends belongs to one call

    # --- messages --------------------------------------------------------------------------------------------------
    def isend(self, x, to, tag=0):
        return self._send(x, to, tag, "isend")

    def irecv(self, buf, frm, tag=0):
        return self._receive(buf, frm, tag, "irecv")

    def send(self, x, to, tag=0):
        self._send(x, to, tag, "send").wait()

    def recv(self, buf, frm, tag=0):
        return self._receive(buf, frm, tag, "recv", False).wait()

    def exchange(self, x, to, buf, frm, tag=0):
        last_to, last_frm = self._last_pair
        known = to is last_to and frm is last_frm and tag == 0  # True == 1, but it is another object
        if not known or x.__class__ is not _TENSOR or buf.__class__ is not _TENSOR or x.layout is not _STRIDED:
            self._check_peer(to, tag, "send to")
            self._check_peer(frm, tag, "receive from")
            self._check_tensor(x, "send")
            self._check_tensor(buf, "receive into")
            self._last_pair = to, frm
        if x is buf or (x.is_cpu and buf.is_cpu and share_memory(x, buf)):
            x = x.clone()  # what was there before the receive is what travels
        incoming = self._receive(buf, frm, tag, "exchange recv", False)
        outgoing = self._send(x, to, tag, "exchange send")
        incoming.wait()
        outgoing.wait()
        return buf

    def _send(self, x, to, tag, op):
        channel = self._outgoing.get((to, tag)) if to.__class__ is int and tag.__class__ is int else None
        if channel is None:
            channel = self._channel(to, tag, True)
        start = raw_address(x)
        if not start:
            self._check_tensor(x, "send")
        if get_ident() != self._thread:
            self._begin(op)
        post = Send()
        post.comm, post.channel, post.tensor, post.op, post.start = self, channel, x, op, start
        post.dtype = dtype = x.dtype
        post.shape, post.nbytes = shape, nbytes = x.shape, x.nbytes
        post.time = self._clock[self._me]
        post.done_at = post.receive = None
        if self.checks:
            post.site = self._site or call_site(3)
            if start:
                post.payload = take_bytes(start, nbytes)  # what was given now is what travels
                spans = self._spans
                if (spans or self._scattered) and to != self.rank:
                    i = bisect(spans, start)
                    if i % 2 or (i < len(spans) and spans[i] < start + nbytes) or self._scattered:
                        self._refuse_shared(post, (start, start + nbytes))
            else:
                with self._world.paused(self._me):
                    post.payload = x.detach().clone()
                if to != self.rank and self._receives_open and x.is_cpu and x.__class__ is torch.Tensor:
                    self._refuse_shared(post, reach(x))
            try:
                post.version = x._version  # torch counts writes
            except RuntimeError:  # except in inference mode
                post.version = None
        else:
            post.site, post.payload, post.version = None, x.detach(), None
        self._sends_open[post] = None
        if channel.receives:
            receive = channel.receives.popleft()
            if shape != receive.shape or dtype is not receive.dtype or not start:
                self._check_fit(post, receive)
            self._scheduler.meet(channel, post, receive)
        else:
            channel.sends.append(post)
        channel.exit.open += 1
        return post

    def _receive(self, x, frm, tag, op, goes_on=True):
        """goes_on: the rank goes on before the message is there, and could use the buffer for another one."""
        channel = self._incoming.get((frm, tag)) if frm.__class__ is int and tag.__class__ is int else None
        if channel is None:
            channel = self._channel(frm, tag, False)
        start, reached = raw_address(x), None
        if not start:
            self._check_tensor(x, "receive into")
        if get_ident() != self._thread:
            self._begin(op)
        post = Receive()
        post.comm, post.channel, post.tensor, post.op, post.start = self, channel, x, op, start
        post.dtype = dtype = x.dtype
        post.shape, post.nbytes = shape, nbytes = x.shape, x.nbytes
        post.time = self._clock[self._me]
        post.done_at = post.send = None
        post.site = (self._site or call_site(3)) if self.checks else None
        if start:
            if self.checks and frm != self.rank:
                place, spans, i = (start, start + nbytes), self._spans, 0
                if spans or self._scattered:
                    i = bisect(spans, start)
                    if i % 2 or (i < len(spans) and spans[i] < start + nbytes) or self._scattered:
                        self._refuse_shared(post, place)
                if goes_on:
                    reached = spans[i:i] = place
        else:
            if not x.is_contiguous() and overlaps(x):
                raise ValueError(
                    f"rank {self.rank}: receive into an expanded tensor, whose elements share memory; try torch.empty"
                )
            if self.checks and frm != self.rank and nbytes and x.is_cpu and x.__class__ is torch.Tensor:
                place = reach(x)
                self._refuse_shared(post, place)
                if goes_on:
                    reached = self._scattered[post] = place
        self._receives_open[post] = reached
        if channel.sends:
            send = channel.sends.popleft()
            if shape != send.shape or dtype is not send.dtype or not send.start:
                self._check_fit(send, post)
            self._scheduler.meet(channel, send, post)
        else:
            channel.receives.append(post)
        channel.entry.open += 1
        return post

    def _begin(self, op):
        if get_ident() != self._scheduler.threads[self._me].ident:
            raise RuntimeError(
                f"rank {self.rank}: {op} in another thread than its program's; simulated ranks have one thread each, use fw.run"
            )
        if self._lazy_clock is not None:
            self._lazy_clock(self._me)

    def _channel(self, peer, tag, sending):
        if tag.__class__ is not _Name:
            self._check_peer(peer, tag, "send to" if sending else "receive from")
        src, dst = (self._me, self._members[peer]) if sending else (self._members[peer], self._me)
        known = self._outgoing if sending else self._incoming
        channel = known[peer, tag] = self._scheduler.channel((src, dst, self._context, tag), src, dst, tag)
        return channel

    def _refuse_shared(self, post, reached):
        """A receive that is not done yet must not touch the bytes of another message: real ranks refuse that too. `reached`: from
        the first byte of the new message to behind its last.
        """
        first, last = reached
        for other, place in self._receives_open.items():
            meet = place is not None and place[0] < last and first < place[1]
            if meet and ((post.start and other.start) or share_memory(post.tensor, other.tensor)):  # two without gaps do for sure
                raise MismatchError(explain_shared(other.call, post.call), rank=self._me)

    def _check_fit(self, send, receive):
        numbers = receive.tensor.is_meta or not send.tensor.is_meta  # where some are wanted, there are some
        if send.shape == receive.shape and send.dtype is receive.dtype and numbers:
            return
        more = "\nThe sender's tensor is a meta tensor, which has no numbers." if send.tensor.is_meta else ""
        raise MismatchError(explain_mismatch(send.call, receive.call) + more, rank=self._me)

    def _wait(self, post, send):
        """Until `post` is done, which is one side of the message `send` (None while there is no other side)."""
        me, clock = self._me, self._clock
        if self._lazy_clock is not None:
            self._lazy_clock(me)
        before, scheduler = clock[me], self._scheduler
        if post.done_at is None and (
            send is None or scheduler.stopping or not scheduler.deliver_waiting(post.channel, send, post)
        ):
            scheduler.wait(me, post)
        after = post.done_at
        if after > before:
            clock[me] = after
            if me not in self._aside:
                channel = post.channel
                sending = post.__class__ is Send
                self._rows.append(
                    ("wait to send", channel.dst, before, after) if sending else ("wait to receive", channel.src, before, after)
                )

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
        incoming = self._receive(buf, frm, _Name(name), name)
        outgoing = self._send(x, to, _Name(name), name)
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
            self._rows.append((me, "compute", kind, label, start, self._clock[me], 0, None, microbatch, stage, source))

    def clock(self):
        return self._clock[self._me]

    def mark_live(self, bytes):
        now = self._clock[self._me]
        self._rows.append((self._me, "memory", "live", "live", now, now, int(bytes), None, None, None, "modelled"))

    @property
    def native(self):
        raise RuntimeError(
            "comm.native is torch.distributed, which simulated ranks do not have; use fw.run, or test `comm.simulated` first"
        )
