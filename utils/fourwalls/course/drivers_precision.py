"""What runs on the learner's side of lab 7: a rounding, steps under a scaler, steps of 16-bit weights. It knows no answer.

    driver(comm, {name: function}, *inputs) -> plain data

Reference: course/judge.py, which names these functions.
"""

import torch

from .drivers_quantize import probed
from .probe import Probe, mark

__all__ = ["probed", "scaled", "trained"]


class _Descent:
    """An optimiser that notes the gradients with which it steps."""

    def __init__(self, params):
        self.params, self.used = params, []
        self.param_groups = [{"params": params}]

    @torch.no_grad()
    def step(self):
        """p -= grad / 8, and a note."""
        self.used.append([None if p.grad is None else p.grad.clone() for p in self.params])
        for p in self.params:
            if p.grad is not None:
                p -= p.grad / 8


def scaled(comm, functions, scale, interval, max_norm, steps):
    """steps: for each, this rank's gradients (None for a frozen parameter). They come out of a 16-bit backward of scale * loss.

    What each step said, with which gradients the optimiser stepped (None where it did not), and the scale after it.
    """
    scaler = list(functions.values())[-1](scale, interval, max_norm)
    params = [torch.nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in steps[0]]
    said, used, scales = [], [], []
    for gradients in steps:
        optimizer, now = _Descent(params), float(scaler.scale)
        for p, g in zip(params, gradients, strict=True):
            p.grad = None if g is None else (g * now).half().float()
        said.append(scaler.step(optimizer, comm))
        used.append(optimizer.used)
        scales.append(float(scaler.scale))
    return {"said": said, "used": used, "scales": scales}


def trained(comm, functions, sizes, weights, steps, probe=Probe, mark=mark):
    """The last of `functions` as master_step(w16, g16, state) for each list of gradients in `steps`, then a product with each.

    The weights after the first and the last step, bytes that were born and live after each, and what torch was asked to do.
    """
    own = [w.clone() for w in weights]
    given = [[g.clone() for g in gradients] for gradients in steps]
    inputs = [torch.ones(3, len(w), dtype=w.dtype) for w in own]
    state, live, first = {}, [], None
    with probe() as seen:
        mark(sizes)
        for gradients in given:
            list(functions.values())[-1](own, gradients, state)
            live.append(seen.live)
            if first is None:
                first = [w.tolist() for w in own]
        for x, w in zip(inputs, own, strict=True):
            x.to(w.dtype) @ w
        mark(sizes)
    return {"first": first, "last": own, "live": live, "seen": seen.report()}
