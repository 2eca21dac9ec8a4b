"""How many bytes a function moves: every operator reads its inputs from memory and writes its results there.

A dispatch mode sees each operator, those of the backward pass too. Without a cache all that it touches counts, and views touch
nothing. With a cache of so many bytes (modelled: pages, the least recently used leaves first) only misses and write-backs count,
and so a function that works on few rows at a time is seen to move less than one that sends whole tensors through.

    bytes = sum over operators of (distinct elements read + written) x width        time >= max(bytes / bandwidth, FLOPs / peak)

Reference: Williams, Waterman and Patterson 2009; torch.utils.flop_counter for the products. What a kernel does inside, and that a
processor may fetch a line before it overwrites it, is not seen.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..cost.hardware import Device
from ..cost.units import format_bytes
from .cache import PAGE, Cache
from .compile import Compiled

__all__ = ["Operator", "Traffic", "tensor_bytes", "traffic"]


class Operator(NamedTuple):
    """One operator: its name, bytes read and bytes written (with a cache: missed, and written back meanwhile)."""

    name: str
    read: int
    written: int


@dataclass(frozen=True)
class Traffic:
    """What was counted. `rows`: the operators that moved something, in order; with a cache, what is written back at the end
    belongs to none of them and is in `bytes_written` only.
    """

    bytes_read: int
    bytes_written: int
    flops: int
    rows: tuple[Operator, ...]

    @property
    def operators(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs for each byte: the place on the roofline."""
        return self.flops / self.bytes if self.bytes else math.inf

    def seconds(self, device: Device, dtype: object = "float32") -> float:
        """The least time that the device needs: the longer of traffic and arithmetic."""
        return device.seconds(self.flops, self.bytes, dtype)

    def table(self) -> str:
        """One line an operator, and the sum."""
        lines = [f"{'operator':24} {'read':>12} {'written':>12}"]
        lines += [f"{row.name[:24]:24} {format_bytes(row.read):>12} {format_bytes(row.written):>12}" for row in self.rows]
        rest = self.bytes_written - sum(row.written for row in self.rows)
        if rest:
            lines.append(f"{'written back at the end':24} {'':12} {format_bytes(rest):>12}")
        lines.append(f"{'in all':24} {format_bytes(self.bytes_read):>12} {format_bytes(self.bytes_written):>12}")
        return "\n".join(lines)


def traffic(fn: Callable, *args, cache: int = 0, **kwargs) -> Traffic:
    """Run fn(*args, **kwargs) once and count what it moves.

    cache: bytes of a modelled cache, empty at the start; 0 for none. A storage that is freed is forgotten: what of it was not yet
    written back never is. At the end the rest is written back. A page that is missed by a write is not fetched first.
    ValueError for a cache of less than a page, and for a compiled function, which shows no operators.
    """
    if isinstance(fn, Compiled):
        raise ValueError("a compiled function shows no operators; fourwalls.kernels.formulas says what one pass must move")
    if cache and cache < PAGE:
        raise ValueError(f"cache is {cache} B; allowed: 0 for none, or at least {PAGE} B, one page")
    with _Count(Cache(cache // PAGE) if cache else None) as count:
        result = fn(*args, **kwargs)
    written = count.written + (count.cache.flush() if cache else 0)
    del result  # alive until here: it is part of what is written back
    return Traffic(count.read, written, count.flops, tuple(count.rows))


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the distinct elements: a row that is repeated with stride 0 counts once."""
    return sum(_numel(t) * t.element_size() for t in tensors)


def _numel(t: torch.Tensor) -> int:
    return math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or n == 0)


class _Count(TorchDispatchMode):
    """Adds up each operator that moves something."""

    def __init__(self, cache: Cache | None):
        super().__init__()
        self.cache, self.read, self.written, self.flops, self.rows = cache, 0, 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in _FREE:
            return out
        read, written = _operands(func, args, kwargs, out)
        if not written:
            return out
        few = _picked(func, args, kwargs, out)  # of one tensor only these elements are touched
        missed = back = 0
        for tensors, is_write in ((read, False), (written, True)):
            for t in tensors:
                miss, evicted = self._touch(t, few.get(id(t)), is_write)
                missed, back = missed + miss, back + evicted
        self.read, self.written = self.read + missed, self.written + back
        self.flops += _flops(func, args, kwargs, out, (*read, *written))
        self.rows.append(Operator(func.name().removeprefix("aten::").split(".")[0], missed, back))
        return out

    def _touch(self, t: torch.Tensor, part: int | None, write: bool) -> tuple[int, int]:
        """(bytes read from memory, bytes written to it) where an operator touches t, or only `part` of its elements."""
        if part is None and self.cache is not None:
            return self.cache.touch(t, write=write)
        moved = tensor_bytes(t) if part is None else part * t.element_size()
        if self.cache is not None and self.cache.holds(t):
            moved = 0
        return (0, moved) if write else (moved, 0)


def _operands(func, args, kwargs, out) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors read, tensors written). Nothing is written where all results are views of inputs."""
    packet = func._overloadpacket
    read, written = [], []
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments[len(args) :] if a.name in kwargs]
    for argument, value in named:
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            written += tensors
        if not (changed and (argument.is_out or packet in _OVERWRITES)) and packet not in _LIKE:
            read += tensors
    if not func._schema.is_mutable:
        own = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        written = [t for t in results if t.untyped_storage()._cdata not in own]
    return _distinct(read), _distinct(written)


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each piece of memory once: x * x reads x once."""
    return list({(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors}.values())


def _picked(func, args, kwargs, out) -> dict[int, int]:
    """{id of a tensor: how many of its elements are touched} where an index picks few of them."""
    packet = func._overloadpacket
    if packet in _GATHERS:
        place = _GATHERS[packet]
        return {id(args[place]): next(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)).numel()}
    if packet in _SCATTERS:
        return {id(args[0]): args[2].numel()}
    if packet is _aten.nll_loss_forward:
        return {id(args[0]): args[1].numel()}
    return {}


def _flops(func, args, kwargs, out, tensors) -> int:
    """Products by torch's own formulas; what only moves, none; all else one for each element of the largest tensor touched."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if func._overloadpacket in _COPIES or func._overloadpacket in _LIKE:
        return 0
    return max(t.numel() for t in tensors)


_aten = torch.ops.aten
# allocate, or look at one number, and move nothing
_FREE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.resize_,
    _aten._local_scalar_dense,
}  # fmt: skip
# take the shape of their input and not its values
_LIKE = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.new_zeros, _aten.new_ones,
    _aten.new_full,
}  # fmt: skip
# overwrite their first argument without a look at it
_OVERWRITES = {
    _aten.copy_, _aten.fill_, _aten.zero_, _aten.uniform_, _aten.normal_, _aten.random_, _aten.bernoulli_, _aten.exponential_,
    _aten.scatter_,
}  # fmt: skip
# move data and compute nothing
_COPIES = {
    _aten.copy_, _aten.clone, _aten._to_copy, _aten.cat, _aten.stack, _aten.zeros, _aten.ones, _aten.full, _aten.arange,
    _aten.fill_, _aten.zero_, _aten.index_select, _aten.embedding, _aten.gather, _aten.scatter_,
}  # fmt: skip
# read of one argument (its place) only so many elements as they give back; write only where the index says
_GATHERS = {_aten.gather: 0, _aten.index_select: 0, _aten.embedding: 0, _aten.index: 0}
_SCATTERS = {_aten.scatter_, _aten.scatter_add_}
