"""Those who know tell those who do not: after each round twice as many ranks have it.

Ranks are counted from the root: v = (rank - root) mod n. In a binomial tree the parent of v is v with its lowest set bit cleared,
and v's subtree is a block of consecutive numbers, so that scatter and gather move whole blocks. Any n will do, not only powers
of two. Few steps, but whole tensors: good for small messages.

    time of a broadcast or a reduction  =  ceil(log2 n) (alpha + S beta),   of an all-reduce twice that

Reference: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

import torch

from ..ranks.comm import Comm
from .agree import agree, agree_gather, check_root
from .chunks import chunk_sizes, finish, flat_input, gather_layout, result_buffer, working_copy
from .reductions import combine, get_reduction

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "family",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "subtree",
]

TOP = 0  # where collectives without a root meet


def family(v: int, n: int) -> tuple[int | None, list[int]]:
    """(parent, children with the largest subtree first) of number v in the binomial tree of n, counted from the root."""
    parent = v & (v - 1) if v else None
    children, bit = [], 1
    while v + bit < n and not v & bit:
        children.append(v + bit)
        bit *= 2
    return parent, children[::-1]


def subtree(v: int, n: int) -> range:
    """The numbers below and including v: a consecutive block."""
    lowest_bit = v & -v if v else n
    return range(v, min(v + lowest_bit, n))


def broadcast(comm: Comm, x: torch.Tensor, *, root: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the root's `x` (same shape everywhere). A rank sends S bytes to each of its children, the root
    ceil(log2 n) times.
    """
    check_root(comm, root)
    agree(comm, "broadcast", x, algorithm="tree", root=root)
    flat = working_copy(x, out) if comm.rank == root else result_buffer(x, x.shape, out)
    _down(comm, flat, root)
    return finish(flat, x.shape, out)


def reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", root: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The root returns the reduction over all ranks, the others None. Every rank but the root sends S bytes once; `x` is left
    unchanged.
    """
    check_root(comm, root)
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce", x, algorithm="tree", op=op, root=root)
    flat = working_copy(x, out if comm.rank == root else None)
    _up(comm, flat, reduction, root)
    return finish(flat, x.shape, out) if comm.rank == root else None


def all_reduce(comm: Comm, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns the reduction over all ranks: up the tree, then down."""
    reduction = get_reduction(op, x.dtype)
    agree(comm, "all_reduce", x, algorithm="tree", op=op)
    flat = working_copy(x, out)
    _up(comm, flat, reduction, TOP)
    _down(comm, flat, TOP)
    return finish(flat, x.shape, out)


def scatter(comm: Comm, x: torch.Tensor, *, root: int = 0) -> torch.Tensor:
    """Rank r returns chunk r of the root's flattened `x`. Other ranks give shape and dtype only: a meta tensor will do.

    Each rank receives the chunks of its subtree in one message and passes on the parts of its children.
    """
    check_root(comm, root)
    agree(comm, "scatter", x, algorithm="tree", root=root)
    sizes = chunk_sizes(x.numel(), comm.size)
    return _split_down(comm, flat_input(x) if comm.rank == root else None, sizes, x.dtype, root)


def gather(
    comm: Comm, x: torch.Tensor, *, root: int = 0, numel: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The root returns the stack (n, *x.shape), or with `numel` the flat tensor joined from the ranks' chunks; the others None.

    Each rank sends the pieces of its whole subtree in one message.
    """
    check_root(comm, root)
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "gather", x, numel, algorithm="tree", root=root)
    flat = result_buffer(x, shape, out, sum(sizes[: comm.rank])) if comm.rank == root else None
    _join_up(comm, flat_input(x), flat, sizes, root)
    return finish(flat, shape, out) if comm.rank == root else None


def all_gather(comm: Comm, x: torch.Tensor, *, numel: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank returns what `gather` gives to its root: pieces join on the way up, and all of them go down to everybody."""
    sizes, shape = gather_layout(x, comm.size, comm.rank, numel)
    agree_gather(comm, "all_gather", x, numel, algorithm="tree")
    flat = result_buffer(x, shape, out, sum(sizes[: comm.rank]))
    _join_up(comm, flat_input(x), flat, sizes, TOP)
    _down(comm, flat, TOP)
    return finish(flat, shape, out)


def reduce_scatter(comm: Comm, x: torch.Tensor, *, op: str = "sum") -> torch.Tensor:
    """Rank r returns chunk r of the flattened reduction: whole tensors up the tree, chunks down."""
    reduction = get_reduction(op, x.dtype)
    agree(comm, "reduce_scatter", x, algorithm="tree", op=op)
    flat = working_copy(x)
    _up(comm, flat, reduction, TOP)
    return _split_down(comm, flat, chunk_sizes(x.numel(), comm.size), x.dtype, TOP)


def barrier(comm: Comm) -> None:
    """Return when all ranks have called: empty messages up the tree, then down."""
    agree(comm, "barrier", algorithm="tree")
    nothing = torch.empty(0, device=comm.device)
    parent, children = _relatives(comm, 0)
    for child in reversed(children):
        comm.recv(nothing, child)
    if parent is not None:
        comm.send(nothing, parent)
    _down(comm, nothing, 0)


def _relatives(comm, root):
    """(parent, children) of this rank as ranks, in the tree that hangs from `root`."""
    parent, children = family((comm.rank - root) % comm.size, comm.size)
    return None if parent is None else (parent + root) % comm.size, [(c + root) % comm.size for c in children]


def _down(comm, flat, root):
    """The root's `flat` to everybody; the largest subtree is served first, since it has the longest way to go."""
    parent, children = _relatives(comm, root)
    if parent is not None:
        comm.recv(flat, parent)
    for child in children:
        comm.send(flat, child)


def _up(comm, flat, reduction, root):
    """Reduce into the root's `flat`; the smallest subtree is ready first. Overwrites `flat` on the way."""
    parent, children = _relatives(comm, root)
    scratch = torch.empty_like(flat) if children else None
    for child in reversed(children):
        combine(comm, reduction, flat, comm.recv(scratch, child))
    if parent is not None:
        comm.send(flat, parent)
    else:
        reduction.finish(flat, comm.size)


def _join_up(comm, piece, flat, sizes, root):
    """Pieces to the root: each rank collects its subtree, in tree order, and sends it as one block. `flat` is the root's, in
    rank order.
    """
    n, v = comm.size, (comm.rank - root) % comm.size
    parent, children = family(v, n)
    in_tree_order = sizes[root:] + sizes[:root]
    block = piece if not children else piece.new_empty(sum(in_tree_order[w] for w in subtree(v, n)))
    block[: piece.numel()] = piece
    for child in reversed(children):
        start = sum(in_tree_order[v:child])
        part = block[start : start + sum(in_tree_order[w] for w in subtree(child, n))]
        comm.recv(part, (child + root) % n)
    if parent is not None:
        comm.send(block, (parent + root) % n)
    else:
        before = sum(sizes[:root])  # the block starts with the root's own piece: turn it back into rank order
        flat[before:].copy_(block[: block.numel() - before])
        flat[:before].copy_(block[block.numel() - before :])


def _split_down(comm, flat, sizes, dtype, root):
    """Chunk r of the root's `flat` to rank r: each rank receives the block of its subtree and hands on its children's parts."""
    n, v = comm.size, (comm.rank - root) % comm.size
    parent, children = family(v, n)
    in_tree_order = sizes[root:] + sizes[:root]
    if parent is None:
        before = sum(sizes[:root])
        block = torch.cat([flat[before:], flat[:before]])
    else:
        block = torch.empty(sum(in_tree_order[w] for w in subtree(v, n)), dtype=dtype, device=comm.device)
        comm.recv(block, (parent + root) % n)
    for child in children:
        start = sum(in_tree_order[v:child])
        comm.send(block[start : start + sum(in_tree_order[w] for w in subtree(child, n))], (child + root) % n)
    return block[: sizes[comm.rank]].clone()
