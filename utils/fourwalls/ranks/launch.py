"""Ranks as processes, seen from the process that wants them: ask the fork server, hold the sockets, end them all.

There is one fork server for each process that runs programs, started when first needed and restarted when lost. A session is
one group of ranks: sockets and pipes without names, a piece of shared memory without a name, and one socket whose closing, for
whatever reason, ends the whole group.

    a session leaves nothing: closing its socket kills its processes, and nothing else of it has a name

Reference: forkserver.py, the other end.
"""

import atexit
import contextlib
import json
import mmap
import os
import pickle
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from . import forkserver
from .book import Book, book_bytes
from .comm import CommError

__all__ = ["Session", "open_session", "prewarm", "scratch_folder", "start_method"]

START_SECONDS = 120  # importing torch on a cold disk


def start_method(asked: str | None, backend: str) -> str:
    """ "fork" or "spawn": what was asked for (argument, then FOURWALLS_START), else fork where it is safe.

    Raises ValueError for a word that is neither, and for fork where it would not be safe.
    """
    word = asked or os.environ.get("FOURWALLS_START") or None
    if word not in (None, "fork", "spawn"):
        raise ValueError(f"start={word!r}; a rank can start by 'fork' (from the fork server) or 'spawn' (a fresh interpreter)")
    if backend == "nccl":
        if word == "fork":
            raise ValueError("start='fork' with GPUs: a rank that uses a GPU must be a fresh interpreter; leave start out, or use 'spawn'")
        return "spawn"
    return word or ("fork" if sys.platform.startswith("linux") else "spawn")


def open_session(ranks: int, *, method: str, env: dict, modules: list[str]) -> "Session":
    """Start `ranks` processes. CommError if none can be started."""
    for attempt in (1, 2):
        server = _Server.current(warm=method == "fork")
        try:
            return server.open(ranks, env=env, modules=modules, fresh=method == "spawn")
        except OSError as error:  # it was killed since: a new one, once
            server.close()
            if attempt == 2:
                raise CommError(f"the fork server ended twice in a row ({error}); is this machine out of memory?") from error
    raise AssertionError


def prewarm() -> None:
    """Start the fork server in the background, so that the first run need not wait for it. Returns at once."""
    if start_method(None, "gloo") == "fork":
        _Server.current(warm=True)


def scratch_folder() -> Path:
    """A folder for what ranks print beyond what is shown; it goes when this process ends, however it ends."""
    return _Server.scratch()


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
        """End the session; the server kills what still runs."""
        self.handed_over() if self._given else None
        for end in (self.channel, *self.sockets):
            end.close()
        for fd in (*self.outputs, *self.wheres):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.outputs = self.wheres = ()
        self.book.close()


class _Server:
    """This process's end of one fork server."""

    _of_process: dict = {}  # (process id, warm) -> server: a fork of this process must not use its parent's
    _lock = threading.Lock()

    @classmethod
    def current(cls, *, warm: bool) -> "_Server":
        with cls._lock:
            key = (os.getpid(), warm)
            server = cls._of_process.get(key)
            if server is not None and not server.usable():
                server.close()
                server = None
            if server is None:
                server = cls._of_process[key] = cls(warm)
            return server

    @classmethod
    def scratch(cls) -> Path:
        with cls._lock:
            key = (os.getpid(), "scratch")
            if key not in cls._of_process:
                cls._of_process[key] = tempfile.mkdtemp(prefix="fourwalls-")
            folder = cls._of_process[key]
            servers = [s for (pid, warm), s in cls._of_process.items() if pid == os.getpid() and isinstance(warm, bool)]
        for server in servers:
            with contextlib.suppress(OSError):
                server.order({"scratch": folder})
        return Path(folder)

    @classmethod
    def close_all(cls) -> None:
        with cls._lock:
            mine = [cls._of_process.pop(key) for key in list(cls._of_process) if key[0] == os.getpid()]
        for item in mine:
            item.close() if isinstance(item, _Server) else shutil.rmtree(item, ignore_errors=True)

    @classmethod
    def forget_after_fork(cls) -> None:
        """In a fork of this process: let go of the parent's servers, or they would outlive it."""
        cls._lock = threading.Lock()
        for item in cls._of_process.values():
            if isinstance(item, _Server):
                item.control.close()
        cls._of_process.clear()

    def __init__(self, warm: bool):
        self.warm, self.lock, self.ready = warm, threading.Lock(), False
        self.control, theirs = socket.socketpair()
        code = "import json, sys; fd, warm, sys.path[:] = json.loads(sys.argv[1]); "
        code += "from fourwalls.ranks.forkserver import main; main(fd, warm=warm)"
        words = json.dumps([theirs.fileno(), warm, [p for p in sys.path if isinstance(p, str)]])
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        self.process = subprocess.Popen(
            [sys.executable, *_flags(), "-c", code, words],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **one},
        )
        theirs.close()

    def usable(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Return when the server has imported what it preloads. OSError if it ends, or takes too long."""
        if self.ready:
            return
        wait_until = time.monotonic() + START_SECONDS
        said = b""
        while self.control not in select.select([self.control], [], [], 0.2)[0]:
            if time.monotonic() > wait_until:
                self.close()
                raise CommError(f"the fork server was not ready after {START_SECONDS} s")
        said = self.control.recv(5)
        if said != b"ready":
            words = self.process.stderr.read().decode(errors="replace").strip()
            self.close()
            raise CommError("the fork server could not start" + (f":\n{words}" if words else ""))
        self.process.stderr.close()
        self.ready = True

    def order(self, message: dict, fds: tuple = ()) -> None:
        with self.lock:
            self.wait_ready()
            body = pickle.dumps(message)
            socket.send_fds(self.control, [struct.pack("<Q", len(body))], list(fds))
            self.control.sendall(body)

    def open(self, ranks: int, *, env: dict, modules: list[str], fresh: bool) -> Session:
        session = Session(ranks)
        try:
            path = [p for p in sys.path if isinstance(p, str)]
            message = {"ranks": ranks, "fresh": fresh, "env": env, "modules": modules, "path": path, "flags": _flags()}
            self.order(message, session.fds)
        except BaseException:
            session.close()
            raise
        session.handed_over()
        return session

    def close(self) -> None:
        self.control.close()
        if self.process.stderr and not self.process.stderr.closed:
            self.process.stderr.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _flags() -> list[str]:
    return [f for f in subprocess._args_from_interpreter_flags() if not f.startswith("-W")]


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


atexit.register(_Server.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Server.forget_after_fork)
