"""Cheap wires first: add up inside each node, so that only one node's worth of data crosses the slow wire between nodes.

Inside a node a ring reduce-scatter leaves each rank with the node's sum of one lane of the tensor. Each lane is then reduced
among the ranks that hold it, one in every node, all lanes at once; and a ring all-gather inside the node brings the lanes
together. A node with fewer ranks than the largest gives some of its ranks several lanes.

    time  =  2 (m-1) (alpha_in + S/m beta_in)  +  2 (k-1) (alpha_out + S/(m k) beta_out)       k nodes of m ranks

Reference: Cho, Finkler, Kung and Hunter, "BlueConnect", 2019; Sergeev and Del Balso, "Horovod", 2018 (hierarchical all-reduce).
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import index

import torch

from ..ranks.comm import Comm
from ..ranks.shared import hosts
from .agree import agree
from .chunks import chunk_sizes, cut, finish, working_copy
from .reductions import combine, get_reduction

__all__ = ["all_reduce", "find_nodes", "lane_owners"]


def all_reduce(
    comm: Comm,
    x: torch.Tensor,
    *,
    op: str = "sum",
    ranks_per_node: int | None = None,
    nodes: Sequence[Sequence[int]] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every rank returns the reduction over all ranks, the same bits everywhere. `out=x` works in place.

    Nodes are as `find_nodes` says. With k nodes of m ranks each rank sends 2 (m-1)/m S bytes inside its node and 2 (k-1)/k S/m to
    other nodes; with one node, or one rank a node, this is the ring. Raises ValueError for nodes that do not cover the ranks
    once.
    """
    reduction = get_reduction(op, x.dtype)
    nodes = find_nodes(comm, ranks_per_node, nodes)
    agree(comm, "all_reduce", x, algorithm="hierarchical", op=op, nodes=_short(nodes))
    flat = working_copy(x, out)
    lanes = cut(flat, max(map(len, nodes)))
    owners = [lane_owners(node, len(lanes)) for node in nodes]
    here = next(i for i, node in enumerate(nodes) if comm.rank in node)
    # inside: every rank's lanes lie side by side, so they are one piece of the ring
    ends = [0, *accumulate(lane.numel() for lane in lanes)]
    spans = [[lane for lane, owner in enumerate(owners[here]) if owner == rank] for rank in nodes[here]]
    pieces = [flat[ends[span[0]] : ends[span[-1] + 1]].data for span in spans]
    _reduce_scatter(comm, nodes[here], pieces, reduction)
    for lane, mine in enumerate(lanes):
        if owners[here][lane] == comm.rank:
            group = [of_node[lane] for of_node in owners]
            parts = cut(mine, len(group))
            _reduce_scatter(comm, group, parts, reduction)
            reduction.finish(parts[group.index(comm.rank)], comm.size)
            _all_gather(comm, group, parts)
    _all_gather(comm, nodes[here], pieces)
    return finish(flat, x.shape, out)


def find_nodes(comm: Comm, ranks_per_node: int | None = None, nodes: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """The ranks of each node, every rank once: `nodes` as given, or consecutive runs of `ranks_per_node` (the last may be short),
    or as the machine is: the modelled cluster's nodes, the hosts of real ranks.
    """
    ranks = range(comm.size)
    if nodes is not None:
        nodes = nodes.tolist() if isinstance(nodes, torch.Tensor) else nodes
        try:
            found = [[index(rank) for rank in node] for node in nodes]
        except TypeError:
            raise ValueError(
                f"nodes is {nodes!r}; it is a list of nodes, each a list of ranks, such as [[0, 1], [2, 3]]"
            ) from None
        if ranks_per_node is not None or [] in found or sorted(rank for node in found for rank in node) != list(ranks):
            raise ValueError(
                f"nodes is {found} and ranks_per_node {ranks_per_node}; give one of them, and with nodes each of the ranks "
                f"0 to {comm.size - 1} once, no node empty"
            )
        return found
    if ranks_per_node is not None:
        if not isinstance(ranks_per_node, int) or isinstance(ranks_per_node, bool) or ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {ranks_per_node!r}; it is a whole number of at least 1")
        return [list(ranks[start : start + ranks_per_node]) for start in range(0, comm.size, ranks_per_node)]
    by_host: dict = {}
    for rank, host in enumerate(hosts(comm)):
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())


def lane_owners(node: Sequence[int], lanes: int) -> list[int]:
    """Which rank of `node` looks after each lane: neighbours to neighbours, numbers that differ by at most one."""
    return [rank for rank, many in zip(node, chunk_sizes(lanes, len(node)), strict=True) for _ in range(many)]


def _short(nodes):
    """Nodes in few words, for the statement that all ranks must agree on."""
    sizes = [len(node) for node in nodes]
    if [rank for node in nodes for rank in node] == list(range(sum(sizes))):
        return sizes if len(set(sizes)) > 2 or len(sizes) < 9 else f"{len(sizes)} of {sizes[0]}, last {sizes[-1]}"
    return nodes


def _reduce_scatter(comm, members, pieces, reduction):
    """A ring among `members`: afterwards the piece of this rank's place among them holds the sum. Overwrites the rest on the
    way.
    """
    n, me = len(members), members.index(comm.rank)
    right, left = members[(me + 1) % n], members[(me - 1) % n]
    scratch = torch.empty_like(max(pieces, key=torch.Tensor.numel)) if n > 1 else None
    for step in range(n - 1):
        give, take = pieces[(me - 1 - step) % n], pieces[(me - 2 - step) % n]
        combine(comm, reduction, take, comm.exchange(give, right, scratch[: take.numel()], left))


def _all_gather(comm, members, pieces):
    """A ring among `members`: everybody's own piece to everybody."""
    n, me = len(members), members.index(comm.rank)
    right, left = members[(me + 1) % n], members[(me - 1) % n]
    for step in range(n - 1):
        comm.exchange(pieces[(me - step) % n], right, pieces[(me - 1 - step) % n], left)
