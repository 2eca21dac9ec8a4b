"""Attention block by block: a softmax over keys that are never all there at once.

A softmax needs the largest score and the sum over all keys. Both can be kept up to date as keys come in: where a larger score
appears, what was summed so far is scaled down to it. Backward needs one number a query from all this, the logarithm of its sum;
the weights of a block are computed again from it.

    m' = max(m, max S),   l' = l e^(m - m') + sum e^(S - m'),   O' = O e^(m - m') + e^(S - m') V        out = O / l

Reference: Milakov and Gimelshein 2018 (arXiv:1805.02867), online softmax; Dao et al. 2022 (arXiv:2205.14135), the backward.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..cost.context import tiles
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


class RunningSoftmax:
    """The softmax of some queries over all the keys they have met so far, times the values: nothing of size s x s.

    Holds out (b, kv, g, s, d), and the largest score and the sum of each query, (b, kv, g, s, 1), all in at least float32.
    """

    def __init__(self, q: torch.Tensor):
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=wide)
        self.largest = torch.full_like(self.out[..., :1], -math.inf)
        self.total = torch.zeros_like(self.largest)

    def add(self, rows: slice, scores: torch.Tensor, v: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Queries `rows` meet some more keys: scores (b, kv, g, rows, n), values (b, kv, n, d)."""
        before = self.largest[..., rows, :]
        largest = torch.maximum(before, scores.amax(-1, keepdim=True))
        finite = _finite(largest)
        shrink = (before - finite).exp_()
        weights = scores.sub_(finite).exp_()  # in place: the scores are needed no more
        self.largest[..., rows, :] = largest
        self.total[..., rows, :] = self.total[..., rows, :] * shrink + weights.sum(-1, keepdim=True)
        weights = weights if kept is None else weights * kept
        self.out[..., rows, :] = self.out[..., rows, :] * shrink + times(weights.to(v.dtype), v)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, log of each query's sum of exponentials). A query that met no key at all: out 0, log -inf."""
        empty = self.total == 0
        out = self.out / self.total.masked_fill(empty, 1)
        return out, self.largest + self.total.log()


def _finite(x: torch.Tensor) -> torch.Tensor:
    """-inf replaced by 0, so that (-inf) - (-inf) does not become nan where a query has met no key yet."""
    return x.masked_fill(x == -math.inf, 0)


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (b, kv, g, s, m) @ y (b, kv, m, n) -> (b, kv, g, s, n): the heads of a group below each other, y not repeated."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


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
        weights = scores.sub_(_finite(log_sum[..., rows, :])).exp_()
        dropped = weights if kept is None else weights * kept
        g = grad[..., rows, :]
        both[1][..., :columns, :] += _transposed_times(dropped.to(g.dtype), g)
        dweights = times(g, v[..., :columns, :].transpose(-2, -1)).to(weights.dtype)
        dweights = dweights if kept is None else dweights * kept
        dscores = weights.mul_(dweights.sub_(delta[..., rows, :])).to(q.dtype)
        dq[..., rows, :] += times(dscores, k[..., :columns, :])
        both[0][..., :columns, :] += _transposed_times(dscores, q[..., rows, :])
    return both


def _transposed_times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (b, kv, g, s, n), y (b, kv, g, s, d) -> (b, kv, n, d): summed over the queries of the group, too."""
    return x.flatten(2, 3).transpose(-2, -1) @ y.flatten(2, 3)
