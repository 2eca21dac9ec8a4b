"""Rows that travel: equal to one device, each row once, every byte counted."""

import pytest
import torch
import torch.nn.functional as F

import fourwalls as fw
from fourwalls.cost.sparse import COUNT, sparse_exchange
from fourwalls.nn.clicks import ClickModel
from fourwalls.nn.init import draw
from fourwalls.parallel.embedding import ShardedEmbedding

from .click_steps import (
    CONFIG,
    NETWORK,
    U,
    differences,
    one_device,
    per_step,
    requests,
    sent_by_all_reduce,
    train,
)

CASES = [
    dict(ranks=1),
    dict(ranks=2, rule="block", ids=torch.int32),
    dict(ranks=3, kind="adagrad", split="empty rank"),
    dict(ranks=4, one_owner=True, rule="modulo"),
    dict(ranks=4, split="empty rank", ids=torch.int32),
    dict(ranks=8, rule="block", kind="adagrad"),
    dict(ranks=8),
    dict(ranks=2, way="replicated"),
    dict(ranks=3, way="replicated", split="empty rank"),
    dict(ranks=4, way="replicated", kind="adagrad"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()))
def test_equal_to_one_device(case):
    run = fw.simulate(train, cluster=NETWORK, **case)
    assert differences(run.values, case.get("kind", "adam"), case.get("one_owner", False)) == set()
    for v in run.values:
        assert v["losses"] == run.values[0]["losses"]  # the same bits on every rank
        assert torch.equal(v["table"], run.values[0]["table"])


def test_the_comparison_sees_ten_times_the_bound():
    losses, table, dense, bound = one_device("adam")
    value = {"losses": list(losses), "table": table.clone(), "dense": [p.clone() for p in dense]}
    assert differences([value]) == set() and bound < 1e-8
    value["table"][17, 2] += 10 * bound
    assert differences([value]) == {"table"}
    value["dense"][0][0, 0] -= 10 * bound
    value["losses"][-1] += 10 * bound
    assert differences([value]) == {"table", "dense", "losses"}


@pytest.mark.parametrize("n", [2, 4])
def test_real_ranks(n):
    with fw.pool(ranks=n) as pool:
        for case in (dict(), dict(split="empty rank", ids=torch.int32, kind="adagrad")):
            run = pool.run(train, stream=False, **case)
            assert differences(run.values, case.get("kind", "adam")) == set()
            modelled = fw.simulate(train, ranks=n, cluster=NETWORK, **case)
            for a, b in zip(run.values, modelled.values, strict=True):
                assert a["losses"] == b["losses"] and torch.equal(a["table"], b["table"])  # the same bits
            assert [run.trace.bytes_sent(r) for r in range(n)] == [modelled.trace.bytes_sent(r) for r in range(n)]


def test_the_state_lives_with_its_rows():
    table = CONFIG.rows * CONFIG.width * 8
    for n in (1, 4):
        states = [v["state"] for v in fw.simulate(train, ranks=n, steps=1, cluster=NETWORK).values]
        assert sum(states) == table and max(states) - min(states) <= CONFIG.width * 8
    assert [v["state"] for v in fw.simulate(train, "replicated", ranks=3, steps=1, cluster=NETWORK).values] == [table] * 3


# --- bytes -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_bytes_equal_the_formula(n, checks):
    split, rule, ids = ("empty rank", "block", torch.int32) if n in (3, 8) else ("even", "modulo", torch.int64)
    dense = sum(p.numel() for p in ClickModel(CONFIG).dense_parameters())
    rest = [a + 2 * b for a, b in zip(sent_by_all_reduce(n, dense), sent_by_all_reduce(n, 1), strict=True)]
    for step, sent in enumerate(per_step(n, split=split, rule=rule, ids=ids, checks=checks)):
        counts = requests(n, split, rule, step)
        rows = sparse_exchange(counts, CONFIG.width * 8, id_bytes=4 if ids == torch.int32 else 8, checks=checks)
        assert sent == [a + b for a, b in zip(rows, rest, strict=True)]
    for sent in per_step(n, way="replicated", split=split, checks=checks):
        whole = sent_by_all_reduce(n, dense + CONFIG.rows * CONFIG.width)
        assert sent == [a + 2 * b for a, b in zip(whole, sent_by_all_reduce(n, 1), strict=True)]


def test_all_ids_on_one_owner():
    counts = requests(4, "even", "modulo", 0, one_owner=True)
    assert all(row[1:] == [0, 0, 0] and row[0] > 0 for row in counts)
    (sent, _) = per_step(4, one_owner=True, checks=False)
    rest = [a + 2 * b for a, b in zip(sent_by_all_reduce(4, 3 * 5 * 5 + 5 + 5 + 1), sent_by_all_reduce(4, 1), strict=True)]
    owner = sent[0] - rest[0] - 3 * COUNT
    assert owner == sum(row[0] for row in counts[1:]) * 32  # it sends rows to all others, and asks nobody
    assert [s - r - 3 * COUNT for s, r in zip(sent[1:], rest[1:], strict=True)] == [row[0] * (8 + 32) for row in counts[1:]]


def test_gradients_equal_those_of_a_table():
    ids = [torch.tensor([1, 1, 5]), torch.tensor([5, 9, 1, 0])]

    def program(comm):
        embedding = ShardedEmbedding(comm, 10, 2, dtype=torch.float64)
        for turn in (0, 1):  # two forwards before one step
            (embedding(ids[(comm.rank + turn) % 2]).square().sum() * (comm.rank + 1)).backward()
        places, grads = embedding.touched()
        return embedding.owners.ids_of(comm.rank)[places], grads

    values = fw.simulate(program, ranks=2, cluster=NETWORK).values
    table = draw("embedding.weight", (10, 2), std=0.1).requires_grad_()
    sum(F.embedding(ids[(r + turn) % 2], table).square().sum() * (r + 1) for r in (0, 1) for turn in (0, 1)).backward()
    got = torch.zeros(10, 2, dtype=torch.float64)
    for where, grads in values:
        got[where] = grads
    assert (got - table.grad).abs().max() <= 16 * U * table.grad.abs().max()
