"""Optimisers with their state in plain sight: what ZeRO shards and what 8 of the 16 bytes a parameter are for.

Adam keeps a running mean of the gradient and of its square, and steps by their ratio, corrected for their start at zero. Each
optimiser is one function on one tensor (`adam_`, `sgd_`), so that it can step a shard just as well, and a class that calls it
for every parameter.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Reference: Kingma and Ba 2014 (arXiv:1412.6980); Loshchilov and Hutter 2017 (arXiv:1711.05101) for AdamW.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from ..collectives import all_reduce
from ..ranks.comm import Comm

__all__ = ["SGD", "Adam", "AdamW", "adam_", "check_largest", "clip_", "global_norm", "sgd_"]


@torch.no_grad()
def adam_(p, g, m, v, step: int, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False) -> None:
    """One Adam step in place on p, m, v (any shape, one shape). `step` counts from 1. decoupled: AdamW's decay of the weight
    itself.

    The same operations in the same order as torch.optim.Adam(foreach=False), hence the same bits.
    """
    if weight_decay and decoupled:
        p.mul_(1 - lr * weight_decay)
    elif weight_decay:
        g = g.add(p, alpha=weight_decay)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    size = lr / (1 - betas[0] ** step)
    denominator = (v.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps)
    p.addcdiv_(m, denominator, value=-size)


@torch.no_grad()
def sgd_(p, g, momentum_buffer=None, *, lr=1e-2, momentum=0.0, weight_decay=0.0) -> None:
    """One step of gradient descent in place. The buffer starts as the first gradient, as in torch."""
    if weight_decay:
        g = g.add(p, alpha=weight_decay)
    if momentum_buffer is not None:
        g = momentum_buffer.mul_(momentum).add_(g)
    p.add_(g, alpha=-lr)


class _Optimizer(ABC):
    """`param_groups`: dicts with "params" and options; `state[p]`: a dict of tensors and the step. As torch.optim names them."""

    def __init__(self, params: Iterable, **options):
        if isinstance(params, torch.Tensor):
            raise ValueError("params is one tensor, whose rows would be stepped apart; give a list: [p]")
        groups = list(params)
        if not groups:
            raise ValueError(
                "the optimiser got no parameters; give model.parameters(), or a list of {'params': [...], 'lr': ...}"
            )
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        seen: set[int] = set()
        self.param_groups: list[dict] = []
        for group in groups:
            unknown = set(group) - {"params", *options}
            if unknown:
                raise ValueError(f"no such option: {sorted(unknown)}; allowed: {sorted(options)}")
            tensors = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            for p in tensors:
                if not isinstance(p, torch.Tensor) or p.is_complex() or not (p.is_leaf or p.retains_grad):
                    kind = type(p).__name__ if not isinstance(p, torch.Tensor) else f"{p.dtype}, is_leaf={p.is_leaf}"
                    raise ValueError(f"a parameter is {kind}; allowed: real tensors that are leaves, as model.parameters() gives")
            doubled = [tuple(p.shape) for p in tensors if id(p) in seen or seen.add(id(p))]
            if doubled:
                raise ValueError(f"a parameter of shape {doubled[0]} is given twice; it would be stepped twice")
            self.param_groups.append({**options, **group, "params": tensors})
        for group in self.param_groups:
            self._check(group)
        self.state: dict[torch.Tensor, dict] = {}

    def _check(self, group: dict) -> None:
        if not group["lr"] >= 0:
            raise ValueError(f"lr is {group['lr']!r}; it is at least 0")
        for word in ("eps", "weight_decay", "momentum"):
            if not group.get(word, 0) >= 0:
                raise ValueError(f"{word} is {group[word]!r}; it is at least 0")

    @abstractmethod
    def _start(self, p: torch.Tensor, group: dict) -> dict:
        """The state of one parameter before its first step."""

    @abstractmethod
    def _update(self, p: torch.Tensor, state: dict, group: dict) -> None:
        """One step of one parameter, in place."""

    def zero_grad(self) -> None:
        """Forget the gradients: set to None, so that their memory is free until the next backward."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self) -> None:
        """Update every parameter that has a gradient; others, and their state, stay as they are."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of a parameter {tuple(p.shape)} is sparse; build its Embedding with sparse=False, or step "
                        "rows alone (nn.sparse)"
                    )
                if p not in self.state:
                    self.state[p] = self._start(p, group)
                self._update(p, self.state[p], group)

    def state_dict(self) -> dict:
        """States by the parameter's place in the groups, and the groups' options: what a checkpoint must hold. Copies: training
        may go on while they are kept.
        """
        order = [p for group in self.param_groups for p in group["params"]]
        return {
            "state": {k: _copied(self.state[p]) for k, p in enumerate(order) if p in self.state},
            "param_groups": [{**group, "params": len(group["params"])} for group in self.param_groups],
        }

    def load_state_dict(self, saved: dict) -> None:
        """Continue from `state_dict()`; tensors are copied. ValueError where places, shapes or options differ: another kind of
        optimiser would go on without what it needs.
        """
        lacking = [word for word in ("state", "param_groups") if word not in saved]
        if lacking:
            raise ValueError(f"the saved state lacks {', '.join(lacking)}; it is what state_dict() gave")
        order = [p for group in self.param_groups for p in group["params"]]
        groups, here = len(saved["param_groups"]), len(self.param_groups)
        if groups != here or any(k >= len(order) for k in saved["state"]):
            raise ValueError(f"the saved state is for {groups} groups; here are {here} with {len(order)} parameters")
        for group, options in zip(self.param_groups, saved["param_groups"], strict=True):
            theirs, ours = set(options) - {"params"}, set(group) - {"params"}
            if theirs != ours:
                here = f"{type(self).__name__} has {sorted(ours)}"
                raise ValueError(f"the saved state is another optimiser's: its options are {sorted(theirs)}, {here}")
            many = len(group["params"])
            if options.get("params", many) != many:
                raise ValueError(f"the saved state is for {options['params']} parameters, and this group has {many}")
        state = {}
        for k, entry in saved["state"].items():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and (value.shape, value.dtype) != (order[k].shape, order[k].dtype):
                    theirs, ours = (f"shape {tuple(t.shape)} in {t.dtype}" for t in (value, order[k]))
                    raise ValueError(f"saved {name} of parameter {k} has {theirs}, the parameter {ours}")
            state[order[k]] = _copied(entry)
        self.state = state
        for group, options in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({word: value for word, value in options.items() if word != "params"})


def _copied(entry: dict) -> dict:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}


class Adam(_Optimizer):
    """state[p]: step, m (mean of gradients), v (mean of squares). weight_decay is added to the gradient (see AdamW)."""

    decoupled = False

    def __init__(self, params, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _check(self, group):
        super()._check(group)
        if len(group["betas"]) != 2 or not all(0 <= b < 1 for b in group["betas"]):
            raise ValueError(f"betas are {group['betas']!r}; they are two, each at least 0 and below 1")

    def _start(self, p, group):
        return {"step": 0, "m": torch.zeros_like(p, memory_format=torch.preserve_format), "v": torch.zeros_like(p)}

    def _update(self, p, state, group):
        state["step"] += 1
        options = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
        adam_(p, p.grad, state["m"], state["v"], state["step"], decoupled=self.decoupled, **options)


class AdamW(Adam):
    """Adam whose weight decay shrinks the weight itself and does not pass through m and v."""

    decoupled = True

    def __init__(self, params, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class SGD(_Optimizer):
    """Gradient descent; with momentum, state[p] holds the buffer."""

    def __init__(self, params, *, lr=1e-2, momentum=0.0, weight_decay=0.0):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def _start(self, p, group):
        return {"momentum": torch.zeros_like(p)} if group["momentum"] else {}

    def _update(self, p, state, group):
        sgd_(p, p.grad, state.get("momentum"), lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"])


@torch.no_grad()
def global_norm(tensors: Iterable[torch.Tensor], *, order: float = 2.0, comm: Comm | None = None) -> torch.Tensor:
    """The norm of all tensors as if they were one vector; 0-d, in the widest of their dtypes, at least float32.

    order: 2.0, or math.inf for the largest absolute element. comm: the tensors are this rank's shards, and the norm is that of
    all ranks' together: squares add up and maxima compare, while norms do neither. Every rank must call it then, and it sends one
    number (a ring: 2 (n-1) messages). Raises ValueError for another order.
    """
    if order not in (2.0, math.inf):
        raise ValueError(f"order is {order!r}; allowed: 2.0, or math.inf for the largest absolute element")
    tensors = list(tensors)
    wide = torch.float32
    for t in tensors:
        wide = torch.promote_types(wide, t.dtype)
    if order == math.inf:
        parts = [t.abs().max().to(wide) for t in tensors if t.numel()]
        own = torch.stack(parts).max() if parts else torch.zeros((), dtype=wide)
    else:
        own = torch.stack([t.to(wide).square().sum() for t in tensors]).sum() if tensors else torch.zeros((), dtype=wide)
    if comm is not None and comm.size > 1:
        # in float64 on every rank: one that holds no shard must still bring a number of the same dtype
        own = all_reduce(comm, own.double().to(comm.device), op="max" if order == math.inf else "sum").to(wide)
    return own if order == math.inf else own.sqrt()


def check_largest(largest: float) -> None:
    """ValueError unless it is a number of at least 0; math.inf clips nothing."""
    if not largest >= 0:
        raise ValueError(f"largest is {largest!r}; the largest norm is a number of at least 0, or math.inf for no limit")


@torch.no_grad()
def clip_(parameters: Iterable[torch.Tensor], largest: float, *, order: float = 2.0, comm: Comm | None = None) -> torch.Tensor:
    """Scale all gradients together so that their norm is at most `largest`; returns the norm before. order, comm: as
    `global_norm`. ValueError unless `largest` is at least 0: a negative one would turn every gradient round. Pascanu et al. 2013.
    """
    check_largest(largest)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(grads, order=order, comm=comm)
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale.to(g.dtype))
    return norm
