"""Everybody's neighbour: data goes round a circle, so that every link works all the time and no rank is special.

The tensor is cut into n chunks. In n - 1 adding steps each rank sends one chunk to its right and adds the chunk that arrives
from its left: a reduce-scatter, after which rank r owns the finished chunk r. In n - 1 placing steps the finished chunks go
round once more: an all-gather. All-reduce is the two in a row.

    step s:  rank r sends chunk (r - 1 - s) mod n to the right, receives chunk (r - 2 - s) mod n from the left
    time  =  2 (n - 1) (alpha + (S / n) beta)   (one segment a chunk, additions free),     bytes a rank sends  =  2 (n - 1) S / n

Chunks are cut into segments, so that one segment is added while the next arrives and the last one leaves.
Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from collections import deque

import torch

from ..ranks.comm import Comm
from .agree import agree, agree_gather, check_root
from .chunks import cut, finish, flat_input, gather_layout, result_buffer, segment_count, segments, working_copy
from .reductions import combine, get_reduction
from .scratch import scratch

__all__ = ["SEGMENT_BYTES", "all_gather", "all_reduce", "all_reduce_blocking", "barrier", "broadcast", "reduce", "reduce_scatter"]

SEGMENT_BYTES = 3 * 2**20  # large enough to hide what a call costs, small enough to leave several segments a chunk
AHEAD = 4  # receives posted ahead: one is being added, one arrives, the others wait so that the wire never does


def all_reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", segment_bytes: int | None = SEGMENT_BYTES, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every rank returns the reduction over all ranks, the same bits everywhere. `out=x` works in place and copies nothing.

    Each rank sends 2(n-1) chunks. `segment_bytes` None: one message a chunk. Raises ValueError for an operation that the dtype
    lacks, MismatchError (checks on) where the ranks' calls differ.
    """
    reduction = get_reduction(op, x.dtype)
    agree(comm, "all_reduce", x, algorithm="ring", op=op, segment_bytes=segment_bytes)
    flat = working_copy(x, out)
    n = comm.size
    _circulate(comm, cut(flat, n), comm.rank - 1, n - 1, n - 1, reduction, _count(flat, n, segment_bytes))
    return finish(flat, x.shape, out)


def reduce_scatter(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", segment_bytes: int | None = SEGMENT_BYTES, overwrite: bool = False
) -> torch.Tensor:
    """Rank r returns chunk r of the flattened reduction, (about S/n,). Each rank sends n-1 chunks. overwrite: `x` is not needed
    afterwards; partial sums are made in its memory, and nothing is copied.
    """
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce_scatter", x, algorithm="ring", op=op, segment_bytes=segment_bytes)
    flat = flat_input(x) if overwrite else working_copy(x)
    chunks = cut(flat, comm.size)
    _circulate(comm, chunks, comm.rank - 1, comm.size - 1, 0, reduction, _count(flat, comm.size, segment_bytes))
    return chunks[comm.rank].clone()  # memory of its own: the working copy can go


def all_gather(
    comm: Comm,
    x: torch.Tensor,
    *,
    numel: int | None = None,
    segment_bytes: int | None = SEGMENT_BYTES,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every rank returns the stack (n, *x.shape), or with `numel` the flat tensor joined from the ranks' chunks.

    Each rank sends n-1 pieces: first its own, then each one that arrives, except the last.
    """
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "all_gather", x, numel, algorithm="ring", segment_bytes=segment_bytes)
    flat = result_buffer(x, shape, out, sum(sizes[: comm.rank]))
    pieces = list(flat.split(sizes))
    pieces[comm.rank].copy_(flat_input(x))
    _circulate(comm, pieces, comm.rank, 0, comm.size - 1, None, _count(flat, comm.size, segment_bytes))
    return finish(flat, shape, out)


def all_reduce_blocking(comm: Comm, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """The ring in its shortest form: 2(n-1) exchanges of whole chunks, each finished before the next begins."""
    reduction = get_reduction(op, x.dtype)
    agree(comm, "all_reduce", x, algorithm="ring_blocking", op=op)
    flat, n = working_copy(x, out), comm.size
    chunks, right, left = cut(flat, n), (comm.rank + 1) % n, (comm.rank - 1) % n
    scratch = torch.empty_like(chunks[0])
    with comm.one_call():
        for step in range(n - 1):
            give, take = chunks[(comm.rank - 1 - step) % n], chunks[(comm.rank - 2 - step) % n]
            place = scratch if take.numel() == scratch.numel() else scratch[: take.numel()]  # a view takes as long as a copy
            arrived = comm.exchange(give, right, place, left)
            combine(comm, reduction, take, arrived)
        reduction.finish(chunks[comm.rank], n)
        for step in range(n - 1):
            comm.exchange(chunks[(comm.rank - step) % n], right, chunks[(comm.rank - 1 - step) % n], left)
    return finish(flat, x.shape, out)


def broadcast(
    comm: Comm, x: torch.Tensor, *, root: int = 0, segment_bytes: int | None = SEGMENT_BYTES, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every rank returns the root's `x`: its segments pass down the chain root, root+1, ..., each rank forwarding while it
    receives.

    Every rank but the last of the chain sends S bytes. Time (n - 2 + k)(alpha + S/k beta) with k segments.
    """
    check_root(comm, root)
    agree(comm, "broadcast", x, algorithm="ring", root=root, segment_bytes=segment_bytes)
    flat = working_copy(x, out) if comm.rank == root else result_buffer(x, x.shape, out)
    _pass_on(comm, flat, (comm.rank - root) % comm.size, None, segment_bytes)
    return finish(flat, x.shape, out)


def reduce(
    comm: Comm,
    x: torch.Tensor,
    *,
    op: str = "sum",
    root: int = 0,
    segment_bytes: int | None = SEGMENT_BYTES,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The root returns the reduction, the others None. Partial sums pass down the chain root+1, root+2, ..., root; `x` is left
    unchanged.
    """
    check_root(comm, root)
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce", x, algorithm="ring", op=op, root=root, segment_bytes=segment_bytes)
    flat = working_copy(x, out if comm.rank == root else None)
    _pass_on(comm, flat, (comm.rank - root - 1) % comm.size, reduction, segment_bytes)
    if comm.rank != root:
        return None
    reduction.finish(flat, comm.size)
    return finish(flat, x.shape, out)


def barrier(comm: Comm) -> None:
    """Return when all ranks have called: an empty message goes round ("all are here"), then a second one ("you may go")."""
    agree(comm, "barrier", algorithm="ring")
    nothing = torch.empty(0, device=comm.device)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(2 if comm.size > 1 else 0):
        if comm.rank == 0:
            comm.send(nothing, right)
            comm.recv(nothing, left)
        else:
            comm.recv(nothing, left)
            comm.send(nothing, right)


def _count(flat: torch.Tensor, n: int, segment_bytes: int | None) -> int:
    return segment_count(flat.numel(), flat.element_size(), n, segment_bytes)


def _circulate(comm, chunks, first, adding, placing, reduction, count):
    """Send the chunks round: `adding` steps that combine, then `placing` steps that overwrite, `count` segments a chunk.

    Step s sends chunk first - s and receives chunk first - s - 1 (mod n). One loop serves all steps: whatever arrives is combined
    or is already in its place, and goes on to the right at once, while later segments are arriving. Waits for its sends at the
    end.
    """
    n, steps = comm.size, adding + placing
    if n == 1:
        return
    pieces = [piece for chunk in chunks for piece in segments(chunk, count)]
    circle = [(first - s) % n * count + k for s in range(1, n + 1) for k in range(count)]
    arrivals = (circle + circle)[: steps * count]
    ahead = min(AHEAD, (adding or placing) * count)
    with comm.one_call(), scratch(comm, pieces[0], ahead if adding else 0) as room:
        _go_round(comm, pieces, first % n * count, count, arrivals, adding * count, reduction, room, ahead)


def _go_round(comm, pieces, first, count, arrivals, adding, reduction, room, ahead):
    """The first `count` pieces to leave are those from number `first`; arrival i belongs to piece arrivals[i], and the first
    `adding` arrivals are combined with it.
    """
    n, total = comm.size, len(arrivals)
    right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
    leaving = {}  # number of a piece -> the send that still reads it
    full = pieces[0].numel()  # of a place in `room`: the first piece is the largest
    all_full = pieces[-1].numel() == full

    def post(i):
        """Begin the receive of arrival i: into scratch if it will be added, else straight into its place."""
        number = arrivals[i]
        if i >= adding:
            if number in leaving:  # our partial sum must have left this place; it has, long ago, so this hardly ever waits
                leaving.pop(number).wait()
            return comm.irecv(pieces[number], left)
        place = room[i % ahead]
        return comm.irecv(place if all_full else place[: pieces[number].numel()], left)

    posted = deque(post(i) for i in range(ahead))  # before the first send: data then finds its place waiting
    for number in range(first, first + count):
        leaving[number] = comm.isend(pieces[number], right)
    for i, number in enumerate(arrivals):
        arrived, piece = posted.popleft().wait(), pieces[number]
        if i < adding:
            combine(comm, reduction, piece, arrived)
            if i >= adding - count:
                reduction.finish(piece, n)
        if i < total - count:
            leaving[number] = comm.isend(piece, right)
        if i + ahead < total:
            posted.append(post(i + ahead))
    for request in leaving.values():
        request.wait()


def _pass_on(comm, flat, place, reduction, segment_bytes):
    """Segments of `flat` move along a chain in which this rank is number `place`, from 0 to n-1; with a reduction each rank
    adds its own.
    """
    pieces = segments(flat, segment_count(flat.numel(), flat.element_size(), 1, segment_bytes))
    ahead = min(AHEAD, len(pieces)) if place > 0 else 0
    with comm.one_call(), scratch(comm, pieces[0], ahead if reduction else 0) as room:
        _relay(comm, pieces, place, ahead, reduction, room)


def _relay(comm, pieces, place, ahead, reduction, room):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = []

    def post(i):
        target = room[i % ahead][: pieces[i].numel()] if reduction else pieces[i]
        return target, comm.irecv(target, left)

    posted = deque(post(i) for i in range(ahead))
    for i, piece in enumerate(pieces):
        if place > 0:
            target, request = posted.popleft()
            request.wait()
            if reduction:
                combine(comm, reduction, piece, target)
        if place < comm.size - 1:
            leaving.append(comm.isend(piece, right))
        if i + ahead < len(pieces) and place > 0:
            posted.append(post(i + ahead))
    for request in leaving:
        request.wait()
