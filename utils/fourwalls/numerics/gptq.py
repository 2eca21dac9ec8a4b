"""GPTQ: round one column of the weights, and let the columns that are still free make up for it.

A weight's rounding error matters as far as its input is active, and inputs that go together can cover for each other. The
Hessian of the layer's squared error says both. Columns are rounded one after the other; each time the exact minimum over the rest
is taken, which one Cholesky factor of the inverse Hessian holds ready for all columns.

    H = 2/m X^T X + damping;   after column j:   W[:, F] -= (w_j - q_j) / [H_F^-1]_jj * [H_F^-1]_j,F      F: columns still free

Reference: Frantar et al. 2022 (arXiv:2210.17323); Hassibi and Stork 1992 (optimal brain surgeon) for the update.
"""

import torch

from .granularity import expand_scale
from .grids import check_finite
from .quantize import Quantized, quantize

__all__ = ["gptq", "hessian", "layer_error"]

ORDERS = ("given", "hessian")


@torch.no_grad()
def hessian(inputs: torch.Tensor) -> torch.Tensor:
    """Calibration inputs (m, k) -> (k, k) of float64: 2/m X^T X. ValueError for no rows, and for infinities and NaN."""
    if inputs.dim() != 2 or len(inputs) == 0:
        raise ValueError(f"calibration inputs {tuple(inputs.shape)}; allowed: (rows, channels) with at least one row")
    check_finite(inputs, "calibration inputs")
    x = inputs.double()
    return 2 / len(x) * (x.t() @ x)


@torch.no_grad()
def layer_error(w: torch.Tensor, other: torch.Tensor, h: torch.Tensor) -> float:
    """The squared error of the layer's outputs on the calibration inputs, per row and output: what GPTQ makes small."""
    d = (w - other).double()
    return float((d @ h * d).sum() / 2 / len(d))


@torch.no_grad()
def gptq(
    w: torch.Tensor,
    h: torch.Tensor,
    bits: int = 4,
    axis: int | None = 0,
    *,
    group: int | None = None,
    damping: float = 0.01,
    order: str = "hessian",
    symmetric: bool = True,
    observer: str = "absmax",
) -> Quantized:
    """w (n, k), h (k, k) from `hessian` -> Quantized with the scales that `quantize` would choose, and better integers.

    damping: this share of the mean of h's diagonal is added to it, so that channels that never move can be handled. order: the
    columns as "given", or those with the largest diagonal first ("hessian"). A channel that was never active is only rounded.
    ValueError for other sizes, an unknown order, damping below 0, or a Hessian that is not positive definite even when damped.
    """
    if not damping >= 0:
        raise ValueError(f"damping is {damping!r}; allowed: 0 or more, such as 0.01")
    if w.dim() != 2 or tuple(h.shape) != (w.shape[1],) * 2:
        raise ValueError(f"w {tuple(w.shape)} and h {tuple(h.shape)}; allowed: (n, k) and (k, k)")
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; allowed: {', '.join(ORDERS)}")
    plain = quantize(w, bits, None if group else axis, group=group, symmetric=symmetric, observer=observer)
    if 0 in w.shape:
        return plain
    grid = plain.grid
    scale, zero = (expand_scale(t, w.shape, group).expand(w.shape) for t in (plain.scale, plain.zero))
    factor, columns = _factor(h, damping, order)
    left = w.double()[:, columns].clone()
    scale, zero = scale.double()[:, columns], zero.double()[:, columns]
    values = torch.empty_like(left)
    for j in range(left.shape[1]):
        values[:, j] = grid.snap(left[:, j], scale[:, j], zero[:, j])
        error = (left[:, j] - values[:, j] * scale[:, j]) / factor[j, j]
        left[:, j + 1 :] -= error.unsqueeze(1) * factor[j, j + 1 :]
    back = torch.empty_like(columns)
    back[columns] = torch.arange(len(columns))
    whole = (values + zero)[:, back].to(grid.dtype)
    return Quantized(whole, plain.scale, plain.zero, grid, plain.axis, group, w.dtype)


def _factor(h: torch.Tensor, damping: float, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(upper Cholesky factor of the inverse of the damped h, in the order of columns; that order).

    Row j of the factor, divided by its diagonal, is row j of [H_F^-1] divided by its own, F = j and all later columns.
    """
    diagonal = h.diagonal().double()
    columns = torch.argsort(diagonal, descending=True, stable=True) if order == "hessian" else torch.arange(len(h))
    damped = h.double().clone()
    damped.diagonal().add_(damping * float(diagonal.mean()))
    dead = diagonal == 0
    damped.diagonal()[dead] = max(float(diagonal.mean()), 1.0)
    lower, bad = torch.linalg.cholesky_ex(damped[columns][:, columns])
    if int(bad):
        raise ValueError(f"h is not positive definite with damping {damping}; allowed: more rows, or damping 0.01 or more")
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True), columns
