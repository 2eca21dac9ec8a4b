"""A zero-bubble schedule made for given times and a given memory: W is filler, and place is everything.

All ranks are walked together, always the one whose clock is furthest behind. At first a rank takes forward passes, as many as
its memory holds and as end before the first backward pass can start. Then F and I take turns, and wherever a rank would stand
idle it runs a W instead: if the gap holds one, or if the gap would make this rank the most idle of all, or if the memory that W
frees is what the next F lacks. A few ways to walk are tried, and the best is kept.

    held = F started - (1 - w) I ended - w W ended  <=  limit        bubble = (span - work) / span

Reference: Qi et al. 2023 (arXiv:2401.10241), section 3.1 describes such rules; table 5 has what theirs reach (ZB-1p, ZB-2p).
"""

import heapq

from .actions import Action, Schedule
from .schedules import whole
from .simulate import Times, simulate
from .zero_bubble import zb_h1, zb_h2

__all__ = ["fill"]

SLACK = 1e-9  # sums of shares of an activation
WAYS = ((False, False), (False, True), (True, True))  # (eager, greedy), see _Walk


def fill(
    ranks: int,
    microbatches: int,
    limit: float | None = None,
    *,
    times: Times | None = None,
    after_input: float = 1.0,
    objective: str = "span",
    ways: int = len(WAYS),
) -> Schedule:
    """The best of a few walks, and of ZB-H1 and ZB-H2 where their memory is allowed: F, I and W of one stage on each rank.

    limit: activations that a rank may hold at once, each of weight 1 (default: ranks, as 1F1B).  times: default all 1, no link.
    after_input: what a W still holds of an activation once I has run (a transformer layer: 32 h of 34 h + 5 a s).
    objective: "span" (the longest time from a rank's first action to its last) or "makespan".  ways: walks to try, 1 to 3.
    """
    whole(ranks=ranks, microbatches=microbatches)
    limit = ranks if limit is None else limit
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 1:
        raise ValueError(f"limit is {limit!r}; a rank must hold at least 1 micro-batch, nearest legal: 1")
    if not 0 <= after_input <= 1:
        raise ValueError(f"after_input is {after_input!r}; allowed: 0 to 1, a share of the activation")
    if objective not in ("span", "makespan"):
        raise ValueError(f"objective is {objective!r}; allowed: span, makespan")
    times = times or Times()
    found = []  # (cost, schedule)
    for eager, greedy in WAYS[: max(1, ways)]:
        walk = _Walk(ranks, microbatches, limit, times, after_input, eager=eager, greedy=greedy)
        walk.run()
        found.append((walk.span() if objective == "span" else max(walk.clock), walk.rows))
    # rules are no proof: where the fixed orders fit and do better, they are taken (they begin with `held` F on rank 0)
    for by_hand, held in ((zb_h1, ranks), (zb_h2, 2 * ranks - 1)):
        if min(held, microbatches) <= limit + SLACK:
            run = simulate(by_hand(ranks, microbatches), times, after_input=after_input, checked=False)
            found.append((run.longest_span_ps if objective == "span" else run.makespan_ps, run.schedule))
    return min(found, key=lambda pair: pair[0])[1]


class _Walk:
    """One walk of all ranks through time (picoseconds).

    eager: the warm-up takes another F even if the first I must then wait.  greedy: if it is the turn of an action that is not
    there yet, the other kind goes first even if it makes that one late.
    """

    def __init__(self, ranks: int, microbatches: int, limit: float, times: Times, kept: float, *, eager: bool, greedy: bool):
        self.m, self.limit, self.kept, self.eager, self.greedy = microbatches, limit + SLACK, kept, eager, greedy
        seconds = times.picoseconds(ranks)
        self.took = [{kind: seconds[kind][r] for kind in "FIW"} for r in range(ranks)]
        self.link = round(times.link * 10**12)
        self.last = ranks - 1
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.clock, self.began, self.idle = [0] * ranks, [0] * ranks, [0] * ranks
        self.forward, self.input, self.weight = [0] * ranks, [0] * ranks, [0] * ranks  # how many have run
        self.held = [0.0] * ranks
        # when inputs are there, in the order of the micro-batches: F from the rank before, I from the rank behind
        self.down: list[list[int]] = [[0] * microbatches if r == 0 else [] for r in range(ranks)]
        self.up: list[list[int]] = [[] for _ in range(ranks)]
        self.heap = [(0, r) for r in range(ranks)]
        self.queued = [True] * ranks
        self.most_idle = 0

    def run(self) -> None:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            self.queued[rank] = False
            now = max(now, self.clock[rank])
            found = self._choose(rank, now)
            if found is not None:  # else it sleeps, until a message wakes it
                self._do(rank, *found)
        assert all(len(row) == 3 * self.m for row in self.rows), "a walk came to a stop"

    def span(self) -> int:
        return max(end - begin for begin, end in zip(self.began, self.clock, strict=True))

    def _choose(self, rank: int, now: int) -> tuple[str, int] | None:
        """(kind, start) of what `rank` does next, or None if it knows of nothing."""
        done_f, done_i = self.forward[rank], self.input[rank]
        owed = done_i > self.weight[rank]
        more = done_f < self.m
        room = more and self.held[rank] + 1 <= self.limit
        f_there = max(now, self.down[rank][done_f]) if done_f < len(self.down[rank]) else None
        i_there = max(now, self.up[rank][done_i]) if done_i < len(self.up[rank]) else None
        kind, start = self._turn(rank, f_there if room else None, i_there)
        if kind is None:
            return ("W", now) if owed else None
        if owed and kind == "I" and more and not room and f_there is not None:
            # F's turn has come, or I is not there yet, and only memory is missing: W frees some
            frees = self.held[rank] + 1 - self.kept <= self.limit and f_there <= now + self.took[rank]["W"]
            if start > now or (frees and self.rows[rank][-1].kind == "I"):
                return "W", now
        gap = start - now
        if owed and gap > 0 and (gap >= self.took[rank]["W"] or self.idle[rank] + gap > self.most_idle):
            return "W", now
        return kind, start

    def _turn(self, rank: int, f_there: int | None, i_there: int | None) -> tuple[str | None, int]:
        """F or I, and when it can start; F comes as None if there is no memory for it."""
        if f_there is None or i_there is None:
            return ("F", f_there) if f_there is not None else ("I", i_there) if i_there is not None else (None, 0)
        took = self.took[rank]
        if not self.input[rank]:  # warm-up
            late = f_there >= i_there if self.eager else f_there + took["F"] > i_there
            return ("I", i_there) if late else ("F", f_there)
        last = next(a.kind for a in reversed(self.rows[rank]) if a.kind != "W")
        turn, other = (("I", i_there), ("F", f_there)) if last == "F" else (("F", f_there), ("I", i_there))
        fits = other[1] + took[other[0]] <= turn[1]
        return other if other[1] < turn[1] and (fits or self.greedy) else turn

    def _do(self, rank: int, kind: str, start: int) -> None:
        row, end = self.rows[rank], start + self.took[rank][kind]
        if row:
            self.idle[rank] += start - self.clock[rank]
            self.most_idle = max(self.most_idle, self.idle[rank])
        else:
            self.began[rank] = start
        self.clock[rank] = end
        self._wake(rank, end)
        if kind == "F":
            row.append(Action(rank, "F", self.forward[rank]))
            self.forward[rank] += 1
            self.held[rank] += 1
            if rank < self.last:
                self.down[rank + 1].append(end + self.link)
                self._wake(rank + 1, start)
            else:
                self.up[rank].append(end)
        elif kind == "I":
            row.append(Action(rank, "I", self.input[rank]))
            self.input[rank] += 1
            self.held[rank] -= 1 - self.kept
            if rank:
                self.up[rank - 1].append(end + self.link)
                self._wake(rank - 1, start)
        else:
            row.append(Action(rank, "W", self.weight[rank]))
            self.weight[rank] += 1
            self.held[rank] -= self.kept

    def _wake(self, rank: int, now: int) -> None:
        if not self.queued[rank]:
            heapq.heappush(self.heap, (max(now, self.clock[rank]), rank))
            self.queued[rank] = True
