"""Sparse embeddings on this machine: what travels when each row lives on one rank, beside the all-reduce of the whole table.

The large case (a million rows of 64, ids by Zipf's law, 4096 a rank) runs with its rows dealt out; its bytes are counted in the
Trace and compared with the formula in different ids, its losses with those of one device. What the dense all-reduce of that table
would send is the formula's figure; a smaller case, in which replicated tables and a server run too, proves that formula.

    share = bytes of the busiest rank in the sparse exchange / 2 (n-1)/n S

Reference: Zhang et al. 2022 (arXiv:2204.04903); `fourwalls.cost.sparse`.
"""

import time
from collections.abc import Callable, Iterator

import torch

from ..cost.collectives import collective_cost
from ..cost.hardware import uniform
from ..cost.sparse import expected_different, row_server_bytes, server_bytes, sparse_exchange, zipf_probabilities
from ..nn.clicks import ClickConfig, ClickModel, clicks
from ..nn.optim import Adam
from ..nn.sparse import RowAdagrad
from ..parallel.embedding import ShardedEmbedding, hybrid_step, replicated_step
from ..parallel.row_server import train_clicks_with_servers
from ..parallel.rows import RowOwners, make_request
from ..parallel.server_keys import place_keys
from ..ranks.run import pool
from .record import Row
from .timer import spread, time_ratio

__all__ = ["LARGE", "LIMIT", "SMALL", "describe", "rows"]

describe = "rows of a table by all-to-all: bytes beside the formula and the dense all-reduce, losses, seconds a step"
LARGE = ClickConfig(fields=(1_000_000,), width=64, inputs=4, hidden=16)
SMALL = ClickConfig(fields=(50_000,), width=64, inputs=4, hidden=16)
BATCH, STEPS = 4096, 3  # of one rank
LIMIT = 0.30  # percent of the dense all-reduce
LR = 0.05


def rows(
    options,
    say: Callable[[str], None] = lambda text: None,
    *,
    large: ClickConfig = LARGE,
    small: ClickConfig = SMALL,
    batch: int = BATCH,
    limit: float = LIMIT,
) -> Iterator[Row]:
    """Rows for each number of ranks (default 4); `limit`: the largest share of the dense all-reduce, in percent."""
    for n in options.ranks or (4,):
        case = _case(large, n, batch)
        say(f"embedding, {n} ranks: one device")
        expected = one_device(large, n, batch, STEPS)
        with pool(ranks=n) as open_ranks:
            say(f"embedding, {n} ranks: rows by all-to-all")
            yield from _large(open_ranks, case, large, n, batch, expected, limit)
            say(f"embedding, {n} ranks: the smaller case")
            yield from _small(open_ranks, small, n, batch, options.pairs)


def one_device(config: ClickConfig, ranks: int, batch: int, steps: int) -> list[float]:
    """Losses of one device on all ranks' samples in float64, its table stepped in the rows that were touched."""
    model = ClickModel(config, dtype=torch.float64)
    table = model.embedding.weight.data
    dense, rowwise, losses = Adam(model.dense_parameters(), lr=LR), RowAdagrad(table, lr=LR), []
    model.embedding.weight.requires_grad_(False)
    for step in range(steps):
        whole = clicks(config, step, batch=ranks * batch, dtype=torch.float64)
        ids, place = torch.unique(whole.ids, return_inverse=True)
        used = table[ids].requires_grad_()
        logits = model.net(torch.cat([used[place].flatten(1), whole.inputs], 1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, whole.clicked)
        loss.backward()
        losses.append(loss.item())
        dense.step()
        rowwise.step(ids, used.grad)
        dense.zero_grad()
    return losses


def train(comm, way: str, config: ClickConfig, batch: int, steps: int, dtype: torch.dtype = torch.float32) -> dict:
    """Losses and seconds of each step on this rank. way: "sparse" or "replicated"."""
    embedding = ShardedEmbedding(comm, config.rows, config.width, dtype=dtype) if way == "sparse" else None
    model = ClickModel(config, embedding=embedding, dtype=dtype)
    table = embedding.shard if embedding is not None else model.embedding.weight.data
    dense, rowwise = Adam(model.dense_parameters(), lr=LR), RowAdagrad(table, lr=LR)
    step_once, losses, seconds = hybrid_step if way == "sparse" else replicated_step, [], []
    for step in range(steps):
        mine = clicks(config, step, comm.rank, batch=batch, dtype=dtype)
        comm.barrier()
        start = time.perf_counter()
        losses.append(step_once(comm, model, mine, dense, rowwise))
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "seconds": seconds}


def exchange(comm, config: ClickConfig, batch: int) -> None:
    """The rows' traffic of one step, and nothing else."""
    embedding = ShardedEmbedding(comm, config.rows, config.width)
    embedding(clicks(config, 0, comm.rank, batch=batch).ids).sum().backward()


def with_server(comm, config: ClickConfig, batch: int, steps: int) -> dict:
    """The same training with tables and net on rank 0 and workers on the others."""

    def batch_of(step, worker):
        return clicks(config, step, worker, batch=batch, dtype=torch.float64)

    makers = lambda p: Adam(p, lr=LR), lambda table: RowAdagrad(table, lr=LR)
    return train_clicks_with_servers(comm, config, batch_of, *makers, steps=steps, dtype=torch.float64)


def counts_of(config: ClickConfig, ranks: int, batch: int, owners: int) -> list[list[int]]:
    """counts[r][q]: different ids of rank r's first batch that owner q has."""
    rule = RowOwners(config.rows, owners)
    return [make_request(clicks(config, 0, r, batch=batch).ids, rule).counts for r in range(ranks)]


def dense_bytes(config: ClickConfig, ranks: int) -> tuple[int, ...]:
    """What each rank sends to all-reduce the gradient of the whole table by the ring."""
    return collective_cost("all_reduce", "ring", ranks, config.rows * config.width, uniform(1e-6, 1e9)).bytes_sent


def _large(open_ranks, case, config, n, batch, expected, limit) -> Iterator[Row]:
    here = {"benchmark": "embedding", "case": case, "machine": {"backend": open_ranks.backend}}
    counts = counts_of(config, n, batch, n)
    formula = sparse_exchange(counts, 4 * config.width)
    trace = open_ranks.run(exchange, config, batch, checks=False, stream=False).trace
    sent, dense = [trace.bytes_sent(r) for r in range(n)], dense_bytes(config, n)
    equal = sent == formula
    yield Row(metric="sparse_bytes", value=max(sent), unit="B", ok=equal, peer="formula in different ids", **here)
    yield Row(metric="sparse_bytes_minus_formula", value=sum(sent) - sum(formula), unit="B", ok=equal, **here)
    yield Row(metric="dense_bytes", value=max(dense), unit="B", source="modelled", peer="ring all-reduce", **here)
    share = 100 * max(s / d for s, d in zip(sent, dense, strict=True)) if n > 1 else 0.0
    yield Row(metric="share_of_dense", value=share, unit="%", ok=equal and share <= limit, peer=f"at most {limit:g} %", **here)
    found = sum(map(sum, counts)) / n
    likely = expected_different(zipf_probabilities(config.rows, config.zipf), batch)
    near = abs(found - likely) < 5 * (likely / n) ** 0.5  # five standard deviations of the mean of n counts
    yield Row(metric="different_ids", value=found, unit="ids a rank", ok=near, peer=f"Zipf's law: {likely:.1f}", **here)
    run = open_ranks.run(train, "sparse", config, batch, STEPS, torch.float64, checks=False, stream=False)
    away = max(abs(a - b) for v in run.values for a, b in zip(v["losses"], expected, strict=True))
    bound = _loss_bound(n * batch, expected)
    yield Row(metric="loss_difference", value=away, unit="nats", ok=away <= bound, peer=f"one device, bound {bound:.2g}", **here)
    run = open_ranks.run(train, "sparse", config, batch, 7, checks=False, stream=False)
    taken = spread(max(times) for times in list(zip(*(v["seconds"] for v in run.values), strict=True))[1:])
    yield Row(metric="time_sparse", value=taken.value, unit="s", low=taken.low, high=taken.high, ok=away <= bound, **here)


def _small(open_ranks, config, n, batch, pairs) -> Iterator[Row]:
    """Sparse, replicated and served: the same losses, and for each its bytes and seconds. Steps alternate between the ways."""
    here = {"benchmark": "embedding", "case": _case(config, n, batch), "machine": {"backend": open_ranks.backend}}
    expected, net = one_device(config, n, batch, 2), sum(p.numel() for p in ClickModel(config).dense_parameters())
    bound = _loss_bound(n * batch, expected)
    link, counts = uniform(1e-6, 1e9), counts_of(config, n, batch, n)
    scalars = [2 * b for b in collective_cost("all_reduce", "ring", n, 1, link, itemsize=8).bytes_sent]
    together = collective_cost("all_reduce", "ring", n, net + config.rows * config.width, link).bytes_sent
    alone = collective_cost("all_reduce", "ring", n, net, link).bytes_sent
    formulas = {
        "sparse": [a + b + c for a, b, c in zip(sparse_exchange(counts, 4 * config.width), alone, scalars, strict=True)],
        "replicated": [a + b for a, b in zip(together, scalars, strict=True)],
    }
    times: dict[str, list[float]] = {"sparse": [], "replicated": []}
    for pair in range(max(2, pairs // 3)):
        for way in ("sparse", "replicated") if pair % 2 == 0 else ("replicated", "sparse"):
            run = open_ranks.run(train, way, config, batch, 2, checks=False, stream=False)
            times[way].append(max(v["seconds"][1] for v in run.values))
            if pair == 0:
                first = open_ranks.run(train, way, config, batch, 1, checks=False, stream=False)
                sent = [first.trace.bytes_sent(r) for r in range(n)]
                ok = sent == formulas[way]
                wide = open_ranks.run(train, way, config, batch, 2, torch.float64, checks=False, stream=False)
                away = max(abs(a - b) for v in wide.values for a, b in zip(v["losses"], expected, strict=True))
                yield Row(metric=f"bytes_{way}", value=max(sent), unit="B", ok=ok, peer=f"formula: {max(formulas[way])}", **here)
                yield Row(metric=f"loss_difference_{way}", value=away, unit="nats", ok=away <= bound,
                          peer=f"one device, bound {bound:.2g}", **here)  # fmt: skip
    taken, ratio = {way: spread(t) for way, t in times.items()}, time_ratio(times["sparse"], times["replicated"])
    yield Row(metric="time_replicated", value=taken["replicated"].value, unit="s", low=taken["replicated"].low,
              high=taken["replicated"].high, pairs=len(times["sparse"]), **here)  # fmt: skip
    yield Row(metric="time_sparse", value=taken["sparse"].value, unit="s", low=taken["sparse"].low, high=taken["sparse"].high,
              pairs=len(times["sparse"]), peer="replicated table, dense all-reduce", time_ratio=ratio.value,
              time_ratio_low=ratio.low, time_ratio_high=ratio.high, **here)  # fmt: skip
    yield from _served(config, n, batch, expected, bound, here)


def _served(config, n, batch, expected, bound, here) -> Iterator[Row]:
    """n workers and one server more."""
    with pool(ranks=n + 1) as ranks:
        start = time.perf_counter()
        run = ranks.run(with_server, config, batch, 2, checks=False, stream=False)
        seconds = (time.perf_counter() - start) / 2
    means = [sum(v["losses"][k] for v in run.values[1:]) / n for k in range(2)]
    away = max(abs(a - b) for a, b in zip(means, expected, strict=True))
    size = 8 * place_keys({str(k): p.numel() for k, p in enumerate(ClickModel(config).dense_parameters())}, 1).elements(0)
    formula = list(server_bytes([size], n, 2)[0]) + server_bytes([size], n, 2)[1]
    rule = RowOwners(config.rows, 1)
    for step in range(2):
        counts = [make_request(clicks(config, step, w, batch=batch).ids, rule).counts for w in range(n)]
        servers, workers = row_server_bytes(counts, 8 * config.width)
        formula = [a + b for a, b in zip(formula, servers + workers, strict=True)]
    sent = [run.trace.bytes_sent(r) for r in range(n + 1)]
    yield Row(metric="bytes_server", value=sent[0], unit="B", ok=sent == formula,
              peer=f"formula: {formula[0]}, two steps, float64", **here)  # fmt: skip
    yield Row(metric="loss_difference_server", value=away, unit="nats", ok=away <= bound,
              peer=f"one device, bound {bound:.2g}", **here)  # fmt: skip
    yield Row(metric="time_server", value=seconds, unit="s", ok=away <= bound, peer="start of the run included", **here)


def _loss_bound(samples: int, losses: list[float]) -> float:
    """Float64: a mean of so many terms, each with a path of at most 1000 roundings, summed in another order; what steps with
    other roundings add to the next losses is within a factor of 10.
    """
    return 10 * (2 * samples + 1000) * torch.finfo(torch.float64).eps * max(losses)


def _case(config, n, batch) -> dict:
    return {"ranks": n, "rows": config.rows, "width": config.width, "zipf": config.zipf, "batch": batch, "dtype": "float32"}
