"""Parameter servers: equal to one device in step, stale within the bound out of step, every byte counted; wrong twins caught."""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import uniform
from fourwalls.cost.sparse import HEADER, server_bytes
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import Adam
from fourwalls.nn.text import batch as text_batch
from fourwalls.parallel import parameter_server
from fourwalls.parallel.parameter_server import Server, Worker, train_with_servers
from fourwalls.parallel.server_keys import KeyMap, place_keys, sizes_of
from fourwalls.parallel.staleness import most_behind, replay

NETWORK = uniform(1e-6, 1e9)
U = torch.finfo(torch.float64).eps / 2
STEPS, LR, EPS = 5, 1e-2, 1e-3  # a large eps: Adam divides by it, so it decides how far a rounding can carry
SAMPLES = 24  # of all workers


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- models and one device -------------------------------------------------------------------------------------------------
def make(kind):
    small = {"vocabulary": 256, "length": 8, "width": 8, "layers": 1, "heads": 2}
    if kind.startswith("gpt"):
        model = GPT(GPTConfig(**small, tied=kind != "gpt untied"), dtype=torch.float64)
        if kind == "gpt frozen":
            model.positions.weight.requires_grad_(False)
        return model
    model = MLP((6, 10, 3), bias=kind != "mlp, no bias", dtype=torch.float64)
    if kind == "mlp unused":
        model.spare = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    return model


def loss_of_rows(model, step, start, stop):
    """(mean loss of samples start to stop of the step's one batch, how many)."""
    many = stop - start
    if isinstance(model, GPT):
        tokens, targets = text_batch(0, step, batch=SAMPLES, length=8)
        part = model.loss(tokens[start:stop], targets[start:stop], reduction="sum") / 8
    else:
        x = torch.rand(SAMPLES, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[start:stop]
        part = (model(x) - x[:, :3] * x[:, 3:]).square().sum()
    return part / max(1, many), many


def shares(n, split="even"):
    ends = [SAMPLES * r // n for r in range(n + 1)]
    if split == "uneven" and n > 1:
        ends[1] = 0  # worker 0 has nothing, worker 1 more than the others
    return list(zip(ends[:-1], ends[1:], strict=True))


def optimizer(params):
    return Adam(params, lr=LR, eps=EPS)


def one_device(kind):
    """(losses, parameters, bound) after STEPS steps without any rank."""
    if kind not in _ORACLES:
        model = make(kind)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adam, losses, largest = optimizer(list(trained.values())), [], 0.0
        for step in range(STEPS):
            if step == 0:
                total = {name: torch.zeros_like(p) for name, p in trained.items()}
                for k in range(SAMPLES):
                    loss, _ = loss_of_rows(model, 0, k, k + 1)
                    grads = torch.autograd.grad(loss / SAMPLES, list(trained.values()), allow_unused=True)
                    for t, g in zip(total.values(), grads, strict=True):
                        if g is not None:
                            t += g.abs()
                largest = max(t.max().item() for t in total.values())
            loss, _ = loss_of_rows(model, step, 0, SAMPLES)
            loss.backward()
            losses.append(loss.item())
            adam.step()
            adam.zero_grad()
        path = 2000  # more roundings than lie between a token and its gradient in so small a model
        gradient = 2 * (2 * SAMPLES + path) * U * largest
        # a step moves by lr m / (sqrt(v) + eps): at most 4 lr / eps times as far apart as the gradients were; what that does to
        # the next gradients is within a factor of 10 in so few steps
        _ORACLES[kind] = losses, {n: p.detach() for n, p in trained.items()}, STEPS * 4 * LR / EPS * gradient * 10
    return _ORACLES[kind]


_ORACLES: dict = {}


def train(comm, kind, servers=1, split="even", steps=STEPS, **options):
    n = comm.size - servers

    def loss_of(model, step, worker):
        return loss_of_rows(model, step, *shares(n, split)[worker])

    return train_with_servers(comm, lambda: make(kind), optimizer, loss_of, steps=steps, servers=servers, **options)


def differences(values, kind, servers=1, split="even"):
    """What differs on some worker from one device by more than the bound: names of parameters, or "losses"."""
    losses, parameters, bound = one_device(kind)
    workers, wrong = values[servers:], set()
    weights = [b - a for a, b in shares(len(workers), split)]
    for k, loss in enumerate(losses):
        mean = sum(v["losses"][k] * w for v, w in zip(workers, weights, strict=True)) / SAMPLES
        if not abs(mean - loss) <= bound:
            wrong.add("losses")
    for v in workers:
        wrong |= {name for name, p in parameters.items() if not ((v["weights"][name] - p).abs() <= bound).all()}
    return wrong


CASES = [
    dict(n=1, kind="mlp"),
    dict(n=2, kind="gpt tied", servers=2, rule="hash"),
    dict(n=2, kind="mlp", servers=3, split="uneven"),
    dict(n=3, kind="gpt untied", servers=1),
    dict(n=3, kind="mlp unused", servers=2, split="uneven"),
    dict(n=4, kind="gpt frozen", servers=2),
    dict(n=4, kind="mlp", rule="hash", servers=4),
    dict(n=8, kind="gpt tied", servers=1),
    dict(n=8, kind="mlp", servers=3, split="uneven"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()))
def test_in_step_equals_one_device(case):
    n, kind, servers, split = case["n"], case["kind"], case.get("servers", 1), case.get("split", "even")
    run = fw.simulate(train, kind, servers, split, rule=case.get("rule", "cut"), ranks=n + servers, cluster=NETWORK)
    assert differences(run.values, kind, servers, split) == set()
    for name, first in run.values[servers]["weights"].items():
        assert all(torch.equal(v["weights"][name], first) for v in run.values[servers:])  # the same bits on every worker
    for v in run.values[:servers]:
        stale = replay(v["log"])
        assert stale.most_ahead == 0 and stale.most_behind == 0 and len(stale.behind) == n * STEPS


def test_the_comparison_sees_ten_times_the_bound():
    losses, parameters, bound = one_device("mlp")
    value = {"losses": list(losses), "weights": {n: p.clone() for n, p in parameters.items()}}
    assert differences([None, value], "mlp") == set() and bound < 1e-7
    value["weights"]["layers.0.bias"][-1] += 10 * bound
    value["losses"][0] -= 10 * bound
    assert differences([None, value], "mlp") == {"layers.0.bias", "losses"}


@pytest.fixture(scope="module")
def five():
    with fw.pool(ranks=5) as pool:
        yield pool


def test_real_ranks_in_step(five):
    run = five.run(train, "gpt tied", 1, stream=False)  # 4 workers
    assert differences(run.values, "gpt tied") == set()
    modelled = fw.simulate(train, "gpt tied", 1, ranks=5, cluster=NETWORK)
    for a, b in zip(run.values[1:], modelled.values[1:], strict=True):
        assert all(torch.equal(a["weights"][n], p) for n, p in b["weights"].items())  # the same bits
    assert [run.trace.bytes_sent(r) for r in range(5)] == [modelled.trace.bytes_sent(r) for r in range(5)]
    two = fw.run(train, "mlp", 2, ranks=4, stream=False)  # 2 workers, 2 servers
    assert differences(two.values, "mlp", 2) == set()


def test_real_ranks_out_of_step(five):
    for bound in (0, 2, None):
        run = five.run(train, "mlp", 1, steps=8, mode="out of step", bound=bound, stream=False)
        stale = replay(run.values[0]["log"])
        assert len(stale.behind) == 4 * 8 and len(stale.ahead) == 4 * 9
        if bound is not None:
            assert stale.most_ahead <= bound and stale.most_behind <= most_behind(4, bound)
        assert all(torch.isfinite(p).all() for p in run.values[1]["weights"].values())


# --- bytes -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "servers", "rule", "mode"), [
    (1, 1, "cut", "in step"), (2, 1, "cut", "out of step"), (4, 1, "cut", "in step"), (4, 4, "cut", "in step"),
    (3, 2, "hash", "out of step"), (8, 3, "cut", "in step"),
])  # fmt: skip
def test_bytes_equal_the_formula(n, servers, rule, mode):
    keys = place_keys(sizes_of(make("mlp")), servers, rule=rule)
    sizes = [8 * keys.elements(j) for j in range(servers)]
    for steps in (0, 3):
        trace = fw.simulate(train, "mlp", servers, rule=rule, mode=mode, steps=steps, ranks=n + servers, cluster=NETWORK).trace
        of_servers, of_workers = server_bytes(sizes, n, steps)
        assert [trace.bytes_sent(r) for r in range(n + servers)] == of_servers + of_workers


def test_a_worker_sends_s_the_ring_more():
    """The claim on trial: with one server its link carries n S; with n servers each link carries S, less than the ring's."""
    size = 8 * sum(p.numel() for p in make("mlp").parameters())
    for n in (2, 4, 8):
        ring = collective_cost("all_reduce", "ring", n, size // 8, NETWORK, itemsize=8).bytes_sent
        keys = {s: place_keys(sizes_of(make("mlp")), s) for s in (1, n)}
        sent = {}
        for s in (1, n):
            traces = [fw.simulate(train, "mlp", s, steps=k, ranks=n + s, cluster=NETWORK).trace for k in (1, 2)]
            sent[s] = [b - a for a, b in zip(*([t.bytes_sent(r) for r in range(n + s)] for t in traces), strict=True)]
        assert sent[1][0] == n * (size + HEADER) and set(sent[1][1:]) == {size + HEADER}
        assert sent[n][:n] == [n * (8 * keys[n].elements(j) + HEADER) for j in range(n)]
        assert set(sent[n][n:]) == {size + n * HEADER}
        assert sum(ring) == 2 * (n - 1) * size and (n == 2 or max(sent[n][:n]) - n * HEADER - n * 8 * 4 < min(ring))


# --- staleness -------------------------------------------------------------------------------------------------------------
def pace(worker, step):
    return 1e-4 * (5 if worker == 0 else 1 + worker % 2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_stays_within_its_bound_and_reaches_it(n, bound):
    for servers in (1, 2):
        options = {"mode": "out of step", "bound": bound, "seconds": pace, "ranks": n + servers, "cluster": NETWORK}
        run = fw.simulate(train, "mlp", servers, steps=8, **options)
        for v in run.values[:servers]:
            stale = replay(v["log"])
            assert stale.most_ahead == bound  # never above, and with a straggler no less
            assert stale.most_behind <= most_behind(n, bound)


def test_without_a_bound_nobody_waits():
    slow = fw.simulate(train, "mlp", 1, steps=8, seconds=pace, ranks=4, cluster=NETWORK)
    free = fw.simulate(train, "mlp", 1, steps=8, seconds=pace, mode="out of step", ranks=4, cluster=NETWORK)
    assert replay(free.values[0]["log"]).most_ahead >= 5

    def end(run, rank):  # of the last of its backwards
        return max(e.end for e in run.trace.where(rank=rank, kind="backward"))

    assert end(free, 2) < 0.5 * end(slow, 2)  # the fast worker is done long before
    assert abs(end(free, 1) - end(slow, 1)) < 0.05 * end(slow, 1)  # the straggler is as slow as it is
    again = fw.simulate(train, "mlp", 1, steps=8, seconds=pace, mode="out of step", ranks=4, cluster=NETWORK)
    assert again.trace == free.trace and again.values[0]["log"] == free.values[0]["log"]  # who comes first is not left to chance


def test_a_straggler_of_the_cluster():
    cluster = uniform(1e-6, 1e9).with_faults(straggler={1: 4})
    options = {"steps": 6, "seconds": lambda w, s: 1e-4, "mode": "out of step", "ranks": 4, "cluster": cluster}
    runs = {bound: fw.simulate(train, "mlp", 1, bound=bound, **options) for bound in (0, 2)}
    assert [replay(run.values[0]["log"]).most_ahead for run in runs.values()] == [0, 2]
    waits = [run.trace.waiting(3) for run in runs.values()]
    assert waits[1] < waits[0]  # who may run ahead waits less


class Adds:
    """Not an optimiser of anything: every step adds 1, so that weights tell their own version."""

    def __init__(self, params):
        (self.p,) = params

    def step(self):
        with torch.no_grad():
            self.p += 1


def watch(comm, servers, mode, bound=None):
    """A worker's (weights' own version, version it was told) at each read; workers differ in pace."""
    keys = place_keys({"a": 3, "b": 5}, servers)
    tensors = {"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.nn.Parameter(torch.zeros(5))}
    if comm.rank < servers:
        server = Server(comm, keys.pack(comm.rank, tensors), Adds, workers=range(servers, comm.size), mode=mode, bound=bound)
        return server.serve()
    worker, seen = Worker(comm, tensors, keys, range(servers)), []
    worker.pull()
    for step in range(6):
        for j in range(servers):
            part = keys.pack(j, tensors)
            seen.append((float(part.min()), float(part.max()), worker.versions[j]))
        with comm.compute("work", seconds=pace(comm.rank - servers, step)):
            worker.push()
    worker.done()
    return seen


@pytest.mark.parametrize(("mode", "bound"), [("in step", None), ("out of step", 1), ("out of step", None)])
def test_weights_are_of_the_version_that_is_told(mode, bound):
    for servers in (1, 2):
        values = fw.simulate(watch, servers, mode, bound, ranks=3 + servers, cluster=NETWORK).values
        for seen in values[servers:]:
            assert seen[0] == (0, 0, 0) and all(low == high == told for low, high, told in seen)
            assert len({told for *_, told in seen}) == 6  # it never reads the same weights twice


def test_replay_counts_for_itself():
    log = [("read", 1, 0, 0), ("read", 2, 0, 0), ("push", 1, 0, 1), ("read", 1, 1, 1), ("push", 1, 1, 2), ("push", 2, 0, 3)]
    stale = replay(log)
    assert stale.ahead == ((1, 0), (2, 0), (1, 1)) and stale.behind == ((1, 0), (1, 0), (2, 2)) and stale.mean_behind == 2 / 3
    assert replay([*log, ("read", 1, 2, 3)]).most_ahead == 1
    assert replay([*log, ("done", 2, 1, 3), ("read", 1, 2, 3)]).ahead[-1] == (1, 0)  # who is done holds nobody back
    with pytest.raises(ValueError, match="line 2: worker 1 has made 0 pushes, and the log says 1"):
        replay([*log[:2], ("push", 1, 1, 1)])
    with pytest.raises(ValueError, match="has not read since"):
        replay([*log[:3], ("push", 1, 1, 2)])
    assert most_behind(1, 5) == 0 and most_behind(4, 0) == 3 and most_behind(2, 3) == 7


# --- mutants ---------------------------------------------------------------------------------------------------------------
class OffByOne(Server):
    def _may_read(self, worker):
        return self.clocks[worker] - min(self.clocks[w] for w in self.active) <= self.bound + 1


class Timid(Server):
    def _may_read(self, worker):
        return self.clocks[worker] - min(self.clocks[w] for w in self.active) <= max(0, self.bound - 1)


class NoBound(Server):
    def _may_read(self, worker):
        return True


class NotAveraged(Server):
    def _average(self, pushes):
        return sum(grad for _, grad in pushes)


class PlainMean(Server):
    """The mean over workers, however many samples each had."""

    def _average(self, pushes):
        return sum(grad for _, grad in pushes) / len(pushes)


class DropsTheLast(Server):
    def _average(self, pushes):
        return super()._average(pushes[:-1] or pushes)


class OldWeights(Server):
    """Answers with the weights before the step."""

    def _apply(self, pushes):
        self.old = self.weights.detach().clone()
        super()._apply(pushes)

    def _answer(self, worker):
        new = self.weights.detach().clone()
        self.weights.data.copy_(getattr(self, "old", new))
        requests = super()._answer(worker)
        for request in requests:
            request.wait()
        self.weights.data.copy_(new)
        return requests


@pytest.mark.parametrize("mutant", [OffByOne, Timid, NoBound])
def test_a_wrong_bound_is_seen_in_the_log(mutant, monkeypatch):
    monkeypatch.setattr(parameter_server, "Server", mutant)
    run = fw.simulate(train, "mlp", 1, steps=8, mode="out of step", bound=2, seconds=pace, ranks=5, cluster=NETWORK)
    assert replay(run.values[0]["log"]).most_ahead == {OffByOne: 3, Timid: 1, NoBound: 7}[mutant]


@pytest.mark.parametrize(
    ("mutant", "split"), [(NotAveraged, "even"), (PlainMean, "uneven"), (DropsTheLast, "even"), (OldWeights, "even")]
)
def test_wrong_servers_fail(mutant, split, monkeypatch):
    monkeypatch.setattr(parameter_server, "Server", mutant)
    values = fw.simulate(train, "mlp", 1, split, ranks=4, cluster=NETWORK).values
    assert differences(values, "mlp", 1, split) == {*one_device("mlp")[1], "losses"}


def test_old_weights_are_seen_by_their_version(monkeypatch):
    monkeypatch.setitem(watch.__globals__, "Server", OldWeights)
    values = fw.simulate(watch, 1, "in step", ranks=3, cluster=NETWORK).values
    assert any(low != told for seen in values[1:] for low, _, told in seen)


def test_a_wrong_owner_fails(monkeypatch):
    class Swapped(KeyMap):
        def unpack(self, server, flat, tensors):
            super().unpack(self.servers - 1 - server, flat, tensors)

    def swapped(*args, **kwargs):
        right = place_keys(*args, **kwargs)
        return Swapped(right.servers, right.pieces)

    monkeypatch.setattr(parameter_server, "place_keys", swapped)
    values = fw.simulate(train, "mlp, no bias", 2, ranks=4, cluster=NETWORK).values
    assert differences(values, "mlp, no bias", 2) == {"layers.0.weight", "layers.2.weight", "losses"}


# --- keys and bad input ----------------------------------------------------------------------------------------------------
def test_keys_are_placed_by_a_stable_rule():
    sizes = {"a": 10, "b": 3, "c": 1, "d": 0}
    cut = place_keys(sizes, 3)
    assert cut.pieces["a"] == ((0, 0, 4), (1, 4, 7), (2, 7, 10)) and [cut.elements(j) for j in range(3)] == [6, 4, 4]
    by_hash = place_keys(sizes, 3, rule="hash")
    assert [by_hash.owners(key) for key in sizes] == [(2,), (2,), (0,), (2,)]  # fixed: a restart must find its keys again
    assert place_keys(sizes, 2, assign={"a": 1, "b": 0, "c": 1, "d": 0}).owners("a") == (1,)
    tensors = {k: torch.arange(s, dtype=torch.float32) + 10 * i for i, (k, s) in enumerate(sizes.items())}
    for keys in (cut, by_hash):
        back = {k: torch.full_like(t, -1) for k, t in tensors.items()}
        for j in range(3):
            assert keys.pack(j, tensors).numel() == keys.elements(j)
            keys.unpack(j, keys.pack(j, tensors), back)
        assert all(torch.equal(back[k], tensors[k]) for k in sizes)


def test_a_key_that_no_server_owns_is_named():
    keys = place_keys({"layers.0.weight": 4, "layers.0.bias": 2}, 2)
    with pytest.raises(ValueError, match="owns the key 'layers.0.wieght'; there are 2 keys; did you mean 'layers.0.weight'"):
        keys.owners("layers.0.wieght")
    with pytest.raises(ValueError, match="no server owns the key 'extra'"):
        keys.pack(0, {"layers.0.weight": torch.zeros(4), "layers.0.bias": torch.zeros(2), "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="key 'layers.0.bias' has an owner, but no tensor"):
        keys.pack(0, {"layers.0.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match="no server owns the key 'b': it is given to None, and servers are 0 to 1"):
        place_keys({"a": 1, "b": 1}, 2, assign={"a": 0})
    with pytest.raises(ValueError, match="'b': it is given to 2"):
        place_keys({"a": 1, "b": 1}, 2, assign={"a": 0, "b": 2})
    with pytest.raises(fw.RankError, match="no server owns the key 'layers.0.bias'"):
        fw.simulate(train, "mlp", 1, assign={"layers.0.weight": 0}, ranks=2, cluster=NETWORK)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"servers": 3}, "servers is 3 of 3 ranks; there is at least 1, and at least 1 worker: 1 to 2"),
        ({"servers": 0}, "servers is 0"),
        ({"mode": "async"}, "allowed: 'in step', 'out of step'"),
        ({"mode": "out of step", "bound": -1}, "bound is -1"),
        ({"mode": "out of step", "bound": 1.5}, "bound is 1.5"),
        ({"bound": 2}, "nobody can run ahead"),
        ({"rule": "random"}, "allowed: cut, hash"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(fw.RankError, match=word):
        fw.simulate(train, "mlp", ranks=3, cluster=NETWORK, **options)


def test_models_that_cannot_be_served():
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"different dtypes: .*float32.*float64"):
        sizes_of(mixed)
    with pytest.raises(ValueError, match="no parameter that is trained"):
        place_keys(sizes_of(torch.nn.ReLU()), 1)
    assert sizes_of(make("gpt tied")).keys() & {"head.weight"} == set()
    with pytest.raises(ValueError, match="2 servers are given, and the keys lie on 1"):
        Worker(None, {}, place_keys({"a": 1}, 1), [0, 1])


def pushes(comm, fault, mode):
    """Two workers, of which the second pushes something odd in its second step."""

    def loss_of(model, step, worker):
        loss, samples = loss_of_rows(model, step, *shares(2)[worker])
        odd = worker == 1 and step == 1
        return loss * (float("nan") if odd and fault == "nan" else 1.0), fault if odd and fault != "nan" else samples

    return train_with_servers(comm, lambda: make("mlp"), optimizer, loss_of, steps=3, mode=mode)


@pytest.mark.parametrize("mode", ["in step", "out of step"])
def test_a_push_that_is_no_gradient_is_named_before_a_server_sees_it(mode):
    says = "rank 2, push 1: nan or inf in the gradient of layers.0.weight and of 3 more; no server has seen it"
    with pytest.raises(fw.RankError, match=says) as caught:
        fw.simulate(pushes, "nan", mode, ranks=3, cluster=NETWORK)
    assert caught.value.rank == 2
    for samples in (-1, 1.5, True):
        with pytest.raises(fw.RankError, match="rank 2: samples is .*; a whole number of at least 0"):
            fw.simulate(pushes, samples, mode, ranks=3, cluster=NETWORK)


def test_owners_by_hash_are_the_same_in_every_process():
    """Python's own hash of a name is not: a server that starts again would own other keys."""
    keys = place_keys({name: 1 for name in ("layers.0.weight", "layers.0.bias", "head", "x")}, 1000, rule="hash")
    assert [keys.owners(name) for name in keys.pieces] == [(260,), (224,), (861,), (58,)]
