"""A linear layer that multiplies integers: quantise before, integer product, dequantise after.

Both operands are rounded with scales along dims that the product keeps, so the scales can be taken out of the sum and only
integers are left inside. Fake quantization gives the same numbers through floats, with more passes, and so cannot be faster. The
conversions are passes over memory too: done in blocks of rows they stay in the processor's cache.

    y[i, o] = sx[i] sw[o] (sum over k of xq[i, k] wq[o, k]) + bias[o]

Reference: Jacob et al. 2018 (arXiv:1712.05877); Dettmers et al. 2022 (arXiv:2208.07339), section 3.1, for a scale per row.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .grids import Grid, check_finite, check_float
from .product import LONGEST_INT32, int_product
from .quantize import Quantized, fake_quantize, quantize

__all__ = ["ROWS", "FakeLinear", "Int8Linear", "int8_linear", "linear_in_blocks", "row_scale"]

ROWS = 256  # rows of a block: with 2,048 columns, 2 MiB of floats
GRID = Grid(8)


def int8_linear(xq, sx, wq, sw, bias=None, *, zero=0, how: str = "integer", dtype=torch.float32) -> torch.Tensor:
    """xq (m, k) and wq (n, k) of int8 -> (m, n) of `dtype`: the integer product, then the scales, then the bias.

    sx: one number or (m, 1), a scale for each row of x. sw: one number, (n,) or (n, 1), a scale for each row of w. zero: the zero
    point of x, one number or (m, 1); x of uint8 is shifted to int8 with it. how: as `int_product`. Nothing of size (m, k) or (n,
    k) is ever a float. Scales are applied in at least float32, whatever dtype is asked for: five products of 127 by 127 are
    beyond fp16. ValueError for scales along k: they cannot be taken out of the sum.
    """
    given, dtype = dtype, torch.promote_types(dtype, torch.float32)
    if xq.dtype == torch.uint8:
        xq, zero = (xq.to(torch.int16) - 128).to(torch.int8), torch.as_tensor(zero) - 128
    acc = int_product(xq, wq, how=how)
    sx = _scale_of("sx", sx, xq, dtype)
    sw = _scale_of("sw", sw, wq, dtype).reshape(1, -1)
    if isinstance(zero, torch.Tensor) or zero:
        sums = wq.sum(1, dtype=torch.int64)
        acc = acc - torch.as_tensor(zero).to(torch.int64) * sums
    y = acc.to(dtype).mul_(sx).mul_(sw)
    return (y if bias is None else y.add_(bias)).to(given)


def _scale_of(name, scale, q, dtype):
    scale = torch.as_tensor(scale, dtype=dtype)
    rows = q.shape[0]
    if scale.numel() != 1 and tuple(scale.shape) not in ((rows, 1), *(((rows,),) if name == "sw" else ())):
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}; allowed: one number, or ({rows}, 1), one for each row. A scale along the "
            "dim that is summed over cannot be taken out of the sum"
        )
    return scale


def row_scale(x: torch.Tensor, grid: Grid = GRID) -> torch.Tensor:
    """(m, k) -> (m, 1): the scale of each row, as `quantize(x, bits, axis=0)` has it."""
    if x.shape[1] == 0:
        return torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    return grid.place(x.amin(1, keepdim=True), x.amax(1, keepdim=True))[0]


def linear_in_blocks(x, wq, sw, bias=None, *, rows: int | None = ROWS, how: str = "integer") -> torch.Tensor:
    """x (m, k) of floats, wq (n, k) of int8, sw (n, 1) -> (m, n): all three steps, `rows` rows at a time (None: all at once).

    The same bits for every `rows`: each row has its own scale. ValueError for infinities and NaN.
    """
    check_float(x)
    given, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    m, n = len(x), len(wq)
    if rows is not None and rows < 1:
        raise ValueError(f"rows is {rows!r}; at least 1, or None for all rows at once")
    block = max(1, m if rows is None else min(rows, m))
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    floats = torch.empty(block, x.shape[1], dtype=x.dtype, device=x.device)
    q = torch.empty(block, x.shape[1], dtype=torch.int8, device=x.device)
    acc = torch.empty(block, n, dtype=torch.int32, device=x.device)
    sw = sw.reshape(1, -1)
    for start in range(0, m, block):
        some = x[start : start + block]
        count = len(some)
        scale = row_scale(some)
        if not torch.isfinite(scale).all():
            check_finite(x)
        torch.div(some, scale, out=floats[:count])
        q[:count].copy_(floats[:count].round_().clamp_(GRID.low, GRID.high))
        product = int_product(q[:count], wq, how=how, out=acc[:count] if x.shape[1] <= LONGEST_INT32 else None)
        part = y[start : start + block].copy_(product).mul_(scale).mul_(sw)
        if bias is not None:
            part.add_(bias)
    return y.to(given)


class Int8Linear(nn.Module):
    """y = x W^T + b with int8 weights (a scale for each output) and inputs rounded as they come (a scale for each row).

    Int8Linear.of(layer) takes the weights of a linear layer. It holds k n bytes and 4 n of scales, and has no gradient. (..., k)
    -> (..., n).
    """

    def __init__(self, weight: Quantized, bias: torch.Tensor | None = None, *, rows: int | None = ROWS, how: str = "auto"):
        super().__init__()
        n = weight.values.shape[0]
        if weight.grid != GRID or weight.scale.numel() not in (1, n):
            raise ValueError(f"the weight is {weight.grid}, axis {weight.axis}; allowed: symmetric int8, axis 0 or None")
        self.register_buffer("values", weight.values)
        self.register_buffer("scale", weight.scale.expand(n, 1).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.rows, self.how = rows, how

    @classmethod
    def of(cls, layer: nn.Module, **options) -> "Int8Linear":
        check_layer(layer)
        return cls(quantize(layer.weight.detach(), 8, 0), layer.bias, **options)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear_in_blocks(x.reshape(-1, x.shape[-1]), self.values, self.scale, self.bias, rows=self.rows, how=self.how)
        return y.view(*x.shape[:-1], len(self.values))


class FakeLinear(nn.Module):
    """The same numbers through floats: inputs and weights are rounded to the grid and back, then multiplied as floats.

    bits, and axis or group, of weights (w_) and inputs (x_); None for bits leaves that side as it is. x_axis: 0 is a scale for
    each row (token), 1 for each channel, None one for all. `weight` may hold a Quantized weight made elsewhere (by GPTQ,
    say). ValueError where it has another shape than the layer's.
    """

    def __init__(self, layer: nn.Module, *, w_bits=8, w_axis=0, w_group=None, x_bits=8, x_axis=0, weight=None):
        super().__init__()
        check_layer(layer)
        w = layer.weight.detach()
        if weight is not None:
            if weight.values.shape != w.shape:
                raise ValueError(f"weight {tuple(weight.values.shape)} for a layer of {tuple(w.shape)}; they must agree")
            w = weight.dequantize()
        elif w_bits is not None:
            w = fake_quantize(w, w_bits, None if w_group else w_axis, group=w_group)
        self.register_buffer("weight", w.clone())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self.x_bits, self.x_axis = x_bits, x_axis

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self.x_bits is not None:
            flat = fake_quantize(flat, self.x_bits, self.x_axis)
        return F.linear(flat, self.weight, self.bias).view(*x.shape[:-1], -1)


def check_layer(layer: nn.Module) -> None:
    """ValueError for what is no linear layer with float weights: one that is quantised already, or another kind."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, (Int8Linear, FakeLinear)):
        raise ValueError(f"this layer is quantised already ({type(layer).__name__}); quantise the float layer that it came from")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not hasattr(layer, "bias"):
        raise ValueError(f"{type(layer).__name__} is no linear layer; allowed: one with weight (outputs, inputs) and bias")
