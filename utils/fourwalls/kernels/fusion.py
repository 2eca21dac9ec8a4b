"""Bias and GELU, dropout and residual: what follows a product in a transformer, as operators and in one pass.

Each of these operators does next to nothing with a number, and sends the whole tensor to memory and back. On blocks of rows that
stay in a cache, one after the other, memory sees each input once and each result once. Dropout must remember what it dropped:
one byte a number, written with the rest.

    bias + GELU: 18 n -> 2 n numbers        dropout + residual: 38 n -> 13 n bytes in float32

Reference: Hendrycks and Gimpel 2016 (arXiv:1606.08415), the tanh form; Narayanan et al. 2021 (arXiv:2104.04473), section 4.2,
which fuses these two pairs; Korthikanti et al. 2022 (arXiv:2205.05198) for the mask of one byte.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from .rows import check_floating, flat_rows, need_no_gradient, place_of_result, row_slices

__all__ = ["bias_gelu_blocks", "bias_gelu_separate", "dropout_residual_blocks", "dropout_residual_separate"]

CUBE, SLOPE = 0.044715, math.sqrt(2 / math.pi)


def bias_gelu_separate(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x (..., n), bias (n,) -> gelu(x + bias), in eight operators: u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))) / 2."""
    _check_bias(x, bias)
    u = x + bias
    inner = torch.add(u, u.pow(3), alpha=CUBE) * SLOPE
    return (inner.tanh() + 1) * 0.5 * u  # halved first: twice the largest number would be infinite


def bias_gelu_blocks(
    x: torch.Tensor, bias: torch.Tensor, *, rows: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `bias_gelu_separate`, `rows` rows at a time. Forward only; out may be x itself.

    ValueError for sizes that do not fit, rows below 1, or inputs that want a gradient.
    """
    _check_bias(x, bias)
    need_no_gradient("bias_gelu_blocks", "bias_gelu_separate", x, bias)
    result = place_of_result(x, out)
    source, target = flat_rows(x), flat_rows(result)
    slices = [*row_slices(len(source), rows, source.shape[1], x.element_size(), tensors=3)]
    room = x.new_empty(slices[0].stop if slices else 0, source.shape[1])
    for block in slices:
        u, y = room[: block.stop - block.start], target[block]
        torch.add(source[block], bias, out=u)
        torch.pow(u, 3, out=y)
        torch.add(u, y, alpha=CUBE, out=y)
        y.mul_(SLOPE).tanh_().add_(1).mul_(0.5).mul_(u)
    return result


def dropout_residual_separate(
    x: torch.Tensor, residual: torch.Tensor, p: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """residual + dropout(x), both (..., n), in five operators: numbers are dropped with probability p, others divided by 1 - p.

    The noise is float32 whatever x is, so that a float64 oracle drops the same places. ValueError for shapes or a p that do not
    fit.
    """
    _check_dropout(x, residual, p)
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    stays = noise >= p
    return residual + x * stays * (1 / (1 - p))


def dropout_residual_blocks(
    x: torch.Tensor, residual: torch.Tensor, p: float, *, generator: torch.Generator | None = None, rows: int | None = None
) -> torch.Tensor:
    """As `dropout_residual_separate`, `rows` rows at a time; keeps a mask of one byte a number for backward, and nothing else.

    On a CPU the same generator state drops the same places, whatever `rows`: the noise is drawn number after number.
    """
    _check_dropout(x, residual, p)
    return _DropoutResidual.apply(x, residual, p, generator, rows)


class _DropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, p, generator, rows):
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        source, other, target, stays = (flat_rows(t) for t in (x, residual, result, mask))
        slices = [*row_slices(len(source), rows, source.shape[1], x.element_size(), tensors=4)]
        room = torch.empty(slices[0].stop if slices else 0, source.shape[1], device=x.device)
        for block in slices:
            noise = room[: block.stop - block.start].uniform_(generator=generator)
            torch.ge(noise, p, out=stays[block])
            torch.mul(source[block], stays[block], out=target[block])
            target[block].mul_(1 / (1 - p)).add_(other[block])
        ctx.save_for_backward(mask)
        ctx.rest = p, rows
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (mask,), (p, rows) = ctx.saved_tensors, ctx.rest
        if not ctx.needs_input_grad[0]:
            return None, grad, None, None, None
        result = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        source, stays, target = (flat_rows(t) for t in (grad, mask, result))
        for block in row_slices(len(source), rows, source.shape[1], grad.element_size(), tensors=3):
            torch.mul(source[block], stays[block], out=target[block])
            target[block].mul_(1 / (1 - p))
        return result, grad, None, None, None


def _check_bias(x: torch.Tensor, bias: torch.Tensor) -> None:
    check_floating(x, "bias and GELU")
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        wanted = f"({x.shape[-1]},)" if x.dim() else "x of at least one dim"
        raise ValueError(f"bias {tuple(bias.shape)} does not fit x {tuple(x.shape)}; allowed: {wanted}")


def _check_dropout(x: torch.Tensor, residual: torch.Tensor, p: float) -> None:
    check_floating(x, "dropout and residual")
    if x.dim() == 0 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual {tuple(residual.shape)} of {residual.dtype} does not fit x {tuple(x.shape)} of {x.dtype}; allowed: the "
            "same shape, of at least one dim, and dtype"
        )
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p!r}; allowed: 0 <= p < 1")
