"""Results in memory that is already in use: the input's own, a neighbour's, a column, an expanded tensor. Right, or refused."""

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives as C
from fourwalls.cost.hardware import uniform

NETWORK = uniform(1e-6, 1e9)
WRITING = [(c, a) for c in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "all_to_all") for a in C.ALGORITHMS[c]]
GATHERS = [(c, a) for c, a in WRITING if c.endswith("gather")]


def simulate(program, *args, ranks=3):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, stream=False).values


def wanted(collective, n):
    """What rank r's (r + 1) * [1, 2, 3, ... 6] gives."""
    x = torch.arange(1.0, 7.0)
    everybody = torch.stack([(r + 1) * x for r in range(n)])
    if collective.endswith("gather"):
        return [everybody] * n
    if collective == "all_to_all":
        return [torch.cat([row.chunk(n)[r] for row in everybody]) for r in range(n)]
    return [everybody[0] if collective == "broadcast" else everybody.sum(0)] * n


def result_in(comm, collective, algorithm, kind):
    """The collective with an `out` of some kind; (result, whatever else `out`'s memory holds)."""
    n, r = comm.size, comm.rank
    x = (r + 1) * torch.arange(1.0, 7.0)
    shape = (n, 6) if collective.endswith("gather") else (6,)
    memory = torch.full((*shape, 2), -1.0)
    if kind == "itself":
        out = x
    elif kind == "the same view":
        out, x = x[:], x[:]
    elif kind == "its own place":
        out = torch.zeros(shape)
        x = out[r].copy_(x)
    elif kind == "a column":
        out = memory[..., 0]
    elif kind == "a neighbour's column":
        memory[..., 1] = x
        out, x = memory[..., 0], memory[..., 1] if len(shape) == 1 else memory[r, :, 1]
    got = C.get_algorithm(collective, algorithm)(comm, x, out=out)
    assert got is None or got is out
    return got, memory


@pytest.mark.parametrize(("collective", "algorithm"), WRITING)
def test_a_result_in_memory_that_may_be_written_is_right(collective, algorithm):
    kinds = ["its own place"] if collective.endswith("gather") else ["itself", "the same view"]
    for n in (1, 3):
        for kind in (*kinds, "a column", "a neighbour's column"):
            for r, (got, memory) in enumerate(simulate(result_in, collective, algorithm, kind, ranks=n)):
                if got is None:
                    assert r > 0 and collective in ("reduce", "gather")
                    continue
                assert torch.equal(got, wanted(collective, n)[r]), (n, kind, r)
                if kind == "a neighbour's column":
                    assert torch.equal(memory[..., 1], ((r + 1) * torch.arange(1.0, 7.0)).expand(memory.shape[:-1]))
                elif kind == "a column":
                    assert bool((memory[..., 1] == -1).all())


def refused(comm, collective, algorithm, kind):
    n = comm.size
    gathers = collective.endswith("gather")
    if kind == "overlap":
        memory = torch.zeros(n + 1, 6).view(-1)
        x, out = memory[1:7], memory[: 6 * n].view(n, 6) if gathers else memory[:6]
    elif kind == "another's place":
        out = torch.zeros(n, 6)
        x = out[(comm.rank + 1) % n]
    elif kind == "expanded":
        x, out = torch.ones(6), torch.zeros(1).expand(n, 6) if gathers else torch.zeros(1).expand(6)
    else:
        x, out = torch.ones(6), [0.0] * 6
    C.get_algorithm(collective, algorithm)(comm, x, out=out)


@pytest.mark.parametrize(("collective", "algorithm"), WRITING)
def test_a_result_over_what_is_still_to_be_read_is_refused(collective, algorithm):
    kinds = {"overlap": "out shares memory with x", "expanded": "out is an expanded tensor", "list": "out is list"}
    if (collective, algorithm) in GATHERS:
        kinds["another's place"] = "give an x that is elements 0 to 6 of out, or memory"
    for kind, word in kinds.items():
        with pytest.raises(fw.RankError, match=f"rank 0 of 2 raised ValueError: .*{word}"):
            fw.simulate(refused, collective, algorithm, kind, ranks=2, cluster=NETWORK, stream=False)


def rows_in_place(comm, k):
    x = torch.arange(comm.size * k) + 100 * comm.rank
    return C.all_to_all(comm, x, out=x)


def test_all_to_all_in_place_sends_what_was_there_before():
    for n in range(1, 7):
        for r, got in enumerate(simulate(rows_in_place, 2, ranks=n)):
            assert got.tolist() == [100 * q + 2 * r + i for q in range(n) for i in (0, 1)]


def turned(comm, algorithm):
    matrix = torch.arange(9.0).view(3, 3) + comm.rank
    return C.all_reduce(comm, matrix.T, algorithm=algorithm, out=matrix)


@pytest.mark.parametrize("algorithm", C.ALGORITHMS["all_reduce"])
def test_a_matrix_may_take_the_sum_of_its_transposes(algorithm):
    for value in simulate(turned, algorithm):
        assert torch.equal(value, torch.arange(9.0).view(3, 3).T * 3 + 3)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_no_algorithm_orders_complex_numbers_averages_whole_ones_or_takes_an_array(collective):
    pytest.importorskip("numpy")
    for algorithm in C.ALGORITHMS[collective].values():
        for op in ("max", "min", "prod"):
            with pytest.raises(ValueError, match="complex numbers have no order"):
                algorithm(_Alone, torch.tensor([2 + 3j]), op=op)
        with pytest.raises(ValueError, match="an average of whole numbers is no whole number"):
            algorithm(_Alone, torch.tensor([1]), op="avg")
        with pytest.raises(ValueError, match="takes torch tensors, and this is an array of numpy's float32"):
            algorithm(_Alone, torch.ones(2).numpy())


class _Alone:
    rank, size = 0, 1
