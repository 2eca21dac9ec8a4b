"""Reuse of buffers: give every intermediate result a place in one piece of memory, such that none is overwritten while it is
needed.

A recorded step is a list of operations on buffers. A buffer lives from the operation that makes it to the last one that reads
it; two buffers may share bytes if and only if their lives do not meet. Finding the smallest arena is hard in general; placing the
largest first, each at the lowest place that is free all its life, comes close to what no plan can beat.

    arena  >=  max over operations of the bytes alive then        (the lower bound)

Reference: Pisarchyk and Lee 2020 (arXiv:2001.03288), "greedy by size"; Chen et al. 2015 (arXiv:1512.01274), section 3, for reuse
in a graph of operators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .graph import Graph, view_of

__all__ = ["Arena", "Buffer", "buffers_of", "clash", "lower_bound", "naive_bytes", "place", "replay"]

ALIGN = 64  # bytes: where a buffer may begin


class Buffer(NamedTuple):
    """What is to be placed: its number, bytes, the operation that makes it and the last one that needs it (both included)."""

    number: int
    bytes: int
    born: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Where each buffer begins, and how many bytes there are in all."""

    offsets: dict[int, int]
    bytes: int


def buffers_of(graph: Graph) -> list[Buffer]:
    """The buffers that the recorded step makes. What it gives back lives to the end; what was there before is not placed."""
    return [
        Buffer(k, graph.bytes[k], graph.born[k], len(graph.ops) if k in graph.results else graph.last[k])
        for k in graph.made
        if graph.bytes[k]
    ]


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def naive_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes with no reuse: a place for each."""
    return sum(_up(b.bytes) for b in buffers)


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """The most bytes that are needed at one operation: no plan takes less."""
    change: dict[int, int] = {}
    for b in buffers:
        change[b.born] = change.get(b.born, 0) + _up(b.bytes)
        change[b.last + 1] = change.get(b.last + 1, 0) - _up(b.bytes)
    now = most = 0
    for moment in sorted(change):
        now += change[moment]
        most = max(most, now)
    return most


def place(buffers: Sequence[Buffer]) -> Arena:
    """Greedy in several orders, and the smallest arena of them: by size, by bytes times life, by birth."""
    orders = (
        lambda b: (-b.bytes, b.born),
        lambda b: (-b.bytes * (b.last - b.born + 1), b.born),
        lambda b: (b.born - b.last, -b.bytes),
        lambda b: (b.born, -b.bytes),
    )
    return min((_greedy(sorted(buffers, key=order)) for order in orders), key=lambda arena: arena.bytes)


def _greedy(ordered: Sequence[Buffer]) -> Arena:
    """Each buffer at the lowest offset where it fits between those already placed whose lives meet its own."""
    placed: list[tuple[int, int, Buffer]] = []  # (begin, end, buffer), by begin
    for b in ordered:
        size, begin = _up(b.bytes), 0
        for start, end, other in placed:
            if other.born <= b.last and b.born <= other.last:
                if start - begin >= size:
                    break
                begin = max(begin, end)
        placed.append((begin, begin + size, b))
        placed.sort(key=lambda row: row[0])
    return Arena({b.number: begin for begin, _, b in placed}, max((end for _, end, _ in placed), default=0))


def clash(buffers: Sequence[Buffer], arena: Arena) -> tuple[Buffer, Buffer] | None:
    """Two buffers that share a byte while both are needed, or None: then the plan is proven.

    Every pair whose lives meet is compared, moment by moment, so that the proof does not lean on how the plan was made.
    """
    alive: list[Buffer] = []
    for b in sorted(buffers, key=lambda b: b.born):
        alive = [other for other in alive if other.last >= b.born]
        begin, end = arena.offsets[b.number], arena.offsets[b.number] + b.bytes
        if begin < 0 or end > arena.bytes:
            return b, b  # it does not even lie in the arena
        for other in alive:
            if begin < arena.offsets[other.number] + other.bytes and arena.offsets[other.number] < end:
                return other, b
        alive.append(b)
    return None


def replay(graph: Graph, arena: Arena) -> list[torch.Tensor]:
    """Run the recorded operations again with every buffer in its place in one arena; the step's results, copied out.

    What was there before is read where it is. The place of a result is filled with 0xFF (not-a-number in every float type) before
    the operation reads, so a buffer that is overwritten too early shows. Operations that draw random numbers draw the recorded
    ones.
    """
    memory = torch.full((arena.bytes,), 255, dtype=torch.uint8)

    def tensor(ref):
        if ref.buffer in arena.offsets:
            return view_of(memory.untyped_storage(), ref, arena.offsets[ref.buffer])
        if ref.buffer in graph.outside:
            return view_of(graph.outside[ref.buffer], ref, 0)
        return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)  # a buffer of no bytes

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for op in graph.ops:
            if op.random is not None:
                torch.set_rng_state(op.random)
            for k in op.fresh & arena.offsets.keys():
                memory[arena.offsets[k] : arena.offsets[k] + graph.bytes[k]] = 255
            args, kwargs = op.arguments(tensor)
            out = op.func(*args, **kwargs)
            for ref, made in op.pairs(out):
                if ref.buffer in op.fresh and ref.buffer in arena.offsets:
                    tensor(ref).copy_(made)
        return [tensor(ref).clone() for ref in graph.answers]
