"""Whole heads, neurons and layers go: tensors really get smaller, and so does every product that they take part in.

A hidden neuron is a row of the layer that writes it and a column of the layer that reads it; a head is a band of rows in query,
key and value and a band of columns in output. Both ends are cut together, so the residual stream keeps its width. Where several
query heads share one head of keys and values, each group that stays keeps equally many.

    up (f, h), down (h, f)  ->  up[keep], down[:, keep];          block gone:  x + attention + mlp  ->  x

Reference: Michel, Levy, Neubig 2019 (arXiv:1905.10650) for heads; Fan et al. 2020 (arXiv:1909.11556) for layers.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ...nn.attention import Attention
from ...nn.gpt import GPT, FeedForward
from ...nn.layers import Linear
from .scores import head_scores, neuron_scores

__all__ = ["keep_heads", "keep_layers", "keep_neurons", "shrink"]


def _checked(keep: Sequence[int], there_are: int, what: str) -> list[int]:
    kept = sorted(int(k) for k in keep)
    if not kept:
        raise ValueError(f"no {what} is kept; pruning everything leaves no model. Keep at least 1 of {there_are}")
    if len(set(kept)) < len(kept) or not 0 <= kept[0] <= kept[-1] < there_are:
        raise ValueError(f"{what}s {kept}; allowed: different numbers of 0 to {there_are - 1}")
    return kept


@torch.no_grad()
def _cut(layer: Linear, dim: int, kept: torch.Tensor) -> Linear:
    """A Linear of the same kind with only the rows (dim 0, with their bias) or columns (dim 1) `kept`."""
    weight = layer.weight.index_select(dim, kept)
    has_bias = layer.bias is not None
    kinds = {"bias": has_bias, "std": layer.std, "device": weight.device, "dtype": weight.dtype}
    small = Linear(weight.shape[1], weight.shape[0], **kinds)
    small.weight.copy_(weight)
    small.weight.requires_grad_(layer.weight.requires_grad)  # what was frozen stays so
    if has_bias:
        small.bias.copy_(layer.bias.index_select(0, kept) if dim == 0 else layer.bias)
        small.bias.requires_grad_(layer.bias.requires_grad)
    return small


def keep_neurons(mlp: FeedForward, keep: Sequence[int]) -> FeedForward:
    """Keep only these hidden neurons, in place: up (f, h) -> (f', h), down (h, f) -> (h, f'). Returns the mlp."""
    kept = torch.tensor(_checked(keep, mlp.up.outputs, "neuron"), device=mlp.up.weight.device)
    mlp.up, mlp.down = _cut(mlp.up, 0, kept), _cut(mlp.down, 1, kept)
    return mlp


def keep_heads(attention: Attention, keep: Sequence[int]) -> Attention:
    """Keep only these query heads, in place; a head of keys and values goes with the last query head that asked it.

    query (a d, h) -> (a' d, h), key and value (kv d, h) -> (kv' d, h), output (h, a d) -> (h, a' d). ValueError where the groups
    that stay would have different numbers of query heads.
    """
    heads, group = attention.heads, attention.heads // attention.kv_heads
    kept = _checked(keep, heads, "head")
    each = Counter(k // group for k in kept)
    if len(set(each.values())) > 1:
        raise ValueError(
            f"heads {kept} leave {dict(each)} query heads for each head of keys and values; allowed: equally many in each group "
            f"of {group} that stays (heads {kept[0] // group * group} to {kept[0] // group * group + group - 1} are a group)"
        )
    d = attention.query.outputs // heads
    asks, told = (_bands(which, d, attention.query.weight.device) for which in (kept, sorted(each)))
    attention.query, attention.output = _cut(attention.query, 0, asks), _cut(attention.output, 1, asks)
    attention.key, attention.value = _cut(attention.key, 0, told), _cut(attention.value, 0, told)
    attention.heads, attention.kv_heads = len(kept), len(each)
    return attention


def _bands(which: Sequence[int], d: int, device) -> torch.Tensor:
    """The rows of heads of width d: (0, 2) with d = 3 -> 0 1 2 6 7 8."""
    return torch.tensor([k * d + i for k in which for i in range(d)], device=device)


def keep_layers(model: GPT, keep: Sequence[int]) -> GPT:
    """Keep only these blocks, in place, in their order; the config says so. Returns the model."""
    kept = _checked(keep, len(model.blocks), "layer")
    model.blocks = nn.ModuleList(model.blocks[k] for k in kept)
    model.config = replace(model.config, layers=len(kept))
    return model


def shrink(model: GPT, share: float = 0.5, *, heads: bool = True, neurons: bool = True) -> GPT:
    """A copy without `share` of the heads (whole groups, where they share keys) and neurons of every block, the worst first.

    Of equal worth the first stays. `config.ff` follows; `config.heads` cannot, since the width stays: ask the blocks. ValueError
    where share of them is no whole number, or all.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; allowed: 0 <= share < 1 (pruning everything leaves no model)")
    small = copy.deepcopy(model)
    for block in small.blocks:
        attention, mlp = block.attention, block.mlp
        if heads:
            per = attention.heads // attention.kv_heads
            groups = head_scores(attention).view(attention.kv_heads, per).sum(1)
            best = _best(groups, share, "groups of heads" if per > 1 else "heads")
            keep_heads(attention, [g * per + i for g in best for i in range(per)])
        if neurons:
            keep_neurons(mlp, _best(neuron_scores(mlp), share, "neurons"))
    if neurons:
        small.config = replace(small.config, ff=small.blocks[0].mlp.up.outputs)
    return small


def _best(scores: torch.Tensor, share: float, what: str) -> list[int]:
    """The numbers of the n (1 - share) largest scores, in order; ties: the first."""
    n = len(scores)
    kept = n - share * n
    if abs(kept - round(kept)) > 1e-9 or round(kept) < 1:
        near = [f"{k}/{n}" for k in sorted({min(n - 1, int(share * n)), min(n - 1, int(share * n) + 1)})]
        raise ValueError(f"share {share!r} of {n} {what} is {share * n:g}; nearest legal shares: {' or '.join(near)}")
    return torch.argsort(scores, descending=True, stable=True)[: round(kept)].sort().values.tolist()
