"""Fold a batch norm into the convolution before it: in eval both are linear, so one of them is enough.

Quantization must see the weights that inference uses, and those are the convolution's times the norm's gain over its deviation.
Folded before training goes on with rounded weights, there is no norm left whose running statistics could disagree with the
rounded model: then training and evaluation are one function, whatever the batch.

    W' = W gain / sqrt(var + eps),      b' = (b - mean) gain / sqrt(var + eps) + shift

Reference: Jacob et al. 2018 (arXiv:1712.05877), section 3.2.
"""

import copy

import torch
from torch import nn

__all__ = ["fold_batch_norm", "fold_model"]


@torch.no_grad()
def fold_batch_norm(conv: nn.Module, norm: nn.Module) -> nn.Module:
    """A copy of `conv` (a convolution or linear layer, with or without bias) that computes norm(conv(x)) as in eval.

    ValueError for a norm without running statistics, which is another function for every batch, for other channels, and for a
    transposed convolution, whose weight has its outputs in another dim.
    """
    if isinstance(conv, nn.modules.conv._ConvTransposeNd):
        raise ValueError(f"{type(conv).__name__} is transposed; allowed: a convolution or a linear layer")
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            "this batch norm keeps no running statistics and depends on the batch in eval; allowed: track_running_stats"
        )
    if norm.num_features != conv.weight.shape[0]:
        raise ValueError(f"the norm has {norm.num_features} channels, the layer {conv.weight.shape[0]}; they must agree")
    folded = copy.deepcopy(conv)
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    shift = -norm.running_mean.double() * factor
    if norm.weight is not None:
        factor, shift = factor * norm.weight.double(), shift * norm.weight.double() + norm.bias.double()
    bias = 0 if conv.bias is None else conv.bias.double()
    folded.weight.copy_(conv.weight.double() * factor.reshape(-1, *[1] * (conv.weight.dim() - 1)))
    folded.bias = nn.Parameter((bias * factor + shift).to(conv.weight.dtype))
    return folded


def fold_model(model: nn.Sequential) -> nn.Sequential:
    """A copy of a Sequential in which each batch norm right after a convolution or linear layer is folded into it."""
    layers: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            if not layers or not isinstance(layers[-1], (nn.Conv2d, nn.Linear)):
                raise ValueError("a batch norm with no convolution or linear layer right before it cannot be folded")
            layers[-1] = fold_batch_norm(layers[-1], layer)
        else:
            layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers)
