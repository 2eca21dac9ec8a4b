"""All-reduce in two levels: right for every way of filling nodes, and cheap where it should be."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import hierarchical, ring
from fourwalls.collectives.reductions import OPS, exact_and_bound, wrong_elements
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import Cluster, Link, uniform

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


def two_levels(ranks_per_node, **more):
    return Cluster("two levels", None, Link("in", 1e-6, 1e11), Link("out", 5e-6, 1e9), ranks_per_node, **more)


def data(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.3
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return (torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5 + 1).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def program(comm, shape, dtype, op, options):
    x = data(comm.rank, shape, dtype)
    kept = x.clone()
    result = hierarchical.all_reduce(comm, x, op=op, **options)
    assert torch.equal(x, kept)
    return result


@pytest.mark.parametrize("n", range(1, 17))
def test_every_world_size(n):
    cases = itertools.cycle(zip(SHAPES * 9, DTYPES * 7, strict=True))
    for _ in range(n):
        next(cases)
    for k, ranks_per_node in enumerate(sorted({1, 2, 3, 4, 5, 8, n})):
        shape, dtype = next(cases)
        allowed = [op for op in OPS if dtype in OPS[op].dtypes]
        op = allowed[(n + k) % len(allowed)]
        exact, bound = exact_and_bound([data(r, shape, dtype) for r in range(n)], op)
        values = fw.simulate(program, shape, dtype, op, {"ranks_per_node": ranks_per_node}, ranks=n, cluster=NETWORK).values
        assert all(wrong_elements(v, exact, bound) == 0 for v in values), (ranks_per_node, shape, dtype, op)
        assert all(torch.equal(v, values[0]) for v in values)


def test_bytes_messages_and_time_equal_the_formula():
    for n, m, numel in itertools.product((1, 2, 5, 8, 11, 16), (1, 2, 3, 4, 8), (0, 5, 96, 101)):
        cluster = two_levels(m)
        cost = collective_cost("all_reduce", "hierarchical", n, numel, cluster)
        trace = fw.simulate(program, (numel,), torch.float32, "sum", {}, ranks=n, cluster=cluster).trace
        assert [trace.bytes_sent(r) for r in range(n)] == list(cost.bytes_sent), (n, m, numel)
        assert [trace.messages_sent(r) for r in range(n)] == list(cost.messages_sent), (n, m, numel)
        assert trace.makespan_ps == cost.picoseconds, (n, m, numel)


def test_two_levels_by_hand():
    """4 nodes of 4: 2 (m-1) (alpha_in + S/m beta_in) + 2 (k-1) (alpha_out + S/(m k) beta_out), and S/m a rank between nodes."""
    trace = fw.simulate(program, (1600,), torch.float32, "sum", {}, ranks=16, cluster=two_levels(4)).trace
    assert trace.makespan_ps == 6 * (10**6 + 1600 * 10) + 6 * (5 * 10**6 + 400 * 1000)
    for rank in range(16):
        sent = [e for e in trace.where(rank=rank, kind="send")]
        assert sum(e.bytes for e in sent if e.peer // 4 != rank // 4) == 2 * 3 * 400
        assert sum(e.bytes for e in sent if e.peer // 4 == rank // 4) == 2 * 3 * 1600


def both(comm, numel):
    x = torch.zeros(numel)
    hierarchical.all_reduce(comm, x)
    middle = comm.clock()
    ring.all_reduce(comm, x, segment_bytes=None)
    return middle, comm.clock() - middle


def test_it_beats_the_ring_between_nodes_and_equals_it_inside_one():
    ours, rings = (max(times) for times in zip(*fw.simulate(both, 1600, ranks=16, cluster=two_levels(4)).values, strict=True))
    assert ours < rings / 2
    ours, rings = (max(times) for times in zip(*fw.simulate(both, 1600, ranks=8, cluster=two_levels(8)).values, strict=True))
    assert ours == rings


def test_a_short_node_gives_its_ranks_more_lanes():
    assert hierarchical.lane_owners([8, 9, 10], 4) == [8, 8, 9, 10]
    assert hierarchical.lane_owners([8], 3) == [8, 8, 8]
    trace = fw.simulate(program, (400,), torch.float32, "sum", {}, ranks=5, cluster=two_levels(4)).trace
    between = [sum(e.bytes for e in trace.where(rank=r, kind="send") if e.peer // 4 != r // 4) for r in range(5)]
    assert between == [400, 400, 400, 400, 1600]  # rank 4 alone holds all four lanes


def on_groups(comm, nodes):
    return hierarchical.all_reduce(comm, torch.tensor([1.0 + comm.rank, 7.0]), nodes=nodes)


def test_nodes_may_be_given_in_any_order():
    for nodes in ([[3, 0], [2, 1], [4]], [[0, 2, 4], [1, 3]], torch.tensor([[4, 3, 2, 1, 0]])):
        for value in fw.simulate(on_groups, nodes, ranks=5, cluster=NETWORK).values:
            assert value.tolist() == [15.0, 35.0]


def inside_a_split(comm):
    group = comm.split(comm.rank % 2)
    return hierarchical.find_nodes(group), hierarchical.all_reduce(group, torch.tensor(comm.rank))


def test_a_communicator_made_by_split_knows_its_nodes():
    values = fw.simulate(inside_a_split, ranks=8, cluster=two_levels(4)).values
    assert all(nodes == [[0, 1], [2, 3]] for nodes, _ in values)
    assert [int(total) for _, total in values] == [12, 16] * 4


def real(comm):
    x = data(comm.rank, (1001,), torch.float32)
    return hierarchical.find_nodes(comm), [hierarchical.all_reduce(comm, x, ranks_per_node=m) for m in (1, 2, 3)]


def test_real_ranks_give_the_bits_of_simulated_ones():
    here = fw.run(real, ranks=4, stream=False)
    there = fw.simulate(real, ranks=4, cluster=NETWORK)
    for rank in range(4):
        assert here.values[rank][0] == [[0, 1, 2, 3]]  # one host
        assert all(torch.equal(a, b) for a, b in zip(here.values[rank][1], there.values[0][1], strict=True))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": 1.5}, "whole number"),
        ({"nodes": [[0, 1]]}, "each of the ranks 0 to 2 once"),
        ({"nodes": [[0, 1], [1, 2]]}, "each of the ranks 0 to 2 once"),
        ({"nodes": [[0, 1, 2], []]}, "no node empty"),
        ({"nodes": [0, 1, 2]}, "a list of nodes, each a list of ranks"),
        ({"nodes": [[0, 1.0, 2]]}, "a list of nodes, each a list of ranks"),
        ({"nodes": [[0, 1, 2]], "ranks_per_node": 3}, "give one of them"),
    ],
)
def test_bad_nodes(options, word):
    with pytest.raises(fw.RankError, match=f"ValueError: .*{word}"):
        fw.simulate(program, (4,), torch.float32, "sum", options, ranks=3, cluster=NETWORK)


def test_ranks_that_see_other_nodes_are_named():
    def program(comm):
        hierarchical.all_reduce(comm, torch.ones(4), ranks_per_node=1 + comm.rank // 3)

    with pytest.raises(fw.MismatchError, match="nodes="):
        fw.simulate(program, ranks=4, cluster=NETWORK)
    with pytest.raises(ValueError, match="share a port"):
        collective_cost("all_reduce", "hierarchical", 8, 100, two_levels(4, shared_nic=True))
