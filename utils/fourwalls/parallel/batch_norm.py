"""Batch norm, the layer for which n ranks are not one device: it looks at its whole batch, and each rank has only a part.

With `comm` the mean and the variance are taken over the rows of all ranks, by sums through which gradients flow; then n ranks
equal one device again. Mean first, deviations second: the difference of two large sums would lose digits.

    mean = sum of x / N,    variance = sum of (x - mean)^2 / N,    N = rows of all ranks;    2 all-reduces forward, 2 backward

Reference: Ioffe and Szegedy 2015 (arXiv:1502.03167); torch's SyncBatchNorm.
"""

import torch
from torch import nn

from ..collectives import autograd
from ..ranks.comm import Comm

__all__ = ["BatchNorm"]


class BatchNorm(nn.Module):
    """x (b, width) or (b, width, ...): mean 0 and variance 1 of each channel over everything else, then scale and shift.

    comm None: over this rank's rows, and then a batch cut in n is not the whole batch. comm: over all ranks' rows (which may
    differ in number); a rank sends 2 (n-1)/n of (2 width + 1) numbers forward and as many backward, and in training *every* rank
    must call it. In `eval()` the running statistics are used and nothing is sent.
    """

    def __init__(self, width: int, *, comm: Comm | None = None, momentum=0.1, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.width, self.momentum, self.eps = width, momentum, eps
        self.__dict__["comm"] = comm  # no part of the state
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(width, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or x.shape[1] != self.width:
            raise ValueError(f"x is {tuple(x.shape)}; allowed: (batch, {self.width}, ...)")
        given, channels = x.dtype, (1, self.width, *(1,) * (x.dim() - 2))
        x = x.to(torch.promote_types(given, torch.float32))  # a sum over a batch is beyond fp16, and a count beyond 2048 too
        if self.training:
            mean, var = self._statistics(x, channels)
        else:
            mean, var = self.running_mean, self.running_var
        unit = (x - mean.view(channels)) * torch.rsqrt(var.view(channels) + self.eps)
        return (unit * self.weight.view(channels) + self.bias.view(channels)).to(given)

    def _statistics(self, x, channels):
        others = [d for d in range(x.dim()) if d != 1]
        rows = x.new_tensor([x.numel() // self.width])
        sums = self._over_ranks(torch.cat([x.sum(others), rows]))
        count = sums[-1].detach()
        if count < 2:
            raise ValueError(f"batch norm over {int(count)} row: a variance needs at least 2; use a larger batch, or eval()")
        mean = sums[:-1] / count
        var = self._over_ranks((x - mean.view(channels)).square().sum(others)) / count
        with torch.no_grad():
            kept = self.running_mean.dtype
            self.running_mean.lerp_(mean.to(kept), self.momentum)
            self.running_var.lerp_((var * (count / (count - 1))).to(kept), self.momentum)
        return mean, var

    def _over_ranks(self, x):
        return x if self.comm is None or self.comm.size == 1 else autograd.all_reduce(self.comm, x)

    def extra_repr(self) -> str:
        return f"{self.width}, {'this rank' if self.comm is None else f'{self.comm.size} ranks'}"
