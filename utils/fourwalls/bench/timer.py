"""How to time: warm up, synchronise, repeat, alternate, and give the median with its interval.

A single time is a mood of the machine. The median of many is robust against the slow ones, and its interval needs no assumption
about their distribution: of N sorted times, the true median lies between two of them with a probability that the binomial
distribution gives. Two things are compared in alternating pairs, so that a slow minute slows both.

    P(x_(l) <= median <= x_(u))  >=  95%,    l, u from the binomial distribution with p = 1/2

Reference: Le Boudec, "Performance Evaluation of Computer and Communication Systems", table of order statistics; Georges et al.
2007.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Spread", "Timing", "alternate", "check_plausible", "repeats_for", "spread", "synchronise", "time_call", "time_ratio"]


@dataclass(frozen=True)
class Spread:
    """A median with the interval that holds the true one with at least 95% (all values, where there are fewer than six)."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Timing:
    """First call apart (it holds start-up), then the rest: seconds a call."""

    first: float
    rest: Spread


def spread(values: Iterable[float], confidence: float = 0.95) -> Spread:
    """Median and interval by order statistics."""
    ordered = sorted(values)
    n = len(ordered)
    if any(math.isnan(value) for value in ordered):
        raise ValueError("a value is nan, which has no place among the others")
    if n == 0:
        raise ValueError("no values: nothing was timed")
    outside, cut = 0.0, 0
    while cut < n // 2:
        outside += 2 * math.comb(n, cut) / 2**n
        if outside > 1 - confidence:
            break
        cut += 1
    low = max(cut - 1, 0)
    return Spread(statistics.median(ordered), ordered[low], ordered[n - 1 - low], n)


def time_ratio(ours: list[float], theirs: list[float]) -> Spread:
    """Median and interval of our time / their time, pair by pair."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} of our times and {len(theirs)} of the peer's: pairs are needed")
    return spread(a / b for a, b in zip(ours, theirs, strict=True))


def synchronise(device: str = "cpu") -> None:
    """Wait until the device has done all it was given: a GPU call returns long before its work is done."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def time_call(work: Callable[[], object], *, device: str = "cpu", warmup: int = 1, repeats: int = 10) -> Timing:
    """Seconds a call of `work()`: the first, and the spread of `repeats` after `warmup` more."""
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least 1")
    times = []
    for _ in range(1 + warmup + repeats):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return Timing(times[0], spread(times[1 + warmup :]))


def alternate(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    pairs: int,
    *,
    before: Callable[[], object] = lambda: None,
    device: str = "cpu",
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """`pairs` times (ours, theirs), who goes first changing each time; each figure is the mean of `repeats` calls, in seconds.

    `before()` runs before each figure and is not timed (a barrier, for ranks that time together). clock: time.process_time, for
    work on one thread, leaves out what other processes took.
    """
    if pairs < 1 or repeats < 1:
        raise ValueError(f"pairs is {pairs}, repeats {repeats}; each at least 1")
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            work = (ours, theirs)[which]
            synchronise(device)
            before()
            start = clock()
            for _ in range(repeats):
                work()
            synchronise(device)
            times[which].append((clock() - start) / repeats)
    return times


def repeats_for(comm, seconds: float, target: float = 2e-3, limit: int = 200) -> int:
    """How often to repeat a call of `seconds` so that one figure lasts about `target`: the same number on every rank.

    Ranks that each watched their own clock would stop at different counts, and the last one would wait for ever; so the largest
    number wins, told once round the ring.
    """
    import torch

    mine = torch.tensor(min(limit, max(1, math.ceil(target / max(seconds, 1e-9)))), device=comm.device)
    most = mine
    for _ in range(comm.size - 1):
        mine = comm.exchange(mine, (comm.rank + 1) % comm.size, torch.empty_like(mine), (comm.rank - 1) % comm.size)
        most = torch.maximum(most, mine)
    return int(most)


def check_plausible(
    seconds: float,
    *,
    flops: float = 0.0,
    bytes: float = 0.0,
    peak_flops: float = math.inf,
    peak_bandwidth: float = math.inf,
    what: str = "this",
) -> bool:
    """False, with a RuntimeWarning, where a time is shorter than the device's peaks (FLOP/s, bytes/s) allow.

    Then it was not the work that was timed, but the call that started it.
    """
    least = max(flops / peak_flops, bytes / peak_bandwidth)
    if seconds >= least:
        return True
    warnings.warn(
        f"{what} took {seconds:.3g} s, but the device needs at least {least:.3g} s for it: wait for the result (request.wait(), "
        "torch.cuda.synchronize()) before the clock is read",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
