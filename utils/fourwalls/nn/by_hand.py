"""Forward and backward written out, to see what backward needs and why it costs twice the forward.

Each class is an operation with its own gradient: what it keeps is what `save_for_backward` names, and each product in
`backward` can be counted. They give what the layers give, slower; `torch.autograd.gradcheck` compares them with finite
differences.

    y = x W^T + b:   dX = dY W,   dW = dY^T X,   db = sum over rows of dY        two products backward for one forward

Reference: Goodfellow, Bengio, Courville, "Deep Learning" (2016), section 6.5.
"""

import math

import torch

__all__ = ["CrossEntropyByHand", "GELUByHand", "LayerNormByHand", "LinearByHand", "SoftmaxByHand"]


class LinearByHand(torch.autograd.Function):
    """apply(x, weight, bias): x (n, inputs), weight (outputs, inputs), bias (outputs,) -> (n, outputs). Keeps x and weight."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x, dy.sum(0)


class LayerNormByHand(torch.autograd.Function):
    """apply(x, weight, bias, eps): over the last dim. Keeps x and, for each row, its mean and 1 / standard deviation."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, mean, rstd, weight)
        return (x - mean) * rstd * weight + bias

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd, weight = ctx.saved_tensors
        unit = (x - mean) * rstd  # computed again rather than kept
        g = dy * weight
        # the mean and the variance depend on every x of the row: take their share out of g
        dx = rstd * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
        rows = tuple(range(x.dim() - 1))
        return dx, (dy * unit).sum(rows), dy.sum(rows), None


class GELUByHand(torch.autograd.Function):
    """apply(x): x Phi(x). Keeps x. d/dx = Phi(x) + x phi(x), with phi the normal density."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
        return dy * (below + x * density)


class SoftmaxByHand(torch.autograd.Function):
    """apply(x): over the last dim. Keeps its output, not its input: dx = y (dy - sum(dy y))."""

    @staticmethod
    def forward(ctx, x):
        up = torch.exp(x - x.amax(-1, keepdim=True))  # the largest becomes exp(0): nothing overflows
        y = up / up.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(-1, keepdim=True))


class CrossEntropyByHand(torch.autograd.Function):
    """apply(logits, targets): mean of -log softmax at the target. logits (n, V), targets (n,). d/dlogits = (softmax - onehot) /
    n.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        shifted = logits - logits.amax(-1, keepdim=True)
        logp = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logp, targets)
        return -logp.gather(-1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx, dloss):
        logp, targets = ctx.saved_tensors
        grad = logp.exp()
        grad[torch.arange(len(targets)), targets] -= 1
        return grad * (dloss / len(targets)), None
