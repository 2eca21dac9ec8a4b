"""The training loop of the studies of quality: AdamW, a rate that rises and falls, whatever the loss and the data are.

What is measured in a study must not hang on how each of them trains, so they train alike.

    rate of step k of n  =  lr min(1, (k + 1) / 20) (1 - 0.98 k / n)

Reference: Loshchilov and Hutter 2019 (arXiv:1711.05101) for AdamW.
"""

from collections.abc import Callable

import torch
from torch import nn

from ..nn.optim import AdamW

__all__ = ["descend"]


def descend(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch_of: Callable[[int], tuple],
    *,
    steps: int,
    lr: float,
    eps: float = 1e-8,
) -> nn.Module:
    """`steps` steps down loss_of(*batch_of(step)), of the parameters that want a gradient; in place. Returns the model."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=eps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * (1 - 0.98 * step / steps)
        optimizer.zero_grad()
        loss_of(*batch_of(step)).backward()
        optimizer.step()
    return model
