"""What runs on the learner's side of lab 3: slices, steps, hooks, layers that are borrowed. It knows no answer.

Each step of `stepped` is a run of its own, in fresh processes: what a rank keeps from step to step is what came back from it.
What these functions count of live bytes (`held`, `peak`, `left`) tells a learner where memory goes; the proof is the judge's,
who asks the system (course/process_memory.py).

    driver(comm, {name: function}, how, ...) -> plain data

Reference: course/judge.py, which names these functions; course/carry.py for `how`.
"""

import traceback
import weakref
from types import SimpleNamespace

import torch

from .carry import hand_in, votes
from .drivers import give_back_pages

__all__ = ["borrowed", "prepare", "reduced", "slices", "stepped"]


def _last(functions):
    return list(functions.values())[-1]


def _storages(node, found=None, storage=torch.Tensor.untyped_storage):
    """{address: bytes} of the memory behind all tensors in lists, tuples and dicts. A small view holds all it is cut from."""
    found = {} if found is None else found
    if isinstance(node, torch.Tensor):
        memory = storage(node)
        found[memory.data_ptr()] = memory.nbytes()
    elif isinstance(node, dict):
        for value in node.values():
            _storages(value, found)
    elif isinstance(node, (list, tuple)):
        for value in node:
            _storages(value, found)
    return found


def slices(comm, functions, numels):
    """f(numel, comm) for each numel, as [start, stop]."""
    found = [_last(functions)(numel, comm) for numel in numels]
    return [[x.start, x.stop] if isinstance(x, slice) else list(x) for x in found]


def stepped(comm, functions, how, params, grads, state):
    """One call of f(params, grads, state, comm, reduce_scatter, all_gather): parameters and state afterwards."""
    given = hand_in(functions, how)
    mine = [p.clone() for p in params]
    _last(functions)(mine, [g.clone() for g in grads], state, comm, given["reduce_scatter"], given["all_gather"])
    return {"params": mine, "state": state, "held": sum(_storages(state).values())}


def reduced(comm, functions, how, shapes, frozen, passes):
    """mine = f(params, comm, reduce_scatter), then a backward for each of `passes`, a list of coefficients: the gradient of
    parameter k is c[k], spread over its shape. A barrier stands before the first.

    Returns mine, where a whole gradient is left, and the most bytes of gradients and slices that were there after a hook.
    """
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for k in frozen:
        params[k].requires_grad_(False)
    mine, peak = _last(functions)(params, comm, hand_in(functions, how)["reduce_scatter"]), [0]

    def look(_):
        peak[0] = max(peak[0], sum(_storages([[p.grad for p in params if p.grad is not None], mine]).values()))

    for p in params:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(look)
    for coefficients in passes:
        sum((p * c).sum() for p, c in zip(params, coefficients, strict=True)).backward()
    return {"mine": list(mine), "left": [p.grad is not None for p in params], "peak": peak[0]}


# --- stage 3 ------------------------------------------------------------------------------------------------------------
class _Oops(Exception):
    """Raised inside a block, to see whether it lets go all the same."""


class _Borrower:
    """Uses layers inside `with f(layer, comm, all_gather)`, and looks at what is left of them afterwards."""

    def __init__(self, comm, gathered, given, layers):
        self.comm, self.gathered, self.given, self.layers = comm, gathered, given, layers
        self.seen, self.left, self.most = [], 0, 0

    def use(self, layer, work):
        """work(the whole weight) inside the block."""
        found = self._inside(layer, work)
        self._look(layer)
        return found

    def fails(self, layer):
        """Whether an error inside the block comes out of it."""
        came = False
        try:
            self._inside(layer, _raise)
        except _Oops as oops:
            traceback.clear_frames(oops.__traceback__)  # they held on to the weight
            came = True
        self._look(layer)
        return came

    def _inside(self, layer, work):
        with self.gathered(layer, self.comm, self.given["all_gather"]):
            whole = layer.weight
            if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != tuple(layer.shape):
                shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
                raise ValueError(f"inside the block layer.weight is {shape}; wanted is a tensor {tuple(layer.shape)}")
            memory = whole.untyped_storage()
            self.seen.append((weakref.ref(memory), memory.nbytes()))
            del memory
            self.most = max(self.most, self._alive())
            return work(whole)

    def _alive(self):
        self.seen = [(ref, size) for ref, size in self.seen if ref() is not None]
        return sum(size for _, size in self.seen)

    def _look(self, layer):
        held = layer.weight is not None and layer.weight.numel() > 0
        self.left = max(self.left, self._alive(), int(held))


def borrowed(comm, functions, how, shapes, x, shards):
    """Forward and backward of a chain tanh(x W), each W there only while f(layer, comm, all_gather) is open.

    Returns the loss, this rank's parts of all mean gradients, bytes of whole weights that were left behind, the most at a time,
    and whether an error inside a block came out of it and left nothing.
    """
    given = hand_in(functions, how)
    layers = [SimpleNamespace(shard=shard, shape=tuple(shape), weight=None) for shard, shape in zip(shards, shapes, strict=True)]
    borrower = _Borrower(comm, _last(functions), given, layers)
    inputs, parts = [], []
    for layer in layers:
        inputs.append(x)
        x = borrower.use(layer, lambda w, x=x: torch.tanh(x @ w))
    loss, grad = x.square().sum() / len(x), 2 * x / len(x)
    for layer, x in zip(reversed(layers), reversed(inputs), strict=True):
        whole, grad = borrower.use(layer, lambda w, x=x, grad=grad: _backward(w, x, grad))
        parts.append(given["reduce_scatter"](comm, whole.reshape(-1)) / votes(how, comm.size))
        del whole
    found = {"loss": loss, "grads": parts[::-1], "left": borrower.left, "most": borrower.most}
    came = borrower.fails(layers[0])
    return {**found, "came": came, "left by an error": borrower.left}


def _backward(weight, x, grad):
    w, x = weight.detach().requires_grad_(), x.detach().requires_grad_()
    (torch.tanh(x @ w) * grad).sum().backward()  # backward(grad) would import symbolic shapes, in each rank's process
    return w.grad, x.grad


def _raise(_):
    raise _Oops


def prepare() -> tuple:
    """This process is weighed from outside."""
    give_back_pages()
    return ()
