"""One message of a real rank, from the call that begins it to the wait that ends it.

The backend moves contiguous memory only, so a tensor with other strides travels as a copy and is put back in place. While a
message waits, its rank says so in the book; when it is done, it leaves its events in the trace, and a buffer that was changed
meanwhile is named.

    begin (backend.send or recv) -> wait (the book says WAITING) -> events, checks

Reference: MPI's requests; torch.distributed's Work.
"""

import threading
import time
from concurrent.futures import Future

import torch

from . import book as lines
from .buffers import checksum, share_memory
from .comm import Call, CommError, MismatchError, Request
from .diagnose import MISMATCHES

__all__ = ["Message", "PeerLost", "ToSelf", "compare", "mismatch", "post_to_self", "refuse_shared"]


class PeerLost(CommError):
    """The connection to another rank broke after `waited` seconds in `call`, or (`late`) the world's patience ended.

    A symptom: whoever watches the run looks for the rank that failed first.
    """

    def __init__(self, message, *, rank=None, call=None, late=False, waited=0.0):
        super().__init__(message, rank=rank)
        self.call, self.late, self.waited = call, late, waited


class Message(Request):
    """One side of one message. `data` is what the backend moves: `x` itself, or a copy where `x` is not contiguous."""

    __slots__ = (
        "begun",
        "copy",
        "data",
        "finished",
        "label",
        "memory",
        "op",
        "peer",
        "seal",
        "sending",
        "site",
        "slot",
        "tag",
        "watcher",
        "work",
        "world",
        "x",
    )

    def __init__(self, world, x, sending, peer, tag, op):
        self.world, self.x, self.sending, self.peer, self.tag, self.op = world, x, sending, peer, tag, op
        self.label, self.begun = world.label, world.now()
        self.finished, self.seal, self.site, self.slot, self.watcher, self.work = False, None, None, -1, None, None
        self.copy = self.memory = None

    def begin(self, tag: int) -> None:
        """Hand the message to the backend."""
        x, world = self.x, self.world
        data = x.detach() if x.requires_grad else x
        if data.is_conj() or data.is_neg() or not data.is_contiguous():
            if self.sending:
                data = data.resolve_conj().resolve_neg().contiguous()
            else:
                data = self.copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if data.is_cuda:  # NCCL knows few dtypes and no empty message: bytes will do
            data = data.reshape(-1).view(torch.uint8) if data.numel() else data.new_empty(1, dtype=torch.uint8)
        self.data = data
        backend = world.backends[0 if (self.peer > world.rank) == self.sending else 1]
        try:
            self.work = (backend.send if self.sending else backend.recv)([data], self.peer, tag)
        except RuntimeError as error:
            raise self._lost(error) from None
        world.pending[id(self)] = self

    def wait(self):
        if self.finished:
            return None if self.sending else self.x
        world, me = self.world, threading.get_ident()
        if world.waiters.setdefault(id(self), me) != me:
            return self._await_other()
        try:
            self._await(world, me)
        finally:
            world.waiters.pop(id(self), None)
        return None if self.sending else self.x

    def _await(self, world, me):
        before = time.perf_counter_ns()
        aside = me != world.main and world.device.type == "cpu"
        unsure = not world.settling and (world.waiting > 0 or (aside and not world.joined))
        if aside:
            world.behind = before, self.slot
        world.waiting += 1
        if not (aside and world.settling):  # the program has returned: its own thread speaks for this rank
            world.book.say(lines.SETTLING if world.settling else lines.WAITING, before, self.slot, unsure or self.slot < 0)
        try:
            if self.watcher is not None:
                self.watcher.result()
            elif world.device.type == "cuda":  # makes the stream wait; the processor waits only where messages are checked
                self.work.wait()
                if world.checks:
                    torch.cuda.current_stream(world.device).synchronize()
            else:
                self.work.wait(world.patience)
        except RuntimeError as error:
            raise self._lost(error, (time.perf_counter_ns() - before) / 1e9) from None
        finally:
            world.waiting -= 1
            after = time.perf_counter_ns()
            if not (aside and world.settling):
                world.book.say(lines.RUNNING, after)
            if aside:
                world.behind = None
        self._complete(before, before if aside else after, after)

    def _await_other(self):
        """Another thread waits for this message already, and the backend answers only one: look on until that one has it."""
        world, before = self.world, time.perf_counter_ns()
        mine = threading.get_ident() == world.main
        if mine:
            world.book.say(lines.SETTLING if world.settling else lines.WAITING, before, self.slot, self.slot < 0)
        while id(self) in world.waiters:
            waited = (time.perf_counter_ns() - before) / 1e9
            if waited > world.patience.total_seconds():
                raise self._lost(RuntimeError("timed out waiting"), waited)
            time.sleep(0.001)
        if not self.finished:
            raise self._lost(RuntimeError("another thread's wait for it has failed"), (time.perf_counter_ns() - before) / 1e9)
        if mine:
            world.book.say(lines.RUNNING, time.perf_counter_ns())
        return None if self.sending else self.x

    def _complete(self, before, waited, after):
        """`before` to `waited`: how long the program itself stood still (not at all for a message of a second thread)."""
        world, x = self.world, self.x
        self.finished = True
        world.pending.pop(id(self), None)
        world.book.release(self.slot)
        if threading.get_ident() not in world.quiet:
            self._record(before, waited, after)
        if not self.sending:
            if self.copy is not None:
                with torch.no_grad():
                    x.copy_(self.copy)
            elif not x.is_inference():
                torch.autograd.graph.increment_version(x)  # the backend's write is one that autograd must know of
        elif self.seal is not None and self.seal != checksum(x):
            raise mismatch("changed", world.rank, self.call())
        self.data = self.copy = self.work = None

    def _record(self, before, waited, after):
        world, x = self.world, self.x
        start, rank = world.start, world.rank
        lane = "send" if self.sending else "recv"
        end = (after - start) * 1000
        world.events.append((rank, lane, lane, self.label or lane, self.begun, end, x.nbytes, self.peer, None, None, "measured"))
        if waited > before:
            name = "wait to send" if self.sending else "wait to receive"
            world.events.append(
                (rank, "compute", "wait", name, (before - start) * 1000, end, 0, self.peer, None, None, "measured")
            )

    def call(self) -> Call:
        return Call(self.world.rank, self.op, self.peer, self.tag, self.x.shape, self.x.dtype, self.site)

    @property
    def done(self):
        if self.finished:
            return True
        if self.world.device.type == "cuda":
            return self.work.is_completed()
        if self.watcher is None:  # gloo cannot be asked, only waited for, and only once
            self.watcher = Future()
            threading.Thread(target=_wait_into, args=(self.watcher, self.work, self.world.patience), daemon=True).start()
            time.sleep(0.0002)
        return self.watcher.done()

    def _lost(self, error: RuntimeError, waited: float = 0.0) -> PeerLost:
        said, who = (str(error).strip().splitlines() or [type(error).__name__])[0], f"rank {self.world.rank}"
        late = "imed out" in said
        word = f"waited {self.world.patience.total_seconds():g} s for" if late else "lost the connection to"
        text = f"{who} {word} rank {self.peer} in {self.call()}: {said}"
        return PeerLost(text, rank=self.peer, call=self.call(), late=late, waited=waited)


class ToSelf(Request):
    """A message of a rank to itself: one copy, when both sides have been posted."""

    __slots__ = ("finished", "message", "world")

    def __init__(self, world, message):
        self.world, self.message, self.finished = world, message, False

    def wait(self):
        if not self.finished:
            word = (
                "sends to itself, but has posted no irecv"
                if self.message.sending
                else "receives from itself, but has posted no isend"
            )
            raise ValueError(f"rank {self.world.rank} {word}: nobody else can end this wait; post the other side first")
        return None if self.message.sending else self.message.x

    @property
    def done(self):
        return self.finished


def post_to_self(world, message: Message, context: int) -> ToSelf:
    """Join the message with the other side if that has been posted, else keep it until then."""
    request = ToSelf(world, message)
    waiting = world.to_self.setdefault((context, message.tag), [])
    if not waiting or waiting[0].message.sending == message.sending:
        waiting.append(request)
        return request
    other = waiting.pop(0)
    send, recv = (message, other.message) if message.sending else (other.message, message)
    if send.x.shape != recv.x.shape or send.x.dtype != recv.x.dtype:
        raise mismatch("differ", world.rank, send.call(), recv.call())
    with torch.no_grad():
        recv.x.copy_(send.x)
    now, row = world.now(), (send.x.nbytes, world.rank, None, None, "measured")
    world.events.append((world.rank, "send", "send", send.label or "send", send.begun, now, *row))
    world.events.append((world.rank, "recv", "recv", recv.label or "recv", recv.begun, now, *row))
    request.finished = other.finished = True
    return request


def refuse_shared(message: Message) -> None:
    """Raise MismatchError if the message and another that is on its way touch the same bytes, and one of them writes."""
    x = message.x
    for other in list(message.world.pending.values()):  # a second thread may add to them meanwhile
        if message.sending and other.sending or other.memory != message.memory or not share_memory(x, other.x):
            continue
        raise mismatch("shared", message.world.rank, other.call(), message.call())


def compare(rank, peer, tag, mine: bytes, theirs: bytes) -> None:
    """Raise MismatchError if the two lines' tensors (or, where order matches, tags) differ."""
    a, b = mine.split(b"\0"), theirs.split(b"\0")
    if a[1] == b[1] and a[5:] == b[5:]:
        return
    tags = [int(side[6]) if len(side) > 6 else tag for side in (a, b)]
    raise mismatch("differ", rank, lines.read_text(mine, rank, peer, tags[0]), lines.read_text(theirs, peer, rank, tags[1]))


def mismatch(about: str, rank: int, *calls: Call) -> MismatchError:
    """The error, with the calls kept apart from its text: where the notebook is, they are described with its cells and lines."""
    error = MismatchError(MISMATCHES[about](*calls), rank=rank)
    error.about, error.calls = about, calls
    return error


def _wait_into(result: Future, work, patience) -> None:
    try:
        result.set_result(work.wait(patience))
    except RuntimeError as error:
        result.set_exception(error)
