"""The fork servers of this process: started when first needed, or ahead of time, and gone with it.

One server has imported torch and forks ranks; another, started only where fresh interpreters are wanted, has imported
nothing. A fork of this process must not use its parent's servers, so they are kept by process number. This file imports no
torch, so that the server can load it at the same time as this process does.

    first run = max(importing torch here, importing torch there) + one run

Reference: forkserver.py, the other end.
"""

import atexit
import contextlib
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from .machine import under_torchrun

__all__ = ["Server", "ServerError", "interpreter_flags", "prewarm", "quiet", "scratch_folder", "search_path"]

START_SECONDS = 120  # importing torch from a cold disk
SAID_LINES = 12  # of a server that could not start, its last


class ServerError(OSError):
    """The server could not start."""


def prewarm(start: str | None = None) -> None:
    """Start the fork server in the background, so that the first run need not wait for it. Returns at once, and never fails."""
    forks = (start or os.environ.get("FOURWALLS_START") or "fork") == "fork" and sys.platform.startswith("linux")
    if forks and not under_torchrun():
        with contextlib.suppress(OSError):
            Server.current(warm=True)


def scratch_folder() -> Path:
    """A folder for what ranks print beyond what is shown; it goes when this process ends, however it ends."""
    return Server.scratch()


class Server:
    """This process's end of one fork server."""

    _of_process: dict = {}  # (process id, warm) -> server: a fork of this process must not use its parent's
    _lock = threading.Lock()

    @classmethod
    def current(cls, *, warm: bool) -> "Server":
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
            if server.ready:
                with contextlib.suppress(OSError):
                    server.order({"scratch": folder})
        return Path(folder)

    @classmethod
    def close_all(cls) -> None:
        with cls._lock:
            mine = [cls._of_process.pop(key) for key in list(cls._of_process) if key[0] == os.getpid()]
        for item in mine:
            item.close() if isinstance(item, Server) else shutil.rmtree(item, ignore_errors=True)

    @classmethod
    def forget_after_fork(cls) -> None:
        """In a fork of this process: let go of the parent's servers, or they would outlive it."""
        cls._lock = threading.Lock()
        for item in cls._of_process.values():
            if isinstance(item, Server):
                item.control.close()
        cls._of_process.clear()

    def __init__(self, warm: bool):
        self.warm, self.lock, self.ready = warm, threading.Lock(), False
        self.control, theirs = socket.socketpair()
        code = "import json, sys; fd, warm, sys.path[:] = json.loads(sys.argv[1]); "
        code += "from fourwalls.ranks.forkserver import main; main(fd, warm=warm)"
        words = json.dumps([theirs.fileno(), warm, search_path()])
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")} | quiet()
        try:
            self.process = self._start(code, words, theirs.fileno(), one)
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()

    @staticmethod
    def _start(code: str, words: str, theirs: int, one: dict) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *interpreter_flags(), "-c", code, words],
            pass_fds=[theirs],
            start_new_session=True,
            cwd="/",  # ours may have been removed, or be somebody's to remove
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | one,  # C's streams: see worker.py
        )

    def usable(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Return when the server has imported what it preloads. OSError if it ends, or takes too long."""
        if self.ready:
            return
        self.control.settimeout(START_SECONDS)
        try:
            said = self.control.recv(5)
        except TimeoutError:
            self.close()
            raise ServerError(f"the fork server was not ready after {START_SECONDS} s") from None
        except OSError:  # it has ended
            said = b""
        self.control.settimeout(None)
        if said != b"ready":
            words = "\n".join(self.process.stderr.read().decode(errors="replace").strip().splitlines()[-SAID_LINES:])
            self.close()
            raise ServerError("the fork server could not start" + (f":\n{words}" if words else ""))
        self.process.stderr.close()
        self.ready = True
        folder = self._of_process.get((os.getpid(), "scratch"))
        if folder:
            self._send({"scratch": folder}, ())

    def order(self, message: dict, fds: tuple = ()) -> None:
        with self.lock:
            self.wait_ready()
            self._send(message, fds)

    def _send(self, message: dict, fds: tuple) -> None:
        body = pickle.dumps(message)
        try:
            socket.send_fds(self.control, [struct.pack("<Q", len(body))], list(fds))
            self.control.sendall(body)
        except BaseException:  # half an order, or none: this server is of no use any more
            self.close()
            raise

    def close(self) -> None:
        """Let the server go: it ends its ranks and itself. One that is still starting is killed."""
        self.control.close()
        if not self.ready:
            self.process.kill()
        if self.process.stderr and not self.process.stderr.closed:
            self.process.stderr.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def search_path() -> list[str]:
    """sys.path as it reads from any folder: what is relative to ours is made absolute, or left out if ours is gone."""
    found = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):
                found.append(os.path.abspath(entry))
    return found


def quiet() -> dict:
    """torch's C++ warnings are for its developers (a host name that does not resolve, say): errors only, unless asked."""
    return {} if "TORCH_CPP_LOG_LEVEL" in os.environ else {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def interpreter_flags() -> list[str]:
    """How this interpreter was started, but for warnings: what concerns a rank is raised, not warned of."""
    return [f for f in subprocess._args_from_interpreter_flags() if not f.startswith("-W")]


atexit.register(Server.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Server.forget_after_fork)
