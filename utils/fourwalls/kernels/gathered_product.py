"""All-gather and matrix product in one: while one rank's rows are multiplied, the next rank's rows are on their way.

Rows of x lie on different ranks, and every rank multiplies all of them by a matrix of its own, as the first half of a layer under
sequence parallelism does. Gathered first, the wire works while the processor waits, and then the other way round. In ring order a
rank begins with its own rows, which need no message; the next ones arrive meanwhile, and are passed on while they are
multiplied. Backward is the mirror: a product's sum travels while the next product is made. The bytes are the same.

    apart = (n-1) t_message + n t_product,      overlapped = t_product + (n-1) max(t_message, t_product)

Reference: Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning models", ASPLOS
2023.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.autograd.function import once_differentiable

from ..ranks.comm import Comm

__all__ = ["gathered_product", "sent_bytes"]


def gathered_product(
    comm: Comm,
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    rows: Sequence[int] | None = None,
    overlap: bool = True,
    seconds: float | None = None,
) -> torch.Tensor:
    """x (rows[r], k) of rank r, w (k, m) of this rank's own -> (sum of rows, m): all ranks' x, in order of rank, times this w.

    rows: how many each rank has (None: all as many as this one). overlap False: gather first, then multiply. seconds: what the
    product of one row takes; real ranks then sleep until that has passed (paced). Forward each rank sends the rows of all ranks
    but its right neighbour's, backward those of all but its own (`sent_bytes`); x needs a gradient on all ranks or on none. The
    gathered rows are kept for backward. Raises ValueError for shapes or dtypes that do not fit, MismatchError where the ranks'
    rows differ from what is said.
    """
    rows = _check(comm, x, w, rows)
    return _GatheredProduct.apply(x, w, comm, rows, overlap, _Work(comm, w.shape, seconds))


def sent_bytes(rows: Sequence[int], width: int, itemsize: int, rank: int) -> tuple[int, int]:
    """(forward, backward) bytes that `rank` sends, for x of `width` columns of `itemsize` bytes."""
    all_rows, right = sum(rows), (rank + 1) % len(rows)
    return (all_rows - rows[right]) * width * itemsize, (all_rows - rows[rank]) * width * itemsize


class _Work:
    """Records a product in the Trace, unless the communicator says that work tells nothing; paced where seconds are stated."""

    def __init__(self, comm: Comm, shape: Sequence[int], seconds: float | None):
        self.comm, self.shape, self.seconds = comm, shape, seconds

    def __call__(self, name: str, rows: int, itemsize: int, kind: str):
        if self.seconds is None and not self.comm.records_work:
            return nullcontext()
        k, m = self.shape
        taken = None if self.seconds is None else self.seconds * rows
        moved = (rows * k + k * m + rows * m) * itemsize
        return self.comm.compute(name, flops=2 * rows * k * m, bytes=moved, seconds=taken, kind=kind)


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, comm, rows, overlap, work):
        size, me, item = comm.size, comm.rank, x.element_size()
        whole = x.new_empty(sum(rows), x.shape[1])
        y = x.new_empty(sum(rows), w.shape[1])
        blocks, parts = whole.split(rows), y.split(rows)
        blocks[me].copy_(x)
        for hop in range(size):
            owner = (me - hop) % size
            messages = []
            if hop < size - 1:  # the next rank's rows come in while these go out
                messages.append(comm.irecv(blocks[owner - 1], (me - 1) % size))
                messages.append(comm.isend(blocks[owner], (me + 1) % size))
            if overlap:
                with work(f"rows of {owner}", rows[owner], item, "forward"):
                    torch.mm(blocks[owner], w, out=parts[owner])
            for message in messages:
                message.wait()
        if not overlap:
            with work("all rows", sum(rows), item, "forward"):
                torch.mm(whole, w, out=y)
        ctx.save_for_backward(whole, w)
        ctx.rest = comm, rows, overlap, work
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole, w = ctx.saved_tensors
        comm, rows, overlap, work = ctx.rest
        dx = dw = None
        if ctx.needs_input_grad[1]:
            with work("weights", sum(rows), grad.element_size(), "weight"):
                dw = whole.t() @ grad
        if ctx.needs_input_grad[0]:
            dx = _summed_home(comm, grad, w, rows, overlap, work)
        return dx, dw, None, None, None, None


def _summed_home(comm: Comm, grad, w, rows, overlap: bool, work: _Work) -> torch.Tensor:
    """grad (sum of rows, m) -> (rows[rank], k): the sum over all ranks of grad w^T, this rank's rows. The sum for one rank's rows
    goes round, each rank adds to it, and it is home after n - 1 hops; meanwhile the product for the next sum is made.
    """
    size, me, item = comm.size, comm.rank, grad.element_size()
    turned, given = w.t(), grad.split(rows)
    if not overlap:
        with work("all rows", sum(rows), item, "backward"):
            made = (grad @ turned).split(rows)
    messages, arriving = [], None
    for hop in range(size):
        owner = (me - 1 - hop) % size
        if overlap:
            with work(f"rows of {owner}", rows[owner], item, "backward"):
                mine = given[owner] @ turned
        else:
            mine = made[owner]
        for message in messages:
            message.wait()
        if hop:
            mine += arriving
        if hop < size - 1:
            arriving = mine.new_empty(rows[owner - 1], mine.shape[1])
            messages = [comm.irecv(arriving, (me - 1) % size), comm.isend(mine, (me + 1) % size)]
    return mine


def _check(comm: Comm, x: torch.Tensor, w: torch.Tensor, rows: Sequence[int] | None) -> list[int]:
    who = f"rank {comm.rank}"
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"{who}: x {tuple(x.shape)}, w {tuple(w.shape)}; allowed: x (rows, k), w (k, columns); flatten other dims"
        )
    if x.dtype != w.dtype or not x.is_floating_point():
        raise ValueError(f"{who}: x is {x.dtype}, w {w.dtype}; both are of one float dtype")
    rows = [x.shape[0]] * comm.size if rows is None else [int(count) for count in rows]
    if len(rows) != comm.size or min(rows) < 0:
        raise ValueError(f"{who}: rows={rows}; one number of at least 0 for each of {comm.size} ranks")
    if rows[comm.rank] != x.shape[0]:
        raise ValueError(f"{who}: rows={rows} says {rows[comm.rank]} here, but x has {x.shape[0]}")
    return rows
