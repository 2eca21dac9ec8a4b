"""Communication that gradients flow through: each operator's backward is another one's forward.

Tensor parallelism rests on one pair, Megatron's f and g: `copy_to` (forward nothing, backward all-reduce) and `reduce_from`
(forward all-reduce, backward nothing). The other pairs are `scatter_to` and `gather_from`, `all_gather` and `reduce_scatter`;
`all_to_all` is its own. Which is right where depends on what the ranks do with a tensor: if all hold the same one and count the
loss once, its gradient is already whole; if each uses it in its own way, the gradients of all must be added.

    forward y = A x    =>    backward dL/dx = A^T dL/dy:        f = g^T,   gather = scatter^T,   all-gather = reduce-scatter^T

Reference: Shoeybi et al., "Megatron-LM", 2019 (f and g); Korthikanti et al. 2022 (g-bar: all-gather and reduce-scatter).
"""

from collections.abc import Callable, Sequence

import torch

from ..ranks.comm import Comm
from . import ring
from .all_to_all import all_to_all as exchange_equal
from .all_to_all import all_to_all_unequal
from .chunks import chunk_sizes

__all__ = ["all_gather", "all_reduce", "all_to_all", "copy_to", "gather_from", "reduce_from", "reduce_scatter", "scatter_to"]


def copy_to(comm: Comm, x: torch.Tensor, *, all_reduce: Callable = ring.all_reduce) -> torch.Tensor:
    """Megatron's f. All ranks hold the same `x`, and each will do something else with it. Forward: nothing (0 bytes); backward:
    all-reduce of the gradient. `all_reduce(comm, x)`: the one to use.
    """
    return _CopyTo.apply(x, comm, all_reduce)


def reduce_from(comm: Comm, x: torch.Tensor, *, all_reduce: Callable = ring.all_reduce) -> torch.Tensor:
    """Megatron's g. Each rank holds a part of a sum; all return the sum and go on alike. Forward: all-reduce; backward:
    nothing.
    """
    return _ReduceFrom.apply(x, comm, all_reduce)


def scatter_to(comm: Comm, x: torch.Tensor, dim: int = -1, *, all_gather: Callable = ring.all_gather) -> torch.Tensor:
    """All ranks hold the same `x`; each keeps its chunk along `dim`, (..., about d/n, ...). Forward: nothing; backward:
    all-gather of the chunks' gradients.
    """
    return _ScatterTo.apply(x, comm, dim, x.shape[_dim(x, dim)], all_gather)


def gather_from(
    comm: Comm, x: torch.Tensor, dim: int = -1, size: int | None = None, *, all_gather: Callable = ring.all_gather
) -> torch.Tensor:
    """Each rank holds its chunk along `dim`; all return the whole and go on alike. Forward: all-gather; backward: this rank's
    chunk.

    size: of the whole along `dim` (None: n times this rank's). Chunks are as `torch.tensor_split` cuts: they differ by at most
    one, the larger first. Raises ValueError where `x` is not its rank's chunk.
    """
    return _GatherFrom.apply(x, comm, dim, _whole(comm, x, dim, size), all_gather)


def all_gather(
    comm: Comm,
    x: torch.Tensor,
    dim: int = 0,
    size: int | None = None,
    *,
    all_gather: Callable = ring.all_gather,
    reduce_scatter: Callable = ring.reduce_scatter,
) -> torch.Tensor:
    """As `gather_from`, but each rank will do something else with the whole (sequence parallelism, ZeRO). Backward: reduce-
    scatter.
    """
    return _AllGather.apply(x, comm, dim, _whole(comm, x, dim, size), all_gather, reduce_scatter)


def reduce_scatter(
    comm: Comm,
    x: torch.Tensor,
    dim: int = 0,
    *,
    all_gather: Callable = ring.all_gather,
    reduce_scatter: Callable = ring.reduce_scatter,
) -> torch.Tensor:
    """Each rank holds a part of a sum, and keeps its chunk of the sum along `dim`. Backward: all-gather."""
    return _ReduceScatter.apply(x, comm, dim, x.shape[_dim(x, dim)], all_gather, reduce_scatter)


def all_reduce(comm: Comm, x: torch.Tensor, *, all_reduce: Callable = ring.all_reduce) -> torch.Tensor:
    """Each rank holds a part of a sum, and each will do something else with the sum: all-reduce both ways."""
    return copy_to(comm, reduce_from(comm, x, all_reduce=all_reduce), all_reduce=all_reduce)


def all_to_all(
    comm: Comm, x: torch.Tensor, counts: Sequence[int] | None = None, *, expect: Sequence[int] | None = None
) -> torch.Tensor | tuple[torch.Tensor, list[int]]:
    """Rows of `x` to their ranks. counts None: n equal pieces, returns as many rows; else counts[q] rows go to rank q, and the
    counts that came are returned too. `expect`: as for `all_to_all_unequal`. Backward: the gradients of the rows go back to
    where the rows came from.
    """
    if counts is None:
        return _AllToAll.apply(x, comm)
    y, came = _AllToAllUnequal.apply(x, comm, counts, expect)
    return y, came


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, all_reduce):
        ctx.rest = comm, all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _ReduceFrom.apply(grad, *ctx.rest), None, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, all_reduce):
        ctx.rest = comm, all_reduce
        return all_reduce(comm, x)

    @staticmethod
    def backward(ctx, grad):
        return _CopyTo.apply(grad, *ctx.rest), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, dim, size, all_gather):
        ctx.rest = comm, dim, size, all_gather
        return _own(comm, x, dim).clone()

    @staticmethod
    def backward(ctx, grad):
        return _GatherFrom.apply(grad, *ctx.rest), None, None, None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, dim, size, all_gather):
        ctx.rest = comm, dim, size, all_gather
        return _join(comm, x, dim, size, all_gather)

    @staticmethod
    def backward(ctx, grad):
        return _ScatterTo.apply(grad, *ctx.rest), None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, dim, size, all_gather, reduce_scatter):
        ctx.rest = comm, dim, size, all_gather, reduce_scatter
        return _join(comm, x, dim, size, all_gather)

    @staticmethod
    def backward(ctx, grad):
        return _ReduceScatter.apply(grad, *ctx.rest), None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, dim, size, all_gather, reduce_scatter):
        ctx.rest = comm, dim, size, all_gather, reduce_scatter
        return _add_and_keep(comm, x, dim, size, reduce_scatter)

    @staticmethod
    def backward(ctx, grad):
        return _AllGather.apply(grad, *ctx.rest), None, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return exchange_equal(comm, x)

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.comm), None


class _AllToAllUnequal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, counts, expect):
        y, came = all_to_all_unequal(comm, x, counts, expect=expect)
        ctx.rest = comm, came, counts
        return y, came

    @staticmethod
    def backward(ctx, grad, _):
        return _AllToAllUnequal.apply(grad, *ctx.rest)[0], None, None, None


# Chunks along a dim: `dim` comes to the front, and since the collectives cut flat tensors evenly, short chunks are filled up
# by a row.
def _join(comm, x, dim, size, all_gather):
    n, dim = comm.size, _dim(x, dim)
    rows = x.movedim(dim, 0)
    largest = -(-size // n)
    if len(rows) < largest:
        rows = torch.cat([rows, rows.new_zeros((largest - len(rows), *rows.shape[1:]))])
    every = all_gather(comm, rows.contiguous())  # (n, largest, ...)
    whole = torch.cat([every[r, :c] for r, c in enumerate(chunk_sizes(size, n))])
    return whole.movedim(0, dim).contiguous()


def _add_and_keep(comm, x, dim, size, reduce_scatter):
    n, dim = comm.size, _dim(x, dim)
    rows, sizes, largest = x.movedim(dim, 0), chunk_sizes(size, n), -(-size // n)
    if size % n:
        filled = rows.new_zeros((n, largest, *rows.shape[1:]))
        for place, chunk in zip(filled, rows.split(sizes), strict=True):
            place[: len(chunk)].copy_(chunk)
        rows = filled
    mine = reduce_scatter(comm, rows.contiguous()).view(largest, *x.movedim(dim, 0).shape[1:])
    return mine[: sizes[comm.rank]].movedim(0, dim).contiguous()


def _own(comm, x, dim):
    return x.split(chunk_sizes(x.shape[dim], comm.size), dim)[comm.rank]


def _whole(comm, x, dim, size):
    """Size along `dim` of what the ranks' chunks make together."""
    mine = x.shape[_dim(x, dim)]
    size = mine * comm.size if size is None else size
    chunk = chunk_sizes(size, comm.size)[comm.rank]
    if chunk != mine:
        raise ValueError(f"rank {comm.rank} holds {mine} along dim {dim}; its chunk of {size} on {comm.size} ranks is {chunk}")
    return size


def _dim(x, dim):
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; a tensor of shape {tuple(x.shape)} has dims {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()
