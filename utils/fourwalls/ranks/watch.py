"""Looking into the book: is this a deadlock, a straggler, or just a rank that works?

A deadlock is a fact about the wait-for graph that can no longer change: every rank in it waits, nobody has answered, and that
was so at two looks a quarter of a second apart. A straggler is a rank at work while others wait for it; it ends the run only
after `timeout`, and the reader is told from the fifth second on. Time in which not even this process ran (the machine was
suspended, or too busy) is nobody's fault, and counts for nothing.

    deadlock found after at most 2 * 0.25 s + one tick

Reference: diagnose.py.
"""

import time
from collections.abc import Callable, Collection

from . import book as lines
from .book import Book
from .diagnose import blamed, stuck
from .failures import Failure

__all__ = ["Watch"]

LOOK_SECONDS = 0.25
TELL_SECONDS = 5.0
ABSENT_SECONDS = 1.0  # between two looks: more means that this process itself did not run


class Watch:
    """Watches one phase of a run. `timeout`: seconds to wait for a straggler; `limit`: seconds for the whole phase."""

    def __init__(self, book: Book, timeout: float, limit: float):
        self.book, self.timeout, self.limit = book, timeout, limit
        self.began = self.looked = self.told = time.monotonic()
        self.before: dict[int, lines.Status] = {}
        self.absent: list[tuple[int, int]] = []  # (from, to), perf_counter nanoseconds

    def look(self, alive: Collection[int], say: Callable[[str], None]) -> Failure | None:
        """A Failure if the run cannot or must not go on, else None. Cheap: it looks only four times a second."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return None
        if now - self.looked > ABSENT_SECONDS:
            clock, lost = time.perf_counter_ns(), now - self.looked - LOOK_SECONDS
            self.absent.append((clock - int(lost * 1e9), clock))
            self.began += lost
        self.looked = now
        book = self.book
        status = {r: book.status(r) for r in range(book.ranks)}
        still = {r for r, s in status.items() if self.before.get(r) == s}
        self.before = status
        over = {r for r, s in status.items() if s.state in (lines.DONE, lines.SETTLING)}
        held = {
            r
            for r, s in status.items()
            if s.state in (lines.WAITING, lines.SETTLING) and not s.unsure and not book.answered(r, s.slot)
        }
        waits = {r: book.call(r, status[r].slot) for r in held}
        real = {r: c for r, c in waits.items() if status[r].state == lines.WAITING}
        caught = stuck(real, over) & still
        if caught and caught == stuck({r: real[r] for r in caught}, over):
            pending = [c for r in range(book.ranks) for c in book.unanswered(r)]
            return Failure.deadlock({r: real[r] for r in caught}, over, pending)
        lost = {r for r, c in waits.items() if status[r].state == lines.SETTLING and r in still}
        if lost and len(over) == book.ranks:
            return Failure.unanswered([c for r in sorted(lost) for c in book.unanswered(r)])
        return self._late(now, status, waits, over, alive, say)

    def _waited(self, since: int, clock: int) -> float:
        """Seconds from `since` to `clock` in which ranks could have gone on."""
        lost = sum(max(0, min(end, clock) - max(begin, since)) for begin, end in self.absent)
        return (clock - since - lost) / 1e9

    def _late(self, now, status, waits, over, alive, say) -> Failure | None:
        clock = time.perf_counter_ns()
        waited = {r: self._waited(s.since, clock) for r, s in status.items()}
        longest = max((waited[r] for r in waits), default=0.0)
        if longest > self.timeout:
            late = {r: c for r, c in waits.items() if waited[r] > self.timeout}
            names = blamed(late if blamed(late, over) else waits, over)
            if names:
                return Failure.straggler(sorted(names), self.timeout, len(waits))
        at_work = (lines.WAITING, lines.SETTLING)
        moving = [r for r, s in status.items() if s.state in at_work and r not in waits and not s.unsure]
        for r in moving:
            if waited[r] > self.timeout:
                return Failure.stalled(self.book.call(r, status[r].slot), self.timeout)
        if now - self.began > self.limit:
            busy = [r for r in sorted(alive) if status[r].state != lines.DONE]
            return Failure.limit(busy, self.limit)
        if longest > TELL_SECONDS and now - self.told >= TELL_SECONDS:
            names = sorted(blamed(waits, over))
            if names:
                self.told = now
                who = ", ".join(map(str, names))
                say(f"waiting for rank {who} since {longest:.0f} s (the run ends at {self.timeout:g} s)")
        return None
