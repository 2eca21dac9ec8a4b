"""The embedding benchmark on small tables: all its rows are right, and a wrong formula or loss makes some that are not."""

from types import SimpleNamespace

import pytest

from fourwalls.bench import embedding
from fourwalls.nn.clicks import ClickConfig

OPTIONS = SimpleNamespace(ranks=[2], pairs=3)
SMALL = {"large": ClickConfig(fields=(400,), width=4), "small": ClickConfig(fields=(100,), width=4), "batch": 32}
EXPECTED = {
    "B": {"sparse_bytes", "sparse_bytes_minus_formula", "dense_bytes", "bytes_sparse", "bytes_replicated", "bytes_server"},
    "%": {"share_of_dense"},
    "ids a rank": {"different_ids"},
    "nats": {"loss_difference", "loss_difference_sparse", "loss_difference_replicated", "loss_difference_server"},
    "s": {"time_sparse", "time_replicated", "time_server"},
}


def measure(limit):
    return list(embedding.rows(OPTIONS, **SMALL, limit=limit))


def test_all_rows_are_right():
    rows = measure(limit=100.0)
    assert all(row.ok for row in rows), [r for r in rows if not r.ok]
    assert {unit: {row.metric for row in rows if row.unit == unit} for unit in EXPECTED} == EXPECTED
    by_name = {row.metric: row for row in rows}
    assert by_name["sparse_bytes_minus_formula"].value == 0
    assert by_name["share_of_dense"].value == pytest.approx(100 * by_name["sparse_bytes"].value / by_name["dense_bytes"].value)


def test_what_is_wrong_is_not_ok(monkeypatch):
    right = embedding.sparse_exchange
    monkeypatch.setattr(embedding, "sparse_exchange", lambda counts, row: [b + 8 for b in right(counts, row)])
    monkeypatch.setattr(embedding, "one_device", lambda config, ranks, batch, steps: [1.0] * steps)
    wrong = {row.metric for row in measure(limit=0.001) if not row.ok}
    assert wrong == {
        "sparse_bytes", "sparse_bytes_minus_formula", "share_of_dense", "loss_difference", "time_sparse", "bytes_sparse",
        "loss_difference_sparse", "loss_difference_replicated", "loss_difference_server", "time_server",
    }  # fmt: skip
