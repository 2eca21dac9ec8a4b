"""Halving and doubling: right for every number of ranks, and exactly as cheap as the published formula says."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import halving
from fourwalls.collectives.chunks import chunk_sizes
from fourwalls.collectives.reductions import OPS, exact_and_bound, wrong_elements
from fourwalls.cost.collectives import alpha_beta_seconds, collective_cost
from fourwalls.cost.hardware import Cluster, Link, uniform

from ..planting import planted

NETWORK = uniform(1e-6, 1e9)
SHAPES = [(), (0,), (1,), (7,), (16,), (3, 5), (33,)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def data(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.3
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return (torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5 + 1).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def both_parts(comm, shape, dtype, op):
    x = data(comm.rank, shape, dtype)
    kept = x.clone()
    whole = halving.all_reduce(comm, x, op=op)
    mine = halving.reduce_scatter(comm, x, op=op)
    joined = halving.all_gather(comm, mine, numel=x.numel())
    stack = halving.all_gather(comm, x)
    assert torch.equal(x, kept)
    return whole, mine, joined, stack


@pytest.mark.parametrize("n", range(1, 17))
def test_every_world_size(n):
    dtypes = itertools.cycle(DTYPES[n % len(DTYPES) :] + DTYPES[: n % len(DTYPES)])
    for k, shape in enumerate(SHAPES):
        dtype = next(dtypes)
        allowed = [op for op in OPS if dtype in OPS[op].dtypes]
        op = allowed[(n + k) % len(allowed)]
        inputs = [data(r, shape, dtype) for r in range(n)]
        exact, bound = exact_and_bound(inputs, op)
        flat_exact, flat_bound = exact.reshape(-1), bound.reshape(-1)
        sizes = chunk_sizes(exact.numel(), n)
        values = fw.simulate(both_parts, shape, dtype, op, ranks=n, cluster=NETWORK).values
        for rank, (whole, mine, joined, stack) in enumerate(values):
            assert wrong_elements(whole, exact, bound) == 0 and torch.equal(whole, values[0][0])
            assert wrong_elements(mine, flat_exact.split(sizes)[rank], flat_bound.split(sizes)[rank]) == 0
            assert torch.equal(joined, torch.cat([v[1] for v in values]))
            assert torch.equal(stack, torch.stack(inputs))


COLLECTIVES = {
    "all_reduce": lambda comm, numel: halving.all_reduce(comm, torch.zeros(numel)),
    "reduce_scatter": lambda comm, numel: halving.reduce_scatter(comm, torch.zeros(numel)),
    "all_gather": lambda comm, numel: halving.all_gather(
        comm, torch.zeros(chunk_sizes(numel, comm.size)[comm.rank]), numel=numel
    ),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bytes_messages_and_time_equal_the_formula(collective):
    for n, numel in itertools.product(range(1, 17), (0, 5, 96, 101)):
        cost = collective_cost(collective, "halving", n, numel, NETWORK)
        trace = fw.simulate(COLLECTIVES[collective], numel, ranks=n, cluster=NETWORK).trace
        assert [trace.bytes_sent(r) for r in range(n)] == list(cost.bytes_sent), (n, numel)
        assert [trace.messages_sent(r) for r in range(n)] == list(cost.messages_sent), (n, numel)
        assert trace.makespan_ps == cost.picoseconds, (n, numel)


def nodes_of(m, **more):
    return Cluster("nodes", None, Link("in", 1e-6, 1e11), Link("out", 5e-6, 1e9), m, **more)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_over_nodes_too_the_replay_is_exact(collective):
    for n, m, numel in itertools.product((2, 5, 8, 12, 16), (1, 2, 3, 4, 8), (5, 96, 101)):
        cost = collective_cost(collective, "halving", n, numel, nodes_of(m))
        trace = fw.simulate(COLLECTIVES[collective], numel, ranks=n, cluster=nodes_of(m)).trace
        assert [trace.bytes_sent(r) for r in range(n)] == list(cost.bytes_sent), (n, m, numel)
        assert trace.makespan_ps == cost.picoseconds, (n, m, numel)


def sent_between(trace, m):
    """Bytes that leave each rank for another node of m ranks, message by message."""
    return [[e.bytes for e in trace.where(rank=r, kind="send") if e.peer // m != r // m] for r in range(trace.ranks)]


def assert_large_pieces_stay_inside(ranks=16, m=4, numel=1600):
    """4 nodes of 4: S/2 and S/4 inside, then S/8 and S/16 between, and the same backwards."""
    trace = fw.simulate(COLLECTIVES["all_reduce"], numel, ranks=ranks, cluster=nodes_of(m)).trace
    assert sent_between(trace, m) == [[numel * 4 // 8, numel * 4 // 16, numel * 4 // 16, numel * 4 // 8]] * ranks
    assert trace.makespan_ps == 2 * (10**6 + 3200 * 10 + 10**6 + 1600 * 10 + 5 * 10**6 + 800 * 1000 + 5 * 10**6 + 400 * 1000)


def test_the_all_reduce_meets_near_partners_first():
    assert_large_pieces_stay_inside()


def test_its_parts_alone_meet_far_partners_first_and_leave_chunk_r_on_rank_r():
    """The price: half of the tensor crosses in one message (test_every_world_size checks the chunks themselves)."""
    trace = fw.simulate(COLLECTIVES["reduce_scatter"], 1600, ranks=16, cluster=nodes_of(4)).trace
    assert sent_between(trace, 4) == [[3200, 1600]] * 16
    trace = fw.simulate(COLLECTIVES["all_gather"], 1600, ranks=16, cluster=nodes_of(4)).trace
    assert sent_between(trace, 4) == [[1600, 3200]] * 16


def averages(comm):
    return halving.all_reduce(comm, torch.arange(8.0) + comm.rank, op="avg")


def assert_every_part_is_finished(n=4):
    for value in fw.simulate(averages, ranks=n, cluster=NETWORK).values:
        assert torch.equal(value, torch.arange(8.0) + (n - 1) / 2)


def twin(old, new):
    """The library's all_reduce with one piece of its source changed."""
    return planted(halving, old, new).all_reduce


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("seat, _distances(seats), reduction", "seat, reversed(_distances(seats)), reduction", assert_large_pieces_stay_inside),
        ("starts[low] : starts[high]", "starts[seat] : starts[seat + 1]", assert_every_part_is_finished),
        ("in reversed(way)", "in way", assert_every_part_is_finished),
        ("exchange(mine, partner, theirs, partner)", "exchange(theirs, partner, mine, partner)", assert_every_part_is_finished),
        ("combine(comm, reduction, kept, arrived)", "kept.copy_(arrived)", assert_every_part_is_finished),
    ],
)
def test_each_wrong_twin_is_caught(old, new, check, monkeypatch):
    monkeypatch.setattr(halving, "all_reduce", twin(old, new))
    with pytest.raises((AssertionError, fw.RankError, fw.MismatchError)):
        check()


def test_which_half_the_lower_rank_keeps_does_not_matter(monkeypatch):
    monkeypatch.setattr(halving, "all_reduce", twin("if seat & distance:", "if not seat & distance:"))
    assert_large_pieces_stay_inside()
    assert_every_part_is_finished()


def test_powers_of_two_by_hand():
    """2 lg n messages of together 2 (n-1)/n S bytes a rank, in 2 lg n alpha + 2 (n-1)/n S beta."""
    for k in (1, 2, 3, 4):
        n, nbytes = 2**k, 4 * 48 * 16
        trace = fw.simulate(COLLECTIVES["all_reduce"], nbytes // 4, ranks=n, cluster=NETWORK).trace
        assert {trace.bytes_sent(r) for r in range(n)} == {2 * (n - 1) * nbytes // n}
        assert {trace.messages_sent(r) for r in range(n)} == {2 * k}
        assert trace.makespan_ps == 2 * k * 10**6 + 2 * (n - 1) * nbytes // n * 1000
        assert trace.makespan == pytest.approx(alpha_beta_seconds("all_reduce", "halving", n, nbytes, 1e-6, 1e9))


def test_surplus_ranks_are_folded_in():
    assert halving.fold(1) == [[0]] and halving.fold(4) == [[0], [1], [2], [3]]
    assert halving.fold(6) == [[0, 1], [2, 3], [4], [5]] and halving.fold(7) == [[0, 1], [2, 3], [4, 5], [6]]
    trace = fw.simulate(COLLECTIVES["all_reduce"], 64, ranks=6, cluster=NETWORK).trace
    assert [trace.messages_sent(r) for r in range(6)] == [5, 1, 5, 1, 4, 4]  # a pair's first: 2 lg 4 and one to its partner
    assert [trace.bytes_sent(r) for r in range(6)] == [384 + 256, 256, 384 + 256, 256, 384, 384]
    assert trace.makespan_ps == (2 * 2 + 2) * 10**6 + (384 + 2 * 256) * 1000  # (2 floor(lg p) + 2) alpha + (2 (m-1)/m + 2) S beta


def in_place(comm):
    matrix = torch.arange(8.0).view(4, 2) + 100 * comm.rank
    column = matrix[:, 0]
    assert halving.all_reduce(comm, column, out=column) is column
    return matrix


def test_a_column_in_place_spares_its_neighbour():
    for n in (1, 2, 3, 5):
        for rank, matrix in enumerate(fw.simulate(in_place, ranks=n, cluster=NETWORK).values):
            assert torch.equal(matrix[:, 0], torch.tensor([0.0, 2.0, 4.0, 6.0]) * n + 100 * sum(range(n)))
            assert torch.equal(matrix[:, 1], torch.tensor([1.0, 3.0, 5.0, 7.0]) + 100 * rank)


def disagree(comm):
    return halving.all_reduce(comm, torch.ones(4), op="max" if comm.rank == 2 else "sum")


def test_calls_that_differ_are_named():
    with pytest.raises(fw.MismatchError, match="op=max"):
        fw.simulate(disagree, ranks=3, cluster=NETWORK)
    with pytest.raises(ValueError, match="complex numbers have no order"):
        halving.all_reduce(None, torch.tensor([2 + 3j]), op="max")
