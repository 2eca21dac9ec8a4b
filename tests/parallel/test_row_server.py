"""Rows on parameter servers: equal to one device, every byte counted, and no row with nan reaches one."""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.collectives import chunk_sizes
from fourwalls.cost.sparse import COUNT, row_server_bytes, server_bytes, sparse_exchange
from fourwalls.nn.clicks import ClickModel
from fourwalls.nn.optim import Adam
from fourwalls.nn.sparse import RowAdam
from fourwalls.parallel.row_server import train_clicks_with_servers
from fourwalls.parallel.rows import RowOwners

from .click_steps import CONFIG, EPS, LR, NETWORK, STEPS, differences, make_rows, parts, requests, whole_batch


def on_a_server(comm, servers, kind="adam", steps=STEPS, ids=torch.int64, split="even"):
    n = comm.size - servers

    def batch_of(step, worker):
        return whole_batch(step).rows(*parts(n, split)[worker]).to(torch.float64, ids=ids)

    makers = lambda p: Adam(p, lr=LR, eps=EPS), lambda table: make_rows(kind, table)
    return train_clicks_with_servers(comm, CONFIG, batch_of, *makers, steps=steps, servers=servers, dtype=torch.float64)


def gathered(values, servers):
    """The values of `on_a_server` in the form of `train`'s."""
    table, workers = torch.empty(CONFIG.rows, CONFIG.width, dtype=torch.float64), values[servers:]
    for v in values[:servers]:
        table[v["ids"]] = v["rows"]
    losses = [
        sum(v["losses"][k] * v["samples"][k] for v in workers) / sum(v["samples"][k] for v in workers)
        for k in range(len(workers[0]["losses"]))
    ]
    return [{"losses": losses, "table": table, "dense": list(v["weights"].values())} for v in workers]


@pytest.mark.parametrize(("n", "servers"), [(1, 1), (2, 1), (3, 2), (4, 1), (8, 3)])
def test_rows_on_a_server_equal_one_device(n, servers):
    split = "empty rank" if n == 3 else "even"
    values = fw.simulate(on_a_server, servers, split=split, ranks=n + servers, cluster=NETWORK).values
    assert differences(gathered(values, servers)) == set()


def test_rows_on_a_real_server():
    values = fw.run(on_a_server, 1, "adagrad", ranks=3, stream=False).values
    assert differences(gathered(values, 1), "adagrad") == set()


@pytest.mark.parametrize(("n", "servers"), [(2, 1), (4, 2)])
def test_bytes_of_rows_on_servers_equal_the_formula(n, servers):
    options = {"ids": torch.int32, "ranks": n + servers, "cluster": NETWORK}
    none, one = (fw.simulate(on_a_server, servers, steps=s, **options).trace for s in (0, 1))
    sent = [one.bytes_sent(r) - none.bytes_sent(r) for r in range(n + servers)]
    owners, ids = RowOwners(CONFIG.rows, servers), whole_batch(0).ids + torch.tensor(CONFIG.offsets)
    counts = [[len({int(i) for i in ids[a:b].flatten() if owners.owner(i) == q}) for q in range(servers)] for a, b in parts(n)]
    of_servers, of_workers = row_server_bytes(counts, 32, id_bytes=4)
    pieces = [chunk_sizes(p.numel(), servers) for p in ClickModel(CONFIG).dense_parameters()]
    sizes = [8 * sum(piece[q] for piece in pieces) for q in range(servers)]
    dense = [[b - a for a, b in zip(*(server_bytes(sizes, n, s)[who] for s in (0, 1)), strict=True)] for who in (0, 1)]
    assert sent == [a + b for a, b in zip(of_servers + of_workers, dense[0] + dense[1], strict=True)]


def test_a_server_carries_more_than_the_exchange():
    """The claim on trial: the same bytes as with a server. The exchange keeps 1/n of the rows at home; a server keeps none."""
    n = 4
    counts = requests(n, "even", "modulo", 0)
    asked = sum(map(sum, counts))
    exchange = sum(sparse_exchange(counts, 32)) - n * (n - 1) * COUNT
    at_home = sum(counts[r][r] for r in range(n))
    servers, workers = row_server_bytes([[sum(row)] for row in counts], 32)
    assert exchange == (asked - at_home) * (8 + 2 * 32) and sum(servers) + sum(workers) == asked * (8 + 2 * 32) + n * 32


def nan_to_a_server(comm):
    def batch_of(step, worker):
        batch = whole_batch(step).rows(*parts(2)[worker])
        if worker == 1:
            batch.inputs[0, 0] = float("nan")
        return batch

    makers = lambda p: Adam(p), lambda table: RowAdam(table)
    return train_clicks_with_servers(comm, CONFIG, batch_of, *makers, steps=1, dtype=torch.float64)


def test_rows_with_nan_reach_no_server():
    with pytest.raises(fw.RankError, match="rank 2: nan or inf in the gradients of rows, of which none is sent"):
        fw.simulate(nan_to_a_server, ranks=3, cluster=NETWORK)
