"""Data parallelism equals one device: gradients, and parameters after 5 Adam steps, in every mode; and wrong twins are caught.

The oracle is one device, float64, on all micro-batches of all ranks in order. An entry of a gradient is a sum of contributions,
each rounded at most K times on its way, on both sides: |difference| <= 2 K u A, with A the largest sum of absolute contributions.
"""

import itertools
from functools import partial

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.layers import cross_entropy
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import Adam
from fourwalls.parallel.batches import reseed
from fourwalls.parallel.compare import explain_difference
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.token_loss import count_tokens, summed_loss

NETWORK = uniform(1e-6, 1e9)
U = torch.finfo(torch.float64).eps / 2
STEPS, LR, EPS = 5, 1e-2, 1e-3  # a large eps: Adam divides by it, so it decides how far a rounding can carry
LENGTH, VOCABULARY = 6, 11
FACTORS = {
    "model": ("mlp", "tied", "untied"),
    "ranks": (1, 2, 3, 4, 8),
    "mode": ("overlapped", "bucketed", "naive"),
    "bucket": (1, 3000, 10**6),
    "accumulation": (1, 3),
    "tokens": (False, True),  # whether lengths vary, and the loss is weighted by tokens
    "frozen": (False, True),
    "dropout": (0.0, 0.2),
}


def pairwise(factors):
    """Few combinations in which every pair of values of any two factors occurs; greedy, always the same."""
    names = list(factors)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    pairs = {c: set(itertools.combinations(every[c].items(), 2)) for c in range(len(every))}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda c: len(pairs[c] & left))
        left -= pairs[best]
        chosen.append(every[best])
    return chosen


CASES = pairwise(FACTORS)


def build(case):
    if case["model"] == "mlp":
        model = MLP((LENGTH, 16, 12, VOCABULARY), dropout=case["dropout"], seed=3, dtype=torch.float64)
    else:
        sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "width": 8, "layers": 1, "heads": 2}
        model = GPT(GPTConfig(**sizes, tied=case["model"] == "tied", dropout=case["dropout"]), dtype=torch.float64)
    if case["frozen"]:
        list(model.parameters())[2].requires_grad_(False)
    return model


def batch(case, step, number):
    """Micro-batch `number` of a step, counted over all ranks: 2 rows. With tokens, lengths vary, and number 1 has no target."""
    dice = torch.Generator().manual_seed(1000 * step + number)
    if case["model"] == "mlp":
        x = torch.randn(2, LENGTH, generator=dice, dtype=torch.float64)
        y = torch.randint(0, VOCABULARY, (2,), generator=dice)
    else:
        x = torch.randint(0, VOCABULARY, (2, LENGTH), generator=dice)
        y = torch.randint(0, VOCABULARY, (2, LENGTH), generator=dice)
    if case["tokens"]:
        lengths = torch.randint(0, 1 + y.shape[-1], (2, 1), generator=dice)
        y[torch.arange(y.shape[-1]).expand(2, -1) >= lengths if y.dim() == 2 else torch.arange(2) >= lengths.view(2) % 3] = -100
        if number == 1:
            y[:] = -100
    return x, y


def local_loss(case, model, x, y):
    """(what to call backward on, tokens): a sum, or the mean over this micro-batch divided by the number of micro-batches."""
    if case["tokens"]:
        return summed_loss(model(x), y)
    return cross_entropy(model(x), y) / case["accumulation"], count_tokens(y)


def named_grads(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def train(comm, case, make=DataParallel, steps=STEPS, fault=None, **options):
    """(gradients of the first step, parameters at the end) of this rank."""
    model = build(case)
    average = "tokens" if case["tokens"] else "ranks"
    if fault == "no division":
        average = "none"
    dp = make(model, comm, mode=case["mode"], bucket_bytes=case["bucket"], average=average, **options)
    adam = Adam((p for p in model.parameters() if p.requires_grad), lr=LR, eps=EPS)
    m, first = case["accumulation"], None
    for step in range(steps):
        adam.zero_grad()
        tokens = 0
        for k in range(m):
            number = comm.rank * m + k
            x, y = batch(case, step, number)
            reseed(0, step, number)
            loss, count = local_loss(case, model, x, y)
            tokens += count
            if k < m - 1:
                with dp.no_sync():
                    loss.backward()
            else:
                with comm.compute("backward", kind="backward"):
                    loss.backward()
        dp.synchronise(tokens=tokens if average == "tokens" else None)
        if fault == "divided twice":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(comm.size)
        first = first or named_grads(model)
        adam.step()
    if fault is None:
        dp.check_equal()
    return first, {n: p.detach().clone() for n, p in model.named_parameters()}


_ORACLES: dict = {}


def one_device(case):
    """(gradients, parameters, bound of gradients, bound of parameters) without any rank."""
    key = tuple(v for k, v in case.items() if k not in ("mode", "bucket"))
    if key not in _ORACLES:
        model = build(case)
        adam = Adam((p for p in model.parameters() if p.requires_grad), lr=LR, eps=EPS)
        numbers, first, size = case["ranks"] * case["accumulation"], None, {}
        for step in range(STEPS):
            batches = [batch(case, step, k) for k in range(numbers)]
            total = max(1, sum(count_tokens(y) for _, y in batches)) if case["tokens"] else case["ranks"]
            sums = {}
            for k, (x, y) in enumerate(batches):
                adam.zero_grad()
                reseed(0, step, k)
                (local_loss(case, model, x, y)[0] / total).backward()
                for n, p in model.named_parameters():
                    if p.grad is not None:
                        sums[n] = sums.get(n, 0) + p.grad
                        size[n] = size.get(n, 0) + p.grad.abs() if step == 0 else size[n]
            for n, p in model.named_parameters():
                p.grad = sums.get(n)
            first = first or named_grads(model)
            adam.step()
        lengths = sum(model.sizes) if case["model"] == "mlp" else 2 * (10 * 8 + LENGTH) + 8 + VOCABULARY
        bound = 2 * (2 * numbers * LENGTH + lengths) * U * max(s.max().item() for s in size.values())
        # a step of Adam moves by lr m / (sqrt(v) + eps): at most 4 lr / eps times as far apart as the gradients were; what that
        # does to later gradients is allowed for by a factor of 10
        moved = STEPS * 4 * LR / EPS * bound * 10
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        _ORACLES[key] = first, parameters, bound, moved
    return _ORACLES[key]


def verdict(case, values):
    """ "" or what the first wrong rank is told."""
    grads, parameters, bound, moved = one_device(case)
    known = {"world_size": case["ranks"], "accumulation": case["accumulation"]}
    for got_grads, got in values:
        word = explain_difference(got_grads, grads, bound=bound, **known)
        word = word or explain_difference(got, parameters, bound=moved, what="parameters", **known)
        if word:
            return word
    return ""


def test_the_cases_hold_every_pair():
    assert len(CASES) < 30
    for (a, left), (b, right) in itertools.combinations(FACTORS.items(), 2):
        assert {(c[a], c[b]) for c in CASES} == set(itertools.product(left, right))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_equals_one_device(case):
    values = fw.simulate(train, case, ranks=case["ranks"], cluster=NETWORK).values
    assert verdict(case, values) == ""
    for grads, parameters in values[1:]:  # and the ranks are equal to the last bit
        assert all(torch.equal(x, values[0][1][n]) for n, x in parameters.items())
        assert all(g is values[0][0][n] or torch.equal(g, values[0][0][n]) for n, g in grads.items())


@pytest.mark.parametrize("which", ["gradients", "parameters"])
def test_the_comparison_sees_ten_times_the_bound(which):
    for case in CASES[:3]:
        grads, parameters, bound, moved = one_device(case)
        assert bound < 1e-11 and moved < 1e-7
        off = {n: None if x is None else x.clone() for n, x in (grads if which == "gradients" else parameters).items()}
        last = [x for x in off.values() if x is not None][-1].view(-1)
        last[-1] += 10 * (bound if which == "gradients" else moved)
        assert verdict(case, [(off, parameters) if which == "gradients" else (grads, off)])
    assert verdict(case, [(grads, parameters)]) == ""


# --- the same on real ranks -------------------------------------------------------------------------------------------
NAMES = ("model", "mode", "bucket", "accumulation", "tokens", "frozen", "dropout")
REAL = [  # (case, all_reduce)
    (("tied", "overlapped", 3000, 3, True, True, 0.2), "ring"),
    (("untied", "overlapped", 1, 1, False, False, 0.0), "native"),
    (("mlp", "overlapped", 3000, 1, True, False, 0.2), "shared_memory"),
    (("mlp", "bucketed", 10**6, 3, False, True, 0.0), "native"),
    (("tied", "naive", 1, 1, True, False, 0.0), "ring"),
]
REAL = [(dict(zip(NAMES, values, strict=True)), all_reduce) for values, all_reduce in REAL]


@pytest.fixture(scope="module", params=[2, 4])
def pool(request):
    with fw.pool(ranks=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(("case", "all_reduce"), REAL, ids=lambda x: x if isinstance(x, str) else f"{x['model']}-{x['mode']}")
def test_real_ranks_equal_one_device(pool, case, all_reduce):
    case = case | {"ranks": pool.ranks}
    run = pool.run(train, case, all_reduce=all_reduce, stream=False)
    assert verdict(case, run.values) == ""


def test_real_ranks_have_the_simulators_bits(pool):
    case = REAL[0][0] | {"ranks": pool.ranks}
    real = pool.run(train, case, stream=False).values
    modelled = fw.simulate(train, case, ranks=pool.ranks, cluster=NETWORK).values
    assert all(torch.equal(x, modelled[0][1][n]) for n, x in real[-1][1].items())


# --- the injected all-reduce ------------------------------------------------------------------------------------------
def slow_sum(comm, x):
    """A reader's all-reduce: everything goes round; returns a new tensor."""
    total, away = x.clone(), x.clone()
    for _ in range(comm.size - 1):
        away = comm.exchange(away, (comm.rank + 1) % comm.size, torch.empty_like(x), (comm.rank - 1) % comm.size)
        total += away
    return total


def forbidden(*args, **kwargs):
    raise AssertionError("a native collective was called")


def without_native(comm, case, all_reduce, steps=STEPS):
    import torch.distributed as dist

    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]
    kept = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    try:
        for n in kept:
            setattr(dist, n, forbidden)
        return train(comm, case, all_reduce=all_reduce, steps=steps, fault="")
    finally:
        for n, function in kept.items():
            setattr(dist, n, function)


def test_the_injected_all_reduce_carries_the_bytes(pool):
    n = pool.ranks
    case = REAL[0][0] | {"ranks": n, "accumulation": 1, "tokens": False}
    runs = [pool.run(without_native, case, slow_sum, steps=s, stream=False) for s in (0, STEPS)]
    assert verdict(case, runs[1].values) == ""
    for r in range(n):
        carried = runs[1].trace.bytes_sent(r) - runs[0].trace.bytes_sent(r)
        assert carried == STEPS * (n - 1) * 8 * sum(p.numel() for p in build(case).parameters() if p.requires_grad)
    with pytest.raises(fw.RankError, match="native collective"), fw.pool(ranks=2) as own:
        own.run(without_native, case | {"ranks": 2}, "native", steps=1, stream=False)


# --- wrong twins ------------------------------------------------------------------------------------------------------
class Dropped(DataParallel):
    def _give(self, label, x, index=None):
        if index != 1:
            super()._give(label, x, index)


class NoWait(DataParallel):
    """Uses gradients that are still on their way."""

    def synchronise(self, **words):
        join, self._lane.join = self._lane.join, list
        divisor = super().synchronise(**words)
        self._lane.join = join
        self._early = {p: p.grad.clone() for p in self.module.parameters() if p.grad is not None}
        join()
        for p, early in self._early.items():
            p.grad = early
        return divisor


class AtFirst(DataParallel):
    """Takes the micro-batches inside no_sync() for those to send, and the last one for one to keep."""

    def _arrived(self, name):
        self._sync = not self._sync
        super()._arrived(name)
        self._sync = not self._sync


class FirstOnly(DataParallel):
    """Sends when the first gradient of a bucket comes."""

    def _arrived(self, name):
        bucket = self._home[name]
        if self._sync and not bucket.launched:
            self._launch(bucket)


MEAN = {"model": "untied", "ranks": 4, "mode": "overlapped", "bucket": 1500, "frozen": False, "dropout": 0.0}
PLAIN = MEAN | {"accumulation": 1, "tokens": False}
ACCUMULATED = MEAN | {"accumulation": 3, "tokens": False}
FAULTS = {  # name -> (case, options of train, what the named check says)
    "no division": (PLAIN, {"fault": "no division"}, "exactly 4 times too large: the number of ranks"),
    "division twice": (PLAIN, {"fault": "divided twice"}, "exactly 4 times too small: the number of ranks"),
    "no division, accumulated": (ACCUMULATED, {"fault": "no division"}, "exactly 4 times too large: the number of ranks"),
    "dropped bucket": (PLAIN, {"make": Dropped}, "differ from one device's; first blocks"),
    "missing wait": (PLAIN, {"make": NoWait, "fault": ""}, "differ from one device's"),
    "packed too early": (PLAIN, {"make": FirstOnly}, "differ from one device's"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_twins_differ_from_one_device(name):
    case, options, says = FAULTS[name]
    wrong = partial(train, **({"fault": ""} | options))  # checks off: weights that part would be refused before they are compared
    values = fw.simulate(wrong, case, ranks=case["ranks"], cluster=NETWORK, checks=False).values
    assert says in verdict(case, values)
    assert verdict(case, fw.simulate(train, case, ranks=case["ranks"], cluster=NETWORK).values) == ""


def test_sync_on_the_wrong_micro_batch_is_refused():
    with pytest.raises(fw.RankError, match=r"under no_sync\(\), after its bucket has been sent"):
        fw.simulate(train, ACCUMULATED | {"accumulation": 2}, make=AtFirst, ranks=2, cluster=NETWORK)
