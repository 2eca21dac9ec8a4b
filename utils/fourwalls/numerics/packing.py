"""Two weights in a byte: 4-bit integers packed, a scale for each group, and a layer that unpacks them as it multiplies.

Memory counts integers and scales alike: one scale of 16 bits for every 64 weights adds a quarter of a bit to each. The scale is a
bfloat16, which has float32's range, so that no weight is too large or too small for it, and weights are rounded with the very
scale that is stored.

    bits a weight = 4 + 16 / group  (+ what uneven sizes leave empty)

Reference: Frantar et al. 2022 (arXiv:2210.17323); Dettmers et al. 2023 (arXiv:2305.14314), section 3, on the cost of scales.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .granularity import expand_scale
from .grids import Grid
from .int8 import check_layer
from .quantize import Quantized, quantize

__all__ = ["Packed", "WeightOnlyLinear", "pack4", "unpack4"]

GRID = Grid(4)
GROUP = 64


@dataclass(frozen=True)
class Packed:
    """data (rows, ceil(columns / 2)) uint8: the even column in the low half; scale (rows, groups) bfloat16."""

    data: torch.Tensor
    scale: torch.Tensor
    columns: int
    group: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(1, len(self.data) * self.columns)


@torch.no_grad()
def pack4(w: torch.Tensor | Quantized, group: int = GROUP) -> Packed:
    """w (n, k) floats, or what `quantize` or `gptq` made of it with 4 symmetric bits and this group -> Packed.

    A group of 32 or more costs at most 4.5 bits a weight, scales included, where it divides k. What is quantised already keeps
    its integers, though its scales are rounded to bfloat16. ValueError for another form, and for scales beyond bfloat16.
    """
    q = w if isinstance(w, Quantized) else quantize(w, 4, group=group)
    if q.grid != GRID or q.group != group or q.values.dim() != 2:
        raise ValueError(f"w is {q.grid}, group {q.group}, {q.values.dim()} dims; allowed: {GRID}, group {group}, 2 dims")
    scale = q.scale.to(torch.bfloat16)
    if not torch.isfinite(scale).all():
        raise ValueError(f"a scale of {float(q.scale.max()):.3g} is beyond bfloat16; allowed: weights below about 3e38")
    values = q.values
    if not isinstance(w, Quantized):  # round again with the scale as it is stored
        values = GRID.snap(w.to(torch.float32), expand_scale(scale.float(), w.shape, group)).to(torch.int8)
    half = F.pad(values + 8, (0, values.shape[1] % 2)).to(torch.uint8)
    return Packed(half[:, ::2] | half[:, 1::2] << 4, scale, values.shape[1], group)


@torch.no_grad()
def unpack4(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed -> (n, k) floats."""
    halves = torch.stack([packed.data & 15, packed.data >> 4], -1).flatten(1)[:, : packed.columns]
    values = halves.to(torch.float32) - 8
    return (values * expand_scale(packed.scale.float(), values.shape, packed.group)).to(dtype)


class WeightOnlyLinear(nn.Module):
    """y = x W^T + b with 4-bit weights that become floats only while they are multiplied. (..., k) -> (..., n).

    What it saves is memory, and the traffic of reading weights, which decides where few rows come at a time; the products are
    those of floats, and unpacking is added.
    """

    def __init__(self, layer: nn.Module, group: int = GROUP, *, weight: Quantized | None = None):
        super().__init__()
        check_layer(layer)
        packed = pack4(layer.weight.detach() if weight is None else weight, group)
        self.register_buffer("data", packed.data)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self.columns, self.group = packed.columns, group

    @property
    def packed(self) -> Packed:
        return Packed(self.data, self.scale, self.columns, self.group)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, unpack4(self.packed, x.dtype), self.bias)
