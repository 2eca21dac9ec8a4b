"""Real messages between processes: a Comm over torch's gloo (CPUs) or NCCL (GPUs).

Each message is one point-to-point transfer of the backend, under a tag that holds the communicator and the learner's tag.
Before a transfer is begun its line is written into the book, so two calls that do not fit are refused on the side that came
second, and the backend, which would abort the process, never sees them. gloo moves a message only once its receive has been
posted: sends wait for their receive here exactly as they do in the simulator.

    backend tag = communicator * 2**16 + tag

Reference: torch.distributed, `ProcessGroup.send` and `recv`; MPI's communicators (a context that no tag can leave).
"""

import ast
import threading
import time
import zlib
from contextlib import contextmanager
from datetime import timedelta

import torch

from . import book as lines
from .agreement import tell_all
from .agreement import compare_statements, tell_all
from .comm import MAX_TAG, Call, Comm, CommError, MismatchError, Request, call_site
from .diagnose import explain_changed, explain_mismatch, explain_unanswered
from .groups import barrier, split_groups

__all__ = ["PeerLost", "ProcessComm", "World"]

_LAST_CONTEXT = 2**15 - 1
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class PeerLost(CommError):
    """The connection to another rank broke, or (`late`) a wait in `call` took longer than the world's patience.

    A symptom: whoever watches the run looks for the rank that failed first.
    """

    def __init__(self, message, *, rank=None, call=None, late=False):
        super().__init__(message, rank=rank)
        self.call, self.late = call, late


class World:
    """What all communicators of one process share.

    rank, size   in the whole run          device    where this rank's tensors live
    backends     (ahead, back): the c10d backend for messages to a higher rank, and to a lower one (one and the same with gloo)
    book         where calls are written (book.Book under a supervisor, cluster.StoreBook under torchrun)
    patience     seconds after which a wait raises; None: the supervisor decides
    """

    def __init__(self, *, rank, size, device, backends, book, checks=True, seed=0, start=0, patience=None, by_order=False):
        self.rank, self.size, self.device, self.backends, self.book = rank, size, device, backends, book
        self.checks, self.seed, self.start, self.by_order = checks, seed, start, by_order
        self.patience = timedelta(seconds=patience) if patience else timedelta(days=20)
        self.events: list[tuple] = []
        self.counts: dict[tuple, int] = {}
        self.to_self: dict[tuple, list] = {}
        self.pending: dict[int, _Message] = {}
        self.label: str | None = None
        self.next_context = 3  # 1 and 2 belong to the communicator of all ranks
        self.settling = False
        self.main = threading.get_ident()
        self.waiting = 0

    def comm(self) -> "ProcessComm":
        """The communicator of all ranks."""
        return ProcessComm(self, tuple(range(self.size)), 1)

    def begin(self, *, seed: int, checks: bool, start: int) -> None:
        """A new program on the same ranks: nothing of the one before is left."""
        self.seed, self.checks, self.start, self.settling = seed, checks, start, False
        self.events, self.label, self.next_context = [], None, 3
        self.to_self.clear()

    def settle(self) -> list[Call]:
        """The program has returned: see its unwaited messages through, and name them.

        Raises CommError for a message to itself that was never answered; for the others the supervisor does.
        """
        open_ = [*self.pending.values()]
        self.settling = True
        lost = [r.message.call() for queue in self.to_self.values() for r in queue]
        if lost:
            raise CommError(explain_unanswered(lost), rank=self.rank)
        for message in open_:
            message.wait()
        return [message.call() for message in open_]

    def now(self) -> int:
        """Picoseconds since the start of the run."""
        return (time.perf_counter_ns() - self.start) * 1000


class ProcessComm(Comm):
    """A real rank's view of one communicator; `members` are the ranks of the whole run that belong to it."""

    def __init__(self, world: World, members: tuple[int, ...], context: int):
        self._world, self._members, self._context, self._statements = world, members, context, 0
        self.rank, self.size = members.index(world.rank), len(members)
        self.device, self.seed, self.checks = world.device, world.seed, world.checks

    # --- messages --------------------------------------------------------------------------------------------------
    def isend(self, x, to, tag=0):
        if to.__class__ is not int or not 0 <= to < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(to, tag, "send to")
        return self._post(x, to, tag, True, "isend", self.checks)

    def irecv(self, buf, frm, tag=0):
        if frm.__class__ is not int or not 0 <= frm < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(frm, tag, "receive from")
        return self._post(buf, frm, tag, False, "irecv")

    def send(self, x, to, tag=0):
        if to.__class__ is not int or not 0 <= to < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(to, tag, "send to")
        self._post(x, to, tag, True, "send").wait()

    def recv(self, buf, frm, tag=0):
        if frm.__class__ is not int or not 0 <= frm < self.size or tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
            self._check_peer(frm, tag, "receive from")
        self._post(buf, frm, tag, False, "recv").wait()
        return buf

    def exchange(self, x, to, buf, frm, tag=0):
        self._check_peer(to, tag, "send to")
        self._check_peer(frm, tag, "receive from")
        incoming = self._post(buf, frm, tag, False, "exchange recv")
        outgoing = self._post(x, to, tag, True, "exchange send")
        incoming.wait()
        outgoing.wait()
        return buf

    def _post(self, x, peer, tag, sending, op, sealed=False, internal=False):
        self._check_data(x, sending)
        world = self._world
        target, context = self._members[peer], self._context + internal
        message = _Message(world, x, sending, target, tag, op)
        if self.checks:
            message.site = call_site(3)
        if target == world.rank:
            return _post_to_self(world, message, context)
        channel = (target, sending) if world.by_order else (target, context, tag, sending)
        n = world.counts.get(channel, 0)
        world.counts[channel] = n + 1
        text = b""
        if self.checks:
            signature = "" if internal else f"{_DTYPES[x.dtype]} {tuple(x.shape)}"
            text = lines.write_text(op, signature, message.site)
        key = (0, 0) if world.by_order else (context, tag)
        if world.by_order:  # NCCL matches by order alone, so the tag is compared, not searched for
            text += f"\0{context}\0{tag}".encode() if text else b""
        message.slot, other = world.book.post(sending, target, *key, n, text)
        if other and text:
            _compare(world.rank, target, tag, text, other)
        message.begin(context * 65536 + tag)
        if sealed:
            message.seal = _checksum(x)
        return message

    def _check_data(self, x, sending):
        if x.__class__ is torch.Tensor and x.device == self.device and x.layout is torch.strided and (sending or x.is_contiguous()):
            return
        word = "send" if sending else "receive into"
        self._check_tensor(x, word)
        if x.is_meta:
            raise ValueError(f"rank {self.rank}: {word} a meta tensor, which has a shape but no data; real ranks need data (or use fw.simulate)")
        if x.device != self.device:
            raise ValueError(f"rank {self.rank}: {word} a tensor on {x.device}, but this rank's device is {self.device}; try x.to(comm.device)")
        if x.is_quantized:
            raise ValueError(f"rank {self.rank}: {word} a quantized tensor; send x.int_repr() and its scales")
        if not sending and not x.is_contiguous() and _overlaps(x):
            raise ValueError(f"rank {self.rank}: receive into an expanded tensor, whose elements share memory; use .contiguous() or torch.empty")

    # --- everybody together ----------------------------------------------------------------------------------------
    def barrier(self):
        barrier(self, self._internal)

    def split(self, color, key=0):
        world = self._world
        context = self._agree_on_largest(world.next_context)
        if context + 1 > _LAST_CONTEXT:
            raise ValueError(f"rank {self.rank}: too many communicators; make them once, not in each step")
        members = split_groups(self, self._internal, color, key)
        # Groups of one split share no pair of ranks, so they may share the context
        world.next_context = context + 2
        return None if members is None else ProcessComm(world, tuple(self._members[r] for r in members), context)

    def agree(self, call):
        if not self.checks:
            return
        self._statements += 1
        code, line = call_site(2)
        site = (code.co_filename[-200:], line, code.co_name[:60])
        others = self._world.book.state(self._context, self._statements, self._members, repr((call, site)).encode())
        if others is None:  # no memory in common: tell each other
            tell_all(self, self._silently, call, site)
            return
        for rank, text in others:
            theirs, where = ast.literal_eval(text.decode())
            if theirs != call:
                rank = self._members.index(rank)
                raise MismatchError(compare_statements({self.rank: call, rank: theirs}, {self.rank: site, rank: where}), rank=self._world.rank)

    def _silently(self, *exchange):
        """Control traffic, which leaves no trace."""
        before = len(self._world.events)
        self._internal(*exchange)
        del self._world.events[before:]

    def _agree_on_largest(self, number: int) -> int:
        """The largest of all ranks' numbers, after ceil(log2 n) rounds of telling the next what one has heard."""
        known, distance = torch.tensor([number]), 1
        while distance < self.size:
            heard = torch.empty_like(known)
            self._internal(known.clone(), (self.rank + distance) % self.size, heard, (self.rank - distance) % self.size, "split")
            known, distance = torch.maximum(known, heard), 2 * distance
        return int(known)

    def agree(self, call):
        before = len(self._world.events)
        tell_all(self, self._internal, call, call_site(2))
        del self._world.events[before:]  # control traffic is no part of the run's cost

    def _internal(self, x, to, buf, frm, name):
        """Exchange on a channel of its own, which no tag of the learner's can reach."""
        there = buf if buf.device == self.device else buf.to(self.device)
        incoming = self._post(there, frm, 0, False, name, internal=True)
        outgoing = self._post(x.to(self.device), to, 0, True, name, internal=True)
        incoming.wait()
        outgoing.wait()
        if there is not buf:
            buf.copy_(there)

    # --- work and time ---------------------------------------------------------------------------------------------
    @contextmanager
    def compute(self, label, *, flops=None, bytes=None, seconds=None, kind="compute", microbatch=None, stage=None):
        world = self._world
        outer, world.label = world.label, label
        begin = world.now()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            if seconds is not None:
                time.sleep(max(0.0, seconds - (world.now() - begin) / 1e12))
        finally:
            world.label = outer
        source = "measured" if seconds is None else "paced"
        world.events.append((world.rank, "compute", kind, label, begin, world.now(), 0, None, microbatch, stage, source))

    def clock(self):
        return self._world.now()

    def mark_live(self, bytes):
        now = self._world.now()
        self._world.events.append((self._world.rank, "memory", "live", "live", now, now, int(bytes), None, None, None, "measured"))

    @property
    def native(self):
        return torch.distributed


class _Message(Request):
    """One side of one message. `data` is what the backend moves; it is `x` itself where `x` is contiguous."""

    __slots__ = ("begun", "data", "finished", "label", "op", "peer", "seal", "sending", "site", "slot", "tag", "watcher", "work", "world", "x")

    def __init__(self, world, x, sending, peer, tag, op):
        self.world, self.x, self.sending, self.peer, self.tag, self.op = world, x, sending, peer, tag, op
        self.label, self.begun = world.label, world.now()
        self.finished, self.seal, self.site, self.slot, self.watcher, self.work = False, None, None, -1, None, None

    def begin(self, tag):
        x, world = self.x, self.world
        data = x.detach() if x.requires_grad else x
        if self.sending:
            data = data.resolve_conj().resolve_neg() if data.is_conj() or data.is_neg() else data
            data = data if data.is_contiguous() else data.contiguous()
        elif not data.is_contiguous() or data.is_conj() or data.is_neg():
            data = torch.empty(data.shape, dtype=data.dtype, device=data.device)
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
        world = self.world
        before = time.perf_counter_ns()
        unsure = world.waiting > 0 or (threading.get_ident() != world.main and world.device.type == "cpu")
        world.waiting += 1
        world.book.say(lines.SETTLING if world.settling else lines.WAITING, before, self.slot, unsure or self.slot < 0)
        try:
            if self.watcher is not None:
                self.watcher.join()
            self.work.wait(world.patience)
            if world.device.type == "cuda":
                torch.cuda.current_stream(world.device).synchronize()
        except RuntimeError as error:
            raise self._lost(error) from None
        finally:
            world.waiting -= 1
            after = time.perf_counter_ns()
            world.book.say(lines.RUNNING, after)
        self._complete(before, after)
        return None if self.sending else self.x

    def _complete(self, before, after):
        world, x = self.world, self.x
        self.finished = True
        world.pending.pop(id(self), None)
        world.book.release(self.slot)
        start, rank = world.start, world.rank
        lane = "send" if self.sending else "recv"
        end = (after - start) * 1000
        world.events.append(
            (rank, lane, lane, self.label or lane, self.begun, end, x.nbytes, self.peer, None, None, "measured")
        )
        if after > before:
            name = "wait to send" if self.sending else "wait to receive"
            world.events.append((rank, "compute", "wait", name, (before - start) * 1000, end, 0, self.peer, None, None, "measured"))
        if not self.sending:
            with torch.no_grad():
                if self.data.data_ptr() != x.data_ptr() or self.data.stride() != x.stride():
                    x.copy_(self.data)
                elif not x.is_inference():
                    torch.autograd.graph.increment_version(x)
        elif self.seal is not None and self.seal != _checksum(x):
            error = MismatchError(explain_changed(self.call()), rank=rank)
            error.calls = (self.call(),)
            raise error
        self.data = self.work = None

    def call(self) -> Call:
        return Call(self.world.rank, self.op, self.peer, self.tag, self.x.shape, self.x.dtype, self.site)

    @property
    def done(self):
        if self.finished:
            return True
        if self.world.device.type == "cuda":
            return self.work.is_completed()
        if self.watcher is None:  # gloo cannot be asked, only waited for
            self.watcher = threading.Thread(target=_quietly, args=(self.work.wait, self.world.patience), daemon=True)
            self.watcher.start()
            self.watcher.join(0.0005)
        return not self.watcher.is_alive()

    def _lost(self, error):
        said = str(error).strip().splitlines()
        text, who, late = said[0] if said else type(error).__name__, f"rank {self.world.rank}", bool(said) and "imed out" in said[0]
        word = f"waited {self.world.patience.total_seconds():g} s for" if late else "lost the connection to"
        return PeerLost(f"{who} {word} rank {self.peer} in {self.call()}: {text}", rank=self.peer, call=self.call(), late=late)


class _ToSelf(Request):
    """A message of a rank to itself: one copy, when both sides have been posted."""

    __slots__ = ("finished", "message", "world")

    def __init__(self, world, message):
        self.world, self.message, self.finished = world, message, False

    def wait(self):
        if not self.finished:
            word = "sends to itself, but has posted no irecv" if self.message.sending else "receives from itself, but has posted no isend"
            raise ValueError(f"rank {self.world.rank} {word}: nobody else can end this wait; post the other side first")
        return None if self.message.sending else self.message.x

    @property
    def done(self):
        return self.finished


def _post_to_self(world: World, message: _Message, context: int) -> _ToSelf:
    request = _ToSelf(world, message)
    waiting = world.to_self.setdefault((context, message.tag), [])
    if not waiting or waiting[0].message.sending == message.sending:
        waiting.append(request)
        return request
    other = waiting.pop(0)
    send, recv = (message, other.message) if message.sending else (other.message, message)
    if send.x.shape != recv.x.shape or send.x.dtype != recv.x.dtype:
        error = MismatchError(explain_mismatch(send.call(), recv.call()), rank=world.rank)
        error.calls = (send.call(), recv.call())
        raise error
    with torch.no_grad():
        recv.x.copy_(send.x)
    now, row = world.now(), (send.x.nbytes, world.rank, None, None, "measured")
    world.events.append((world.rank, "send", "send", send.label or "send", send.begun, now, *row))
    world.events.append((world.rank, "recv", "recv", recv.label or "recv", recv.begun, now, *row))
    request.finished = other.finished = True
    return request


def _checksum(x: torch.Tensor) -> int:
    """A number that any plausible change of the bytes of `x` changes: small tensors by CRC, large ones by row and column sums.

    torch's own count of writes would not do: it is shared by all views of a tensor (a neighbour's write would be blamed), and
    misses writes through `.data` or numpy.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cpu" or flat.numel() > 2**16:
        flat = flat.clone() if flat.storage_offset() % 8 else flat  # a view as int64 must begin on a whole one
        whole = flat[: flat.numel() // 8192 * 8192].view(torch.int64).view(-1, 1024)
        tail = flat[whole.numel() * 8 :]
        flat = torch.cat([whole.sum(0), whole.sum(1)]).view(torch.uint8).cpu(), tail.cpu()
    else:
        flat = (flat,)
    mark = 0
    for part in flat:
        mark = zlib.crc32(memoryview(part.numpy()), mark)
    return mark


def _compare(rank, peer, tag, mine: bytes, theirs: bytes) -> None:
    """Raise MismatchError if the two lines' tensors (or, where order matches, tags) differ."""
    a, b = mine.split(b"\0"), theirs.split(b"\0")
    if a[1] == b[1] and a[5:] == b[5:]:
        return
    tags = [int(side[6]) if len(side) > 6 else tag for side in (a, b)]
    first, second = lines.read_text(mine, rank, peer, tags[0]), lines.read_text(theirs, peer, rank, tags[1])
    error = MismatchError(explain_mismatch(first, second), rank=rank)
    error.calls = (first, second)
    raise error


def _overlaps(x: torch.Tensor) -> bool:
    """Whether two elements of `x` may share memory."""
    reach = 1
    for stride, size in sorted((abs(st), sz) for sz, st in zip(x.shape, x.stride(), strict=True) if sz > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def _quietly(wait, patience) -> None:
    try:
        wait(patience)
    except RuntimeError:
        pass  # the wait of the request itself will tell
