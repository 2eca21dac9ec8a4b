"""Zero bubble by hand: B is split, and W, which nobody waits for, is put where a rank would otherwise stand idle.

H1 starts as 1F1B does and holds no more than 1F1B: rank r postpones W by r micro-batches, as its share of the memory that the
earlier ranks fill with forward passes. H2 doubles the warm-up and with it the memory; then even the warm-up triangle is filled,
and each rank starts and ends later than the one before, so that no rank has idle time between its first action and its last.

    bubble:  1F1B (p-1)(F + I + W), holds p        H1 (p-1)(F + I - W), holds p        H2 (p-1)(F + I - 2 W), holds 2 p - 1

Reference: Qi et al. 2023 (arXiv:2401.10241), section 2, figures 2 and 3, tables 2 and 5.
"""

from .actions import Action, Schedule
from .schedules import held_by_1f1b, whole

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Warm-up of 1F1B; W of rank r is r micro-batches late. Holds min(p, m) activations on every rank, W included."""
    return _split(ranks, microbatches, doubled=False)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Warm-up of 2 (p - r) - 1; W of rank r is 2 r micro-batches late. Holds min(2 p - 1, m) on every rank."""
    return _split(ranks, microbatches, doubled=True)


def _split(ranks: int, microbatches: int, *, doubled: bool) -> Schedule:
    whole(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        warm_up = held_by_1f1b(ranks, microbatches, rank, doubled=doubled)
        late = 2 * rank if doubled else rank
        row = [Action(rank, "F", m) for m in range(warm_up)]
        for m in range(microbatches):
            row.append(Action(rank, "I", m))
            if m >= late:
                row.append(Action(rank, "W", m - late))
            if warm_up + m < microbatches:
                row.append(Action(rank, "F", warm_up + m))
        row += [Action(rank, "W", m) for m in range(max(0, microbatches - late), microbatches)]
        rows.append(row)
    return rows
