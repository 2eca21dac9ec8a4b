"""Winograd convolution: a 3x3 filter with 2.25 or 4 times fewer multiplications, paid for with additions and with rounding.

The output is cut into tiles of m x m, each of which needs (m+2) x (m+2) inputs. Input tile and filter are transformed, multiplied
element by element, and transformed back. Summed over channels, the elements are (m+2)^2 matrix products, and there is all the
multiplying. What is outside the tiles' last row or column is computed and thrown away.

    Y = A^T [ (G g G^T) * (B^T d B) ] A,        multiplications  (m+2)^2 a tile  instead of  9 m^2

Reference: Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016 (arXiv:1509.09308).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
import torch.nn.functional as F

from ..numerics.formats import FloatFormat, get_format
from ..numerics.rounding import round_to
from .cook_toom import Transforms, cook_toom

__all__ = [
    "TILES",
    "Counts",
    "count",
    "direct_conv2d",
    "error_bound",
    "transform_weights",
    "winograd_conv2d",
    "winograd_transformed",
]

TILES = (2, 4, 6)  # sides of the output's tile: F(2x2,3x3), F(4x4,3x3), F(6x6,3x3)
TAPS = 3

Pair = int | tuple[int, int]


def winograd_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: int = 2,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    stored: str | None = None,
) -> torch.Tensor:
    """x (b, c, height, width), weight (k, c, 3, 3), bias (k,) or None -> (b, k, height + 2p - 2, width + 2p - 2); gradients flow.

    stored: every tensor that one kernel hands to the next (x, weight, both transformed, the products' sums, the output) is
    rounded to this format ("fp16", "bf16"), while arithmetic stays in the dtype of x, as tensor cores add up. It is for measuring
    errors; no gradients. Raises ValueError for a stride, dilation or groups other than 1, a filter that is not 3x3, shapes and
    dtypes that do not fit.
    """
    _check(x, weight, bias, tile, padding)
    for name, given in (("stride", stride), ("dilation", dilation), ("groups", groups)):
        if given not in (1, (1, 1), [1, 1]):
            raise ValueError(f"{name}={given!r}: Winograd's tiles need {name}=1; for others use torch.nn.functional.conv2d")
    keep = _keeper(stored, x, weight)
    y = winograd_transformed(keep(x), keep(transform_weights(keep(weight), tile=tile)), tile=tile, padding=padding, keep=keep)
    return y if bias is None else keep(y + bias[:, None, None])


def transform_weights(weight: torch.Tensor, *, tile: int = 2) -> torch.Tensor:
    """(k, c, 3, 3) -> (n n, k, c) with n = tile + 2: G g G^T of every filter. Done once where weights stay the same."""
    return _filters(weight, _transforms(tile))


def winograd_transformed(
    x: torch.Tensor, transformed: torch.Tensor, *, tile: int = 2, padding: Pair = 0, keep: Callable = lambda made: made
) -> torch.Tensor:
    """`winograd_conv2d` with weights that `transform_weights` made for the same `tile`. keep(tensor) is asked for every tensor
    that is written to memory, and may round it.
    """
    return _convolve(x, transformed, _transforms(tile), _pair(padding), keep)


def direct_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, padding: Pair = 0, stored: str | None = None
) -> torch.Tensor:
    """torch's convolution of stride 1 with inputs and output rounded to `stored`: what Winograd's error is compared with."""
    keep = _keeper(stored, x, weight)
    y = keep(F.conv2d(keep(x), keep(weight), padding=padding))
    return y if bias is None else keep(y + bias[:, None, None])


def error_bound(
    x: torch.Tensor, weight: torch.Tensor, *, tile: int = 2, padding: Pair = 0, stored: str | None = None
) -> torch.Tensor:
    """How far each output of `winograd_conv2d` (no bias) may be from the exact one: float64, the output's shape.

    Every term is rounded once for each scaling, addition and multiplication on its way, and six times where tensors are stored;
    what is rounded is at most the sum of absolute values, which the same algorithm with absolute matrices computes. (Numbers
    below the smallest normal one lose more.)
    """
    t = _transforms(tile)
    passes = 2 * sum(t.most_terms(name) for name in ("output", "filter", "input")) + 2  # two for fractions such as 1/6
    growth = (passes + 1 + weight.shape[1]) * math.log1p(torch.finfo(x.dtype).eps / 2)
    growth += 0 if stored is None else 6 * math.log1p(get_format(stored).epsilon / 2)
    size = _convolve(x.double().abs(), _filters(weight.double().abs(), t.absolute), t.absolute, _pair(padding), lambda made: made)
    return math.expm1(growth) * size  # (1 + u)^k - 1, also where u is below float64's own


# --- the algorithm ----------------------------------------------------------------------------------------------------
def _filters(weight: torch.Tensor, t: Transforms) -> torch.Tensor:
    return _stack(_twice(t.filter, lambda i: weight[:, :, i], lambda part, j: part[:, :, j], TAPS))


def _convolve(x, transformed, t: Transforms, padding: tuple[int, int], keep: Callable) -> torch.Tensor:
    (b, _, height, width), k, (ph, pw), m, n = x.shape, transformed.shape[1], padding, t.m, t.n
    wanted = height + 2 * ph - TAPS + 1, width + 2 * pw - TAPS + 1
    down, across = (-(-side // m) for side in wanted)  # tiles; the last ones may hang over
    right, below = across * m + TAPS - 1 - width - pw, down * m + TAPS - 1 - height - ph
    x = F.pad(x.transpose(0, 1), (pw, right, ph, below))  # (c, b, down m + 2, across m + 2)
    # tiles overlap by 2: place (i, j) of all tiles is every m-th row from i on, every m-th column from j on
    parts = _twice(t.input, lambda i: x[:, :, i : i + m * down : m], lambda part, j: part[..., j : j + m * across : m], n)
    tiles = keep(_stack(parts).flatten(2))  # (n n, c, b down across)
    sums = keep(torch.bmm(transformed, tiles)).unflatten(0, (n, n))  # over channels; (n, n, k, b down across)
    parts = _twice(t.output, lambda i: sums[i], lambda part, j: part[j], n)
    y = _stack(parts).view(m, m, k, b, down, across).permute(3, 2, 4, 0, 5, 1)  # (b, k, down, m, across, m)
    return keep(y.reshape(b, k, down * m, across * m)[..., : wanted[0], : wanted[1]])


def _twice(rows, take: Callable, take_again: Callable, count: int) -> list[list[torch.Tensor]]:
    """M t M^T for the matrix M = rows: first along the rows of t, which take(i) gives, then along the columns of the result."""
    half = _combine(rows, [take(i) for i in range(count)])
    return [_combine(rows, [take_again(part, j) for j in range(count)]) for part in half]


def _combine(rows, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """[sum over j of rows[i][j] parts[j], for each i]: zeros cost nothing, a 1 no scaling."""
    made = []
    for row in rows:
        (scale, total), *rest = [(c, part) for c, part in zip(row, parts, strict=True) if c]
        total = total if scale == 1 else total * float(scale)
        for c, part in rest:
            total = torch.add(total, part, alpha=float(c))
        made.append(total)
    return made


def _stack(parts: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([part for row in parts for part in row])


@cache
def _transforms(tile: int) -> Transforms:
    if tile not in TILES:
        raise ValueError(f"tile={tile!r}; the output's tile has a side of {', '.join(map(str, TILES))}")
    return cook_toom(tile, TAPS)


# --- what it costs ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counts:
    """Multiplications of a convolution, `direct` and by `winograd`; `transforms`: the additions and scalings that inputs and
    outputs take besides; `weights`: those of the filters; outputs `wanted`, and `computed` with what tiles hang over.
    """

    direct: int
    winograd: int
    transforms: int
    weights: int
    wanted: int
    computed: int

    @property
    def fewer(self) -> Fraction:
        """Direct multiplications / Winograd's: (3 m)^2 / (m + 2)^2 where tiles fill the output."""
        return Fraction(self.direct, self.winograd)

    @property
    def waste(self) -> Fraction:
        """The share of all computed outputs that is thrown away."""
        return 1 - Fraction(self.wanted, self.computed)

    @property
    def fewer_steps(self) -> float:
        """The same with every addition and scaling counted, weights transformed beforehand: 2 for each direct multiplication."""
        return 2 * self.direct / (2 * self.winograd + self.transforms)


def count(batch: int, channels: int, filters: int, height: int, width: int, *, tile: int = 2, padding: Pair = 0) -> Counts:
    """The Counts of x (batch, channels, height, width) with `filters` filters of 3x3, stride 1."""
    t, (ph, pw) = _transforms(tile), _pair(padding)
    high, wide = height + 2 * ph - TAPS + 1, width + 2 * pw - TAPS + 1
    if min(high, wide) < 1:
        raise ValueError(f"{height} x {width} with padding {(ph, pw)} has no output; a 3x3 filter needs 3 x 3, padding included")
    tiles = batch * -(-high // t.m) * -(-wide // t.m)
    return Counts(
        direct=TAPS**2 * batch * channels * filters * high * wide,
        winograd=t.n**2 * channels * filters * tiles,
        transforms=tiles * (channels * t.tile_steps("input") + filters * t.tile_steps("output")),
        weights=channels * filters * t.tile_steps("filter"),
        wanted=batch * high * wide,
        computed=tiles * t.m**2,
    )


# --- what is refused --------------------------------------------------------------------------------------------------
def _check(x, weight, bias, tile: int, padding: Pair) -> None:
    _transforms(tile)
    if weight.dim() != 4 or weight.shape[2:] != (TAPS, TAPS):
        raise ValueError(
            f"weight {tuple(weight.shape)}: Winograd here is for 3x3 filters, (k, c, 3, 3); for others use "
            "torch.nn.functional.conv2d"
        )
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)}; with weight {tuple(weight.shape)} it is (b, {weight.shape[1]}, height, width)")
    if not x.is_floating_point() or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; both are of one float dtype, and the bias, too")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}; one number a filter: ({weight.shape[0]},)")
    ph, pw = _pair(padding)
    if min(x.shape[2] + 2 * ph, x.shape[3] + 2 * pw) < TAPS:
        least = max(-(-(TAPS - side) // 2) for side in x.shape[2:])
        raise ValueError(
            f"x {tuple(x.shape)} with padding {(ph, pw)} is smaller than the 3x3 filter; padding={least} makes it fit"
        )


def _pair(padding: Pair) -> tuple[int, int]:
    pair = tuple(padding) if isinstance(padding, (tuple, list)) else (padding, padding)
    if len(pair) != 2 or any(not isinstance(p, int) or isinstance(p, bool) or p < 0 for p in pair):
        raise ValueError(f"padding={padding!r}; a whole number of at least 0, or one for each of height and width")
    return pair


def _keeper(stored: str | None, x: torch.Tensor, weight: torch.Tensor) -> Callable:
    """Rounds to `stored`, or gives back what it is given."""
    if stored is None:
        return lambda made: made
    if not isinstance(get_format(stored), FloatFormat):
        raise ValueError(f"stored={stored!r}; tensors are kept in a float format: fp16, bf16")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(f"stored={stored!r} rounds, and rounding has no gradient; call it under torch.no_grad()")
    return lambda made: round_to(made, stored)
