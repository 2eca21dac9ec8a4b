"""Few bits for every number: divide by a scale, round to a whole number, remember the scale.

Everything hangs on who shares a scale (granularity.py), which integers there are (grids.py) and where the ends lie
(observers.py). The error of a value that is not clipped is at most half a scale, so one large value among many small ones,
under one scale, rounds them all to zero.

    q = clip(round(x / scale) + zero, low, high),      |x - (q - zero) scale| <= scale / 2

Reference: Jacob et al. 2018 (arXiv:1712.05877); Nagel et al. 2021 (arXiv:2106.08295).
"""

from dataclasses import dataclass

import torch

from .granularity import check_layout, expand_scale, scale_shape, to_slices
from .grids import Grid, check_finite, check_float
from .observers import find_observer

__all__ = ["Quantized", "dequantize", "fake_quantize", "quantize", "round_with", "zero_share"]


@dataclass(frozen=True)
class Quantized:
    """Integers with what is needed to read them: values (x's shape, int8 or uint8), scale and zero (`scale_shape`)."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    grid: Grid
    axis: int | tuple[int, ...] | None
    group: int | None
    dtype: torch.dtype  # of what was quantised

    def dequantize(self) -> torch.Tensor:
        return dequantize(self)

    @property
    def bits_per_value(self) -> float:
        """Bits of the integers and of the scales (and zero points of 8 bits, if there are any) for each value."""
        extra = self.scale.numel() * (8 * self.scale.element_size() + (0 if self.grid.symmetric else 8))
        return self.grid.bits + extra / max(1, self.values.numel())


@torch.no_grad()
def quantize(
    x: torch.Tensor | Quantized,
    bits: int = 8,
    axis: int | tuple[int, ...] | None = None,
    *,
    group: int | None = None,
    signed: bool = True,
    symmetric: bool = True,
    observer: str = "absmax",
    **options,
) -> Quantized:
    """x (any shape, a float dtype) -> Quantized, with scales in float32 (float64 for float64).

    axis, group: who shares a scale (granularity.py). observer: where the ends lie; `options` go to it. What is quantised already
    is returned as it is when asked for in the same form. ValueError for infinities and NaN (with their place), for whole numbers,
    for bits beyond 2..8, for an axis that does not exist, and for a Quantized of another form.
    """
    grid = Grid(bits, signed, symmetric)
    if isinstance(x, Quantized):
        if (grid, check_layout(x.values.shape, axis, group), group) == (
            x.grid,
            check_layout(x.values.shape, x.axis, x.group),
            x.group,
        ):
            return x
        raise ValueError(f"x is quantised already, to {x.grid} along axis {x.axis}, group {x.group}; dequantize it first")
    check_float(x)
    check_finite(x)
    shape = scale_shape(x.shape, axis, group)
    slices = to_slices(x.to(torch.promote_types(x.dtype, torch.float32)), axis, group)
    scale, zero = grid.place(*find_observer(observer)(slices, grid, **options))
    return _round(x, scale.reshape(shape), zero.reshape(shape), grid, axis, group)


@torch.no_grad()
def round_with(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, grid: Grid, *, axis=None, group=None) -> Quantized:
    """Round x to a grid whose scale and zero point are given (from calibration, say). What lies beyond the ends is clipped.

    ValueError for infinities and NaN, as `quantize`: as an integer a NaN would look like any number.
    """
    check_float(x)
    check_finite(x)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError("a scale is not a finite number above 0; allowed: what Grid.place or an Observer gives")
    return _round(x, scale, zero, grid, axis, group)


def _round(x, scale, zero, grid: Grid, axis, group) -> Quantized:
    wide = x.to(scale.dtype)
    z = expand_scale(zero, x.shape, group)
    values = (grid.snap(wide, expand_scale(scale, x.shape, group), z) + z).to(grid.dtype)
    return Quantized(values, scale, zero, grid, axis, group, x.dtype)


@torch.no_grad()
def dequantize(q: Quantized) -> torch.Tensor:
    """Back to floats of the dtype that was quantised. 0.0 comes back as exactly 0.0."""
    scale, zero = (expand_scale(t, q.values.shape, q.group) for t in (q.scale, q.zero))
    x = (q.values.to(scale.dtype) - zero) * scale
    most = min(torch.finfo(q.dtype).max, torch.finfo(scale.dtype).max)  # half a scale beyond the end may overflow
    return x.clamp(-most, most).to(q.dtype)


def fake_quantize(x: torch.Tensor, bits: int = 8, axis=None, **options) -> torch.Tensor:
    """There and back: floats that are all on the grid. Options as `quantize`. It shows the error, and saves nothing."""
    return dequantize(quantize(x, bits, axis, **options))


def zero_share(x: torch.Tensor, q: Quantized) -> float:
    """The share of x's values other than 0 that the grid rounds to 0."""
    alive = x != 0
    lost = (q.values.to(torch.int32) == expand_scale(q.zero, q.values.shape, q.group)) & alive
    return float(lost.sum()) / max(1, int(alive.sum()))
