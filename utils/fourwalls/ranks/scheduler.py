"""Virtual time: who runs next, which message travels when, and when nobody can go on.

Every simulated rank is a thread, but only one runs at a time, and it hands over only where it must wait; a heap picks the
runnable rank with the smallest clock (ties by rank). A message may travel once both sides have posted it; it then holds the
sender's way out and the receiver's way in until it has arrived, and messages are given their ports in order of time.

    start = max(posted by sender, posted by receiver, ports free),   end = start + alpha + bytes * beta

Reference: R. M. Fujimoto, Parallel Discrete Event Simulation, CACM 1990 (conservative simulation).
"""

import _thread
import ctypes
import os
import sys
import threading
import time
from collections import deque
from heapq import heappop, heappush

import torch

__all__ = ["Channel", "Message", "Released", "Scheduler"]

UNWINDINGS = 100  # times a rank may be told that the run is over: `finally` blocks may communicate
_READY, _RUNNING, _BLOCKED, _DONE = range(4)


def _wake_gently() -> None:
    """This thread, when it is woken, does not push aside the one that wakes it: that one still holds the interpreter's lock, so
    the core would only go there and back. What runs is the same without it, with up to one switch more a hand-over.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # not on this platform, or not allowed
        pass


class Released(BaseException):
    """Raised inside a rank that is let go because another rank failed. Not an Exception: `except Exception` must not stop it."""


class Channel:
    """Messages from one rank to another with one tag, first posted first matched."""

    __slots__ = ("dst", "nbytes", "open", "receives", "sends", "src", "takes")

    def __init__(self, src: int, dst: int):
        self.src, self.dst = src, dst
        self.nbytes, self.takes = -1, 0  # of its last message: mostly the next one is as large
        self.sends: deque = deque()
        self.receives: deque = deque()
        self.open = [0, 0]  # sends, receives posted and not yet delivered


class Message:
    """A send and a receive that found each other. `ready`: the later of the two posts (picoseconds)."""

    __slots__ = ("channel", "end", "ready", "receive", "send", "start")

    def __init__(self, channel, send, receive, ready):
        self.channel, self.send, self.receive, self.ready = channel, send, receive, ready
        self.start = self.end = None


class Scheduler:
    """Clocks, threads and ports of one simulation.

    cost(src, dst, nbytes) -> picoseconds, always the same;  ports(src, dst) -> names of further ports that the message holds;
    deliver(message) moves the data and records it;  in_order: deliver strictly by time (a watcher needs it; else only ports do).
    """

    def __init__(self, size: int, *, cost, ports=None, deliver, in_order: bool = False):
        self.size = size
        self.clock = [0] * size
        self.state = [_READY] * size
        self.blocked_on: list = [None] * size  # the post that a blocked rank waits for
        self.errors: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self.stopping = False
        self.channels: dict[tuple, Channel] = {}
        self._ready: list[tuple[int, int]] = []  # heap of (clock, rank)
        self._pending: list[tuple] = []  # heap of (ready, src, dst, number, message)
        self._number = 0
        self._cost, self._ports, self._deliver, self._in_order = cost, ports, deliver, in_order
        self._out_free, self._in_free, self._port_free = [0] * size, [0] * size, {}
        self._out_open, self._in_open = [0] * size, [0] * size  # channels with something undelivered
        self._locks = [_thread.allocate_lock() for _ in range(size)]
        self._main = _thread.allocate_lock()
        self._random = [None] * size
        self.threads: list = [None] * size
        self.running: int | None = None
        self.returned = [False] * size  # whose program came to its end
        self._unwound = [0] * size
        for lock in (*self._locks, self._main):
            lock.acquire()

    # --- messages --------------------------------------------------------------------------------------------------
    def channel(self, key: tuple, src: int, dst: int) -> Channel:
        """The channel of that key, made when first asked for."""
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = Channel(src, dst)
        return found

    def post(self, channel: Channel, post, sending: bool):
        """Put a send or a receive (an object with `time`, `nbytes`, `done_at`, `message`) on its channel; match it if it can be.

        Returns the Message if this post completed a pair, else None. The caller checks that the two fit, then calls `matched`.
        """
        is_open = channel.open
        if sending:
            if not is_open[0]:
                self._out_open[channel.src] += 1
            is_open[0] += 1
            if not channel.receives:
                channel.sends.append(post)
                return None
            send, receive = post, channel.receives.popleft()
        else:
            if not is_open[1]:
                self._in_open[channel.dst] += 1
            is_open[1] += 1
            if not channel.sends:
                channel.receives.append(post)
                return None
            send, receive = channel.sends.popleft(), post
        message = Message(channel, send, receive, send.time if send.time > receive.time else receive.time)
        send.message = receive.message = message
        return message

    def matched(self, message: Message) -> None:
        """A fitting pair: deliver it now if no earlier message can want the same ports, else when its time has come."""
        if self._is_next(message):
            self._commit(message)
        else:
            self._number += 1
            channel = message.channel
            heappush(self._pending, (message.ready, channel.src, channel.dst, self._number, message))

    def _is_next(self, message: Message) -> bool:
        """Whether no message posted from now on, or waiting, can be ready earlier on this message's two ports (exact, local)."""
        channel = message.channel
        src, dst = channel.src, channel.dst
        if self._in_order or self._out_open[src] != 1 or self._in_open[dst] != 1:
            return False
        if self._ports is not None and self._ports(src, dst):
            return False
        ready, clock, blocked = message.ready, self.clock, self.blocked_on
        return (clock[src] >= ready or blocked[src] is message.send) and (clock[dst] >= ready or blocked[dst] is message.receive)

    def _commit(self, message: Message) -> None:
        channel = message.channel
        src, dst, out_free, in_free = channel.src, channel.dst, self._out_free, self._in_free
        send, receive, start = message.send, message.receive, message.ready
        if out_free[src] > start:  # max() would take longer
            start = out_free[src]
        if in_free[dst] > start:
            start = in_free[dst]
        if send.nbytes != channel.nbytes:
            channel.nbytes, channel.takes = send.nbytes, self._cost(src, dst, send.nbytes)
        if self._ports is None:
            end = start + channel.takes
        else:
            more = self._ports(src, dst)
            start = max(start, *(self._port_free.get(p, 0) for p in more)) if more else start
            end = start + channel.takes
            for port in more:
                self._port_free[port] = end
        out_free[src] = in_free[dst] = end
        message.start, message.end = start, end
        is_open = channel.open
        is_open[0] -= 1
        is_open[1] -= 1
        if not is_open[0]:
            self._out_open[src] -= 1
        if not is_open[1]:
            self._in_open[dst] -= 1
        self._deliver(message)
        send.done_at = receive.done_at = end
        if self.blocked_on[src] is send:
            self._wake(src, end)
        if self.blocked_on[dst] is receive:
            self._wake(dst, end)

    def _wake(self, rank: int, time: int) -> None:
        self.blocked_on[rank] = None
        if time > self.clock[rank]:
            self.clock[rank] = time
        if self.state[rank] == _BLOCKED:
            self.state[rank] = _READY
            heappush(self._ready, (self.clock[rank], rank))

    # --- ranks -----------------------------------------------------------------------------------------------------
    def wait(self, rank: int, post) -> None:
        """Let `rank` wait until `post` is delivered; its clock moves to the delivery. Raises Released when the run is over."""
        if post.done_at is None and not self.stopping:
            self.blocked_on[rank] = post
            message = post.message
            if message is not None and self._is_next(message):
                self._commit(message)  # still in the heap of pending messages, where it is skipped
            if post.done_at is None:
                self.state[rank] = _BLOCKED
                self._hand_over(rank)
            self.blocked_on[rank] = None
        if self.stopping:
            self._let_go(rank)
        if post.done_at > self.clock[rank]:
            self.clock[rank] = post.done_at

    def give_way(self, rank: int) -> None:
        """Let every rank whose clock is not later run first."""
        if not self.stopping:
            self.state[rank] = _READY
            heappush(self._ready, (self.clock[rank], rank))
            self._hand_over(rank)
        if self.stopping:
            self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        """Unwind a rank of a run that is over. One that catches even this and goes on is parked for ever instead of spinning."""
        self._unwound[rank] += 1
        while self._unwound[rank] > UNWINDINGS:
            self._locks[rank].acquire()
        raise Released

    def _next(self) -> int | None:
        """The rank to run next; delivers pending messages whose time has come. None: nobody can run."""
        while True:
            while self._pending and self._pending[0][4].end is not None:
                heappop(self._pending)
            if self._pending and (not self._ready or self._pending[0][0] <= self._ready[0][0]):
                self._commit(heappop(self._pending)[4])
                continue
            return heappop(self._ready)[1] if self._ready else None

    def _hand_over(self, rank: int) -> None:
        generator = torch.default_generator
        state = generator.get_state()
        if not self._resume_next(rank):
            self._locks[rank].acquire()
        generator.set_state(state)
        self.running = rank

    def _resume_next(self, rank: int | None) -> bool:
        """Start or resume the next rank; True if that is `rank` itself. Wakes the main thread when nobody can run."""
        chosen = self._next()
        if chosen is None:
            self.running = None
            self._wake_main()
            return False
        self.state[chosen] = _RUNNING
        if chosen == rank:
            return True
        self._start_or_release(chosen)
        return False

    def _wake_main(self) -> None:
        if self._main.locked():
            self._main.release()

    def _start_or_release(self, rank: int) -> None:
        self.running = rank
        thread = self.threads[rank]
        if thread.ident is None:
            thread.start()
        else:
            self._locks[rank].release()

    def run(self, program, *, stack_bytes: int, cpu: int | None) -> None:
        """Run `program(rank)` on every rank to the end. Errors are kept in `errors`; stuck ranks stay blocked: see `stuck`."""

        def body(rank):
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
                _wake_gently()
            try:
                program(rank)
                self.returned[rank] = True
            except Released:
                pass
            except BaseException as error:  # every failure of a learner's program is reported, never swallowed
                self.errors.append((rank, error))
                self.stopping = True
            self.state[rank] = _DONE
            self.running = None
            if self.stopping:
                self._wake_main()
            else:
                self._resume_next(None)

        old = threading.stack_size(stack_bytes)
        try:
            self.threads = [threading.Thread(target=body, args=(r,), daemon=True, name=f"rank {r}") for r in range(self.size)]
            self._ready = [(0, r) for r in range(self.size)]
            self._resume_next(None)
            while not self._main.acquire(timeout=0.2):  # comes up for air, so that an interrupt gets through on every platform
                pass
        finally:
            threading.stack_size(old)

    def rank_of(self, thread: int) -> int | None:
        """The rank whose thread has this identity; None for any other thread."""
        return next((r for r, t in enumerate(self.threads) if t is not None and t.ident == thread), None)

    def stuck(self) -> list[int]:
        """Ranks that wait for a message that can never come."""
        return [r for r in range(self.size) if self.state[r] == _BLOCKED]

    def frames(self) -> dict:
        """rank -> the innermost Python frame of its thread, for ranks that are alive."""
        current = sys._current_frames()
        return {r: current[t.ident] for r, t in enumerate(self.threads) if t is not None and t.ident in current}

    def release(self, *, patience: float = 2.0) -> list[int]:
        """End every rank that is left, one after the other; returns those that would not within `patience` seconds in all."""
        self.stopping = True
        left, deadline = [], time.monotonic() + patience
        for rank, thread in enumerate(self.threads):
            if thread is None or thread.ident is None or not thread.is_alive():
                continue
            if self.running == rank:  # it computes: interrupt it between two byte codes
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Released))
            elif self._locks[rank].locked():
                self._locks[rank].release()
            thread.join(max(0.05, deadline - time.monotonic()) if len(left) < 4 else 0.01)
            if thread.is_alive():
                left.append(rank)
        return left
