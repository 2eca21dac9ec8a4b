"""Dropout that belongs to places, not to ranks: the mask of a number follows from a salt and from where the number stands.

Tokens are shared, so each rank must drop other places; attention weights are computed again in backward, block by block, and
must lose the same ones. A hash of (salt, place) gives both, keeps nothing, and gives the same masks for every c, cut and form, on
every device. The salt is one number a call, drawn by all ranks alike.

    a number stays  <=>  hash(salt, place) >= p        place = ((sequence * heads + head) * s + query) * s + key,  or of a token

Reference: Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"); Steele et al. 2014 (SplitMix), whose mixer it is.
"""

from collections.abc import Callable

import torch

from ..nn.layers import Dropout, dropout
from ..ranks.comm import Comm
from .context_cuts import positions

__all__ = ["ContextStreams", "TokenDropout", "place_mask", "token_mask", "weight_mask"]


def place_mask(salt: int, p: float, *axes: tuple[torch.Tensor, int]) -> torch.Tensor:
    """What stays, one axis of the result for each of `axes`: (where its rows stand, how many places the axis has in all)."""
    place = torch.zeros((), dtype=torch.int64, device=axes[0][0].device)
    for where, size in axes:
        place = place[..., None] * size + where
    x = place * _signed(0x9E3779B97F4A7C15) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 11) >= int(p * 2**53)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by of 64 bits without a sign."""
    return (x >> by) & (2 ** (64 - by) - 1)


def token_mask(salt: int, p: float, shape, held: torch.Tensor, length: int) -> torch.Tensor:
    """For numbers of `shape` (b, tokens, h), the tokens those at the positions `held` of `length`."""
    b, _, h = shape
    rows, columns = torch.arange(b, device=held.device), torch.arange(h, device=held.device)
    return place_mask(salt, p, (rows, b), (held, length), (columns, h))


def weight_mask(
    salt: int, p: float, b: int, heads: range, of: int, length: int, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """For attention weights (b, heads, queries, keys) of some of the `of` heads, at these positions of `length`."""
    device = queries.device
    rows, some = torch.arange(b, device=device), torch.arange(heads.start, heads.stop, device=device)
    return place_mask(salt, p, (rows, b), (some, of), (queries, length), (keys, length))


class ContextStreams:
    """The salts of one context rank: all ranks of a group have the same `seed`, copies with other data need another.

    `generators`: what a block that is computed again in backward must restore.
    """

    def __init__(self, seed: int = 0):
        self.shared = torch.Generator().manual_seed(seed)

    @property
    def generators(self) -> tuple[torch.Generator]:
        return (self.shared,)

    def salt(self) -> int:
        """A number for one call, the same on all ranks."""
        return int(torch.randint(2**62, (), generator=self.shared))


class TokenDropout(Dropout):
    """`nn.layers.Dropout` of this rank's tokens (b, s/c, h). `salt()` gives a number, the same on all ranks."""

    def __init__(self, p: float, comm: Comm, cut: str, salt: Callable[[], int]):
        super().__init__(p)
        self.comm, self.cut, self.salt = comm, cut, salt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, training=self.training, generator=self._mask)

    def _mask(self, shape, p, device):
        c = self.comm.size
        held = positions(self.cut, shape[1] * c, c, self.comm.rank, device=device)
        return token_mask(self.salt(), p, shape, held, shape[1] * c)
