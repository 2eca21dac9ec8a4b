"""The fork server: a small process that has imported torch and nothing else, and makes ranks by forking itself.

It speaks over one socket with the process that runs the notebook and never starts a thread, computes or touches a GPU, so a
fork of it is as good as a fresh interpreter and a hundred times faster. It outlives its owner by nothing: when the socket
ends, even because the owner was killed, it kills every rank and every process a rank has left behind, and goes. The same
server, without torch, starts fresh interpreters where forking is unsafe.

    cost of n ranks = one import of torch, once + n forks

Reference: `multiprocessing`'s forkserver; prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.
"""

import contextlib
import errno
import gc
import glob
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback

from .machine import SESSION_MARK

__all__ = ["EXITED", "KILL", "REFUSED", "REPORT", "STARTED", "Server", "existing_folder", "main"]

REPORT = struct.Struct("<iii")  # (what, rank, value); the same shape both ways
STARTED, EXITED, REFUSED = 1, 2, 4  # to the owner: value is the process id, the wait status, or why there is no process (errno)
KILL = 3  # from the owner: value is the signal, rank -1 is all
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FDS = ("socket", "output", "where")  # of each rank, in this order, after the session's own three
WARM = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",
    "torch.nn",
    "torch.nn.functional",
    "torch.utils.data",
    "cloudpickle",
    "torch.profiler._cupti_monitor",
)
OWN = ("worker", "transport", "messages", "buffers", "book", "ship", "machine", "diagnose", "groups", "agreement")


def main(fd: int, *, warm: bool) -> None:
    """Serve the owner at the other end of `fd` until it closes."""
    server, code = None, 1
    try:
        server = Server(socket.socket(fileno=fd))
        if warm:
            preload()
        server.say_ready()
        server.loop()
        code = 0
    except SystemExit:
        code = 0
    except BaseException:  # the owner reads this, if we are not ready yet
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        if server is not None:
            server.end_all()
        os._exit(code)


def preload() -> None:
    """Import what a first training step would import, so that ranks share it; then keep the collector's hands off it."""
    asked = "TORCHINDUCTOR_CACHE_DIR" in os.environ
    if not asked:  # or importing torch._dynamo makes a folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = existing_folder()
    for name in WARM:
        with contextlib.suppress(Exception):  # a module that this release of torch lacks, or that cannot be had on this machine
            importlib.import_module(name)
    if not asked:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for name in OWN:
        importlib.import_module(f"fourwalls.ranks.{name}")
    gc.collect()
    gc.freeze()


def existing_folder() -> str:
    """The folder for temporary files; the root where none can be written to, so that making it again does nothing."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.sep


class Session:
    """One group of ranks: its socket to the owner, rank -> process id of those still alive, and the mark in their environment."""

    def __init__(self, channel: socket.socket, mark: str):
        self.channel, self.alive, self.groups, self.unread, self.mark = channel, {}, set(), b"", mark

    def tell(self, what: int, rank: int, value: int) -> None:
        with contextlib.suppress(OSError):  # the owner may be gone; the loop will notice
            self.channel.sendall(REPORT.pack(what, rank, value))


class Server:
    """The loop: requests from the owner, ends of ranks, ends of sessions."""

    def __init__(self, control: socket.socket):
        self.control, self.sessions, self.scratch, self.pid = control, {}, None, os.getpid()
        self.linux = sys.platform.startswith("linux")
        if self.linux:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind becomes our child, so that we can end it
        self.wake, other = os.pipe()
        for end in (self.wake, other):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else _leave)
        self.alive_read, self.alive_write = os.pipe()  # its writing end is ours alone: it ends when we do

    def say_ready(self) -> None:
        self.control.sendall(b"ready")

    def loop(self) -> None:
        control = self.control.fileno()
        while True:
            poll = select.poll()
            for fd in (control, self.wake, *self.sessions):
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            if self.wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
                self.reap()
            for fd in ready:
                if fd == control:
                    if not self.request():
                        return
                elif fd in self.sessions:
                    self.listen(self.sessions[fd])

    # --- the owner asks --------------------------------------------------------------------------------------------
    def request(self) -> bool:
        """Read one request from the owner and do it; False when the owner is gone."""
        try:
            head, fds, _, _ = socket.recv_fds(self.control, 8, 250)
            if len(head) < 8:
                head += _exactly(self.control, 8 - len(head)) if head else b""
            if not head:
                return False
            (length,) = struct.unpack("<Q", head)
            order = pickle.loads(_exactly(self.control, length))
        except (OSError, EOFError):
            return False
        if "scratch" in order:
            self.scratch = order["scratch"]
            return True
        for name in order["modules"]:
            with contextlib.suppress(Exception):  # the rank that needs it will say what is wrong
                importlib.import_module(name)
        if not fds:
            return False
        session = Session(socket.socket(fileno=fds[0]), f"{self.pid}.{time.monotonic_ns()}")
        os.environ[SESSION_MARK] = session.mark  # ranks and whatever they start inherit it
        self.sessions[session.channel.fileno()] = session
        ranks = order["ranks"]
        if len(fds) < 3 + ranks * len(FDS):  # the kernel has left out what would not fit under our limit of open files
            for rank in range(ranks):
                session.tell(REFUSED, rank, errno.EMFILE)
            ranks = 0
        gc.collect()
        gc.freeze()
        for rank in range(ranks):
            own = fds[3 + rank * len(FDS) : 3 + (rank + 1) * len(FDS)]
            named = {"book": fds[1], "listen": fds[2], **dict(zip(FDS, own, strict=True))}
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or no memory
                session.tell(REFUSED, rank, error.errno or 0)
                continue
            if pid == 0:
                self.child(rank, ranks, named, fds, order)
            session.alive[rank] = pid
            session.groups.add(pid)
            session.tell(STARTED, rank, pid)
        for fd in fds[1:]:
            os.close(fd)
        return True

    def child(self, rank: int, ranks: int, named: dict, fds: list, order: dict) -> None:
        """The forked process: cut all ties with the server, then be a rank. Never returns."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if self.linux:
                _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != self.pid:  # the server ended before we could ask
                    os._exit(1)
            else:
                named["alive"] = os.dup(self.alive_read)
            for session in self.sessions.values():
                session.channel.close()
            self.control.close()
            for fd in (self.wake, self.alive_read, self.alive_write, *(fd for fd in fds[1:] if fd not in named.values())):
                with contextlib.suppress(OSError):
                    os.close(fd)
            if order["fresh"]:
                _become_fresh(rank, ranks, named, order)
            from fourwalls.ranks.worker import main as be_a_rank

            be_a_rank(rank, ranks, named)
        finally:
            os._exit(1)

    def listen(self, session: Session) -> None:
        """Orders for a session's ranks; its end when the owner has closed it."""
        try:
            data = session.channel.recv(4096)
        except OSError:
            data = b""
        if not data:
            self.end(session)
            return
        session.unread += data
        while len(session.unread) >= REPORT.size:
            what, rank, value = REPORT.unpack(session.unread[: REPORT.size])
            session.unread = session.unread[REPORT.size :]
            if what == KILL:
                for r, pid in list(session.alive.items()):
                    if rank in (-1, r):
                        _kill(pid, value)

    # --- ranks end -------------------------------------------------------------------------------------------------
    def reap(self) -> None:
        """Note which processes have ended. The group of a rank goes with it, while its number is still its own."""
        owners = {pid: (s, rank) for s in self.sessions.values() for rank, pid in s.alive.items()}
        while True:
            try:
                if hasattr(os, "waitid"):  # look without reaping: a zombie's number cannot be given to another process
                    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if ended is None:
                        return
                    if ended.si_pid in owners:
                        _kill(ended.si_pid, signal.SIGKILL)
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in owners:
                session, rank = owners[pid]
                session.alive.pop(rank, None)
                session.tell(EXITED, rank, status)

    def end(self, session: Session) -> None:
        """Kill what is left of a session, grandchildren included, and forget it."""
        for pid in session.alive.values():
            _kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 2
        while session.alive and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.002)
        self.sessions.pop(session.channel.fileno(), None)
        self.sweep(session)
        session.channel.close()

    def sweep(self, session: Session) -> None:
        """End the processes that ranks of this session left behind (they became our children when their parents went)."""
        quiet = 0
        for _ in range(20):
            strays = [pid for pid in _children() if self.is_stray(pid, session)]
            quiet = 0 if strays else quiet + 1
            if quiet == 2:  # the kernel's list may miss one while another goes: look twice
                return
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005 if strays else 0.001)
            self.reap()

    def is_stray(self, pid: int, session: Session) -> bool:
        if any(pid in s.alive.values() for s in self.sessions.values()):
            return False
        if not self.sessions:
            return True
        try:
            if os.getsid(pid) in session.groups:
                return True
            with open(f"/proc/{pid}/environ", "rb") as file:  # it made a session of its own, but was born with our mark
                return f"{SESSION_MARK}={session.mark}".encode() in file.read().split(b"\0")
        except OSError:
            return False

    def end_all(self) -> None:
        for session in list(self.sessions.values()):
            self.end(session)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _become_fresh(rank: int, ranks: int, named: dict, order: dict) -> None:
    """Replace this process by a fresh interpreter that enters the worker."""
    for fd in named.values():
        os.set_inheritable(fd, True)
    code = "import json, sys; rank, ranks, fds, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    code += "from fourwalls.ranks.worker import main; main(rank, ranks, fds)"
    words = json.dumps([rank, ranks, named, order["path"]])
    os.dup2(named["output"], 2)  # what goes wrong before the rank is up is told as its output
    env = order["env"] | {SESSION_MARK: os.environ[SESSION_MARK]}
    os.execve(sys.executable, [sys.executable, *order["flags"], "-c", code, words], env)


def _kill(pid: int, number: int) -> None:
    """Signal a rank's whole process group; the rank alone in the moment before it has made its group."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    except PermissionError:  # macOS: only zombies are left in the group
        pass


def _children() -> list[int]:
    """Our children, as the kernel lists them for each of our threads; none where it does not."""
    found = []
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found += [int(word) for word in file.read().split()]
    return found


def _prctl(option: int, value: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = channel.recv(min(size - len(data), 2**20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _leave(*_) -> None:
    raise SystemExit
