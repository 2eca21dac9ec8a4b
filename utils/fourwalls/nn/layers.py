"""The layers a transformer is made of: Linear, LayerNorm, Embedding, GELU, Dropout, and the loss.

Each module holds its parameters and says how they start; the arithmetic is one call to torch, whose backward keeps exactly the
tensors that the memory formulas count. The same operations with forward and backward written out stand in `by_hand`.

    y = x W^T + b        keeps x;        dX = dY W,   dW = dY^T X,   db = sum dY

Reference: Ba et al. 2016 (arXiv:1607.06450) for layer norm; Hendrycks and Gimpel 2016 (arXiv:1606.08415) for GELU.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .init import fill

__all__ = ["GELU", "Dropout", "Embedding", "LayerNorm", "Linear", "cross_entropy", "dropout"]


class Linear(nn.Module):
    """y = x W^T + b. weight (outputs, inputs), bias (outputs,) or None. `std` scales the initial weight; the bias starts at 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02, device=None, dtype=None):
        super().__init__()
        if not all(hasattr(size, "__index__") for size in (inputs, outputs)) or min(inputs, outputs) < 1:
            raise ValueError(f"Linear({inputs}, {outputs}): both sizes are at least 1, and whole numbers")
        self.inputs, self.outputs, self.std = inputs, outputs, std
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self, name: str = "linear", seed: int = 0) -> None:
        fill(self.weight, f"{name}.weight", seed=seed, std=self.std)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)  # (..., inputs) -> (..., outputs)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, bias={self.bias is not None}"


class LayerNorm(nn.Module):
    """Mean 0 and variance 1 over the last dim, then scale and shift. Keeps its input and two statistics a row."""

    def __init__(self, width: int, *, bias: bool = True, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if bias else None
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self, name: str = "norm", seed: int = 0) -> None:
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)  # (..., h) -> (..., h)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class Embedding(nn.Module):
    """A table of rows; a token picks its row. weight (rows, width). Keeps the tokens, not the rows."""

    def __init__(self, rows: int, width: int, *, std: float = 0.02, device=None, dtype=None):
        super().__init__()
        self.rows, self.width, self.std = rows, width, std
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))
        self.init_parameters()

    def init_parameters(self, name: str = "embedding", seed: int = 0) -> None:
        fill(self.weight, f"{name}.weight", seed=seed, std=self.std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        try:
            return F.embedding(tokens, self.weight)  # (...) -> (..., width)
        except IndexError:  # looked at only now: on its way every token would cost a comparison
            bad = tokens[(tokens < 0) | (tokens >= self.rows)]
            raise ValueError(f"token {int(bad[0])}; the table has rows 0 to {self.rows - 1}") from None

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.width}"


class GELU(nn.Module):
    """x Phi(x), with Phi the normal distribution function; "tanh" is GPT-2's approximation of it. Keeps its input."""

    def __init__(self, approximate: str = "tanh"):
        super().__init__()
        if approximate not in ("tanh", "none"):
            raise ValueError(f"approximate is {approximate!r}; allowed: 'tanh', or 'none' for the exact error function")
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class _Dropout(torch.autograd.Function):
    """Keeps a mask of one byte a number, as the papers count; torch's own on a CPU keeps the noise in the input's dtype."""

    @staticmethod
    def forward(ctx, x, p, generator):
        if callable(generator):
            mask = generator(x.shape, p, x.device)
        else:
            mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None


def dropout(
    x: torch.Tensor, p: float, *, training: bool = True, generator: torch.Generator | Callable | None = None
) -> torch.Tensor:
    """Zero each number with probability `p` and scale the others by 1 / (1 - p); nothing if not training or p is 0.

    The mask does not depend on x's dtype, so a float64 oracle drops the same places. Draws from torch's default generator, or
    from `generator`: one of torch's, or a function (shape, p, device) -> the mask of what stays, for a rank that holds a part.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p!r}; allowed: 0 <= p < 1")
    return _Dropout.apply(x, p, generator) if training and p > 0 else x


class Dropout(nn.Module):
    """`dropout` as a module: active in `train()`, the identity in `eval()`."""

    def __init__(self, p: float):
        super().__init__()
        dropout(torch.empty(0), p)  # refuses a bad p now, not in the first step
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, training=self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean", ignore: int = -100) -> torch.Tensor:
    """Mean (or "sum", or "none" for each token) of -log softmax(logits)[target]. Targets equal to `ignore` do not count.

    logits (..., V), targets (...). 16-bit logits are taken to float32 first: a sum over V in 16 bits would lose the small ones.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}; allowed: {tuple(logits.shape[:-1])}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide.flatten(0, -2) if logits.dim() > 1 else wide.unsqueeze(0)  # (V,) is one token
    loss = F.cross_entropy(wide, targets.flatten(), reduction=reduction, ignore_index=ignore)
    return loss.view(targets.shape) if reduction == "none" else loss
