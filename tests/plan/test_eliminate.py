"""Elimination against looking at every choice: chains, trees, circles, with and without a limit."""

import itertools

import numpy as np
import pytest

from fourwalls.plan import eliminate
from fourwalls.plan.eliminate import cheapest, cheapest_within


def problem(rng, shape):
    """Sizes and tables over the edges of a chain, a tree, a circle with a chord, or a clique of four."""
    count = int(rng.integers(3, 6))
    edges = {
        "chain": [(v, v + 1) for v in range(count - 1)],
        "tree": [(int(rng.integers(0, v)), v) for v in range(1, count)],
        "circle": [*((v, v + 1) for v in range(count - 1)), (0, count - 1), (0, 2)],
        "clique": [(0, 1, 2, 3), *((v, v + 1) for v in range(count - 1) if v > 2)],
    }[shape]
    count = max(count, 4) if shape == "clique" else count
    sizes = [int(k) for k in rng.integers(1, 4, count)]
    scopes = [*dict.fromkeys(edges), *((v,) for v in range(count))]
    return sizes, [(s, rng.integers(0, 50, [sizes[v] for v in s])) for s in scopes]


def total(factors, chosen):
    return sum(int(table[tuple(chosen[v] for v in scope)]) for scope, table in factors)


@pytest.mark.parametrize("shape", ["chain", "tree", "circle", "clique"])
def test_the_least_of_all(shape):
    rng = np.random.default_rng(5)
    for _ in range(30):
        sizes, costs = problem(rng, shape)
        weights = [(scope, rng.integers(0, 9, table.shape)) for scope, table in costs]
        every = [(total(costs, c), total(weights, c)) for c in itertools.product(*map(range, sizes))]
        value, chosen = cheapest(sizes, costs)
        assert value == min(every)[0] == total(costs, chosen)
        limit = int(np.median([w for _, w in every]))
        value, weight, chosen = cheapest_within(sizes, costs, weights, limit)
        assert value == min(c for c, w in every if w <= limit) == total(costs, chosen)
        assert weight == total(weights, chosen) <= limit
        lightest = min(w for _, w in every)
        assert cheapest_within(sizes, costs, weights, lightest)[1] == lightest
        with pytest.raises(ValueError, match=f"weighs is {lightest}"):
            cheapest_within(sizes, costs, weights, lightest - 1)


def test_too_wide_a_table_is_refused(monkeypatch):
    monkeypatch.setattr(eliminate, "LARGEST", 8)
    with pytest.raises(ValueError, match="9 entries in one table, at most 8"):
        cheapest([3, 3], [((0, 1), np.zeros((3, 3), dtype=np.int64))])


def test_variables_that_nothing_binds():
    assert cheapest([2, 3], []) == (0, [0, 0])
