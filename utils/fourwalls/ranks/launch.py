"""Ranks as processes, seen from the process that wants them: ask the fork server, hold the sockets, end them all.

There is one fork server for each process that runs programs, started when first needed and restarted when lost. A session is
one group of ranks: sockets and pipes without names, a piece of shared memory without a name, and one socket whose closing,
for whatever reason, ends the whole group.

    a session leaves nothing: closing its socket kills its processes, and nothing else of it has a name

Reference: forkserver.py, the other end.
"""

import contextlib
import errno
import mmap
import os
import socket
import sys
import tempfile

from . import forkserver
from .book import Book, book_bytes
from .comm import CommError
from .machine import loopback_interface
from .servers import Server, ServerError, interpreter_flags, search_path

__all__ = ["Session", "check_loopback", "open_session", "start_method"]

CLOSE_SECONDS = 3.0  # for a server to end a session
LOOPBACK_SECONDS = 1.5  # for this machine to answer itself
FILES_PER_RANK, FILES_BESIDES = 6, 10  # a socket and two pipes, both ends, and what a session needs apart from its ranks


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
    order = {"ranks": ranks, "fresh": method == "spawn", "env": env, "path": search_path(), "flags": interpreter_flags()}
    order["modules"] = modules if method == "fork" else []
    for attempt in (1, 2):
        session = Session(ranks)
        try:
            Server.current(warm=method == "fork").order(order, session.fds)
            session.handed_over()
            return session
        except OSError as error:  # the server was killed since the last run: a new one, once
            session.close()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise CommError(_too_many_files(ranks)) from None
            if attempt == 2 or isinstance(error, ServerError):
                raise CommError(f"no rank can be started: {error}") from None
        except BaseException:
            session.close()
            raise
    raise AssertionError


class Session:
    """A group of running ranks. CommError where the system does not give what they need; nothing is then left open."""

    def __init__(self, ranks: int):
        check_loopback()
        with contextlib.ExitStack() as undo:
            try:
                self._open(ranks, undo)
            except OSError as error:
                undo.close()
                few = error.errno in (errno.EMFILE, errno.ENFILE)
                raise CommError(_too_many_files(ranks) if few else f"no rank can be started: {error}") from None
            undo.pop_all()

    def _open(self, ranks: int, undo: contextlib.ExitStack) -> None:
        def sockets() -> tuple:
            pair = socket.socketpair()
            for end in pair:
                undo.callback(end.close)
            return pair

        def pipe() -> tuple:
            ends = os.pipe()
            for end in ends:
                undo.callback(os.close, end)
            return ends

        self.ranks, self.pids = ranks, {}
        self.channel, self._theirs = sockets()
        pairs = [sockets() for _ in range(ranks)]
        self.sockets = [mine for mine, _ in pairs]
        outputs, wheres = [pipe() for _ in range(ranks)], [pipe() for _ in range(ranks)]
        self.outputs, self.wheres = [r for r, _ in outputs], [r for r, _ in wheres]
        memory = _nameless(book_bytes(ranks))
        undo.callback(os.close, memory)
        self.book = Book(mmap.mmap(memory, book_bytes(ranks)), ranks)
        undo.callback(self.book.close)
        self._listener = undo.enter_context(socket.socket())
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


def check_loopback() -> None:
    """CommError unless this machine answers itself at 127.0.0.1, where ranks meet."""
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            caller.settimeout(LOOPBACK_SECONDS)
            caller.connect(listener.getsockname())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return  # for whoever counts the files
        name = loopback_interface() or "lo"
        fix = f"ip link set {name} up" if sys.platform.startswith("linux") else f"ifconfig {name} up"
        raise CommError(
            f"no rank can be started: this machine does not answer itself at 127.0.0.1 (interface {name}): {error}\n"
            f"  Ranks meet there. Bring the interface up with `{fix}` (as administrator), or let the firewall pass it."
        ) from None


def _too_many_files(ranks: int) -> str:
    import resource  # not on Windows, where this file must load all the same

    try:
        have = len(os.listdir("/dev/fd"))
    except OSError:
        have = 0
    need, limit = have + FILES_PER_RANK * ranks + FILES_BESIDES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    who = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    return f"no rank can be started: {who} about {need} open files, the limit is {limit}; raise it with `ulimit -n {2 * need}`"


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
