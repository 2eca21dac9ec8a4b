"""Train with integer products: forward and both products of backward take int8, each operand rounded along the dims it keeps.

The three products of a linear layer sum over three different dims, and a scale may never lie along the one that is summed over:
so the input is rounded once for each row and once for each column, and the gradient too. What is kept for backward is the int8
input with its scales, a quarter of the bytes. Rounding is taken for the identity (straight through).

    Y = Xr Wr^T (over k),     dX = Gr Wc (over n),     dW = Gc^T Xc (over m)          r: a scale for each row, c: each column

Reference: LightSeq's int8 training (github.com/bytedance/lightseq); Wortsman et al. 2023 (SwitchBack, arXiv:2304.13013).
"""

import copy

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .convert import linear_names, replace_layers
from .int8 import int8_linear
from .quantize import quantize

__all__ = ["Int8Product", "Int8TrainingLinear", "int8_training"]


class Int8Product(torch.autograd.Function):
    """apply(x, weight, bias, how): x (m, k), weight (n, k), bias (n,) or None -> (m, n). Keeps int8 x, its scales, and the
    weight.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, how):
        xq, wq = quantize(x, 8, 0), quantize(weight, 8, 0)
        ctx.save_for_backward(xq.values, xq.scale, weight)
        ctx.how, ctx.bias = how, bias is not None
        return int8_linear(xq.values, xq.scale, wq.values, wq.scale, bias, how=how, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        values, scale, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight.t(), ctx.how)
        if ctx.needs_input_grad[1]:
            dw = product(dy.t(), (values * scale).t(), ctx.how)
        return dx, dw, dy.sum(0) if ctx.bias else None, None


def product(a: torch.Tensor, b: torch.Tensor, how: str) -> torch.Tensor:
    """a (m, k), b (n, k), floats -> a b^T through int8, each row of a and of b with its own scale."""
    aq, bq = quantize(a, 8, 0), quantize(b, 8, 0)
    return int8_linear(aq.values, aq.scale, bq.values, bq.scale, how=how, dtype=a.dtype)


class Int8TrainingLinear(nn.Module):
    """A linear layer whose three products are of int8. It shares the float parameters of `layer`, which the optimiser updates."""

    def __init__(self, layer: nn.Module, *, how: str = "auto"):
        super().__init__()
        self.weight, self.bias, self.how = layer.weight, layer.bias, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Int8Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias, self.how)
        return y.view(*x.shape[:-1], len(self.weight))


def int8_training(model: nn.Module, *, how: str = "auto") -> nn.Module:
    """A copy of the model that trains with int8 products in all its linear layers. ValueError where there is none."""
    result = copy.deepcopy(model)
    names = linear_names(result)
    if not names:
        raise ValueError("the model has no linear layer (or it was converted already)")
    return replace_layers(result, {name: Int8TrainingLinear(result.get_submodule(name), how=how) for name in names})
