"""Stage 3 where a unit's backward is no plain one: checkpoints, weights that are frozen or detached, forwards that raise; states
that are saved.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import AdamW
from fourwalls.parallel.zero import Zero3, bytes_sent

NETWORK = uniform(1e-6, 1e9)
DOUBLE = torch.float64
ADAM = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
BOUND = 1e-9  # three steps, each off by at most 2 lr / eps times a gradient's error: fewer than 1000 sums of numbers below 100
STEPS = 3


def simulate(program, *args, ranks=2, **kwargs):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **kwargs)


def rows(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=DOUBLE)


def mean_square(model, x):
    return model(x).square().mean()


def train(comm, make, loss=mean_square, **options):
    model = make()
    sharded = Zero3(model, comm, **ADAM, **options)
    for step in range(STEPS):
        loss(model, rows(step, comm.rank)).backward()
        assert not any(flat.whole.untyped_storage().nbytes() for flat in sharded._flats), "all is given back after backward"
        sharded.step()
        sharded.zero_grad()
    return sharded.full_parameters()


def off(values, make, loss=mean_square):
    """The largest difference of any rank's parameters from one device's."""
    model = make()
    optimizer = AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        for rank in range(len(values)):
            (loss(model, rows(step, rank)) / len(values)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(float((v[n] - p.detach()).abs().max()) for v in values for n, p in model.named_parameters())


# --- units -----------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.net = MLP((4, 6, 4), seed=seed, dtype=DOUBLE)

    def forward(self, x):
        return x + self.net(x)


class Adapter(Block):
    """A frozen net with two narrow trained matrices beside it, which have their gradients long before the net is done."""

    def __init__(self, seed):
        super().__init__(seed)
        self.net.requires_grad_(False)
        self.down, self.up = (nn.Parameter(draw) for draw in (rows(seed, 7).t().clone(), 0.1 * rows(seed, 8)))

    def forward(self, x):
        return self.net(torch.tanh(x)) + x @ self.down @ self.up


class Detached(nn.Module):
    """Its weight's gradient is there at once, and then the weight is needed for the input's."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=DOUBLE) * (1 + seed))

    def forward(self, x):
        return torch.tanh(x) @ self.weight.detach() + self.weight.sum(1)


class Net(nn.Module):
    def __init__(self, kind=Block, way="plain"):
        super().__init__()
        self.blocks = nn.ModuleList(kind(seed) for seed in range(3))
        self.way = way

    def forward(self, x):
        if self.way == "two in one":
            return self.blocks[2](checkpoint(lambda z: self.blocks[1](self.blocks[0](z)), x, use_reentrant=False))
        for block in self.blocks:
            if self.way == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.way == "reentrant":
                x = checkpoint(block, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)
            elif self.way == "by name":
                x = block(x=x)
            elif self.way == "twice":
                x = block(block(x))
            else:
                x = block(x)
        return x


CASES = [(Block, way) for way in ("checkpoint", "reentrant", "two in one", "by name", "twice")]
CASES += [(Adapter, way) for way in ("plain", "checkpoint", "twice")] + [(Detached, way) for way in ("plain", "by name")]


@pytest.mark.parametrize("kind, way", CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_equals_one_device(kind, way):
    make = lambda: Net(kind, way)  # noqa: E731
    assert off(simulate(train, make).values, make) <= BOUND


def test_a_checkpoint_that_runs_to_its_end():
    make = lambda: Net(Block, "checkpoint")  # noqa: E731
    with set_checkpoint_early_stop(False):
        assert off(simulate(train, make).values, make) <= BOUND


def sent(comm, way):
    model = Net(Block, way)
    sharded = Zero3(model, comm, **ADAM)
    begin = comm.clock()
    mean_square(model, rows(0, comm.rank)).backward()
    sharded.step()
    return begin, bytes_sent(sharded._flats, comm.size, comm.rank, stage=3)


@pytest.mark.parametrize("way", ["plain", "checkpoint"])
def test_a_checkpoint_around_a_unit_costs_no_byte(way):
    """Its parameters are gathered for backward anyway; computing forward again needs them once."""
    run = simulate(sent, way, ranks=3, checks=False)
    for rank, (begin, formula) in enumerate(run.values):
        assert sum(e.bytes for e in run.trace.where(rank=rank, kind="send").events if e.start >= begin) == formula


def with_a_penalty(model, rank):
    return mean_square(model, rows(0, rank)) + model.blocks[0].net.layers[0].weight.square().sum()


def reads_outside(comm, inside):
    model = Net()
    sharded = Zero3(model, comm, **ADAM)
    if not inside:
        with_a_penalty(model, comm.rank).backward()
    with sharded.gathered():
        with_a_penalty(model, comm.rank).backward()
    return sharded.full_gradients()


def test_a_parameter_used_outside_of_its_unit():
    """Inside `gathered` it is there; else it is refused, and does not count as nothing."""
    model = Net()
    for rank in range(2):
        (with_a_penalty(model, rank) / 2).backward()
    for grads in simulate(reads_outside, True).values:
        assert all(float((grads[name] - p.grad).abs().max()) <= 1e-13 for name, p in model.named_parameters())
    with pytest.raises(fw.RankError, match="invalid gradient.*got \\[0\\]"):
        simulate(reads_outside, False)


@dataclass
class Out:
    y: torch.Tensor


class Wraps(Block):
    def forward(self, x):
        return Out(super().forward(x.y if isinstance(x, Out) else x))


def refused(comm, case):
    model = Net(Wraps if case == "output" else Block)
    sharded = Zero3(model, comm, **ADAM)
    x = rows(0, comm.rank).requires_grad_()
    if case == "output":
        model(x)
    if case == "gradients of gradients":
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    if case == "state":
        model.state_dict()
    if case == "step inside":
        mean_square(model, x).backward()
        with sharded.gathered():
            sharded.step()


@pytest.mark.parametrize(
    "case, says",
    [
        ("output", "blocks.0 returns a Out, and the tensors in it cannot be seen"),
        ("gradients of gradients", "create_graph=True: .*use stage 2"),
        ("state", "a state_dict would be empty; take full_parameters"),
        ("step inside", r"step\(\) inside .with gathered"),
    ],
)
def test_refused(case, says):
    with pytest.raises(fw.RankError, match=says):
        simulate(refused, case)


# --- whole parameters ------------------------------------------------------------------------------------------------------
def read_and_written(comm):
    model = Net()
    sharded = Zero3(model, comm, **ADAM)
    with sharded.gathered():
        kept = model.state_dict()
        if comm.rank == 0:  # whole parameters stay whole: one rank alone may evaluate, and again
            alone = [float(model(rows(0, 0)).detach().sum()) for _ in range(2)]
            assert alone[0] == alone[1]
        model.load_state_dict({name: 2 * x for name, x in kept.items()})
    doubled = sharded.full_parameters()
    mean_square(model, rows(0, comm.rank)).backward()
    sharded.step()
    after = sharded.full_parameters()
    sharded.close()
    alive = {name: p.detach().clone() for name, p in model.named_parameters()}
    return kept, doubled, after, alive, float(model(rows(0, 0)).detach().sum()), hasattr(Zero3(model, comm), "units")


def test_what_is_taken_inside_gathered_outlives_it_and_what_is_written_stays():
    right = dict(Net().named_parameters())
    for kept, doubled, after, alive, _, again in simulate(read_and_written, ranks=3).values:
        assert all(torch.equal(kept[n], p) and torch.equal(doubled[n], 2 * p) for n, p in right.items())
        assert all(torch.equal(alive[n], p) for n, p in after.items()) and again  # close() gives them back, as they are now


def raises_in_forward(comm):
    """Forward raises after blocks 0 and 1 were gathered; a step follows, and new forwards must see what it did."""
    model = Net()
    sharded = Zero3(model, comm, **ADAM)
    for step in range(STEPS):
        mean_square(model, rows(step, comm.rank)).backward()
        if step == 0:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model.blocks[0](torch.ones(1, 5, dtype=DOUBLE))
        sharded.step()
        sharded.zero_grad()
        assert not any(flat.whole.untyped_storage().nbytes() for flat in sharded._flats)
    return sharded.full_parameters()


def test_a_forward_that_raised_leaves_no_stale_parameters():
    assert off(simulate(raises_in_forward).values, Net) <= BOUND
