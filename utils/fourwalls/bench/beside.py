"""A collective beside torch's own: what the benchmarks of all collectives share.

Each benchmark says what one call is, ours and torch's, and how many elements come out wrong; the rest is the same for all. Both
run in alternating pairs in one process group, and every time is the slowest rank's. Columns are those of nccl-tests, whose size S
is that of the whole tensor: what a rank holds before a reduce-scatter, after an all-gather.

    algbw = S / t,   busbw = algbw * factor,   factor 2(n-1)/n for all-reduce, 1 for broadcast, else (n-1)/n

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..collectives import ALGORITHMS, get_algorithm
from ..cost.collectives import bus_factor
from ..ranks.run import pool
from .record import Row
from .timer import alternate, repeats_for, spread, time_call, time_ratio

__all__ = ["SIZES", "Work", "measure", "pair_times", "rows_beside", "time_row", "whole_pieces"]

SIZES = (4 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)


@dataclass(frozen=True)
class Work:
    """One collective as a rank sees it: `ours()` and `theirs()` do it once; the others do it on numbers that tell ranks and
    places apart, and count the elements that come out wrong here. `ready()` is called before times are taken.
    """

    ours: Callable[[], object]
    theirs: Callable[[], object]
    wrong_ours: Callable[[], int]
    wrong_theirs: Callable[[], int] = lambda: 0
    ready: Callable[[], object] = lambda: None


def rows_beside(
    collective: str,
    job: Callable[..., Work],
    peer: str,
    options,
    say: Callable[[str], None],
    *,
    checked: Sequence[str] = (),
    further: Callable[[object, dict], Iterator[Row]] = lambda open_ranks, case: iter(()),
    numel_of: Callable[[int, int], int] = lambda nbytes, ranks: nbytes // 4,
) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms of `collective`, those of `checked` once more with checks on, and the best of each
    size.

    `job(comm, algorithm, numel)` makes the Work; `further(open ranks, case)` adds rows to a case. Raises ValueError for an
    unknown algorithm before anything starts.
    """
    name = collective.replace("_", "-")
    algorithms = options.algorithms or list(ALGORITHMS[collective])
    for algorithm in algorithms:
        get_algorithm(collective, algorithm)  # refuse a wrong name before anything starts
    for ranks in options.ranks or (2, 4):
        with pool(ranks=ranks) as open_ranks:
            for nbytes in options.sizes or SIZES:
                numel, times = numel_of(nbytes, ranks), []
                for algorithm, checks in [(a, False) for a in algorithms] + [(a, True) for a in checked if a in algorithms]:
                    say(f"{name} {algorithm}, {ranks} ranks, {nbytes} B{', checks on' * checks}")
                    run = open_ranks.run(measure, job, algorithm, numel, options.pairs, checks=checks, stream=False)
                    case = {"ranks": ranks, "bytes": numel * 4, "algorithm": algorithm, "checks": checks, "dtype": "float32"}
                    found = list(_rows_of(collective, peer, case, run))
                    yield from found
                    if not checks:
                        times.append(found[0])
                        yield from further(open_ranks, case)
                if len(times) > 1:
                    yield _best(times)


def measure(comm, job: Callable[..., Work], algorithm: str, numel: int, pairs: int) -> dict:
    """On each rank: seconds of every call of ours and of torch's (lists of `pairs`), and how many elements were wrong."""
    work = job(comm, algorithm, numel)
    wrong = work.wrong_ours() + work.wrong_theirs()
    work.ready()
    device = str(comm.device)
    once = time_call(work.ours, device=device, warmup=1, repeats=3).rest.value
    time_call(work.theirs, device=device, warmup=1, repeats=3)
    repeats = repeats_for(comm, once)
    taken = alternate(work.ours, work.theirs, pairs, before=comm.native.barrier, device=device, repeats=repeats)
    return {"ours": taken[0], "theirs": taken[1], "wrong": wrong + work.wrong_ours()}


def whole_pieces(nbytes: int, ranks: int) -> int:
    """Float32 elements in about `nbytes` that `ranks` ranks can share equally, at least one each."""
    return max(1, nbytes // 4 // ranks) * ranks


def pair_times(run) -> tuple[list[float], list[float]]:
    """The slowest rank's seconds, ours and the peer's, pair by pair, of a run of `measure`."""
    ours, theirs = ([max(times) for times in zip(*(v[who] for v in run.values), strict=True)] for who in ("ours", "theirs"))
    return ours, theirs


def time_row(benchmark: str, case: dict, run, *, peer: str, metric: str = "time", ok: bool | None = None) -> Row:
    """Our seconds beside the peer's, pair by pair, of a run whose ranks return "ours" and "theirs" (and "wrong", unless `ok` is
    given).
    """
    ours, theirs = pair_times(run)
    taken, ratio = spread(ours), time_ratio(ours, theirs)
    return Row(
        benchmark=benchmark,
        case=case,
        metric=metric,
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        pairs=len(ours),
        peer=f"{peer} ({run.backend})",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        ok=not any(value["wrong"] for value in run.values) if ok is None else ok,
        machine={"backend": run.backend},
    )


def _rows_of(collective: str, peer: str, case: dict, run) -> Iterator[Row]:
    taken = time_row(collective.replace("_", "-"), case, run, peer=peer)
    wrong = sum(value["wrong"] for value in run.values)
    yield taken
    here = {"benchmark": taken.benchmark, "case": case, "pairs": taken.pairs, "ok": taken.ok, "machine": taken.machine}
    for metric, factor in (("algbw", 1.0), ("busbw", bus_factor(collective, case["ranks"]))):
        scale = case["bytes"] * factor / 1e9
        yield Row(metric=metric, value=scale / taken.value, unit="GB/s", low=scale / taken.high, high=scale / taken.low, **here)
    yield Row(metric="wrong", value=wrong, unit="elements", **here)


def _best(times: list[Row]) -> Row:
    """The algorithm with the lowest time_ratio: each was paired with the peer in its own minutes, so ratios compare, times less.

    It is chosen by the same pairs that it is judged by, so near ties look a little better than they are.
    """
    best = min(times, key=lambda row: row.time_ratio)
    case = {"ranks": best.case["ranks"], "bytes": best.case["bytes"], "fastest": best.case["algorithm"]}
    return Row(**(vars(best) | {"metric": "best_of_ours", "case": case}))
