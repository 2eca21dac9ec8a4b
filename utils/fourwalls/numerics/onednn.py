"""The integer product that torch's quantised layers use on CPUs, and the bit that it costs on processors without dot products.

oneDNN multiplies unsigned inputs with signed weights. Without an instruction that adds four products in 32 bits, it adds two in
16 bits first, and two large ones do not fit: they are cut off, silently. Inputs of 7 bits always fit. So the same call takes
inputs of 8 bits where that is exact and 7 where it is not; a probe with the largest values decides.

    255 * 127 * 2 = 64,770 > 32,767        but        127 * 127 * 2 = 32,258

Reference: oneDNN documentation, "Nuances of int8 computations"; Intel SDM, VPMADDUBSW.
"""

import functools

import torch

from .grids import Grid, check_finite
from .int8 import ROWS, row_scale

__all__ = ["bits_of_inputs", "is_available", "linear_onednn", "pack", "unsigned_product"]


def is_available() -> bool:
    """Whether this build of torch has oneDNN's quantised linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")


def pack(wq: torch.Tensor) -> torch.Tensor:
    """Weights (n, k) of int8 in the order that oneDNN likes best, once. ValueError where oneDNN is missing."""
    if not is_available():
        raise ValueError("this build of torch has no oneDNN; allowed: int_product, which needs none")
    return torch.ops.onednn.qlinear_prepack(wq.contiguous(), None)


def unsigned_product(xq: torch.Tensor, zero: int, packed: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    """xq (m, k) of uint8, zero point `zero`, packed weights, sw (n,) -> (m, n) of float32: (xq - zero) wq^T sw."""
    zeros = torch.zeros(len(sw), dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(xq, 1.0, zero, packed, sw, zeros, None, 1.0, 0, torch.float32, "none", [], "")


@functools.lru_cache(maxsize=1)
def bits_of_inputs() -> int:
    """8 where sums of the largest inputs and weights come out exactly on this processor, else 7."""
    k = 256
    wq = torch.full((32, k), 127, dtype=torch.int8)
    wq[:, ::3] = -127
    xq = torch.full((32, k), 255, dtype=torch.uint8)
    found = unsigned_product(xq, 0, pack(wq), torch.ones(32))
    return 8 if torch.equal(found.double(), xq.double() @ wq.double().t()) else 7


def linear_onednn(x, packed, sw, bias=None, *, bits: int | None = None, rows: int = ROWS) -> torch.Tensor:
    """x (m, k) of float32, weights from `pack`, sw (n,) -> (m, n): a scale for each row of x, `rows` rows at a time.

    bits: of the inputs; what `bits_of_inputs` allows here. ValueError for infinities and NaN.
    """
    bits = bits or bits_of_inputs()
    grid = Grid(bits)  # its scales: a row of one number has that number for its scale, whatever the bits
    high = grid.high
    y = torch.empty(len(x), len(sw), dtype=x.dtype)
    for start in range(0, len(x), rows):
        some = x[start : start + rows]
        scale = row_scale(some, grid)
        if not torch.isfinite(scale).all():
            check_finite(x)
        q = (some / scale).round_().clamp_(-high, high).add_(high + 1).to(torch.uint8)
        y[start : start + rows] = unsigned_product(q, high + 1, packed, sw).mul_(scale)
    return y if bias is None else y.add_(bias)
