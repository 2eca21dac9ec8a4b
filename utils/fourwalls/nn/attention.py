"""Causal self-attention with several heads, written out: every token asks all earlier ones.

Queries, keys and values are three products of the same input; each head compares its slice of them, drops, and mixes values; a
last product joins the heads. The (s, s) matrices of scores are what memory formulas call 5 a s^2 b, and what the fused kernel
never stores. Two options: several query heads share one head of keys and values (grouped queries), and positions enter as
rotations of queries and keys (rotary.py).

    out = concat over heads of softmax(mask(Q K^T / sqrt(d))) V,  then W_o

Reference: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135) for the fused form; Ainslie et al. 2023
(arXiv:2305.13245) for grouped queries.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..cost.shape import nearest_multiples
from .layers import Linear, dropout
from .rotary import rotate

__all__ = ["Attention", "attend", "causal_mask", "check_heads", "merge_heads", "split_heads"]


def check_heads(width: int, heads: int, kv_heads: int | None = None, *, rotary: bool = False) -> int:
    """The number of key and value heads (None: as many as heads). ValueError, with legal sizes, for heads that do not fit."""
    if heads < 1 or width % heads:
        fits = [a for a in range(1, width + 1) if width % a == 0]
        near = min(fits, key=lambda a: abs(a - heads))
        raise ValueError(
            f"width {width} is no multiple of heads {heads}; nearest legal: "
            f"width {nearest_multiples(width, max(heads, 1))}, or heads {near}"
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if not isinstance(kv_heads, int) or isinstance(kv_heads, bool) or kv_heads < 1 or heads % kv_heads:
        fits = [k for k in range(1, heads + 1) if heads % k == 0]
        raise ValueError(
            f"kv_heads is {kv_heads!r}, but {heads} query heads must be shared out evenly; allowed: {', '.join(map(str, fits))}"
        )
    if rotary and width // heads % 2:
        raise ValueError(f"rotary positions turn pairs of numbers, but a head is {width // heads} wide; allowed: an even width")
    return kv_heads


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, s, heads * d) -> (b, heads, s, d), a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """(b, heads, s, d) -> (b, s, heads * d), the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def causal_mask(length: int, *, device=None, dtype=None) -> torch.Tensor:
    """(s, s): 0 where a token may look, -inf above the diagonal. It is added, so backward keeps nothing of it."""
    return torch.full((length, length), -math.inf, device=device, dtype=dtype).triu_(1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, p: float = 0.0, training: bool = True, generator=None
) -> torch.Tensor:
    """The attention core: q (b, a, s, d), k and v (b, kv, s, d) -> (b, a, s, d), causal; query head i asks head i // (a / kv).
    `p` drops weights. Keeps q, k, v and up to 5 a s^2 b bytes in 16 bits.
    """
    scores = _by_group(q / math.sqrt(q.shape[-1]), k.transpose(-2, -1))  # (b, a, s, s)
    scores = scores + causal_mask(q.shape[-2], device=q.device, dtype=q.dtype)
    weights = torch.softmax(scores, dim=-1)
    return _by_group(dropout(weights, p, training=training, generator=generator), v)


def _by_group(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (b, a, s, m) @ y (b, kv, m, n) -> (b, a, s, n). The heads of a group stand below each other as rows of one product, so
    that y is neither repeated nor kept more than once.
    """
    heads, groups = x.shape[1], y.shape[1]
    if heads == groups:
        return x @ y
    return (x.reshape(x.shape[0], groups, -1, x.shape[-1]) @ y).reshape(*x.shape[:-1], y.shape[-1])


class Attention(nn.Module):
    """Multi-head causal self-attention. `fused` uses torch's kernel, which keeps no (s, s) matrix where it can.

    query, output: Linear(width, width); key, value: Linear(width, kv_heads * d). `out_std` is the output projection's initial
    standard deviation. kv_heads: heads of keys and values (None: as many as heads). rotary: positions as rotations. `core`, None
    or a function like `attend`, takes the place of the attention core (to compute it again in backward, say). ValueError for
    heads that do not fit.
    """

    core: Callable | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rotary: bool = False,
        bias=True,
        p=0.0,
        fused=False,
        std=0.02,
        out_std=0.02,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.heads, self.p, self.fused, self.rotary = heads, p, fused, rotary
        self.kv_heads = check_heads(width, heads, kv_heads, rotary=rotary)
        kv_width = width // heads * self.kv_heads
        kinds = {"bias": bias, "device": device, "dtype": dtype}
        self.query = Linear(width, width, std=std, **kinds)
        self.key = Linear(width, kv_width, std=std, **kinds)
        self.value = Linear(width, kv_width, std=std, **kinds)
        self.output = Linear(width, width, std=out_std, **kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = split_heads(self.query(x), self.heads)  # (b, a, s, d)
        k, v = (split_heads(layer(x), self.kv_heads) for layer in (self.key, self.value))  # (b, kv, s, d)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.fused:
            p = self.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=self.kv_heads != self.heads)
        else:
            mixed = (self.core or attend)(q, k, v, p=self.p, training=self.training)
        return self.output(merge_heads(mixed))  # (b, s, h)
