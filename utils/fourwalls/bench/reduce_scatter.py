"""Reduce-scatter on this machine: each algorithm beside torch's own. Bytes are those a rank brings; it ends with 1/n of the sum.

Ours gives back a new tensor of its own, torch's writes into one that is there; that difference is part of the time.

    busbw = S / t * (n - 1) / n

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from .beside import Work, rows_beside, whole_pieces
from .record import Row

__all__ = ["describe", "job", "rows"]

describe = "reduce-scatter, likewise; bytes of each rank's tensor"
# torch renamed it
PEER = "reduce_scatter_single" if hasattr(torch.distributed, "reduce_scatter_single") else "reduce_scatter_tensor"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms; sizes are rounded down to equal pieces."""
    return rows_beside("reduce_scatter", job, f"torch.distributed.{PEER}", options, say, numel_of=whole_pieces)


def job(comm, algorithm: str, numel: int) -> Work:
    """A rank brings numel elements and ends with chunk number `rank` of the sum."""
    reduce_scatter, native, n = get_algorithm("reduce_scatter", algorithm), getattr(comm.native, PEER), comm.size
    pattern = torch.arange(numel, device=comm.device).remainder_(61).float()
    x, result = pattern + 64.0 * comm.rank, torch.empty(numel // n, device=comm.device)

    def ours():
        return reduce_scatter(comm, x)

    def theirs():
        native(result, x)
        return result

    def wrong(work):
        result.fill_(-1)
        return int((work() != pattern.chunk(n)[comm.rank] * n + 64.0 * (n * (n - 1) // 2)).sum())

    return Work(ours, theirs, lambda: wrong(ours), lambda: wrong(theirs))
