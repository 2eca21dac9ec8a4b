"""All-reduce on this machine: each algorithm beside torch's own, in alternating pairs in one process group.

Columns are those of nccl-tests: bytes of the tensor, time, algbw = bytes / time, busbw = algbw * 2(n-1)/n, and how many elements
were wrong. Every time is the slowest rank's. The ring has a second row with checks on, since checks cost something and rows
without them say so. Shared memory also stands beside bare copying: no less can be moved when nobody may read another's tensor.

    busbw = S / t * 2 (n - 1) / n,   which a perfect algorithm keeps at the speed of the wire for every n
    share of the copy limit = time to copy 2 (n - 1) / n S, all ranks at once / time of the all-reduce

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..collectives import get_algorithm
from .beside import Work, measure, pair_times, rows_beside
from .record import Row
from .timer import check_plausible, spread, time_ratio

__all__ = ["describe", "job", "rows"]

describe = "all-reduce by each algorithm beside torch's own: bytes, time, algbw, busbw, wrong"
PEER = "torch.distributed.all_reduce"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms, and the ring once more with checks on. Results are compared with the exact sum."""
    limit = partial(_copy_limit, pairs=options.pairs)
    return rows_beside("all_reduce", job, PEER, options, say, checked=("ring",), further=limit)


def job(comm, algorithm: str, numel: int) -> Work:
    """In place, and timed on zeros, which stay zeros, so that no figure needs a fresh tensor."""
    reduce_in_place, native = get_algorithm("all_reduce", algorithm), comm.native
    x, y = torch.empty(numel, device=comm.device), torch.empty(numel, device=comm.device)

    def ours():
        reduce_in_place(comm, x, out=x)

    def theirs():
        native.all_reduce(y)

    def ready():
        x.zero_()
        y.zero_()

    return Work(ours, theirs, lambda: _wrong(comm, ours, x), lambda: _wrong(comm, theirs, y), ready)


def _wrong(comm, work, x) -> int:
    """Run `work`, which reduces `x` in place, on numbers that tell ranks and places apart; how many elements come out wrong.

    Sums of small whole numbers are exact in float32, so right means equal.
    """
    pattern = torch.arange(x.numel(), device=x.device).remainder_(61).float()
    torch.add(pattern, comm.rank * 64.0, out=x)
    work()
    n = comm.size
    return int((x != pattern * n + 64.0 * (n * (n - 1) // 2)).sum())


def _copy_limit(open_ranks, case: dict, *, pairs: int) -> Iterator[Row]:
    """For shared memory: how near it comes to copying alone (of a small tensor, adding and waiting are the limit). No row where
    the ring stood in.
    """
    if case["algorithm"] != "shared_memory":
        return
    run = open_ranks.run(_share, case["algorithm"], case["bytes"] // 4, pairs, checks=False, stream=False)
    if not all(value["shared"] for value in run.values):
        return
    ours, copying = pair_times(run)
    share, ratio = spread(c / o for o, c in zip(ours, copying, strict=True)), time_ratio(ours, copying)
    fastest = 2 * case["bytes"] / spread(copying).value  # twice what copying reached: nothing that reduces can be faster
    believed = check_plausible(spread(ours).value, bytes=case["bytes"], peak_bandwidth=fastest, what="the reduction")
    yield Row(
        benchmark="all-reduce",
        case=case,
        metric="share_of_copy_limit",
        value=share.value,
        unit="",
        low=share.low,
        high=share.high,
        pairs=pairs,
        peer="copying 2(n-1)/n of the bytes, all ranks at once",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        ok=believed and not any(value["wrong"] for value in run.values),
        machine={"backend": run.backend},
    )


def _share(comm, algorithm: str, numel: int, pairs: int) -> dict:
    found = measure(comm, _beside_copying, algorithm, numel, pairs)
    return found | {"shared": not isinstance(getattr(comm, "_room", ""), str)}


def _beside_copying(comm, algorithm: str, numel: int) -> Work:
    """`job` with another peer: what a rank must at least copy, (n-1)/n S out of its tensor and as much into it."""
    work = job(comm, algorithm, numel)
    part = numel * (comm.size - 1) // comm.size
    own, common = torch.zeros(part, device=comm.device), torch.zeros(part, device=comm.device)

    def copy():
        common.copy_(own)
        own.copy_(common)

    return Work(work.ours, copy, work.wrong_ours, ready=work.ready)
