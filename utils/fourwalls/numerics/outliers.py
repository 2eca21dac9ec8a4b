"""A few channels that are far larger than all others: how to make them, and how to multiply around them.

In models of billions of parameters some channels are 20 to 100 times as large as the rest, always the same ones. They do not
appear in models of a lesson's size, so here they are put in, by a rescale that changes no bit of what the model computes. The
decomposition keeps the columns beyond a threshold in floats and multiplies the others as int8.

    x W^T = x[:, big] W[:, big]^T  +  int8(x[:, small]) int8(W[:, small])^T

Reference: Dettmers et al. 2022 (LLM.int8(), arXiv:2208.07339).
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..nn.gpt import GPT
from .grids import check_finite
from .int8 import check_layer, linear_in_blocks
from .quantize import quantize
from .smooth import rescale

__all__ = ["DecomposedLinear", "inject", "outlier_columns", "readers"]

THRESHOLD = 6.0


def outlier_columns(x: torch.Tensor, threshold: float = THRESHOLD) -> torch.Tensor:
    """x (m, k) -> the columns (indices, sorted) that hold a value of at least `threshold` in magnitude. ValueError for NaN."""
    check_finite(x)
    return (x.abs() >= threshold).any(0).nonzero().flatten()


class DecomposedLinear(nn.Module):
    """Columns of x beyond the threshold are multiplied in floats, with float weights; the others as int8, a scale for each row.

    Which columns these are is decided for each input; `fixed`, indices found in calibration, decides once, and only then the
    float weights of the other columns are gone and memory is saved. share: of the columns, what the last call kept in floats.
    ValueError for `fixed` columns that do not exist, or that come twice.
    """

    def __init__(self, layer: nn.Module, *, threshold: float = THRESHOLD, fixed: torch.Tensor | None = None, how: str = "auto"):
        super().__init__()
        check_layer(layer)
        self.threshold, self.how, self.share = threshold, how, 0.0
        self.columns = layer.weight.shape[1]
        self.register_buffer("weight", layer.weight.detach().clone())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        if fixed is not None:
            fixed = _check_fixed(fixed, self.columns)
            small = quantize(self.weight[:, _others(fixed, self.columns)], 8, 0)
            self.weight = self.weight[:, fixed].clone()
        self.register_buffer("fixed", fixed)
        self.register_buffer("values", None if fixed is None else small.values)
        self.register_buffer("scale", None if fixed is None else small.scale)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        big = outlier_columns(flat, self.threshold) if self.fixed is None else self.fixed
        small = _others(big, self.columns)
        if self.fixed is None:
            wq = quantize(self.weight[:, small], 8, 0)
            values, scale = wq.values, wq.scale
        else:
            values, scale = self.values, self.scale
        wide = self.weight[:, big] if self.fixed is None else self.weight
        self.share = len(big) / max(1, self.columns)
        y = linear_in_blocks(flat[:, small], values, scale, self.bias, how=self.how)
        return y.addmm_(flat[:, big], wide.t()).view(*x.shape[:-1], -1)


def _check_fixed(fixed: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of columns as int64, each once."""
    fixed = torch.as_tensor(fixed)
    whole = fixed.dim() == 1 and not fixed.is_floating_point() and fixed.dtype != torch.bool
    fixed = fixed.to(torch.int64) if whole or not fixed.numel() else fixed
    if fixed.dtype != torch.int64 or bool(((fixed < 0) | (fixed >= count)).any()) or len(fixed.unique()) < fixed.numel():
        raise ValueError(f"fixed is {fixed.tolist()}; allowed: different indices of 0 to {count - 1}, as whole numbers")
    return fixed.reshape(-1)


def _others(some: torch.Tensor, count: int) -> torch.Tensor:
    keep = torch.ones(count, dtype=torch.bool, device=some.device)
    keep[some] = False
    return keep.nonzero().flatten()


def readers(model: GPT) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Each norm of a GPT's blocks, with the linear layers that read its output."""
    pairs: list[tuple[nn.Module, list[nn.Module]]] = []
    for block in model.blocks:
        pairs.append((block.norm1, [block.attention.query, block.attention.key, block.attention.value]))
        pairs.append((block.norm2, [block.mlp.up]))
    return pairs


@torch.no_grad()
def inject(model: GPT, channels: Sequence[int], factor: float = 64.0) -> GPT:
    """In place: make `channels` of every norm's output `factor` times as large, and their weights as much smaller.

    factor is a power of two: then the model computes the same bits as before. ValueError for others, and for no such channel.
    """
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        near = 2.0 ** round(math.log2(factor)) if 0 < factor < math.inf else 64.0
        raise ValueError(f"factor is {factor!r}; allowed: a power of two, so that no bit changes; nearest: {near:g}")
    width = model.config.width
    if any(not 0 <= c < width for c in channels):
        raise ValueError(f"channels {list(channels)}; allowed: 0 to {width - 1}")
    s = torch.ones(width, dtype=model.norm.weight.dtype)
    s[list(channels)] = 1 / factor
    for norm, linears in readers(model):
        rescale(norm, linears, s)
    return model
