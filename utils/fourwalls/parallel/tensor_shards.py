"""Which part of each parameter a tensor-parallel rank holds: cutting, joining, and counting every parameter once.

A module says of each of its parameters along which dim it is cut (`cuts`); a parameter that it does not name is whole on every
rank. The whole is always made first and then cut, so the start, the gathered weights and the norm of the gradients are those of
one device for every number of ranks. A size that t does not divide is refused, but the vocabulary is filled up with zero rows.

    shard r of t along a dim = rows r w to (r + 1) w,   w = ceil(size / t)        |g|^2 = sum over cut + (1/t) sum over whole

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..collectives import ring
from ..cost.shape import nearest_multiples
from ..nn.init import draw
from ..nn.optim import check_largest
from ..ranks.comm import Comm

__all__ = [
    "Cut",
    "check_share",
    "clip_",
    "cuts_of",
    "fill_shard",
    "global_norm",
    "join",
    "load_whole",
    "shard",
    "whole_gradients",
    "whole_state",
]


class Cut(NamedTuple):
    """Along `dim` the whole parameter has `size` rows; the last ranks' shards may be filled up with zero rows."""

    dim: int
    size: int


def check_share(word: str, value: int, t: int) -> int:
    """value / t. ValueError, with the nearest legal sizes, unless t is a whole number of at least 1 that divides it."""
    if not isinstance(t, int) or isinstance(t, bool) or t < 1:
        raise ValueError(f"t is {t!r}; it is a whole number of at least 1")
    if value % t:
        legal = [d for d in range(1, value + 1) if value % d == 0]
        near = sorted(sorted(legal, key=lambda d: abs(d - t))[:2])
        raise ValueError(
            f"{word} {value} cannot be shared by t {t}; nearest legal t: {' or '.join(map(str, near))} "
            f"(or {word} {nearest_multiples(value, t)})"
        )
    return value // t


def shard(whole: torch.Tensor, cut: Cut | None, rank: int, t: int) -> torch.Tensor:
    """The part of `whole` that `rank` of `t` holds; filled up with zeros to ceil(size / t) rows. A copy."""
    if cut is None:
        return whole.clone()
    width = -(-cut.size // t)
    begin, end = min(rank * width, cut.size), min((rank + 1) * width, cut.size)
    part = whole.narrow(cut.dim, begin, end - begin)
    if end - begin == width:
        return part.clone()
    shape = list(whole.shape)
    shape[cut.dim] = width
    filled = whole.new_zeros(shape)
    filled.narrow(cut.dim, 0, end - begin).copy_(part)
    return filled


def join(comm: Comm, part: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """The whole, on every rank, without the filling. Every rank calls it; (t - 1) times the part is sent where it is cut."""
    if cut is None or comm.size == 1:
        whole = part.detach().clone()
        return whole if cut is None else whole.narrow(cut.dim, 0, cut.size)
    parts = ring.all_gather(comm, part.detach().movedim(cut.dim, 0).contiguous())  # (t, width, ...)
    return parts.flatten(0, 1)[: cut.size].movedim(0, cut.dim)


@torch.no_grad()
def fill_shard(parameter: torch.Tensor, cut: Cut, comm: Comm, name: str, *, seed: int, std: float) -> None:
    """Set a shard to its part of the whole parameter's draw, rounded to its dtype: the start of one device (trial c25)."""
    if parameter.device.type != "meta":
        shape = list(parameter.shape)
        shape[cut.dim] = cut.size
        parameter.copy_(shard(draw(name, shape, seed=seed, std=std), cut, comm.rank, comm.size))


def cuts_of(model: nn.Module) -> dict[str, Cut | None]:
    """Name of each parameter -> how it is cut; None: whole on every rank."""
    found: dict[str, Cut | None] = {}
    for name, _ in model.named_parameters():
        path, _, last = name.rpartition(".")
        found[name] = getattr(model.get_submodule(path), "cuts", {}).get(last)
    return found


@torch.no_grad()
def load_whole(model: nn.Module, state: dict[str, torch.Tensor], comm: Comm) -> None:
    """Give each parameter its part of the one-device model's `state` (names and whole shapes are those of one device).

    ValueError where a parameter was never given (a tied table that a checkpoint holds once, say), where a name is not known, or
    where a shape differs: nothing is left at its random start in silence.
    """
    cuts, parameters = cuts_of(model), dict(model.named_parameters())
    missing, unknown = sorted(cuts.keys() - state.keys()), sorted(state.keys() - cuts.keys())
    if missing or unknown:
        said = [f"no tensor for {', '.join(missing)}"] * bool(missing) + [f"no place for {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"this state does not fit the model: {'; '.join(said)} (is one of them tied and the other not?)")
    for name, cut in cuts.items():
        shape = list(parameters[name].shape)
        if cut is not None:
            shape[cut.dim] = cut.size
        if list(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)} in the state; the whole parameter is {tuple(shape)}")
    for name, cut in cuts.items():
        parameters[name].copy_(shard(state[name], cut, comm.rank, comm.size))


def whole_state(model: nn.Module, comm: Comm) -> dict[str, torch.Tensor]:
    """All parameters as one device holds them, on every rank. Every rank calls it."""
    cuts = cuts_of(model)
    return {name: join(comm, p, cuts[name]) for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module, comm: Comm) -> dict[str, torch.Tensor | None]:
    """All gradients as one device holds them (None where there is none), on every rank. Every rank calls it."""
    cuts = cuts_of(model)
    return {name: None if p.grad is None else join(comm, p.grad, cuts[name]) for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> Iterator[tuple[torch.Tensor, Cut | None]]:
    cuts = cuts_of(model)
    for name, p in model.named_parameters():
        if p.grad is not None:
            yield p.grad, cuts[name]


@torch.no_grad()
def global_norm(model: nn.Module, comm: Comm, *, order: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as if they were one vector on one device: `order` 2, or math.inf for the largest element.

    A cut parameter's parts are combined over ranks, one that every rank holds is counted once. One all-reduce of one number.
    """
    if order not in (2.0, math.inf):
        raise ValueError(f"order is {order!r}; allowed: 2, or math.inf for the largest element")
    wide = torch.float32
    for g, _ in _gradients(model):
        wide = torch.promote_types(wide, g.dtype)
    total = {True: torch.zeros((), dtype=wide, device=comm.device), False: torch.zeros((), dtype=wide, device=comm.device)}
    for g, cut in _gradients(model):
        if g.numel() == 0:
            continue
        g, is_cut = g.to(wide), cut is not None
        if order == 2.0:
            total[is_cut] = total[is_cut] + g.square().sum()
        else:
            total[is_cut] = torch.maximum(total[is_cut], g.abs().max())
    if order == 2.0:
        return (ring.all_reduce(comm, total[True]) + total[False]).sqrt()
    return torch.maximum(ring.all_reduce(comm, total[True], op="max"), total[False])


@torch.no_grad()
def clip_(model: nn.Module, comm: Comm, largest: float, *, order: float = 2.0) -> torch.Tensor:
    """Scale all gradients together so that their global norm is at most `largest`; returns the norm before. The same on all
    ranks, and the same as `nn.optim.clip_` on one device; ValueError as there.
    """
    check_largest(largest)
    norm = global_norm(model, comm, order=order)
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for g, _ in _gradients(model):
        g.mul_(scale.to(g.dtype))
    return norm
