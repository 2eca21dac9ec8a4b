"""The judge's half of a rank: a simulated rank that does what a process of the learner asks for, and keeps the books.

It runs as an ordinary program of the simulator, so messages, clock, deadlocks and mismatches are the simulator's own; while it
waits for the next question, no other rank runs, so a run is the same every time. What the learner's process says is read as
plain data, and its silence, end or nonsense ends the run with a Failure.

    question in -> comm.verb(...) -> answer out,     until "return" or "raise"

Reference: ranks/remote.py, the learner's half.
"""

import re
import socket
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ..ranks import comm as communication
from ..ranks import plain
from ..ranks.comm import MismatchError
from ..ranks.places import place

__all__ = ["Failed", "Failure", "Task", "own_line"]

MOST_HEARD = 256 * 2**20  # bytes that the ranks of one run may say in all
_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')  # as faulthandler writes it


@dataclass
class Failure:
    """Why a run has no values. kind: an exception's name, or "hang", "dead", "DeadlockError", "MismatchError", "NotPlain"."""

    kind: str
    text: str
    rank: int | None = None
    where: str = ""

    def __str__(self) -> str:
        first = self.text if self.kind in ("hang", "dead", "NotPlain") else f"{self.kind}: {self.text}"
        who = "" if self.rank is None or self.text.startswith("rank ") else f"rank {self.rank}: "
        return who + first + (f"\n  at {self.where}" if self.where else "")


class Failed(Exception):
    """Ends a stand-in whose rank has failed; what happened is in `failure`."""

    def __init__(self, failure):
        super().__init__(str(failure))
        self.failure = failure


class Task:
    """The program of the stand-ins: rank r does what the fork of rank r asks for."""

    def __init__(self, apart, driver, functions, args, per_rank, end, limit, each=None, alter=None):
        self.apart, self.driver, self.functions, self.args, self.per_rank = apart, driver, functions, args, per_rank
        self.end, self.limit, self.each, self.alter = end, limit, each, alter
        self.heard = 0  # bytes

    def __call__(self, comm):
        ours, theirs = socket.socketpair()
        try:
            child = self.apart.start_rank(theirs, self, comm.rank, comm.size, comm.seed, comm.records_work)
            theirs.close()
            return _StandIn(comm, ours, self, child).work()
        finally:
            communication.BESIDE.pop(threading.get_ident(), None)
            theirs.close()
            ours.close()


class _Counted:
    """A rank's socket, from which all ranks of a run together may be read so many bytes: what they send is kept here."""

    def __init__(self, stream, task):
        self._stream, self._task = stream, task

    def recv_into(self, view):
        """As of the socket."""
        got = self._stream.recv_into(view)
        self._task.heard += got
        if self._task.heard > MOST_HEARD:
            raise plain.NotPlain(f"the ranks sent more than {MOST_HEARD // 2**20} MiB in one run")
        return got


class _StandIn:
    """One rank of the simulation, on behalf of a process that asks over `stream`."""

    def __init__(self, comm, stream, task, child):
        self.comms, self.requests, self.stream, self.task, self.child = [comm], [], stream, task, child

    def work(self):
        while True:
            verb, number, *rest = self._next()
            if self.task.each is not None:
                self.task.each(self.comms[0].rank, self.child, verb)
            if verb == "return":
                plain.write(self.stream, ["ok", None])
                return rest[0]
            if verb == "raise":
                raise Failed(_told(self.comms[0].rank, *rest))
            try:
                answer = ["ok", _VERBS[verb](self, self.comms[number], *rest)]
            except (ValueError, TypeError, RuntimeError) as error:
                answer = ["error", type(error).__name__, str(error)]
            plain.write(self.stream, answer)

    def _next(self):
        rank = self.comms[0].rank
        self.stream.settimeout(max(0.05, self.task.end - time.monotonic()))
        try:
            return plain.read(_Counted(self.stream, self.task))
        except TimeoutError:
            text = f"rank {rank} was still at work when {self.task.limit:g} s were over"
            raise Failed(Failure("hang", text, rank, self.task.apart.where(self.child))) from None
        except (EOFError, OSError):
            raise Failed(Failure("dead", f"rank {rank} ended without returning (exit, or killed)", rank)) from None
        except plain.NotPlain as error:
            raise Failed(Failure("NotPlain", str(error), rank)) from None

    def _arrived(self, x):
        """What a rank gets of a message: something else, if the run is one in which that must be noticed."""
        return x if self.task.alter is None or x is None else self.task.alter(x)

    def _at(self, site):
        file, line, function = site
        communication.BESIDE[threading.get_ident()] = (SimpleNamespace(co_filename=file, co_name=function), line)

    def isend(self, comm, x, to, tag, site):
        self._at(site)
        self.requests.append(comm.isend(x, to, tag))
        return len(self.requests) - 1

    def irecv(self, comm, like, frm, tag, site):
        self._at(site)
        self.requests.append(comm.irecv(_buffer(like), frm, tag))
        return len(self.requests) - 1

    def send(self, comm, x, to, tag, site):
        self._at(site)
        comm.send(x, to, tag)

    def recv(self, comm, like, frm, tag, site):
        self._at(site)
        return self._arrived(comm.recv(_buffer(like), frm, tag))

    def exchange(self, comm, x, to, like, frm, tag, site):
        self._at(site)
        return self._arrived(comm.exchange(x, to, _buffer(like), frm, tag))

    def wait(self, comm, number, site):
        self._at(site)
        return self._arrived(self.requests[number].wait())

    def done(self, comm, number):
        return self.requests[number].done

    def barrier(self, comm, site):
        self._at(site)
        comm.barrier()

    def split(self, comm, color, key, site):
        self._at(site)
        made = comm.split(color, key)
        if made is None:
            return None
        self.comms.append(made)
        return len(self.comms) - 1, made.rank, made.size

    def agree(self, comm, call, site):
        self._at(site)
        comm.agree(call)

    def compute(self, comm, label, flops, bytes, seconds, kind, microbatch, stage):
        with comm.compute(label, flops=flops, bytes=bytes, seconds=seconds, kind=kind, microbatch=microbatch, stage=stage):
            pass

    def clock(self, comm):
        return comm.clock()

    def live(self, comm, count):
        comm.mark_live(count)


_VERBS = {
    name: getattr(_StandIn, name)
    for name in ("isend", "irecv", "send", "recv", "exchange", "wait", "done")
    + ("barrier", "split", "agree", "compute", "clock", "live")
}


def _buffer(like):
    if like.numel() * like.element_size() > plain.MOST_BYTES:
        raise ValueError(f"a buffer of {like.numel() * like.element_size()} bytes; at most {plain.MOST_BYTES} here")
    return torch.empty_like(like, device="cpu")


def _is_own(file):
    parts = file.replace("\\", "/").split("/")
    return "fourwalls" not in parts and "site-packages" not in parts and parts[-1] not in ("<string>", "socket.py")


def _told(rank, kind, text, frames):
    """The Failure of a rank that raised, at its innermost line outside the library."""
    own = [f for f in frames if _is_own(f[0])]
    where = place(*own[-1]) if own else ""
    if kind == MismatchError.__name__:
        where = ""  # the text names both lines
    return Failure(kind, text, rank, where)


def own_line(text: str) -> str:
    """The innermost line outside the library in a traceback as faulthandler writes it; "" if there is none."""
    own = [(file, int(line), function) for file, line, function in _LINE.findall(text) if _is_own(file)]
    return place(*own[0]) if own else ""
