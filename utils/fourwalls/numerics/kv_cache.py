"""Keys and values of earlier tokens in 8 bits: what a model that writes must keep for every token it has seen.

A GPT that writes token after token computes keys and values once and keeps them. They are rounded as they come, with one scale
for each token and head, and become floats again only while attention reads them. The head's width decides what the scales cost.

    bytes a token = 2 L kv_heads (d + 2)   instead of   8 L kv_heads d          with bfloat16 scales, beside float32

Reference: Sheng et al. 2023 (FlexGen, arXiv:2303.06865), section 5, for compressing this cache.
"""

import math

import torch

from ..nn.attention import attend, merge_heads, split_heads
from ..nn.gpt import GPT
from .grids import Grid, check_finite

__all__ = ["Cache", "decode", "rounded_core"]

GRID = Grid(8)


def _round(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., d) -> int8 values and bfloat16 scales (..., 1); the values are rounded with the scale as it is stored."""
    check_finite(x, "keys or values")
    scale = GRID.place(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))[0].to(torch.bfloat16)
    return GRID.snap(x, scale.to(x.dtype)).to(torch.int8), scale


class Cache:
    """Keys and values of one layer: append(k, v), each (b, heads, new tokens, d); read() -> both, of all tokens so far, in the
    dtype that they came in.

    bits: 8, or None to keep floats as they come. nbytes counts integers and scales.
    """

    def __init__(self, bits: int | None = 8):
        if bits not in (8, None):
            raise ValueError(f"bits is {bits!r}; allowed: 8, or None for floats")
        self.bits, self._parts, self._dtype = bits, ([], []), torch.float32

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if k.shape != v.shape:
            raise ValueError(f"keys are {tuple(k.shape)}, values {tuple(v.shape)}; allowed: equal shapes (b, heads, tokens, d)")
        held = self._parts[0][0][0].shape if self._parts[0] else k.shape
        if (*k.shape[:2], k.shape[3:]) != (*held[:2], held[3:]):
            raise ValueError(f"keys are {tuple(k.shape)}, those in the cache {tuple(held)}; allowed: only the tokens differ")
        self._dtype = k.dtype
        for parts, x in zip(self._parts, (k, v), strict=True):
            parts.append((x, None) if self.bits is None else _round(x))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._parts[0]:
            raise ValueError("the cache is empty; allowed: read() after append(k, v)")
        k, v = (torch.cat([x if scale is None else x * scale.float() for x, scale in parts], 2) for parts in self._parts)
        return k.to(self._dtype), v.to(self._dtype)

    @property
    def tokens(self) -> int:
        return sum(x.shape[2] for x, _ in self._parts[0])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for parts in self._parts for pair in parts for t in pair if t is not None)


@torch.no_grad()
def decode(model: GPT, tokens: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
    """The logits (b, s', V) of new tokens (b, s') that follow those in `caches`, one Cache a layer, which grow by them.

    With caches of floats this equals model(all tokens)[:, -s':] within rounding. ValueError for a model with rotary positions,
    and beyond the model's length.
    """
    if model.positions is None:
        raise ValueError("decode handles models with a table of positions (rotary=False)")
    if len(caches) != len(model.blocks):
        raise ValueError(f"{len(caches)} caches for {len(model.blocks)} layers; allowed: one a layer")
    start, new = caches[0].tokens, tokens.shape[1]
    if start + new > model.config.length:
        raise ValueError(f"{start} tokens and {new} more; allowed: at most {model.config.length} in all")
    x = model.tokens(tokens) + model.positions.weight[start : start + new]
    for block, cache in zip(model.blocks, caches, strict=True):
        attention, normed = block.attention, block.norm1(x)
        q = split_heads(attention.query(normed), attention.heads)
        cache.append(*(split_heads(layer(normed), attention.kv_heads) for layer in (attention.key, attention.value)))
        k, v = (t.repeat_interleave(attention.heads // attention.kv_heads, 1) for t in cache.read())
        mask = torch.full((new, start + new), -math.inf, dtype=q.dtype).triu_(start + 1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask, -1)
        x = x + attention.output(merge_heads(weights @ v))
        x = x + block.mlp(block.norm2(x))
    return model.logits(x)


def rounded_core(q, k, v, **options):
    """`attend` over keys and values that have been through the cache: Attention.core, to evaluate whole texts at once."""
    cache = Cache()
    cache.append(k, v)
    return attend(q, *cache.read(), **options)
