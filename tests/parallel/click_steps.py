"""Steps of a click model by every way that rows can travel, the one device they are compared with, the bytes that they send."""

import functools

import torch

import fourwalls as fw
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import uniform
from fourwalls.nn.clicks import ClickConfig, ClickModel, clicks
from fourwalls.nn.optim import Adam
from fourwalls.nn.sparse import RowAdagrad, RowAdam
from fourwalls.parallel.embedding import ShardedEmbedding, hybrid_step, replicated_step
from fourwalls.parallel.rows import RowOwners

NETWORK = uniform(1e-6, 1e9)
CONFIG = ClickConfig(fields=(50, 40, 7), width=4, inputs=3, hidden=5)
U = torch.finfo(torch.float64).eps / 2
BATCH, STEPS, LR, EPS = 24, 5, 1e-2, 1e-3  # BATCH: of all ranks. A large eps: Adam divides by it, so it decides how far
PATH = 100  # more roundings than lie between a sample and its gradient: 15 + 5 + 1 products and sums, forward and backward

torch.set_num_threads(1)  # small products: threads would only wait for each other


# --- one device ----------------------------------------------------------------------------------------------------------
def parts(n, kind="even"):
    """Samples (start, stop) of each rank in the one batch."""
    ends = [BATCH * r // n for r in range(n + 1)]
    if kind == "empty rank":
        ends[: min(2, n)] = [0] * min(2, n)
    return list(zip(ends[:-1], ends[1:], strict=True))


def whole_batch(step, one_owner=False):
    batch = clicks(CONFIG, step, batch=BATCH, dtype=torch.float64)
    if one_owner:  # only ids that are 0 mod 8 in the one table, for every number of ranks
        offsets = torch.tensor(CONFIG.offsets)
        packed = (batch.ids + offsets) // 8 * 8
        low, high = offsets + (-offsets) % 8, offsets + torch.tensor(CONFIG.fields) - 1
        batch.ids.copy_(packed.clamp(min=low).minimum(high // 8 * 8) - offsets)
    return batch


@functools.cache
def one_device(kind, one_owner=False):
    """(losses, table, dense parameters, bound) after STEPS steps, without any rank; kind: the optimiser of rows."""
    model = ClickModel(CONFIG, dtype=torch.float64)
    table = model.embedding.weight
    dense, rows, losses, largest = Adam(model.dense_parameters(), lr=LR, eps=EPS), make_rows(kind, table.data), [], 0.0
    for step in range(STEPS):
        batch = whole_batch(step, one_owner)
        if step == 0:
            largest = largest_sum(model, batch)
        loss = model.loss(batch)
        loss.backward()
        losses.append(loss.item())
        dense.step()
        ids = torch.unique(batch.ids + model.offsets)
        rows.step(ids, table.grad[ids])
        dense.zero_grad()
        table.grad = None
    gradient = 2 * (2 * BATCH + PATH) * U * largest
    # a step moves by lr m / (sqrt(v) + eps): at most 4 lr / eps times as far apart as the gradients were; what that does to
    # the next gradients is within a factor of 10 in so few steps
    bound = STEPS * 4 * LR / EPS * gradient * 10
    return losses, table.detach(), [p.detach() for p in model.dense_parameters()], bound


def largest_sum(model, batch):
    """The largest, over all parameters, of the sum over samples of |gradient|: what roundings of a sum are relative to."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for k in range(len(batch)):
        grads = torch.autograd.grad(model.loss(batch.rows(k, k + 1), samples=len(batch)), list(model.parameters()))
        total = [t + g.abs() for t, g in zip(total, grads, strict=True)]
    return max(t.max().item() for t in total)


def make_rows(kind, table):
    return RowAdam(table, lr=LR, eps=EPS) if kind == "adam" else RowAdagrad(table, lr=LR, eps=EPS)


# --- on ranks --------------------------------------------------------------------------------------------------------------
def train(
    comm,
    way="sparse",
    kind="adam",
    split="even",
    ids=torch.int64,
    rule="modulo",
    one_owner=False,
    make=ShardedEmbedding,
    steps=STEPS,
):
    """Losses, the whole table and the dense parameters of this rank."""
    embedding = None
    if way == "sparse":
        embedding = make(comm, CONFIG.rows, CONFIG.width, rule=rule, dtype=torch.float64)
    model = ClickModel(CONFIG, embedding=embedding, dtype=torch.float64)
    table = embedding.shard if embedding is not None else model.embedding.weight.data
    dense, rows = Adam(model.dense_parameters(), lr=LR, eps=EPS), make_rows(kind, table)
    step_once = hybrid_step if way == "sparse" else replicated_step
    losses = []
    for step in range(steps):
        mine = whole_batch(step, one_owner).rows(*parts(comm.size, split)[comm.rank]).to(torch.float64, ids=ids)
        losses.append(step_once(comm, model, mine, dense, rows))
    state = rows.m if kind == "adam" else rows.squares
    return {"losses": losses, "table": embedding.whole() if embedding is not None else table, "dense": model.dense_parameters(),
            "state": state.nbytes}  # fmt: skip


def differences(values, kind="adam", one_owner=False):
    """Names of what differs on some rank from one device by more than the bound."""
    losses, table, dense, bound = one_device(kind, one_owner)
    wrong = set()
    for v in values:
        if any(not abs(a - b) <= bound for a, b in zip(v["losses"], losses, strict=True)):
            wrong.add("losses")
        if not ((v["table"] - table).abs() <= bound).all():
            wrong.add("table")
        if any(not ((p - q).abs() <= bound).all() for p, q in zip(v["dense"], dense, strict=True)):
            wrong.add("dense")
    return wrong


# --- bytes -----------------------------------------------------------------------------------------------------------------
def requests(n, split, rule, step, one_owner=False):
    """counts[r][q]: different ids that rank r asks of rank q."""
    owners, offsets = RowOwners(CONFIG.rows, n, rule), torch.tensor(CONFIG.offsets)
    ids = whole_batch(step, one_owner).ids + offsets
    return [[len({int(i) for i in ids[a:b].flatten() if owners.owner(i) == q}) for q in range(n)] for a, b in parts(n, split)]


def sent_by_all_reduce(n, elements, itemsize=8):
    return collective_cost("all_reduce", "ring", n, elements, NETWORK, itemsize=itemsize).bytes_sent


def per_step(n, **case):
    """Bytes each rank sends in each step: two runs, the tables' gathering at the end and all else taken away."""
    runs = [fw.simulate(train, ranks=n, steps=s, cluster=NETWORK, **case).trace for s in (0, 1, 2)]
    sent = [[t.bytes_sent(r) for r in range(n)] for t in runs]
    return [[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(sent[:-1], sent[1:], strict=True)]
