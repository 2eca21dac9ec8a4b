"""ZeRO 1, 2 and 3 against one device: gradients, parameters after five Adam steps, bytes sent, bytes held."""

import functools
import math
import re

import pytest
import torch

import fourwalls as fw
from fourwalls.bench.zero import native_all_gather, native_reduce_scatter
from fourwalls.collectives import ring
from fourwalls.collectives.chunks import cut
from fourwalls.cost.hardware import uniform
from fourwalls.cost.memory import state_memory
from fourwalls.memory.ledger import Ledger, step_profile
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import AdamW
from fourwalls.parallel.zero import Zero1, Zero3, bytes_sent, zero

NETWORK = uniform(1e-6, 1e9)
DOUBLE = torch.float64
STEPS, ADAM = 5, {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}  # a large eps: Adam must not hide a wrong factor
TOKENS = 2 * 6


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(kind, dropout=0.0):
    """mlp | tied | untied | frozen, in float64, the same bits everywhere."""
    if kind == "mlp":
        return MLP((5, 7, 1), dropout=dropout, dtype=DOUBLE)
    sizes = GPTConfig(vocabulary=11, length=6, width=4, layers=1, heads=2, ff=7, dropout=dropout, tied=kind != "untied")
    model = GPT(sizes, dtype=DOUBLE)
    if kind == "frozen":
        model.positions.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def loss_of(model, kind, step, micro, rank):
    """Mean loss of one micro-batch of one rank; data and dropout are functions of (step, micro, rank)."""
    generator = torch.Generator().manual_seed(hash((step, micro, rank)) % 2**31)
    torch.manual_seed(1000 * step + 100 * micro + rank)
    if kind == "mlp":
        x = torch.randn(3, 5, generator=generator, dtype=DOUBLE)
        return model(x).square().mean()
    tokens = torch.randint(0, 11, (2, 7), generator=generator)
    return model.loss(tokens[:, :-1], tokens[:, 1:])


@functools.cache
def one_device(kind, n, dropout=0.0, micros=1, clip=None, order=2.0):
    """(gradients of the last step, parameters, bound of a gradient, bound of a parameter)."""
    model = build(kind, dropout)
    optimizer = AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            for rank in range(n):
                (loss_of(model, kind, step, micro, rank) / (n * micros)).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if clip is not None:
            norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads.values()]), order)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_((clip / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
    scale = max(float(g.abs().max()) for g in grads.values())
    terms = n * micros * TOKENS * 16  # products summed in one element of a gradient, roundings of the layers behind it
    bound = terms * torch.finfo(DOUBLE).eps / 2 * scale
    return grads, {name: p.detach() for name, p in model.named_parameters()}, bound, STEPS * 2 * ADAM["lr"] / ADAM["eps"] * bound


def program(comm, kind, stage, dropout=0.0, micros=1, clip=None, order=2.0, make=zero, **options):
    """The same five steps on ranks: (gradients of the last step, parameters)."""
    model = build(kind, dropout)
    sharded = make(model, comm, stage=stage, **{**ADAM, **options})
    for step in range(STEPS):
        sharded.zero_grad()
        for micro in range(micros):
            (loss_of(model, kind, step, micro, comm.rank) / micros).backward()
        grads = sharded.full_gradients() if step == STEPS - 1 else {}
        if clip is not None:
            sharded.clip_(clip, order=order)
        sharded.step()
    assert stage < 3 or all(flat.whole.untyped_storage().nbytes() == 0 for flat in sharded._flats)
    return grads, sharded.full_parameters()


def differences(run, expected):
    """Every way in which ranks differ from one device, as "rank 1: gradient of w: off by 3e-2 (bound 1e-12), a factor 2"."""
    grads, params, grad_bound, bound = expected
    found = []
    for rank, (own_grads, own_params) in enumerate(run.values):
        if own_grads.keys() != grads.keys() or own_params.keys() != params.keys():
            found.append(f"rank {rank}: other names")
            continue
        for word, own, theirs, limit in (("gradient", own_grads, grads, grad_bound), ("parameter", own_params, params, bound)):
            for name, right in theirs.items():
                off = float((own[name] - right).abs().max())
                if not off <= limit:
                    largest = right.abs().argmax()
                    factor = float(own[name].reshape(-1)[largest] / right.reshape(-1)[largest])
                    found.append(f"rank {rank}: {word} of {name}: off by {off:.1e} (bound {limit:.1e}), a factor {factor:.3g}")
    return found


# every pair of values of two columns occurs (test_pairs_are_all_there)
CASES = [
    # ranks, stage, model, dropout, micro-batches
    (1, 1, "mlp", 0.0, 1), (1, 2, "tied", 0.1, 3), (1, 3, "untied", 0.0, 3), (1, 3, "frozen", 0.1, 1),
    (2, 1, "tied", 0.1, 1), (2, 2, "frozen", 0.0, 3), (2, 3, "mlp", 0.1, 3), (2, 3, "untied", 0.1, 1),
    (3, 1, "untied", 0.0, 3), (3, 2, "mlp", 0.1, 1), (3, 3, "tied", 0.0, 1), (3, 1, "frozen", 0.1, 3),
    (4, 1, "frozen", 0.0, 1), (4, 2, "untied", 0.1, 1), (4, 3, "tied", 0.1, 3), (4, 3, "mlp", 0.0, 3),
    (8, 1, "mlp", 0.1, 3), (8, 2, "tied", 0.0, 1), (8, 3, "frozen", 0.1, 1), (8, 3, "untied", 0.0, 1),
]  # fmt: skip


def test_pairs_are_all_there():
    values = [sorted({case[k] for case in CASES}) for k in range(5)]
    assert values == [[1, 2, 3, 4, 8], [1, 2, 3], ["frozen", "mlp", "tied", "untied"], [0.0, 0.1], [1, 3]]
    for a in range(5):
        for b in range(a):
            pairs = {(case[a], case[b]) for case in CASES}
            assert pairs == {(x, y) for x in values[a] for y in values[b]}, (a, b)


@pytest.mark.parametrize("n, stage, kind, dropout, micros", CASES)
def test_equals_one_device(n, stage, kind, dropout, micros):
    small = {"bucket_bytes": 900} if stage < 3 else {}
    run = fw.simulate(program, kind, stage, dropout, micros, ranks=n, cluster=NETWORK, checks=n < 4, **small)
    assert differences(run, one_device(kind, n, dropout, micros)) == []


def test_one_element_off_by_ten_bounds_is_seen():
    grads, params, grad_bound, bound = expected = one_device("tied", 2)

    def result(which=None, by=0.0):
        copies = [{k: v.detach().clone() for k, v in d.items()} for d in (grads, params)]
        if which is not None:
            copies[which]["blocks.0.norm2.bias"][3] += by
        return tuple(copies)

    good = result()
    assert differences(fw.Run([good, good], None, None, 0, "", 2, []), expected) == []
    for which, by, word in ((0, 10 * grad_bound, "gradient"), (1, -10 * bound, "parameter")):
        found = differences(fw.Run([good, result(which, by)], None, None, 0, "", 2, []), expected)
        assert len(found) == 1 and found[0].startswith(f"rank 1: {word} of blocks.0.norm2.bias")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_clipping_by_the_global_norm(stage, order):
    clip = 0.05
    run = fw.simulate(program, "tied", stage, clip=clip, order=order, ranks=3, cluster=NETWORK)
    assert differences(run, one_device("tied", 3, clip=clip, order=order)) == []


# --- real ranks -------------------------------------------------------------------------------------------------------
REAL = [("tied", 1, 0.1, 3), ("untied", 2, 0.0, 3), ("frozen", 3, 0.1, 3), ("mlp", 3, 0.0, 1), ("tied", 3, 0.0, 1)]


@pytest.mark.parametrize("n", [2, 4])
def test_real_ranks(n):
    with fw.pool(ranks=n) as ranks:
        for kind, stage, dropout, micros in REAL[: 5 if n == 2 else 3]:  # every stage on 4, the rest on 2
            run = ranks.run(program, kind, stage, dropout, micros, stream=False)
            assert differences(run, one_device(kind, n, dropout, micros)) == [], (kind, stage)


def overlapping(comm, stage):
    """One step of a model whose backward takes a while; marks where forward and backward lie."""
    model = MLP([192] * 7, bias=False)
    sharded = zero(model, comm, stage=stage, check_start=False, **({"bucket_bytes": 150_000} if stage < 3 else {}))
    x = torch.randn(256, 192)
    for _ in range(2):
        with comm.compute("forward", kind="forward"):
            loss = model(x).square().mean()
        comm.barrier()
        with comm.compute("backward", kind="backward"):
            loss.backward()
        sharded.step()
        sharded.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_begin_before_backward_ends(stage):
    trace = fw.run(overlapping, stage, ranks=2, stream=False).trace
    for rank in range(2):
        for backward in trace.where(rank=rank, kind="backward").events:
            inside = [
                e for e in trace.where(rank=rank, kind="mark").events
                if e.name.startswith("sum of") and e.name.endswith("begins") and backward.start < e.start < backward.end
            ]  # fmt: skip
            assert len(inside) >= 3, [e.name for e in inside]


# --- bytes on the wire --------------------------------------------------------------------------------------------------
def sent_by(run):
    """Bytes that each rank sent after the moment that it returned last."""
    begins = enumerate(value[-1] for value in run.values)
    return [sum(e.bytes for e in run.trace.where(rank=r, kind="send").events if e.start >= begin) for r, begin in begins]


def counted(comm, kind, stage, micros, **options):
    model = build(kind)
    small = {"bucket_bytes": 300} if stage < 3 else {}
    sharded = zero(model, comm, stage=stage, **small, **options)
    begin = comm.clock()
    for micro in range(micros):
        loss_of(model, kind, 0, micro, comm.rank).backward()
    sharded.step()
    frozen = sum(flat.numel for flat in sharded._flats if not flat.trained)
    trained = sum(flat.numel for flat in sharded._flats if flat.trained)
    return bytes_sent(sharded._flats, comm.size, comm.rank, stage=stage, backwards=micros), trained, frozen, begin


@pytest.mark.parametrize("n, micros, kind", [(2, 1, "frozen"), (3, 3, "frozen"), (4, 1, "tied"), (8, 1, "mlp")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_sent(stage, n, micros, kind):
    """To the byte on every rank; over all ranks 2 Psi (n-1), for stage 3 3 Psi (n-1), whether n divides or not."""
    run = fw.simulate(counted, kind, stage, micros, ranks=n, cluster=NETWORK, checks=False)
    assert sent_by(run) == [value[0] for value in run.values]
    _, trained, frozen, _ = run.values[0]
    sums, gathers = {1: (1, 1), 2: (micros, 1), 3: (micros, 2 * micros)}[stage]
    assert sum(sent_by(run)) == 8 * (n - 1) * (sums * trained + gathers * (trained + frozen))
    assert trained + frozen == sum(p.numel() for p in build(kind).parameters() if stage == 3 or p.requires_grad)


def exact_share(comm, stage):
    """A model that n divides: the formula of the paper to the byte, on each rank."""
    model = MLP((8, 16, 8), dtype=torch.float32)
    sharded = zero(model, comm, stage=stage)
    begin = comm.clock()
    model(torch.randn(2, 8)).square().mean().backward()
    sharded.step()
    return (begin,)


@pytest.mark.parametrize("stage, factor", [(1, 2), (2, 2), (3, 3)])
def test_bytes_are_the_papers(stage, factor):
    psi = 8 * 16 + 16 + 16 * 8 + 8
    for n in (2, 4, 8):
        run = fw.simulate(exact_share, stage, ranks=n, cluster=NETWORK)
        assert sent_by(run) == [4 * factor * psi * (n - 1) // n] * n


# --- bytes held ---------------------------------------------------------------------------------------------------------
WIDE = (64, 128, 64)
UNIT = 4 * (2 * 64 * 128)


def six(dtype=torch.float32):
    return torch.nn.Sequential(*(MLP(WIDE, bias=False, seed=k, dtype=dtype) for k in range(6)))


def weighed(comm, stage, make=zero, **options):
    """(live bytes when backward is over, peak in backward, peak of whole parameters), of a second step, the batch left out."""
    model, x = six(), torch.ones(1, 64)
    sharded = make(model, comm, stage=stage, **options) if stage else None
    optimizer = sharded or AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with Ledger(model, optimizer, inputs=[x, *(sharded.shards if stage == 3 else ())], lines=False) as ledger:
            ledger.phase("forward")
            loss = model(x).square().mean()
            ledger.phase("backward")
            loss.backward()
            del loss
            ledger.phase("after")
            torch.zeros(())
        optimizer.step()
    curve, story = ledger.curve(), ledger.story()
    first = next(begin for name, begin, _ in ledger.phases() if name == "backward")
    peak = max(m.total for m in curve[first:]) - x.nbytes
    return curve[story.ends()["backward"]].total - x.nbytes, peak, max(m.bytes["parameters"] for m in curve)


@functools.cache
def one_device_rest():
    """Peak of all that is neither parameter nor gradient nor optimiser state, on one device."""
    x = torch.ones(1, 64)
    ledger = step_profile(six(), lambda model: model(x).square().mean(), inputs=[x], lines=False)
    return max(m.total - m.bytes["parameters"] - m.bytes["gradients"] for m in ledger.curve())


def shards(n, stage=3):
    return state_memory(6 * UNIT // 4, optimizer="adam", precision="fp32", dp=n, stage=stage).total


@pytest.mark.parametrize("n", [2, 4])
def test_live_bytes(n):
    """When backward is over, what is alive is the table's states, to the byte. Stage 3's peak: shards and two gathered units."""
    rest = one_device_rest()
    with fw.pool(ranks=n) as ranks:
        for stage in (0, 1, 2, 3) if n == 2 else (2, 3):
            run = ranks.run(weighed, stage, stream=False)
            assert [end for end, _, _ in run.values] == [shards(n, stage)] * n, stage
        native = {"reduce_scatter": native_reduce_scatter, "all_gather": native_all_gather}
        more = [ranks.run(weighed, 3, checks=False, stream=False, **native)] if n == 2 else []
        for _, peak, gathered in (value for r in [run, *more] for value in r.values):  # test_zero_units: which and when
            assert gathered == 2 * UNIT  # in forward
            assert shards(n) + UNIT < peak <= shards(n) + 2 * UNIT + rest
        if n > 2:
            return
        for _, peak, gathered in ranks.run(weighed, 3, prefetch="early", stream=False).values:
            assert gathered == 2 * UNIT and shards(n) + 2 * UNIT < peak <= shards(n) + 3 * UNIT + rest
        for end, _, gathered in ranks.run(weighed, 3, prefetch=False, overlap=False, stream=False).values:
            assert end == shards(n) and gathered == UNIT


# --- the mutation table: what is wrong, and which check above says so ---------------------------------------------------
class Stops(Zero1):
    """Sums after the first micro-batch of a step, not after the last."""

    def _note(self, p):
        super()._note(p)
        if p is self._flats[-1].params[-1] and self._trained[0].grad is None:  # the last gradient of the first backward
            super().reduce()

    def reduce(self):
        for flat in self._flats:
            for p in flat.params:
                p.grad = None


class Keeps(Zero3):
    """Does not give a unit's memory back after its forward."""

    def _after_forward(self, unit, out):
        free, self._free = self._free, lambda unit: None
        super()._after_forward(unit, out)
        self._free = free


class Hasty(Zero3):
    """Uses a unit before its gather has ended."""

    def _gather(self, unit):
        self._begin_gather(unit)
        for flat in unit.flats:
            flat.grow().zero_()  # what fresh memory may hold
            flat.show()


class Fat(AdamW):
    """Keeps the state of the other ranks' shards too."""

    def _start(self, p, group):
        return super()._start(p, group) | {"others": torch.zeros(2 * p.numel())}


def all_reduce_then_slice(comm, x):
    return cut(ring.all_reduce(comm, x), comm.size)[comm.rank].clone()


def not_divided(comm, x):
    return ring.reduce_scatter(comm, x) * comm.size


def divided_twice(comm, x):
    return ring.reduce_scatter(comm, x) / comm.size


def without_the_last(comm, x, *, numel, out):
    ring.all_gather(comm, x, numel=numel, out=out)
    if comm.rank != comm.size - 1:
        cut(out, comm.size)[-1].zero_()
    return out


def subclass(kind):
    return lambda model, comm, stage, **options: kind(model, comm, **options)


@pytest.mark.parametrize(
    "mutant, stage, says",
    [
        ({"reduce_scatter": not_divided}, 1, "gradient of .*a factor 2$"),
        ({"reduce_scatter": not_divided}, 3, "gradient of .*a factor 2$"),
        ({"reduce_scatter": divided_twice}, 2, "gradient of .*a factor 0.5$"),
        ({"all_gather": without_the_last}, 1, "gradient of"),
        ({"all_gather": without_the_last}, 3, "gradient of"),
        ({"make": subclass(Stops)}, 1, "gradient of"),
        ({"make": subclass(Hasty)}, 3, "gradient of"),
    ],
)
def test_wrong_numbers_are_seen(mutant, stage, says):
    run = fw.simulate(program, "mlp", stage, 0.0, 3, ranks=2, cluster=NETWORK, checks=False, **mutant)  # the numbers alone
    found = differences(run, one_device("mlp", 2, 0.0, 3))
    assert any(re.search(says, line) for line in found), found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_all_reduce_in_place_of_a_reduce_scatter_is_seen(stage):
    """The numbers are right: only the bytes tell."""
    same = fw.simulate(program, "mlp", stage, reduce_scatter=all_reduce_then_slice, ranks=2, cluster=NETWORK)
    assert differences(same, one_device("mlp", 2)) == []
    run = fw.simulate(counted, "mlp", stage, 1, reduce_scatter=all_reduce_then_slice, ranks=2, cluster=NETWORK)
    assert all(sent > formula for sent, (formula, *_) in zip(sent_by(run), run.values, strict=True))


def test_memory_that_is_not_given_back_is_seen():
    with fw.pool(ranks=2) as ranks:
        for end, _, _ in ranks.run(weighed, 1, optimizer=Fat, stream=False).values:
            assert end > shards(2, 1)
        for _, _, gathered in ranks.run(weighed, 3, make=subclass(Keeps), stream=False).values:
            assert gathered > 2 * UNIT
