"""All-to-all: equal and unequal pieces, empty ones, and counts that do not match."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import autograd
from fourwalls.collectives.all_to_all import all_to_all, all_to_all_unequal, exchange_counts
from fourwalls.cost.collectives import all_to_all_cost, collective_cost
from fourwalls.cost.hardware import uniform

NETWORK = uniform(1e-6, 1e9)
DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]


def rows(src, dst, count, row, dtype):
    """What `src` has for `dst`: every element says from whom, to whom, and which."""
    numbers = torch.arange(count * max(1, torch.tensor(row).prod().int().item() if row else 1)).view(count, *row)
    return ((numbers * 17 + src) * 17 + dst).remainder(2 if dtype == torch.bool else 2**11).to(dtype)


def equal(comm, k, row, dtype, in_place):
    x = torch.cat([rows(comm.rank, q, k, row, dtype) for q in range(comm.size)])
    kept = x.clone()
    result = all_to_all(comm, x, out=torch.empty_like(x) if in_place else None)
    assert torch.equal(x, kept)
    return result


@pytest.mark.parametrize("n", range(1, 17))
def test_equal_pieces(n):
    for i, (k, row) in enumerate([(1, ()), (3, ()), (2, (5,)), (0, (4,)), (2, (3, 2))]):
        dtype = DTYPES[(n + i) % len(DTYPES)]
        values = fw.simulate(equal, k, row, dtype, i % 2 == 1, ranks=n, cluster=NETWORK).values
        for dst, got in enumerate(values):
            assert torch.equal(got, torch.cat([rows(src, dst, k, row, dtype) for src in range(n)]))


def count(src, dst, seed):
    return (src * 7 + dst * 3 + seed * src * dst) % 4  # 0 to 3 rows


def unequal(comm, seed, row, dtype, known):
    n, r = comm.size, comm.rank
    counts = [count(r, q, seed) for q in range(n)]
    x = torch.cat([rows(r, q, c, row, dtype) for q, c in enumerate(counts)])
    return all_to_all_unequal(comm, x, torch.tensor(counts), expect=[count(q, r, seed) for q in range(n)] if known else None)


@pytest.mark.parametrize("n", range(1, 17))
def test_unequal_pieces(n):
    for seed, row in enumerate([(), (3,), (2, 2)]):
        dtype = DTYPES[(n + seed) % len(DTYPES)]
        run = fw.simulate(unequal, seed, row, dtype, seed == 1, ranks=n, cluster=NETWORK, checks=seed != 2)
        for dst, (got, came) in enumerate(run.values):
            assert came == [count(src, dst, seed) for src in range(n)]
            assert torch.equal(got, torch.cat([rows(src, dst, c, row, dtype) for src, c in enumerate(came)]))


def test_bytes_messages_and_time_equal_the_formula():
    for n in range(1, 17):
        cost = collective_cost("all_to_all", "pairwise", n, 6 * n, NETWORK)
        trace = fw.simulate(equal, 3, (2,), torch.float32, False, ranks=n, cluster=NETWORK).trace
        assert [trace.bytes_sent(r) for r in range(n)] == list(cost.bytes_sent) == [24 * (n - 1)] * n
        assert [trace.messages_sent(r) for r in range(n)] == list(cost.messages_sent) == [n - 1] * n
        assert trace.makespan_ps == cost.picoseconds == (n - 1) * (10**6 + 24 * 1000)
        assert [e.peer for e in trace.where(rank=0, kind="send")] == list(range(1, n))  # nobody is sent to twice in a step
        counts = [[count(s, d, 1) for d in range(n)] for s in range(n)]
        for known in (False, True):
            cost = all_to_all_cost(counts, 12, NETWORK, counts_known=known)
            trace = fw.simulate(unequal, 1, (3,), torch.float32, known, ranks=n, cluster=NETWORK, checks=not known).trace
            assert [trace.bytes_sent(r) for r in range(n)] == list(cost.bytes_sent)
            assert [trace.messages_sent(r) for r in range(n)] == list(cost.messages_sent) == [(n - 1) * (1 if known else 2)] * n
            assert trace.makespan_ps == cost.picoseconds


def experts(comm):
    """Trial b20: for the same expert one rank has 3 tokens and the other 4; nobody has any for the last."""
    counts = [3 + comm.rank] + [0] * (comm.size - 1)
    return all_to_all_unequal(comm, torch.full((sum(counts), 2), float(comm.rank)), counts)


def test_capacities_that_differ_and_an_empty_expert():
    for run in (fw.simulate(experts, ranks=2, cluster=NETWORK), fw.run(experts, ranks=2, stream=False)):
        (tokens, came), (none, nothing) = run.values
        assert tokens[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1] and came == [3, 4]
        assert none.shape == (0, 2) and nothing == [0, 0]


def wrong_expectation(comm):
    counts = [3 + comm.rank, 0]
    return all_to_all_unequal(comm, torch.ones(sum(counts)), counts, expect=[3, 3] if comm.rank == 0 else [0, 0])


@pytest.mark.parametrize("start", [fw.simulate, fw.run])
def test_counts_that_do_not_match_name_both_ranks(start):
    options = {"cluster": NETWORK} if start is fw.simulate else {"stream": False}
    with pytest.raises(fw.MismatchError, match="rank 1 sends 4 rows to rank 0, which expects 3"):
        start(wrong_expectation, ranks=2, **options)


def told(comm):
    return exchange_counts(comm, [10 * comm.rank + q for q in range(comm.size)])


def test_exchange_counts():
    assert fw.simulate(told, ranks=3, cluster=NETWORK).values == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_counts_may_be_any_whole_numbers():
    """A list, a tensor, numpy's ints (as `bincount` gives), a generator."""
    kinds = ([1, 1], torch.tensor([1, 1]), torch.tensor([1, 1]).numpy(), list(torch.tensor([1, 1])), range(1, 2))

    def program(comm):
        found = [all_to_all_unequal(comm, torch.arange(2.0), kind)[1] for kind in kinds[:4]]
        return found + [autograd.all_to_all(comm, torch.arange(2.0), kind)[1] for kind in kinds[:4]]

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [[[1, 1]] * 8] * 2


@pytest.mark.parametrize(
    ("counts", "shape", "word"),
    [
        ([1, 1], (3,), "counts \\[1, 1\\] ask for 2 rows, and the shape of the tensor is \\(3,\\)"),
        ([3], (3,), "one whole number of at least 0 for each of 2 ranks"),
        ([4, -1], (3,), "at least 0"),
        ([1.5, 1.5], (3,), "whole number"),
        ([True, True], (2,), "whole number"),
        (None, (3,), "counts is None"),
        ("11", (2,), "counts is 11"),
        ([[1], [1]], (2,), "whole number"),
        ([0, 0], (), "ask for 0 rows"),
    ],
)
def test_bad_counts(counts, shape, word):
    def program(comm):
        all_to_all_unequal(comm, torch.ones(shape), counts)

    with pytest.raises(fw.RankError, match=f"ValueError: .*{word}"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def test_bad_shapes():
    def program(comm, rows):
        all_to_all(comm, torch.ones(rows[comm.rank]))

    with pytest.raises(fw.RankError, match="cuts dim 0 into 2 equal pieces.*all_to_all_unequal"):
        fw.simulate(program, [(3,), (3,)], ranks=2, cluster=NETWORK)
    with pytest.raises(fw.MismatchError, match="shape=\\(4,\\).*shape=\\(2,\\)|shape=\\(2,\\).*shape=\\(4,\\)"):
        fw.simulate(program, [(2,), (4,)], ranks=2, cluster=NETWORK)
    with pytest.raises(ValueError, match="equal pieces are needed"):
        collective_cost("all_to_all", "pairwise", 2, 3, NETWORK)
    with pytest.raises(ValueError, match="one number of at least 0 for each of 2"):
        all_to_all_cost([[1, 2], [3]], 4, NETWORK)
