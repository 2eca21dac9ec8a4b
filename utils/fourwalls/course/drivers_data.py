"""What runs on the learner's side of lab 2: models, backward passes, and a wire beside each rank. It knows no answer.

A run of `overlapped` has two processes a rank: an even one that computes, and an odd one, its wire, on the same node. What is
given to `begin` goes to the wire as a message, is summed there by all wires, and comes back; so the judge dates it, and who
gives too early gives what is there at that moment.

    driver(comm, {name: function}, how, ...) -> plain data

Reference: course/judge.py, which names these functions; course/carry.py for `how`.
"""

import torch

from ..nn.optim import Adam
from .carry import hand_in

__all__ = ["Net", "averaged", "bucketed", "counted", "overlapped"]

LR, EPS = 0.01, 1e-3  # a large eps: what Adam makes of a rounding stays a rounding


class Net(torch.nn.Module):
    """x -> tanh(x W + b), for the layers in the order `use`; a layer that is used twice is tied to itself."""

    def __init__(self, layers, frozen=()):
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer(w, b) for w, b in layers)
        for index, p in enumerate(self.parameters()):
            p.requires_grad_(index not in frozen)

    def loss(self, x, use, after=None):
        """The mean over rows of the sum of squares. after: applied to what each layer gives."""
        for k in use:
            x = torch.tanh(x @ self.layers[k].weight + self.layers[k].bias)
            x = x if after is None else after(x)
        return x.square().sum() / len(x)


class _Layer(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())


def _last(functions):
    return list(functions.values())[-1]


def _grads(params):
    return [None if p.grad is None else p.grad.detach().clone() for p in params]


def averaged(comm, functions, how, layers, frozen, batches, use):
    """f(model, comm, all_reduce) after each backward; Adam steps after it. batches: one a step, None: no backward here.

    The gradients of the first step, and the parameters at the end.
    """
    model, all_reduce, found = Net(layers, frozen), hand_in(functions, how)["all_reduce"], None
    params = list(model.parameters())
    adam = Adam([p for p in params if p.requires_grad], lr=LR, eps=EPS)
    for x in batches:
        adam.zero_grad()
        if x is not None:
            model.loss(x, use).backward()
        _last(functions)(model, comm, all_reduce)
        found = found or _grads(params)
        adam.step()
    return {"grads": found, "params": [p.detach() for p in params]}


def counted(comm, functions, how, w, rows):
    """loss = f(loss_sum, tokens, comm, all_reduce) of the tokens in `rows`: its value, and the gradient of w."""
    leaf, all_reduce = w.clone().requires_grad_(), hand_in(functions, how)["all_reduce"]
    loss = _last(functions)((rows["x"] @ leaf).square().sum(), rows["tokens"], comm, all_reduce)
    loss.backward()
    return {"loss": loss.detach(), "grad": leaf.grad}


def bucketed(comm, functions, shapes, dtype, frozen, nbytes):
    """f(params, nbytes) as lists of places in params; -1 for what is none of them."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in shapes]
    for k in frozen:
        params[k].requires_grad_(False)
    place = {id(p): k for k, p in enumerate(params)}
    return [[place.get(id(p), -1) for p in bucket] for bucket in _last(functions)(params, nbytes)]


# --- a wire beside each rank --------------------------------------------------------------------------------------------
class _Wire:
    """The even process's end of its wire."""

    def __init__(self, comm):
        self.comm, self.tickets = comm, []

    def begin(self, x):
        """Let the wires sum x while this rank goes on; wait() of what comes back gives the sum."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float64:
            raise ValueError(f"begin takes a float64 tensor, not {x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}")
        wire, size = self.comm.rank + 1, torch.tensor([x.numel()])
        flat = x.detach().reshape(-1).clone()
        sent = [self.comm.isend(size, wire), self.comm.isend(flat, wire)]
        self.tickets.append(_Ticket(sent, self.comm.irecv(torch.empty_like(flat), wire), x.shape))
        return self.tickets[-1]

    def check(self):
        """Raise unless everything that was begun has been waited for."""
        open_ = [k for k, ticket in enumerate(self.tickets) if not ticket.over]
        if open_:
            raise ValueError(f"begin was called {len(self.tickets)} times, and nobody waited for what call {open_[0] + 1} gave")
        self.tickets = []

    def end(self):
        self.comm.send(torch.tensor([-1]), self.comm.rank + 1)


class _Ticket:
    def __init__(self, sent, coming, shape):
        self._sent, self._coming, self._shape, self.over = sent, coming, shape, False

    def wait(self):
        """The sum, in the shape of what was given."""
        total = self._coming.wait()
        for request in self._sent:
            request.wait()
        self.over = True
        return total.view(self._shape)


def _carry(comm, group, all_reduce):
    """The odd process: one sum after the other, until its rank says that there is no more."""
    while (size := int(comm.recv(torch.zeros(1, dtype=torch.int64), comm.rank - 1))) >= 0:
        x = comm.recv(torch.empty(size, dtype=torch.float64), comm.rank - 1)
        comm.send(all_reduce(group, x), comm.rank - 1)


class _Timed(torch.autograd.Function):
    """Passes on what it gets; in backward, the layer's work takes `seconds` from here."""

    @staticmethod
    def forward(ctx, x, comm, seconds, microbatch):
        ctx.told = comm, seconds, microbatch
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        comm, seconds, microbatch = ctx.told
        with comm.compute("backward", seconds=seconds, kind="backward", microbatch=microbatch):
            pass
        return grad, None, None, None


def overlapped(comm, functions, how, layers, frozen, buckets, passes, seconds, steps, uses):
    """finish = f(model, comm, buckets, begin, passes); then in each step `passes` backward passes, and finish().

    steps[i][k]: the rows of micro-batch k in step i, None: no backward; uses[k]: the layers that it uses. buckets: places of
    parameters. Returns the gradients of each step.
    """
    group = comm.split(comm.rank % 2, comm.rank)
    if comm.rank % 2:
        return _carry(comm, group, hand_in(functions, how)["all_reduce"])
    model, wire, found = Net(layers, frozen), _Wire(comm), []
    params = list(model.parameters())
    finish = _last(functions)(model, group, [[params[k] for k in bucket] for bucket in buckets], wire.begin, passes)
    for rows in steps:
        for p in params:
            p.grad = None
        for k, (x, use) in enumerate(zip(rows, uses, strict=True)):
            if x is not None:
                model.loss(x, use, lambda y, k=k: _Timed.apply(y, comm, seconds, k)).backward()
        finish()
        wire.check()
        found.append(_grads(params))
    wire.end()
    return found
