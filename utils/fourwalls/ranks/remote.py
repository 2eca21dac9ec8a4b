"""A rank whose communicator lives in another process: every call is a question over a socket, and the answer comes back.

This is how code that nobody vouches for takes part in a run: it has a process of its own, and messages, clock and Trace are kept
by the one who asks. Bytes are counted where they arrive, not where they are said to have been sent; what travels is plain data
(plain.py), so no object of this process reaches the other one.

    question = [verb, communicator, ...]        answer = ["ok", value]  or  ["error", kind, text]

Reference: Birrell and Nelson, "Implementing remote procedure calls", ACM TOCS 2 (1984).
"""

import traceback
from contextlib import contextmanager, nullcontext

import torch

from . import plain
from .comm import Comm, CommError, DeadlockError, MismatchError, RankError, Request, call_site
from .meter import Meter

__all__ = ["RemoteComm", "serve"]

ERRORS = {kind.__name__: kind for kind in (ValueError, RuntimeError, CommError, DeadlockError, MismatchError, RankError)}
MOST_FRAMES, MOST_TEXT = 20, 4000  # of a failure, told to the other side


class _Gone(BaseException):
    """The run is over. Not an Exception: a learner's `except Exception` must not stop it."""


class _Line:
    """The socket, and the one question that may be open on it."""

    def __init__(self, stream):
        self.stream = stream

    def ask(self, *question):
        try:
            plain.write(self.stream, list(question))
            answer = plain.read(self.stream)
        except (OSError, EOFError):
            raise _Gone from None
        if answer[0] == "ok":
            return answer[1]
        if answer[0] == "error":
            raise ERRORS.get(answer[1], RuntimeError)(answer[2])
        raise _Gone


class _RemoteRequest(Request):
    """One side of a message. A send keeps a copy of what was given, so that a buffer changed too early is named."""

    def __init__(self, line, number, tensor, sending):
        self._line, self._number, self._tensor, self._sending, self._finished = line, number, tensor, sending, False
        self._copy = tensor.detach().clone() if sending else None

    def wait(self):
        if self._finished:
            return None if self._sending else self._tensor
        arrived = self._line.ask("wait", 0, self._number, _site(2))
        self._finished = True
        if not self._sending:
            return _put(self._tensor, arrived)
        if not self._tensor.is_meta and not torch.equal(_bits(self._tensor), _bits(self._copy)):
            raise MismatchError("the buffer of an isend was changed before its wait()")
        self._copy = None
        return None

    @property
    def done(self):
        return self._finished or self._line.ask("done", 0, self._number)


class RemoteComm(Comm):
    """The communicator `number` of the process at the other end of `line`, seen from one rank."""

    simulated = True
    device = torch.device("cpu")

    def __init__(self, line: _Line, number: int, rank: int, size: int, seed: int, records_work: bool):
        self._line, self._number = line, number
        self.rank, self.size, self.seed, self.records_work = rank, size, seed, records_work

    def isend(self, x, to, tag=0):
        self._check_peer(to, tag, "send to")
        self._check_tensor(x, "send")
        return _RemoteRequest(self._line, self._line.ask("isend", self._number, x, to, tag, _site(2)), x, True)

    def irecv(self, buf, frm, tag=0):
        self._check_peer(frm, tag, "receive from")
        self._check_tensor(buf, "receive into")
        return _RemoteRequest(self._line, self._line.ask("irecv", self._number, _like(buf), frm, tag, _site(2)), buf, False)

    def send(self, x, to, tag=0):
        self._check_peer(to, tag, "send to")
        self._check_tensor(x, "send")
        self._line.ask("send", self._number, x, to, tag, _site(2))

    def recv(self, buf, frm, tag=0):
        self._check_peer(frm, tag, "receive from")
        self._check_tensor(buf, "receive into")
        return _put(buf, self._line.ask("recv", self._number, _like(buf), frm, tag, _site(2)))

    def exchange(self, x, to, buf, frm, tag=0):
        self._check_peer(to, tag, "send to")
        self._check_peer(frm, tag, "receive from")
        self._check_tensor(x, "send")
        self._check_tensor(buf, "receive into")
        return _put(buf, self._line.ask("exchange", self._number, x, to, _like(buf), frm, tag, _site(2)))

    def barrier(self):
        self._line.ask("barrier", self._number, _site(2))

    def split(self, color, key=0):
        made = self._line.ask("split", self._number, color, key, _site(2))
        return None if made is None else RemoteComm(self._line, *made, self.seed, self.records_work)

    def agree(self, call):
        self._line.ask("agree", self._number, tuple((str(field), str(value)) for field, value in call), _site(2))

    @contextmanager
    def compute(self, label, *, flops=None, bytes=None, seconds=None, kind="compute", microbatch=None, stage=None):
        stated = not (flops is None and bytes is None and seconds is None)
        meter = Meter() if self.records_work and not stated else nullcontext()
        with meter as counted:
            yield
        if counted is not None:
            flops, bytes = counted.flops, counted.bytes
        numbers = [None if v is None else float(v) for v in (flops, bytes, seconds)]
        self._line.ask("compute", self._number, str(label), *numbers, str(kind), microbatch, stage)

    def clock(self):
        return self._line.ask("clock", self._number)

    def mark_live(self, bytes):
        self._line.ask("live", self._number, int(bytes))

    @property
    def native(self):
        raise RuntimeError("comm.native is torch.distributed, which these ranks do not have: build it from messages")


def serve(stream, program, args, *, rank: int, size: int, seed: int, records_work: bool) -> None:
    """Run `program(comm, *args)` as rank `rank`, and tell the other side what it returned or how it failed."""
    torch.set_num_threads(1)
    line = _Line(stream)
    torch.default_generator.manual_seed(seed)
    comm = RemoteComm(line, 0, rank, size, seed, records_work)
    try:
        value = program(comm, *args)
        try:
            line.ask("return", 0, value)
        except plain.NotPlain as error:
            line.ask("raise", 0, "NotPlain", f"it returned {error}", [])
    except _Gone:
        pass
    except BaseException as error:  # whatever it is, SystemExit too, the other side hears of it
        frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)][-MOST_FRAMES:]
        try:
            line.ask("raise", 0, type(error).__name__, _text(error)[:MOST_TEXT], frames)
        except BaseException:
            pass


def _text(error) -> str:
    try:
        return str(error)
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def _like(buf):
    """What the other side must know of a buffer: shape and dtype, no bytes."""
    return torch.empty(buf.shape, dtype=buf.dtype, device="meta")


def _put(buf, arrived):
    with torch.no_grad():
        buf.detach().copy_(arrived)
    return buf


def _site(depth: int) -> tuple:
    code, line = call_site(depth + 1)
    return code.co_filename, line, code.co_name


def _bits(x):
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat
