"""What a rank can do: know its number, send, receive, wait, and say what it computes.

A rank program is an ordinary function `def program(comm, ...)`. The same function runs on real processes, under
`torchrun`, and on simulated ranks, since all three hand it an object of this class. Only point-to-point messages
are here; collectives are what the reader builds from them.

    a message matches when (sender, receiver, communicator, tag) agree; then shape and dtype must agree too

Reference: the MPI standard, chapter "Point-to-Point Communication".
"""

import sys
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from numbers import Real

import torch

__all__ = ["MAX_TAG", "Call", "Comm", "CommError", "DeadlockError", "MismatchError", "RankError", "Request", "call_site"]

MAX_TAG = 2**16 - 1


class CommError(RuntimeError):
    """Something between the ranks went wrong. `rank` is the rank to look at first, or None."""

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self):
        return (_rebuild_error, (type(self), self.args, self.__dict__.copy()))

    def _render_traceback_(self):
        """What IPython shows: the message alone; the frames of the launcher help nobody."""
        return [f"{type(self).__name__}: {self}"]


def _rebuild_error(kind, args, state):
    error = kind.__new__(kind)
    RuntimeError.__init__(error, *args)
    error.__dict__.update(state)
    return error


class MismatchError(CommError):
    """Two calls meet but do not fit: shape, dtype, or a buffer changed while it was on its way."""


class DeadlockError(CommError):
    """Every rank that is left waits, and none of the waits can end. `waits` maps a rank to its Call."""

    def __init__(self, message: str, *, rank: int | None = None, waits: dict | None = None):
        super().__init__(message, rank=rank)
        self.waits = waits or {}


class RankError(CommError):
    """A rank failed. `rank`, `kind` (the exception's class name, or e.g. "SIGKILL"), `errors` (rank -> text, first first)."""

    def __init__(self, message: str, *, rank: int | None = None, kind: str = "", errors: dict | None = None):
        super().__init__(message, rank=rank)
        self.kind = kind
        self.errors = errors or {}


class Call:
    """One call of a rank, as error messages name it: `rank 2: recv(from 1, tag 0, float32 (4,)) at In [7] line 3`."""

    __slots__ = ("dtype", "file", "function", "line", "op", "peer", "rank", "shape", "tag")

    def __init__(self, rank, op, peer=None, tag=0, shape=None, dtype=None, site=None):
        self.rank, self.op, self.peer, self.tag = rank, op, peer, tag
        self.shape = None if shape is None else tuple(shape)
        self.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        code, self.line = site or (None, 0)
        self.file, self.function = (code.co_filename, code.co_name) if code is not None else ("", "")

    def __str__(self) -> str:
        inside = []
        if self.peer is not None:
            inside.append(f"{'to' if 'send' in self.op else 'from'} {self.peer}")
        if self.tag:
            inside.append(f"tag {self.tag}")
        if self.shape is not None:
            inside.append(f"{self.dtype} {self.shape}")
        where = f" at {self.file}:{self.line} in {self.function}" if self.file else ""
        return f"{self.op}({', '.join(inside)}){where}"


# id of a code object -> (that object, whether it belongs to this package): a cache of a pure question, asked for each frame above
# each message. By id, since to hash a code object is to go through all its constants; the entry keeps it, so no other gets its id
_INSIDE: dict[int, tuple] = {}
BESIDE: dict = {}  # thread that works beside a rank's program -> the learner's line that it works for


def call_site(depth: int = 1) -> tuple:
    """(code object, line) of the nearest frame outside `fourwalls`, else of the caller: the learner's own line."""
    frame = first = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        known = _INSIDE.get(id(code))
        if known is None:
            name = frame.f_globals.get("__name__", "").partition(".")[0]
            known = _INSIDE[id(code)] = code, name in ("fourwalls", "threading", "torch")  # torch: backward calls us
        if not known[1]:
            return code, frame.f_lineno
        frame = frame.f_back
    return BESIDE.get(threading.get_ident()) or (first.f_code, first.f_lineno)


class Request(ABC):
    """A message on its way. `wait()` returns when the buffer may be used again, and gives the received tensor."""

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Block until the message is done. A second call returns at once."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""


class Comm(ABC):
    """The ranks that may talk, seen from one of them.

    rank, size   this rank's number, 0 <= rank < size
    device       torch.device on which tensors of this rank live
    seed         the run's seed; torch's default generator is seeded from (seed, rank) when the rank starts
    simulated    True on modelled ranks
    checks       True: shapes, dtypes and pending buffers are checked on every message
    records_work False where small compute blocks would tell nothing (a device whose work is free, or a benchmark): leave them out
    """

    rank: int
    size: int
    device: torch.device
    seed: int = 0
    simulated: bool = False
    checks: bool = True
    records_work: bool = True

    # --- the four verbs; a transport implements the two that do not wait -------------------------------------------
    @abstractmethod
    def isend(self, x: torch.Tensor, to: int, tag: int = 0) -> Request:
        """Begin to send `x`; do not change it before `wait()`.

        `x` may have any strides. Raises ValueError for a rank or tag that does not exist, a wrong device, or a message to itself
        that nothing receives; MismatchError where shape or dtype differ from the receive it meets.
        """

    @abstractmethod
    def irecv(self, buf: torch.Tensor, frm: int, tag: int = 0) -> Request:
        """Begin to receive into `buf`, which must have the sender's shape and dtype (strides may differ)."""

    def send(self, x: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send `x` and wait until it has been received (synchronous: never relies on a buffer somewhere)."""
        self.isend(x, to, tag).wait()

    def recv(self, buf: torch.Tensor, frm: int, tag: int = 0) -> torch.Tensor:
        """Wait for a message from rank `frm`, put it into `buf`, and return `buf`."""
        self.irecv(buf, frm, tag).wait()
        return buf

    def exchange(self, x: torch.Tensor, to: int, buf: torch.Tensor, frm: int, tag: int = 0) -> torch.Tensor:
        """Send `x` to rank `to` and receive `buf` from rank `frm` at once: the safe form for rings and swaps."""
        incoming = self.irecv(buf, frm, tag)
        outgoing = self.isend(x, to, tag)
        incoming.wait()
        outgoing.wait()
        return buf

    # --- everybody together ----------------------------------------------------------------------------------------
    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank of this communicator has called `barrier` (dissemination: ceil(log2 n) messages each)."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> "Comm | None":
        """Make one communicator for each `color`, ranks in order of (key, rank). Every rank must call it; None: in no group."""

    def one_call(self) -> AbstractContextManager:
        """`with comm.one_call():` all that a collective sends inside belongs to the one call that the learner made.

        A transport that notes the learner's line for every message then looks it up once; the others do nothing.
        """
        return nullcontext()

    def agree(self, call: tuple) -> None:  # noqa: B027
        """Checked mode of collectives: raise MismatchError, which says who says what, unless the k-th `call` of all ranks is
        the same.

        `call` is (("collective", name), (argument, value), ...). No event, no bytes, no virtual time. A transport that
        cannot, does nothing.
        """

    # --- work and time ---------------------------------------------------------------------------------------------
    @abstractmethod
    def compute(
        self,
        label: str,
        *,
        flops: float | None = None,
        bytes: float | None = None,
        seconds: float | None = None,
        kind: str = "compute",
        microbatch: int | None = None,
        stage: int | None = None,
    ) -> AbstractContextManager:
        """`with comm.compute("forward"):` records the block as work.

        Simulated: takes `seconds` if stated, else the modelled device's roofline time of `flops` and `bytes`; with none of the
        three, of the FLOPs and bytes counted from the operations inside. Real: measured; with `seconds`, sleeps until that much
        has passed, and the event is labelled paced. Raises ValueError for a cost below 0.
        """

    @abstractmethod
    def clock(self) -> int:
        """Picoseconds since the start of the run: the virtual clock, or the machine's."""

    @abstractmethod
    def mark_live(self, bytes: int) -> None:
        """Record that this rank now holds `bytes` live bytes (the curve under the timeline)."""

    @property
    @abstractmethod
    def native(self):
        """`torch.distributed`, initialised for the whole run, for comparison. RuntimeError on simulated ranks."""

    # --- shared by all transports ----------------------------------------------------------------------------------
    def _check_cost(self, label, flops, bytes, seconds) -> None:
        for name, value in (("flops", flops), ("bytes", bytes), ("seconds", seconds)):
            if value is not None and (not isinstance(value, Real) or not value >= 0):  # nan is no cost either
                raise ValueError(f"rank {self.rank}: compute({label!r}, {name}={value!r}): a cost is at least 0, or left out")

    def _check_peer(self, peer: int, tag: int, word: str) -> None:
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < self.size:
            near = f"; use int({peer!r})" if hasattr(peer, "__index__") and not isinstance(peer, (int, bool)) else ""
            raise ValueError(f"rank {self.rank}: {word} rank {peer!r} of {self.size}; ranks are 0 to {self.size - 1}{near}")
        if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MAX_TAG:
            near = f"; use int({tag!r})" if hasattr(tag, "__index__") and type(tag) is not int else ""
            raise ValueError(f"rank {self.rank}: tag {tag!r}; a tag is a whole number from 0 to {MAX_TAG}{near}")

    def _check_tensor(self, x: torch.Tensor, word: str) -> None:
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"rank {self.rank}: {word} takes a tensor, not {type(x).__name__}; try torch.tensor(...)")
        if x.device.type != self.device.type and x.device.type != "meta":
            raise ValueError(
                f"rank {self.rank}: {word} a tensor on {x.device}, but this rank's device is {self.device}; try x.to(comm.device)"
            )
        if x.layout != torch.strided:
            raise ValueError(f"rank {self.rank}: {word} a {x.layout} tensor; send x.to_dense(), or indices and values apart")
        if x.device.type != "meta" and x.numel() and not x.untyped_storage().nbytes():
            raise ValueError(
                f"rank {self.rank}: {word} a {tuple(x.shape)} tensor whose memory was given back (its storage is empty)"
            )
