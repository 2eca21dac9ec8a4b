"""Sequence parallelism: between the shared parts each rank holds s/t tokens, so norms, dropout and residuals are shared too.

An all-reduce is a reduce-scatter and an all-gather. Do the first at the exit and the second at the next entrance, and what lies
between is cut: each rank keeps 1/t of it. The entrance's input must then be whole again for the gradient of the weights: gather
it once more in backward and send a quarter more bytes, or keep the gathered one and more memory.

    kept, in sbh:  34/t  (gather again)   or   34/t + 4 (1 - 1/t)  (keep)        a layer sends: 6 all-gathers + 4 reduce-scatters,
    or 4 + 4

Reference: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2 (g-bar) and Table 2.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives import autograd, ring
from ..cost.shape import nearest_multiples
from ..ranks.comm import Comm

__all__ = ["SequenceRegion"]


class SequenceRegion:
    """As `tensor.Region`, with activations cut along the sequence in between: (b, s/t, h) on each rank.

    keep False: the input of the products is kept cut and gathered again in backward (3 all-gathers and 2 reduce-scatters for an
    entrance and an exit); keep True: it is kept whole (2 and 2). The collectives can be your own.
    """

    split_dim = 1

    def __init__(
        self,
        comm: Comm,
        *,
        keep: bool = False,
        all_gather: Callable = ring.all_gather,
        reduce_scatter: Callable = ring.reduce_scatter,
        all_reduce: Callable = ring.all_reduce,
    ):
        self.comm, self.keep, self.all_reduce = comm, keep, all_reduce
        self.pair = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}

    def enter(self, x: torch.Tensor, layers: Sequence) -> list[torch.Tensor]:
        """x (b, s/t, h) -> x W^T + bias of each layer's shard for all tokens, (b, s, outputs/t). One all-gather; backward one
        reduce-scatter, and without `keep` one all-gather more.
        """
        if self.keep:
            whole = autograd.all_gather(self.comm, x, 1, **self.pair)
            return [F.linear(whole, layer.weight, layer.bias) for layer in layers]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return list(_GatherAndMultiply.apply(x, self.comm, self.pair, len(layers), *weights, *biases))

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """(b, s, h), each rank's part of a sum -> this rank's tokens of the sum, (b, s/t, h). One reduce-scatter; backward one
        all-gather.
        """
        return autograd.reduce_scatter(self.comm, partial, 1, **self.pair)

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of `x` along `dim`, which is the whole sequence, that belong to this rank's tokens; a view."""
        width = x.shape[dim] // self.comm.size
        return x.narrow(dim, self.comm.rank * width, width)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s/t, h) -> (b, s, h) on every rank: for looking, not for training."""
        return autograd.gather_from(self.comm, x, 1, all_gather=self.pair["all_gather"])

    def check_length(self, length: int) -> None:
        """ValueError, with the nearest legal lengths, unless t divides the sequence."""
        t = self.comm.size
        if length % t:
            raise ValueError(
                f"a sequence of {length} cannot be shared by t {t}; nearest legal length: {nearest_multiples(length, t)} "
                "(or tensor parallelism alone, which holds whole sequences)"
            )

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """After backward: sum the gradients of all parameters that every rank holds (norms, biases after an exit, positions).

        Each rank has seen only its own tokens there. One all-reduce of all of them together, once a step. Parameters that are
        cut (named in their module's `cuts`) have seen all tokens and stay as they are.
        """
        grads = []
        for module in model.modules():
            cuts = getattr(module, "cuts", {})
            grads += [
                p.grad for name, p in module.named_parameters(recurse=False) if p.grad is not None and cuts.get(name) is None
            ]
        for dtype in dict.fromkeys(g.dtype for g in grads):
            alike = [g for g in grads if g.dtype == dtype]
            flat = self.all_reduce(self.comm, torch.cat([g.reshape(-1) for g in alike]))
            for g, part in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                g.copy_(part.view_as(g))


class _GatherAndMultiply(torch.autograd.Function):
    """y_i = gather(x) W_i^T + b_i, keeping x cut: backward gathers it again for dW_i, and scatters the sum of dY_i W_i."""

    @staticmethod
    def forward(ctx, x, comm, pair, count, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.rest = comm, pair
        whole = autograd.all_gather(comm, x, 1, **pair)
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        comm, pair = ctx.rest
        count = len(weights)
        needed = ctx.needs_input_grad
        dx, dw, db = None, [None] * count, [None] * count
        if needed[0]:
            partial = grads[0] @ weights[0]
            for g, w in zip(grads[1:], weights[1:], strict=True):
                partial += g @ w
            dx = autograd.reduce_scatter(comm, partial, 1, **pair)
        rows = [g.flatten(0, -2) for g in grads]
        if any(needed[4 : 4 + count]):
            whole = autograd.all_gather(comm, x, 1, **pair).flatten(0, -2)
            dw = [g.T @ whole if need else None for g, need in zip(rows, needed[4 : 4 + count], strict=True)]
        db = [g.sum(0) if need else None for g, need in zip(rows, needed[4 + count :], strict=True)]
        return dx, None, None, None, *dw, *db
