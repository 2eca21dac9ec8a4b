"""Calls that do not fit together are refused on every rank, by name, before data moves (simulated and real ranks)."""

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives
from fourwalls.cost.hardware import uniform
from fourwalls.ranks.agreement import compare_statements

NETWORK = uniform(1e-6, 1e9)


def lengths(comm):
    collectives.all_reduce(comm, torch.ones(3 if comm.rank == 0 else 5))


def shapes(comm):
    collectives.all_reduce(comm, torch.ones((2, 3) if comm.rank == 0 else (3, 2)))


def operations(comm):
    collectives.all_reduce(comm, torch.ones(4) * (1 + comm.rank), op="sum" if comm.rank == 0 else "max")


def roots(comm):
    collectives.broadcast(comm, torch.ones(4), root=comm.rank, algorithm="star")


def dtypes(comm):
    collectives.reduce(comm, torch.ones(4, dtype=torch.float32 if comm.rank == 0 else torch.float64))


def names(comm):
    if comm.rank == 0:
        collectives.all_reduce(comm, torch.ones(4))
    else:
        collectives.reduce_scatter(comm, torch.ones(4))


def algorithms(comm):
    collectives.all_reduce(comm, torch.ones(4), algorithm="ring" if comm.rank == 0 else "tree")


CASES = [
    (lengths, r"rank 0 says shape=\(3,\), rank 1 says shape=\(5,\)"),
    (shapes, r"rank 0 says shape=\(2, 3\), rank 1 says shape=\(3, 2\)"),
    (operations, "rank 0 says op=sum, rank 1 says op=max"),
    (roots, "rank 0 says root=0, rank 1 says root=1"),
    (dtypes, "rank 0 says dtype=float32, rank 1 says dtype=float64"),
    (names, "rank 0 says collective=all_reduce, rank 1 says collective=reduce_scatter"),
    (algorithms, "rank 0 says algorithm=ring, rank 1 says algorithm=tree"),
]


@pytest.mark.parametrize(("program", "message"), CASES, ids=[c[0].__name__ for c in CASES])
def test_simulated(program, message):
    with pytest.raises(fw.MismatchError, match=message) as caught:
        fw.simulate(program, ranks=2, cluster=NETWORK)
    assert program.__name__ in str(caught.value)  # the learner's line


def test_real():
    """All in one set of processes would end with the first; two are enough to see that the transport compares."""
    for program, message in (CASES[1], CASES[3]):
        with pytest.raises(fw.MismatchError, match=message):
            fw.run(program, ranks=2, stream=False)


def one_of_many(comm):
    for k in range(5):
        collectives.all_reduce(comm, torch.ones(2), op="max" if (comm.rank, k) == (5, 3) else "sum")


def test_the_odd_one_is_named_among_many():
    with pytest.raises(fw.MismatchError, match=r"rank 5 says op=max"):
        fw.simulate(one_of_many, ranks=8, cluster=NETWORK)


def test_all_ranks_that_differ_are_listed():
    calls = {r: (("collective", "reduce"), ("op", "sum"), ("root", r % 2)) for r in range(4)}
    text = compare_statements(calls, dict.fromkeys(calls, ("cell.py", 3, "step")))
    assert "ranks 0 and 2 say root=0, ranks 1 and 3 say root=1" in text and "op=" not in text
    assert text.splitlines()[1].strip().startswith("ranks 0, 1, 2 and 3 at cell.py:3 in step")
    assert compare_statements({0: calls[0], 2: calls[2]}, {0: ("", 0, ""), 2: ("", 0, "")}) == ""


def free_of_charge(comm):
    return collectives.all_reduce(comm, torch.ones(8))


def test_agreement_leaves_no_trace():
    on, off = (fw.simulate(free_of_charge, ranks=4, cluster=NETWORK, checks=checks).trace for checks in (True, False))
    assert on == off
    real = fw.run(free_of_charge, ranks=2, stream=False).trace
    assert [real.bytes_sent(r) for r in range(2)] == [32, 32] and real.messages_sent() == 4


@pytest.mark.parametrize("root", [2, -1, True, 0.0])
def test_a_root_outside_the_group_is_refused(root):
    def program(comm):
        collectives.broadcast(comm, torch.ones(2), root=root)

    with pytest.raises(fw.RankError, match=r"root is .*; ranks are 0 to 1"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def test_a_chunk_of_the_wrong_size_is_refused():
    def program(comm):
        collectives.all_gather(comm, torch.ones(2), numel=7)

    with pytest.raises(fw.RankError, match="rank 0 gives 2 elements; chunk 0 of 7 elements on 3 ranks has 3"):
        fw.simulate(program, ranks=3, cluster=NETWORK)
