"""What runs on the learner's side of lab 5: forward, backward, and what one rank has then. It knows no answer.

    driver(comm, {name: function}, *inputs) -> {"y": ..., "grad": ..., ...}

Reference: course/judge.py, which names these functions.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["conjugate", "layer", "vocabulary"]


class _Counting:
    """The communicator, and how many bytes this rank has sent through it."""

    def __init__(self, comm):
        self._comm, self.sent = comm, 0

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name not in ("send", "isend", "exchange"):
            return found

        def counted(x, *args, **kwargs):
            self.sent += x.numel() * x.element_size()
            return found(x, *args, **kwargs)

        return counted


class _Products(TorchDispatchMode):
    """The FLOPs of all matrix products."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def _last(functions):
    return list(functions.values())[-1]


def conjugate(comm, functions, x, c):
    """y = f(comm, x); the gradient of x of sum(y c); bytes that were sent before backward."""
    counting, x = _Counting(comm), x.clone().requires_grad_()
    y = _last(functions)(counting, x)
    before = counting.sent
    (y * c).sum().backward()
    return {"y": y.detach(), "grad": x.grad, "forward bytes": before}


def layer(comm, functions, x, w, b, c):
    """y = f(comm, x, w, b), the gradients of x, w and b of sum(y c), and the FLOPs of all products."""
    leaves = [v.clone().requires_grad_() for v in (x, w, b)]
    with _Products() as products:
        y = _last(functions)(comm, *leaves)
        y.backward(c.clone())
    return {"values": [y.detach(), *(leaf.grad for leaf in leaves)], "flops": products.flops}


def vocabulary(comm, functions, logits, y, first):
    """The loss, and the gradient of this rank's logits."""
    leaf = logits.clone().requires_grad_()
    loss = _last(functions)(comm, leaf, y.clone(), first)
    loss.backward()
    return {"loss": loss.detach() if isinstance(loss, torch.Tensor) else loss, "grad": leaf.grad}


with _Products():  # torch imports half of itself at the first such block: once here, not in each rank's process
    torch.ones(1, 1) @ torch.ones(1, 1)
