"""All-reduce on this machine: each algorithm beside torch's own, in alternating pairs in one process group.

Columns are those of nccl-tests: bytes of the tensor, time, algbw = bytes / time, busbw = algbw * 2(n-1)/n, and how many elements
were wrong. Every time is the slowest rank's. The ring has a second row with checks on, since checks cost something and rows
without them say so.

    busbw = S / t * 2 (n - 1) / n,   which a perfect algorithm keeps at the speed of the wire for every n

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import ALGORITHMS, get_algorithm
from ..cost.collectives import bus_factor
from ..ranks.run import pool
from .record import Row
from .timer import alternate, repeats_for, spread, time_call, time_ratio

__all__ = ["describe", "measure", "rows"]

describe = "all-reduce by each algorithm beside torch's own: bytes, time, algbw, busbw, wrong"
PEER = "torch.distributed.all_reduce"
SIZES = (4 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms, and the ring once more with checks on. Results are compared with the exact sum."""
    algorithms = options.algorithms or list(ALGORITHMS["all_reduce"])
    for algorithm in algorithms:
        get_algorithm("all_reduce", algorithm)  # refuse a wrong name before anything starts
    for ranks in options.ranks or (2, 4):
        with pool(ranks=ranks) as open_ranks:
            for nbytes in options.sizes or SIZES:
                for algorithm, checks in [(a, False) for a in algorithms] + [("ring", True)] * ("ring" in algorithms):
                    say(f"all-reduce {algorithm}, {ranks} ranks, {nbytes} B{', checks on' * checks}")
                    run = open_ranks.run(measure, algorithm, nbytes // 4, options.pairs, checks=checks, stream=False)
                    case = {
                        "ranks": ranks,
                        "bytes": nbytes // 4 * 4,
                        "algorithm": algorithm,
                        "checks": checks,
                        "dtype": "float32",
                    }
                    yield from _rows_of(case, run)


def _rows_of(case: dict, run) -> Iterator[Row]:
    ours = [max(times) for times in zip(*(value["ours"] for value in run.values), strict=True)]
    theirs = [max(times) for times in zip(*(value["theirs"] for value in run.values), strict=True)]
    wrong = sum(value["wrong"] for value in run.values)
    taken, ratio, n, size = spread(ours), time_ratio(ours, theirs), case["ranks"], case["bytes"]
    here = {"benchmark": "all-reduce", "case": case, "pairs": len(ours), "ok": wrong == 0, "machine": {"backend": run.backend}}
    yield Row(
        metric="time",
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        peer=f"{PEER} ({run.backend})",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        **here,
    )
    for metric, factor in (("algbw", 1.0), ("busbw", bus_factor("all_reduce", n))):
        scale = size * factor / 1e9
        yield Row(metric=metric, value=scale / taken.value, unit="GB/s", low=scale / taken.high, high=scale / taken.low, **here)
    yield Row(metric="wrong", value=wrong, unit="elements", **here)


def measure(comm, algorithm: str, numel: int, pairs: int) -> dict:
    """On each rank: seconds of every call of ours and of torch's (lists of `pairs`), and how many elements were wrong.

    Sums of small whole numbers are exact in float32, so right means equal. Times are taken on zeros, in place, so that no figure
    needs a fresh tensor.
    """
    reduce_in_place = get_algorithm("all_reduce", algorithm)
    x, y, native = torch.empty(numel, device=comm.device), torch.empty(numel, device=comm.device), comm.native
    wrong = _wrong(comm, lambda: reduce_in_place(comm, x, out=x), x) + _wrong(comm, lambda: native.all_reduce(y), y)
    x.zero_()
    y.zero_()

    def ours():
        reduce_in_place(comm, x, out=x)

    def theirs():
        native.all_reduce(y)

    device = str(comm.device)
    once = time_call(ours, device=device, warmup=1, repeats=3).rest.value
    time_call(theirs, device=device, warmup=1, repeats=3)
    repeats = repeats_for(comm, once)
    taken = alternate(ours, theirs, pairs, before=native.barrier, device=device, repeats=repeats)
    return {"ours": taken[0], "theirs": taken[1], "wrong": wrong + _wrong(comm, ours, x)}


def _wrong(comm, work, x) -> int:
    """Run `work`, which reduces `x` in place, on numbers that tell ranks and places apart; how many elements come out wrong."""
    pattern = torch.arange(x.numel(), device=x.device).remainder_(61).float()
    torch.add(pattern, comm.rank * 64.0, out=x)
    work()
    n = comm.size
    return int((x != pattern * n + 64.0 * (n * (n - 1) // 2)).sum())
