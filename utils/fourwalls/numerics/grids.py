"""Which whole numbers a few bits hold, and where a scale and a zero point put them on the number line.

A grid has at most 2^bits ticks. Signed or unsigned says which integers are stored; symmetric grids leave the lowest one out, so
that +x and -x are treated alike. The zero point is the integer that stands for 0.0, and it is always on the grid: padding,
dropped values and ReLU's zeros must come back as exactly zero.

    x ~ (q - zero) * scale,      q = clip(round(x / scale) + zero, low, high)

Reference: Jacob et al. 2018 (arXiv:1712.05877).
"""

from dataclasses import dataclass

import torch

__all__ = ["Grid", "check_finite", "check_float"]

FEWEST, MOST = 2, 8
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Grid:
    """The integers of `bits` bits. Symmetric: signed -127..127 with zero at 0, unsigned 1..255 with zero at 128 (for 8 bits)."""

    bits: int = 8
    signed: bool = True
    symmetric: bool = True

    def __post_init__(self):
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not FEWEST <= self.bits <= MOST:
            near = "" if not isinstance(self.bits, int) else f"; nearest legal: {min(max(self.bits, FEWEST), MOST)}"
            raise ValueError(f"bits is {self.bits!r}; it is a whole number from {FEWEST} to {MOST}{near}")

    @property
    def middle(self) -> int:
        return 0 if self.signed else 2 ** (self.bits - 1)

    @property
    def low(self) -> int:
        return self.middle - 2 ** (self.bits - 1) + int(self.symmetric)

    @property
    def high(self) -> int:
        return self.middle + 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def place(self, lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero) of the dtypes of `lo` and int32, for values from lo to hi, element by element.

        Never 0, never infinite: the scale is at least the dtype's smallest normal number (what is smaller becomes 0, an error
        below half a scale), 1 where all values are 0, and |c| where all values are one c, which then comes back exactly.
        """
        tiny = torch.finfo(lo.dtype).tiny
        constant = (lo == hi) & (lo != 0)
        if self.symmetric:
            largest = torch.maximum(lo.abs(), hi.abs())
            scale = torch.where(constant, largest, largest / (self.high - self.middle))
        else:
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)  # zero is always inside
            levels = self.high - self.low
            scale = torch.where(constant, hi - lo, hi / levels - lo / levels)  # hi - lo itself may overflow
        least = torch.where((lo == 0) & (hi == 0), torch.ones_like(scale), torch.full_like(scale, tiny))
        scale = torch.where(scale < tiny, least, scale)  # a NaN stays one, for who checks
        zero = torch.full_like(scale, self.middle) if self.symmetric else self.low - torch.round(lo / scale)
        return scale, zero.clamp(self.low, self.high).to(torch.int32)

    def snap(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int = 0) -> torch.Tensor:
        """Floats that are whole: the tick of each x, counted from the zero point (q - zero). Ties go to the even integer."""
        return torch.clamp(torch.round(x / scale), self.low - zero, self.high - zero)


def check_finite(x: torch.Tensor, what: str = "x") -> None:
    """ValueError that counts the infinities and NaNs of x, and says where the first one is."""
    good = torch.isfinite(x)
    if not good.all():
        where = tuple((~good).nonzero()[0].tolist())
        raise ValueError(
            f"{what} has {int((~good).sum())} values that are not finite, the first ({x[where].item()}) at index {where}; "
            "allowed: finite numbers, since an infinite one leaves no scale for the others"
        )


def check_float(x: torch.Tensor, what: str = "x") -> None:
    """ValueError for anything but a tensor of floats, such as one that is quantised already."""
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        allowed = ", ".join(str(f).removeprefix("torch.") for f in FLOATS)
        raise ValueError(f"{what} is {kind}; allowed: a tensor of {allowed}. Whole numbers are quantised already")
