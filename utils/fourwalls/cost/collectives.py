"""What a collective costs each rank: bytes, messages, and time on a link, before anything is run.

Every message pays alpha once and its bytes beta each, a rank sends and receives at once, and additions are free. Counts are
exact for any size and number of ranks, also where n does not divide, since chunks differ by one element at most.

    all-reduce   ring 2(n-1) alpha + 2 (n-1)/n S beta    star 2(n-1) (alpha + S beta)    tree 2 ceil(lg n) (alpha + S beta)
                 halving 2 lg n alpha + 2 (n-1)/n S beta  (n = 2^k)        all-to-all   pairwise (n-1) alpha + (n-1)/n S beta

Reference: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005);
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69 (2009); data/published/collective_cost_models.csv.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .hardware import PS, Cluster, Link
from .replay import Replay, chunk_sizes, halving, hierarchical, pairwise

__all__ = [
    "COLLECTIVES",
    "MODELS",
    "Cost",
    "all_to_all_cost",
    "alpha_beta_seconds",
    "bus_factor",
    "chunk_sizes",
    "collective_cost",
    "lower_bound_bytes",
]

COLLECTIVES = ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "scatter", "gather", "all_to_all")


@dataclass(frozen=True)
class Cost:
    """bytes_sent[r] and messages_sent[r] of each rank; time in whole picoseconds; the formula in words."""

    bytes_sent: tuple[int, ...]
    messages_sent: tuple[int, ...]
    picoseconds: int
    formula: str

    @property
    def seconds(self) -> float:
        return self.picoseconds / PS

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent)


def _lg(n: int) -> int:
    return (n - 1).bit_length()  # ceil(log2 n)


def _link_of(link: "Link | Cluster", n: int) -> Link:
    if isinstance(link, Link):
        return link
    kinds = {link.link(r, (r + 1) % n) for r in range(n)} if n > 1 else {link.intra}
    if len(kinds) > 1 or link.node(n - 1) != 0 or link.slow:
        raise ValueError(
            f"cluster {link.name!r} has links of different kinds among {n} ranks; price it with fw.simulate, or give one Link"
        )
    return kinds.pop()


def _star(collective: str, n: int, sizes: list[int], link: Link) -> Cost:
    """Everything through rank 0, whose port carries one message after the other."""
    whole, others = sum(sizes), sizes[1:]
    one = link.picoseconds
    into = {
        "reduce": [whole] * (n - 1),
        "gather": others,
        "all_reduce": [whole] * (n - 1),
        "reduce_scatter": [whole] * (n - 1),
        "all_gather": others,
    }
    out = {
        "broadcast": [whole] * (n - 1),
        "scatter": others,
        "all_reduce": [whole] * (n - 1),
        "reduce_scatter": others,
        "all_gather": [whole] * (n - 1),
    }
    into, out = into.get(collective, []), out.get(collective, [])
    sent = [sum(out), *(into or [0] * (n - 1))]
    messages = [len(out), *([1] * len(into) or [0] * (n - 1))]
    return Cost(
        tuple(sent),
        tuple(messages),
        sum(map(one, into)) + sum(map(one, out)),
        f"{(bool(into) + bool(out))} x (n-1) messages at rank 0's port",
    )


def _ring(collective: str, n: int, sizes: list[int], link: Link) -> Cost:
    """Chunks circle to the right. In reduce-scatter rank r ends with chunk r, so it sends every chunk but r; in all-gather
    every chunk but r+1.
    """
    reduces, gathers = collective in ("reduce_scatter", "all_reduce"), collective in ("all_gather", "all_reduce")
    if not (reduces or gathers):
        raise ValueError(f"no ring for {collective!r} here; allowed: all_reduce, reduce_scatter, all_gather")
    whole = sum(sizes)
    sent = tuple((whole - sizes[r]) * reduces + (whole - sizes[(r + 1) % n]) * gathers for r in range(n))
    rounds = (n - 1) * (reduces + gathers)
    # the largest chunk makes every hop, one after the other, and no other chunk is slower: exact also for uneven chunks
    return Cost(sent, (rounds,) * n, rounds * link.picoseconds(max(sizes)), f"{'2' * (rounds > n - 1)}(n-1) (alpha + S/n beta)")


def _tree(collective: str, n: int, sizes: list[int], link: Link) -> Cost:
    """Binomial tree with root 0: rank r's parent is r without its lowest bit; it has a child r + 2^k for each smaller bit that
    exists.
    """

    def children(r: int) -> list[int]:
        top = r & -r if r else 1 << _lg(n)
        return [r + (1 << k) for k in reversed(range(_lg(n))) if (1 << k) < top and r + (1 << k) < n]

    def subtree(r: int) -> int:
        low = r & -r if r else n
        return sum(sizes[r : min(n, r + low)])

    def below(r: int, size: Callable[[int], int]) -> int:
        # a parent serves its largest subtree first, one after the other; gathering is the same in reverse
        latest = clock = 0
        for c in children(r):
            clock += link.picoseconds(size(c))
            latest = max(latest, clock + below(c, size))
        return latest

    def everything(r: int) -> int:
        return sum(sizes)

    up = {"reduce": everything, "all_reduce": everything, "reduce_scatter": everything, "gather": subtree, "all_gather": subtree}
    down = {
        "broadcast": everything,
        "all_reduce": everything,
        "all_gather": everything,
        "scatter": subtree,
        "reduce_scatter": subtree,
    }
    sent, messages, time = [0] * n, [0] * n, 0
    for size, downward in ((up.get(collective), False), (down.get(collective), True)):
        if size is not None:
            time += below(0, size)
            for parent in range(n):
                for child in children(parent):
                    giver = parent if downward else child
                    sent[giver] += size(child)
                    messages[giver] += 1
    ways = (collective in up) + (collective in down)
    return Cost(tuple(sent), tuple(messages), time, f"{'2 ' * (ways - 1)}ceil(lg n) rounds")


_ALGORITHMS: dict[str, Callable] = {"star": _star, "ring": _ring, "tree": _tree}
_REPLAYED = {
    "halving": ("all_reduce", "reduce_scatter", "all_gather"),
    "hierarchical": ("all_reduce",),
    "pairwise": ("all_to_all",),
}


def collective_cost(
    collective: str,
    algorithm: str,
    n: int,
    elements: int,
    link: "Link | Cluster",
    *,
    itemsize: int = 4,
    ranks_per_node: int | None = None,
) -> Cost:
    """Exact bytes, messages and virtual time of one collective over n ranks, rank 0 the root, all starting at once.

    `elements` is the whole tensor: what each rank holds before broadcast, reduce, all_reduce, reduce_scatter, all_to_all and
    scatter (root), and after all_gather and gather (root). `link` joins every pair; additions are priced at zero; ports are
    full duplex. halving, hierarchical and pairwise take a Cluster of two levels too (not with a shared port); ranks_per_node:
    hierarchical's nodes (None: the cluster's; with a Link, one node).
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective is {collective!r}; allowed: {', '.join(COLLECTIVES)}")
    if algorithm not in _ALGORITHMS and algorithm not in _REPLAYED:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join([*_ALGORITHMS, *_REPLAYED])}")
    if not isinstance(n, int) or n < 1 or elements < 0:
        raise ValueError(f"n is {n!r} and elements {elements!r}; n is at least 1, elements at least 0")
    if algorithm in _REPLAYED and collective not in _REPLAYED[algorithm]:
        raise ValueError(f"no {collective!r} by {algorithm}; allowed: {', '.join(_REPLAYED[algorithm])}")
    if collective == "all_to_all" and elements % n:
        raise ValueError(f"all_to_all of {elements} elements: {n} equal pieces are needed; all_to_all_cost takes others")
    if n == 1:
        return Cost((0,), (0,), 0, "nothing to send")
    if algorithm in _ALGORITHMS:
        sizes = [c * itemsize for c in chunk_sizes(elements, n)]
        return _ALGORITHMS[algorithm](collective, n, sizes, _link_of(link, n))
    replay = Replay(n, _price(link))
    if algorithm == "halving":
        formula = halving(replay, collective, n, elements, itemsize)
    elif algorithm == "hierarchical":
        formula = hierarchical(replay, _nodes(link, n, ranks_per_node), elements, itemsize)
    else:
        formula = pairwise(replay, [[elements // n * itemsize] * n] * n)
    return Cost(tuple(replay.sent), tuple(replay.messages), max(replay.clock), formula)


def all_to_all_cost(
    counts: Sequence[Sequence[int]], row_bytes: int, link: "Link | Cluster", *, counts_known: bool = False
) -> Cost:
    """An all-to-all of unequal pieces: counts[source][destination] rows of `row_bytes`, after an exchange of the counts, 8 bytes
    each, unless they are known.
    """
    n = len(counts)
    if any(len(row) != n for row in counts) or any(c < 0 for row in counts for c in row):
        raise ValueError(f"counts has {n} rows; each has one number of at least 0 for each of {n} ranks")
    replay = Replay(n, _price(link))
    if not counts_known:
        pairwise(replay, [[8] * n] * n)
    formula = pairwise(replay, [[c * row_bytes for c in row] for row in counts])
    return Cost(tuple(replay.sent), tuple(replay.messages), max(replay.clock), formula + " of the largest pieces, counts first")


def _price(link: "Link | Cluster") -> Callable[[int, int, int], int]:
    if isinstance(link, Link):
        return lambda source, destination, nbytes: link.picoseconds(nbytes)
    if link.shared_nic:
        raise ValueError(f"in cluster {link.name!r} the ranks of a node share a port and wait for it; price it with fw.simulate")
    return lambda source, destination, nbytes: link.link(source, destination).picoseconds(nbytes)


def _nodes(link: "Link | Cluster", n: int, ranks_per_node: int | None) -> list[range]:
    size = ranks_per_node or (link.ranks_per_node if isinstance(link, Cluster) else None) or n
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


# (messages in a row, multiples of S beta, multiples of S gamma), as functions of n; the table
# data/published/collective_cost_models.csv
def _halving(n: int) -> tuple[float, float, float]:
    lg, power = n.bit_length() - 1, n & (n - 1) == 0
    part = (n - 1) / n
    return (2 * lg, 2 * part, part) if power else (2 * lg + 2, 2 * part + 2, 1 + part)


MODELS: dict[tuple[str, str], Callable[[int], tuple[float, float, float]]] = {
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n),
    ("all_reduce", "star"): lambda n: (2 * (n - 1), 2 * (n - 1), n - 1),
    ("all_reduce", "tree"): lambda n: (2 * _lg(n), 2 * _lg(n), _lg(n)),
    ("all_reduce", "recursive doubling"): lambda n: (_lg(n), _lg(n), _lg(n)),
    ("all_reduce", "halving-doubling"): _halving,
    ("all_reduce", "halving"): _halving,
    ("broadcast", "tree"): lambda n: (_lg(n), _lg(n), 0),
    ("broadcast", "scatter + all-gather"): lambda n: (2 * _lg(n), 2 * (n - 1) / n, 0),
    ("reduce", "tree"): lambda n: (_lg(n), _lg(n), _lg(n)),
    ("reduce_scatter", "ring"): lambda n: (n - 1, (n - 1) / n, (n - 1) / n),
    ("all_gather", "ring"): lambda n: (n - 1, (n - 1) / n, 0),
    ("all_to_all", "pairwise"): lambda n: (n - 1, (n - 1) / n, 0),
}


def alpha_beta_seconds(
    collective: str, algorithm: str, n: int, nbytes: float, alpha: float, bandwidth: float, gamma: float = 0.0
) -> float:
    """The textbook line: rounds * alpha + factor * S / bandwidth + factor * S * gamma (gamma: seconds to add one byte). For
    curves.
    """
    if (collective, algorithm) not in MODELS:
        raise ValueError(f"no model of {collective!r} by {algorithm!r}; known: {', '.join(f'{c} by {a}' for c, a in MODELS)}")
    if n < 2:
        return 0.0
    rounds, beta, add = MODELS[collective, algorithm](n)
    return rounds * alpha + beta * nbytes / bandwidth + add * nbytes * gamma


def bus_factor(collective: str, n: int) -> float:
    """busbw = algbw * factor: what the wire would show if the algorithm were the best one. As nccl-tests defines it (S = total
    bytes).
    """
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": (n - 1) / n, "all_to_all": (n - 1) / n}
    factors |= {"broadcast": 1.0, "reduce": 1.0}
    if collective not in factors:
        raise ValueError(f"no bus factor for {collective!r}; known: {', '.join(factors)}")
    return factors[collective]


def lower_bound_bytes(n: int, nbytes: int) -> float:
    """No all-reduce can let every rank send less than 2 (n-1)/n S. Patarasuk and Yuan 2009."""
    return 2 * (n - 1) / n * nbytes
