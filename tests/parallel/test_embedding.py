"""Rows that travel: equal to one device, each row once, every byte counted; and wrong twins are caught."""

import pytest
import torch
import torch.nn.functional as F

import fourwalls as fw
from fourwalls.collectives.all_to_all import exchange_counts
from fourwalls.cost.collectives import chunk_sizes, collective_cost
from fourwalls.cost.hardware import uniform
from fourwalls.cost.sparse import COUNT, row_server_bytes, server_bytes, sparse_exchange
from fourwalls.nn.clicks import ClickConfig, ClickModel, clicks
from fourwalls.nn.init import draw
from fourwalls.nn.optim import Adam
from fourwalls.nn.sparse import RowAdagrad, RowAdam, merge_rows
from fourwalls.parallel.embedding import ShardedEmbedding, hybrid_step, replicated_step
from fourwalls.parallel.row_server import train_clicks_with_servers
from fourwalls.parallel.rows import RowOwners, make_request

NETWORK = uniform(1e-6, 1e9)
CONFIG = ClickConfig(fields=(50, 40, 7), width=4, inputs=3, hidden=5)
U = torch.finfo(torch.float64).eps / 2
BATCH, STEPS, LR, EPS = 24, 5, 1e-2, 1e-3  # BATCH: of all ranks. A large eps: Adam divides by it, so it decides how far
PATH = 100  # more roundings than lie between a sample and its gradient: 15 + 5 + 1 products and sums, forward and backward


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def one_device(kind, one_owner=False):
    """(losses, table, dense parameters, bound) after STEPS steps, without any rank; kind: the optimiser of rows."""
    key = (kind, one_owner)
    if key not in _ORACLES:
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
        _ORACLES[key] = losses, table.detach(), [p.detach() for p in model.dense_parameters()], bound
    return _ORACLES[key]


_ORACLES: dict = {}


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


# --- bad input -------------------------------------------------------------------------------------------------------------
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


# --- mutants: each is a ShardedEmbedding with one fault -------------------------------------------------------------------
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
