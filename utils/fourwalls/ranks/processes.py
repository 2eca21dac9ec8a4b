"""Real ranks: start them, watch them, bring back their results or one clear error, and leave nothing behind.

The supervisor is a plain loop in the calling thread: it carries messages, output and reports of ended processes, and looks four
times a second into the book where ranks say what they wait for. A deadlock is seen there, not guessed from a timeout; a rank
that computes while others wait is a straggler, which only `timeout` ends.

    how a run is ended      at once        after            then
      a rank failed         SIGTERM        0.3 s SIGKILL    RankError (or Deadlock-, MismatchError)
      you interrupted       SIGINT         1 s SIGKILL      KeyboardInterrupt, with where each rank was
      you interrupted again SIGKILL
      the kernel died       SIGKILL, by the fork server, to every rank and what it started

Reference: Python's `selectors`; signal(7).
"""

import contextlib
import os
import pickle
import selectors
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable

from .arguments import rank_arguments
from .cluster import run_cluster, under_torchrun
from .failures import Failure, choose, interrupted, to_error
from .forkserver import EXITED
from .launch import Session, open_session, scratch_folder, start_method
from .machine import gpu_count, loopback_interface, oom_kills, threads_per_rank
from .output import Output
from .result import Run
from .ship import pack_program, sources_in, unpack_value
from .trace import Trace
from .watch import Watch

__all__ = ["MAX_RANKS", "Pool", "run_processes"]

MAX_RANKS = 64
BACKENDS = ("gloo", "nccl")
TICK = 0.025  # seconds between looks when nothing happens
GRACE = 0.1  # after the first failure: others that failed at the same moment
LOST_GRACE = 1.0  # after a broken connection: the rank that broke it
TERM_SECONDS, INTERRUPT_SECONDS, KILL_SECONDS = 0.3, 1.0, 3.0
_LENGTH = struct.Struct("<Q")


def run_processes(
    program: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    ranks: int = 4,
    seed: int = 0,
    timeout: float = 30.0,
    limit: float = 600.0,
    checks: bool = True,
    backend: str | None = None,
    threads: int | None = None,
    stream: bool = True,
    env: dict | None = None,
    start: str | None = None,
) -> Run:
    """Run `program(comm, *args, **kwargs)` on `ranks` fresh processes.

    timeout: seconds the ranks may wait for one that computes. limit: seconds for the whole run. backend: "gloo", "nccl", or None: nccl where
    each rank can have a GPU of its own. threads: per rank (default: allowed cores / ranks). env: further environment variables.
    start: "fork" or "spawn" (default: fork where it is safe). Under torchrun this process is one of the ranks it has started.
    Raises ValueError for bad arguments, before anything starts; DeadlockError, MismatchError, RankError; KeyboardInterrupt.
    """
    kwargs = kwargs or {}
    if under_torchrun():  # the same script on many nodes: torchrun has started the ranks, and says how many
        return run_cluster(program, args, kwargs, seed=seed, timeout=timeout, checks=checks, backend=backend, threads=threads)
    check_count(ranks)
    rank_arguments(program, args, kwargs, ranks)
    with Pool(ranks=ranks, timeout=timeout, limit=limit, backend=backend, threads=threads, env=env, start=start) as pool:
        return pool.run(program, *args, seed=seed, checks=checks, stream=stream, last=True, **kwargs)


def check_count(ranks: int) -> None:
    """ValueError unless `ranks` is a number of real ranks."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: a whole number from 1 to {MAX_RANKS}")
    if ranks > MAX_RANKS:
        raise ValueError(f"ranks={ranks}: at most {MAX_RANKS} real processes; fw.simulate(program, ..., ranks={ranks}) runs that many in one")
    if sys.platform == "win32":
        raise ValueError("real ranks need Linux or macOS; here, use fw.simulate(...), or run this notebook under WSL")


def choose_backend(backend: str | None, ranks: int, gpus: Callable[[], int] = gpu_count) -> str:
    """ "gloo" or "nccl" for what was asked. ValueError for an unknown name, and for NCCL with fewer GPUs than ranks."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r}; known are {', '.join(map(repr, BACKENDS))}, or None to choose")
    if backend == "gloo":
        return "gloo"
    have = gpus()
    if backend == "nccl" and have < ranks:
        raise ValueError(f"backend='nccl': {ranks} ranks need {ranks} GPUs, this machine has {have}; use backend='gloo', or ranks={max(have, 1)}")
    return "nccl" if have >= ranks else "gloo"


class Pool:
    """Ranks that stay open for several programs, for benchmarks: `with fw.pool(ranks=4) as pool: pool.run(program, ...)`.

    A program that fails closes the pool. Arguments as `run_processes`.
    """

    def __init__(self, *, ranks=4, timeout=30.0, limit=600.0, backend=None, threads=None, env=None, start=None):
        check_count(ranks)
        for name, value in (("timeout", timeout), ("limit", limit)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name}={value!r}: a number of seconds above 0")
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ValueError(f"threads={threads!r}: a whole number of at least 1, or None for allowed cores / ranks")
        self.ranks, self.timeout, self.limit = ranks, timeout, limit
        self.backend = choose_backend(backend, ranks)
        self.threads = threads or threads_per_rank(ranks)
        self.method = start_method(start, self.backend)
        self.env = _environment(self.threads, env)
        self._group: _Group | None = None
        self._closed = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, program: Callable, *args, seed: int = 0, checks: bool = True, stream: bool = True, last: bool = False, **kwargs) -> Run:
        """Run one program on the pool's ranks. `last`: let the ranks end with it."""
        if self._closed:
            raise ValueError("this pool is closed (a program failed in it, or its `with` block has ended); open a new one")
        began = time.perf_counter()
        rank_arguments(program, args, kwargs, self.ranks)
        common, own = pack_program(program, args, kwargs, self.ranks)
        if self._group is None:
            modules = [m for m in sys.modules if m.startswith(("fourwalls.", "torch.")) and not m.startswith("torch._inductor")]
            session = open_session(self.ranks, method=self.method, env=self.env, modules=modules)
            self._group = _Group(session, self.timeout, self.limit)
            self._group.greet(self, sources_in(common))
        try:
            output = Output(self.ranks, stream=stream, scratch=scratch_folder)
            answers = self._group.run(common, own, seed=seed, checks=checks, output=output)
            if last:
                self._group.dismiss()
        except BaseException:
            self.close()
            raise
        finally:
            if last:
                self.close()
        values = [unpack_value(a[0]) for a in answers]
        trace = Trace(sorted((e for a in answers for e in a[1]), key=lambda e: (e[4], e[0])), ranks=self.ranks)
        unwaited = [f"  {call}" for r, a in enumerate(answers) for call in (f"rank {r}: {c}" for c in a[2])]
        if unwaited:
            warnings.warn("\n".join(["messages that were begun but never waited for:", *unwaited]), RuntimeWarning, stacklevel=_outside())
        seconds = time.perf_counter() - began
        return Run(values, trace, output.texts, seconds, self.backend, self.ranks, output.files)

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        self._closed = True
        if self._group is not None:
            self._group.close()
            self._group = None


class _Group:
    """The loop over one session's sockets and pipes."""

    def __init__(self, session: Session, timeout: float, limit: float):
        self.session, self.timeout, self.limit, self.ranks = session, timeout, limit, session.ranks
        self.selector = selectors.DefaultSelector()
        self.inbox = [bytearray() for _ in range(self.ranks)]
        self.outbox: list[list[memoryview]] = [[] for _ in range(self.ranks)]
        self.where = [b""] * self.ranks
        self.messages: list[tuple | None] = [None] * self.ranks
        self.failures: dict[int, Failure] = {}
        self.alive = set(range(self.ranks))
        self.output: Output | None = None
        self.oom_before = oom_kills()
        self.ended_by: dict[int, str] = {}
        for rank in range(self.ranks):
            self.selector.register(session.sockets[rank], selectors.EVENT_READ, ("socket", rank))
            self.selector.register(session.outputs[rank], selectors.EVENT_READ, ("output", rank))
            self.selector.register(session.wheres[rank], selectors.EVENT_READ, ("where", rank))
        self.selector.register(session.channel, selectors.EVENT_READ, ("channel", -1))

    # --- what a run is ---------------------------------------------------------------------------------------------
    def greet(self, pool: Pool, sources: dict) -> None:
        hello = {
            "env": pool.env,
            "path": [p for p in sys.path if isinstance(p, str)],
            "folder": _folder(),
            "sources": sources,
            "threads": pool.threads,
            "backend": pool.backend,
            "timeout": pool.timeout,
            "port": self.session.port,
        }
        for rank in range(self.ranks):
            self.post(rank, "hello", hello)

    def run(self, common: bytes, own: list[bytes], *, seed: int, checks: bool, output: Output) -> list[tuple]:
        """One program on all ranks: what each answered. Raises the error of a run that did not end well, after ending it."""
        self.output = output
        try:
            for rank in range(self.ranks):
                self.post(rank, "program", common, own[rank], seed, checks)
            self.gather("ready", Watch(self.session.book, self.timeout, self.limit))
            start = time.perf_counter_ns()
            for rank in range(self.ranks):
                self.post(rank, "go", start)
            answers = self.gather("value", Watch(self.session.book, self.timeout, self.limit))
            self.pump(0)
            self.drain()
            return answers
        except KeyboardInterrupt:
            raise self.interrupted() from None
        finally:
            output.finish()

    def gather(self, kind: str, watch: Watch) -> list[tuple]:
        """Wait until every rank has sent a message of this kind."""
        while True:
            self.pump(TICK)
            for rank in range(self.ranks):
                message = self.messages[rank]
                if message and message[0] == "met":
                    self.messages[rank] = None
                elif message and message[0] == "failed" and rank not in self.failures:
                    self.failures[rank] = Failure.reported(message[1])
            if self.failures:
                self.fail(choose(self.settle(), self.ranks))
            if all(m is not None and m[0] == kind for m in self.messages):
                answers = [m[1:] for m in self.messages]
                self.messages = [None] * self.ranks
                return answers
            verdict = watch.look(self.alive, self.say)
            if verdict is not None:
                self.fail(verdict if not verdict.asks else self.place(verdict))

    def settle(self) -> dict[int, Failure]:
        """After a first failure: a moment for those that failed together with it, or that it is a symptom of."""
        started = time.monotonic()
        while self.alive:
            wait = GRACE if any(not f.lost for f in self.failures.values()) else LOST_GRACE
            if time.monotonic() - started > wait or len(self.failures) == self.ranks:
                break
            self.pump(TICK)
            for rank, message in enumerate(self.messages):
                if message and message[0] == "failed" and rank not in self.failures:
                    self.failures[rank] = Failure.reported(message[1])
        return self.failures

    def place(self, verdict: Failure) -> Failure:
        """Ask the blamed ranks where they are (a signal that prints their frames), and put that into the verdict."""
        for rank in verdict.asks:
            self.session.kill(signal.SIGUSR1, rank)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not all(b"\n" in self.where[r] for r in verdict.asks):
            self.pump(TICK)
        self.pump(TICK)
        return verdict.at({r: self.where[r].decode(errors="replace") for r in verdict.asks})

    def fail(self, failure: Failure) -> None:
        """End the run because of this failure: release everybody, then raise it."""
        self.stop(signal.SIGTERM, TERM_SECONDS)
        raise to_error(failure, self.failures, self.ranks)

    def interrupted(self) -> KeyboardInterrupt:
        """The reader has interrupted: let ranks say where they are, then end them."""
        book = self.session.book
        waits = {r: book.call(r, s.slot) for r in self.alive if (s := book.status(r)).state == 3}
        try:
            self.session.kill(signal.SIGINT)
            deadline = time.monotonic() + INTERRUPT_SECONDS
            while time.monotonic() < deadline and any(r not in waits and not self.messages[r] for r in self.alive):
                self.pump(TICK)
        except KeyboardInterrupt:
            pass
        reports = {r: Failure.reported(m[1]) for r, m in enumerate(self.messages) if m and m[0] == "failed"}
        self.stop(signal.SIGKILL, 0)
        return interrupted(self.ranks, waits, reports)

    def stop(self, first: int, seconds: float) -> None:
        """End all ranks: `first` at once, SIGKILL after `seconds`; returns when they are gone and their output is read."""
        for _ in range(2):
            try:
                self.session.kill(first)
                deadline = time.monotonic() + seconds
                while self.alive and time.monotonic() < deadline:
                    self.pump(TICK)
                self.session.kill(signal.SIGKILL)
                deadline = time.monotonic() + KILL_SECONDS
                while self.alive and time.monotonic() < deadline:
                    self.pump(TICK)
                break
            except KeyboardInterrupt:
                first, seconds = signal.SIGKILL, 0
            except ConnectionError:
                break
        self.drain()

    def dismiss(self) -> None:
        """The last program is over: let the ranks end by themselves, flushing what they hold."""
        for rank in range(self.ranks):
            self.post(rank, "bye")
        deadline = time.monotonic() + 1.0
        while self.alive and time.monotonic() < deadline:
            self.pump(TICK)
        self.drain()

    def close(self) -> None:
        self.selector.close()
        self.session.close()

    # --- the wires -------------------------------------------------------------------------------------------------
    def post(self, rank: int, *message) -> None:
        data = pickle.dumps(message, protocol=5)
        self.outbox[rank] += [memoryview(_LENGTH.pack(len(data))), memoryview(data)]
        self.flush(rank)

    def flush(self, rank: int) -> None:
        """Send as much as the socket takes now; watch for room while something is left."""
        box, channel = self.outbox[rank], self.session.sockets[rank]
        try:
            while box:
                sent = channel.send(box[0])
                box[0] = box[0][sent:]
                if not box[0]:
                    box.pop(0)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            box.clear()  # its end is reported by the server
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if box else 0)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.modify(channel, events, ("socket", rank))

    def pump(self, seconds: float) -> None:
        """Carry whatever is there, waiting at most `seconds` for it."""
        for key, events in self.selector.select(seconds):
            kind, rank = key.data
            if kind == "socket":
                if events & selectors.EVENT_WRITE:
                    self.flush(rank)
                if events & selectors.EVENT_READ:
                    self.read_message(rank)
            elif kind == "channel":
                self.read_reports()
            else:
                self.read_pipe(kind, rank)
        self.output.tick()

    def read_message(self, rank: int) -> None:
        box, channel = self.inbox[rank], self.session.sockets[rank]
        try:
            data = channel.recv(2**20)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.forget(channel)
            return
        box += data
        while len(box) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(box)
            if len(box) < _LENGTH.size + length:
                return
            self.messages[rank] = pickle.loads(memoryview(box)[_LENGTH.size : _LENGTH.size + length].tobytes())
            del box[: _LENGTH.size + length]

    def read_pipe(self, kind: str, rank: int) -> None:
        fd = (self.session.outputs if kind == "output" else self.session.wheres)[rank]
        try:
            data = os.read(fd, 2**16)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self.forget(fd)
        elif kind == "where":
            self.where[rank] = (self.where[rank] + data)[-65536:]
        elif self.output is not None:
            self.output.feed(rank, data)

    def read_reports(self) -> None:
        try:
            reports = self.session.reports()
        except ConnectionError:
            self.forget(self.session.channel)
            for rank in self.alive:
                self.failures[rank] = Failure.vanished(rank)
            self.alive.clear()
            return
        for what, rank, value in reports:
            if what == EXITED and rank in self.alive:
                self.alive.discard(rank)
                self.read_message(rank)
                if not (self.messages[rank] and self.messages[rank][0] in ("failed", "value")):
                    self.failures.setdefault(rank, Failure.ended(rank, value, self.where[rank], self.oom_before))

    def drain(self) -> None:
        """Read what the pipes still hold; a process that a rank left behind may keep them open, so the end is not waited for."""
        for rank in range(self.ranks):
            for _ in range(64):
                try:
                    data = os.read(self.session.outputs[rank], 2**16)
                except OSError:
                    break
                if not data:
                    break
                self.output.feed(rank, data)

    def forget(self, end) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(end)

    def say(self, text: str) -> None:
        self.output.say(text)


def _environment(threads: int, extra: dict | None) -> dict:
    """The ranks' environment: the caller's, with threads and the loopback interface set, then `extra`."""
    env = dict(os.environ)
    env |= {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    loopback = loopback_interface()
    if loopback and "GLOO_SOCKET_IFNAME" not in env:
        env["GLOO_SOCKET_IFNAME"] = loopback  # never look up the machine's own name
    env |= {str(k): str(v) for k, v in (extra or {}).items()}
    return env


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


def _outside() -> int:
    """How many frames up the caller of this library stands, for warnings that point at the learner's line."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fourwalls"):
        depth, frame = depth + 1, frame.f_back
    return depth
