"""How old were the weights? Read from a server's log, with no help from the rule that was to keep them young.

The log says in which order weights were given out and gradients came in. Replaying it tells, for each read, how many steps the
reader was ahead of the slowest worker, and for each push, how many steps the weights had made since its worker read them.

    ahead = clock(reader) - slowest <= bound        behind = steps between read and push <= (workers - 1) (2 bound + 1)

Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Staleness", "most_behind", "replay"]


@dataclass(frozen=True)
class Staleness:
    """ahead: for each read, (worker, steps ahead of the slowest); behind: for each push, (worker, steps made since its read)."""

    ahead: tuple[tuple[int, int], ...]
    behind: tuple[tuple[int, int], ...]

    @property
    def most_ahead(self) -> int:
        return max((a for _, a in self.ahead), default=0)

    @property
    def most_behind(self) -> int:
        return max((b for _, b in self.behind), default=0)

    @property
    def mean_behind(self) -> float:
        return sum(b for _, b in self.behind) / max(1, len(self.behind))


def replay(log: Sequence[tuple]) -> Staleness:
    """Staleness of a log of (kind, worker, clock, version, ...); `clock` is not believed but counted again.

    Raises ValueError where the log contradicts itself: a push without a read, or a clock that is not the number of pushes.
    """
    clocks = {worker: 0 for _, worker, *_ in log}
    working, reads, ahead, behind = set(clocks), {}, [], []
    for number, (kind, worker, clock, version, *_) in enumerate(log):
        if clock != clocks[worker]:
            raise ValueError(f"line {number}: worker {worker} has made {clocks[worker]} pushes, and the log says {clock}")
        if kind == "read":
            reads[worker] = version
            ahead.append((worker, clocks[worker] - min(clocks[w] for w in working)))
        elif kind == "push":
            if worker not in reads:
                raise ValueError(f"line {number}: worker {worker} pushes, but has not read since its last push")
            behind.append((worker, version - 1 - reads.pop(worker)))
            clocks[worker] += 1
        else:
            working.discard(worker)
    return Staleness(tuple(ahead), tuple(behind))


def most_behind(workers: int, bound: int) -> int:
    """The most steps that weights can be old when their gradient arrives, one push a step, under a bound.

    While a worker computes at clock c, each other goes from at least c - bound to at most c + bound + 1 pushes.
    """
    return (workers - 1) * (2 * bound + 1)
