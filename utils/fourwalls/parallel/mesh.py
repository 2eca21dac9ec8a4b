"""Where a rank stands: its four coordinates (d, p, c, t), and the groups of ranks that differ in one of them.

The ranks are counted through like the digits of a number, the tensor axis fastest, so that neighbours in it are neighbours on
the wire. A group is a slice of that array: all coordinates fixed but one. Every rank makes all groups, in the same order, from
the same array, so that nobody can be wired to another's group.

    rank = ((d P + p) C + c) T + t        a group of axis t = array[d, p, c, :]

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 3, for which axis belongs on which wire.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ranks.comm import Comm

__all__ = ["AXES", "Grid", "Mesh", "Place", "split_into"]

AXES = {"d": "data", "p": "pipeline", "c": "context", "t": "tensor"}  # outermost first


def split_into(comm: Comm, groups: Sequence[Sequence[int]]) -> Comm | None:
    """This rank's communicator of the given groups of ranks, in the order given there; None if it is in no group.

    Every rank calls it with the same groups, also those that are in none. Raises ValueError for a rank that stands in two groups
    or does not exist; MismatchError (checks on) where the ranks' lists differ, before anything is wired.
    """
    everyone = [rank for group in groups for rank in group]
    for rank in everyone:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < comm.size:
            raise ValueError(f"groups hold rank {rank!r}; ranks are 0 to {comm.size - 1}")
        if everyone.count(rank) > 1:
            raise ValueError(f"rank {rank} stands in the groups twice; each rank belongs to one group at most")
    if comm.checks and comm.size > 1:
        comm.agree((("collective", "split_into"), ("groups", tuple(tuple(group) for group in groups))))
    mine = [(color, list(group).index(comm.rank)) for color, group in enumerate(groups) if comm.rank in group]
    color, key = mine[0] if mine else (None, 0)
    return comm.split(color, key)


class Place(NamedTuple):
    """The coordinates of one rank."""

    d: int
    p: int
    c: int
    t: int


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes, and the arithmetic between ranks and places; no rank is needed for it.

    Grid(d=2, t=4) has 8 ranks. ValueError for a size that is no whole number of at least 1.
    """

    d: int = 1
    p: int = 1
    c: int = 1
    t: int = 1

    def __post_init__(self):
        for axis, word in AXES.items():
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} ({word}) is {size!r}; it is a whole number of at least 1")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.d, self.p, self.c, self.t

    @property
    def ranks(self) -> int:
        """How many ranks the grid has."""
        return math.prod(self.sizes)

    @property
    def array(self) -> torch.Tensor:
        """array[d, p, c, t] = rank."""
        return torch.arange(self.ranks).view(self.sizes)

    def check(self, ranks: int) -> None:
        """ValueError, with the nearest legal size, unless the axes multiply to `ranks`."""
        if ranks == self.ranks:
            return
        product = " * ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True))
        legal = []
        for axis in AXES:
            rest = self.ranks // getattr(self, axis)
            if ranks % rest == 0:
                legal.append(f"{axis} {ranks // rest}")
        hint = " or ".join(legal) if legal else f"sizes that multiply to {ranks}, such as d {ranks}"
        raise ValueError(f"{product} = {self.ranks}, but there are {ranks} ranks; nearest legal: {hint}")

    def place(self, rank: int) -> Place:
        """The coordinates of `rank`: the digits of the number."""
        if not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise ValueError(f"no rank {rank!r} in a grid of {self.ranks}; ranks are 0 to {self.ranks - 1}")
        digits = []
        for size in reversed(self.sizes):
            rank, digit = divmod(rank, size)
            digits.append(digit)
        return Place(*reversed(digits))

    def rank(self, d: int = 0, p: int = 0, c: int = 0, t: int = 0) -> int:
        """The rank at these coordinates."""
        for axis, at, size in zip(AXES, (d, p, c, t), self.sizes, strict=True):
            if not 0 <= at < size:
                raise ValueError(f"{axis} {at} is outside the grid; {axis} is 0 to {size - 1}")
        return ((d * self.p + p) * self.c + c) * self.t + t

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups whose ranks differ in `axes` alone, as slices of the array. groups("d", "c"): data and context together."""
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown or len(set(axes)) < len(axes) or not axes:
            raise ValueError(f"axes {axes!r}; one or more of {', '.join(AXES)}, each once")
        array = self.array
        fixed = [range(size) if axis not in axes else [slice(None)] for axis, size in zip(AXES, self.sizes, strict=True)]
        return [tuple(array[index].reshape(-1).tolist()) for index in itertools.product(*fixed)]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `axes` that `rank` belongs to."""
        self.place(rank)  # refuses a rank that does not exist
        return next(group for group in self.groups(*axes) if rank in group)


class Mesh:
    """A rank's view of the grid: `mesh.place`, and a communicator for each axis, `mesh.t.rank`, `mesh.d.size`.

    also: further groups, such as (("d", "c"),), reached by mesh.comm("d", "c"). All ranks make the same mesh at the same time;
    MismatchError (checks on) where they do not. ValueError where the axes do not multiply to the number of ranks: call
    `Grid(...).check(ranks)` to have it before ranks start.
    """

    def __init__(self, comm: Comm, grid: Grid | None = None, *, also: Sequence[Sequence[str]] = (), **sizes: int):
        if grid is not None and sizes:
            raise ValueError("give a Grid, or the sizes of its axes, not both")
        self.grid = grid = grid or Grid(**sizes)
        grid.check(comm.size)
        self.world, self.place = comm, grid.place(comm.rank)
        self._comms: dict[tuple[str, ...], Comm] = {}
        for axes in (*((axis,) for axis in AXES), *(tuple(sorted(axes, key=list(AXES).index)) for axes in also)):
            self._comms[axes] = split_into(comm, grid.groups(*axes))

    def comm(self, *axes: str) -> Comm:
        """The communicator of the ranks that differ from this one in `axes` alone."""
        key = tuple(sorted(axes, key=lambda axis: list(AXES).index(axis) if axis in AXES else -1))
        if key not in self._comms:
            made = ", ".join("+".join(axes) for axes in self._comms)
            raise ValueError(f"no communicator for {'+'.join(axes)!r}; made were {made}; ask for others with also=")
        return self._comms[key]

    @property
    def d(self) -> Comm:
        """The copies of the model that hold the same part of it."""
        return self.comm("d")

    @property
    def p(self) -> Comm:
        """The stages of this copy's pipeline."""
        return self.comm("p")

    @property
    def c(self) -> Comm:
        """The ranks that share this sequence's tokens."""
        return self.comm("c")

    @property
    def t(self) -> Comm:
        """The ranks that share this layer's matrices."""
        return self.comm("t")

    def __repr__(self) -> str:
        at = ", ".join(f"{axis} {k}/{n}" for axis, k, n in zip(AXES, self.place, self.grid.sizes, strict=True))
        return f"Mesh(rank {self.world.rank}: {at})"
