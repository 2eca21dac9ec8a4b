"""What a format of numbers can hold: a sign, an exponent and a mantissa, or a whole number.

Between two powers of two every format has the same number of ticks, 2^mantissa of them, so that its relative resolution is the
same everywhere, and its range is what the exponent buys. Below the smallest normal number the ticks go on evenly down to zero
(subnormals), and what lies below half of the last one is gone.

    x = (-1)^s 2^(e - bias) (1 + m / 2^mantissa)        e = 0:  x = (-1)^s 2^(1 - bias) m / 2^mantissa

Reference: IEEE 754-2019; Open Compute Project, "OCP 8-bit floating point specification", 2023; Micikevicius et al. 2022
(arXiv:2209.05433).
"""

from dataclasses import dataclass
from difflib import get_close_matches

import torch

__all__ = ["FORMATS", "FloatFormat", "Format", "IntFormat", "decode", "get_format", "ticks"]


@dataclass(frozen=True)
class FloatFormat:
    """exponent, mantissa: their bits. has_inf: the highest exponent is for infinity and NaN alone; if not ("fn", finite), it
    holds numbers too, and only the pattern of all ones is NaN. stored: bits a number takes in memory. dtype: torch's, or None.
    """

    name: str
    exponent: int
    mantissa: int
    has_inf: bool = True
    stored: int | None = None
    dtype: torch.dtype | None = None
    whole = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bytes(self) -> float:
        """Bytes of one number in memory. tf32 lies in memory as fp32: its 19 bits are what a product reads of it."""
        return (self.stored or self.bits) / 8

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        top = 2**self.exponent - 1 - self.bias
        if self.has_inf:
            return (2 - 2.0**-self.mantissa) * 2.0 ** (top - 1)
        return (2 - 2 * 2.0**-self.mantissa) * 2.0**top  # the last pattern is NaN

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest number above 0; half of it and less rounds to 0."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def epsilon(self) -> float:
        """From 1 to its neighbour above. A rounded number is off by at most half of it, relatively."""
        return 2.0**-self.mantissa

    @property
    def inf_pattern(self) -> int | None:
        """The bits of +infinity, or None."""
        return (2**self.exponent - 1) << self.mantissa if self.has_inf else None

    @property
    def nan_patterns(self) -> tuple[int, int]:
        """First and last pattern with the sign 0 that is NaN; with the sign 1 as many."""
        last = 2 ** (self.bits - 1) - 1
        return (self.inf_pattern + 1, last) if self.has_inf else (last, last)


@dataclass(frozen=True)
class IntFormat:
    """A whole number with a sign, from -2^(bits-1) to 2^(bits-1) - 1: ticks 1 apart, so that all depends on the scale."""

    name: str
    bits: int
    dtype: torch.dtype | None = None
    has_inf = False
    whole = True

    @property
    def bytes(self) -> float:
        return self.bits / 8

    @property
    def max(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def min(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def min_subnormal(self) -> int:
        """The smallest number above 0."""
        return 1


Format = FloatFormat | IntFormat

FORMATS = {
    f.name: f
    for f in (
        FloatFormat("fp32", 8, 23, dtype=torch.float32),
        FloatFormat("tf32", 8, 10, stored=32),
        FloatFormat("bf16", 8, 7, dtype=torch.bfloat16),
        FloatFormat("fp16", 5, 10, dtype=torch.float16),
        FloatFormat("fp8_e5m2", 5, 2, dtype=torch.float8_e5m2),
        FloatFormat("fp8_e4m3", 4, 3, has_inf=False, dtype=torch.float8_e4m3fn),
        IntFormat("int8", 8, dtype=torch.int8),
        IntFormat("int4", 4),
    )
}


def get_format(name: str | Format) -> Format:
    """The format of that name. ValueError, with the nearest name, for one that does not exist."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        near = get_close_matches(str(name), FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no format {name!r}; there are {', '.join(FORMATS)}{hint}")
    return FORMATS[name]


def decode(patterns: torch.Tensor, format: str | Format) -> torch.Tensor:
    """Bit patterns (whole numbers from 0 to 2^bits - 1, any shape) -> what they stand for, float64, from the equation above."""
    f = get_format(format)
    patterns = patterns.to(torch.int64)
    if patterns.numel() and not 0 <= int(patterns.min()) <= int(patterns.max()) < 2**f.bits:
        raise ValueError(f"a pattern of {f.name} is 0 to {2**f.bits - 1}; got {int(patterns.min())} to {int(patterns.max())}")
    if f.whole:
        return torch.where(patterns > f.max, patterns - 2**f.bits, patterns).double()
    rest = patterns & (2 ** (f.bits - 1) - 1)
    e, m = rest >> f.mantissa, (rest & (2**f.mantissa - 1)).double() / 2**f.mantissa
    size = torch.where(e > 0, 1 + m, m) * torch.exp2((e.clamp(min=1) - f.bias).double())
    if f.has_inf:
        size = torch.where(rest == f.inf_pattern, torch.inf, size)
    size = torch.where(rest >= f.nan_patterns[0], torch.nan, size)
    return torch.where(patterns >> (f.bits - 1) == 1, -size, size)


def ticks(format: str | Format) -> torch.Tensor:
    """All finite numbers of a format of at most 16 bits, ascending, each once (zero too); float64. ValueError for wider ones."""
    f = get_format(format)
    if f.bits > 16:
        raise ValueError(f"{f.name} has 2^{f.bits} patterns; ticks() lists formats of at most 16 bits")
    found = decode(torch.arange(2**f.bits), f)
    return found[found.isfinite()].unique()
