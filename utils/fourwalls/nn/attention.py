"""Causal self-attention with several heads, written out: every token asks all earlier ones.

Queries, keys and values are three products of the same input; each head compares its slice of them, drops, and mixes values; a
last product joins the heads. The (s, s) matrices of scores are what memory formulas call 5 a s^2 b, and what the fused kernel
never stores.

    out = concat over heads of softmax(mask(Q K^T / sqrt(d))) V,  then W_o

Reference: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135) for the fused form.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .layers import Linear, dropout

__all__ = ["Attention", "attend", "causal_mask", "merge_heads", "split_heads"]


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
    """The attention core: q, k, v (b, a, s, d) -> (b, a, s, d), causal. `p` drops weights. Keeps q, k, v and up to 5 a s^2 b
    bytes in 16 bits.
    """
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (b, a, s, s)
    scores = scores + causal_mask(q.shape[-2], device=q.device, dtype=q.dtype)
    weights = torch.softmax(scores, dim=-1)
    return dropout(weights, p, training=training, generator=generator) @ v


class Attention(nn.Module):
    """Multi-head causal self-attention. `fused` uses torch's kernel, which keeps no (s, s) matrix where it can.

    query, key, value, output: Linear(width, width). `out_std` is the output projection's initial standard deviation.
    """

    def __init__(self, width: int, heads: int, *, bias=True, p=0.0, fused=False, std=0.02, out_std=0.02, device=None, dtype=None):
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.heads, self.p, self.fused = heads, p, fused
        kinds = {"bias": bias, "device": device, "dtype": dtype}
        self.query = Linear(width, width, std=std, **kinds)
        self.key = Linear(width, width, std=std, **kinds)
        self.value = Linear(width, width, std=std, **kinds)
        self.output = Linear(width, width, std=out_std, **kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value))  # (b, a, s, d)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        else:
            mixed = attend(q, k, v, p=self.p, training=self.training)
        return self.output(merge_heads(mixed))  # (b, s, h)
