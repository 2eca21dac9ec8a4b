"""Winograd convolution beside oneDNN's, by channels and size; and what its rounding costs, beside direct convolution.

Ours is a chain of torch's operators, each of which writes its result to memory; theirs is one kernel, with the processor's own
instructions. So this is no race between algorithms: it shows from which number of channels on the transforms stop being most of
the work. Weights are transformed beforehand. One thread, alternating pairs, processor time.

    time_ratio = our time / the time of torch's conv2d        error = rms(y - exact) / rms(exact), exact in float64

Reference: Lavin and Gray 2016 (arXiv:1509.09308), tables 4 to 6, for the same comparison on a GPU.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..kernels.winograd import TILES, count, direct_conv2d, error_bound, transform_weights, winograd_conv2d, winograd_transformed
from .record import Row
from .timer import alternate, spread, time_ratio

__all__ = ["SHAPES", "WinogradCase", "describe", "error_rows", "relative_error", "rows"]

describe = "Winograd convolution beside oneDNN's, by channels and size: time, multiplications, error in fp32 and fp16"
# (batch, channels = filters, height = width): few channels, many, a small image, and one that tiles do not fill
SHAPES = ((1, 1, 64), (1, 8, 64), (1, 64, 56), (1, 128, 28), (1, 256, 14), (1, 256, 7))
TIMED = (2, 4)
ERROR_SHAPE = (2, 64, 24)


class WinogradCase:
    """Input and weights of one shape, padding 1, float32, and the float64 result beside them."""

    def __init__(self, batch: int, channels: int, size: int):
        dice = torch.Generator().manual_seed(batch + channels + size)
        self.x = torch.randn(batch, channels, size, size, generator=dice)
        self.weight = torch.randn(channels, channels, 3, 3, generator=dice) / (3 * channels**0.5)
        self.exact = F.conv2d(self.x.double(), self.weight.double(), padding=1)
        self.transformed = {tile: transform_weights(self.weight, tile=tile) for tile in TILES}

    def ours(self, tile: int) -> torch.Tensor:
        return winograd_transformed(self.x, self.transformed[tile], tile=tile, padding=1)

    def theirs(self) -> torch.Tensor:
        return F.conv2d(self.x, self.weight, padding=1)

    def right(self, tile: int) -> bool:
        """Whether every output lies within its error bound of the exact one."""
        bound = error_bound(self.x, self.weight, tile=tile, padding=1)
        return bool(((self.ours(tile).double() - self.exact).abs() <= bound).all())


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean square error, as a share of that of the exact result."""
    return float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def rows(options, say: Callable[[str], None] = lambda text: None, *, shapes=SHAPES, errors=ERROR_SHAPE) -> Iterator[Row]:
    """Time of each shape and tile (`options.algorithms`: "2,4,6", default 2 and 4), then the errors. One thread, whatever torch
    had before. ValueError for another tile.
    """
    wanted = options.algorithms or list(map(str, TIMED))
    wrong = [name for name in wanted if name not in map(str, TILES)]
    if wrong:
        raise ValueError(f"no tile {wrong[0]!r}; there are {', '.join(map(str, TILES))}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shape in shapes:
            case = WinogradCase(*shape)
            for tile in map(int, wanted):
                say(f"winograd {shape}, tile {tile}")
                yield _time_row(case, tile, options.pairs)
        say("winograd errors")
        yield from error_rows(WinogradCase(*errors))
    finally:
        torch.set_num_threads(before)


def _time_row(case: WinogradCase, tile: int, pairs: int) -> Row:
    batch, channels, size, _ = case.x.shape
    counts = count(batch, channels, channels, size, size, tile=tile, padding=1)
    right = case.right(tile)  # it also warms up
    case.theirs()
    start = time.process_time()
    case.theirs()
    repeats = max(1, min(50, round(2e-3 / max(time.process_time() - start, 1e-6))))
    ours, theirs = alternate(lambda: case.ours(tile), case.theirs, pairs, repeats=repeats, clock=time.process_time)
    taken, ratio = spread(ours), time_ratio(ours, theirs)
    return Row(
        benchmark="winograd",
        case={
            "batch": batch,
            "channels": channels,
            "size": size,
            "tile": tile,
            "fewer": round(float(counts.fewer), 3),
            "waste": round(float(counts.waste), 3),
        },
        metric="time",
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        pairs=taken.count,
        peer="torch conv2d (oneDNN)" if torch.backends.mkldnn.is_available() else "torch conv2d",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        ok=right,
        machine={"threads": 1, "clock": "processor time"},
    )


def error_rows(case: WinogradCase) -> Iterator[Row]:
    """The relative error of direct convolution (tile 0) and of each tile, in float32, and with what is stored rounded to fp16."""
    batch, channels, size, _ = case.x.shape
    for stored in (None, "fp16"):
        exact, x, weight = case.exact, case.x, case.weight
        if stored:  # what inputs lose when they become fp16 is nobody's fault here
            x, weight = x.half().float(), weight.half().float()
            exact = F.conv2d(x.double(), weight.double(), padding=1)
        for tile in (0, *TILES):
            if tile:
                y = winograd_conv2d(x, weight, tile=tile, padding=1, stored=stored)
            else:
                y = direct_conv2d(x, weight, padding=1, stored=stored)
            yield Row(
                benchmark="winograd",
                case={"batch": batch, "channels": channels, "size": size, "tile": tile, "stored": stored or "fp32"},
                metric="error",
                value=relative_error(y, exact),
                unit="",
                ok=bool(y.isfinite().all()) and (tile == 0 or bool(stored) or case.right(tile)),
                machine={"threads": 1},
            )
