"""Dropout on ranks that share a layer: the same mask where all hold the same numbers, different masks where each holds its own.

Two streams of random numbers: `shared`, equal on all ranks, for what is whole on each of them (another mask on another rank, and
the copies of one activation would differ from then on), and `own` for what is cut (the same mask on each shard, and the places
dropped would repeat from head to head). With `exact` a rank draws the mask of the whole from the shared stream and keeps its
part: t times the drawing, and the bits of one device for every t, which is what an oracle needs.

    whole on every rank: mask = shared        cut: mask = own,  or with exact: part r of a mask that all draw alike

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, last paragraph; its code keeps such streams.
"""

from collections.abc import Callable

import torch

from ..nn.init import name_seed
from ..nn.layers import dropout
from ..ranks.comm import Comm

__all__ = ["Streams"]


class Streams:
    """Random streams of one tensor-parallel rank. Replicas with other data need another `seed`; ranks of one group the same.

    exact: the masks are those that one device draws from a generator that was seeded with `seed`.
    `generators` are what a block that is computed again in backward must restore.
    """

    def __init__(self, comm: Comm, seed: int = 0, *, exact: bool = False):
        self.comm, self.seed, self.exact = comm, seed, exact
        self.shared = torch.Generator(device=comm.device).manual_seed(seed)
        self.own = torch.Generator(device=comm.device).manual_seed(name_seed(seed, f"tensor rank {comm.rank}"))

    @property
    def generators(self) -> tuple[torch.Generator, torch.Generator]:
        return self.shared, self.own

    def stream(self, dim: int | None = None) -> torch.Generator | Callable:
        """What `nn.layers.dropout` takes as `generator`: for numbers that are whole (None), or cut evenly along `dim`."""
        if dim is None:
            return self.shared
        return self._part(dim) if self.exact else self.own

    def drop(self, x: torch.Tensor, p: float, *, dim: int | None = None, training: bool = True) -> torch.Tensor:
        """Dropout of `x`, which is whole on every rank (dim None) or this rank's part along `dim`. Keeps one byte a number."""
        return dropout(x, p, training=training, generator=self.stream(dim))

    def _part(self, dim: int) -> Callable:
        def mask(shape, p, device):
            whole = list(shape)
            whole[dim] *= self.comm.size
            drawn = torch.empty(whole, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=self.shared)
            return drawn.narrow(dim, self.comm.rank * shape[dim], shape[dim]).clone()

        return mask
