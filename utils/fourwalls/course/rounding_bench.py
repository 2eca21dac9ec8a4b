"""The rounding bench over tensors of the reader's own: `fw.rounding_bench({"weights": w, "gradient": g}, loss)`.

The widget draws plain data; here tensors are scaled, rounded and counted for it, and the trained model is asked what it makes of
the rounded one.

    unit factor = max |x| / max |x of the unit|        x -> round(x factor s) / (factor s)

Reference: viz/rounding_bench.py for the widget, numerics/rounding.py for the rounding.
"""

import math
from collections.abc import Callable, Mapping

import torch

from ..numerics.formats import FORMATS, get_format, ticks
from ..numerics.rounding import lost, round_to
from ..viz import rounding_bench as board

__all__ = ["Bench", "rounding_bench"]

GROUP = 32
BINS = 48
NEAR = 3.0  # powers of two around the least error in which the least loss is looked for


class Bench:
    """The widget's two functions. tensors: name -> floats, channels first; loss(name, rounded) -> a number, or None."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], loss: Callable | None = None):
        unknown = [name for name in tensors if name not in board.NAMES]
        if unknown or not tensors:
            raise ValueError(f"tensors are named {', '.join(board.NAMES)}; got {unknown or 'none'}")
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 1 or not bool(x.isfinite().all()):
                raise ValueError(f"{name} must be a float tensor of at least one dim, all of it finite")
            if not bool(x.any()):
                raise ValueError(f"{name} is all zeros: there is nothing to round")
        self.tensors = {name: x.detach().flatten(1) if x.dim() > 1 else x.detach()[None] for name, x in tensors.items()}
        self.shapes = {name: x.shape for name, x in tensors.items()}
        self.loss = loss
        self.base = {name: None if loss is None else loss(name, x.detach()) for name, x in tensors.items()}
        self._found: dict[tuple, dict] = {}

    def factors(self, name: str, split: str) -> torch.Tensor:
        """What each number is multiplied by so that all units reach as far as the largest; (channels, numbers)."""
        x = self.tensors[name]
        whole = x.abs().max()
        if split == "tensor":
            return torch.ones_like(x)
        if split == "channel":
            most = x.abs().amax(1, keepdim=True).expand_as(x)
        else:
            short = -x.shape[1] % GROUP
            cut = torch.nn.functional.pad(x.abs(), (0, short)).unflatten(1, (-1, GROUP))
            most = cut.amax(2, keepdim=True).expand_as(cut).flatten(1)[:, : x.shape[1]]
        # a power of two would lose nothing; a unit of denormals must not make an infinity
        return torch.where(most > 0, whole / most.clamp(min=whole * 2.0**-60), 1.0)

    def rounded(self, setting: Mapping) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rounded tensor, the numbers as the format sees them before rounding), both (channels, numbers)."""
        x, f = self.tensors[setting["tensor"]], get_format(setting["format"])
        factor = self.factors(setting["tensor"], setting["split"]).double() * 2.0 ** setting["scale"]
        seen = x.double() * factor
        return (round_to(seen, f, saturate=True) / factor).to(x.dtype), seen

    def error(self, setting: Mapping) -> float:
        """The root of the mean square error, relative to the tensor's own."""
        x, y = self.tensors[setting["tensor"]].double(), self.rounded(setting)[0].double()
        return float((y - x).square().mean().sqrt() / x.square().mean().sqrt())

    def counts(self, setting: Mapping) -> dict:
        """Shares that become zero and are clipped, and the error."""
        found = lost(self.rounded(setting)[1], setting["format"])
        return {"underflowed": found["underflowed"], "clipped": found["clipped"], "rms": self.error(setting)}

    def model(self, setting: Mapping, loss: bool) -> dict:
        """What `viz.rounding_bench` draws."""
        name = setting["tensor"]
        shown = self._picture(name, setting["split"], setting["format"], setting["scale"])
        found = {**shown, **self.counts(setting), "loss": None, "base": self.base[name]}
        if loss and self.base[name] is not None:
            found["loss"] = self.loss(name, self.rounded(setting)[0].view(self.shapes[name]))
        return found

    def _picture(self, name, split, format, scale) -> dict:
        f, x = get_format(format), self.tensors[name]
        # in the units of the largest channel, where the scale is one for all
        size = (x * self.factors(name, split)).abs()
        worst = torch.zeros_like(size, dtype=torch.bool)
        worst[int(x.abs().amax(1).argmax())] = x.shape[0] > 1
        there = size > 0
        power = size[there].double().log2()
        top = float(power.max())
        low = max(float(power.quantile(0.002)) if power.numel() < 2**24 else top - 48, top - 48) - 1
        span = (min(low, top - 8), top + 3)
        width = (top - span[0]) / BINS
        place = ((power - span[0]) / width).floor().clamp(0, BINS - 1).long()
        every = torch.bincount(place, minlength=BINS) / x.numel()
        marked = torch.bincount(place[worst[there]], minlength=BINS) / x.numel()
        bins = [(span[0] + k * width, width, float(a), float(b)) for k, (a, b) in enumerate(zip(every, marked, strict=True)) if a]
        return {
            "bins": bins,
            "span": span,
            "ticks": _shown_ticks(format, scale, span),
            "zero": math.log2(f.min_subnormal) - 1 - scale,
            "top": math.log2(f.max) - scale,
        }

    def best(self, setting: Mapping) -> dict:
        """{"scale", "rms": of the least error over all scales, "loss": the least near it, or None}; each asked once."""
        key = (setting["tensor"], setting["format"], setting["split"])
        if key not in self._found:
            f, x = get_format(setting["format"]), self.tensors[setting["tensor"]]
            fits = math.log2(f.max / float(x.abs().max()))  # the largest lands on the last tick
            low, high = board.LIMITS["scale"]
            scales = [k * board.STEP for k in range(int((fits - 2) / board.STEP), int((fits + 6) / board.STEP) + 1)]
            scales = [k for k in scales if low <= k <= high] or [min(max(0.0, low), high)]
            errors = {k: self.error({**setting, "scale": k}) for k in scales}
            scale = min(errors, key=errors.get)
            near = [k for k in scales if abs(k - scale) <= NEAR and self.base[setting["tensor"]] is not None]
            losses = [self.model({**setting, "scale": k}, True)["loss"] for k in near]
            self._found[key] = {"scale": scale, "rms": errors[scale], "loss": min(losses, default=None)}
        return self._found[key]


def _shown_ticks(format: str, scale: float, span: tuple[float, float]) -> list[float]:
    """Where the ticks above 0 stand, as powers of two; only the powers themselves where there are too many to draw."""
    f = get_format(format)
    if f.bits > 8:
        first = max(math.log2(f.min_subnormal), span[0] + scale - 1)
        last = min(math.log2(f.max), span[1] + scale + 1)
        return [k - scale for k in range(int(first), int(last) + 1)]
    places = ticks(f)
    return (places[places > 0].log2() - scale).tolist()


def rounding_bench(tensors: Mapping[str, torch.Tensor], loss: Callable | None = None):
    """Widget 6: drag a scale and see what rounding does to real numbers. Returns the widget, or None with no front end.

    tensors: any of "gradient", "weights", "outlier channel" -> floats, channels first.  loss: a function (name, rounded tensor)
    -> the loss of the trained model with it, or None for a tensor that it knows nothing of; called on release, so a second at
    most. Raises ValueError for other names, for what is no float, not finite or all zero.
    """
    bench = Bench(tensors, loss)
    return board.rounding_bench(bench.model, bench.best, tensors, [name for name in FORMATS if name not in ("fp32", "tf32")])
