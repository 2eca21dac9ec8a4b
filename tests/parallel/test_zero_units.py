"""What stage 3 holds and what it waits for, by its options: every figure of the table in its docstring, from the ledger and from
the virtual clock.
"""

import pytest
import torch
from torch import nn

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.memory.ledger import Ledger
from fourwalls.memory.story import Story
from fourwalls.nn.mlp import MLP
from fourwalls.parallel.zero import Zero3

NETWORK = uniform(1e-6, 4e6)  # a gather takes about as long as a unit's forward
DOUBLE = torch.float64
WIDTH, UNITS = 16, 6
UNIT = WIDTH * WIDTH * 8
SECONDS = 1e-3
OPTIONS = [{}, {"prefetch": False}, {"overlap": False}, {"prefetch": False, "overlap": False}]
IDS = ["default", "no prefetch", "no overlap", "nothing beside"]


class Paced(torch.autograd.Function):
    """The identity; takes `SECONDS` in forward and twice as long in backward."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        with comm.compute("unit", seconds=SECONDS, kind="forward"):
            return x.clone()

    @staticmethod
    def backward(ctx, g):
        with ctx.comm.compute("unit", seconds=2 * SECONDS, kind="backward"):
            return g.clone(), None


class Unit(nn.Module):
    """One matrix."""

    def __init__(self, seed, comm):
        super().__init__()
        self.net, self.comm = MLP((WIDTH, WIDTH), bias=False, seed=seed, dtype=DOUBLE), comm

    def forward(self, x):
        return Paced.apply(self.net(x), self.comm)


def build(comm, make=Zero3, **options):
    model = nn.Sequential(*(Unit(seed, comm) for seed in range(UNITS)))
    return model, make(model, comm, **options), torch.ones(1, WIDTH, dtype=DOUBLE)


# --- memory ----------------------------------------------------------------------------------------------------------------
def held(comm, make=Zero3, **options):
    """Most units at a time in a second backward: of parameters, of gradients, of both together; then of parameters in forward.

    The sum works on a copy here, so that nobody but stage 3 has a word about how long its own buffer lives.
    """
    model, sharded, x = build(comm, make, reduce_scatter=lambda comm, x: ring.reduce_scatter(comm, x), **options)
    for _ in range(2):
        sharded.zero_grad()
        with Ledger(model, inputs=[x, *sharded.shards], lines=False) as ledger:
            ledger.phase("forward")
            loss = model(x).square().mean()
            ledger.phase("backward")
            loss.backward()
            ledger.phase("after")
    story = ledger.story()
    own = [s for s in story.storages if s.category not in ("inputs", "buffers")]  # the ring's scratch and copies
    whole = [s for s in own if max(size for _, size in s.sizes) == UNIT]  # nothing else is as large
    curves = []
    for kind in (True, False):
        some = [s for s in whole if (s.category == "parameters") == kind]
        curves.append([m.total // UNIT for m in Story(some, [], story.phases, story.ops).curve()])
    both = [sum(pair) for pair in zip(*curves, strict=True)]
    begins = dict((name, begin) for begin, name in story.phases)
    first, last = begins["backward"], begins["after"]
    assert curves[0][last] == 0, "all parameters are given back"
    return *(max(curve[first:last]) for curve in (*curves, both)), max(curves[0][:first])


HELD = [(2, 2, 3, 2), (1, 2, 2, 1), (2, 2, 3, 2), (1, 2, 2, 1)]
WAITED = [(2, 1), (2 * UNITS, UNITS), (2 * UNITS, UNITS), (2 * UNITS, UNITS)]


@pytest.mark.parametrize("options, most", list(zip(OPTIONS, HELD, strict=True)), ids=IDS)
def test_units_held(options, most):
    """As the docstring's table says: by default three, and gathered parameters never more than two."""
    assert fw.simulate(held, ranks=2, cluster=NETWORK, **options).values == [most] * 2


class Eager(Zero3):
    """Takes a unit's memory when its gather is asked for, while a sum is still before it in the lane."""

    def _begin_gather(self, unit):
        for flat in unit.flats if unit.state == "free" else ():
            flat.grow()
        super()._begin_gather(unit)


def test_memory_that_is_taken_too_early_is_seen():
    assert fw.simulate(held, make=Eager, ranks=2, cluster=NETWORK).values == [(2, 2, 4, 2)] * 2


# --- time ------------------------------------------------------------------------------------------------------------------
def waited(comm, **options):
    """(picoseconds of a second step beyond its computing, of one gather, of one sum)."""
    model, sharded, x = build(comm, **options)
    for _ in range(2):
        sharded.zero_grad()
        begin = comm.clock()
        model(x).square().mean().backward()
        exposed = comm.clock() - begin - UNITS * 3 * round(SECONDS * 1e12)
    one, times = torch.ones(WIDTH * WIDTH, dtype=DOUBLE), []
    for collective in (
        lambda: ring.all_gather(comm, one.chunk(comm.size)[comm.rank], numel=one.numel()),
        lambda: ring.reduce_scatter(comm, one),
    ):
        begin = comm.clock()
        collective()
        times.append(comm.clock() - begin)
    return exposed, *times


@pytest.mark.parametrize("options, waits", list(zip(OPTIONS, WAITED, strict=True)), ids=IDS)
def test_what_is_waited_for(options, waits):
    """To the picosecond: by default the first gather of forward, the first of backward and the last sum; else every one."""
    for exposed, gather, one_sum in fw.simulate(waited, ranks=2, cluster=NETWORK, **options).values:
        assert 0 < gather < round(SECONDS * 1e12) and 0 < one_sum < round(SECONDS * 1e12)
        assert exposed == waits[0] * gather + waits[1] * one_sum
