"""The two ends of the model on t ranks: a token table cut by rows, and a loss that never sees all logits in one place.

A rank looks up the tokens that it owns and gives zeros for the others; the sum over ranks has them all. At the other end each
rank has the logits of its rows: the largest, the sum of exponentials and the target's logit are all that the loss needs of the
others, three numbers a token instead of V. A vocabulary that t does not divide is filled up; the filling never counts.

    loss = log(sum over ranks of sum exp(z - m)) - (z_target - m),   m = max over ranks of max z        sent: 3 numbers a token

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, "parallel cross entropy".
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives import ring
from ..ranks.comm import Comm
from .tensor import Region
from .tensor_shards import Cut, fill_shard

__all__ = ["VocabularyEmbedding", "VocabularyHead", "vocabulary_cross_entropy", "vocabulary_rows"]


def vocabulary_rows(vocabulary: int, rank: int, t: int) -> tuple[int, int, int]:
    """(first row, rows that stand for a token, rows with the filling) of a rank: ceil(V/t) rows each, some of them filling."""
    width = -(-vocabulary // t)
    first = rank * width
    return first, max(0, min(width, vocabulary - first)), width


def _check_tokens(tokens: torch.Tensor, vocabulary: int, word: str, ignore: int | None = None) -> None:
    if tokens.is_meta:
        return
    bad = (tokens < 0) | (tokens >= vocabulary)
    if ignore is not None:
        bad &= tokens != ignore
    if bad.any():
        also = "" if ignore is None else f", or {ignore} for one that does not count"
        raise ValueError(f"{word} {int(tokens[bad][0])}; with vocabulary {vocabulary} allowed are 0 to {vocabulary - 1}{also}")


class VocabularyEmbedding(nn.Module):
    """`nn.layers.Embedding` on t ranks. weight (ceil(rows/t), width). tokens (b, s) -> (b, s, width) as `region.leave` gives it.

    Sends one all-reduce (or reduce-scatter) of s b h numbers forward, nothing backward. ValueError for a token that no rank has.
    """

    def __init__(self, comm: Comm, rows: int, width: int, *, std=0.02, region: Region | None = None, device=None, dtype=None):
        super().__init__()
        self.comm, self.region, self.rows, self.width, self.std = comm, region or Region(comm), rows, width, std
        self.first, self.real, count = vocabulary_rows(rows, comm.rank, comm.size)
        self.weight = nn.Parameter(torch.empty(count, width, device=device, dtype=dtype))
        self.cuts = {"weight": Cut(0, rows)}
        self.init_parameters()

    def init_parameters(self, name: str = "embedding", seed: int = 0) -> None:
        fill_shard(self.weight, self.cuts["weight"], self.comm, f"{name}.weight", seed=seed, std=self.std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_tokens(tokens, self.rows, "token")
        here = tokens - self.first
        elsewhere = (here < 0) | (here >= self.real)
        rows = F.embedding(here.masked_fill(elsewhere, 0), self.weight)  # row 0 stands in, and is wiped out again
        return self.region.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        return f"{self.rows} rows in {self.comm.size} parts, {self.width}"


class VocabularyHead(nn.Module):
    """The output head, its rows cut like the token table's. x as between regions -> (b, s, ceil(V/t)), logits of this rank's
    rows; those of the filling mean nothing and `vocabulary_cross_entropy` leaves them out.
    """

    bias = None

    def __init__(self, comm: Comm, inputs: int, vocabulary: int, *, std=0.02, region=None, device=None, dtype=None):
        super().__init__()
        self.comm, self.region, self.vocabulary, self.std = comm, region or Region(comm), vocabulary, std
        _, _, count = vocabulary_rows(vocabulary, comm.rank, comm.size)
        self.weight = nn.Parameter(torch.empty(count, inputs, device=device, dtype=dtype))
        self.cuts = {"weight": Cut(0, vocabulary)}
        self.init_parameters()

    def init_parameters(self, name: str = "head", seed: int = 0) -> None:
        fill_shard(self.weight, self.cuts["weight"], self.comm, f"{name}.weight", seed=seed, std=self.std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region.enter(x, [self])[0]


def vocabulary_cross_entropy(
    comm: Comm,
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    reduction: str = "mean",
    ignore: int = -100,
    all_reduce: Callable = ring.all_reduce,
) -> torch.Tensor:
    """`nn.layers.cross_entropy` of logits (..., ceil(V/t)), this rank's columns of V; targets (...), whole on every rank.

    All ranks return the same loss. Keeps this rank's share of softmax, 4 bytes a logit. Sends all-reduces of one number a token
    (the largest) and of two (the sums); nothing backward. ValueError for shapes or targets that do not fit.
    """
    first, real, width = vocabulary_rows(vocabulary, comm.rank, comm.size)
    if logits.shape[:-1] != targets.shape or logits.shape[-1] != width:
        allowed = (*targets.shape, width)
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)} and vocabulary {vocabulary} "
            f"on {comm.size} ranks; allowed: {allowed}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; allowed: 'mean', 'sum' or 'none'")
    _check_tokens(targets, vocabulary, "target", ignore)
    losses = _VocabularyLoss.apply(logits.flatten(0, -2), targets.flatten(), comm, first, real, ignore, all_reduce)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore).sum()


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, comm, first, real, ignore, all_reduce):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wide[:, real:] = float("-inf")  # the filling: exp gives 0
        largest = wide.amax(-1)
        largest = ring.all_reduce(comm, largest, op="max")
        wide.sub_(largest[:, None])
        here = targets - first
        inside = (here >= 0) & (here < real)
        here = here.masked_fill(~inside, 0)
        target = wide.gather(-1, here[:, None])[:, 0].masked_fill(~inside, 0)
        share = wide.exp_()
        total, target = all_reduce(comm, torch.stack([share.sum(-1), target]))
        counts = targets != ignore
        ctx.save_for_backward(share.div_(total[:, None]), here, inside, counts)
        ctx.dtype = logits.dtype
        return (total.log() - target).masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx, grad):
        share, here, inside, counts = ctx.saved_tensors
        grad = grad.masked_fill(~counts, 0)
        out = share * grad[:, None]
        out.scatter_add_(-1, here[:, None], -grad.masked_fill(~inside, 0)[:, None])
        return out.to(ctx.dtype), None, None, None, None, None, None
