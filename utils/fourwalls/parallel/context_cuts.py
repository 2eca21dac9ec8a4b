"""A long sequence on c ranks: which tokens each holds, and how a whole is cut and joined again.

A cut is a list of ranges of positions (cost.context.runs), the same arithmetic that prices the work. Everything that belongs to
a token goes by it: ids, targets, positions, masks. Targets are shifted before they are cut, since a rank's last token has its
target on another rank.

    equal: rank r holds chunk r of c        zigzag: chunks r and 2c-1-r of 2c        striped: tokens r, r + c, r + 2c, ...

Reference: Brandon et al. 2023 (arXiv:2311.09431) for striped; Llama team 2024 (arXiv:2407.21783), section 3.3.2, for 2c chunks.
"""

from collections.abc import Sequence

import torch

from ..collectives import ring
from ..cost.context import check_cut, multiple, runs
from ..ranks.comm import Comm
from .token_loss import IGNORE

__all__ = ["fill_up", "join", "natural_order", "part", "places", "positions"]


def places(held: Sequence[range], *, device=None) -> torch.Tensor:
    """The positions of some ranges, (tokens,) of int64."""
    return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in held])


def positions(cut: str, length: int, c: int, rank: int, *, device=None) -> torch.Tensor:
    """The positions of this rank's tokens in the whole sequence, (s/c,): for position tables and rotations."""
    return places(runs(cut, length, c, rank), device=device)


def part(x: torch.Tensor, cut: str, c: int, rank: int, *, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of a whole `x` (..., s, ...) along `dim` -> (..., s/c, ...), contiguous. ValueError where s does not
    fit.
    """
    held = runs(cut, x.shape[dim], c, rank)
    places_of = [slice(run.start, run.stop, run.step) for run in held]
    front = x.movedim(dim, 0)
    return torch.cat([front[where] for where in places_of]).movedim(0, dim).contiguous()


def natural_order(cut: str, length: int, c: int, *, device=None) -> torch.Tensor | None:
    """Where position p stands in all ranks' tokens put one after the other, (s,); None where it stands at p."""
    if cut == "equal" or c == 1:
        return None
    return torch.cat([positions(cut, length, c, rank) for rank in range(c)]).argsort().to(device)


def join(comm: Comm, x: torch.Tensor, cut: str, *, dim: int = 1) -> torch.Tensor:
    """Every rank's tokens (..., s/c, ...) -> the whole (..., s, ...) in its natural order, on all ranks: for looking, not for
    training. (c - 1) times the part is sent.
    """
    every = ring.all_gather(comm, x.detach().movedim(dim, 0).contiguous()).flatten(0, 1)
    order = natural_order(cut, len(every), comm.size, device=x.device)
    return (every if order is None else every[order]).movedim(0, dim)


def fill_up(tokens: torch.Tensor, targets: torch.Tensor, cut: str, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets (b, s) with filling at the end, so that c ranks can share them; the same tensors where they can.

    Causal attention lets no token look at the filling, which comes later, and its targets do not count: losses and gradients
    stay those of the s tokens.
    """
    s = tokens.shape[1]
    more = -s % multiple(cut, c)
    check_cut(cut, s + more, c)
    if not more:
        return tokens, targets
    return torch.nn.functional.pad(tokens, (0, more)), torch.nn.functional.pad(targets, (0, more), value=IGNORE)
