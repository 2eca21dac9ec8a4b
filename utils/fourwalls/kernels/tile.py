"""One tile of attention: a softmax over keys that are never all there at once, and its backward from one number a query.

A softmax needs the largest score and the sum over all keys. Both can be kept up to date as keys come in: where a larger score
appears, what was summed so far is scaled down to it. Backward needs of all this only the logarithm of the sum: the weights of a
tile are computed again from it. Keys may come in tiles of one processor (attention.py) or from other ranks.

    m' = max(m, max S),   l' = l e^(m - m') + sum e^(S - m'),   O' = O e^(m - m') + e^(S - m') V        out = O / l
    P = e^(S - log l - m),   dV = P^T dO,   dS = P (dO V^T - delta),   delta = sum dO O

Reference: Milakov and Gimelshein 2018 (arXiv:1805.02867), online softmax; Dao et al. 2022 (arXiv:2205.14135), the backward.
"""

import math

import torch

__all__ = ["RunningSoftmax", "finite", "score_gradients", "times", "transposed_times"]


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
        """Queries `rows` meet some more keys: scores (b, kv, g, rows, n), which are used up, values (b, kv, n, d)."""
        before = self.largest[..., rows, :]
        largest = torch.maximum(before, scores.amax(-1, keepdim=True))
        top = finite(largest)
        shrink = (before - top).exp_()
        weights = scores.sub_(top).exp_()  # in place: the scores are needed no more
        self.largest[..., rows, :] = largest
        self.total[..., rows, :] = self.total[..., rows, :] * shrink + weights.sum(-1, keepdim=True)
        weights = weights if kept is None else weights * kept
        self.out[..., rows, :] = self.out[..., rows, :] * shrink + times(weights.to(v.dtype), v)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, log of each query's sum of exponentials). A query that met no key at all: out 0, log -inf."""
        empty = self.total == 0
        out = self.out / self.total.masked_fill(empty, 1)
        return out, self.largest + self.total.log()


def finite(x: torch.Tensor) -> torch.Tensor:
    """-inf replaced by 0, so that (-inf) - (-inf) does not become nan where a query has met no key yet."""
    return x.masked_fill(x == -math.inf, 0)


def score_gradients(
    scores: torch.Tensor,
    log_sum: torch.Tensor,
    grad: torch.Tensor,
    v: torch.Tensor,
    delta: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights after dropout, gradient of the scores), (b, kv, g, s, n) each; the scores are used up.

    log_sum and delta (b, kv, g, s, 1), grad (b, kv, g, s, d) of the output, v (b, kv, n, d), kept: scale of what stays, or None.
    """
    weights = scores.sub_(finite(log_sum)).exp_()
    dropped = weights if kept is None else weights * kept
    dweights = times(grad, v.transpose(-2, -1)).to(weights.dtype)
    dweights = dweights if kept is None else dweights * kept
    return dropped, dweights.sub_(delta).mul_(weights)


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (b, kv, g, s, m) @ y (b, kv, m, n) -> (b, kv, g, s, n): the heads of a group below each other, y not repeated."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def transposed_times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (b, kv, g, s, n), y (b, kv, g, s, d) -> (b, kv, n, d): summed over the queries of the group, too."""
    return x.flatten(2, 3).transpose(-2, -1) @ y.flatten(2, 3)
