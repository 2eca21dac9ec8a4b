"""Wrong rings must be caught: each twin below differs from a right ring in one place, and the checker must say so.

The first is a ring that a well-known tutorial printed for years.
"""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives.reductions import exact_and_bound, wrong_elements
from fourwalls.cost.hardware import uniform

NETWORK = uniform(1e-6, 1e9)


def ring(comm, x, *, fault=None):
    """A small ring all-reduce with one fault, or none."""
    n, rank = comm.size, comm.rank
    flat = x.clone().reshape(-1)
    chunks = list(flat.tensor_split(n))
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        give, take = (rank - step) % n, (rank - step - 1) % n
        if fault == "wrong chunk" and step == n - 2:
            give = take = (rank - step) % n
        arrived = torch.empty_like(chunks[take])
        if fault == "missing wait":
            incoming, outgoing = comm.irecv(arrived, left), comm.isend(chunks[give], right)
            arrived.zero_()  # what a fresh buffer may hold
            chunks[take].add_(arrived)
            incoming.wait()
            outgoing.wait()
            continue
        comm.exchange(chunks[give], right, arrived, left)
        if fault == "dropped rank" and rank == n - 1 and step == 0:
            arrived.zero_()
        chunks[take].sub_(arrived) if fault == "sign" and step == 0 and rank == 0 else chunks[take].add_(arrived)
    if fault == "factor":
        chunks[(rank + 1) % n].mul_(n / (n + 1))
    for step in range(n - 1):
        give, take = (rank + 1 - step) % n, (rank - step) % n
        comm.exchange(chunks[give], right, chunks[take], left)
        if fault == "stale" and step == n - 2 and rank == 0:
            chunks[take].copy_(x.reshape(-1).tensor_split(n)[take])
    if fault == "one element" and rank == n - 1:
        flat[-1] += 10 * bound_of(comm, x)
    return flat.view(x.shape)


def bound_of(comm, x):
    inputs = [values(r, x.shape, x.dtype) for r in range(comm.size)]
    return exact_and_bound(inputs)[1].reshape(-1)[-1].to(x.dtype)


def tutorial_ring(comm, x):
    """The whole tensor goes round; the two buffers swap roles, but what is added is always the first one."""
    n = comm.size
    send, recv = x.clone(), x.clone()
    total = x.clone()
    left, right = (comm.rank - 1) % n, (comm.rank + 1) % n
    for step in range(n - 1):
        if step % 2 == 0:
            request = comm.isend(send, right)
            comm.recv(recv, left)
            total += recv
        else:
            request = comm.isend(recv, right)
            comm.recv(send, left)
            total += recv  # the received one is `send` now: the same numbers are added twice
        request.wait()
    return total


def values(rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(77 + rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def wrong_ranks(function, n, shape, dtype=torch.float32, **options):
    """Ranks whose result is off, by the checker of reductions.py."""

    def program(comm):
        return function(comm, values(comm.rank, shape, dtype), **options)

    run = fw.simulate(program, ranks=n, cluster=NETWORK)
    exact, bound = exact_and_bound([values(r, shape, dtype) for r in range(n)])
    return [r for r, result in enumerate(run.values) if wrong_elements(result, exact, bound)]


@pytest.mark.parametrize("n", range(2, 9))
def test_the_right_ring_passes(n):
    for shape in ((3,), (n,), (4, 5), (0,)):
        assert wrong_ranks(ring, n, shape) == []


FAULTS = ["sign", "dropped rank", "wrong chunk", "factor", "missing wait", "stale", "one element"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_wrong_twin_fails(fault, dtype):
    for n in (3, 4, 7):
        assert wrong_ranks(ring, n, (84,), dtype, fault=fault), (fault, n)


def test_the_tutorial_ring_fails_and_ours_does_not():
    from fourwalls.collectives import all_reduce

    def ones(comm, function):
        return function(comm, torch.full((3,), comm.rank + 1))

    assert [v.tolist() for v in fw.simulate(ones, all_reduce, ranks=4, cluster=NETWORK).values] == [[10, 10, 10]] * 4
    assert any(v.tolist() != [10, 10, 10] for v in fw.simulate(ones, tutorial_ring, ranks=4, cluster=NETWORK).values)
    for n in range(3, 9):
        assert wrong_ranks(tutorial_ring, n, (5,)), n
        assert wrong_ranks(all_reduce, n, (5,)) == [], n
