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

from .random_state import keep_and_put_back

__all__ = ["Channel", "Released", "Scheduler"]

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


class Port:
    """A rank's way out, or its way in: one message at a time."""

    __slots__ = ("free", "open")

    def __init__(self):
        self.free = self.open = 0  # when its last message has passed (picoseconds); how many posts are not delivered


class Channel:
    """Messages from one rank to another with one tag: first posted, first matched, first delivered."""

    __slots__ = ("dst", "entry", "exit", "nbytes", "receives", "rows_in", "rows_out", "sends", "src", "tag", "takes", "waiting")

    def __init__(self, src: int, dst: int, tag, exit: Port, entry: Port, rows_out: list, rows_in: list):
        self.src, self.dst, self.tag = src, dst, tag
        self.exit, self.entry, self.rows_out, self.rows_in = exit, entry, rows_out, rows_in
        self.nbytes, self.takes = -1, 0  # of its last message: mostly the next one is as large
        self.sends: deque = deque()  # posted, without the other side
        self.receives: deque = deque()
        self.waiting: deque = deque()  # messages whose turn has not come


class Scheduler:
    """Clocks, threads and ports of one simulation.

    cost(src, dst, nbytes) -> picoseconds, always the same;  ports(src, dst) -> names of further ports that the message holds;
    watch(channel, send, start, end) is told of every message;  in_order: deliver strictly by time.

    Posts are those of posts.py. Two that found each other are one message, known by its send, and `ready` at the later of the two
    posts. What was delivered stands in `rows`, a list for each rank, as (src, dst, start, end, bytes).
    """

    def __init__(self, size: int, *, cost, ports=None, watch=None, in_order: bool = False):
        self.size = size
        self.clock = [0] * size
        self.state = [_READY] * size
        self.blocked_on: list = [None] * size  # the post that a blocked rank waits for
        self.errors: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self.stopping = False
        self.channels: dict[tuple, Channel] = {}
        self.rows: list[list[tuple]] = [[] for _ in range(size)]
        self._ready: list[tuple[int, int]] = []  # heap of (clock, rank)
        self._pending: list[tuple] = []  # heap of (ready, src, dst, number, send): messages whose turn has not come
        self._fresh: list = []  # such messages not put there yet: most are delivered before anybody looks into the heap
        self._number = 0
        self._cost, self._ports, self._watch, self._in_order = cost, ports, watch, in_order
        self._local = ports is None and not in_order  # all messages hold nothing but their two ports
        self._exits, self._entries, self._port_free = [Port() for _ in range(size)], [Port() for _ in range(size)], {}
        self._locks = [_thread.allocate_lock() for _ in range(size)]
        self._main = _thread.allocate_lock()
        self._keep_random, self._put_back_random = keep_and_put_back()
        self.threads: list = [None] * size
        self.running: int | None = None
        self.returned = [False] * size  # whose program came to its end
        self._unwound = [0] * size
        for lock in (*self._locks, self._main):
            lock.acquire()

    # --- messages --------------------------------------------------------------------------------------------------
    def channel(self, key: tuple, src: int, dst: int, tag) -> Channel:
        """The channel of that key, made when first asked for."""
        found = self.channels.get(key)
        if found is None:
            found = Channel(src, dst, tag, self._exits[src], self._entries[dst], self.rows[src], self.rows[dst])
            self.channels[key] = found
        return found

    def meet(self, channel: Channel, send, receive) -> None:
        """A send and a receive that fit are a message from now on. It is delivered when a rank waits for it, or when its time
        comes: as long as both its ranks go on, one of them may post what goes first.
        """
        send.receive, receive.send = receive, send
        send.ready = send.time if send.time > receive.time else receive.time
        channel.waiting.append(send)
        self._fresh.append(send)

    def _is_local(self, channel: Channel) -> bool:
        """Whether its messages hold nothing but their two ports."""
        return not self._in_order and (self._ports is None or not self._ports(channel.src, channel.dst))

    def deliver_waiting(self, channel: Channel, send, post) -> bool:
        """A rank waits for `post`, one side of the message `send`: deliver it if no other, posted or still to come, can go before
        it on its two ports (exact, and local): if all that its two ranks have under way is on this channel, and the other rank is
        not behind the time at which the message is ready, or waits for it too.
        """
        other, rank = (send.receive, channel.dst) if post is send else (send, channel.src)
        blocked, waiting = self.blocked_on[rank] is other, channel.waiting
        if (
            (self.clock[rank] < send.ready and not blocked)
            or waiting[0] is not send
            or channel.exit.open != len(channel.sends) + len(waiting)
            or channel.entry.open != len(channel.receives) + len(waiting)
            or not (self._local or self._is_local(channel))
        ):
            return False
        waiting.popleft()
        end = self._deliver(channel, send, send.ready)
        if blocked:
            self._wake(rank, end)
        return True

    def _deliver_pending(self, send) -> None:
        """Deliver the first message of the heap."""
        channel, receive = send.channel, send.receive
        channel.waiting.remove(send)
        end = self._deliver(channel, send, send.ready)
        for rank, post in ((channel.src, send), (channel.dst, receive)):
            if self.blocked_on[rank] is post:
                self._wake(rank, end)

    def _deliver(self, channel: Channel, send, start: int) -> int:
        """Give the message its ports, not before `start`. Returns when it has arrived."""
        exit, entry, receive, nbytes = channel.exit, channel.entry, send.receive, send.nbytes
        if exit.free > start:  # max() would take longer
            start = exit.free
        if entry.free > start:
            start = entry.free
        if nbytes != channel.nbytes:
            channel.nbytes, channel.takes = nbytes, self._cost(channel.src, channel.dst, nbytes)
        if self._ports is None:
            end = start + channel.takes
        else:
            end = self._hold(self._ports(channel.src, channel.dst), start, channel.takes)
            start = end - channel.takes
        exit.free = entry.free = send.done_at = receive.done_at = end
        exit.open -= 1
        entry.open -= 1
        row = channel.src, channel.dst, start, end, nbytes
        channel.rows_out.append(row)
        channel.rows_in.append(row)
        receive.payload = send.payload
        if self._watch is not None:
            self._watch(channel, send, start, end)
        send.receive = receive.send = None  # they need each other no more, and a circle would wait for a collection
        return end

    def _hold(self, ports, start: int, takes: int) -> int:
        """Further ports that a message holds, not before `start`. Returns when it lets go of them."""
        end = max(start, *(self._port_free.get(port, 0) for port in ports)) + takes if ports else start + takes
        for port in ports:
            self._port_free[port] = end
        return end

    def _wake(self, rank: int, time: int) -> None:
        self.blocked_on[rank] = None
        if time > self.clock[rank]:
            self.clock[rank] = time
        if self.state[rank] == _BLOCKED:
            self.state[rank] = _READY
            heappush(self._ready, (self.clock[rank], rank))

    # --- ranks -----------------------------------------------------------------------------------------------------
    def wait(self, rank: int, post) -> None:
        """Let `rank` wait until `post` is delivered. Raises Released when the run is over."""
        if post.done_at is None and not self.stopping:
            self.blocked_on[rank] = post
            self.state[rank] = _BLOCKED
            self._hand_over(rank)
            self.blocked_on[rank] = None
        if self.stopping:
            self._let_go(rank)

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
        pending = self._pending
        while True:
            for send in self._fresh:
                if send.done_at is None:
                    self._number += 1
                    heappush(pending, (send.ready, send.channel.src, send.channel.dst, self._number, send))
            self._fresh.clear()
            while pending and pending[0][4].done_at is not None:
                heappop(pending)
            if not pending or (self._ready and self._ready[0][0] < pending[0][0]):
                return heappop(self._ready)[1] if self._ready else None
            self._deliver_pending(heappop(pending)[4])

    def _hand_over(self, rank: int) -> None:
        random = self._keep_random()  # before a watcher is told of messages: it may draw numbers
        chosen = self._next()
        if chosen != rank:
            self._resume(chosen)
            self._locks[rank].acquire()
        self._put_back_random(random)
        self.state[rank] = _RUNNING
        self.running = rank

    def _resume(self, rank: int | None) -> None:
        """Let that rank run; None: nobody can, and the main thread takes over."""
        self.running = rank
        if rank is None:
            self._wake_main()
        elif self.threads[rank].ident is None:
            self.state[rank] = _RUNNING
            self.threads[rank].start()
        else:
            self._locks[rank].release()

    def _wake_main(self) -> None:
        if self._main.locked():
            self._main.release()

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
                self._resume(self._next())

        old = threading.stack_size(stack_bytes)
        try:
            self.threads = [threading.Thread(target=body, args=(r,), daemon=True, name=f"rank {r}") for r in range(self.size)]
            self._ready = [(0, r) for r in range(self.size)]
            self._resume(self._next())
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
