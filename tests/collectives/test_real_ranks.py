"""A sample on real processes: right, the same bits on all ranks, and the same bits as in the simulator."""

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives
from fourwalls.collectives.reductions import exact_and_bound, wrong_elements
from fourwalls.cost.hardware import uniform


def inputs(rank, dtype, shape=(37, 3)):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 4).to(dtype)


def sample(comm):
    """All collectives by all algorithms, several dtypes, strided, empty and 0-d; results by name."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = inputs(comm.rank, dtype)
        for algorithm in collectives.ALGORITHMS["all_reduce"]:
            found["all_reduce", algorithm, dtype] = collectives.all_reduce(comm, x, algorithm=algorithm)
    x = inputs(comm.rank, torch.float32)
    for name in ("reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather"):
        for algorithm in collectives.ALGORITHMS[name]:
            options = {"root": 1} if name in ("broadcast", "reduce", "scatter", "gather") else {}
            found[name, algorithm] = collectives.get_algorithm(name, algorithm)(comm, x, **options)
    for algorithm in collectives.ALGORITHMS["barrier"]:
        collectives.barrier(comm, algorithm=algorithm)
    small = {"segment_bytes": 16}
    found["segments"] = collectives.all_reduce(comm, x, **small)
    found["empty"] = collectives.all_reduce(comm, x[:0])
    found["0-d"] = collectives.all_gather(comm, torch.tensor(3.0 + comm.rank))
    found["column"] = collectives.all_reduce(comm, x[:, 1])
    found["half"] = collectives.all_reduce(comm, x.half(), op="max")
    found["bool"] = collectives.all_reduce(comm, x > 4)
    found["complex"] = collectives.all_reduce(comm, torch.complex(x, -x), op="avg")
    return found


@pytest.mark.parametrize(("n", "checks"), [(2, False), (3, True), (4, False)])
def test_same_bits_as_the_simulator(n, checks):
    real = fw.run(sample, ranks=n, checks=checks, stream=False)
    modelled = fw.simulate(sample, ranks=n, cluster=uniform(1e-6, 1e9))
    exact, bound = exact_and_bound([inputs(r, torch.float32) for r in range(n)])
    for rank in range(n):
        here, there = real.values[rank], modelled.values[rank]
        assert here.keys() == there.keys()
        for name, value in here.items():
            if value is None:
                assert there[name] is None and name[0] in ("reduce", "gather") and rank != 1
                continue
            assert value.dtype == there[name].dtype and torch.equal(value, there[name]), name
            if name[0] in ("all_reduce", "all_gather", "broadcast"):
                assert torch.equal(value, real.values[0][name])
        assert wrong_elements(here["all_reduce", "ring", torch.float32], exact, bound) == 0
        assert wrong_elements(here["column"], exact[:, 1], bound[:, 1]) == 0
        assert here["0-d"].tolist() == [3.0 + r for r in range(n)]


def counted(comm):
    collectives.all_reduce(comm, torch.ones(40))


def test_real_bytes_equal_the_formula():
    trace = fw.run(counted, ranks=4, stream=False).trace
    assert [trace.bytes_sent(r) for r in range(4)] == [2 * 3 * 40] * 4  # 2 (n-1)/n S, S = 160 bytes
    assert [trace.messages_sent(r) for r in range(4)] == [6] * 4
