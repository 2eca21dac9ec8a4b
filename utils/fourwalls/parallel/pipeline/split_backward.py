"""A backward pass in two halves: first what the stage before is waiting for, later what nobody waits for.

In a linear layer's backward pass one product, dy W, makes the gradient of its input, and another one of the same size, dy^T x,
that of its weight; neither needs the other. Inside `splitting(later)` each linear layer is built so that its backward pass makes
the first product alone and puts x and dy aside in `later`; `later.run()` makes the second ones when there is time.

    I:  dx = dy W        W:  dW = dy^T x,  db = sum of dy        kept in between:  x and dy of every linear layer

Other parameters (norms, embeddings) take little time and get their gradient in I. Reference: Qi et al. 2023, "Zero Bubble
Pipeline Parallelism" (arXiv:2401.10241), section 3.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Later", "splitting"]


class Later:
    """Products of weight gradients that have been put off. `waiting`: how many; `bytes`: of what they keep, each storage once."""

    def __init__(self):
        self._open: list[tuple] = []
        self.apart = True  # False: make both products at once, as an ordinary backward pass does

    @property
    def waiting(self) -> int:
        return len(self._open)

    @property
    def bytes(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for entry in self._open for t in entry[2:]}
        return sum(storage.nbytes() for storage in storages.values())

    def put(self, weight, bias, x: torch.Tensor, dy: torch.Tensor) -> None:
        self._open.append((weight, bias, x, dy))

    @torch.no_grad()
    def run(self) -> None:
        """Make all products, in the order of an ordinary backward pass, and add them to the parameters' `grad`."""
        while self._open:
            weight, bias, x, dy = self._open.pop(0)
            for parameter, grad in zip((weight, bias), _weight_gradients(weight, bias, x, dy), strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


@contextmanager
def splitting(later: Later) -> Iterator[None]:
    """Inside, products `F.linear(x, weight, bias)` with a trained weight put the weight's gradient off, into `later`."""
    with _Mode(later):
        yield


class _Mode(TorchFunctionMode):
    def __init__(self, later: Later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            if torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf):
                return _SplitLinear.apply(x, weight, bias, self.later)
        return func(*args, **(kwargs or {}))


def _arguments(input, weight, bias=None):
    return input, weight, bias


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, later):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if ctx.later.apart:
            ctx.later.put(weight, bias, x, dy)
            return dx, None, None, None
        return (dx, *_weight_gradients(weight, bias, x, dy), None)


def _weight_gradients(weight, bias, x, dy):
    """dW (outputs, inputs) and db (outputs,), or None for one that is not trained."""
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dw = dy.t() @ x
    return dw, dy.sum(0) if bias is not None and bias.requires_grad else None
