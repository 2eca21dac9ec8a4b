"""Only the largest entries travel: k indices and k values from every rank, gathered by all and added up by each.

Which entries are largest differs from rank to rank, so they cannot be summed on the way; all ranks send equally many, and the
bytes grow with the number of ranks, where those of a ring stay below twice the tensor. All that is not sent stays in the residual
and grows there until it is among the largest: without feedback top-k would never look at a small, steady gradient.

    bytes = (n - 1) k (4 + w)      beside  2 (n - 1)/n N w:   fewer only while  k < 2 w/(4 + w) N/n

Reference: Aji and Heafield 2017 (arXiv:1704.05021); Stich et al. 2018 (arXiv:1809.07599) for the bound of the residual.
"""

import math
import numbers
from typing import Any

import torch

from ...ranks.comm import CommError
from .feedback import Compressor, gather_bytes, numel_of

__all__ = ["TopK"]


class TopK(Compressor):
    """k entries of each rank (or `ratio` of them, at least one). A k larger than the tensor sends all of it."""

    name = "top-k"

    def __init__(self, *, k: int | None = None, ratio: float | None = None, **options):
        if (k is None) == (ratio is None):
            raise ValueError(f"k={k!r}, ratio={ratio!r}; give one of them, such as ratio=0.01")
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"k is {k!r}; a whole number of entries from 1 on")
        if ratio is not None and not (isinstance(ratio, numbers.Real) and 0 < ratio <= 1):
            raise ValueError(f"ratio is {ratio!r}; a share above 0 and at most 1, such as 0.01")
        super().__init__(**options)
        self.k, self.ratio = k, ratio

    def count(self, numel: int) -> int:
        """How many of `numel` entries a rank sends."""
        wanted = self.k if self.k is not None else max(1, math.ceil(self.ratio * numel))
        return min(wanted, numel)

    def exchange(self, comm, message, state, shapes, dtype):
        numel, k = message.numel(), self.count(message.numel())
        places = message.abs().topk(k, sorted=False).indices.sort().values  # NaN counts as largest; rising: memory in one pass
        values = message[places].to(dtype)
        gathered = self.all_gather(comm, torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]))
        total, sent = torch.zeros_like(message), torch.zeros_like(message)
        for rank, packed in enumerate(gathered):  # in the order of ranks, on every rank: the same bits
            where = packed[: 4 * k].clone().view(torch.int32).long()
            if comm.checks:
                _check_places(where, numel, rank)
            total[where] += packed[4 * k :].clone().view(dtype).to(message.dtype)
        sent[places] = values.to(message.dtype)
        return total, sent

    def bytes_sent(self, n, shape, *, dtype=torch.float32, shapes=None):
        """(n-1) k (4 + w): an index of 4 bytes and a value of w from each rank to each other, round the ring."""
        return gather_bytes(n, self.count(numel_of(shape)), 4 + dtype.itemsize)

    def settings(self) -> dict[str, Any]:
        return {"k": self.k, "ratio": self.ratio}


def _check_places(where: torch.Tensor, numel: int, rank: int) -> None:
    """CommError unless the indices rise strictly inside the tensor: a repeated one would be added once instead of twice."""
    if bool((where[1:] <= where[:-1]).any()) or (where.numel() and not 0 <= int(where[0]) <= int(where[-1]) < numel):
        raise CommError(
            f"rank {rank} sent top-k indices {where[:8].tolist()}...; they must rise strictly, within 0 to {numel - 1}", rank=rank
        )
