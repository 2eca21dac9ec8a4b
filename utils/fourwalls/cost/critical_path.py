"""The longest chain of messages that wait for each other: what an all-reduce takes on one kind of wire, or on two.

A collective sends many messages, most of them side by side. Its time is that of the messages in a row on the longest path, and
where all ranks do alike that path is a short list: so many messages of so many bytes over such a wire. Inside a node the wire is
`cluster.intra`, between nodes `cluster.inter`. Where the ranks of a node share one adapter, their messages to other nodes wait in
a row too.

    time = sum over the path of count * (alpha + bytes beta)        latency: how many.  bandwidth: how many bytes.

Reference: as collectives.py, whose exact prices (any n, uneven pieces) these closed forms equal where pieces are equal.
"""

from fractions import Fraction

from .hardware import PS, Cluster, Link

__all__ = ["ALL_REDUCES", "all_reduce_path", "all_reduce_seconds", "rounds"]

ALL_REDUCES = ("ring", "tree", "halving", "hierarchical", "star")


def all_reduce_path(algorithm: str, n: int, nbytes: int, cluster: Cluster) -> list[tuple[int, Link, Fraction]]:
    """[(how many messages, over which link, of how many bytes)]: one after the other, the longest chain of an all-reduce.

    nbytes: the whole tensor. Nodes are full (n divides by ranks_per_node, or is smaller); with more than one node halving and
    tree need a power of two of ranks on each, halving with a shared adapter a power of two of nodes too. Additions are free.
    Raises ValueError elsewhere, and for slow links and stragglers.
    """
    if algorithm not in ALL_REDUCES:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join(ALL_REDUCES)}")
    if not isinstance(n, int) or n < 1 or nbytes < 0:
        raise ValueError(f"n is {n!r} and nbytes {nbytes!r}; n is at least 1, nbytes at least 0")
    m = _node_size(algorithm, n, cluster)
    if n == 1:
        return []
    size, inside, between = Fraction(nbytes), cluster.intra, cluster.inter
    queue = m if cluster.shared_nic else 1  # messages in a row, where all ranks of a node send to other nodes at once

    def ring(ranks: int, whole: Fraction, link: Link, queue: int = 1) -> list:
        return [(2 * (ranks - 1) * queue, link, whole / ranks)] if ranks > 1 else []

    if algorithm == "ring":
        # every wire of the circle carries a chunk in each step, so all go at the pace of the slowest
        wires = {inside} if n == m else {inside, between} if m > 1 else {between}
        return ring(n, size, max(wires, key=lambda link: _price(link, size / n)))
    if algorithm == "hierarchical":
        return ring(m, size, inside) + ring(n // m, size / m, between, queue)
    if algorithm == "star":
        return _join((2 * (m - 1), inside, size), (2 * (n - m), between, size))
    lg_n, lg_m = (n - 1).bit_length(), (m - 1).bit_length()
    if algorithm == "tree":
        return _join((2 * lg_m, inside, size), (2 * (lg_n - lg_m), between, size))
    rounds_of_pairs = n.bit_length() - 1
    folded = n != 1 << rounds_of_pairs
    # near partners first. Where pairs were folded, every second rank rests, and a node holds only half as many that take part.
    reach = n if n == m else m // 2 if folded else m
    path = []
    for k in range(rounds_of_pairs):
        path.append((2, inside, size / 2 ** (k + 1)) if 2**k < reach else (2 * queue, between, size / 2 ** (k + 1)))
    return path + [(2, between if m == 1 else inside, size)] * folded


def rounds(path: list[tuple[int, Link, Fraction]]) -> tuple[int, Fraction]:
    """(messages in a row, bytes in a row) of a path."""
    return sum(count for count, _, _ in path), sum((count * nbytes for count, _, nbytes in path), Fraction(0))


def all_reduce_seconds(algorithm: str, n: int, nbytes: int, cluster: Cluster) -> float:
    """Seconds of an all-reduce of `nbytes` on n ranks, additions free. Equals a simulated run to the last digit where the pieces
    are equal; bytes that do not divide are shared out as if they did.
    """
    return sum(count * _price(link, piece) for count, link, piece in all_reduce_path(algorithm, n, nbytes, cluster)) / PS


def _price(link: Link, nbytes: Fraction) -> int:
    return link.picoseconds(-(-nbytes.numerator // nbytes.denominator))


def _node_size(algorithm: str, n: int, cluster: Cluster) -> int:
    """Ranks of a full node, at most n."""
    if cluster.slow or cluster.straggler:
        raise ValueError(f"cluster {cluster.name!r} has slow links or stragglers; price it with fw.simulate")
    m = min(cluster.ranks_per_node or n, n)
    if n % m:
        raise ValueError(
            f"n is {n}, with {m} ranks on a node; the nearest numbers that fill nodes are {n - n % m} and {n - n % m + m}"
        )
    if algorithm in ("tree", "halving") and m < n and m & (m - 1):
        raise ValueError(f"{algorithm} over several nodes: ranks_per_node is {m}; it must be a power of two")
    if algorithm == "halving" and m < n and cluster.shared_nic and n & (n - 1):
        raise ValueError(f"halving over nodes with one adapter each: n is {n}; it must be a power of two, or use fw.simulate")
    return m


def _join(*parts: tuple[int, Link, Fraction]) -> list:
    return [part for part in parts if part[0]]
