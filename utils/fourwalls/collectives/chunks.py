"""How a tensor is cut: into one chunk per rank, and a chunk into segments.

Every algorithm cuts the flattened tensor in the same way, so that the bytes each rank sends are a formula and not an
accident. Chunk sizes differ by at most one element, the larger ones first; all chunks have the same number of segments,
so every rank sends the same number of messages, some of them possibly empty.

    size of chunk c  =  floor(S / n) + (1 if c < S mod n else 0)        segments  =  max(1, ceil(ceil(S / n) w / segment_bytes))

with S elements of w bytes on n ranks. Reference: `torch.tensor_split`, which cuts alike.
"""

import math

import torch

from ..ranks.buffers import overlaps, share_memory

__all__ = [
    "check_segment",
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
    check_segment(segment_bytes)
    largest = -(-numel // n)  # elements of the largest chunk
    per_segment = max(1, segment_bytes // itemsize)
    return max(1, -(-largest // per_segment))


def check_segment(segment_bytes: int | None) -> None:
    """Raise ValueError unless `segment_bytes` is None or a whole number of at least 1."""
    if segment_bytes is None or (isinstance(segment_bytes, int) and segment_bytes >= 1 and segment_bytes is not True):
        return
    near = f" (int({segment_bytes!r}) would do)" if isinstance(segment_bytes, float) and 1 <= segment_bytes < math.inf else ""
    raise ValueError(
        f"segment_bytes is {segment_bytes!r}{near}; it must be a whole number of at least 1, or None for no further cut"
    )


def segments(chunk: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` views of a chunk, again of sizes that differ by at most one element."""
    return [chunk] if count == 1 else cut(chunk, count)


def flat_input(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` in reading order, flat, contiguous, outside autograd; shares memory where it can. Read only."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def working_copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A flat contiguous tensor with the elements of `x` free to be overwritten; the memory of `out` where that is possible.

    Without `out`, `x` is left unchanged. With `out=x` and contiguous memory nothing is copied. End with `finish`.
    Raises ValueError where `out` differs from `x` in shape, dtype or device, or overlaps it without being the same elements.
    """
    if out is None:
        flat = flat_input(x)
        return flat.clone() if flat.data_ptr() == x.data_ptr() else flat
    flat = result_buffer(x, x.shape, out)
    if out is not x or flat.data_ptr() != out.data_ptr():
        flat.copy_(flat_input(x))
    return flat


def result_buffer(x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None = None, place: int = 0) -> torch.Tensor:
    """A flat contiguous buffer for a result of `shape`, dtype and device as `x`; the memory of `out` where that is possible.

    Raises ValueError where `out` differs from that in shape, dtype or device, holds an element twice, or shares memory with `x`:
    a result written there would overwrite what is still to be read. `x` itself may be the elements of `out` from number `place`.
    """
    if out is None:
        return x.new_empty(math.prod(shape))
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is {type(out).__name__}; it takes a tensor, {x.dtype} {tuple(shape)}")
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; the result is {x.dtype} {tuple(shape)} on {x.device}"
        )
    if not _plain(out):
        if overlaps(out):
            raise ValueError(f"out is an expanded tensor {tuple(out.shape)}, whose elements share memory; use out.contiguous()")
        return out.new_empty(out.numel())
    flat = out.detach().view(-1)
    there = flat.data_ptr() + place * flat.element_size()
    if out is not x and x.data_ptr() != there and not out.is_meta and _plain(x) and share_memory(x, out):
        where = "out=x" if x.numel() == flat.numel() else f"an x that is elements {place} to {place + x.numel()} of out"
        raise ValueError(f"out shares memory with x, but is not the same elements: give {where}, or memory of its own")
    return flat


def gather_layout(x: torch.Tensor, n: int, rank: int, numel: int | None) -> tuple[list[int], tuple[int, ...]]:
    """What a gather makes: (elements from each rank, shape of the result).

    numel None: every rank gives the same shape and the result is the stack, (n, *x.shape); of 0-d tensors a vector (n,).
    numel given: rank r gives chunk r of a flat tensor of that many elements, as reduce_scatter and scatter return it, and the
    result is that flat tensor. Raises ValueError where `x` does not have the size of chunk `rank`.
    """
    if numel is None:
        return [x.numel()] * n, (n, *x.shape)
    if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
        raise ValueError(f"numel is {numel!r}; it is a whole number of at least 0, or None for equal shapes")
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
