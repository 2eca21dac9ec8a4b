"""Attention block by block: a rank's queries meet keys that are never all there at once.

The mathematics of one tile, a running softmax forward and the weights computed again backward, is that of a fused kernel on one
device (kernels.tile). Here blocks of keys come from other ranks, at positions that depend on the cut: which tiles must be
computed, and which of their scores a causal mask takes away, follows from the positions.

    out, log sum <- block after block of (K, V)        dQ += dS K,   (dK, dV) of a block: its own sums over the queries

Reference: Milakov and Gimelshein 2018 (arXiv:1805.02867), online softmax; Dao et al. 2022 (arXiv:2205.14135), the backward.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..cost.context import tiles
from ..kernels.tile import RunningSoftmax, score_gradients, times, transposed_times
from .context_cuts import places

__all__ = ["Blocks", "RunningSoftmax", "attend_block", "block_gradients"]


class Blocks:
    """What one rank's queries need of blocks of keys: tiles, masks, and a count of what is computed.

    queries: the positions of the queries, in rising order. rows: queries of a tile where a block is partly masked. p: dropout
    of weights; `draw(queries, keys)` gives the mask (b, a, queries, keys) of what stays at these positions, each time the same.
    work: counts scores computed under "forward" and "backward", for all heads and sequences; blocks under "skipped".
    """

    def __init__(
        self,
        queries: Sequence[range],
        *,
        causal: bool = True,
        rows: int = 128,
        p: float = 0.0,
        draw: Callable | None = None,
        work: Counter | None = None,
    ):
        self.queries, self.causal, self.rows, self.p, self.draw = queries, causal, rows, p, draw
        self.work = Counter() if work is None else work

    def tiles(self, keys: Sequence[range]):
        return tiles(self.queries, keys, causal=self.causal, rows=self.rows)

    def each(self, q: torch.Tensor, k: torch.Tensor, keys: Sequence[range], way: str):
        """For each tile: (tile, scores (b, kv, g, rows, columns) in at least float32, scale of what stays or None).

        q (b, kv, g, s, d) is scaled already; k (b, kv, n, d).
        """
        found = self.tiles(keys)
        self.work["skipped"] += not found
        wide = torch.promote_types(q.dtype, torch.float32)
        mine, theirs = (places(of, device=q.device) if found else None for of in (self.queries, keys))
        for tile in found:
            rows, columns = slice(tile.first, tile.last), tile.columns
            scores = times(q[..., rows, :], k[..., :columns, :].transpose(-2, -1)).to(wide)
            if tile.open < columns:
                later = theirs[None, tile.open : columns] > mine[rows, None]
                scores[..., tile.open :].masked_fill_(later, -math.inf)
            self.work[way] += scores.numel()
            kept = None
            if self.p:
                stays = self.draw(mine[rows], theirs[:columns])
                kept = stays.unflatten(1, q.shape[1:3]).to(wide) / (1 - self.p)
            yield tile, scores, kept


def attend_block(blocks: Blocks, state: RunningSoftmax, q, k, v, keys: Sequence[range]) -> None:
    """The queries meet one block of keys and values, (b, kv, n, d) each. q (b, kv, g, s, d), scaled by 1/sqrt(d)."""
    for tile, scores, kept in blocks.each(q, k, keys, "forward"):
        state.add(slice(tile.first, tile.last), scores, v[..., : tile.columns, :], kept)


def block_gradients(blocks: Blocks, q, k, v, grad, log_sum, delta, dq: torch.Tensor, keys: Sequence[range]):
    """What one block adds: to dq (b, kv, g, s, d) in place, and its own (dk, dv), (2, b, kv, n, d), or None where it is skipped.

    grad: of the output. log_sum: from forward. delta (b, kv, g, s, 1): sum of grad times output. dq is that of the scaled q.
    """
    both = None
    for tile, scores, kept in blocks.each(q, k, keys, "backward"):
        if both is None:
            both = dq.new_zeros(2, *k.shape)
        rows, columns = slice(tile.first, tile.last), tile.columns
        g, values = grad[..., rows, :], v[..., :columns, :]
        weights, dscores = score_gradients(scores, log_sum[..., rows, :], g, values, delta[..., rows, :], kept)
        both[1][..., :columns, :] += transposed_times(weights.to(g.dtype), g)
        dscores = dscores.to(q.dtype)
        dq[..., rows, :] += times(dscores, k[..., :columns, :])
        both[0][..., :columns, :] += transposed_times(dscores, q[..., rows, :])
    return both
