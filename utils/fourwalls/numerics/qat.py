"""Train with rounded weights: the forward pass rounds, the backward pass looks the other way, and the step is learned.

Rounding has slope 0 almost everywhere, so backward takes it for the identity (straight through) and stops at the ends. The same
convention gives the scale a gradient: inside it is what rounding added, outside the end itself. Evaluation uses the scale that
was learned and nothing of the batch, so it gives the same output twice, and for one sample alone.

    y = s clip(round(x / s)),    dy/dx = 1 inside, 0 outside,    dy/ds = round(x/s) - x/s inside, the end outside

Reference: Bengio et al. 2013 (arXiv:1308.3432); Esser et al. 2020 (learned step size, arXiv:1902.08153).
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from .convert import LINEARS, replace_layers
from .granularity import check_layout
from .grids import Grid, check_finite, check_float

__all__ = ["FakeQuantizer", "LearnedStep", "QATConv2d", "QATLinear", "prepare_qat", "round_through"]


def round_through(x: torch.Tensor) -> torch.Tensor:
    """round(x) forward, the identity backward."""
    return x + (torch.round(x) - x).detach()


class LearnedStep(torch.autograd.Function):
    """apply(x, step, low, high, slow): step broadcasts over x; its gradient is multiplied by `slow`. Keeps x and the step."""

    @staticmethod
    def forward(ctx, x, step, low, high, slow):
        ctx.save_for_backward(x, step)
        ctx.ends = (low, high, slow)
        return torch.clamp(torch.round(x / step), low, high) * step

    @staticmethod
    def backward(ctx, dy):
        x, step = ctx.saved_tensors
        low, high, slow = ctx.ends
        v = x / step
        inside = (v >= low) & (v <= high)
        dstep = torch.where(inside, torch.round(v) - v, v.clamp(low, high)) * dy * slow
        shared = [d for d in range(x.dim()) if step.dim() < x.dim() or step.shape[d] == 1]
        return dy * inside, dstep.sum(shared, keepdim=step.dim() > 0).reshape(step.shape), None, None, None


class FakeQuantizer(nn.Module):
    """Rounds x with a step that is learned. `begin(x)` sets it from x, as the paper does: 2 mean|x| / sqrt(highest integer).

    axis: the dim that has a step of its own (None: one for all). Only symmetric signed grids, or unsigned from 0 for inputs that
    are never negative (`signed=False`). ValueError for a forward before `begin`.
    """

    def __init__(self, bits: int = 8, axis: int | None = None, *, signed: bool = True):
        super().__init__()
        grid = Grid(bits)
        self.low, self.high = (grid.low, grid.high) if signed else (0, 2**bits - 1)
        self.bits, self.axis, self.signed = bits, axis, signed
        self.step = nn.Parameter(torch.zeros(()))

    def _load_from_state_dict(self, state, prefix, *rest) -> None:
        saved = state.get(prefix + "step")
        if self.step.dim() == 0 and saved is not None:  # not begun yet: the saved one says how many steps there are
            self.step.data = torch.empty_like(saved, device=self.step.device)
        super()._load_from_state_dict(state, prefix, *rest)

    @torch.no_grad()
    def begin(self, x: torch.Tensor) -> "FakeQuantizer":
        check_float(x)
        check_finite(x)
        if x.numel() == 0:
            raise ValueError("a step cannot begin from a tensor without values; allowed: calibration data or weights")
        if not self.signed and bool((x < 0).any()):
            raise ValueError("signed=False is for values that are never negative; use signed=True")
        kept = check_layout(x.shape, self.axis)
        shared = [d for d in range(x.dim()) if d not in kept]
        step = 2 * x.abs().mean(shared, keepdim=True) / math.sqrt(self.high)
        self.step.data = torch.where(step > 0, step, torch.ones_like(step)) if shared else step.clamp(min=1e-8)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step.dim() == 0:
            raise ValueError("this quantiser has no step yet; allowed: begin(x) with calibration data or weights first")
        values = max(1, x.numel()) / self.step.numel()
        step = self.step.abs().clamp(min=torch.finfo(x.dtype).tiny)
        return LearnedStep.apply(x, step, self.low, self.high, 1 / math.sqrt(values * self.high))


class _QAT(nn.Module):
    """Weights rounded with a learned step each time; inputs too, with `x_bits`, after a batch has been through `calibrate`."""

    def __init__(self, layer: nn.Module, bits: int, axis: int | None, x_bits: int | None):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.w_round = FakeQuantizer(bits, axis).begin(self.weight.detach())
        self.x_round = None if x_bits is None else FakeQuantizer(x_bits)

    def rounded(self, x):
        if self.x_round is not None:
            if self.x_round.step.dim() == 0 and self.training:
                self.x_round.begin(x.detach())
            x = self.x_round(x)
        return x, self.w_round(self.weight)


class QATLinear(_QAT):
    """y = x W^T + b with rounded weights, trained. axis 0: a step for each output; None: one."""

    def __init__(self, layer: nn.Module, bits: int = 3, axis: int | None = 0, *, x_bits: int | None = None):
        super().__init__(layer, bits, axis, x_bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, w = self.rounded(x)
        return F.linear(x, w, self.bias)


class QATConv2d(_QAT):
    """A convolution with rounded weights, trained. Fold a batch norm into it first (fold.py)."""

    def __init__(self, layer: nn.Conv2d, bits: int = 3, axis: int | None = 0, *, x_bits: int | None = None):
        if layer.padding_mode != "zeros":
            raise ValueError(f"this convolution pads with {layer.padding_mode!r}; allowed: zeros")
        super().__init__(layer, bits, axis, x_bits)
        self.window = {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, w = self.rounded(x)
        return F.conv2d(x, w, self.bias, **self.window)


def prepare_qat(model: nn.Module, bits: int = 3, axis: int | None = 0, *, x_bits: int | None = None) -> nn.Module:
    """A copy in which every linear layer and convolution trains with rounded weights. ValueError where that was done already, and
    for a model with a batch norm: fold it first, or training and evaluation would round different weights. Parameters that layers
    share stay shared.
    """
    if any(isinstance(m, _QAT) for m in model.modules()):
        raise ValueError("this model trains with rounded weights already; prepare the float model that it came from")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise ValueError("the model has a batch norm; fold it into the layer before (fold.fold_model), then prepare")
    result = copy.deepcopy(model)
    kinds = ((LINEARS, QATLinear), ((nn.Conv2d,), QATConv2d))
    found = [(name, make) for name, m in model.named_modules() for kind, make in kinds if isinstance(m, kind)]
    if not found:
        raise ValueError("the model has no linear layer or convolution")
    made = {}
    for name, make in found:
        layer = result.get_submodule(name)
        made[name] = make(layer, bits, axis, x_bits=x_bits)
        made[name].weight, made[name].bias = layer.weight, layer.bias  # the copy's own: tied ones stay tied, frozen ones frozen
    return replace_layers(result, made)
