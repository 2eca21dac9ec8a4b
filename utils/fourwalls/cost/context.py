"""Who gets which tokens of a long sequence, and what that costs each rank: work and bytes, before anything is run.

Causal attention is a triangle: late tokens look at many, early ones at few. So slices of equal length are unequal work, and a
rank that holds an early and a late chunk (zigzag), or every c-th token (striped), is better off. Keys and values must meet all
queries: they travel round a ring, are gathered whole, or the ranks trade tokens for heads.

    B = 2 b kv (s/c) d w     ring (c-1) B, backward (2c-1) B     gather (c-1) B, (c-1) B     Ulysses (c-1)/c (A + B), as much

with A = 2 b a (s/c) d w: queries and outputs of one rank. Reference: Liu et al. 2023 (arXiv:2310.01889), ring; Brandon et al.
2023 (arXiv:2311.09431), striped; Jacobs et al. 2023 (arXiv:2309.14509), Ulysses; Llama team 2024 (arXiv:2407.21783), section
3.3.2, two chunks a rank and the all-gather.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .shape import nearest_multiples

__all__ = [
    "CUTS",
    "FORMS",
    "Tile",
    "check_cut",
    "check_heads_shared",
    "context_bytes",
    "largest_share",
    "multiple",
    "runs",
    "scores",
    "tiles",
    "work",
]

CUTS = ("equal", "zigzag", "striped")
FORMS = ("ring", "gather", "ulysses")


def multiple(cut: str, c: int) -> int:
    """What the length must be a multiple of: c, and 2c for zigzag's two chunks a rank."""
    if cut not in CUTS:
        raise ValueError(f"cut is {cut!r}; allowed: {', '.join(CUTS)}")
    if not isinstance(c, int) or isinstance(c, bool) or c < 1:
        raise ValueError(f"c is {c!r}; it is a whole number of at least 1")
    return 2 * c if cut == "zigzag" and c > 1 else c


def check_cut(cut: str, length: int, c: int) -> int:
    """Tokens of each rank. ValueError, with the nearest legal lengths, where c ranks cannot share `length` tokens evenly."""
    of = multiple(cut, c)
    if length < 1 or length % of:
        why = f"c {c} in two chunks each (zigzag)" if of == 2 * c else f"c {c}"
        raise ValueError(
            f"a sequence of {length} cannot be shared by {why}; nearest legal length: {nearest_multiples(length, of)} "
            "(or fill it up: parallel.context_cuts.fill_up)"
        )
    return length // c


def check_heads_shared(heads: int, kv_heads: int, c: int) -> None:
    """ValueError, with all legal c and the way out, unless c ranks can share the heads, as Ulysses needs."""
    if heads % c or kv_heads % c:
        what = f"{heads} heads" if kv_heads == heads else f"{heads} heads with {kv_heads} key and value heads"
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and kv_heads % n == 0)
        raise ValueError(f"{what} cannot be traded among c {c}; legal c: {legal} (or the form 'ring', which cuts no heads)")


def runs(cut: str, length: int, c: int, rank: int) -> tuple[range, ...]:
    """The positions that `rank` of `c` holds, in rising order: one range (equal, striped) or two (zigzag)."""
    own = check_cut(cut, length, c)
    if cut == "striped":
        return (range(rank, length, c),)
    if cut == "zigzag" and c > 1:
        half, last = own // 2, 2 * c - 1 - rank
        return range(rank * half, (rank + 1) * half), range(last * half, (last + 1) * half)
    return (range(rank * own, (rank + 1) * own),)


class Tile(NamedTuple):
    """Queries `first` to `last` - 1 look at the first `columns` keys of a block; the first `open` of these need no mask."""

    first: int
    last: int
    open: int
    columns: int


def tiles(queries: Sequence[range], keys: Sequence[range], *, causal: bool = True, rows: int = 128) -> list[Tile]:
    """What must be computed where `queries` meet a block of `keys` (positions in rising order). [] where all is masked.

    Keys rise, so those that a query may see are the first ones. Where a run of queries sees the same keys it is one tile; else
    it is cut into tiles of `rows` queries, each with the keys of its last one: rows 1 computes not one score too many.
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}; it must be at least 1")
    found: list[Tile] = []
    place = 0
    for run in queries:
        seen = [_seen(keys, run[0]), _seen(keys, run[-1])] if causal else [sum(map(len, keys))] * 2
        step = rows if seen[0] < seen[1] else len(run)
        for start in range(0, len(run), step):
            part = run[start : start + step]
            open_, columns = (_seen(keys, part[0]), _seen(keys, part[-1])) if causal else seen
            if columns:
                found.append(Tile(place + start, place + start + len(part), open_, columns))
        place += len(run)
    return _joined(found)


def _seen(keys: Sequence[range], position: int) -> int:
    """How many of the keys are not later than `position`."""
    return sum(min(len(run), max(0, (position - run.start) // run.step + 1)) for run in keys)


def _joined(found: list[Tile]) -> list[Tile]:
    """Neighbours that see the same keys, all of them open, as one tile: one larger product."""
    out: list[Tile] = []
    for tile in found:
        last = out[-1] if out else None
        if last and last.last == tile.first and last.open == last.columns == tile.open == tile.columns:
            out[-1] = last._replace(last=tile.last)
        else:
            out.append(tile)
    return out


def scores(of: Sequence[Tile]) -> int:
    """Scores that these tiles compute: rows times columns of each."""
    return sum((tile.last - tile.first) * tile.columns for tile in of)


def work(cut: str, length: int, c: int, *, causal: bool = True, rows: int = 1) -> list[list[int]]:
    """work[r][q]: scores that rank r computes, for a head and a sequence, where its queries meet the keys of rank q.

    rows 1 counts the pairs that the mask leaves; rows as in `tiles` counts what is computed.
    """
    held = [runs(cut, length, c, r) for r in range(c)]
    return [[scores(tiles(mine, theirs, causal=causal, rows=rows)) for theirs in held] for mine in held]


def largest_share(cut: str, length: int, c: int, *, causal: bool = True, rows: int = 1) -> float:
    """The busiest rank's scores over the mean of all: 1 is perfect balance, and all wait for the busiest."""
    each = [sum(row) for row in work(cut, length, c, causal=causal, rows=rows)]
    return max(each) * c / sum(each)


def context_bytes(
    form: str,
    c: int,
    *,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int | None = None,
    head_width: int,
    itemsize: int = 4,
) -> tuple[int, int]:
    """(forward, backward) bytes that each rank sends for one attention over `length` tokens on c ranks.

    ring: K and V make c - 1 hops; in backward again, and their gradients, in at least float32, make c: home is one hop further.
    gather: one all-gather of K and V, kept; one reduce-scatter of their gradients. ulysses: two all-to-alls each way, of
    queries, keys and values, and of the outputs.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; allowed: {', '.join(FORMS)}")
    if not isinstance(c, int) or c < 1 or length % c:
        raise ValueError(f"c is {c!r}, length {length}; c is a whole number of at least 1 that divides it")
    kv_heads = heads if kv_heads is None else kv_heads
    row = batch * (length // c) * head_width * itemsize  # one head of one rank's tokens
    block = 2 * kv_heads * row
    if c == 1:
        return 0, 0
    if form == "ring":
        return (c - 1) * block, (c - 1) * block + c * block * max(itemsize, 4) // itemsize
    if form == "gather":
        return (c - 1) * block, (c - 1) * block
    check_heads_shared(heads, kv_heads, c)
    traded = (c - 1) * (2 * heads + 2 * kv_heads) * row // c
    return traded, traded
