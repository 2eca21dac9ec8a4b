"""Half the data, half the ranks, again and again: the fewest steps that still send the fewest bytes.

In round k of the reduce-scatter each rank trades with the one whose number differs in one bit: one keeps and adds the first
half of what they both hold, the other the second, and what they hold halves. The all-gather runs the film backwards. The
all-reduce takes near partners first: its large pieces stay inside a node, and what crosses between nodes is small. Where n is no
power of two, the surplus ranks are folded in first: of the pairs (0, 1), (2, 3), ... each odd rank gives its tensor to the even
one, rests, and is told the result.

    time  =  2 lg n alpha + 2 (n-1)/n S beta              n = 2^k
             (2 lg m + 2) alpha + (2 (m-1)/m + 2) S beta   otherwise, m the largest 2^k below n

Reference: Rabenseifner, "Optimization of collective reduction operations", 2004 (vector halving and distance doubling); Thakur,
Rabenseifner and Gropp 2005.
"""

import torch

from ..ranks.comm import Comm
from .agree import agree, agree_gather
from .chunks import chunk_sizes, finish, flat_input, gather_layout, result_buffer, working_copy
from .reductions import combine, get_reduction

__all__ = ["all_gather", "all_reduce", "fold", "reduce_scatter"]


def fold(n: int) -> list[list[int]]:
    """The seats of the rounds: 2^floor(lg n) lists of one rank or of an (even, odd) pair, whose first plays for both.

    fold(4) is [[0], [1], [2], [3]]; fold(6) is [[0, 1], [2, 3], [4], [5]].
    """
    seats = 1 << (n.bit_length() - 1)
    pairs = n - seats
    return [[2 * seat, 2 * seat + 1] if seat < pairs else [seat + pairs] for seat in range(seats)]


def all_reduce(comm: Comm, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the reduction over all ranks, the same bits everywhere. `out=x` works in place.

    Each rank sends 2 (n-1)/n S bytes in 2 lg n messages, the largest to its neighbours; where n is no power of two, a rank that
    rests sends S in one message, and its partner S more. Raises ValueError for an operation that the dtype lacks, MismatchError
    (checks on) where calls differ.
    """
    reduction = get_reduction(op, x.dtype)
    agree(comm, "all_reduce", x, algorithm="halving", op=op)
    flat = working_copy(x, out)
    seats = fold(comm.size)
    starts = _starts(chunk_sizes(flat.numel(), len(seats)))
    seat, pair = _seat(comm, seats)
    if comm.rank == pair[-1] != pair[0]:  # rests
        comm.send(flat, pair[0])
        comm.recv(flat, pair[0])
        return finish(flat, x.shape, out)
    _fold_in(comm, flat, pair, reduction)
    way = _halve(comm, flat, starts, seats, seat, _distances(seats), reduction)
    for partner, mine, theirs in reversed(way):
        comm.exchange(mine, partner, theirs, partner)
    if len(pair) == 2:
        comm.send(flat, pair[1])
    return finish(flat, x.shape, out)


def reduce_scatter(comm: Comm, x: torch.Tensor, *, op: str = "sum") -> torch.Tensor:
    """Rank r returns chunk r of the flattened reduction, (about S/n,). Each rank sends (n-1)/n S bytes in lg n messages; where n
    is no power of two, a rank that rests sends S, and its partner that rank's chunk.

    Far partners first, unlike the all-reduce: near ones first would leave rank r the chunk whose number is r read backwards in
    bits, and the chunks that a message should carry would lie scattered. So half of S crosses between nodes in one message.
    """
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce_scatter", x, algorithm="halving", op=op)
    flat = working_copy(x)
    seats = fold(comm.size)
    sizes = chunk_sizes(flat.numel(), comm.size)
    chunk = flat.split(sizes)[comm.rank]
    seat, pair = _seat(comm, seats)
    if comm.rank == pair[-1] != pair[0]:
        comm.send(flat, pair[0])
        return comm.recv(torch.empty_like(chunk), pair[0])
    _fold_in(comm, flat, pair, reduction)
    _halve(comm, flat, _starts(_of_seats(sizes, seats)), seats, seat, reversed(_distances(seats)), reduction)
    if len(pair) == 2:
        comm.send(flat.split(sizes)[pair[1]], pair[1])
    return chunk.clone()


def all_gather(comm: Comm, x: torch.Tensor, *, numel: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the stack (n, *x.shape), or with `numel` the flat tensor joined from the ranks' chunks.

    Each rank sends (n-1)/n S bytes of a result of S in lg n messages; where n is no power of two, a rank that rests sends its
    piece, and its partner all S more.
    """
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "all_gather", x, numel, algorithm="halving")
    flat, piece = result_buffer(x, shape, out, sum(sizes[: comm.rank])), flat_input(x)
    seats = fold(comm.size)
    seat, pair = _seat(comm, seats)
    if comm.rank == pair[-1] != pair[0]:
        comm.send(piece, pair[0])
        comm.recv(flat, pair[0])
        return finish(flat, shape, out)
    places = flat.split(sizes)
    places[comm.rank].copy_(piece)
    if len(pair) == 2:
        comm.recv(places[pair[1]], pair[1])
    _double(comm, flat, _starts(_of_seats(sizes, seats)), seats, seat)
    if len(pair) == 2:
        comm.send(flat, pair[1])
    return finish(flat, shape, out)


def _seat(comm, seats):
    """(number of this rank's seat, the ranks on it)."""
    pairs = comm.size - len(seats)
    seat = comm.rank // 2 if comm.rank < 2 * pairs else comm.rank - pairs
    return seat, seats[seat]


def _distances(seats):
    """1, 2, 4, ...: how far away the partner of each round sits, near first."""
    return [1 << k for k in range(len(seats).bit_length() - 1)]


def _of_seats(sizes, seats):
    return [sum(sizes[rank] for rank in pair) for pair in seats]


def _starts(sizes):
    """Where each piece begins, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _fold_in(comm, flat, pair, reduction):
    if len(pair) == 2:
        combine(comm, reduction, flat, comm.recv(torch.empty_like(flat), pair[1]))


def _halve(comm, flat, starts, seats, seat, distances, reduction):
    """Reduce-scatter by halving: afterwards one piece of `flat` is finished (piece `seat`, if far partners come first). The rest
    is overwritten on the way. Returns [(partner, what this rank kept, what it gave)], round by round.
    """
    low, high, way = 0, len(seats), []
    scratch = flat.new_empty(max(starts[high // 2], starts[high] - starts[high // 2])) if high > 1 else flat
    for distance in distances:
        partner, middle = seats[seat ^ distance][0], (low + high) // 2
        keep, give = (low, middle), (middle, high)
        if seat & distance:
            keep, give = give, keep
        kept, given = (flat[starts[a] : starts[b]].data for a, b in (keep, give))
        arrived = comm.exchange(given, partner, scratch[: kept.numel()], partner)
        combine(comm, reduction, kept, arrived)
        way.append((partner, kept, given))
        low, high = keep
    reduction.finish(flat[starts[low] : starts[high]], comm.size)
    return way


def _double(comm, flat, starts, seats, seat):
    """All-gather by doubling: piece `seat` is in its place; afterwards all are."""
    width = 1
    while width < len(seats):
        partner = seat ^ width
        mine, theirs = ((s & -width) for s in (seat, partner))  # first piece of the block that each holds
        held, missing = (flat[starts[a] : starts[a + width]].data for a in (mine, theirs))
        comm.exchange(held, seats[partner][0], missing, seats[partner][0])
        width *= 2
