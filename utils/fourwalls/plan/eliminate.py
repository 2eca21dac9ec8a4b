"""The cheapest choice in a graph of choices, exactly: eliminate one variable after the other.

Each variable has a few values, each factor is a table over a few variables, and the sum of all factors is to be least. To
eliminate a variable, add the tables that know it and take the least over its values, for each choice of its neighbours: one table
fewer variables remain. On a chain this is dynamic programming; in general the work grows with the widest table met.

    min over x of [f(a, x) + g(x, b)]  =  h(a, b)

Reference: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["LARGEST", "cheapest", "cheapest_within"]

LARGEST = 2**24  # entries of a table

Factor = tuple[tuple[int, ...], np.ndarray]  # variables, strictly increasing; a table with one axis for each


def cheapest(sizes: Sequence[int], factors: Sequence[Factor]) -> tuple[int, list[int]]:
    """(least sum, one value for each variable). sizes[v]: how many values variable v has. All tables hold int64.

    ValueError where some table would have more than LARGEST entries.
    """
    tables, found, total = list(factors), [], 0
    for v in _order(sizes, [scope for scope, _ in factors]):
        mine = [one for one in tables if v in one[0]]
        tables = [one for one in tables if v not in one[0]]
        scope = tuple(sorted({v}.union(*(s for s, _ in mine))))
        table = np.zeros([sizes[u] for u in scope], dtype=np.int64)
        for one, array in mine:
            table = table + array.reshape([sizes[u] if u in one else 1 for u in scope])
        axis, rest = scope.index(v), tuple(u for u in scope if u != v)
        found.append((v, rest, table.argmin(axis)))
        if rest:
            tables.append((rest, table.min(axis)))
        else:
            total += int(table.min(axis))
    chosen = [0] * len(sizes)
    for v, rest, best in reversed(found):
        chosen[v] = int(best[tuple(chosen[u] for u in rest)])
    return total + sum(int(array) for scope, array in tables if not scope), chosen


def cheapest_within(
    sizes: Sequence[int], factors: Sequence[Factor], weights: Sequence[Factor], limit: int
) -> tuple[int, int, list[int]]:
    """(least sum of `factors`, sum of `weights`, values) among all choices whose weights sum to at most `limit`.

    Each entry of a table is a list of (cost, weight) of which none is better in both: exact, and slow where many differ. weights
    are at least 0. ValueError where nothing fits; it says the least weight.
    """
    least, _ = cheapest(sizes, weights)
    if least > limit:
        raise ValueError(f"nothing fits in {limit}: the least that any choice weighs is {least}")
    tables = [(scope, _points(sizes, scope, array, False)) for scope, array in factors]
    tables += [(scope, _points(sizes, scope, array, True)) for scope, array in weights]
    for v in _order(sizes, [scope for scope, _ in (*factors, *weights)]):
        mine = [one for one in tables if v in one[0]]
        tables = [one for one in tables if v not in one[0]]
        rest = tuple(sorted(set().union(*(s for s, _ in mine)) - {v}))
        table = {}
        for at in itertools.product(*(range(sizes[u]) for u in rest)):
            place, points = dict(zip(rest, at, strict=True)), []
            for value in range(sizes[v]):
                place[v] = value
                here = [(0, 0, (v, value))]
                for scope, other in mine:
                    here = _sums(here, other[tuple(place[u] for u in scope)], limit)
                points += here
            table[at] = _front(points)
        tables.append((rest, table))
    points = [(0, 0, None)]
    for _, table in tables:
        points = _sums(points, table[()], limit)
    cost, weight, trail = min(points, key=lambda p: p[:2])
    return cost, weight, _values(trail, len(sizes))


def _order(sizes, scopes) -> list[int]:
    """Which variable to eliminate next: always the one whose table is smallest."""
    near = {v: set() for v in range(len(sizes))}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, others in near.items():
        others.discard(v)
    order = []

    def entries(v):
        return sizes[v] * math.prod(sizes[u] for u in near[v])

    waiting = {v: entries(v) for v in near}
    while waiting:
        v = min(waiting, key=lambda u: (waiting[u], u))
        if waiting.pop(v) > LARGEST:
            raise ValueError(
                f"too many choices hang together: {entries(v):,} entries in one table, at most {LARGEST:,} are searched. "
                "Give some tensors their layout, or cut the graph in two"
            )
        order.append(v)
        others = near.pop(v)
        for u in others:
            near[u] |= others
            near[u] -= {u, v}
        for u in others:
            waiting[u] = entries(u)
    return order


def _points(sizes, scope, array, weighs) -> dict:
    """A table of numbers as a table of lists with one point each."""
    every = itertools.product(*(range(sizes[u]) for u in scope))
    return {at: [(0, int(array[at]), None) if weighs else (int(array[at]), 0, None)] for at in every}


def _sums(left, right, limit) -> list:
    """Every point of one list beside every point of the other, those that fit and are not worse in both."""
    return _front((a + c, b + d, (s, t) if s and t else s or t) for a, b, s in left for c, d, t in right if b + d <= limit)


def _front(points) -> list:
    """The points of which none is as cheap and as light as another, lightest first."""
    kept: list = []
    for point in sorted(points, key=lambda p: (p[1], p[0])):
        if not kept or point[0] < kept[-1][0]:
            kept.append(point)
    return kept


def _values(trail, count) -> list[int]:
    """A trail is a leaf (variable, value) or a pair of trails."""
    chosen, waiting = [0] * count, [trail]
    while waiting:
        one = waiting.pop()
        if one is None:
            continue
        if isinstance(one[0], int):
            chosen[one[0]] = one[1]
        else:
            waiting.extend(one)
    return chosen
