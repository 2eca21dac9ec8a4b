"""A byte GPT trained in mixed bf16 beside fp32, several seeds: how far the held-out losses part, and how far they part anyway.

Two fp32 runs whose first weights differ in the last bit part too: training is chaotic, so that a gap below that of the twin is
no fault of the format. The size of Adam's eps decides how fast: with 1e-8 the step is the gradient's sign while it is small.

    gap = loss(bf16) - loss(fp32);    twin's gap = loss(fp32, weights times 1 + 2^-23) - loss(fp32); nats a byte, held-out text

Reference: Micikevicius et al., "Mixed precision training" (arXiv:1710.03740).
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from ..nn.gpt import GPT, GPTConfig
from ..nn.optim import Adam, clip_
from ..nn.text import batch
from ..numerics.autocast import Autocast
from .record import Row

__all__ = ["PrecisionStudy", "gaps", "summary"]


@dataclass(frozen=True)
class PrecisionStudy:
    """Sizes of the study; the defaults train 0.6 million parameters for 100 steps, as notebook 07 does."""

    config: GPTConfig = GPTConfig(length=64, width=128, layers=3, heads=4)
    steps: int = 100
    rows: int = 4
    lr: float = 1e-3
    eps: float = 1e-3

    def rate(self, step: int) -> float:
        """Learning rate: up for 15 steps, then down to almost nothing."""
        return self.lr * min((step + 1) / 15, 1.02 - step / self.steps)


def _bf16():
    return Autocast("bf16", arithmetic="float32")


def _trained(study: PrecisionStudy, seed: int, region, *, nudge: float = 0.0) -> float:
    """Held-out loss after the study's steps; nudge: all first weights times 1 + nudge."""
    model = GPT(replace(study.config, seed=seed))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + nudge)
    optimizer = Adam(model.parameters(), eps=study.eps)
    for step in range(study.steps):
        optimizer.param_groups[0]["lr"] = study.rate(step)
        optimizer.zero_grad()
        with region():
            loss = model.loss(*batch(seed, step, batch=study.rows, length=study.config.length))
        loss.backward()
        clip_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad(), region():
        parts = [model.loss(*batch(seed + 1, k, batch=8, length=study.config.length, split="held-out")) for k in range(6)]
    return float(sum(parts) / len(parts))


def gaps(seed: int, study: PrecisionStudy) -> dict[str, float]:
    """{"fp32": loss, "bf16": gap, "fp32, last bit": gap} in nats a byte, for one seed of weights and text."""
    plain = _trained(study, seed, nullcontext)
    return {
        "fp32": plain,
        "bf16": _trained(study, seed, _bf16) - plain,
        "fp32, last bit": _trained(study, seed, nullcontext, nudge=2**-23) - plain,
    }


def summary(study: PrecisionStudy, *, seeds=(0, 1, 2), say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """A row for each form: the mean over the seeds, the smallest and the largest."""
    runs = []
    for seed in seeds:
        say(f"precision, training with seed {seed}")
        runs.append(gaps(seed, study))
    sizes = {"seeds": len(runs), "steps": study.steps, "lr": study.lr, "eps": study.eps}
    for form in runs[0]:
        values = [run[form] for run in runs]
        yield Row(
            benchmark="precision",
            case={"what": "held-out loss", "form": form, **sizes},
            metric="loss" if form == "fp32" else "gap",
            value=statistics.mean(values),
            unit="nat",
            low=min(values),
            high=max(values),
            peer=None if form == "fp32" else "fp32",
            ok=all(math.isfinite(value) for value in values),
        )
