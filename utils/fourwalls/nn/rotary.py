"""Rotary positions: a query and a key are turned by angles that grow with their place, so their product sees only the distance.

The numbers of a head are taken in pairs, number i with number i + d/2; pair i turns by position * base^(-2i/d). Turning by the
place of the query and back by that of the key leaves the difference, so no table of positions is learned. A turn keeps nothing
for backward: its gradient is the turn back.

    (x_i, x_j) -> (x_i cos - x_j sin,  x_i sin + x_j cos),   j = i + d/2;        R(m) q . R(n) k  depends on  m - n  alone

Reference: Su et al. 2021 (arXiv:2104.09864); the pairing of halves is that of Black et al. 2022 (arXiv:2204.06745).
"""

import torch

__all__ = ["BASE", "rotate"]

BASE = 10000.0


def rotate(x: torch.Tensor, positions: torch.Tensor | None = None, *, base: float = BASE) -> torch.Tensor:
    """x (..., s, d) -> (..., s, d), each row turned by its position; d is even. positions (s,): None for 0 to s - 1.

    Angles in float64, the turn in at least float32. Keeps no activation. ValueError for sizes that do not fit.
    """
    s, d = x.shape[-2:]
    if d % 2:
        raise ValueError(f"rotary positions turn pairs of numbers, but a head is {d} wide; allowed: an even width")
    if positions is None:
        positions = torch.arange(s, device=x.device)
    if positions.shape != (s,):
        raise ValueError(f"positions {tuple(positions.shape)} do not fit x {tuple(x.shape)}; allowed: ({s},)")
    return _Rotate.apply(x, positions, base, 1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, base, sign):
        ctx.rest = positions, base, -sign
        half = x.shape[-1] // 2
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
        angles = positions.to(torch.float64)[:, None] * base**-steps  # (s, d/2)
        cos, sin = angles.cos().to(wide), sign * angles.sin().to(wide)
        a, b = x.to(wide).split(half, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return _Rotate.apply(grad, *ctx.rest), None, None, None
