"""Tiled attention: queries meet keys tile by tile, and no matrix of s x s scores is ever built, forward or backward.

Plain attention writes s x s scores, reads them for the softmax, and keeps the weights for backward. In tiles each query keeps a
running largest score, sum and output; forward saves the output and one number a query, and backward computes the weights of a
tile again. FLOPs rise a little, memory falls from quadratic to linear. A tile that causality masks wholly is never computed.

    peak = bytes_per_token x s + (some tiles)        plain: some s^2 as well

Reference: Dao et al. 2022 (arXiv:2205.14135), FlashAttention; Rabe and Staats 2021 (arXiv:2112.05682); Dao 2023
(arXiv:2307.08691).
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch.autograd.function import once_differentiable

from ..memory.ledger import Ledger
from .tile import RunningSoftmax, score_gradients, times, transposed_times

__all__ = ["bytes_per_token", "peak_bytes", "plain_attention", "tiled_attention"]


def tiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, tile: int = 128) -> torch.Tensor:
    """q (b, a, s, d), k and v (b, kv, n, d) -> (b, a, s, d): softmax(Q K^T / sqrt(d)) V, `tile` queries and keys at a time.

    Query head i asks head i // (a / kv). causal: query i sees keys 0 to i, so n must be s. Sums are made in at least float32.
    Differentiable once; saves q, k, v, the output and one number a query. ValueError for shapes that do not fit, or tile below 1.
    """
    _check(q, k, v, causal)
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ValueError(f"tile is {tile!r}; allowed: a whole number of at least 1")
    return _Tiled.apply(q, k, v, causal, tile)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """The same in whole matrices: scores (b, a, s, n), their softmax, and the product with the values."""
    _check(q, k, v, causal)
    scores = times(_grouped(q / math.sqrt(q.shape[-1]), k), k.transpose(-2, -1))
    if causal:
        scores = scores.masked_fill(_later(slice(0, q.shape[2]), slice(0, k.shape[2]), q.device), -math.inf)
    return times(torch.softmax(scores, -1), v).flatten(1, 2)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, tile):
        queries = _grouped(q, k)  # (b, kv, g, s, d)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
        log_sum = torch.empty((*queries.shape[:-1], 1), dtype=wide, device=q.device)
        for rows in _tiles(q.shape[2], tile):
            mine = queries[..., rows, :] / math.sqrt(q.shape[-1])
            state = RunningSoftmax(mine)
            for columns in _tiles(k.shape[2], tile):
                if _seen(rows, columns, causal):
                    scores = _scores(mine, k, rows, columns, causal, wide)
                    state.add(slice(None), scores, v[..., columns, :])
            out[..., rows, :], log_sum[..., rows, :] = state.finish()
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.rest = causal, tile
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, log_sum = ctx.saved_tensors
        causal, tile = ctx.rest
        queries, grad = _grouped(q, k), _grouped(grad, k)
        delta, dq = torch.empty_like(log_sum), torch.zeros_like(out, dtype=log_sum.dtype)
        for rows in _tiles(q.shape[2], tile):
            products = grad[..., rows, :] * out[..., rows, :]
            torch.sum(products, -1, keepdim=True, dtype=log_sum.dtype, out=delta[..., rows, :])
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        for columns in _tiles(k.shape[2], tile):
            keys, values = k[..., columns, :], v[..., columns, :]
            of_keys, of_values = (torch.zeros_like(x, dtype=log_sum.dtype) for x in (keys, values))
            for rows in _tiles(q.shape[2], tile):
                if _seen(rows, columns, causal):
                    mine, up = queries[..., rows, :] / math.sqrt(q.shape[-1]), grad[..., rows, :]
                    scores = _scores(mine, k, rows, columns, causal, log_sum.dtype)
                    weights, dscores = score_gradients(scores, log_sum[..., rows, :], up, values, delta[..., rows, :])
                    of_values += transposed_times(weights.to(up.dtype), up)
                    dscores = dscores.to(q.dtype)
                    of_keys += transposed_times(dscores, mine)
                    dq[..., rows, :] += times(dscores, keys)
            dk[..., columns, :], dv[..., columns, :] = of_keys, of_values
        return dq.div_(math.sqrt(q.shape[-1])).to(q.dtype).flatten(1, 2), dk, dv, None, None


def _tiles(length: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, length)) for start in range(0, length, tile))


def _seen(rows: slice, columns: slice, causal: bool) -> bool:
    """Whether any query of the tile may look at any of its keys."""
    return not causal or columns.start < rows.stop


def _scores(mine: torch.Tensor, k: torch.Tensor, rows: slice, columns: slice, causal: bool, wide) -> torch.Tensor:
    """Scores of the scaled queries `mine` and the keys `columns`, -inf where a key comes after its query."""
    scores = times(mine, k[..., columns, :].transpose(-2, -1)).to(wide)
    if causal and columns.stop - 1 > rows.start:
        scores.masked_fill_(_later(rows, columns, k.device), -math.inf)
    return scores


def _later(rows: slice, columns: slice, device) -> torch.Tensor:
    """(rows, columns), True where the key comes after the query."""
    query, key = (torch.arange(of.start, of.stop, device=device) for of in (rows, columns))
    return key[None] > query[:, None]


def _grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(b, a, s, d) -> (b, kv, a/kv, s, d): the query heads that share a head of keys and values, together."""
    return q.unflatten(1, (k.shape[1], -1))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    fits = fits and min(q.shape[1], k.shape[1], q.shape[3]) > 0 and q.shape[1] % k.shape[1] == 0
    if not fits:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; allowed: q (b, a, s, d), k and v (b, kv, n, d), "
            "where kv divides a"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(f"q of {q.dtype}, k of {k.dtype}, v of {v.dtype}; allowed: one floating dtype for all three")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries and {k.shape[2]} keys; causal attention needs as many, or give causal=False")


def peak_bytes(fn: Callable, *tensors: torch.Tensor, backward: bool = False) -> int:
    """The most bytes alive at once while fn(*tensors) runs, `tensors` included; with `backward`, through its gradients, too.

    Counted storage by storage (memory.ledger); what a kernel allocates inside itself is not seen.
    """
    given = [t.detach().requires_grad_(backward) for t in tensors]
    live = []
    with Ledger(inputs=given, lines=False, on_change=live.append):
        out = fn(*given)
        if backward:
            torch.autograd.grad(out, given, torch.ones_like(out))
    return max(live)


def bytes_per_token(
    d: int, *, heads: int = 1, kv_heads: int | None = None, batch: int = 1, itemsize: int = 4, backward: bool = False
) -> int:
    """The slope of tiled attention's peak: bytes for one more token of each sequence, from whole tiles on.

    Forward: queries, keys, values, output, a log-sum a query. Backward: the gradients of these, and a delta a query.
    itemsize 4 or 8 (16-bit inputs keep log-sums and dq in float32, which is not counted here).
    """
    if itemsize not in (4, 8):
        raise ValueError(f"itemsize is {itemsize!r}; allowed: 4 (float32) or 8 (float64)")
    kv_heads = heads if kv_heads is None else kv_heads
    forward = 2 * heads * d + 2 * kv_heads * d + heads
    return batch * itemsize * forward * (2 if backward else 1)
