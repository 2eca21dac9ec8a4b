"""Where to put the ends of the grid: four opinions about which values may be clipped.

The largest value decides for `absmax`, so one lone value can take the ticks from all others. `percentile` gives up the outermost
share of values, `mse` looks for the ends with the least squared error, `entropy` for those whose histogram says most about the
original one. An Observer watches calibration batches and then names scale and zero point.

    mse:      argmin over r of  sum (x - Q_r(x))^2               r: the share of the whole range that is kept
    entropy:  argmin over r of  sum p log(p / q_r)               p, q: histograms before and after

Reference: Migacz 2017 (8-bit inference with TensorRT) for entropy; Nagel et al. 2021 (arXiv:2106.08295) for the others.
"""

import math
from collections.abc import Callable

import torch

from .granularity import scale_shape, to_slices
from .grids import Grid, check_finite, check_float

__all__ = ["OBSERVERS", "Observer", "absmax", "entropy", "mse", "percentile"]

STEPS = 100  # candidates for r
BINS = 2048


def absmax(x: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """x (slices, values) -> (lo, hi), each (slices,): the smallest and the largest value."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0]), x.new_zeros(x.shape[0])
    return x.amin(1), x.amax(1)  # aminmax would take twenty times as long along a dim


def percentile(x: torch.Tensor, grid: Grid, *, share: float = 0.999) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends that keep `share` of the values: of |x| for a symmetric grid, else cut in equal parts on both sides."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}; allowed: above 0 and at most 1, such as 0.999")
    lo, hi = absmax(x, grid)
    n = x.shape[1]
    if n == 0:
        return lo, hi

    def at(ordered, part):  # the smallest value with at least this part of all at or below it
        return ordered[:, min(n - 1, max(0, math.ceil(part * n) - 1))]

    if grid.symmetric:
        end = at(x.abs().sort(dim=1).values, share)
        low, high = torch.maximum(lo, -end), torch.minimum(hi, end)
    else:
        ordered = x.sort(dim=1).values
        low, high = ordered[:, min(n - 1, int((1 - share) / 2 * n))], at(ordered, (1 + share) / 2)
    empty = (low == high) | ((low == 0) & (high == 0))  # nothing but one value is left: keep all
    return torch.where(empty, lo, low), torch.where(empty, hi, high)


def mse(x: torch.Tensor, grid: Grid, *, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends r * (smallest, largest) with the least sum of squared errors, among `steps` shares r from 1 down."""
    lo, hi = absmax(x, grid)
    best, least = torch.ones_like(lo), torch.full_like(lo, torch.inf)
    for r in range(steps, 0, -1):
        scale, zero = grid.place(lo * (r / steps), hi * (r / steps))
        scale, zero = scale.unsqueeze(1), zero.unsqueeze(1)
        # divided by the largest value, since its square may overflow
        norm = torch.maximum(lo.abs(), hi.abs()).clamp(min=torch.finfo(x.dtype).tiny).unsqueeze(1)
        error = ((x - grid.snap(x, scale, zero) * scale) / norm).square().sum(1)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, r / steps, best)
    best = torch.where(lo == hi, 1.0, best).to(lo.dtype)
    return lo * best, hi * best


def entropy(x: torch.Tensor, grid: Grid, *, steps: int = STEPS, bins: int = BINS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends r * (smallest, largest) whose quantised histogram loses the least information (Kullback-Leibler)."""
    lo, hi = absmax(x, grid)
    best = torch.ones_like(lo)
    for k in range(x.shape[0]):
        if lo[k] != hi[k]:
            best[k] = _least_information(x[k], float(lo[k]), float(hi[k]), grid, steps, bins)
    return lo * best, hi * best


def _least_information(x: torch.Tensor, lo: float, hi: float, grid: Grid, steps: int, bins: int) -> float:
    size = max(abs(lo), abs(hi))
    left, right = (-1.0, 1.0) if grid.symmetric else (min(lo, 0.0) / size, max(hi, 0.0) / size)
    counts = torch.histc((x.double() / size).float(), bins=bins, min=left, max=right).double()
    origin = round(-left / (right - left) * bins)
    best, least = 1.0, torch.inf
    for r in range(steps, 0, -1):
        a, b = round(origin * (1 - r / steps)), round(origin + (bins - origin) * r / steps)
        if b - a <= grid.high - grid.low + 1:  # fewer bins than ticks: nothing would be lost, and nothing learned
            break
        inside = counts[a:b]
        p = inside.clone()
        p[0] += counts[:a].sum()
        p[-1] += counts[b:].sum()
        tick = torch.arange(b - a) * (grid.high - grid.low + 1) // (b - a)
        total = torch.zeros(grid.high - grid.low + 1, dtype=torch.float64)
        filled = total.clone().index_add_(0, tick, (inside > 0).double())
        total.index_add_(0, tick, inside)
        q = torch.where(inside > 0, (total / filled.clamp(min=1))[tick], 0.0)
        p, q = p / p.sum(), (q / q.sum().clamp(min=1)).clamp(min=1e-9)
        loss = float(torch.where(p > 0, p * (p / q).log(), 0.0).sum())
        if loss < least:
            best, least = r / steps, loss
    return best


OBSERVERS: dict[str, Callable] = {"absmax": absmax, "percentile": percentile, "mse": mse, "entropy": entropy}


def find_observer(name: str) -> Callable:
    if name not in OBSERVERS:
        raise ValueError(f"observer is {name!r}; allowed: {', '.join(OBSERVERS)}")
    return OBSERVERS[name]


class Observer:
    """Watches batches of one tensor; then `place()` gives its scale and zero point.

    watch(x) any number of times, place() -> (scale, zero) in the shape of `scale_shape`. Keeps about `keep` values a slice (every
    k-th, of earlier batches fewer and fewer; smallest and largest always). ValueError where nothing was watched, where a batch
    has other channels, and for keep below 1.
    """

    def __init__(self, name: str = "absmax", grid: Grid | None = None, *, axis=None, keep: int = 2**16, **options):
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep is {keep!r}; a whole number of at least 1")
        self.find, self.grid, self.axis, self.keep, self.options = find_observer(name), grid or Grid(), axis, keep, options
        self._seen: torch.Tensor | None = None
        self._shape: tuple[int, ...] = ()

    @torch.no_grad()
    def watch(self, x: torch.Tensor) -> torch.Tensor:
        """Remember x's values and return x, so that it can stand inside a model."""
        check_float(x)
        check_finite(x)
        if x.numel() == 0:
            return x
        rows = to_slices(x.to(torch.promote_types(x.dtype, torch.float32)), self.axis)
        if self._seen is not None:
            if len(self._seen) != len(rows):
                raise ValueError(f"this batch has {len(rows)} slices along axis {self.axis}, those before had {len(self._seen)}")
            rows = torch.cat([self._seen, rows], 1)
        if rows.shape[1] > self.keep:
            step = -(-rows.shape[1] // self.keep)
            rows = torch.cat([rows[:, ::step], rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)], 1)
        self._seen, self._shape = rows.clone(), scale_shape(x.shape, self.axis)
        return x

    def place(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seen is None:
            raise ValueError("this observer has seen no data; allowed: place() after watch(x) with at least one value")
        scale, zero = self.grid.place(*self.find(self._seen, self.grid, **self.options))
        return scale.reshape(self._shape), zero.reshape(self._shape)
