"""Loss scaling: multiply the loss, so that small gradients do not fall below fp16's last tick; divide before they are used.

Every gradient is linear in the loss, so a factor on the loss is one on all of them, and a power of two costs no accuracy. Too
large a factor overflows: then the step is skipped and the factor halved; after many good steps it is doubled. Weights that
several ranks share must be stepped by all of them or by none, so whether anything overflowed is agreed upon by all ranks.

    g = grad(scale * loss) / scale;    overflow: skip, scale *= backoff;    `interval` good steps in a row: scale *= growth

Reference: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2; torch.amp.GradScaler, whose numbers these are.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from ..collectives import all_reduce
from ..nn.optim import clip_
from ..ranks.comm import Comm

__all__ = ["LossScaler", "agree_overflow", "overflowed", "refuse_autocast"]


def overflowed(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether any element is infinite or NaN."""
    return any(not bool(g.isfinite().all()) for g in gradients)


def agree_overflow(found: bool, comms: Sequence[Comm]) -> bool:
    """Whether any rank found one: one number, the largest over each communicator in turn.

    Over the axes of a grid one after the other (data, tensor, pipeline) every rank hears of every other. Sends a number of 4
    bytes by an all-reduce in each communicator; all its ranks must call this.
    """
    for comm in comms:
        if comm.size > 1:
            found = bool(all_reduce(comm, torch.tensor([float(found)], device=comm.device), op="max"))
    return found


class LossScaler:
    """`scaler.scale(loss).backward(); scaler.step(optimizer, clip=1.0); scaler.update()`.

    value: the scale now. skipped: how many steps were. interval: good steps in a row before the scale grows by `growth`. dynamic
    False: the scale stays, and what overflows is skipped all the same. comms: every communicator whose ranks share parameters
    with this one, or hold other parts of them. least: a scale below it is an error, since whatever is infinite then was not made
    so by the scale. Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        *,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        dynamic: bool = True,
        comms: Sequence[Comm] = (),
        least: float = 2.0**-40,
    ):
        for word, value in (("scale", scale), ("least", least)):
            if not 0 < value < math.inf:
                raise ValueError(f"{word} is {value!r}; a finite number above 0, best a power of two (65536)")
        if not growth > 1 or not 0 < backoff < 1:
            raise ValueError(f"growth {growth!r} and backoff {backoff!r}; growth is above 1 (2.0), backoff between 0 and 1 (0.5)")
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval is {interval!r}; a whole number of at least 1")
        self.value, self.growth, self.backoff, self.interval = _single(scale), growth, backoff, interval
        self.dynamic, self.comms, self.least = dynamic, tuple(comms), least
        self.good, self.skipped = 0, 0
        self._seen: dict[int, tuple] = {}  # optimisers unscaled since the last update: (the optimiser, overflowed, stepped)
        self._done: dict[int, torch.Tensor] = {}  # gradients unscaled since then, by id

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """loss * value."""
        return loss * self.value

    def unscale_(self, optimizer) -> bool:
        """Divide the gradients of the optimiser's parameters by the scale, in place. Returns whether all ranks may use them.

        Before anything looks at their size: clipping, norms, another loss. Once for each update; a gradient that two optimisers
        share is divided once. What overflows in the division itself (a scale below 1) counts, too. Raises ValueError for a second
        time, for fp16 gradients (the small ones that the scale saved would be lost again), and where nothing has a gradient.
        """
        if id(optimizer) in self._seen:
            raise ValueError("these gradients have been unscaled; unscale_() comes once between two calls of update()")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(g.dtype == torch.float16 for g in grads):
            raise ValueError(
                "gradients in fp16 cannot be unscaled where they lie: small ones would become 0; take them to fp32 first "
                "(numerics.mixed.MasterWeights does)"
            )
        if not grads and not self.comms:
            raise ValueError("no parameter of this optimiser has a gradient; call scaler.scale(loss).backward() first")
        inverse = _single(1 / self.value)
        with torch.no_grad():
            for g in grads:
                if id(g) not in self._done:
                    self._done[id(g)] = g.mul_(inverse)
        found = self._overflow(grads)
        self._seen[id(optimizer)] = (optimizer, found, False)
        return not found

    def _overflow(self, grads: list[torch.Tensor]) -> bool:
        return agree_overflow(overflowed(grads), self.comms)

    def step(self, optimizer, *, clip: float | None = None, comm: Comm | None = None) -> bool:
        """Unscale (unless done), clip to the norm `clip`, step; or skip, on all ranks alike. Returns whether it stepped.

        comm: as `nn.optim.clip_`, where the parameters are shards. Raises ValueError inside an autocast region, where the cached
        16-bit weights would be those from before the step, and for a second step before update().
        """
        refuse_autocast()
        if id(optimizer) not in self._seen:
            self.unscale_(optimizer)
        _, found, stepped = self._seen[id(optimizer)]
        if stepped:
            raise ValueError("this optimiser has stepped; call update() before the next step")
        self._seen[id(optimizer)] = (optimizer, found, True)
        if found:
            self.skipped += 1
            return False
        if clip is not None:
            clip_((p for group in optimizer.param_groups for p in group["params"]), clip, comm=comm)
        optimizer.step()
        return True

    def update(self) -> None:
        """After the step: shrink the scale if anything overflowed, else count, and grow it at the end of an interval.

        Raises ValueError where nothing was unscaled, FloatingPointError where the scale falls below `least`.
        """
        if not self._seen:
            raise ValueError("nothing was unscaled since the last update(); call step(optimizer) first")
        found = any(overflow for _, overflow, _ in self._seen.values())
        self._seen.clear()
        self._done.clear()
        if not self.dynamic:
            return
        if found:
            self.value, self.good = _single(self.value * self.backoff), 0
            if self.value < self.least:
                raise FloatingPointError(
                    f"the scale has fallen to {self.value:.3g} and gradients are still infinite or NaN: not the scale makes them "
                    "so; look for the first operation that does (torch.autograd.set_detect_anomaly)"
                )
            return
        self.good += 1
        if self.good == self.interval:
            self.good = 0
            if math.isfinite(larger := _single(self.value * self.growth)):
                self.value = larger

    def state_dict(self) -> dict:
        """What a checkpoint must hold: the scale, and where in the interval it is."""
        return {word: getattr(self, word) for word in ("value", "growth", "backoff", "interval", "good", "skipped", "dynamic")}

    def load_state_dict(self, saved: dict) -> None:
        """Continue from `state_dict()`. ValueError for one that lacks something."""
        lacking = [word for word in self.state_dict() if word not in saved]
        if lacking:
            raise ValueError(f"the saved state lacks {', '.join(lacking)}; it is what state_dict() gave")
        if not 0 < saved["value"] < math.inf:
            raise ValueError(f"the saved scale is {saved['value']!r}; it is a finite number above 0")
        for word in self.state_dict():
            setattr(self, word, saved[word])


def _single(value: float) -> float:
    """Rounded to float32, where torch keeps its scale; infinity beyond."""
    return float(torch.tensor(value, dtype=torch.float64).float())


def refuse_autocast() -> None:
    """ValueError inside a region of torch's autocast or ours (found by its mark, as the mode stands on torch's own stack)."""
    ours = any(getattr(mode, "casts", False) for mode in torch.overrides._get_current_function_mode_stack())
    if ours or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "step() inside an autocast region: its cached 16-bit weights would stay those from before the step; leave the "
            "with-block after the loss, and call backward() and step() outside"
        )
