"""What every communicator can do with messages alone: wait for everybody, and find out who else has the same colour.

Both go round in ceil(log2 n) rounds: in round k each rank hears from the one 2^k places before it and tells the one 2^k after
it, so after the last round everybody has heard, directly or not, from everybody. Real and simulated ranks share this code.

    messages a rank sends = ceil(log2 n)

Reference: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", IJPP 17 (1988).
"""

from collections.abc import Callable

import torch

__all__ = ["barrier", "split_groups"]


def barrier(comm, exchange: Callable) -> None:
    """Dissemination barrier; `exchange(x, to, buf, frm, name)` sends and receives at once on a channel of its own."""
    token, heard = torch.zeros(0), torch.zeros(0)
    distance = 1
    while distance < comm.size:
        exchange(token, (comm.rank + distance) % comm.size, heard, (comm.rank - distance) % comm.size, "barrier")
        distance *= 2


def split_groups(comm, exchange: Callable, color: int | None, key: int) -> tuple[int, ...] | None:
    """The ranks of `comm` with this rank's colour, in order of (key, rank); None for color None. Every rank must call it.

    Colours and keys travel as int64: ValueError for anything but whole numbers (colours of at least 0).
    """
    if color is not None and (not isinstance(color, int) or isinstance(color, bool) or color < 0):
        raise ValueError(f"rank {comm.rank}: color {color!r}; a whole number of at least 0, or None for no group")
    if not isinstance(key, int) or isinstance(key, bool):
        raise ValueError(f"rank {comm.rank}: key {key!r}; a whole number")
    size = comm.size
    known = torch.zeros(size, 2, dtype=torch.int64)  # row i belongs to rank (comm.rank - i) % size
    known[0] = torch.tensor([-1 if color is None else color, key])
    have = 1
    while have < size:
        more = min(have, size - have)
        heard = torch.empty(more, 2, dtype=torch.int64)
        exchange(known[:more].clone(), (comm.rank + have) % size, heard, (comm.rank - have) % size, "split")
        known[have : have + more] = heard
        have += more
    if color is None:
        return None
    rows = [((comm.rank - i) % size, *known[i].tolist()) for i in range(size)]
    return tuple(rank for rank, _, _ in sorted((r for r in rows if r[1] == color), key=lambda r: (r[2], r[0])))
