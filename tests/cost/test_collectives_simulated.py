"""The formulas against the collectives themselves on simulated ranks: bytes and messages of every rank, and virtual time, to the
last digit.
"""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring, star, tree
from fourwalls.cost.collectives import COLLECTIVES, chunk_sizes, collective_cost
from fourwalls.cost.hardware import uniform

CLUSTER = uniform(5e-6, 3e9)
CASES = [
    (c, a)
    for c in COLLECTIVES
    for a in ("star", "ring", "tree")
    if (a != "ring" or c in ("all_reduce", "all_gather", "reduce_scatter")) and c != "all_to_all"  # which goes pairwise
]


def program(comm, module, collective, elements):
    whole = {"segment_bytes": None} if module is ring else {}
    if "gather" in collective:
        getattr(module, collective)(comm, torch.ones(chunk_sizes(elements, comm.size)[comm.rank]), numel=elements, **whole)
    else:
        getattr(module, collective)(comm, torch.ones(elements), **whole)


@pytest.mark.parametrize("collective, algorithm", CASES)
@pytest.mark.parametrize("n, elements", [(2, 7), (5, 3), (6, 40), (8, 24), (13, 1000)])
def test_formula_equals_simulation(collective, algorithm, n, elements):
    module = {"star": star, "ring": ring, "tree": tree}[algorithm]
    run = fw.simulate(program, module, collective, elements, ranks=n, cluster=CLUSTER, checks=False)
    cost = collective_cost(collective, algorithm, n, elements, CLUSTER)
    assert tuple(run.trace.bytes_sent(r) for r in range(n)) == cost.bytes_sent
    assert tuple(run.trace.messages_sent(r) for r in range(n)) == cost.messages_sent
    assert run.trace.makespan_ps == cost.picoseconds


def test_64_ranks():
    """More ranks than a laptop has cores."""
    run = fw.simulate(program, ring, "all_reduce", 64 * 10, ranks=64, cluster=CLUSTER, checks=False)
    cost = collective_cost("all_reduce", "ring", 64, 64 * 10, CLUSTER)
    assert run.trace.makespan_ps == cost.picoseconds == 126 * CLUSTER.intra.picoseconds(40)
    assert {run.trace.bytes_sent(r) for r in range(64)} == set(cost.bytes_sent) == {126 * 40}
