"""The pipeline schedules that everybody starts from: naive, GPipe, 1F1B, and forward-only.

Each is a pure function: so many ranks (a stage on each), so many micro-batches, and out comes what each rank does, in order.
GPipe and 1F1B take the same time where a backward pass finds its input waiting; they differ in how many activations a rank
holds meanwhile, m or at most p - i on stage i.

    slots (F = B = 1):  GPipe, 1F1B  2 (m + p - 1)        naive  2 p m        bubble of total  (p - 1) / (m + p - 1)

Reference: Huang et al. 2019 (GPipe, arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473) for 1F1B as it is used here.
"""

from .actions import Action, Schedule

__all__ = ["forward_only", "gpipe", "held_by_1f1b", "naive", "one_f_one_b", "whole"]


def whole(**numbers: int) -> None:
    """ValueError unless each number is a whole one of at least 1."""
    for word, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{word} is {value!r}; allowed: a whole number of at least 1, nearest 1")


def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch goes all the way down and back before the next one starts: at any time one rank works. Holds 1."""
    whole(ranks=ranks, microbatches=microbatches)
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(ranks)]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes, both in the order of the micro-batches. Each rank holds all of them."""
    whole(ranks=ranks, microbatches=microbatches)
    return [[Action(s, kind, m) for kind in "FB" for m in range(microbatches)] for s in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int, *, doubled: bool = False) -> Schedule:
    """A warm-up of forward passes, then a backward and a forward pass in turn, then the rest of the backward passes.

    Stage i warms up with p - i of them and so holds min(p - i, m). doubled: with 2 (p - i) - 1, so that a link which takes time
    may be on its way while the stage works on; it holds min(2 (p - i) - 1, m). Any number of micro-batches, fewer than ranks too.
    """
    whole(ranks=ranks, microbatches=microbatches)
    rows = []
    for stage in range(ranks):
        warm_up = held_by_1f1b(ranks, microbatches, stage, doubled=doubled)
        row = [Action(stage, "F", m) for m in range(warm_up)]
        for m in range(microbatches):
            row.append(Action(stage, "B", m))
            if warm_up + m < microbatches:
                row.append(Action(stage, "F", warm_up + m))
        rows.append(row)
    return rows


def held_by_1f1b(ranks: int, microbatches: int, stage: int, *, doubled: bool = False) -> int:
    """Micro-batches whose activations stage `stage` of 1F1B holds at its peak."""
    left = ranks - stage
    return min(2 * left - 1 if doubled else left, microbatches)


def forward_only(ranks: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """Only forward passes, for evaluation: rank r has the stages r, r + p, ..., and works on a micro-batch as soon as it can."""
    whole(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = range(0, microbatches, ranks)  # no more than p at a time, or the rank's next stage would starve
    order = [(c, m) for first in rounds for c in range(chunks) for m in range(first, min(first + ranks, microbatches))]
    return [[Action(c * ranks + r, "F", m) for c, m in order] for r in range(ranks)]
