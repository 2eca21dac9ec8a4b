"""Three words for how ranks hold a tensor: cut along a dim, whole on each, or as parts of a sum; and what it costs to change.

Every tensor has two layouts, its own and its gradient's. The gradient's is the conjugate: cut where the tensor is cut, whole
where the tensor is parts of a sum. A whole tensor has two: parts of a sum where each rank goes on with other work (COPIED), or
whole where all ranks do the same (ALIKE). So a change of layout on the way forward fixes the change on the way back.

    split(d) -> broadcast: all-gather     partial -> split(d): reduce-scatter     split(d) -> split(e): all-to-all
    partial -> broadcast: all-reduce      broadcast -> split(d), broadcast -> partial, split(d) -> partial: nothing to send

Reference: Yuan et al. 2021, OneFlow (arXiv:2110.15032), section 3 (split, broadcast, partial-value); Xu et al. 2021, GSPMD
(arXiv:2105.04663).
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ..cost.collectives import collective_cost
from ..cost.hardware import Cluster, Device, Link

__all__ = [
    "ALIKE",
    "COPIED",
    "PARTIAL",
    "Layout",
    "Move",
    "Prices",
    "collective_of",
    "cut_dim",
    "divides",
    "is_cut",
    "local_shape",
    "split",
]

BROADCAST, SUM = "broadcast", "partial"
DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}  # bytes of a number -> the device's rate


class Layout(NamedTuple):
    """How ranks hold a tensor (`value`) and its gradient (`gradient`): each "split(d)", "broadcast" or "partial"."""

    value: str
    gradient: str

    def __str__(self) -> str:
        return "copied" if self == COPIED else self.value


COPIED = Layout(BROADCAST, SUM)  # whole; each rank goes on with other work, so its gradient is a part of the sum
ALIKE = Layout(BROADCAST, BROADCAST)  # whole; all ranks do the same, so the gradient is whole on each
PARTIAL = Layout(SUM, BROADCAST)  # each rank holds a part of a sum; the gradient of each part is the sum's


def split(dim: int) -> Layout:
    """Rank r holds the r-th of n equal pieces along `dim`; of the gradient too."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise ValueError(f"dim is {dim!r}; it is the number of a dim, counted from 0")
    return Layout(f"split({dim})", f"split({dim})")


@cache
def cut_dim(half: str) -> int | None:
    """The dim along which one half of a layout is cut: "split(1)" -> 1; None where it is not cut."""
    return int(half[6:-1]) if half.startswith("split(") else None


def is_cut(layout: Layout) -> bool:
    return cut_dim(layout.value) is not None


def divides(layout: Layout, shape: Sequence[int], n: int) -> bool:
    """Whether `n` ranks can hold a tensor of `shape` so: the dim exists, and n divides it."""
    dim = cut_dim(layout.value)
    return dim is None or (dim < len(shape) and shape[dim] % n == 0)


def local_shape(layout: Layout, shape: Sequence[int], n: int) -> tuple[int, ...]:
    """What one rank holds of a tensor of `shape`."""
    dim = cut_dim(layout.value)
    return tuple(size // n if k == dim else size for k, size in enumerate(shape))


@cache
def collective_of(start: str, end: str) -> str:
    """The collective that takes one half of a layout to another; "" where nothing is sent (a slice, or zeros put around it)."""
    if start == end:
        return ""
    cut_start, cut_end = cut_dim(start) is not None, cut_dim(end) is not None
    if start == SUM:
        return "reduce_scatter" if cut_end else "all_reduce"
    if cut_start and end == BROADCAST:
        return "all_gather"
    return "all_to_all" if cut_start and cut_end else ""


class Move(NamedTuple):
    """One change of one half of a layout: which collective ("" for none), bytes sent by each rank, picoseconds."""

    collective: str
    bytes_sent: tuple[int, ...]
    picoseconds: int

    @property
    def bytes(self) -> int:
        """Sent by all ranks together."""
        return sum(self.bytes_sent)


class Prices:
    """What n ranks, joined by `link`, pay: rings for sums and gathers, a pairwise all-to-all; a roofline for the work.

    link: a Link, or a Cluster whose n ranks have one kind of link (its device is used).  device None with a Link: computing
    takes no time, so that only communication is compared.
    """

    def __init__(self, n: int, link: "Link | Cluster", device: Device | None = None):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"n is {n!r} ranks; a whole number of at least 1")
        self.n, self.link = n, link
        self.device = device or (link.device if isinstance(link, Cluster) else None)
        self._moves: dict[tuple, Move] = {}
        self._works: dict[tuple, int] = {}

    def move(self, start: str, end: str, shape: Sequence[int], itemsize: int) -> Move:
        """One half of a layout to another, for a tensor whose whole is `shape`."""
        name = collective_of(start, end)
        elements = math.prod(shape) // (self.n if name == "all_to_all" else 1)  # an all-to-all cuts what a rank holds
        key = name, elements, itemsize
        if key not in self._moves:
            self._moves[key] = self._price(*key)
        return self._moves[key]

    def convert(self, start: Layout, end: Layout, tensor) -> tuple[Move, Move]:
        """(forward, backward): the value from `start` to `end`, the gradient from `end` back to `start`, if there is one."""
        forward = self.move(start.value, end.value, tensor.shape, tensor.itemsize)
        if not tensor.needs_grad:
            return forward, Move("", (0,) * self.n, 0)
        return forward, self.move(end.gradient, start.gradient, tensor.shape, tensor.itemsize)

    def work(self, flops: int, nbytes: int, itemsize: int) -> int:
        """Picoseconds of work on one rank."""
        key = flops, nbytes, itemsize
        if key not in self._works:
            dtype = DTYPES.get(itemsize, "float32")
            self._works[key] = self.device.picoseconds(flops, nbytes, dtype) if self.device else 0
        return self._works[key]

    def _price(self, name: str, elements: int, itemsize: int) -> Move:
        if not name or self.n == 1:
            return Move("", (0,) * self.n, 0)
        algorithm = "pairwise" if name == "all_to_all" else "ring"
        found = collective_cost(name, algorithm, self.n, elements, self.link, itemsize=itemsize)
        return Move(name, found.bytes_sent, found.picoseconds)
