"""Wrong twins of a sharded embedding: each is caught, by its numbers or by its bytes."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives.all_to_all import exchange_counts
from fourwalls.nn.clicks import ClickModel
from fourwalls.nn.optim import Adam
from fourwalls.nn.sparse import RowAdam, merge_rows
from fourwalls.parallel.embedding import ShardedEmbedding, hybrid_step
from fourwalls.parallel.rows import RowOwners

from .click_steps import (
    CONFIG,
    EPS,
    LR,
    NETWORK,
    STEPS,
    differences,
    make_rows,
    parts,
    per_step,
    train,
    whole_batch,
)


class StaleRows(ShardedEmbedding):
    """A cache of the rows it was given, which nobody refreshes."""

    def _fetch(self, request):
        rows = super()._fetch(request)
        cache = self.__dict__.setdefault("cache", {})
        old = torch.stack([cache.setdefault(int(i), row) for i, row in zip(request.wanted, rows.detach().clone(), strict=True)])
        return rows + (old - rows.detach())  # the old values, the gradients' way home


class NotMerged(ShardedEmbedding):
    """Of the gradients that several ranks send for a row, the last wins."""

    def _merge(self, places, grads):
        unique, place = torch.unique(places, return_inverse=True)
        last = grads.new_zeros(len(unique), grads.shape[1])
        last[place] = grads
        return unique, last


class MergedTwice(ShardedEmbedding):
    """Each occurrence of an id sends the whole sum of its row."""

    def forward(self, ids):
        rows = super().forward(ids)
        _, place, count = torch.unique(ids, return_inverse=True, return_counts=True)
        times = count[place].unsqueeze(-1).to(rows.dtype)
        return rows.detach() + (rows - rows.detach()) * times


class WrongOwner(ShardedEmbedding):
    """Rows are dealt out by one rule and looked for by another."""

    def __init__(self, comm, rows, width, *, rule, dtype):
        super().__init__(comm, rows, width, rule="block", dtype=dtype)
        self.owners = RowOwners(rows, comm.size, "modulo")


class OwnBatchOnly(ShardedEmbedding):
    """Gradients of other ranks are dropped."""

    def _fetch(self, request):
        rows = super()._fetch(request)
        self.own = slice(sum(self.came(request)[: self.comm.rank]), sum(self.came(request)[: self.comm.rank + 1]))
        return rows

    def came(self, request):
        return exchange_counts(self.comm, request.counts)

    def touched(self):
        (u,), self._used = self._used, []
        return merge_rows(u.places[self.own], u.given.grad[self.own])


MUTANTS = {
    StaleRows: {"losses", "table", "dense"},
    NotMerged: {"table"},
    MergedTwice: {"table"},
    WrongOwner: {"losses"},
    OwnBatchOnly: {"table"},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("n", [2, 4])
def test_each_mutant_fails(mutant, n):
    values = fw.simulate(train, make=mutant, ranks=n, cluster=NETWORK).values
    assert differences(values) >= MUTANTS[mutant]


def average_missing(comm):
    """Each rank divides by its own samples, and the gradients are added up."""

    class Own(ClickModel):
        def loss(self, batch, *, samples=None):
            return super().loss(batch)

    embedding = ShardedEmbedding(comm, CONFIG.rows, CONFIG.width, dtype=torch.float64)
    model = Own(CONFIG, embedding=embedding, dtype=torch.float64)
    dense, rows = Adam(model.dense_parameters(), lr=LR, eps=EPS), make_rows("adam", embedding.shard)
    losses = []
    for step in range(STEPS):
        mine = whole_batch(step).rows(*parts(comm.size)[comm.rank])
        losses.append(hybrid_step(comm, model, mine, dense, rows))
    return {"losses": losses, "table": embedding.whole(), "dense": model.dense_parameters()}


def test_a_missing_average_fails():
    assert differences(fw.simulate(average_missing, ranks=2, cluster=NETWORK).values) == {"losses", "table", "dense"}


def test_a_row_stepped_twice_is_refused():
    """Duplicates that are not merged at all: the optimiser of rows says so."""
    with pytest.raises(ValueError, match="merge_rows"):
        RowAdam(torch.zeros(4, 2)).step(torch.tensor([2, 2]), torch.ones(2, 2))


def test_what_was_sent_twice_is_seen_in_the_bytes():
    """A request that asks for every occurrence: right values, too many bytes."""

    class EachOccurrence(ShardedEmbedding):
        def forward(self, ids):
            rows = [super(EachOccurrence, self).forward(ids[:, k]) for k in range(ids.shape[1])]
            return torch.stack(rows, 1)

    values = fw.simulate(train, make=EachOccurrence, ranks=4, cluster=NETWORK, steps=STEPS).values
    assert differences(values) == set()
    (sent, _) = per_step(4, make=EachOccurrence, checks=False)
    (right, _) = per_step(4, checks=False)
    assert all(a > b for a, b in zip(sent, right, strict=True))
