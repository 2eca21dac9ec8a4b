"""Into a format: to the nearest tick, to one of the two neighbours by chance, or toward zero.

A number lies between two ticks that are one quantum apart; divided by the quantum it lies between two whole numbers, and rounding
is rounding to a whole number. The quantum is a power of two, so dividing by it is exact, and the only error is the one that is
meant. Ties go to the even neighbour, or a long sum would drift; by chance ("stochastic") the mean over many roundings is x.

    q = 2^(max(floor(lg |x|), 1 - bias) - mantissa),    x -> q round(x / q)

Reference: IEEE 754-2019, 4.3; Gupta et al. 2015 (arXiv:1502.02551) for stochastic rounding.
"""

import torch

from .formats import FloatFormat, Format, get_format

__all__ = ["ROUNDINGS", "accumulate", "lost", "quantum", "round_to"]

ROUNDINGS = ("nearest", "stochastic", "toward zero")
_EXPONENT = 1023  # float64's bias, and the place of its exponent
_PLACE = 52


def quantum(x: torch.Tensor, format: str | Format) -> torch.Tensor:
    """The distance of the ticks around x, float64, the shape of x; it goes on growing beyond the format's largest number."""
    f = get_format(format)
    if f.whole:
        return torch.ones_like(x, dtype=torch.float64)
    least = 1 - f.bias + _EXPONENT  # below it ticks are as far apart as there: subnormals
    exponent = x.double().view(torch.int64) >> _PLACE & 0x7FF
    return (exponent.clamp_(min=least) - f.mantissa << _PLACE).view(torch.float64)


@torch.no_grad()
def round_to(
    x: torch.Tensor,
    format: str | Format,
    *,
    mode: str = "nearest",
    saturate: bool | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """x rounded to numbers of `format`, in the dtype of x (at least float32), same shape. The sign of zero and NaN are kept.

    mode: "nearest" (ties to even), "stochastic" (up with the probability of the part above the lower neighbour; draws from
    `generator`) or "toward zero". saturate True: what is too large, infinity too, becomes the largest number; False: infinity, or
    NaN in a format without (toward zero, only infinity itself does); None: as torch casts, that is, True where the format has no
    infinity. Whole-number formats always saturate, and refuse NaN. ValueError for another mode, for what is no float, and for
    NaN where no pattern holds it.
    """
    f = get_format(format)
    if mode not in ROUNDINGS:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(ROUNDINGS)}")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; rounding takes a float tensor: x.float()")
    y = x.double()
    if f.whole and bool(y.isnan().any()):
        raise ValueError(f"{int(y.isnan().sum())} of {y.numel()} elements are NaN, and {f.name} has no pattern for it")
    q = quantum(y, f)
    y = y / q  # exact, and below 2^(mantissa + 1)
    if mode == "nearest":
        y = y.round()
    elif mode == "toward zero":
        y = y.trunc()
    else:
        chance = torch.rand(y.shape, generator=generator, dtype=torch.float64, device=y.device)
        floor = y.floor()
        # infinity minus itself is NaN, which is not above any chance
        y = torch.where(y - floor > chance, floor + 1, floor).copysign(y)
    y *= q
    out = torch.promote_types(x.dtype, torch.float32)
    return _within(y, x, f, mode, saturate).to(out)


def _within(y: torch.Tensor, x: torch.Tensor, f: Format, mode: str, saturate: bool | None) -> torch.Tensor:
    """What to do with numbers beyond the largest."""
    if f.whole:
        return y.clamp_(f.min, f.max)
    if saturate or (saturate is None and not f.has_inf):
        return y.clamp_(-f.max, f.max)  # NaN stays NaN
    if mode == "toward zero":
        y = torch.where(x.isinf(), y, y.clamp(-f.max, f.max))
    beyond = y.abs() > f.max
    return y.masked_fill_(beyond, torch.nan) if not f.has_inf else torch.where(beyond, y * torch.inf, y)


def lost(x: torch.Tensor, format: str | Format) -> dict[str, float]:
    """What rounding to the nearest would do to x: {"underflowed": the share of all that is not 0 and becomes 0, "subnormal": that
    keeps fewer bits, "clipped": beyond the largest number, "rms": the root of the mean square error, with what is clipped set to
    the largest}. Zeros for an empty x.
    """
    f = get_format(format)
    if not x.numel():
        return dict.fromkeys(("underflowed", "subnormal", "clipped", "rms"), 0.0)
    rounded, y = round_to(x, f, saturate=True).double(), x.double()
    size = y.abs()
    few = (rounded != 0) & (size < f.min_normal) if isinstance(f, FloatFormat) else torch.zeros_like(size)
    if isinstance(f, FloatFormat):
        out = ~round_to(x, f, saturate=False).isfinite() & ~y.isnan()
    else:
        out = (y.round() > f.max) | (y.round() < f.min)
    return {
        "underflowed": float(((size > 0) & (rounded == 0)).double().mean()),
        "subnormal": float(few.double().mean()),
        "clipped": float(out.double().mean()),
        "rms": float((rounded - y).square().mean().sqrt()),
    }


def accumulate(start: float, update: float, steps: int, format: str | Format, *, mode: str = "nearest", seed: int = 0) -> list:
    """[start, start + update, ...]: every partial sum rounded to `format`, as if the sum itself were kept in it. A list of
    steps + 1 numbers.
    """
    dice = torch.Generator().manual_seed(seed)
    now = round_to(torch.tensor(start, dtype=torch.float64), format, mode=mode, generator=dice)
    sums = [float(now)]
    for _ in range(steps):
        now = round_to(now + update, format, mode=mode, generator=dice)
        sums.append(float(now))
    return sums
