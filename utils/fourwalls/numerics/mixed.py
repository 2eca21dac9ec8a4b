"""Mixed precision: 16-bit weights and gradients to compute with, and a master copy in fp32 that the optimiser steps.

An update is a small part of its weight. Where it is less than half a tick of a 16-bit weight it vanishes, however many there are;
added to a master copy in fp32 it is kept, and the 16-bit weight moves when enough have come together. The copy and Adam's two
numbers cost 12 bytes beside the 2 + 2 of the weight and its gradient: as much as fp32 altogether.

    master -= lr * step(grad32(g16) / scale);    w16 = round(master)        2 + 2 + (4 + 4 + 4) = 16 B a parameter

Reference: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.1; Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1.
"""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .formats import get_format
from .loss_scale import LossScaler, refuse_autocast

__all__ = ["MasterWeights", "lower"]


def lower(model: nn.Module, format: str = "bf16", *, keep: Sequence[type] = ()) -> nn.Module:
    """The model's parameters and float buffers rounded to `format` ("bf16" or "fp16"), in place; returns it.

    keep: classes of modules that stay in fp32, (LayerNorm,) for instance. ValueError for another format.
    """
    if format not in ("bf16", "fp16"):
        raise ValueError(f"format is {format!r}; allowed: bf16, fp16")
    dtype = get_format(format).dtype
    for module in model.modules():
        if isinstance(module, tuple(keep)):
            continue
        for p in module.parameters(recurse=False):
            p.data = p.data.to(dtype)
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point():
                setattr(module, name, b.to(dtype))
    return model


class MasterWeights:
    """`opt = MasterWeights(model.parameters(), lambda masters: Adam(masters, lr=1e-3))`, then `opt.step()` after backward.

    make_optimizer gets one fp32 master for each parameter, in order, and returns an optimiser, ours or torch's. A parameter that
    is in fp32 already is its own master. scaler: scales were on the loss; its unscaling, agreement and skipping apply. state: the
    optimiser's, with the masters in it, so that a ledger counts all 12 bytes as the optimiser's. Raises ValueError for
    parameters that are no floats, and for one that is given twice: its two masters would overwrite each other's steps.
    """

    def __init__(self, params: Iterable[nn.Parameter], make_optimizer: Callable, *, scaler: LossScaler | None = None):
        self.params = list(params)
        wrong = [p.dtype for p in self.params if not p.is_floating_point()]
        if wrong:
            raise ValueError(f"parameters are floats; got {wrong[0]}")
        if len({id(p) for p in self.params}) < len(self.params):
            raise ValueError(f"{len(self.params)} parameters, but some of them twice; allowed: each once (model.parameters())")
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer, self.scaler = make_optimizer(self.masters), scaler

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        """Each parameter -> the optimiser's state of its master, and the master."""
        found = {}
        for p, master in zip(self.params, self.masters, strict=True):
            own = {} if master is p else {"master": master}
            found[p] = {**self.optimizer.state.get(master, {}), **own}
        return found

    def step(self, *, clip: float | None = None, comm=None) -> bool:
        """Gradients to fp32, unscale, clip, step, round the weights; or skip. Returns whether it stepped.

        A 16-bit gradient gives way to its fp32 copy, so that at most 2 bytes a parameter are added for this moment. clip, comm:
        as `LossScaler.step`, to which the order belongs; without a scaler the scale is 1 and only what overflowed is skipped.
        """
        refuse_autocast()  # before any gradient is moved
        scaler = self.scaler or LossScaler(scale=1.0, dynamic=False)
        for p, master in zip(self.params, self.masters, strict=True):
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
        stepped = scaler.step(self.optimizer, clip=clip, comm=comm)
        scaler.update()
        for p, master in zip(self.params, self.masters, strict=True):
            if master is not p:
                master.grad = None
                if stepped:
                    with torch.no_grad():
                        p.copy_(master)
        return stepped

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict:
        """The masters (the weights themselves are a rounding of them), the optimiser's state, the scaler's."""
        return {
            "masters": [m.detach().clone() for m in self.masters],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # torch's hands out its own tensors
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Continue from `state_dict()`: masters and the weights rounded from them. ValueError where shapes differ."""
        shapes = [tuple(m.shape) for m in saved["masters"]]
        if shapes != [tuple(m.shape) for m in self.masters]:
            raise ValueError(f"saved masters have shapes {shapes}; here are {[tuple(m.shape) for m in self.masters]}")
        for p, master, value in zip(self.params, self.masters, saved["masters"], strict=True):
            master.copy_(value)
            if master is not p:
                p.copy_(master)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])
