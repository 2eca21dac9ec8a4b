"""What a collective costs where no closed formula is exact: its messages replayed on paper, rank by rank.

A collective that goes in rounds of exchanges needs no simulator: a message starts when both of its ranks are free and takes what
its link says, and a rank is free when its messages have ended. Closed formulas are the special case in which all pieces are
equal.

    start = max(free(source), free(destination)),      end = start + alpha + bytes beta

Reference: as collectives.py; the algorithms are those of the library's collectives/halving.py, hierarchical.py, all_to_all.py.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

__all__ = ["Replay", "chunk_sizes", "halving", "hierarchical", "pairwise"]


def chunk_sizes(elements: int, n: int) -> list[int]:
    """Elements of each of n chunks: the first `elements % n` have one more. As torch.tensor_split cuts."""
    return [elements // n + (c < elements % n) for c in range(n)]


class Replay:
    """Clocks and counters of n ranks. price(source, destination, bytes) is in picoseconds."""

    def __init__(self, n: int, price: Callable[[int, int, int], int]):
        self.price, self.clock, self.sent, self.messages = price, [0] * n, [0] * n, [0] * n

    def round(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Messages (source, destination, bytes) of one round: at most one out of and one into each rank, all begun at once."""
        before, after = self.clock, list(self.clock)
        for source, destination, nbytes in moves:
            end = max(before[source], before[destination]) + self.price(source, destination, nbytes)
            after[source], after[destination] = max(after[source], end), max(after[destination], end)
            self.sent[source] += nbytes
            self.messages[source] += 1
        self.clock = after

    def ring(self, members: Sequence[int], sizes: Sequence[int], first: int) -> None:
        """n - 1 steps to the right; in step s the member number i sends piece (i + first - s) mod n."""
        n = len(members)
        for step in range(n - 1):
            self.round((rank, members[(i + 1) % n], sizes[(i + first - step) % n]) for i, rank in enumerate(members))


def halving(replay: Replay, collective: str, n: int, elements: int, itemsize: int) -> str:
    """Recursive halving and doubling, the all-reduce with near partners first, its parts alone with far ones first. The first
    pairs fold where n is no power of two.
    """
    seats = 1 << (n.bit_length() - 1)
    pairs = n - seats
    player = [2 * seat if seat < pairs else seat + pairs for seat in range(seats)]
    own = [itemsize * c for c in chunk_sizes(elements, n)]
    if collective == "all_reduce":
        pieces = [itemsize * c for c in chunk_sizes(elements, seats)]
    else:
        pieces = [sum(own[2 * s : 2 * s + 2]) if s < pairs else own[s + pairs] for s in range(seats)]
    ends, whole = [0, *accumulate(pieces)], itemsize * elements
    before, after = {
        "all_reduce": (lambda odd: whole, lambda odd: whole),
        "reduce_scatter": (lambda odd: whole, lambda odd: own[odd]),
        "all_gather": (lambda odd: own[odd], lambda odd: whole),
    }[collective]

    def held(seat: int, distances: list[int]) -> int:
        """Bytes that a seat holds after rounds with partners at these distances: in each it keeps one half."""
        low, high = 0, seats
        for distance in distances:
            middle = (low + high) // 2
            low, high = (middle, high) if seat & distance else (low, middle)
        return ends[high] - ends[low]

    replay.round((2 * pair + 1, 2 * pair, before(2 * pair + 1)) for pair in range(pairs))
    distances = [1 << k for k in range(seats.bit_length() - 1)]
    if collective != "all_reduce":
        distances.reverse()
    if collective != "all_gather":
        for k, distance in enumerate(distances, 1):  # each gives the half that the other keeps
            replay.round((player[s], player[s ^ distance], held(s ^ distance, distances[:k])) for s in range(seats))
    if collective != "reduce_scatter":
        for k, distance in reversed(list(enumerate(distances, 1))):  # the film backwards: each gives what it holds
            replay.round((player[s], player[s ^ distance], held(s, distances[:k])) for s in range(seats))
    replay.round((2 * pair, 2 * pair + 1, after(2 * pair + 1)) for pair in range(pairs))
    ways = 1 + (collective == "all_reduce")
    return f"{2 * (ways == 2) or ''}floor(lg n) rounds{' and a fold' * (pairs > 0)}".strip()


def hierarchical(replay: Replay, nodes: Sequence[Sequence[int]], elements: int, itemsize: int) -> str:
    """All-reduce: a ring inside each node, one for each lane between the nodes, a ring inside again."""
    lanes = [itemsize * c for c in chunk_sizes(elements, max(map(len, nodes)))]
    counts = [chunk_sizes(len(lanes), len(node)) for node in nodes]
    spans = [[sum(lanes[end - many : end]) for many, end in zip(c, accumulate(c), strict=True)] for c in counts]
    owners = [
        [rank for rank, many in zip(node, c, strict=True) for _ in range(many)] for node, c in zip(nodes, counts, strict=True)
    ]
    for node, span in zip(nodes, spans, strict=True):
        replay.ring(node, span, -1)
    for lane in range(len(lanes)):
        group = [of_node[lane] for of_node in owners]
        parts = [itemsize * c for c in chunk_sizes(lanes[lane] // itemsize, len(group))]
        replay.ring(group, parts, -1)
        replay.ring(group, parts, 0)
    for node, span in zip(nodes, spans, strict=True):
        replay.ring(node, span, 0)
    return "2(m-1) (alpha_in + S/m beta_in) + 2(k-1) (alpha_out + S/(m k) beta_out)"


def pairwise(replay: Replay, sizes: Sequence[Sequence[int]]) -> str:
    """All-to-all: sizes[source][destination] bytes; in step s rank r sends to r + s and receives from r - s."""
    n = len(sizes)
    for step in range(1, n):
        replay.round((r, (r + step) % n, sizes[r][(r + step) % n]) for r in range(n))
    return "(n-1) (alpha + S/n beta)"
