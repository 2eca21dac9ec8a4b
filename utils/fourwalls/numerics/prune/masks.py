"""Masks: choose the zeros once, and keep them zero while training repairs the rest.

An optimiser with momentum moves a weight whose gradient is zero, so a mask that was applied once is undone by the next step.
`Pruned` steps and masks again. Pruning all at once is a shock; the gradual schedule takes much early, when the model has time to
mend, and ever less towards the end.

    share(t) = final + (initial - final) (1 - (t - begin) / (end - begin))^3

Reference: Zhu and Gupta 2017 (arXiv:1710.01878).
"""

from collections.abc import Mapping

import torch

from .patterns import keep_largest, two_of_four
from .scores import magnitude

__all__ = ["PATTERNS", "SCOPES", "Masks", "Pruned", "gradual", "prune_masks"]

PATTERNS = ("unstructured", "2:4")
SCOPES = ("layer", "global")


class Masks:
    """{name: parameter} with {name: mask of its shape}; False is pruned. ValueError for names, shapes, dtypes that do not fit."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]):
        self.parameters = {name: parameters[name] for name in masks if name in parameters}
        self.masks = dict(masks)
        for name, mask in self.masks.items():
            if name not in self.parameters:
                raise ValueError(f"a mask for {name!r}, but no such parameter; there are {', '.join(parameters)}")
            if mask.shape != self.parameters[name].shape or mask.dtype != torch.bool:
                shape = tuple(self.parameters[name].shape)
                raise ValueError(f"{name}: a mask {tuple(mask.shape)} of {mask.dtype}; allowed: {shape} of torch.bool")
            if mask.numel() and not bool(mask.any()):
                raise ValueError(
                    f"{name}: the mask keeps nothing; a layer of zeros passes nothing on. Prune less, or spare this layer"
                )

    @torch.no_grad()
    def apply_(self) -> "Masks":
        """Set what is pruned to exactly 0 (not to -0, NaN or what NaN * 0 gives)."""
        for name, mask in self.masks.items():
            self.parameters[name].masked_fill_(~mask, 0)
        return self

    def share(self) -> float:
        """The share of zeros over all masks."""
        return 1 - sum(int(m.sum()) for m in self.masks.values()) / max(1, sum(m.numel() for m in self.masks.values()))


class Pruned:
    """An optimiser that masks after each step. `masks` may be exchanged while training runs (a gradual schedule does)."""

    def __init__(self, optimizer, masks: Masks):
        self.optimizer, self.masks = optimizer, masks
        masks.apply_()

    def step(self) -> None:
        self.optimizer.step()
        self.masks.apply_()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups


def prune_masks(
    parameters: Mapping[str, torch.Tensor],
    share: float | Mapping[str, float] = 0.5,
    *,
    scores: Mapping[str, torch.Tensor] | None = None,
    pattern: str = "unstructured",
    scope: str = "layer",
) -> Masks:
    """Masks that prune `share` of the parameters with the smallest `scores` (None: magnitude); nothing is applied yet.

    share: one for all or {name: share}. scope "layer": that share of each; "global": of all together, one threshold. pattern
    "2:4" is always half of each four. ValueError for words and shares that do not exist, and where a layer would be left with
    nothing.
    """
    parameters = dict(parameters)
    for word, value, allowed in (("pattern", pattern, PATTERNS), ("scope", scope, SCOPES)):
        if value not in allowed:
            raise ValueError(f"{word} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
    if not parameters:
        raise ValueError("no parameter to prune; give {name: weight}")
    scores = {name: magnitude(p) for name, p in parameters.items()} if scores is None else scores
    missing = [name for name in parameters if name not in scores]
    if missing:
        raise ValueError(f"no scores for {missing[0]!r}; there are some for {', '.join(scores) or 'nothing'}")
    if pattern == "2:4":
        if scope == "global" or share != 0.5:
            raise ValueError(f"2:4 is half of each four of every layer; share {share!r} and scope {scope!r} do not go with it")
        return Masks(parameters, {name: two_of_four(scores[name]) for name in parameters})
    if scope == "layer":
        shares = share if isinstance(share, Mapping) else dict.fromkeys(parameters, share)
        lost = [name for name in parameters if name not in shares]
        if lost:
            raise ValueError(f"no share for {lost[0]!r}; 0 leaves it alone")
        unknown = [name for name in shares if name not in parameters]
        if unknown:
            raise ValueError(f"a share for {unknown[0]!r}, but no such parameter; there are {', '.join(parameters)}")
        return Masks(parameters, {name: keep_largest(scores[name], shares[name]) for name in parameters})
    if isinstance(share, Mapping):
        raise ValueError("scope 'global' has one threshold and one share for all; give a number, or scope='layer'")
    whole = keep_largest(torch.cat([scores[name].flatten() for name in parameters]), share)
    cut = whole.split([p.numel() for p in parameters.values()])
    return Masks(parameters, {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), cut, strict=True)})


def gradual(step: int, *, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """The share to prune at `step`: `initial` until begin, `final` from end on, in between fast at first, then slower."""
    if not 0 <= begin < end:
        raise ValueError(f"begin {begin!r}, end {end!r}; allowed: 0 <= begin < end")
    if not 0 <= initial <= final < 1:
        raise ValueError(f"initial {initial!r}, final {final!r}; allowed: 0 <= initial <= final < 1")
    if step <= begin:
        return initial
    left = 1 - min(1.0, (step - begin) / (end - begin))
    return final + (initial - final) * left**3
