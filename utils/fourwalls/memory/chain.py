"""A chain of steps measured: what each costs, what it keeps, and what it needs for a moment, so that a plan can be made for it.

Each step is run alone, forward and backward, under a ledger and a FLOP counter; on `meta` tensors that takes no memory and no
time, so the layers of a model that fits nowhere can be planned for. What is measured is exactly what schedule.py reckons with.

    kept beside input and output = saved storages - {input, output, parameters}

Reference: Korthikanti et al. 2022 (arXiv:2205.05198), Table 2, is what comes out for a transformer layer.
"""

from collections.abc import Callable, Sequence

import torch

from ..ranks.meter import Meter
from .ledger import Ledger
from .recompute import block_ways
from .schedule import Step, Way

__all__ = ["chain_of", "model_chain", "step_of"]


def step_of(function: Callable | Sequence[Callable], x: torch.Tensor, *, names: Sequence[str] = ("all",)) -> Step:
    """The Step of function(x), or of several functions that are ways to do the same.

    Costs are FLOPs. x is any device's, `meta` too, and comes out in the same shape or another; gradients of parameters and the
    random state are left as they were.
    """
    return _steps(function, x, names)[0]


def _steps(function, x: torch.Tensor, names: Sequence[str]) -> tuple[Step, torch.Tensor]:
    """The Step, and something like its output on x's device."""
    ways = [function] if callable(function) else list(function)
    measured = [_measure(way, x) for way in ways]
    usual = measured[0]
    step = Step(
        forward=usual["forward"],
        output=usual["size"],
        ways=tuple(
            Way(name, m["kept"], float(m["backward"] - usual["backward"])) for name, m in zip(names, measured, strict=True)
        ),
        saves_output=usual["saves_output"],
        forward_extra=max(m["forward_extra"] for m in measured),
        backward_extra=max(m["backward_extra"] for m in measured),
    )
    shape, dtype = usual["output"]
    return step, torch.zeros(shape, dtype=dtype, device=x.device)


def chain_of(functions: Sequence, x: torch.Tensor, *, names: Sequence[str] = ("all",)) -> list[Step]:
    """The Steps of a chain that begins with x."""
    chain = []
    for function in functions:
        step, x = _steps(function, x, names)
        chain.append(step)
    return chain


def model_chain(model, batch: int, *, selective: bool = True) -> list[Step]:
    """The blocks of a GPT as a chain, for `batch` sequences of full length; way 0 keeps all, way 1 recomputes the core."""
    config, weight = model.config, model.tokens.weight
    x = torch.zeros(batch, config.length, config.width, dtype=weight.dtype, device=weight.device)
    ways = [block_ways(block)[: 2 if selective else 1] for block in model.blocks]
    return chain_of(ways, x, names=("all", "selective")[: 2 if selective else 1])


class _Before(torch.autograd.Function):
    """The model before a step: the gradient that reaches it is let go."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None


class _After(torch.autograd.Function):
    """The model after a step: takes the output, and hands back a gradient of its shape."""

    @staticmethod
    def forward(ctx, y):
        ctx.like = y.shape, y.dtype, y.device
        return y.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


def _measure(function: Callable, x: torch.Tensor) -> dict:
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        parameters = _leaves(function(x), x)
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    with torch.random.fork_rng(devices=[]), Ledger(torch.nn.ParameterList(parameters), inputs=[x], lines=False) as ledger:
        ledger.phase("forward")
        with Meter() as ahead:
            y = function(_Before.apply(x))
        size, place = y.untyped_storage().nbytes(), y.untyped_storage()._cdata
        saves_output = any(save.storage is ledger._known[place] and save.storage.holders for save in ledger.story().saves)
        end = _After.apply(y)
        like = y.shape, y.dtype
        del y
        ledger.phase("backward")
        with Meter() as back:
            end.backward(end.detach())
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad
    story, curve = ledger.story(), ledger.curve()
    turn = story.ends()["forward"]
    kept = curve[turn].bytes["activations"] - (size if saves_output else 0)
    beside = [m.total - m.bytes["parameters"] - m.bytes["gradients"] - m.bytes["inputs"] for m in curve]
    return {
        "output": like,
        "size": size,
        "kept": kept,
        "saves_output": saves_output,
        "forward": ahead.flops,
        "backward": back.flops,
        "forward_extra": max(0, max(beside[:turn]) - kept - size),
        "backward_extra": max(0, max(beside[turn:]) - kept - (size if saves_output else 0) - size),
    }


def _leaves(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of y's graph that get gradients, x left out: the parameters."""
    found, seen, ahead = {}, set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not x:
            found[id(leaf)] = leaf
        ahead += [after for after, _ in node.next_functions]
    return [leaf for leaf in found.values() if isinstance(leaf, torch.nn.Parameter)]
