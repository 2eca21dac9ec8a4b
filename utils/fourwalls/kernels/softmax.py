"""Softmax three ways: five operators that each go through memory, the same five on rows that stay in a cache, and a running one.

Five operators read the tensor five times and write it three times. In blocks of rows the cache serves all but the first read and
the last write. A row that is longer than the cache still needs not three passes but two: the largest number and the sum are kept
up to date together, and where a larger number comes, what was summed so far is scaled down to it.

    m' = max(m, max x),   s' = s e^(m - m') + sum e^(x - m')        y = e^(x - m) / s        8 n  ->  2 n  (3 n for long rows)

Reference: Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

import math

import torch

from .rows import check_floating, chunk_of, flat_rows, need_no_gradient, place_of_result, row_slices, wide_dtype

__all__ = ["running_max_and_sum", "softmax_blocks", "softmax_online", "softmax_separate"]


def softmax_separate(x: torch.Tensor) -> torch.Tensor:
    """(..., n) -> (..., n), over the last dim, in five operators. A row that holds nan or +inf, or only -inf, becomes nan.

    The sum is made in at least float32, as in all forms here: in fp16 it would be infinite for 65,520 numbers on.
    """
    check_floating(x, "softmax")
    if x.numel() == 0:
        return x.clone()
    largest = x.amax(-1, keepdim=True)  # (..., 1)
    below = x - largest
    weights = below.exp()
    return (weights / weights.sum(-1, keepdim=True, dtype=wide_dtype(x))).to(x.dtype)


def _softmax_block(x: torch.Tensor, y: torch.Tensor, largest: torch.Tensor, total: torch.Tensor) -> None:
    """x (r, n) -> y (r, n), in place of what stands there; largest and total (r, 1) are room for a number a row each."""
    torch.amax(x, -1, keepdim=True, out=largest)
    torch.sub(x, largest, out=y)
    torch.exp(y, out=y)
    torch.sum(y, -1, keepdim=True, dtype=total.dtype, out=total)
    torch.div(y, total, out=y)


def softmax_blocks(x: torch.Tensor, *, rows: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `softmax_separate`, `rows` rows at a time; the block of the output is the only room that the work takes.

    out may be x itself. Forward only. ValueError for rows below 1, an `out` that does not fit, or x that wants a gradient.
    """
    check_floating(x, "softmax")
    need_no_gradient("softmax_blocks", "softmax_separate", x)
    result = place_of_result(x, out)
    source, target = flat_rows(x), flat_rows(result)
    count, columns = source.shape
    slices = [*row_slices(count, rows, columns, x.element_size())]
    most = slices[0].stop if slices else 0
    largest, total = x.new_empty(most, 1), x.new_empty(most, 1, dtype=wide_dtype(x))
    for block in slices:
        count = block.stop - block.start
        _softmax_block(source[block], target[block], largest[:count], total[:count])
    return result


def softmax_online(x: torch.Tensor, *, columns: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `softmax_separate`, in two passes: one for maximum and sum, one that writes. For rows longer than a cache.

    columns: numbers of a row that are looked at together (None: as many as stay in the cache). Forward only. ValueError for
    columns below 1, an `out` that does not fit, or x that wants a gradient.
    """
    check_floating(x, "softmax")
    need_no_gradient("softmax_online", "softmax_separate", x)
    result = place_of_result(x, out)
    source, target = flat_rows(x), flat_rows(result)
    chunk, rows = chunk_of(source, columns)
    for block in row_slices(len(source), rows, chunk, x.element_size()):
        largest, total = _running(source[block], chunk)
        for x_part, y_part in zip(source[block].split(chunk, -1), target[block].split(chunk, -1), strict=True):
            torch.sub(x_part, largest, out=y_part)
            torch.exp(y_part, out=y_part)
            torch.div(y_part, total, out=y_part)
    return result


def running_max_and_sum(x: torch.Tensor, *, columns: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, sum of e^(x - largest)) of each row, (..., 1) each, from one pass over chunks of `columns` numbers.

    A row of -inf alone has the sum 0. The sum is of at least float32, whatever x is.
    """
    check_floating(x, "softmax")
    with torch.no_grad():
        source = flat_rows(x)
        chunk, rows = chunk_of(source, columns)
        parts = [_running(source[block], chunk) for block in row_slices(len(source), rows, chunk, 1)]
        shape = (*x.shape[:-1], 1)
        if not parts:
            return x.new_full(shape, -math.inf), x.new_zeros(shape, dtype=wide_dtype(x))
        return tuple(torch.cat(side).view(shape) for side in zip(*parts, strict=True))


def _running(x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, sum) of the rows of x (r, n), (r, 1) each."""
    room = x.new_empty(len(x), chunk)
    largest = x.new_full((len(x), 1), -math.inf)
    total = torch.zeros_like(largest, dtype=wide_dtype(x))
    for part in x.split(chunk, -1):
        newest = torch.maximum(largest, part.amax(-1, keepdim=True))
        finite = newest.masked_fill(newest == -math.inf, 0)  # so that (-inf) - (-inf) is not nan before a row's first number
        shrink = (largest - finite).to(total.dtype).exp_()
        weights = room[:, : part.shape[1]]
        torch.sub(part, finite, out=weights)
        torch.exp(weights, out=weights)
        total = total * shrink + weights.sum(-1, keepdim=True, dtype=total.dtype)
        largest = newest
    return largest, total
