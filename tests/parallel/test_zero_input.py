"""What ZeRO is given: small, tied, unused and mixed parameters, groups, other optimisers and collectives; and what it refuses."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.cost.memory import bytes_per_parameter, state_memory
from fourwalls.cost.published import published
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import SGD, AdamW, clip_
from fourwalls.parallel.zero import Zero1, Zero3, zero

NETWORK = uniform(1e-6, 1e9)
DOUBLE = torch.float64
ADAM = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
BOUND = 1e-9  # five steps, each off by at most 2 lr / eps times a gradient's error: fewer than 1000 sums of numbers below 100


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulate(program, *args, ranks, **options):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **options)


def data(step, rank, width):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator, dtype=DOUBLE)


def train(comm, make, width, stage, *, steps=5, clip=None, order=2.0, groups=None, loss=None, **options):
    """(parameters after the steps, norms before clipping)."""
    model, norms = make(), []
    loss = loss or (lambda model, x: model(x).square().mean())
    named = dict(model.named_parameters())
    own = None if groups is None else [{**g, "params": [named[name] for name in g["params"]]} for g in groups]
    sharded = zero(model, comm, stage=stage, groups=own, **{**ADAM, **options})
    for step in range(steps):
        loss(model, data(step, comm.rank, width)).backward()
        if clip:
            norms.append(sharded.clip_(clip, order=order))
        sharded.step()
        sharded.zero_grad()
    return sharded.full_parameters(), norms


def one_device(make, width, n, *, steps=5, clip=None, order=2.0, groups=None, loss=None, optimizer=AdamW, **options):
    model, norms = make(), []
    loss = loss or (lambda model, x: model(x).square().mean())
    named = dict(model.named_parameters())
    own = list(named.values()) if groups is None else [{**g, "params": [named[m] for m in g["params"]]} for g in groups]
    stepper = optimizer(own, **{**ADAM, **options})
    for step in range(steps):
        for rank in range(n):
            (loss(model, data(step, rank, width)) / n).backward()
        if clip:
            flat = torch.cat([p.grad.reshape(-1) for p in named.values() if p.grad is not None])
            norms.append(torch.linalg.vector_norm(flat, order))
            for p in named.values():
                p.grad.mul_((clip / (norms[-1] + 1e-6)).clamp(max=1))
        stepper.step()
        stepper.zero_grad()
    return {name: p.detach() for name, p in named.items()}, norms


def assert_same(run, expected):
    for params, norms in run.values:
        assert params.keys() == expected[0].keys()
        for name, right in expected[0].items():
            assert (params[name] - right).abs().max() <= BOUND, name
        assert all(abs(a - b) <= BOUND for a, b in zip(norms, expected[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(norms, run.values[0][1], strict=True))  # the same bits on every rank


# --- trials ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_c34_fewer_elements_than_ranks(stage, order):
    """A bias of 1 element and a weight of 5 on 4 ranks; on 8, two ranks hold nothing at all."""
    make = lambda: MLP((5, 1), dtype=DOUBLE)  # noqa: E731
    for n in (4, 8):
        run = simulate(train, make, 5, stage, clip=0.3, order=order, ranks=n)
        assert_same(run, one_device(make, 5, n, clip=0.3, order=order))


def two_shards(comm, order):
    """Two ranks whose shards of the gradient have norms 3 and 4."""
    model = torch.nn.Linear(2, 1, bias=False)
    sharded = Zero1(model, comm, check_start=False)
    model.weight.grad = None
    (model.weight * torch.tensor([[3.0, -4.0]])).sum().backward()
    return float(sharded.norm(order)), float(sharded.clip_(1.0, order=order)), float(sharded.norm(order))


def test_c31_norms_of_shards():
    """3 and 4 make 5; and the largest element is 4. Not the largest of the norms, not their sum."""
    for order, norm in ((2, 5.0), (math.inf, 4.0)):
        for before, told, after in simulate(two_shards, order, ranks=2).values:
            assert before == told == norm and after == pytest.approx(1, rel=1e-5)
    with pytest.raises(fw.RankError, match="order is 1; allowed: 2"):
        simulate(two_shards, 1, ranks=2)


class Table(torch.nn.Module):
    """A table of 5 rows that both ends of a pipeline hold."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(15.0, dtype=DOUBLE).view(5, 3).sin())


def tokens(step, replica):
    return torch.tensor([(3 * step + replica) % 5, (step + 2 * replica + 1) % 5])


def pipeline(comm):
    """Rank = 2 * stage + replica: stage 0 looks rows up, stage 1 multiplies by the same table. ZeRO within each stage."""
    stage, replica = divmod(comm.rank, 2)
    both_ends, copies = comm.split(replica), comm.split(2 + stage)
    model = Table()
    sharded = Zero1(model, copies, tied={"weight": both_ends}, **ADAM)
    for step in range(4):
        x = tokens(step, replica)
        if stage == 0:
            out = model.weight[x]
            both_ends.send(out.detach(), 1)
            out.backward(both_ends.recv(torch.empty_like(out), 1))
        else:
            rows = both_ends.recv(torch.empty(2, 3, dtype=DOUBLE), 0).requires_grad_()
            F.cross_entropy(rows @ model.weight.t(), x).backward()
            both_ends.send(rows.grad, 0)
        sharded.step()
        sharded.zero_grad()
    return model.weight.detach()


def test_c22_tied_ends_of_a_pipeline():
    model = Table()
    optimizer = AdamW(model.parameters(), **ADAM)
    for step in range(4):
        for replica in range(2):
            x = tokens(step, replica)
            (F.cross_entropy(model.weight[x] @ model.weight.t(), x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight in simulate(pipeline, ranks=4).values:
        assert (weight - model.weight.detach()).abs().max() <= BOUND
    with pytest.raises(fw.RankError, match="stage 2 sums during backward.*use stage 1"):
        simulate(lambda comm: zero(Table(), comm, stage=2, tied={"weight": comm}), ranks=2)
    with pytest.raises(fw.RankError, match="'wait' is no trained parameter"):
        simulate(lambda comm: zero(Table(), comm, stage=1, tied={"wait": comm}), ranks=2)


def test_i08_i10_bytes_a_parameter():
    gigabytes = [float(state_memory(7 * 10**9, dp=8, stage=k).total) / 1e9 for k in (1, 2, 3)]
    assert gigabytes == [38.5, 26.25, 14.0]
    assert bytes_per_parameter("adam", "mixed").total == bytes_per_parameter("adam", "fp32").total == 16


def test_zero_table_2():
    """The largest model that 64 GPUs of 32 GB hold; further rows are the first, as it is printed, times the model parallelism."""
    table = published("zero_table2_maxmodel")
    scale = {"B": 10**9, "T": 10**12}
    columns = {"theory_baseline": 0, "theory_os": 1, "theory_os_g": 2, "theory_os_g_p": 3}
    for row in table:
        assert int(row["gpus"]) == 64 * int(row["mp"])
        for column, stage in columns.items():
            text, unit = row[column][:-1], scale[row[column][-1]]
            digit = Fraction(unit, 10 ** len(text.partition(".")[2]))
            first = table.row(mp=1)[column]
            largest = 32 * 10**9 / Fraction(state_memory(10**6, dp=64, stage=stage).total, 10**6)  # parameters
            if row["mp"] == "1":
                assert abs(Fraction(text) * unit - largest) <= digit / 2
            assert abs(Fraction(text) * unit - Fraction(first[:-1]) * 10**9 * int(row["mp"])) < digit


# --- parameters of all kinds ------------------------------------------------------------------------------------------------
class Odd(torch.nn.Module):
    """A layer used twice, one never used, one frozen; `mixed`: one in float32."""

    def __init__(self, mixed=False):
        super().__init__()
        self.twice = MLP((4, 4), seed=1, dtype=DOUBLE)
        self.never = MLP((4, 2), seed=2, dtype=DOUBLE)
        self.frozen = MLP((4, 4), seed=3, dtype=DOUBLE).requires_grad_(False)
        self.last = MLP((4, 3), seed=4, dtype=torch.float32 if mixed else DOUBLE)
        self.units = [self.twice, self.never, self.frozen, self.last]

    def forward(self, x):
        x = self.frozen(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return self.last(x.to(self.last.layers[0].weight.dtype)).double()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_used_twice_never_and_frozen(stage):
    """What never has a gradient takes no step: no decay, no moments, as on one device."""
    expected = one_device(Odd, 4, 3)
    assert torch.equal(expected[0]["never.layers.0.weight"], Odd().never.layers[0].weight)
    assert_same(simulate(train, Odd, 4, stage, ranks=3), expected)
    if stage == 3:
        assert_same(simulate(train_in_units, ranks=3), expected)


def train_in_units(comm):
    model = Odd()
    sharded = Zero3(model, comm, units=model.units, **ADAM)
    for step in range(5):
        model(data(step, comm.rank, 4)).square().mean().backward()
        assert not any(flat.whole.untyped_storage().nbytes() for flat in sharded._flats)
        sharded.step()
        sharded.zero_grad()
    return sharded.full_parameters(), []


@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_dtypes_are_kept_apart(stage):
    make = lambda: Odd(mixed=True)  # noqa: E731
    expected, _ = one_device(make, 4, 2)
    for params, _ in simulate(train, make, 4, stage, ranks=2).values:
        for name, right in expected.items():
            assert params[name].dtype == right.dtype
            assert (params[name] - right).abs().max() <= 5 * 2 * 100 * 10 * 2**-24  # steps, 2 lr / eps, sums of 10 floats below 1


@pytest.mark.parametrize("stage", [1, 3])
def test_groups(stage):
    make = lambda: MLP((4, 5, 2), dtype=DOUBLE)  # noqa: E731
    groups = [
        {"params": ["layers.0.weight", "layers.2.weight"], "weight_decay": 0.3},
        {"params": ["layers.0.bias"], "lr": 0.05},
        {"params": ["layers.2.bias"]},
    ]
    run = simulate(train, make, 4, stage, groups=groups, clip=0.1, ranks=3)
    assert_same(run, one_device(make, 4, 3, groups=groups, clip=0.1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_optimisers(stage):
    """torch's own, and one with no state."""
    make = lambda: MLP((4, 5, 2), dtype=DOUBLE)  # noqa: E731
    expected = one_device(make, 4, 2)
    assert_same(simulate(train, make, 4, stage, optimizer=torch.optim.AdamW, ranks=2), expected)
    sgd = {"weight_decay": 0.1, "lr": 0.1}
    run = simulate(train, make, 4, stage, optimizer=lambda g, eps, **o: SGD(g, **{**o, **sgd}), ranks=2)
    assert_same(run, one_device(make, 4, 2, optimizer=lambda p, eps, **o: SGD(p, **{**o, **sgd})))


def twice_forward(model, x):
    """Two forwards before one backward."""
    return model(x).square().mean() + model(2 * x).square().mean()


@pytest.mark.parametrize("stage", [2, 3])
def test_two_forwards_one_backward(stage):
    make = lambda: MLP((4, 5, 2), dtype=DOUBLE)  # noqa: E731
    assert_same(simulate(train, make, 4, stage, loss=twice_forward, ranks=2), one_device(make, 4, 2, loss=twice_forward))


def carried(comm, stage):
    """Torch's own collectives are forbidden; those that are given count what they carry."""
    native, seen = comm.native, {"reduce_scatter": 0, "all_gather": 0}

    def forbidden(*_, **__):
        raise AssertionError("a native collective was called")

    names = [n for n in dir(native) if n.startswith(("all_reduce", "all_gather", "reduce", "broadcast", "all_to_all"))]
    before = {n: getattr(native, n) for n in names}
    for n in names:
        setattr(native, n, forbidden)

    def my_reduce_scatter(comm, x):
        seen["reduce_scatter"] += x.nbytes
        return ring.reduce_scatter(comm, x)

    def my_all_gather(comm, x, numel):
        seen["all_gather"] += numel * x.element_size()
        return ring.all_gather(comm, x, numel=numel)

    try:
        model = MLP((8, 16, 8))
        sharded = zero(model, comm, stage=stage, reduce_scatter=my_reduce_scatter, all_gather=my_all_gather)
        model(torch.ones(2, 8)).square().mean().backward()
        sharded.step()
    finally:
        for n in names:
            setattr(native, n, before[n])
    return seen, sum(p.numel() for p in MLP((8, 16, 8)).parameters()) * 4


def test_injected_collectives_carry_the_bytes():
    with fw.pool(ranks=2) as ranks:
        for stage in (1, 2, 3):
            for seen, psi in ranks.run(carried, stage, stream=False).values:
                assert seen == {"reduce_scatter": psi, "all_gather": psi * (2 if stage == 3 else 1)}


def outside(comm):
    """Stage 3 between steps: parameters are not there, and can be had."""
    model = MLP((4, 5, 2), dtype=DOUBLE)
    right = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = Zero3(model, comm)
    with torch.no_grad():
        model.eval()(data(0, comm.rank, 4))
    assert all(p.shape == (0,) for p in model.parameters())
    with pytest.raises(RuntimeError, match="size|shape"):
        F.linear(data(0, 0, 4), model.layers[0].weight)
    with sharded.gathered() as whole:
        assert all(torch.equal(p, right[name]) for name, p in whole.named_parameters())
    assert all(torch.equal(p, right[name]) for name, p in sharded.full_parameters().items())
    assert all(p.shape == (0,) for p in model.parameters())
    sharded.close()
    return True


def test_stage_3_between_steps():
    assert simulate(outside, ranks=3).values == [True] * 3


def add_up(comm, stage):
    """Gradients add up until zero_grad, also after clip_."""
    model = MLP((4, 2), dtype=DOUBLE)
    sharded = zero(model, comm, stage=stage)
    for step in range(2):
        model(data(step, comm.rank, 4)).square().mean().backward()
        if step == 0:
            sharded.clip_(0.5)
    return sharded.full_gradients()


def test_backward_after_clip_adds():
    model = MLP((4, 2), dtype=DOUBLE)
    for step in range(2):
        for rank in range(2):
            (model(data(step, rank, 4)).square().mean() / 2).backward()
        if step == 0:
            clip_(model.parameters(), 0.5)
    for stage in (1, 2, 3):
        for found in simulate(add_up, stage, ranks=2).values:
            assert all((found[name] - p.grad).abs().max() <= BOUND for name, p in model.named_parameters())


# --- bad input ---------------------------------------------------------------------------------------------------------------
def faulty(comm, stage, fault):
    model = MLP((4, 5, 2), dtype=DOUBLE, seed=comm.rank if fault == "seed" else 0)
    if fault == "one element" and comm.rank == 2:
        model.layers[2].bias.data[1] += 1e-9
    sharded = zero(model, comm, stage=stage)
    x = data(0, comm.rank, 4)
    if fault == "nan" and comm.rank == 1:
        x[0, 0] = math.nan
    if not (fault == "skips" and comm.rank == 1):
        model(x).square().mean().backward()
    sharded.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "fault, rank, says",
    [
        ("seed", None, r"differ before the first step.*rank 1: layers.0.weight.*rank 2"),
        ("one element", None, r"Not what rank 0 holds: rank 2: layers.2.bias\. Build the model from one seed"),
        ("nan", 1, r"rank 1: nan or inf in the gradient of layers\.\d\.(weight|bias).*before any sum"),
        ("skips", 1, r"rank 1: step\(\) without a backward"),
    ],
)
def test_faulty_ranks_are_named(stage, fault, rank, says):
    with pytest.raises(fw.RankError, match=says) as caught:
        simulate(faulty, stage, fault, ranks=3)
    assert rank is None or caught.value.rank == rank


def test_faulty_ranks_are_named_on_real_ranks():
    for stage, fault, says in ((3, "nan", "rank 1: nan or inf"), (2, "skips", "rank 1.*without a backward")):
        with pytest.raises(fw.RankError, match=says) as caught:
            fw.run(faulty, stage, fault, ranks=2, stream=False)
        assert caught.value.rank == 1


def whole(comm, x):
    return ring.all_reduce(comm, x)


def refused(comm, case):
    model = MLP((4, 5, 2), dtype=DOUBLE)
    first, second = list(model.parameters())[:2]
    if case == "frozen":
        zero(model.requires_grad_(False), comm, stage=1)
    if case == "whole numbers":
        model.count = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        zero(model, comm, stage=3)
    if case == "twice":
        zero(model, comm, stage=1)
        zero(model, comm, stage=2)
    if case == "again":
        zero(model, comm, stage=1).close()
        zero(model, comm, stage=3)
        raise ValueError("fine")
    if case == "order of units":
        Zero3(model, comm, units=[model.layers[0], model.layers[0]])
    if case == "strange unit":
        Zero3(model, comm, units=[MLP((2, 2))])
    if case == "sum returned whole":
        sharded = zero(model, comm, stage=1, reduce_scatter=whole)
        model(data(0, 0, 4)).sum().backward()
        sharded.step()
    options = {
        "stage": {"stage": 4},
        "bucket": {"stage": 1, "bucket_bytes": 0},
        "missing": {"stage": 1, "groups": [{"params": [first]}]},
        "doubled": {"stage": 1, "groups": [{"params": list(model.parameters())}, {"params": [first]}]},
        "strangers": {"stage": 1, "groups": [{"params": [*model.parameters(), torch.nn.Parameter(second.detach())]}]},
    }
    zero(model, comm, **options[case])


@pytest.mark.parametrize(
    "case, says",
    [
        ("stage", "stage is 4; allowed: 1, 2, 3"),
        ("bucket", "bucket_bytes is 0"),
        ("missing", "layers.0.bias is in 0 of the groups"),
        ("doubled", "layers.0.weight is in 2 of the groups"),
        ("strangers", "1 of the groups' parameters are not the model's"),
        ("frozen", "no parameter of the model is trained"),
        ("whole numbers", "count is torch.int64"),
        ("twice", "wrapped by Zero1 already; close"),
        ("again", "fine"),
        ("order of units", "a module is given twice"),
        ("strange unit", "MLP is no module of this model"),
        ("sum returned whole", "reduce_scatter returned torch.float64 \\(37,\\); this rank's chunk of 37 elements"),
    ],
)
def test_refused(case, says):
    with pytest.raises(fw.RankError, match=says):
        simulate(refused, case, ranks=2)
