"""Blocks of rows that stay in a cache: the same operators, each on so few rows that the next one finds them there.

Most operators of a transformer work on each row alone, so rows can be taken some at a time. A block of the input and of the
output, and what lies between, fit into the second cache; memory sees the input once and the output once. The price is a call of
each operator for each block, some microseconds, so blocks must not be too small either.

    rows = cache / (tensors x columns x width),    at least 1

Reference: Wolf and Lam 1991, "A data locality optimizing algorithm" (blocking).
"""

from collections.abc import Iterator

import torch

__all__ = [
    "BLOCK_BYTES",
    "check_floating",
    "chunk_of",
    "flat_rows",
    "need_no_gradient",
    "place_of_result",
    "row_slices",
    "rows_that_fit",
    "wide_dtype",
]

BLOCK_BYTES = 2**19  # of all tensors of a block together: the second cache of common processors has 256 KiB to 2 MiB


def rows_that_fit(columns: int, itemsize: int, *, tensors: int = 2) -> int:
    """Rows of a block, so that `tensors` blocks of `columns` numbers of `itemsize` bytes stay within BLOCK_BYTES; at least 1."""
    return max(1, BLOCK_BYTES // max(1, tensors * columns * itemsize))


def row_slices(count: int, rows: int | None, columns: int, itemsize: int, *, tensors: int = 2) -> Iterator[slice]:
    """Slices of 0 .. count - 1, `rows` long (None: as many as fit). ValueError for rows below 1."""
    if rows is None:
        rows = rows_that_fit(columns, itemsize, tensors=tensors)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"rows is {rows!r}; allowed: a whole number of at least 1, or None for as many as stay in the cache")
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def chunk_of(source: torch.Tensor, columns: int | None) -> tuple[int, int]:
    """(columns of a chunk of a row, rows of a block) for source (r, n), so that a chunk of input and one of output stay in the
    cache. ValueError for columns below 1; None takes as many as fit.
    """
    if columns is None:
        columns = BLOCK_BYTES // (2 * source.element_size())
    if not isinstance(columns, int) or isinstance(columns, bool) or columns < 1:
        raise ValueError(f"columns is {columns!r}; allowed: a whole number of at least 1, or None for as many as fit the cache")
    columns = min(columns, source.shape[1])
    return columns, min(rows_that_fit(columns, source.element_size()), max(len(source), 1))


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., n) -> (r, n): a view where it can be, else a copy. ValueError for a tensor without dims."""
    if x.dim() == 0:
        raise ValueError("a single number has no rows; allowed: a tensor of at least one dim, (..., n)")
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, max(x.shape[-1], 1))


def check_floating(x: torch.Tensor, what: str) -> None:
    """ValueError for whole numbers and bools."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"{what} of {str(x.dtype).removeprefix('torch.')}; allowed: a floating dtype, for instance x.float()")


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """At least float32: where sums are made, which in 16 bits overflow (fp16 at 65,504) or stop to grow (bf16 at 256 times 1)."""
    return torch.promote_types(x.dtype, torch.float32)


def need_no_gradient(what: str, instead: str, *tensors: torch.Tensor) -> None:
    """ValueError where autograd would want a backward that `what` does not have."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(f"{what} has no backward; call it under torch.no_grad(), or use {instead}")


def place_of_result(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or a new contiguous tensor of x's shape. ValueError for an `out` of another shape or dtype, with gaps, or that lies
    over a part of x (x itself is allowed): later rows of x would be overwritten before they are read.
    """
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} with strides {out.stride()}; allowed: a contiguous {tuple(x.shape)} of "
            f"{x.dtype}"
        )
    if _same_memory(x, out) and (x.storage_offset(), x.stride()) != (out.storage_offset(), out.stride()):
        raise ValueError("out lies over a part of x; allowed: x itself, or memory that x has no part of")
    return out


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the stretches of storage that the two lie in have a place in common."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata or not x.numel():
        return False
    (a, b), (c, d) = (
        (t.storage_offset(), t.storage_offset() + sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True)))
        for t in (x, y)
    )
    return a <= d and c <= b
