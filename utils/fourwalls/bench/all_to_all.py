"""All-to-all of equal pieces on this machine: pairwise exchange beside torch's own. Bytes are those of each rank's tensor.

    busbw = S / t * (n - 1) / n

Reference: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from .beside import Work, rows_beside, whole_pieces
from .record import Row

__all__ = ["describe", "job", "rows"]

describe = "all-to-all of equal pieces, likewise; bytes of each rank's tensor"
PEER = "torch.distributed.all_to_all_single"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x algorithms; sizes are rounded down to equal pieces."""
    return rows_beside("all_to_all", job, PEER, options, say, numel_of=whole_pieces)


def job(comm, algorithm: str, numel: int) -> Work:
    """Piece q of a rank says who sends it, to whom, and where in the piece an element stands."""
    trade, native, n, me = get_algorithm("all_to_all", algorithm), comm.native, comm.size, comm.rank
    place = torch.arange(numel // n, device=comm.device).remainder_(61).float()
    others = torch.arange(n, device=comm.device).view(n, 1)
    x = place + 64.0 * (me * n + others)
    result = torch.empty_like(x)

    def ours():
        trade(comm, x, out=result)

    def theirs():
        native.all_to_all_single(result, x)

    def wrong(work):
        result.fill_(-1)
        work()
        return int((result != place + 64.0 * (others * n + me)).sum())

    return Work(ours, theirs, lambda: wrong(ours), lambda: wrong(theirs))
