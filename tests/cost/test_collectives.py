"""Bytes, messages and virtual time of collectives, against a plain replay of the messages."""

import pytest

from fourwalls.cost.collectives import (
    COLLECTIVES,
    MODELS,
    alpha_beta_seconds,
    bus_factor,
    chunk_sizes,
    collective_cost,
    lower_bound_bytes,
)
from fourwalls.cost.hardware import Link, get_cluster, uniform

LINK = Link("test", 5e-6, 3e9)
SIZES = [(n, e) for n in (2, 3, 4, 5, 7, 8, 16) for e in (0, 1, n - 1, n, 4 * n, 4 * n + 3, 1000)]


def ring_replay(n, sizes, reduces, gathers):
    """Every rank sends to the right and receives from the left at once; a message starts when both ends are there."""
    ready, sent, messages = [0] * n, [0] * n, [0] * n
    for phase in [0] * reduces + [1] * gathers:
        for step in range(n - 1):
            chunk = [(r - 1 - step) % n if phase == 0 else (r - step) % n for r in range(n)]
            done = [max(ready[r], ready[(r + 1) % n]) + LINK.picoseconds(sizes[chunk[r]]) for r in range(n)]
            for r in range(n):
                sent[r] += sizes[chunk[r]]
                messages[r] += 1
            ready = [max(done[r], done[r - 1]) for r in range(n)]
    return sent, messages, max(ready)


@pytest.mark.parametrize("n, elements", SIZES)
@pytest.mark.parametrize("collective, reduces, gathers", [("all_reduce", 1, 1), ("reduce_scatter", 1, 0), ("all_gather", 0, 1)])
def test_ring_equals_a_replay(n, elements, collective, reduces, gathers):
    cost = collective_cost(collective, "ring", n, elements, LINK, itemsize=4)
    sent, messages, time = ring_replay(n, [4 * c for c in chunk_sizes(elements, n)], reduces, gathers)
    assert (list(cost.bytes_sent), list(cost.messages_sent), cost.picoseconds) == (sent, messages, time)
    assert cost.total_bytes == (reduces + gathers) * (n - 1) * 4 * elements


def tree_replay(n, message, down):
    """Binomial broadcast or scatter by rounds, and reduce or gather as its mirror: who sends what, and when the last is done."""
    sent, messages, ready = [0] * n, [0] * n, {0: 0}
    mask = 1 << (n - 1).bit_length()
    edges = []
    while mask > 1:
        half = mask // 2
        for r in range(0, n, mask):
            if r + half < n:
                edges.append((r, r + half))
        mask = half
    for parent, child in edges:
        giver = parent if down else child
        sent[giver] += message(parent, child)
        messages[giver] += 1
    for parent, child in edges:
        ready[parent] = ready[parent] + LINK.picoseconds(message(parent, child))
        ready[child] = ready[parent]
    return sent, messages, max(ready.values())


@pytest.mark.parametrize("n, elements", SIZES)
def test_tree_equals_a_replay(n, elements):
    sizes = [4 * c for c in chunk_sizes(elements, n)]

    def subtree(parent, child):
        return sum(sizes[child : min(n, child + (child & -child))])

    for collective, message, down in [
        ("broadcast", lambda p, c: sum(sizes), True),
        ("reduce", lambda p, c: sum(sizes), False),
        ("scatter", subtree, True),
        ("gather", subtree, False),
    ]:
        cost = collective_cost(collective, "tree", n, elements, LINK)
        assert (list(cost.bytes_sent), list(cost.messages_sent), cost.picoseconds) == tree_replay(n, message, down), collective
    for both_ways, up, down in (
        ("all_reduce", "reduce", "broadcast"),
        ("all_gather", "gather", "broadcast"),
        ("reduce_scatter", "reduce", "scatter"),
    ):
        cost, *parts = (collective_cost(c, "tree", n, elements, LINK) for c in (both_ways, up, down))
        assert cost.picoseconds == sum(p.picoseconds for p in parts)
        assert cost.bytes_sent == tuple(map(sum, zip(*(p.bytes_sent for p in parts), strict=True)))
        assert cost.messages_sent == tuple(map(sum, zip(*(p.messages_sent for p in parts), strict=True)))
    assert collective_cost("broadcast", "tree", n, elements, LINK).picoseconds == (n - 1).bit_length() * LINK.picoseconds(
        4 * elements
    )


def test_star_by_hand():
    cost = collective_cost("all_reduce", "star", 4, 10, LINK)
    assert cost.bytes_sent == (120, 40, 40, 40) and cost.messages_sent == (3, 1, 1, 1)
    assert cost.picoseconds == 6 * LINK.picoseconds(40)
    assert collective_cost("scatter", "star", 3, 10, LINK).bytes_sent == (24, 0, 0)
    assert collective_cost("gather", "star", 3, 10, LINK).bytes_sent == (0, 12, 12)
    assert collective_cost("gather", "star", 3, 10, LINK).picoseconds == 2 * LINK.picoseconds(12)
    assert collective_cost("all_gather", "star", 3, 10, LINK).bytes_sent == (80, 12, 12)
    assert collective_cost("reduce_scatter", "star", 3, 10, LINK).bytes_sent == (24, 40, 40)
    assert collective_cost("broadcast", "star", 3, 10, LINK).messages_sent == (2, 0, 0)


def test_formula_and_exact_count_agree_where_n_divides():
    for n in (2, 4, 8, 256):
        elements = 1000 * n
        exact = collective_cost("all_reduce", "ring", n, elements, LINK)
        text = alpha_beta_seconds("all_reduce", "ring", n, 4 * elements, LINK.alpha, LINK.bandwidth)
        assert exact.seconds == pytest.approx(text, rel=1e-6)  # the exact one rounds each message up to a picosecond
        assert exact.bytes_sent == (lower_bound_bytes(n, 4 * elements),) * n
        for collective in ("broadcast", "reduce"):
            exact = collective_cost(collective, "tree", n, elements, LINK)
            assert exact.seconds == pytest.approx(
                alpha_beta_seconds(collective, "tree", n, 4 * elements, LINK.alpha, LINK.bandwidth), rel=1e-6
            )


def test_published_models_by_hand():
    """Rows of collective_cost_models.csv at p = 8 and p = 6, with alpha = 1, beta = 1/S, gamma = 0.1/S: three digits tell the
    terms apart.
    """

    def price(collective, algorithm, n):
        return alpha_beta_seconds(collective, algorithm, n, 1.0, 100.0, 1.0, 0.01)

    assert price("all_reduce", "ring", 8) == pytest.approx(1400 + 1.75 + 0.00875)
    assert price("all_reduce", "recursive doubling", 8) == pytest.approx(300 + 3 + 0.03)
    assert price("all_reduce", "halving-doubling", 8) == pytest.approx(600 + 1.75 + 0.00875)
    assert price("all_reduce", "halving-doubling", 6) == pytest.approx(600 + 2 * 5 / 6 + 2 + 0.01 * (1 + 5 / 6))
    assert price("broadcast", "scatter + all-gather", 8) == pytest.approx(600 + 1.75)
    assert price("reduce", "tree", 8) == pytest.approx(300 + 3 + 0.03)
    assert all(alpha_beta_seconds(c, a, 1, 1.0, 1.0, 1.0) == 0 for c, a in MODELS)
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75 and bus_factor("broadcast", 4) == 1


def test_one_rank_and_clusters():
    assert all(collective_cost(c, "star", 1, 100, LINK).picoseconds == 0 for c in COLLECTIVES)
    flat = uniform(5e-6, 3e9)
    assert (
        collective_cost("all_reduce", "ring", 8, 100, flat).picoseconds
        == collective_cost("all_reduce", "ring", 8, 100, LINK).picoseconds
    )
    selene = get_cluster("a100-selene")
    assert collective_cost("all_reduce", "ring", 8, 100, selene).picoseconds > 0
    with pytest.raises(ValueError, match="different kinds"):
        collective_cost("all_reduce", "ring", 16, 100, selene)


@pytest.mark.parametrize(
    "args, hint",
    [
        (("all_sum", "ring", 4, 4), "all_reduce"),
        (("all_reduce", "rings", 4, 4), "ring"),
        (("broadcast", "ring", 4, 4), "no ring"),
        (("all_reduce", "ring", 0, 4), "at least 1"),
    ],
)
def test_bad_arguments(args, hint):
    with pytest.raises(ValueError, match=hint):
        collective_cost(*args, LINK)
