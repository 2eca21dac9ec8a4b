"""Cross-entropy three ways: operators, one pass that keeps two numbers a row, and one that overwrites logits by gradients.

The gradient of the loss is the softmax less one at the target. Operators keep several tensors as large as the logits for it, and
with a vocabulary of 50,000 these are the largest of a whole model. One pass can keep the largest logit and the sum of each row
and compute the softmax again; or write the gradient over the logits at once, for nobody needs them any more.

    loss = mean of log s - (x_t - m),   s = sum e^(x - m)        d loss / d x = (e^(x - m) / s - [x is x_t]) / r

Sums are made in at least float32: 70,000 equal logits in fp16 would have an infinite one.

Reference: Milakov and Gimelshein 2018 (arXiv:1805.02867) for the sums; Hsu et al. 2024 (arXiv:2410.10989) for the gradient in
place.
"""

import torch
from torch.autograd.function import once_differentiable

from ..ranks.buffers import overlaps
from .rows import check_floating, row_slices, wide_dtype

__all__ = ["cross_entropy_blocks", "cross_entropy_in_place", "cross_entropy_separate"]


def cross_entropy_separate(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits (r, V), targets (r,) whole numbers -> the mean over rows of -log softmax(logits)[target], in operators.

    No rows: nan, as torch says. ValueError for targets outside 0 .. V - 1, with the first of them (not where it is compiled).
    """
    _check(logits, targets)
    _check_labels(targets, logits.shape[1])
    below = logits - logits.amax(-1, keepdim=True)
    log_total = below.exp().sum(-1, dtype=wide_dtype(logits)).log()
    return (log_total - below.gather(-1, targets[:, None]).squeeze(-1)).mean().to(logits.dtype)


def cross_entropy_blocks(logits: torch.Tensor, targets: torch.Tensor, *, rows: int | None = None) -> torch.Tensor:
    """As `cross_entropy_separate`, `rows` rows at a time.

    Where a gradient is wanted, the logits and two numbers a row are kept for backward, one more pass; else nothing is.
    """
    _check(logits, targets)
    return _Blocks.apply(logits, targets, rows)


def cross_entropy_in_place(logits: torch.Tensor, targets: torch.Tensor, *, rows: int | None = None) -> torch.Tensor:
    """As `cross_entropy_blocks`, but the logits are lost: when it returns, their gradient for a mean stands in their place.

    Backward then moves nothing (one pass where what comes from above is not 1), and can be done once. Where the operator before
    has kept its output, the logits, for its own backward, torch refuses that backward. ValueError for logits with rows or columns
    that share their memory (of expand(), say): there is no place for a gradient of each.
    """
    _check(logits, targets)
    if overlaps(logits):
        raise ValueError(
            f"logits {tuple(logits.shape)} with strides {logits.stride()} share memory; allowed: a place for each, such as "
            "logits.contiguous()"
        )
    _check_labels(targets, logits.shape[1])  # all of them, before anything is overwritten
    return _InPlace.apply(logits, targets, rows)


def _block_loss(x, targets, weights, largest, total) -> torch.Tensor:
    """Sum of the losses of the rows of x (r, V) -> 0-d, of the dtype of total. weights (r, V; may be x) becomes e^(x - m);
    largest, total (r, 1) become m and s.
    """
    torch.amax(x, -1, keepdim=True, out=largest)
    below = x.gather(-1, targets[:, None]).sub_(largest)
    torch.sub(x, largest, out=weights)
    torch.exp(weights, out=weights)
    torch.sum(weights, -1, keepdim=True, dtype=total.dtype, out=total)
    return total.log().sub_(below).sum()


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, rows):
        count, columns = logits.shape
        slices = [*row_slices(count, rows, columns, logits.element_size())]
        most, kept = slices[0].stop if slices else 0, ctx.needs_input_grad[0]
        wide = wide_dtype(logits)
        room, loss = logits.new_empty(most, columns), logits.new_zeros((), dtype=wide)
        # a number a row that nobody will read is not kept: of many rows it would leave the cache
        largest, total = (logits.new_empty(count if kept else most, 1, dtype=of) for of in (logits.dtype, wide))
        for block in slices:
            _check_labels(targets[block], columns, block.start)
            place = block if kept else slice(0, block.stop - block.start)
            weights = room[: block.stop - block.start]
            loss += _block_loss(logits[block], targets[block], weights, largest[place], total[place])
        ctx.save_for_backward(logits, targets, largest, total)
        ctx.rows = rows
        return (loss / count).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, targets, largest, total = ctx.saved_tensors
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        share = grad.to(total.dtype) / max(len(logits), 1)
        for block in row_slices(len(logits), ctx.rows, logits.shape[1], logits.element_size()):
            y = result[block]
            torch.sub(logits[block], largest[block], out=y)
            torch.exp(y, out=y)
            y.mul_(share / total[block])
            y.scatter_add_(-1, targets[block, None], -share.to(y.dtype).expand(len(y), 1))
        return result, None, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, rows):
        count, columns = logits.shape
        over = logits.detach()  # the same storage and version counter: autograd sees that it is overwritten
        wide, minus = wide_dtype(logits), logits.new_full((1, 1), -1 / max(count, 1))
        loss = logits.new_zeros((), dtype=wide)
        for block in row_slices(count, rows, columns, logits.element_size(), tensors=1):
            y = over[block]
            largest, total = y.new_empty(len(y), 1), y.new_empty(len(y), 1, dtype=wide)
            loss += _block_loss(y, targets[block], y, largest, total)
            y.div_(total.mul_(count))
            y.scatter_add_(-1, targets[block, None], minus.expand(len(y), 1))
        ctx.save_for_backward(over)
        return (loss / count).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (over,) = ctx.saved_tensors
        return over if bool(grad == 1) else over.mul_(grad), None, None


def _check(logits: torch.Tensor, targets: torch.Tensor) -> None:
    check_floating(logits, "cross-entropy")
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or not logits.shape[1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}; allowed: (r, V) and (r,), with V of at least 1"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets of {str(targets.dtype).removeprefix('torch.')}; allowed: int64, the number of a column")


def _check_labels(targets: torch.Tensor, columns: int, first: int = 0) -> None:
    """ValueError where a target is no column; first: the row of the first target."""
    if not len(targets) or torch.compiler.is_compiling():  # a compiled graph has no place for a look at values
        return
    low, high = (int(end) for end in torch.aminmax(targets))
    if low < 0 or high >= columns:
        row = int(((targets < 0) | (targets >= columns)).nonzero()[0])
        raise ValueError(
            f"target {int(targets[row])} in row {first + row}; allowed: 0 to {columns - 1}, the columns of the logits"
        )
