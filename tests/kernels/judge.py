"""What the tests of kernels share: bounds from dtype and sizes, the count of elements outside them, and planted faults."""

import torch

from ..planting import planted  # noqa: F401 - with the rest of what judges a kernel


def unit(dtype) -> float:
    return torch.finfo(dtype).eps / 2


def wrong(got, exact, bound) -> int:
    """Elements of `got` further from `exact` (float64) than `bound`; nan and the infinities must stand in the same places."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    got = got.detach().double()
    same = (got == exact) | (got.isnan() & exact.isnan())
    return int((~(same | ((got - exact).abs() <= bound))).sum())


def spoiled(got, bound, place=-1):
    """`got` with one element off by ten times its bound."""
    off = got.detach().double().clone(memory_format=torch.contiguous_format)
    off.view(-1)[place] += 10 * (bound if isinstance(bound, float) else float(bound.reshape(-1)[place]))
    return off


def numbers(*shape, seed=0, dtype=torch.float64, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def softmax_bound(x, exact):
    """Relative: the argument of exp is off by u times its size, the sum by n u; then exp, division and the rounding of x - m.

    With the running maximum each number passes through two differences at most, and through a rescaling for each chunk.
    """
    wide = x.double()
    span = (wide - wide.amax(-1, keepdim=True)).abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
    return exact * (2 * x.shape[-1] + 4 * span + 16) * unit(x.dtype) + torch.finfo(x.dtype).tiny


def norm_bound(x, weight, bias, eps=1e-5):
    """Mean and distance are off by n u max|x|, which the scale magnifies; the variance by as much relative to the distances."""
    wide = x.double()
    scale = 1 / (wide.var(-1, correction=0, keepdim=True) + eps).sqrt()
    normal = (wide - wide.mean(-1, keepdim=True)) * scale
    largest = wide.abs().amax(-1, keepdim=True)
    n = x.shape[-1]
    error = (n + 8) * unit(x.dtype) * (largest * scale * (1 + normal.abs()) + 1 + normal.abs())
    return error * weight.double().abs() + 4 * unit(x.dtype) * bias.double().abs() + torch.finfo(x.dtype).tiny
