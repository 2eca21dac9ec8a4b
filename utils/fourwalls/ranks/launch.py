"""Ranks as processes, seen from the process that wants them: ask the fork server, hold the sockets, end them all.

There is one fork server for each process that runs programs, started when first needed and restarted when lost. A session is
one group of ranks: sockets and pipes without names, a piece of shared memory without a name, and one socket whose closing,
for whatever reason, ends the whole group.

    a session leaves nothing: closing its socket kills its processes, and nothing else of it has a name

Reference: forkserver.py, the other end.
"""

import contextlib
import mmap
import os
import socket
import sys
import tempfile

from . import forkserver
from .book import Book, book_bytes
from .comm import CommError
from .servers import Server, ServerError, interpreter_flags

__all__ = ["Session", "open_session", "start_method"]

CLOSE_SECONDS = 3.0  # for a server to end a session


def start_method(asked: str | None, backend: str) -> str:
    """ "fork" or "spawn": what was asked for (argument, then FOURWALLS_START), else fork where it is safe.

    Raises ValueError for a word that is neither, and for fork where it would not be safe.
    """
    word = asked or os.environ.get("FOURWALLS_START") or None
    if word not in (None, "fork", "spawn"):
        raise ValueError(f"start={word!r}; a rank can start by 'fork' (from the fork server) or 'spawn' (a fresh interpreter)")
    if backend == "nccl":
        if word == "fork":
            raise ValueError(
                "start='fork' with GPUs: a rank that uses a GPU must be a fresh interpreter; leave start out, or use 'spawn'"
            )
        return "spawn"
    return word or ("fork" if sys.platform.startswith("linux") else "spawn")


def open_session(ranks: int, *, method: str, env: dict, modules: list[str]) -> "Session":
    """Start `ranks` processes. `modules`: what the fork server should import first. CommError if none can be started."""
    path = [p for p in sys.path if isinstance(p, str)]
    order = {"ranks": ranks, "fresh": method == "spawn", "env": env, "path": path, "flags": interpreter_flags()}
    order["modules"] = modules if method == "fork" else []
    for attempt in (1, 2):
        session = Session(ranks)
        try:
            Server.current(warm=method == "fork").order(order, session.fds)
            session.handed_over()
            return session
        except OSError as error:  # the server was killed since the last run: a new one, once
            session.close()
            if attempt == 2 or isinstance(error, ServerError):
                raise CommError(f"no rank can be started: {error}") from None
        except BaseException:
            session.close()
            raise
    raise AssertionError


class Session:
    """A group of running ranks."""

    def __init__(self, ranks: int):
        self.ranks, self.pids = ranks, {}
        self.channel, self._theirs = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(ranks)]
        self.sockets = [mine for mine, _ in pairs]
        outputs, wheres = [os.pipe() for _ in range(ranks)], [os.pipe() for _ in range(ranks)]
        self.outputs, self.wheres = [r for r, _ in outputs], [r for r, _ in wheres]
        memory = _nameless(book_bytes(ranks))
        self.book = Book(mmap.mmap(memory, book_bytes(ranks)), ranks)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))  # the system chooses the port
        self._listener.listen(ranks + 8)
        self.port = self._listener.getsockname()[1]
        per_rank = [fd for r in range(ranks) for fd in (pairs[r][1].fileno(), outputs[r][1], wheres[r][1])]
        self.fds = [self._theirs.fileno(), memory, self._listener.fileno(), *per_rank]
        self._pairs, self._given = pairs, [memory, *(w for _, w in outputs), *(w for _, w in wheres)]
        for end in (*self.outputs, *self.wheres):
            os.set_blocking(end, False)
        for end in (self.channel, *self.sockets):
            end.setblocking(False)

    def handed_over(self) -> None:
        """The server has its copies: close ours."""
        for end in (self._theirs, self._listener, *(theirs for _, theirs in self._pairs)):
            end.close()
        for fd in self._given:
            os.close(fd)
        self._given = []

    def reports(self) -> list[tuple[int, int, int]]:
        """What the server has to say: (STARTED or EXITED, rank, value). ConnectionError if it is gone."""
        found = []
        while True:
            try:
                data = self.channel.recv(forkserver.REPORT.size * 64)
            except (BlockingIOError, InterruptedError):
                return found
            if not data:
                raise ConnectionError("the fork server is gone")
            for k in range(0, len(data) - len(data) % forkserver.REPORT.size, forkserver.REPORT.size):
                what, rank, value = forkserver.REPORT.unpack_from(data, k)
                if what == forkserver.STARTED:
                    self.pids[rank] = value
                found.append((what, rank, value))

    def kill(self, number: int, rank: int = -1) -> None:
        """Send a signal to one rank (its whole process group), or to all that live."""
        with contextlib.suppress(OSError):
            self.channel.sendall(forkserver.REPORT.pack(forkserver.KILL, rank, number))

    def close(self) -> None:
        """End the session; returns when the server has killed what still ran, and what ranks have left behind."""
        if self._given:
            self.handed_over()
        with contextlib.suppress(OSError):  # the server closes its end once it is done
            self.channel.shutdown(socket.SHUT_WR)
            self.channel.settimeout(CLOSE_SECONDS)
            while self.channel.recv(4096):
                pass
        for end in (self.channel, *self.sockets):
            end.close()
        for fd in (*self.outputs, *self.wheres):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.outputs = self.wheres = ()
        self.book.close()


def _nameless(size: int) -> int:
    """A file of `size` zero bytes that has no name: memory on Linux, an unlinked temporary file elsewhere."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            fd = os.memfd_create("fourwalls")
            os.ftruncate(fd, size)
            return fd
    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
