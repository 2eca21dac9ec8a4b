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
from contextlib import contextmanager
from datetime import timedelta

import torch

from . import book as lines
from .agreement import compare_statements, tell_all
from .beside import refuse_forgotten
from .buffers import checksum, overlaps, share_memory
from .comm import MAX_TAG, Call, Comm, CommError, MismatchError, call_site
from .diagnose import explain_unanswered
from .groups import barrier, split_groups
from .messages import Message, PeerLost, compare, post_to_self, refuse_shared

__all__ = ["PeerLost", "ProcessComm", "World"]

_LAST_CONTEXT = 2**15 - 1
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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
        self.pending: dict[int, Message] = {}
        self.begun: dict = {}  # jobs beside the program that it has not waited for yet (beside.py)
        self.waiters: dict[int, int] = {}  # message -> the thread that waits for it: the backend can be waited for only once
        self.label: str | None = None
        self.next_context = 3  # 1 and 2 belong to the communicator of all ranks
        self.settling = False
        self.main = threading.get_ident()
        self.waiting = 0
        self.quiet: set[int] = set()  # threads whose messages are control traffic at present
        self.joined = False  # whether the program waits for a second thread of this rank (beside.py)
        self.behind: tuple | None = None  # (since, line) of a wait in that thread

    def comm(self) -> "ProcessComm":
        """The communicator of all ranks."""
        return ProcessComm(self, tuple(range(self.size)), 1)

    def begin(self, *, seed: int, checks: bool, start: int) -> None:
        """A new program on the same ranks: nothing of the one before is left."""
        self.seed, self.checks, self.start, self.settling = seed, checks, start, False
        self.events, self.label, self.next_context = [], None, 3
        self.to_self.clear()
        self.begun.clear()

    def settle(self) -> list[Call]:
        """The program has returned: see its unwaited messages through, and name them.

        Raises CommError for a message to itself that was never answered, and for jobs beside the program that it has not waited
        for; messages that nobody answers are found by the supervisor.
        """
        refuse_forgotten(self.begun, self.rank)
        open_ = [*self.pending.values()]
        self.settling = True
        lost = [r.message.call() for queue in self.to_self.values() for r in queue]
        if lost:
            raise CommError(explain_unanswered(lost), rank=self.rank)
        for message in open_:
            message.wait()
        return [message.call() for message in open_]

    @contextmanager
    def silence(self):
        """Messages of this thread leave no trace; those of another go on doing so."""
        me = threading.get_ident()
        self.quiet.add(me)
        try:
            yield
        finally:
            self.quiet.discard(me)

    def now(self) -> int:
        """Picoseconds since the start of the run."""
        return (time.perf_counter_ns() - self.start) * 1000


class ProcessComm(Comm):
    """A real rank's view of one communicator; `members` are the ranks of the whole run that belong to it."""

    def __init__(self, world: World, members: tuple[int, ...], context: int):
        self._world, self._members, self._context, self._statements = world, members, context, 0
        self.rank, self.size = members.index(world.rank), len(members)
        self.device, self.seed, self.checks, self.records_work = world.device, world.seed, world.checks, world.checks

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
        if x is buf or (x.device == buf.device and share_memory(x, buf)):
            x = x.clone()  # what was there before the receive is what travels
        incoming = self._post(buf, frm, tag, False, "exchange recv")
        outgoing = self._post(x, to, tag, True, "exchange send")
        incoming.wait()
        outgoing.wait()
        return buf

    def _post(self, x, peer, tag, sending, op, sealed=False, internal=False):
        self._check_data(x, sending)
        world = self._world
        target, context = self._members[peer], self._context + internal
        message = Message(world, x, sending, target, tag, op)
        if self.checks:
            message.site, message.memory = call_site(3), x.untyped_storage().data_ptr()
            refuse_shared(message)
        if target == world.rank:
            return post_to_self(world, message, context)
        channel = (target, sending) if world.by_order else (target, context, tag, sending)
        n = world.counts.get(channel, 0)
        world.counts[channel] = n + 1
        text = b""
        if self.checks:
            signature = op if internal else f"{_DTYPES[x.dtype]} {tuple(x.shape)}"
            text = lines.write_text(op, signature, message.site)
        key = (0, 0) if world.by_order else (context, tag)
        if world.by_order:  # NCCL matches by order alone, so the tag is compared, not searched for
            text += f"\0{context}\0{tag}".encode() if text else b""
        message.slot, other = world.book.post(sending, target, *key, n, text)
        if other and text:
            compare(world.rank, target, tag, text, other)
        message.begin(context * 65536 + tag)
        if sealed:
            message.seal = checksum(x)
        return message

    def _check_data(self, x, sending):
        if (
            x.__class__ is torch.Tensor
            and x.device == self.device
            and x.layout is torch.strided
            and (sending or x.is_contiguous())
        ):
            return
        word = "send" if sending else "receive into"
        self._check_tensor(x, word)
        if x.is_meta:
            raise ValueError(
                f"rank {self.rank}: {word} a meta tensor, which has a shape but no data; use fw.simulate, or real data"
            )
        if x.device != self.device:
            raise ValueError(
                f"rank {self.rank}: {word} a tensor on {x.device}, but this rank's device is {self.device}; try x.to(comm.device)"
            )
        if x.is_quantized:
            raise ValueError(f"rank {self.rank}: {word} a quantized tensor; send x.int_repr() and its scales")
        if not sending and not x.is_contiguous() and overlaps(x):
            raise ValueError(f"rank {self.rank}: receive into an expanded tensor, whose elements share memory; use .contiguous()")

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
                raise MismatchError(
                    compare_statements({self.rank: call, rank: theirs}, {self.rank: site, rank: where}), rank=self._world.rank
                )

    def _silently(self, *exchange):
        """Control traffic, which leaves no trace."""
        with self._world.silence():
            self._internal(*exchange)

    def _agree_on_largest(self, number: int) -> int:
        """The largest of all ranks' numbers, after ceil(log2 n) rounds of telling the next what one has heard."""
        known, distance = torch.tensor([number]), 1
        while distance < self.size:
            heard = torch.empty_like(known)
            self._silently(known.clone(), (self.rank + distance) % self.size, heard, (self.rank - distance) % self.size, "split")
            known, distance = torch.maximum(known, heard), 2 * distance
        return int(known)

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
        self._check_cost(label, flops, bytes, seconds)
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
        self._world.events.append(
            (self._world.rank, "memory", "live", "live", now, now, int(bytes), None, None, None, "measured")
        )

    @property
    def native(self):
        return torch.distributed
