"""A loss over tokens that does not depend on how they were dealt: sums and counts travel, never means.

The mean of means is the mean only where all counts are equal; sequences differ in length, so ranks and micro-batches hold
different numbers of tokens that count. Add up the losses, add up the counts, divide once.

    loss  =  (sum over ranks and micro-batches of summed losses) / (sum over ranks and micro-batches of counts)

Three ways to the same gradients: `DataParallel(average="tokens")`, backward of the sums, then `synchronise(tokens=count)`; or
`total_tokens` first and backward of sum / total under average="none"; or of sum * ranks / total under average="ranks", which is
what torch's DistributedDataParallel needs. Reference: Megatron-LM's `calculate_per_token_loss`.
"""

import torch

from ..collectives import all_reduce
from ..nn.layers import cross_entropy
from ..ranks.comm import Comm

__all__ = ["IGNORE", "count_tokens", "scaled_loss", "summed_loss", "total_tokens"]

IGNORE = -100  # the target of a place that does not count


def count_tokens(targets: torch.Tensor, *, ignore: int = IGNORE) -> int:
    """How many targets count."""
    return int((targets != ignore).sum())


def summed_loss(logits: torch.Tensor, targets: torch.Tensor, *, ignore: int = IGNORE) -> tuple[torch.Tensor, int]:
    """(sum of the cross-entropies, how many tokens it is over). logits (..., V), targets (...). Nothing that counts: (0, 0), with
    gradients 0, where a mean would be nan.
    """
    return cross_entropy(logits, targets, reduction="sum", ignore=ignore), count_tokens(targets, ignore=ignore)


def total_tokens(comm: Comm, count: int) -> int:
    """The sum of all ranks' counts. 8 bytes on the wire, as one int64; every rank must call it."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"rank {comm.rank}: count is {count!r}; a whole number of tokens, 0 or more")
    return int(all_reduce(comm, torch.tensor([count], device=comm.device)))


def scaled_loss(loss: torch.Tensor, total: int, *, divided_by: int = 1) -> torch.Tensor:
    """A summed loss as its part of the mean over `total` tokens. divided_by: what the data parallelism will divide by (the number
    of ranks for average="ranks" and for torch's own, else 1). total 0: nothing counts anywhere, so the loss is 0.
    """
    if total < 0 or divided_by < 1:
        raise ValueError(f"total is {total}, divided_by is {divided_by}; allowed: total at least 0, divided_by at least 1")
    return loss * (divided_by / max(total, 1))
