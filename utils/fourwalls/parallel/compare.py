"""Is it what one device computes? A comparison that says what is wrong: a factor, or the first place that differs.

The commonest faults of data parallelism multiply all gradients by one number that means something: the ranks were summed and not
averaged, or averaged twice, or the micro-batches were forgotten. So before a place is named, those factors are tried.

    right  <=>  |got - want| <= bound,  everywhere;      a factor f  <=>  |got - f want| <= max(1, f) bound,  everywhere

Reference: Higham, "Accuracy and Stability of Numerical Algorithms", for the bounds that callers bring.
"""

from collections.abc import Mapping

import torch

__all__ = ["explain_difference"]


def explain_difference(
    got: Mapping[str, torch.Tensor | None],
    want: Mapping[str, torch.Tensor | None],
    *,
    bound: float | Mapping[str, float],
    world_size: int = 1,
    accumulation: int = 1,
    what: str = "gradients",
) -> str:
    """ "" where every tensor of `got` is within `bound` (one number, or one for each name) of `want`'s; else a sentence for the
    learner.

    Names or shapes that differ are said first, then a factor made of `world_size` and `accumulation`, then the first wrong place.
    None stands for "no gradient", and equals only None.
    """
    if set(got) != set(want):
        return f"the {what} have other names: {sorted(set(got) ^ set(want))[:3]} on one side only"
    limit = {name: bound[name] if isinstance(bound, Mapping) else bound for name in want}
    for name, w in want.items():
        if (got[name] is None) != (w is None):
            has, lacks = ("one device has one", "here is none") if got[name] is None else ("here is one", "one device has none")
            return f"{name}: {has}, {lacks}"
        if w is not None and got[name].shape != w.shape:
            return f"{name} has shape {tuple(got[name].shape)}, on one device {tuple(w.shape)}"
    pairs = {n: (got[n].detach().double().cpu(), w.detach().double().cpu()) for n, w in want.items() if w is not None}
    wrong = {n: _outside(g, w, limit[n]) for n, (g, w) in pairs.items()}
    if not any(bool(mask.any()) for mask in wrong.values()):
        return ""
    for factor, meaning in _factors(world_size, accumulation):
        scaled = all(not bool(_outside(g, factor * w, limit[n] * max(1.0, factor)).any()) for n, (g, w) in pairs.items())
        if scaled and any(bool((w.abs() > limit[n]).any()) for n, (_, w) in pairs.items()):
            times = f"{factor:g} times too large" if factor > 1 else f"{1 / factor:g} times too small"
            return f"the {what} are exactly {times}: {meaning}"
    bad = [n for n, mask in wrong.items() if bool(mask.any())]
    name = bad[0]
    place = tuple(wrong[name].nonzero()[0].tolist())
    g, w = (side[place].item() for side in pairs[name])
    return (
        f"{len(bad)} of {len(pairs)} {what} differ from one device's; first {name}{list(place)}: {g:.6g}, one device has {w:.6g} "
        f"(apart by {abs(g - w):.2g}, the bound is {limit[name]:.2g})"
    )


def _outside(got, want, bound):
    return ~((got - want).abs() <= bound)  # so that nan is outside


def _factors(n: int, m: int) -> list[tuple[float, str]]:
    """Numbers to try, with what they would mean; the likelier first."""
    ranks, micro = f"the number of ranks ({n})", f"the number of micro-batches ({m})"
    both = f"ranks times micro-batches ({n} x {m})"
    tried = [
        (n, f"{ranks}. Summed over the ranks, and divided nowhere?"),
        (1 / n, f"{ranks}. Divided by it twice?"),
        (m, f"{micro}. Summed over the micro-batches, and divided nowhere?"),
        (1 / m, f"{micro}. Divided by it twice?"),
        (n * m, f"{both}. Divided by neither?"),
        (1 / (n * m), f"{both}. Divided by both twice?"),
        (n / m, f"{ranks} over {micro}"),
        (m / n, f"{micro} over {ranks}"),
        (n * n, f"{ranks}, squared"),
        (1 / (n * n), f"{ranks}, squared"),
    ]
    seen: set[float] = {1.0}
    return [(f, word) for f, word in tried if f not in seen and not seen.add(f)]
