"""Where may the zeros lie? Anywhere, or exactly two in each group of four neighbours along the inputs.

"Anywhere" loses least quality, and no dense product is any faster for it. Two of four is what NVIDIA's sparse tensor cores read:
half of the values and two bits each for their places, at up to twice the rate; hardware without them multiplies the zeros too.

    keep the n - floor(share * n) largest scores;        2:4: of w[:, 4j : 4j + 4] the two largest

Reference: Mishra et al. 2021 (arXiv:2104.08378).
"""

import torch

from ...cost.shape import nearest_multiples

__all__ = ["check_two_of_four", "keep_largest", "two_of_four"]


def _check_scores(scores: torch.Tensor) -> None:
    if scores.is_floating_point() and bool(torch.isnan(scores).any()):
        raise ValueError(f"{int(torch.isnan(scores).sum())} scores are NaN; a weight without a worth cannot be ranked")


def keep_largest(scores: torch.Tensor, share: float) -> torch.Tensor:
    """A mask of the scores' shape, False at the floor(share * n) smallest. Of equal scores the one that comes first stays.

    ValueError for a share below 0, for 1 or more (nothing would be left), and for NaN.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; allowed: 0 <= share < 1 (pruning everything leaves no model)")
    _check_scores(scores)
    flat = scores.detach().flatten()
    kept = flat.numel() - int(share * flat.numel() + 1e-9)  # 0.29 * 100 is 28.999...
    order = torch.argsort(flat, descending=True, stable=True)
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    mask[order[:kept]] = True
    return mask.view(scores.shape)


def two_of_four(scores: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) -> a mask with exactly two False in each four neighbours of a row (the inputs). Ties: the first stays.

    ValueError where the inputs are no multiple of 4, and for NaN.
    """
    if scores.dim() < 1 or scores.shape[-1] % 4 or not scores.numel():
        inputs = scores.shape[-1] if scores.dim() else 0
        raise ValueError(f"{inputs} inputs cannot be cut into fours; nearest legal: {nearest_multiples(max(inputs, 1), 4)}")
    _check_scores(scores)
    fours = scores.detach().unflatten(-1, (-1, 4))
    best = torch.argsort(fours, dim=-1, descending=True, stable=True)[..., :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)


def check_two_of_four(weight: torch.Tensor) -> None:
    """ValueError, with the first place, where four neighbours of a row hold more than two values that are not zero."""
    if weight.dim() < 1 or weight.shape[-1] % 4:
        raise ValueError(f"a weight {tuple(weight.shape)} cannot be cut into fours along its inputs")
    full = (weight.unflatten(-1, (-1, 4)) != 0).sum(-1)
    bad = (full > 2).nonzero()
    if len(bad):
        *row, four = bad[0].tolist()
        found, where = int(full[tuple(bad[0])]), ", ".join(map(str, row))
        raise ValueError(f"row {where}, inputs {4 * four} to {4 * four + 3}: {found} values are not zero; allowed: 2")
