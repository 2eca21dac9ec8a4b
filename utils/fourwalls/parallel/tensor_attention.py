"""Attention on ranks that share it: each takes some of the heads, whole, and nobody needs another's scores.

A head is a slice of the outputs of the query, key and value products, so these are cut by columns, at the borders of heads; the
product that joins the heads is cut by rows. Grouped queries stay with the key and value heads that they ask, so t must divide
both numbers of heads.

    rank r: heads r a/t to (r + 1) a/t        sent: as for the MLP, one all-reduce of s b h numbers each way

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..nn.attention import attend, check_heads, merge_heads, split_heads
from ..nn.rotary import rotate
from ..ranks.comm import Comm
from .tensor import ColumnLinear, Region, RowLinear
from .tensor_dropout import Streams

__all__ = ["TensorAttention", "check_attention", "legal_sizes"]


def legal_sizes(*shared: int) -> list[int]:
    """The t that divide all of the given sizes."""
    most = math.gcd(*shared)
    return [t for t in range(1, most + 1) if most % t == 0]


def check_attention(heads: int, kv_heads: int, t: int) -> None:
    """ValueError, with all legal t and the way out, unless t ranks can share the heads. Needs no ranks."""
    if not isinstance(t, int) or isinstance(t, bool) or t < 1:
        raise ValueError(f"t is {t!r}; it is a whole number of at least 1")
    if heads % t or kv_heads % t:
        what = f"{heads} heads" if kv_heads == heads else f"{heads} heads with {kv_heads} key and value heads"
        raise ValueError(
            f"{what} cannot be shared by t {t}; legal t: {', '.join(map(str, legal_sizes(heads, kv_heads)))}. "
            "For more ranks cut another axis: p (layers), c (the sequence) or d (the batch)"
        )


class TensorAttention(nn.Module):
    """`nn.attention.Attention` on t ranks. (b, s, h) -> (b, s, h); each rank attends with heads/t heads.

    `core`: as in Attention. streams: where dropout draws. One all-reduce each way. ValueError for heads that t does not divide,
    and for torch's fused kernel with dropout, whose mask would be drawn from the wrong stream.
    """

    core: Callable | None = None

    def __init__(
        self,
        comm: Comm,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rotary: bool = False,
        bias=True,
        p: float = 0.0,
        fused: bool = False,
        std=0.02,
        out_std=0.02,
        region: Region | None = None,
        streams: Streams | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        kv_heads = check_heads(width, heads, kv_heads, rotary=rotary)
        check_attention(heads, kv_heads, comm.size)
        if fused and p:
            raise ValueError("fused attention draws its dropout from torch's default stream; allowed here: fused, or dropout")
        self.heads, self.kv_heads, self.rotary, self.fused, self.p = heads, kv_heads, rotary, fused, p
        self.region, self.streams = region or Region(comm), streams or Streams(comm)
        self.heads_here, self.kv_here = heads // comm.size, kv_heads // comm.size
        kinds = {"bias": bias, "region": self.region, "device": device, "dtype": dtype}
        kv_width = width // heads * kv_heads
        self.query = ColumnLinear(comm, width, width, std=std, **kinds)
        self.key = ColumnLinear(comm, width, kv_width, std=std, **kinds)
        self.value = ColumnLinear(comm, width, kv_width, std=std, **kinds)
        self.output = RowLinear(comm, width, width, std=out_std, **kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.region.enter(x, [self.query, self.key, self.value])  # one entrance for three products
        q = split_heads(q, self.heads_here)  # (b, a/t, s, d)
        k, v = split_heads(k, self.kv_here), split_heads(v, self.kv_here)  # (b, kv/t, s, d)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_here != self.heads_here)
        else:
            stream = self.streams.stream(1)  # heads are cut, so each rank draws its own
            mixed = (self.core or attend)(q, k, v, p=self.p, training=self.training, generator=stream)
        return self.output(merge_heads(mixed))
