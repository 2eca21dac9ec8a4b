"""Who shares a scale with whom: all values, those of one channel, of one token, or of a group of neighbours.

A slice is a set of values with one scale. `axis` names the dims that keep scales of their own (None: one scale for all; 0 for a
weight (outputs, inputs): one for each output; 0 for activations (tokens, channels): one for each token). `group` cuts the last
dim into groups of neighbours, each with its own scale in every row.

    slices:  1,  shape[axis],  or  rows * ceil(columns / group)

Reference: Krishnamoorthi 2018 (arXiv:1806.08342) for channels; Frantar et al. 2022 (arXiv:2210.17323) for groups.
"""

from collections.abc import Sequence

import torch

__all__ = ["check_layout", "expand_scale", "scale_shape", "to_slices"]


def check_layout(shape: Sequence[int], axis=None, group: int | None = None) -> tuple[int, ...]:
    """The dims that keep scales of their own, as sorted positive numbers. ValueError for a dim or a group that does not exist."""
    dims = len(shape)
    if group is not None:
        if axis is not None:
            raise ValueError(f"axis {axis!r} and group {group!r}; allowed: one of them (a group has its scale in every row)")
        if not isinstance(group, int) or isinstance(group, bool) or group < 1 or dims < 1:
            raise ValueError(f"group is {group!r} for shape {tuple(shape)}; it is a whole number of at least 1, on a last dim")
        return tuple(range(dims))
    axes = () if axis is None else tuple(axis) if isinstance(axis, Sequence) else (axis,)
    for a in axes:
        if not isinstance(a, int) or isinstance(a, bool) or not -dims <= a < dims:
            near = f"; nearest legal: {max(-dims, min(a, dims - 1))}" if isinstance(a, int) and dims else ""
            raise ValueError(f"axis {a!r} for shape {tuple(shape)}; allowed: {-dims} to {dims - 1}, or None{near}")
    return tuple(sorted({a % dims for a in axes}))


def scale_shape(shape: Sequence[int], axis=None, group: int | None = None) -> tuple[int, ...]:
    """The shape of the scales: that of x with 1 where a scale is shared, (..., groups) for groups."""
    kept = check_layout(shape, axis, group)
    if group is not None:
        return (*shape[:-1], -(-shape[-1] // group))
    return tuple(size if d in kept else 1 for d, size in enumerate(shape))


def to_slices(x: torch.Tensor, axis=None, group: int | None = None) -> torch.Tensor:
    """x -> (slices, values of a slice), in the order of the scales.

    A last group that is short is filled up with its own values again: zeros would change what an observer sees of it.
    """
    kept = check_layout(x.shape, axis, group)
    count = 1
    for size in scale_shape(x.shape, axis, group):
        count *= size
    if group is not None:
        lacking, short = -x.shape[-1] % group, x.shape[-1] % group
        if lacking:
            again = x[..., -short:].repeat(*[1] * (x.dim() - 1), -(-lacking // short))
            x = torch.cat([x, again[..., :lacking]], -1)
        return x.reshape(count, group)
    others = [d for d in range(x.dim()) if d not in kept]
    values = 1
    for d in others:
        values *= x.shape[d]
    return x.permute((*kept, *others)).reshape(count, values)


def expand_scale(scale: torch.Tensor, shape: Sequence[int], group: int | None = None) -> torch.Tensor:
    """Scales (or zero points) in a form that broadcasts over a tensor of `shape`."""
    return scale if group is None else scale.repeat_interleave(group, -1)[..., : shape[-1]]
