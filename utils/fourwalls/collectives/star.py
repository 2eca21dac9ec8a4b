"""Everything through one rank: the boss collects, the boss hands out.

The first thing anyone writes. It is right, easy, and the boss's port carries every byte, so the time grows with the number
of ranks while the other ranks wait.

    time of a reduction  =  (n - 1) (alpha + S beta),   of an all-reduce twice that

Reference: the "linear" algorithms of MPI libraries.
"""

import torch

from ..ranks.comm import Comm
from .agree import agree, agree_gather, check_root
from .chunks import chunk_sizes, cut, finish, flat_input, gather_layout, result_buffer, working_copy
from .reductions import combine, get_reduction

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

BOSS = 0  # where collectives without a root meet


def broadcast(comm: Comm, x: torch.Tensor, *, root: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the root's `x` (same shape everywhere). The root sends (n-1) S bytes in n-1 messages."""
    check_root(comm, root)
    agree(comm, "broadcast", x, algorithm="star", root=root)
    flat = working_copy(x, out) if comm.rank == root else result_buffer(x, x.shape, out)
    _hand_out(comm, flat, root)
    return finish(flat, x.shape, out)


def reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", root: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The root returns the reduction over all ranks, the others None. Each other rank sends S bytes; `x` is left unchanged."""
    check_root(comm, root)
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce", x, algorithm="star", op=op, root=root)
    flat = working_copy(x, out) if comm.rank == root else flat_input(x)
    _collect(comm, flat, reduction, root)
    return finish(flat, x.shape, out) if comm.rank == root else None


def all_reduce(comm: Comm, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the reduction over all ranks. The boss sends (n-1) S bytes, the others S."""
    reduction = get_reduction(op, x.dtype)
    agree(comm, "all_reduce", x, algorithm="star", op=op)
    flat = working_copy(x, out)
    _collect(comm, flat, reduction, BOSS)
    _hand_out(comm, flat, BOSS)
    return finish(flat, x.shape, out)


def scatter(comm: Comm, x: torch.Tensor, *, root: int = 0) -> torch.Tensor:
    """Rank r returns chunk r of the root's flattened `x`. Other ranks give shape and dtype only: a meta tensor will do."""
    check_root(comm, root)
    agree(comm, "scatter", x, algorithm="star", root=root)
    flat = flat_input(x) if comm.rank == root else None
    return _deal(comm, flat, x.numel(), x.dtype, root)


def gather(
    comm: Comm, x: torch.Tensor, *, root: int = 0, numel: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The root returns the stack (n, *x.shape), or with `numel` the flat tensor joined from the ranks' chunks; the others
    None.
    """
    check_root(comm, root)
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "gather", x, numel, algorithm="star", root=root)
    flat = result_buffer(x, shape, out, sum(sizes[: comm.rank])) if comm.rank == root else None
    _pick_up(comm, flat_input(x), flat, sizes, root)
    return finish(flat, shape, out) if comm.rank == root else None


def all_gather(comm: Comm, x: torch.Tensor, *, numel: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns what `gather` gives to its root: the boss collects all pieces, then sends all of them to everybody."""
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "all_gather", x, numel, algorithm="star")
    flat = result_buffer(x, shape, out, sum(sizes[: comm.rank]))
    _pick_up(comm, flat_input(x), flat, sizes, BOSS)
    _hand_out(comm, flat, BOSS)
    return finish(flat, shape, out)


def reduce_scatter(comm: Comm, x: torch.Tensor, *, op: str = "sum") -> torch.Tensor:
    """Rank r returns chunk r of the flattened reduction: the boss reduces, then deals the chunks."""
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce_scatter", x, algorithm="star", op=op)
    flat = working_copy(x) if comm.rank == BOSS else flat_input(x)
    _collect(comm, flat, reduction, BOSS)
    return _deal(comm, flat, x.numel(), x.dtype, BOSS)


def barrier(comm: Comm) -> None:
    """Return when all ranks have called: an empty message to the boss, and one back."""
    agree(comm, "barrier", algorithm="star")
    nothing = torch.empty(0, device=comm.device)
    for peer in range(1, comm.size):
        if comm.rank == BOSS:
            comm.recv(nothing, peer)
        elif comm.rank == peer:
            comm.send(nothing, BOSS)
    _hand_out(comm, nothing, BOSS)


def _collect(comm, flat, reduction, root):
    """Reduce into the root's `flat`, in order of rank after the root's own; the others only send theirs."""
    if comm.rank != root:
        comm.send(flat, root)
        return
    scratch = torch.empty_like(flat)
    for peer in _others(comm, root):
        combine(comm, reduction, flat, comm.recv(scratch, peer))
    reduction.finish(flat, comm.size)


def _hand_out(comm, flat, root):
    """The root's `flat` to everybody."""
    if comm.rank != root:
        comm.recv(flat, root)
        return
    for request in [comm.isend(flat, peer) for peer in _others(comm, root)]:
        request.wait()


def _deal(comm, flat, numel, dtype, root):
    """Chunk r of the root's `flat` to rank r; returns this rank's, in memory of its own."""
    if comm.rank != root:
        mine = torch.empty(chunk_sizes(numel, comm.size)[comm.rank], dtype=dtype, device=comm.device)
        return comm.recv(mine, root)
    chunks = cut(flat, comm.size)
    for request in [comm.isend(chunks[peer], peer) for peer in _others(comm, root)]:
        request.wait()
    return chunks[root].clone()


def _pick_up(comm, piece, flat, sizes, root):
    """Every rank's piece into its place in the root's `flat`, straight, with all receives posted ahead."""
    if comm.rank != root:
        comm.send(piece, root)
        return
    places = flat.split(sizes)
    coming = [comm.irecv(places[peer], peer) for peer in _others(comm, root)]
    places[root].copy_(piece)
    for request in coming:
        request.wait()


def _others(comm, root):
    return [peer for peer in range(comm.size) if peer != root]
