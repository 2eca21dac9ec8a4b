"""Do ranks learn what they know from messages? In one run every message arrives altered, and the results must show it.

Ranks are processes of one machine, so there are other ways between them than the one that is counted: memory that was shared
before they were forked, files, exit codes of children. Who uses those gets the same result from altered messages, and is told.

    f(messages) = right     and     f(altered messages) != right, on every rank that was sent something

Reference: course/stand_in.py, which alters them.
"""

import torch

from .expect import Wrong
from .problem import Session, Stopped

__all__ = ["altered", "must_use"]

LIMIT = 3.0  # seconds of a run


def altered(x: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype, every element another one."""
    if x.dtype == torch.bool:
        return ~x
    return x + 3 if x.numel() else x


def must_use(s: Session, right, *args, ranks: int, per_rank=None, driver=None) -> None:
    """Run with altered messages. right(rank, value): whether that is the right result all the same; then Wrong is raised.

    A run that fails has noticed, and is no mistake: what it was sent made no sense. But of a function that has never come to its
    end nothing is known: Stopped is raised as in its other checks.
    """
    if s.outcomes and all(outcome.failure is not None for outcome in s.outcomes):
        raise Stopped(s.outcomes[-1].failure)
    outcome = s.run(*args, ranks=ranks, per_rank=per_rank, driver=driver, limit=LIMIT, alter=altered)
    if outcome.failure is not None:
        return
    for rank, value in enumerate(outcome.values):
        if right(rank, value):
            said = f"{ranks} ranks: rank {rank} has the right result, though what it was sent was altered on the way"
            raise Wrong(said, "by which other way does it know?")
