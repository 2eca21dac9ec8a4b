"""How a tensor is cut: into one chunk per rank, and a chunk into segments.

Every algorithm cuts the flattened tensor in the same way, so that the bytes each rank sends are a formula and not an
accident. Chunk sizes differ by at most one element, the larger ones first; all chunks have the same number of segments,
so every rank sends the same number of messages, some of them possibly empty.

    size of chunk c  =  floor(S / n) + (1 if c < S mod n else 0)        segments  =  max(1, ceil(ceil(S / n) w / segment_bytes))

with S elements of w bytes on n ranks. Reference: `torch.tensor_split`, which cuts alike.
"""

import math

import torch

__all__ = [
    "chunk_sizes",
    "chunk_start",
    "cut",
    "finish",
    "flat_input",
    "gather_layout",
    "result_buffer",
    "segment_count",
    "segments",
    "working_copy",
]


def chunk_sizes(numel: int, n: int) -> list[int]:
    """Elements of each of the n chunks of `numel` elements: they differ by at most one and sum to `numel`."""
    small, larger = divmod(numel, n)
    return [small + 1] * larger + [small] * (n - larger)


def chunk_start(numel: int, n: int, c: int) -> int:
    """Index of the first element of chunk c (c = n gives `numel`)."""
    small, larger = divmod(numel, n)
    return c * small + min(c, larger)


def cut(flat: torch.Tensor, n: int) -> list[torch.Tensor]:
    """n views of a flat tensor, chunk by chunk; no copy.

    `.data` gives each view its own count of writes. Views otherwise share the count of the whole tensor, and a check that a
    chunk was not changed while it was being sent would have to compare bytes whenever a neighbour was written.
    """
    return [chunk.data for chunk in flat.split(chunk_sizes(flat.numel(), n))]


def segment_count(numel: int, itemsize: int, n: int, segment_bytes: int | None) -> int:
    """Into how many segments each chunk is cut, so that none is larger than `segment_bytes` (None: one segment)."""
    if segment_bytes is None:
        return 1
    if segment_bytes < 1:
        raise ValueError(f"segment_bytes is {segment_bytes}; it must be at least 1, or None for one segment a chunk")
    largest = -(-numel // n)  # elements of the largest chunk
    per_segment = max(1, segment_bytes // itemsize)
    return max(1, -(-largest // per_segment))


def segments(chunk: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` views of a chunk, again of sizes that differ by at most one element."""
    return [chunk] if count == 1 else cut(chunk, count)


def flat_input(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` in reading order, flat, contiguous, outside autograd; shares memory where it can. Read only."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def working_copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A flat contiguous tensor with the elements of `x` free to be overwritten; the memory of `out` where that is possible.

    Without `out`, `x` is left unchanged. With `out=x` and contiguous memory nothing is copied. End with `finish`.
    Raises ValueError where `out` differs from `x` in shape, dtype or device.
    """
    if out is None:
        flat = flat_input(x)
        return flat.clone() if flat.data_ptr() == x.data_ptr() else flat
    flat = result_buffer(x, x.shape, out)
    if out is not x or flat.data_ptr() != out.data_ptr():
        flat.copy_(flat_input(x))
    return flat


def result_buffer(x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None = None) -> torch.Tensor:
    """A flat contiguous buffer for a result of `shape`, dtype and device as `x`; the memory of `out` where that is possible.

    Raises ValueError where `out` differs from that in shape, dtype or device.
    """
    if out is None:
        return x.new_empty(math.prod(shape))
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; the result is {x.dtype} {tuple(shape)} on {x.device}"
        )
    if not _plain(out):
        return out.new_empty(out.numel())
    return out.detach().view(-1)


def gather_layout(x: torch.Tensor, n: int, rank: int, numel: int | None) -> tuple[list[int], tuple[int, ...]]:
    """What a gather makes: (elements from each rank, shape of the result).

    numel None: every rank gives the same shape and the result is the stack, (n, *x.shape); of 0-d tensors a vector (n,).
    numel given: rank r gives chunk r of a flat tensor of that many elements, as reduce_scatter and scatter return it, and the
    result is that flat tensor. Raises ValueError where `x` does not have the size of chunk `rank`.
    """
    if numel is None:
        return [x.numel()] * n, (n, *x.shape)
    sizes = chunk_sizes(numel, n)
    if x.numel() != sizes[rank]:
        raise ValueError(
            f"rank {rank} gives {x.numel()} elements; chunk {rank} of {numel} elements on {n} ranks has {sizes[rank]}"
        )
    return sizes, (numel,)


def finish(flat: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None = None) -> torch.Tensor:
    """The result in its shape: `out` itself, filled, or the flat buffer seen in that shape."""
    if out is None:
        return flat.view(shape)
    if not _plain(out):
        out.detach().copy_(flat.view(shape))
    return out


def _plain(x: torch.Tensor) -> bool:
    """Whether the memory of `x` is its elements in reading order."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()
