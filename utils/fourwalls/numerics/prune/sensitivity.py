"""Which layers may not be touched? Prune one alone, look at the loss, put it back; then the next.

The same share of zeros costs one layer nothing and breaks another. The scan ranks them, the most vital first; the shares are then
dealt out so that the vital layers are spared and the others give more, with the same number of zeros in all.

    rise(layer) = loss(only this layer pruned) - loss(nothing pruned)

Reference: Han et al. 2015 (arXiv:1506.02626), figure 6; Li et al. 2017 (arXiv:1608.08710).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...nn.gpt import GPT
from .masks import prune_masks

__all__ = ["Sensitivity", "scan", "scan_blocks", "spare"]


@dataclass(frozen=True)
class Sensitivity:
    """One line of a scan: the layer, its share pruned, the loss then, and how much above the loss of the whole model."""

    name: str
    share: float
    loss: float
    rise: float


@torch.no_grad()
def scan(
    model: nn.Module,
    loss: Callable[[nn.Module], float],
    *,
    names: Iterable[str] | None = None,
    share: float = 0.5,
    pattern: str = "unstructured",
) -> list[Sensitivity]:
    """Each weight matrix alone pruned by magnitude; the most vital first, ties by name. The model is bit for bit as before after.

    loss(model) -> a number; it should be a function of the model alone (fixed data, no dropout). names: parameters; None: all
    with two dims or more, but for embeddings. A loss that is not a number counts as infinitely bad. ValueError for unknown names,
    and where the whole model's loss is not finite: there is nothing to compare with.
    """
    parameters = dict(model.named_parameters())
    names = _weights(model) if names is None else list(names)
    unknown = [name for name in names if name not in parameters]
    if unknown or not names:
        raise ValueError(f"no parameter {unknown[0]!r}; there are {', '.join(parameters)}" if unknown else "nothing to scan")
    base, found = _base(model, loss), []
    for name in names:
        before = parameters[name].clone()
        try:
            prune_masks({name: parameters[name]}, share, pattern=pattern).apply_()
            found.append(_line(name, share, float(loss(model)), base))
        finally:
            parameters[name].copy_(before)
    return _ranked(found)


@torch.no_grad()
def scan_blocks(model: GPT, loss: Callable[[GPT], float]) -> list[Sensitivity]:
    """Each block alone left out ("blocks.k"), the most vital first. The model is as before after. Needs two blocks."""
    blocks = model.blocks
    if len(blocks) < 2:
        raise ValueError("a model of one block would be left with none; allowed: at least two")
    base, found = _base(model, loss), []
    try:
        for k in range(len(blocks)):
            model.blocks = nn.ModuleList(block for i, block in enumerate(blocks) if i != k)
            found.append(_line(f"blocks.{k}", 1.0, float(loss(model)), base))
    finally:
        model.blocks = blocks
    return _ranked(found)


def _weights(model: nn.Module) -> list[str]:
    tables = {id(m.weight) for m in model.modules() if "Embedding" in type(m).__name__}
    return [name for name, p in model.named_parameters() if p.dim() >= 2 and id(p) not in tables]


def _base(model: nn.Module, loss: Callable) -> float:
    base = float(loss(model))
    if not math.isfinite(base):
        raise ValueError(f"the loss of the whole model is {base}; allowed: a finite one, which the others are compared with")
    return base


def _line(name: str, share: float, loss: float, base: float) -> Sensitivity:
    loss = math.inf if math.isnan(loss) else loss
    return Sensitivity(name, share, loss, loss - base)


def _ranked(found: list[Sensitivity]) -> list[Sensitivity]:
    return sorted(found, key=lambda line: (-line.rise, line.name))


def spare(sizes: Mapping[str, int], vital: Sequence[str], share: float) -> dict[str, float]:
    """{name: share to prune}: 0 for the `vital` ones, and as much more for the others that `share` of all is zero.

    sizes: {name: how many weights}. ValueError for unknown names, and where the others are too few to give that many.
    """
    unknown = [name for name in vital if name not in sizes]
    if unknown:
        raise ValueError(f"no layer {unknown[0]!r}; there are {', '.join(sizes)}")
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; allowed: 0 <= share < 1")
    total, rest = sum(sizes.values()), sum(n for name, n in sizes.items() if name not in set(vital))
    if share * total >= rest and share > 0:
        raise ValueError(
            f"{len(set(vital))} spared layers leave {rest} of {total} weights: too few to make {share:.0%} of all zero; "
            f"allowed: a share below {rest / total:.3f}, or fewer spared layers"
        )
    return {name: 0.0 if name in set(vital) else share * total / rest if rest else 0.0 for name in sizes}
