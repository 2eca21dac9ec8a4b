"""What is wrong with a tensor-parallel run, in words: its classic faults multiply something by t, and each names itself.

Values, input gradients and weight gradients are compared one by one with those of one device, because most of these faults
leave some of them right: a bias that is divided by t gives the right output and a gradient that is too small. So each wrong
tensor is tried against t times and 1/t of the right one, and against the right one plus copies of a bias.

    got = t want,    got = want / t,    got = want + (t - 1) bias        within the bound

Reference: trials c28 and c29 of this project; Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

from collections.abc import Mapping, Sequence

import torch

__all__ = ["explain", "explain_ranks"]


def _outside(got: torch.Tensor, want: torch.Tensor, bound: float) -> torch.Tensor:
    return ~((got - want).abs() <= bound)  # so that nan is outside


def explain(
    got: Mapping[str, torch.Tensor | None],
    want: Mapping[str, torch.Tensor | None],
    *,
    t: int,
    bound: float | Mapping[str, float],
    biases: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """One sentence for each tensor of `got` that is further than `bound` from that of `want`; [] where all are right.

    biases: name -> bias of a product that is cut by rows, to recognise one that was added t times. None stands for no tensor.
    """
    said = [f"{name} is on one side only" for name in sorted(set(got) ^ set(want))]
    for name in want:
        if name not in got or (got[name] is None and want[name] is None):
            continue
        if got[name] is None or want[name] is None:
            said.append(f"{name}: {'nothing here' if got[name] is None else 'nothing on one device'}")
            continue
        g, w = (side[name].detach().double().cpu() for side in (got, want))
        limit = bound[name] if isinstance(bound, Mapping) else bound
        if g.shape != w.shape:
            said.append(f"{name} has shape {tuple(g.shape)}; on one device {tuple(w.shape)}")
        elif bool(_outside(g, w, limit).any()):
            said.append(f"{name} {_guess(g, w, limit, t, biases or {})}")
    return said


def _guess(g: torch.Tensor, w: torch.Tensor, limit: float, t: int, biases: Mapping[str, torch.Tensor]) -> str:
    large = bool((w.abs() > 10 * limit).any())  # of numbers near 0 every multiple fits
    if t > 1 and large and not _outside(g, t * w, t * limit).any():
        return (
            f"is {t} times too large, and t is {t}: summed over the ranks where it was whole already (an all-reduce in both "
            "directions, or the loss counted on every rank)"
        )
    if t > 1 and large and not _outside(g, w / t, limit).any():
        return f"is {t} times too small, and t is {t}: divided by t on its way (a bias, so that its copies add up to one?)"
    for bias, value in biases.items():
        value = value.detach().double().cpu()
        fits = g.dim() > 0 and value.shape[-1:] == g.shape[-1:] and value.abs().max() > 10 * limit
        if t > 1 and fits and not _outside(g, w + (t - 1) * value, t * limit).any():
            return f"is too large by {t - 1} times {bias}, and t is {t}: added on every rank, before the sum"
    wrong = _outside(g, w, limit)
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"differs at {int(wrong.sum())} of {g.numel()} places, first {list(place)}: {g[place].item():.6g}, one device has "
        f"{w[place].item():.6g} (bound {limit:.2g})"
    )


def explain_ranks(by_rank: Sequence[Mapping[str, torch.Tensor | None]]) -> list[str]:
    """One sentence for each tensor that should be the same on all ranks, to the bit, and is not."""
    first, said = by_rank[0], []
    for name, value in first.items():
        others = [r for r, other in enumerate(by_rank) if not _same(value, other[name])]
        if others:
            said.append(
                f"{name} differs between ranks: rank {others[0]} does not have rank 0's (a sum over the ranks is missing, "
                "or they dropped different places of one tensor)"
            )
    return said


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
