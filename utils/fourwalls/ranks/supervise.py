"""The supervisor's loop: carry programs, results, output and reports of ended processes, and end a run that went wrong.

One selector in the calling thread watches every socket and pipe of a session; nothing blocks, so a large result, a rank that
prints without end and a rank that dies are all just events. Four times a second the book is read for what ranks wait for
(watch.py).

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
import time

from . import book as lines
from .comm import CommError
from .failures import Failure, choose, interrupted, to_error
from .forkserver import EXITED, REFUSED
from .launch import Session
from .machine import is_stopped, oom_kills
from .output import Output
from .watch import Watch

__all__ = ["Group"]

TICK = 0.025  # seconds between looks when nothing happens
GRACE = 0.1  # after the first failure: others that failed at the same moment
LOST_GRACE = 1.0  # after a broken connection: the rank that broke it
TERM_SECONDS, INTERRUPT_SECONDS, KILL_SECONDS, BYE_SECONDS = 0.3, 1.0, 3.0, 1.0
ASK_SECONDS = 0.5  # for a rank to say where it is
START_SECONDS = 120.0  # for all ranks to meet and to unpack the program
_LENGTH = struct.Struct("<Q")


class Group:
    """The loop over one session's sockets and pipes."""

    def __init__(self, session: Session, timeout: float, limit: float):
        self.session, self.timeout, self.limit, self.ranks = session, timeout, limit, session.ranks
        try:
            self.selector = selectors.DefaultSelector()
        except OSError as error:  # too many open files
            session.close()
            raise CommError(f"no rank can be started: {error}") from None
        self.inbox = [bytearray() for _ in range(self.ranks)]
        self.outbox: list[list[memoryview]] = [[] for _ in range(self.ranks)]
        self.where = [b""] * self.ranks
        self.messages: list[tuple | None] = [None] * self.ranks
        self.failures: dict[int, Failure] = {}
        self.alive = set(range(self.ranks))
        self.output: Output | None = None
        self.oom_before = oom_kills()
        for rank in range(self.ranks):
            self.selector.register(session.sockets[rank], selectors.EVENT_READ, ("socket", rank))
            self.selector.register(session.outputs[rank], selectors.EVENT_READ, ("output", rank))
            self.selector.register(session.wheres[rank], selectors.EVENT_READ, ("where", rank))
        self.selector.register(session.channel, selectors.EVENT_READ, ("channel", -1))

    # --- what a run is ---------------------------------------------------------------------------------------------
    def greet(self, hello: dict) -> None:
        """The surroundings that ranks take on (worker.py)."""
        for rank in range(self.ranks):
            self.post(rank, "hello", {**hello, "port": self.session.port})

    def run(self, common: bytes, own: list[bytes], sources: dict, output: Output, *, seed: int, checks: bool, last: bool):
        """One program on all ranks: what each answered. `last`: let the ranks end after it.

        Raises the error of a run that did not end well, after ending it; `error.outputs` is then what each rank printed.
        """
        self.output = output
        try:
            self.pump(0)
            gone = sorted(set(range(self.ranks)) - self.alive)
            if gone:
                self.fail(self.failures.get(gone[0]) or Failure.left(gone[0]))
            for rank in range(self.ranks):
                self.post(rank, "program", common, own[rank], sources, seed, checks)
            self.gather("ready", Watch(self.session.book, self.timeout, min(self.limit, START_SECONDS)))
            start = time.perf_counter_ns()
            for rank in range(self.ranks):
                self.post(rank, "go", start)
            answers = self.gather("value", Watch(self.session.book, self.timeout, self.limit))
            self.dismiss() if last else self.pump(0)
            self.drain()
            return answers
        except KeyboardInterrupt:
            output.failed = True
            raise self.interrupted() from None
        except CommError as error:
            output.failed = True
            output.finish()
            error.outputs = output.texts
            raise
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
                self.fail(self.root_of(self.settle()))
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

    def root_of(self, failures: dict[int, Failure]) -> Failure:
        """The failure to show. If all are broken connections, then a rank that is still at work was waited for too long."""
        working = sorted(self.alive - failures.keys())
        if working and all(f.lost for f in failures.values()):
            return self.place(Failure.straggler(working, self.timeout, len(failures)))
        return choose(failures, self.ranks)

    def place(self, verdict: Failure) -> Failure:
        """Ask the blamed ranks where they are (a signal that prints their frames), and put that into the verdict."""
        for rank in verdict.asks:
            self.session.kill(signal.SIGUSR1, rank)
        began = changed = time.monotonic()
        sizes: list[int] = []
        while time.monotonic() < began + ASK_SECONDS:  # a dump comes in many small pieces: it is over when no more comes
            self.pump(TICK)
            now = [len(self.where[r]) for r in verdict.asks]
            if now != sizes:
                sizes, changed = now, time.monotonic()
            elif all(now) and time.monotonic() > changed + 2 * TICK:
                break
        stopped = {r for r in verdict.asks if is_stopped(self.session.pids.get(r))}
        return verdict.at({r: self.where[r].decode(errors="replace") for r in verdict.asks}, stopped)

    def fail(self, failure: Failure) -> None:
        """End the run because of this failure: release everybody, then raise it."""
        self.stop(signal.SIGTERM, TERM_SECONDS)
        raise to_error(failure, self.failures, self.ranks)

    def interrupted(self) -> KeyboardInterrupt:
        """The reader has interrupted: let ranks say where they are, then end them."""
        book = self.session.book
        waits = {r: book.call(r, s.slot) for r in self.alive if (s := book.status(r)).state == lines.WAITING}
        try:
            self.session.kill(signal.SIGINT)
            deadline = time.monotonic() + INTERRUPT_SECONDS
            while time.monotonic() < deadline and any(r not in waits and not self.messages[r] for r in self.alive):
                self.pump(TICK)
        except (KeyboardInterrupt, ValueError, EOFError, pickle.UnpicklingError):  # again, or in the middle of a message
            pass
        reports = {r: Failure.reported(m[1]) for r, m in enumerate(self.messages) if m and m[0] == "failed"}
        self.stop(signal.SIGKILL, 0)
        return interrupted(self.ranks, waits, {r: f.frames for r, f in reports.items()})

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
        deadline = time.monotonic() + BYE_SECONDS
        while self.alive and time.monotonic() < deadline:
            self.pump(TICK)

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
            if what == REFUSED:
                self.alive.discard(rank)
                self.failures[rank] = Failure.refused(rank, value)
            elif what == EXITED and rank in self.alive:
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
