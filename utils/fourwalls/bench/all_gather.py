"""All-gather on this machine: each algorithm beside torch's own. Bytes are those of the result, of which a rank brings 1/n.

    busbw = S / t * (n - 1) / n

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from .beside import Work, rows_beside, whole_pieces
from .record import Row

__all__ = ["describe", "job", "rows"]

describe = "all-gather, likewise; bytes of the result"
# torch renamed it
PEER = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms; sizes are rounded down to equal pieces."""
    return rows_beside("all_gather", job, f"torch.distributed.{PEER}", options, say, numel_of=whole_pieces)


def job(comm, algorithm: str, numel: int) -> Work:
    """A rank brings numel/n elements; both write into a result that is there."""
    gather, native, n = get_algorithm("all_gather", algorithm), getattr(comm.native, PEER), comm.size
    x = torch.arange(numel // n, device=comm.device).remainder_(61).float() + 64.0 * comm.rank
    result = torch.empty(n, numel // n, device=comm.device)

    def ours():
        gather(comm, x, out=result)

    def theirs():
        native(result.view(-1), x)

    def wrong(work):
        result.fill_(-1)
        work()
        ranks = torch.arange(n, device=comm.device).view(n, 1)
        return int((result != x - 64.0 * comm.rank + 64.0 * ranks).sum())

    return Work(ours, theirs, lambda: wrong(ours), lambda: wrong(theirs))
