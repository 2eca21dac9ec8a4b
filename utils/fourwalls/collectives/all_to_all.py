"""Everybody has something for everybody: what the experts of a mixture need, and a transpose over ranks.

Pairwise exchange: in step s each rank gives to the one s places to its right and takes from the one s places to its left, so that
every step keeps all ports busy and no rank is sent to twice. Where pieces differ in size, a first exchange tells everyone how
much is coming: a receiver that guessed its own capacity would wait for ever, or for the wrong bytes.

    step s:  rank r sends piece (r + s) mod n to that rank, receives from (r - s) mod n
    time  =  (n - 1) (alpha + (S / n) beta)

Reference: Thakur, Rabenseifner and Gropp 2005 (pairwise exchange); MPI_Alltoall and MPI_Alltoallv.
"""

from collections.abc import Sequence
from operator import index

import torch

from ..ranks.comm import Comm, MismatchError
from .agree import agree
from .chunks import finish, flat_input, result_buffer

__all__ = ["all_to_all", "all_to_all_unequal", "exchange_counts"]


def all_to_all(comm: Comm, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x` (n k, ...) is n equal pieces of k rows, piece q for rank q; the result (n k, ...) is piece r of every rank, in order.

    Each rank sends n-1 messages of S/n. `out=x` works in place, from a copy of `x`. Raises ValueError where n does not divide
    the rows (see `all_to_all_unequal`), MismatchError (checks on) where shapes differ.
    """
    n = comm.size
    if x.dim() == 0 or x.shape[0] % n:
        raise ValueError(
            f"rank {comm.rank}: all_to_all cuts dim 0 into {n} equal pieces, and the shape is {tuple(x.shape)}; "
            "use all_to_all_unequal(comm, x, counts) for pieces that differ"
        )
    agree(comm, "all_to_all", x, algorithm="pairwise")
    source, result = flat_input(x), result_buffer(x, x.shape, out)
    if source.data_ptr() == result.data_ptr():  # in place, a piece would be overwritten before it is sent
        source = source.clone()
    _trade(comm, source, [x.numel() // n] * n, result, [x.numel() // n] * n)
    return finish(result, x.shape, out)


def all_to_all_unequal(
    comm: Comm, x: torch.Tensor, counts: Sequence[int], *, expect: Sequence[int] | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Rows of `x` (sum(counts), ...) in order of their rank: counts[q] of them go to rank q. Returns (rows that came, in order of
    the sender, how many came from each). Pieces may be empty; a rank that gets nothing returns a tensor of 0 rows.

    Each rank sends its n-1 pieces and, ahead of them, n-1 counts of 8 bytes. `expect`: how many rows this rank counts on from
    each; checks off, it is believed and no counts are sent. All ranks give it or none does. Raises ValueError for counts that
    do not fit `x`; MismatchError, which names both ranks, where a sender's count is not what its receiver expects.
    """
    counts = _whole_numbers(comm, "counts", counts)
    expect = None if expect is None else _whole_numbers(comm, "expect", expect)
    if x.dim() == 0 or sum(counts) != x.shape[0]:
        raise ValueError(
            f"rank {comm.rank}: counts {counts} ask for {sum(counts)} rows, and the shape of the tensor is {tuple(x.shape)}"
        )
    row, dtype = tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")
    agree(comm, "all_to_all_unequal", algorithm="pairwise", dtype=dtype, row=row, expect=expect is not None)
    if expect is None or comm.checks:
        coming = exchange_counts(comm, counts)
        wrong = [
            f"rank {q} sends {came} rows to rank {comm.rank}, which expects {wanted}"
            for q, (came, wanted) in enumerate(zip(coming, expect or coming, strict=True))
            if came != wanted
        ]
        if wrong:
            raise MismatchError("counts of all_to_all do not match: " + "; ".join(wrong), rank=comm.rank)
    else:
        coming = expect
    size = x[:1].numel() if x.shape[0] else x.new_empty((1, *row)).numel()  # elements of one row
    result = x.new_empty(sum(coming) * size)
    _trade(comm, flat_input(x), [c * size for c in counts], result, [c * size for c in coming])
    return result.view(sum(coming), *row), coming


def exchange_counts(comm: Comm, counts: Sequence[int]) -> list[int]:
    """What each rank will send here, from what each is about to send: one int64 to everybody."""
    mine = torch.tensor(list(counts), dtype=torch.int64, device=comm.device)
    coming = torch.empty_like(mine)
    _trade(comm, mine, [1] * comm.size, coming, [1] * comm.size)
    return coming.tolist()


def _trade(comm, flat, sizes, result, coming):
    """Piece q of `flat` to rank q, what rank q has for us into piece q of `result`."""
    n, rank = comm.size, comm.rank
    pieces, places = flat.split(sizes), result.split(coming)
    places[rank].copy_(pieces[rank])
    for step in range(1, n):
        to, frm = (rank + step) % n, (rank - step) % n
        comm.exchange(pieces[to], to, places[frm], frm)


def _whole_numbers(comm, word, counts):
    given = counts.tolist() if isinstance(counts, torch.Tensor) else counts
    try:  # a numpy int, or an int in a tensor, is a whole number too
        counts = [-1 if isinstance(c, bool) else index(c) for c in given]
    except TypeError:
        counts = []
    if len(counts) != comm.size or min(counts) < 0:
        raise ValueError(
            f"rank {comm.rank}: {word} is {given}; it has one whole number of at least 0 for each of {comm.size} ranks"
        )
    return counts
