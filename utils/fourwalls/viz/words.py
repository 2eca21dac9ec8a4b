"""What a picture shows, in words and figures made from the same data: for readers who do not see it, and for captions.

Every sentence is computed from the Trace, never typed. The two shares that are both called "bubble" elsewhere have two names
here.

    bubble_of_total = idle / (ranks * makespan)        bubble_of_ideal = idle / busy

Reference: Narayanan et al. 2021 (bubble over ideal time); Qi et al. 2024 (bubble over total time).
"""

from collections import defaultdict

from ..ranks.trace import PS, Trace

__all__ = [
    "bubble_of_ideal",
    "bubble_of_total",
    "bytes_text",
    "count_text",
    "describe",
    "peak_bytes",
    "time_scale",
    "time_text",
    "waits",
]

TIME_UNITS = ((PS, "s"), (10**9, "ms"), (10**6, "µs"), (10**3, "ns"), (1, "ps"))


def time_scale(ps: float) -> tuple[int, str]:
    """(picoseconds in the unit, name of the unit) that suits a span of `ps`."""
    for size, name in TIME_UNITS:
        if abs(ps) >= size:
            return size, name
    return TIME_UNITS[-1] if ps else TIME_UNITS[2]


def time_text(ps: float) -> str:
    """`1500000` -> "1.5 µs"."""
    size, name = time_scale(ps)
    return f"{ps / size:.3g} {name}" if ps / size < 1000 else f"{ps / size:,.0f} {name}"


def bytes_text(nbytes: float, *, binary: bool = True) -> str:
    """`1536` -> "1.5 KiB" (binary) or "1.54 kB" (powers of 1000)."""
    step, names = (
        (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")) if binary else (1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))
    )
    value, k = float(nbytes), 0
    while abs(value) >= step and k + 1 < len(names):
        value, k = value / step, k + 1
    return f"{value:,.0f} {names[k]}" if k == 0 or abs(value) >= 999.5 else f"{value:.3g} {names[k]}"


def count_text(n: int, word: str) -> str:
    """`(1, "rank")` -> "1 rank"; `(3, "rank")` -> "3 ranks"."""
    return f"{n:,} {word}" + ("" if n == 1 else "s")


def waits(trace: Trace) -> dict[int, dict[int | None, int]]:
    """rank -> {rank waited for: picoseconds}, from the events of kind "wait"."""
    table: dict[int, dict[int | None, int]] = defaultdict(lambda: defaultdict(int))
    for e in trace:
        if e.kind == "wait":
            table[e.rank][e.peer] += e.end - e.start
    return {rank: dict(by_peer) for rank, by_peer in table.items()}


def peak_bytes(trace: Trace) -> dict[int, int]:
    """rank -> the largest live bytes that it marked; only ranks that marked any."""
    peaks: dict[int, int] = {}
    for e in trace:
        if e.kind == "live":
            peaks[e.rank] = max(peaks.get(e.rank, 0), e.bytes)
    return peaks


def _busy_ps(trace: Trace) -> int:
    """Picoseconds of work on compute lanes, all ranks together, overlaps counted once (one pass over the events)."""
    spans = defaultdict(list)
    for e in trace:
        if e.lane == "compute" and e.kind != "wait":
            spans[e.rank].append((e.start, e.end))
    total = 0
    for mine in spans.values():
        reached = 0
        for start, end in sorted(mine):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total


def bubble_of_total(trace: Trace) -> float | None:
    """Share of all ranks' time in which they do no work: idle / (ranks x makespan). None where nobody works."""
    busy, whole = _busy_ps(trace), trace.ranks * trace.makespan_ps
    return (whole - busy) / whole if busy and whole else None


def bubble_of_ideal(trace: Trace) -> float | None:
    """Idle time over working time: with equal ranks, (makespan - ideal) / ideal. None where nobody works."""
    busy, whole = _busy_ps(trace), trace.ranks * trace.makespan_ps
    return (whole - busy) / busy if busy else None


def describe(trace: Trace) -> str:
    """The timeline in words: ranks, length, who waits most and for whom, bytes sent, bubble, peak memory."""
    if not len(trace):
        return f"An empty trace of {count_text(trace.ranks, 'rank')}: nothing was recorded."
    makespan = trace.makespan_ps
    said = [f"{count_text(trace.ranks, 'rank')}, {time_text(makespan)}, {' and '.join(trace.sources)}."]
    waiting = waits(trace)
    if waiting and makespan:
        rank = max(waiting, key=lambda r: (sum(waiting[r].values()), -r))
        total = sum(waiting[rank].values())
        peer = max(waiting[rank], key=lambda p: (waiting[rank][p], -1 if p is None else -p))
        whom = "" if peer is None else f", for rank {peer}" if len(waiting[rank]) == 1 else f", mostly for rank {peer}"
        said.append(
            f"Rank {rank} waits {total / makespan:.0%} of the time{whom}{', the most of all' if len(waiting) > 1 else ''}."
        )
        calm = trace.ranks - len(waiting)
        if calm:
            said.append(f"{count_text(calm, 'rank')} never wait{'s' if calm == 1 else ''}.")
    elif makespan:
        said.append("No rank waits.")
    if trace.messages_sent():
        n = trace.messages_sent()
        said.append(f"{count_text(n, 'message')} {'carries' if n == 1 else 'carry'} {bytes_text(trace.bytes_sent())}.")
    share = bubble_of_total(trace)
    if share is not None:
        said.append(f"Idle: {share:.1%} of total time, {bubble_of_ideal(trace):.1%} of working time.")
    peaks = peak_bytes(trace)
    if peaks:
        rank = max(peaks, key=lambda r: (peaks[r], -r))
        said.append(f"Peak memory: {bytes_text(peaks[rank])}, on rank {rank}.")
    return " ".join(said)
