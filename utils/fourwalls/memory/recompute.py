"""Activation checkpointing from scratch: forget what a block computed, and compute it again when backward asks.

While the block runs, hooks put an empty place where autograd would save a tensor; only the block's inputs are kept, and the state
of the random generators it drew from. When backward opens the first place, the block is run again from those, and the k-th
tensor saved the second time fills the k-th place. The graph is the ordinary one, so frozen blocks, inputs without gradient, dicts
and hooks on parameters need no special case.

    kept: the inputs (2 s b h bytes a layer in 16 bits) instead of everything        price: one more forward

Reference: Chen et al. 2016 (arXiv:1604.06174); torch.autograd.graph.saved_tensors_hooks; torch.utils.checkpoint does it alike.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..nn.attention import attend
from .block_rules import Rules, inputs_unchanged
from .random_state import RandomState
from .schedule import Again, segments, steps_of

__all__ = ["block_ways", "checkpoint", "recompute_model", "run_plan"]


def checkpoint(
    function: Callable,
    *args,
    generators: Iterable[torch.Generator] = (),
    restore_random: bool = True,
    early_stop: bool = True,
    checks: bool = True,
    **kwargs,
):
    """function(*args, **kwargs), of which only the inputs are kept; it is run again in backward. Same values, same gradients.

    Tensors in tuples, lists and dicts of the arguments are kept; what comes out may be anything. generators: those of its own
    that the block draws from, beside those among its arguments. These, the default generators and autocast are put back as they
    were; Python's and numpy's random numbers and whatever else the block changes outside itself (running statistics of a batch
    norm) are not. early_stop ends the second run with the last tensor that is owed. checks: refuse, while the block runs, a
    generator that is not named and writing to a tensor that was already saved, and in backward a tensor from outside, such as a
    weight, that was written to meanwhile; unchecked, each can give wrong gradients.
    Raises ValueError for a dataclass among the arguments; RuntimeError where the block changes its input in place, or does not
    do the same twice.
    """
    if not callable(function):
        raise ValueError(f"checkpoint takes a function and its arguments; {type(function).__name__} cannot be called")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            name = type(leaf).__name__
            raise ValueError(f"{name} is a dataclass, in which tensors cannot be found; give a dict, a tuple or each field")
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    versions = [x._version for x in tensors]
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    random = RandomState(tensors, [*generators, *given]) if restore_random else None
    block = _Block(function, leaves, spec, random, early_stop)
    rules = Rules(tensors, random.generators if random else None) if checks else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: block.empty_place(x, rules), _Place.open), rules:
        out = function(*args, **kwargs)
    block.running = False
    inputs_unchanged(tensors, versions)
    if random is not None:
        random.forget_if_unused()
    return out


def run_plan(functions: Sequence, x, plan: Sequence, **options):
    """Run a chain under a plan of schedule.py: functions[k](x) for the step k, taped or inside a checkpoint.

    A function may be a sequence of callables, one for each way of taping the step. options go to `checkpoint`.
    """
    for node in plan:
        if isinstance(node, Again):
            x = checkpoint(partial(run_plan, functions, plan=node.plan, **options), x, **options)
        else:
            step = functions[node.step]
            x = (step if callable(step) else step[node.way])(x)
    return x


def recompute_model(model, how: str | int | Sequence = "full", **options):
    """Let a GPT forget: "none", "full" (every block), "selective" (every attention core), a number of segments, or a plan.

    Changes `model` and returns it; parameters, their names and the results stay the same. In a plan, way 0 of a block keeps all
    and way 1 recomputes its attention core. options go to `checkpoint`. Raises ValueError for a word, a number or a plan that
    does not fit.
    """
    n = len(model.blocks)
    if isinstance(how, str) and how not in ("none", "full", "selective"):
        raise ValueError(f"recompute is {how!r}; allowed: none, selective, full, 1 to {n} segments, or a plan")
    plan = {"none": None, "selective": None, "full": segments(n, n)}[how] if isinstance(how, str) else how
    if isinstance(plan, int):
        plan = segments(n, plan)
    if plan is not None and steps_of(plan) != list(range(n)):
        raise ValueError(f"the plan has steps {steps_of(plan)}; the model has blocks 0 to {n - 1}")
    for block in model.blocks:
        block.attention.core = partial(checkpoint, attend, **options) if how == "selective" else None
    model.__dict__.pop("hidden", None)
    if plan is not None:
        model.hidden = partial(run_plan, [block_ways(block, **options) for block in model.blocks], plan=plan, **options)
    return model


def block_ways(block, **options) -> tuple[Callable, Callable]:
    """A GPT's block as it is, and with its attention core recomputed."""
    return block, partial(_with_core, block, partial(checkpoint, attend, **options))


def _with_core(block, core, x):
    usual, block.attention.core = block.attention.core, core
    try:
        return block(x)
    finally:
        block.attention.core = usual


class _Enough(Exception):
    """Ends the second run: everything owed is there."""


class _Keep(torch.autograd.Function):
    """A node that holds tensors as any operation would, so whoever watches saved tensors (a ledger, an outer checkpoint) sees
    them.
    """

    @staticmethod
    def forward(ctx, handle, *tensors):
        ctx.save_for_backward(*tensors)
        return handle.detach()

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("nothing flows through here")


def keep(*tensors: torch.Tensor):
    """The node that holds `tensors`, in `.saved_tensors`; they live as long as it does."""
    handle = torch.empty(0, requires_grad=True)
    with torch.enable_grad():
        return _Keep.apply(handle, *(x.detach() for x in tensors)).grad_fn


class _Place:
    """What autograd holds instead of the k-th tensor that the block saved. `node` holds the tensor once it is there again."""

    __slots__ = ("__weakref__", "block", "looks", "node", "number", "version")

    def __init__(self, block, number, looks, version):
        self.block, self.number, self.looks, self.version, self.node = block, number, looks, version, None

    def open(self) -> torch.Tensor:
        if self.node is None:
            self.block.run_again()
        node, self.node = self.node, None  # gone from here with the operation that asked; asked again, it is computed again
        return node.saved_tensors[0]


def _looks(x: torch.Tensor) -> tuple:
    return tuple(x.shape), x.dtype, x.device


class _Block:
    """One call of `checkpoint`: how to run it again, and the places to fill. It lives as long as one of them."""

    def __init__(self, function, leaves, spec, random, early_stop):
        self.function, self.spec, self.random, self.early_stop = function, spec, random, early_stop
        self.where = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.needs_grad = [leaves[k].requires_grad for k in self.where]
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = keep(*(leaves[k] for k in self.where))
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(leaves[k].device.type for k in self.where)} - {"meta"}
        ]
        self.places: list[weakref.ref] = []
        self.running = True  # the first run is not over

    def empty_place(self, x: torch.Tensor, rules) -> _Place:
        if isinstance(rules, Rules):
            rules.saved(x)
        # as often as it was written to when it was saved; what the block makes itself is written to as often in the second run
        version = x._version if isinstance(rules, Rules) else None
        place = _Place(self, len(self.places), _looks(x), version)
        self.places.append(weakref.ref(place))
        return place

    def run_again(self) -> None:
        """Fill all places that somebody still holds."""
        owed = {k: place for k, ref in enumerate(self.places) if (place := ref()) is not None}
        found: dict[int, torch.Tensor] = {}
        count, last = 0, max(owed)

        def pack(x):
            nonlocal count
            number, count = count, count + 1
            self._same(number, x)
            if number in owed:
                found[number] = x.detach()
            if number == last and (self.early_stop or self.running):
                raise _Enough
            return x.detach()

        with contextlib.ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(self.random.restored())
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.enable_grad())
            args, kwargs = self._arguments()
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
            with contextlib.suppress(_Enough):
                self.function(*args, **kwargs)
                self._all_there(count)
            del args, kwargs
        # outside the hooks: a ledger sees that these are kept now; but a block that asks for a gradient inside must not save them
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with unseen if self.running else contextlib.nullcontext():
            for number, x in found.items():
                if owed[number].node is None:
                    owed[number].node = keep(x)

    def _arguments(self):
        leaves = list(self.others)
        for k, x, grad in zip(self.where, self.inputs.saved_tensors, self.needs_grad, strict=True):
            leaves[k] = x.detach().requires_grad_(grad)
        return tree_unflatten(leaves, self.spec)

    def _same(self, number: int, x: torch.Tensor) -> None:
        if number >= len(self.places):
            self._all_there(number + 1)
        place = self.places[number]()
        if place is not None and place.looks != _looks(x):
            raise RuntimeError(
                f"the block did not do the same twice: tensor {number} saved for backward was {_words(place.looks)} and is "
                f"{_words(_looks(x))} when it is run again; a block may depend on its arguments and on random numbers only"
            )
        if place is not None and place.version not in (None, x._version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the block uses "
                f"a {_words(_looks(x))} from outside, a weight or a mask, that was written to between forward and backward (an "
                "optimiser's step?), or writes to it itself; checks=False takes it as it is now"
            )

    def _all_there(self, count: int) -> None:
        if count != len(self.places):
            more = "more than" if count > len(self.places) else f"{count} of"
            raise RuntimeError(
                f"the block did not do the same twice: run again, it saved {more} {len(self.places)} tensors; a block may depend "
                "on its arguments and on random numbers only"
            )


def _words(looks: tuple) -> str:
    shape, dtype, device = looks
    return f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
