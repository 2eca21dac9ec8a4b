"""The path against simulated ranks, against the exact prices and against the textbook lines: to the last digit."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import get_algorithm, ring
from fourwalls.cost.collectives import alpha_beta_seconds, collective_cost
from fourwalls.cost.critical_path import ALL_REDUCES, all_reduce_path, all_reduce_seconds, rounds
from fourwalls.cost.hardware import PS, Cluster, get_cluster, uniform

NODES = replace(get_cluster("a100-selene"), device=None)
FAST, SLOW = NODES.intra, NODES.inter
CLUSTERS = {
    "one wire": uniform(5e-6, 3e9),
    "nodes of 8": NODES,
    "nodes of 4, the wire inside the slower one": Cluster("reversed", None, SLOW, FAST, 4),
    "one rank a node": replace(NODES, ranks_per_node=1),
    "nodes of 8, one adapter a node": replace(NODES, shared_nic=True),
}


def program(comm, all_reduce, numel):
    all_reduce(comm, torch.empty(numel, device="meta"))


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("n", [1, 2, 16])
@pytest.mark.parametrize("nbytes", [128, 2**20, 2**28])
def test_the_path_takes_what_simulated_ranks_take(algorithm, cluster, n, nbytes):
    # whole chunks: a ring's chunk of more than a segment sends more, smaller messages
    function = partial(ring.all_reduce, segment_bytes=None) if algorithm == "ring" else get_algorithm("all_reduce", algorithm)
    run = fw.simulate(program, function, nbytes // 4, ranks=n, cluster=cluster, checks=False)
    assert all_reduce_seconds(algorithm, n, nbytes, cluster) == run.trace.makespan_ps / PS


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize(
    ("n", "name"),
    [(24, "nodes of 8"), (24, "nodes of 4, the wire inside the slower one"), (24, "one rank a node"), (40, "nodes of 8")],
)
def test_numbers_of_nodes_that_are_no_power_of_two(algorithm, name, n):
    function = partial(ring.all_reduce, segment_bytes=None) if algorithm == "ring" else get_algorithm("all_reduce", algorithm)
    for nbytes in (4 * n * 32, 4 * n * 32 * 2**14)[algorithm in ("ring", "star") :]:  # pieces are equal: n and 2^k divide it
        run = fw.simulate(program, function, nbytes // 4, ranks=n, cluster=CLUSTERS[name], checks=False)
        assert all_reduce_seconds(algorithm, n, nbytes, CLUSTERS[name]) == run.trace.makespan_ps / PS


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical", "star"])
def test_one_adapter_a_node_and_three_nodes(algorithm):
    shared, nbytes = CLUSTERS["nodes of 8, one adapter a node"], 4 * 24 * 2**14
    function = partial(ring.all_reduce, segment_bytes=None) if algorithm == "ring" else get_algorithm("all_reduce", algorithm)
    run = fw.simulate(program, function, nbytes // 4, ranks=24, cluster=shared, checks=False)
    assert all_reduce_seconds(algorithm, 24, nbytes, shared) == run.trace.makespan_ps / PS


@pytest.mark.parametrize("algorithm", ["halving", "hierarchical"])
@pytest.mark.parametrize("n", [64, 192, 256])
def test_the_path_takes_what_the_exact_price_says(algorithm, n):
    for elements in (4 * n, 3 * 2**18):
        exact = collective_cost("all_reduce", algorithm, n, elements, NODES)
        assert all_reduce_seconds(algorithm, n, 4 * elements, NODES) == exact.seconds


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "star"])
@pytest.mark.parametrize("n", [2, 3, 6, 16, 100, 256])
def test_the_textbook_lines_on_one_wire(algorithm, n):
    size = 4 * 27 * 25 * 2**8  # divides by all of them
    wire = CLUSTERS["one wire"]
    if algorithm == "halving" and n & (n - 1):  # the textbook's line is rough here: it shares the bytes among n, not 2^k
        assert (
            all_reduce_seconds(algorithm, n, size, wire) == collective_cost("all_reduce", algorithm, n, size // 4, wire).seconds
        )
    else:
        line = alpha_beta_seconds("all_reduce", algorithm, n, size, 5e-6, 3e9)
        assert all_reduce_seconds(algorithm, n, size, wire) == pytest.approx(line, rel=1e-6)


def test_messages_and_bytes_in_a_row():
    def count(algorithm):
        return rounds(all_reduce_path(algorithm, 256, 2**20, NODES))

    assert count("ring") == (510, 510 * 2**12)
    assert count("tree") == (16, 16 * 2**20)
    assert count("halving") == (16, 510 * 2**12)
    assert [link for _, link, _ in all_reduce_path("halving", 256, 2**20, NODES)] == [FAST] * 3 + [SLOW] * 5, "near first"
    assert count("hierarchical") == (14 + 62, 510 * 2**12), "as many bytes as the ring, most of them on the fast wire"
    assert count("star") == (510, 510 * 2**20)


def test_the_slower_wire_sets_the_ring_s_pace():
    ((count, link, piece),) = all_reduce_path("ring", 32, 2**20, NODES)
    assert (count, link, piece) == (62, SLOW, 2**15)
    assert all_reduce_path("ring", 8, 2**20, NODES)[0][1] is FAST


@pytest.mark.parametrize(
    ("algorithm", "n", "nbytes", "cluster", "words"),
    [
        ("butterfly", 8, 8, NODES, "allowed: ring"),
        ("ring", 0, 8, NODES, "at least 1"),
        ("ring", 8, -8, NODES, "at least 0"),
        ("ring", 12, 8, NODES, "8 and 16"),
        ("halving", 12, 8, replace(NODES, ranks_per_node=6), "power of two"),
        ("tree", 12, 8, replace(NODES, ranks_per_node=6), "power of two"),
        ("halving", 24, 8, replace(NODES, shared_nic=True), "one adapter"),
        ("ring", 8, 8, NODES.with_faults(slow={(0, 1): 2}), "fw.simulate"),
        ("ring", 8, 8, NODES.with_faults(straggler={0: 2}), "fw.simulate"),
    ],
)
def test_what_has_no_closed_form_is_refused(algorithm, n, nbytes, cluster, words):
    with pytest.raises(ValueError, match=words):
        all_reduce_seconds(algorithm, n, nbytes, cluster)
