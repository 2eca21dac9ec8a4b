"""Move the difficulty from activations to weights: divide each channel of x by s, multiply the weights' column by s.

An outlier channel takes the grid of all activations that share its scale, while weights are even and have room to spare. The
product does not change when a channel is divided and its column multiplied, and the division can be hidden in the norm before.
With s a power of two, not a single bit changes.

    y = (x / s) (s W)^T,     s_j = max|x_j|^a / max|W_j|^(1 - a)

Reference: Xiao et al. 2023 (SmoothQuant, arXiv:2211.10438), equation 4.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .grids import check_finite

__all__ = ["migrate", "rescale", "smooth"]


@torch.no_grad()
def smooth(xmax: torch.Tensor, w: torch.Tensor, a: float = 0.5, *, power_of_two: bool = False) -> torch.Tensor:
    """xmax (k,), largest |x| of each channel; w (n, k), one weight or several stacked -> s (k,).

    a: how much of the difficulty moves; 1 makes all channels of x alike, 0 all columns of w. 1 where a channel or its column is
    all zero: there is nothing to move. power_of_two: the nearest one, so that dividing is exact. ValueError for other sizes, an a
    outside 0 to 1, and for infinities and NaN: a channel that was infinite in calibration says nothing about its size.
    """
    if xmax.shape != w.shape[1:] or w.dim() != 2:
        raise ValueError(f"xmax {tuple(xmax.shape)} and w {tuple(w.shape)}; allowed: (k,) and (n, k)")
    if not 0 <= a <= 1:
        raise ValueError(f"a is {a!r}; allowed: 0 to 1, such as 0.5; nearest legal: {min(max(a, 0), 1)}")
    check_finite(xmax, "xmax")
    check_finite(w, "w")
    wmax = w.abs().amax(0) if len(w) else torch.zeros_like(xmax)
    alive = (xmax > 0) & (wmax > 0)
    s = torch.where(alive, xmax.abs() ** a / wmax ** (1 - a), 1.0)
    s = torch.where(torch.isfinite(s) & (s > 0), s, 1.0)
    return torch.exp2(torch.log2(s).round()) if power_of_two else s


@torch.no_grad()
def rescale(norm: nn.Module, linears: Sequence[nn.Module], s: torch.Tensor) -> None:
    """In place: the norm gives x / s, and each layer that reads it has s W. The function stays; all readers must be in
    `linears`. A weight that several of them share is multiplied once.
    """
    if any(layer.weight.shape[1] != len(s) for layer in linears) or norm.weight.shape != s.shape:
        raise ValueError(f"s has {len(s)} channels; the norm {tuple(norm.weight.shape)} and every reader must have as many")
    norm.weight.div_(s)
    if getattr(norm, "bias", None) is not None:
        norm.bias.div_(s)
    for weight in {id(layer.weight): layer.weight for layer in linears}.values():
        weight.mul_(s)


@torch.no_grad()
def migrate(norm: nn.Module, linears: Sequence[nn.Module], xmax: torch.Tensor, a: float = 0.5, *, power_of_two: bool = True):
    """`smooth` over all layers that read the norm's output, then `rescale`; returns s."""
    s = smooth(xmax, torch.cat([layer.weight for layer in linears]), a, power_of_two=power_of_two)
    rescale(norm, linears, s)
    return s
