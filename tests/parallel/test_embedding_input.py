"""What a sharded embedding is asked for: ids of all kinds, owners, and what is refused by name."""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.sparse import row_server_bytes, sparse_exchange
from fourwalls.nn.clicks import ClickConfig, ClickModel, clicks
from fourwalls.nn.init import draw
from fourwalls.nn.optim import Adam
from fourwalls.nn.sparse import RowAdam
from fourwalls.parallel.embedding import ShardedEmbedding, hybrid_step, replicated_step
from fourwalls.parallel.rows import RowOwners, make_request

from .click_steps import CONFIG, NETWORK, parts, whole_batch


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (torch.tensor([[3, 10]]), "id 10 at place 1 has no owner: the table has rows 0 to 9"),
        (torch.tensor([-1]), "id -1 at place 0"),
        (torch.tensor([1.0]), "ids are float32; allowed: int32, int64"),
    ],
)
def test_bad_ids_are_named_before_anything_is_sent(ids, word):
    def program(comm):
        ShardedEmbedding(comm, 10, 2)(ids if comm.rank == 1 else torch.tensor([0]))

    with pytest.raises(fw.RankError, match=word) as caught:
        fw.simulate(program, ranks=2, cluster=NETWORK)
    assert caught.value.rank == 1 and caught.value.kind == "ValueError"


def test_rows_without_a_backward_are_refused():
    def program(comm):
        embedding = ShardedEmbedding(comm, 10, 2)
        embedding(torch.tensor([1, 2]))
        embedding.touched()

    with pytest.raises(fw.RankError, match="backward has not brought their gradients home"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def test_without_gradients_nothing_is_kept():
    def program(comm):
        embedding = ShardedEmbedding(comm, 10, 2)
        with torch.no_grad():
            rows = embedding(torch.arange(10))
        return rows, embedding.touched()

    for rows, (places, grads) in fw.simulate(program, ranks=3, cluster=NETWORK).values:
        assert torch.equal(rows.double().float(), draw("embedding.weight", (10, 2), std=0.1).float())
        assert places.shape == (0,) and grads.shape == (0, 2)


@pytest.mark.parametrize("word, values", [("rows", (10, 12)), ("rule", ("block", "modulo")), ("name", ("users", "items"))])
def test_ranks_that_mean_another_table_are_named(word, values):
    def program(comm):
        ShardedEmbedding(comm, **({"rows": 10, "width": 2} | {word: values[comm.rank]}))

    with pytest.raises(
        fw.MismatchError, match=f"ShardedEmbedding differently: rank 0 says {word}={values[0]}, rank 1 says {word}="
    ):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def test_different_id_dtypes_are_named():
    def program(comm):
        ShardedEmbedding(comm, 10, 2)(torch.tensor([1], dtype=(torch.int32, torch.int64)[comm.rank]))

    with pytest.raises(fw.MismatchError, match="int32"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


@pytest.mark.parametrize("rule", ["modulo", "block"])
def test_every_row_has_one_owner_and_one_place(rule):
    for rows in (1, 2, 7, 12):
        for n in (1, 2, 3, 5, 12, 13):
            owners, ids = RowOwners(rows, n, rule), torch.arange(rows, dtype=torch.int32)
            assert sorted(torch.cat([owners.ids_of(q) for q in range(n)]).tolist()) == list(range(rows))
            sizes = [len(owners.ids_of(q)) for q in range(n)]
            assert max(sizes) - min(sizes) <= 1
            for i, q, place in zip(ids.tolist(), owners.owner(ids).tolist(), owners.place(ids).tolist(), strict=True):
                assert owners.ids_of(q)[place] == i


def test_frequent_ids_fall_to_one_owner_by_block_only():
    ids = clicks(ClickConfig(fields=(1000,), inputs=0), 0, batch=4000).ids[:, 0]
    share = {rule: torch.bincount(RowOwners(1000, 4, rule).owner(ids), minlength=4) / 4000 for rule in ("modulo", "block")}
    assert share["block"][0] > 0.75 and share["modulo"].max() < 0.5


@pytest.mark.parametrize(
    ("args", "word"), [((0, 2), "rows is 0"), ((4, 0), "parts is 0"), ((4, 2, "hash"), "allowed: modulo, block")]
)
def test_bad_owners(args, word):
    with pytest.raises(ValueError, match=word):
        RowOwners(*args)


def test_a_request_asks_for_each_id_once():
    request = make_request(torch.tensor([[7, 3], [3, 4], [7, 7]]), RowOwners(10, 3))
    assert request.wanted.tolist() == [3, 4, 7] and request.counts == [1, 2, 0] and request.shape == (3, 2)
    assert request.wanted[request.place].tolist() == [7, 3, 3, 4, 7, 7]


def test_formulas_refuse_what_they_cannot_price():
    with pytest.raises(ValueError, match="counts has 2 rows; each has one number of at least 0 for each of 2 ranks"):
        sparse_exchange([[1, 2], [3]], 4)
    with pytest.raises(ValueError, match="for each of 1 servers"):
        row_server_bytes([[1], [-1]], 4)
    assert sparse_exchange([[5]], 4) == [0]  # all at home
    assert sparse_exchange([[1, 2], [0, 3]], 10, id_bytes=4, backward=False) == [8 + 2 * 4, 8 + 2 * 10]


def not_a_number(comm, way):
    batch = whole_batch(0).rows(*parts(comm.size)[comm.rank])
    if comm.rank == 1:
        batch.inputs[0, 0] = float("nan")
    embedding = ShardedEmbedding(comm, CONFIG.rows, CONFIG.width, dtype=torch.float64) if way == "sparse" else None
    model = ClickModel(CONFIG, embedding=embedding, dtype=torch.float64)
    table = embedding.shard if embedding is not None else model.embedding.weight.data
    step = hybrid_step if way == "sparse" else replicated_step
    return step(comm, model, batch, Adam(model.dense_parameters()), RowAdam(table))


@pytest.mark.parametrize("way", ["sparse", "replicated"])
def test_a_rank_whose_loss_is_nan_is_named(way):
    with pytest.raises(fw.RankError, match="rank 1: the loss is nan, before any gradient is sent") as caught:
        fw.simulate(not_a_number, way, ranks=2, cluster=NETWORK)
    assert caught.value.rank == 1


def odd_ids(comm, ids, rows, rule):
    """(places, first column of the gradients) after the sum of all rows that are asked for."""
    table = ShardedEmbedding(comm, rows, 3, rule=rule, dtype=torch.float64)
    table(ids(comm.rank)).sum().backward()
    places, grads = table.touched()
    return table.owners.ids_of(comm.rank)[places].tolist(), grads[:, 0].tolist()


@pytest.mark.parametrize("rule", ["modulo", "block"])
@pytest.mark.parametrize(
    ("ids", "rows", "ranks"),
    [
        (lambda rank: torch.tensor([4, 4, 4, 4]), 10, 2),
        (lambda rank: torch.arange(6).view(2, 3).t(), 10, 2),
        (lambda rank: torch.tensor(3), 10, 2),
        (lambda rank: torch.arange(1, 3)[: 2 * rank], 10, 2),
        (lambda rank: torch.empty(0, dtype=torch.int64), 10, 2),
        (lambda rank: torch.tensor([0, 0]), 1, 3),
        (lambda rank: torch.arange(3), 3, 5),
    ],
    ids=["one id", "on its side", "0-d", "one rank empty", "all empty", "one row", "more ranks than rows"],
)
def test_odd_ids(ids, rows, ranks, rule):
    """Each row's gradient is how often all ranks asked for it, and lies with its owner, once."""
    wanted = torch.bincount(torch.cat([ids(rank).reshape(-1) for rank in range(ranks)]), minlength=rows).tolist()
    found = {}
    for places, grads in fw.simulate(odd_ids, ids, rows, rule, ranks=ranks, cluster=NETWORK).values:
        found |= dict(zip(places, grads, strict=True))
    assert found == {row: float(count) for row, count in enumerate(wanted) if count}


def test_rows_are_stepped_by_gradients_of_their_own():
    table = RowAdam(torch.zeros(5, 2), lr=0.1)
    for ids, shape, says in (
        ([-1], (1, 2), "rows -1 to -1 are stepped; the table has rows 0 to 4"),
        ([5], (1, 2), "rows 5 to 5"),
        ([1, 2], (1, 2), r"gradients are \(1, 2\) for 2 rows; they are \(2, 2\)"),
        ([1, 2], (2, 1), r"they are \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=says):
            table.step(torch.tensor(ids), torch.ones(shape))
    assert not table.weight.any() and table.steps == 0
