"""Who holds what, when: run a collective on simulated ranks and note every cell after every message.

Each rank's numbers say where they come from (`watched.py`), so what a message carries and what a rank holds can be read off.
The function under study runs unchanged: the reader's own is shown as well as the library's.

    step  =  a moment of the virtual clock at which a message arrived or a cell changed

Reference: Thakur, Rabenseifner and Gropp 2005, on the algorithms that are shown.
"""

from dataclasses import dataclass, field, replace

import torch

from ..cost.hardware import Cluster, uniform
from ..ranks.simulator import simulate_ranks
from .watched import Watch, WatchedComm, Watcher, decode, encode, values_of

__all__ = ["MAX_CELLS", "MAX_HISTORY_RANKS", "History", "Message", "Step", "broken_ring", "record"]

MAX_HISTORY_RANKS = 8
MAX_CELLS = 16


@dataclass(frozen=True)
class Message:
    """One message: ranks, payload bytes, picoseconds, and what it carried: [(cell, {contributor: times})]."""

    src: int
    dst: int
    bytes: int
    start: int
    end: int
    carried: tuple = ()


@dataclass(frozen=True)
class Step:
    """What is new at time `end` (picoseconds): messages that arrived, cells (rank, cell) that changed, all cells after it.

    after[rank][cell] is {contributor: times}; the key -1 stands for something that belongs to another cell.
    """

    end: int
    messages: tuple[Message, ...]
    changed: frozenset
    after: tuple


@dataclass(frozen=True)
class History:
    """All steps of one run; step 0 is the start. `slow`: (src, dst, factor) or None."""

    name: str
    ranks: int
    cells: int
    steps: tuple[Step, ...]
    slow: tuple | None = None
    source: str = "modelled"
    note: str = field(default="", compare=False)

    @property
    def correct(self) -> bool:
        """Whether every cell of every rank ends as the sum of all ranks, each once."""
        full = {r: 1 for r in range(self.ranks)}
        return all(cell == full for row in self.steps[-1].after for cell in row)

    @property
    def makespan(self) -> int:
        """Picoseconds until the last message or change."""
        return self.steps[-1].end

    def bytes_sent(self, rank: int | None = None) -> int:
        """Payload bytes that `rank` (default: all together) sent."""
        return sum(m.bytes for s in self.steps for m in s.messages if rank in (None, m.src))

    def first_step(self, holds) -> int | None:
        """The first step after which `holds(after)` is true, or None."""
        return next((k for k, step in enumerate(self.steps) if holds(step.after)), None)


def record(
    function,
    ranks: int,
    cells: int | None = None,
    *,
    slow_link: tuple | None = None,
    cluster: Cluster | None = None,
    name: str = "",
) -> History:
    """Run `function(comm, x)` on simulated ranks and return its History.

    function   an all-reduce (or a part of one) on a float64 tensor of shape (cells,); a tensor that it returns counts too
    ranks      1 to 8;  cells: 1 to 16, default one for each rank
    slow_link  (src, dst, factor): that direction takes so many times as long
    cluster    default: a message costs 1 µs, and 1 µs more for each cell in it
    Raises ValueError for bad arguments, and what the run itself raises (RankError, DeadlockError, MismatchError).
    """
    if not callable(function):
        raise ValueError(f"function is {function!r}; it must be callable as function(comm, x)")
    if not isinstance(ranks, int) or not 1 <= ranks <= MAX_HISTORY_RANKS:
        raise ValueError(f"ranks={ranks!r}: a history is drawn for 1 to {MAX_HISTORY_RANKS} ranks")
    cells = ranks if cells is None else cells
    if not isinstance(cells, int) or not 1 <= cells <= MAX_CELLS:
        raise ValueError(f"cells={cells!r}: 1 to {MAX_CELLS}")
    cluster = cluster or uniform(1e-6, 8e6)
    if slow_link is not None:
        src, dst, factor = slow_link
        if not (0 <= src < ranks and 0 <= dst < ranks and src != dst and factor > 0):
            raise ValueError(
                f"slow_link={slow_link!r}: (src, dst, factor) with two different ranks below {ranks} and a factor above 0"
            )
        cluster = replace(cluster, slow={**cluster.slow, (src, dst): factor})
    watchers, messages = [Watcher(r, ranks, cells) for r in range(ranks)], []

    def on_message(src, dst, tag, start, end, tensor):
        carried = [decode(v, ranks, cells) for v in values_of(tensor)]
        named = tuple((c[0], dict(c[1])) for c in carried if c is not None and c[1])
        messages.append(Message(src, dst, tensor.numel() * tensor.element_size(), start, end, named))

    def program(comm):
        watcher, x = watchers[comm.rank], encode(comm.rank, cells)
        watcher.begin(x)
        with Watch(watcher):
            out = function(WatchedComm(comm, watcher), x)
        watcher.settle(comm.clock(), out if isinstance(out, torch.Tensor) else None)

    simulate_ranks(program, (), {}, ranks=ranks, cluster=cluster, on_message=on_message)
    steps = _steps(watchers, messages)
    return History(
        name or getattr(function, "__name__", "function"), ranks, cells, steps, tuple(slow_link) if slow_link else None
    )


def _steps(watchers, messages) -> tuple[Step, ...]:
    """Join what the ranks saw into steps: one for each moment at which a message arrived or a cell changed."""
    start = tuple(tuple(w.log[0][1]) for w in watchers)
    moments = sorted({m.end for m in messages} | {t for w in watchers for t, _ in w.log if t > 0})
    steps, now = [], [list(row) for row in start]
    for t in [0, *moments]:
        changed = set()
        for r, w in enumerate(watchers):
            for moment, row in w.log:
                if moment == t:
                    changed |= {(r, c) for c, cell in enumerate(row) if cell != now[r][c]}
                    now[r] = list(row)
        arrived = tuple(m for m in messages if m.end == t)
        if t == 0 or arrived or changed:
            steps.append(Step(t, arrived, frozenset(changed if t else ()), tuple(tuple(row) for row in now)))
    return tuple(steps)


def broken_ring(comm, x):
    """A ring all-reduce with one fault: the rank after rank 1 adds its first message twice, as after a careless retry.

    x: (cells,), changed in place and returned. One cell holds r1 twice, and the rest of the ring carries it everywhere.
    """
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    bounds = [c * x.numel() // n for c in range(n + 1)]
    chunk = [x[bounds[c] : bounds[c + 1]] for c in range(n)]
    for step in range(n - 1):
        mine, theirs = (comm.rank - step - 1) % n, (comm.rank - step - 2) % n
        buf = torch.empty_like(chunk[theirs])
        comm.exchange(chunk[mine], right, buf, left)
        chunk[theirs] += buf
        if step == 0 and left == 1 % n:
            chunk[theirs] += buf
    for step in range(n - 1):
        mine, theirs = (comm.rank - step) % n, (comm.rank - step - 1) % n
        comm.exchange(chunk[mine], right, chunk[theirs], left)
    return x
