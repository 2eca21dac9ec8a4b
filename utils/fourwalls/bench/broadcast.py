"""Broadcast from rank 0 on this machine: each algorithm beside torch's own. Every time is the last rank's to have it all.

    busbw = algbw = S / t

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from .beside import Work, rows_beside
from .record import Row

__all__ = ["describe", "job", "rows"]

describe = "broadcast from rank 0, likewise"
PEER = "torch.distributed.broadcast"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms."""
    return rows_beside("broadcast", job, PEER, options, say)


def job(comm, algorithm: str, numel: int) -> Work:
    """In place on every rank."""
    broadcast, native = get_algorithm("broadcast", algorithm), comm.native
    pattern = torch.arange(numel, device=comm.device).remainder_(61).float()
    x = torch.empty(numel, device=comm.device)

    def ours():
        broadcast(comm, x, root=0, out=x)

    def theirs():
        native.broadcast(x, 0)

    def wrong(work):
        torch.add(pattern, comm.rank, out=x)
        work()
        return int((x != pattern).sum())

    return Work(ours, theirs, lambda: wrong(ours), lambda: wrong(theirs))
