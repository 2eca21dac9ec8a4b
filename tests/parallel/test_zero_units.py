"""What stage 3 holds and what it waits for, by its options: every figure of the table in its docstring, from the ledger and from
the virtual clock.
"""

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.collectives.chunks import cut
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
PREFETCH = [{}, {"prefetch": "early"}, {"prefetch": False}]
OPTIONS = [*PREFETCH, *({**options, "overlap": False} for options in PREFETCH)]
IDS = ["default", "early", "no prefetch", "default, no overlap", "early, no overlap", "nothing beside"]


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


class Row(nn.Sequential):
    """The units, one after the other. skip: one that is left out; again: computed again in backward, by reentrant checkpoints."""

    skip, again = None, False

    def forward(self, x):
        for k, unit in enumerate(self):
            if k != self.skip:
                x = checkpoint(unit, x, use_reentrant=True) if self.again else unit(x)
        return x


def build(comm, make=Zero3, skip=None, again=False, frozen=(), **options):
    model = Row(*(Unit(seed, comm) for seed in range(UNITS)))
    model.skip, model.again = skip, again
    for k in frozen:
        model[k].requires_grad_(False)
    return model, make(model, comm, **options), torch.ones(1, WIDTH, dtype=DOUBLE, requires_grad=again)


# --- memory ----------------------------------------------------------------------------------------------------------------
def sum_of_a_copy(comm, x):
    """So that nobody but stage 3 has a word about how long its own buffer lives."""
    return ring.reduce_scatter(comm, x)


def sum_in_place(comm, x):
    """Its chunk is a view of `x`: who keeps the one keeps the other."""
    return cut(x, comm.size)[comm.rank].copy_(ring.reduce_scatter(comm, x))


def held(comm, make=Zero3, reduce_scatter=sum_of_a_copy, **options):
    """Most units at a time in a second backward: of parameters, of gradients, of both together; then of parameters in forward."""
    model, sharded, x = build(comm, make, reduce_scatter=reduce_scatter, **options)
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


# parameters, gradients, both in backward; parameters in forward
HELD = [(1, 2, 2, 2), (2, 2, 3, 2), (1, 2, 2, 1)] * 2
WAITED = [(UNITS + 1, UNITS), (2, 1), (2 * UNITS, UNITS), *[(2 * UNITS, UNITS)] * 3]


def most(**options):
    first, *others = fw.simulate(held, ranks=2, cluster=NETWORK, **options).values
    assert others == [first]
    return first


@pytest.mark.parametrize("options, units", list(zip(OPTIONS, HELD, strict=True)), ids=IDS)
def test_units_held(options, units):
    """As the docstring's table says: by default never more than two, of whatever kind, in forward or in backward."""
    assert most(**options) == units
    assert most(checks=False, **options) == units


def test_true_means_the_default_and_what_is_unknown_is_refused():
    assert most(prefetch=True) == HELD[0]
    with pytest.raises(fw.RankError, match="prefetch is 'soon'; allowed: 'late'"):
        most(prefetch="soon")


CASES = {
    "sum in place": {"reduce_scatter": sum_in_place},
    "a unit left out": {"skip": 3},
    "computed again": {"again": True},
}


@pytest.mark.parametrize("options", list(CASES.values()), ids=list(CASES))
def test_never_more_than_two(options):
    _, _, both, forward = most(**options)
    assert max(both, forward) == 2


def at_work(comm, **options):
    """Units whose parameters are whole when a unit's backward begins, last unit first. (A Ledger takes no frozen weight here.)"""
    model, sharded, x = build(comm, overlap=False, **options)
    found = []
    for unit in model:
        look = lambda _, out: out.register_hook(lambda _: found.append(whole()))  # noqa: E731
        unit.net.register_forward_hook(lambda module, args, out, look=look: look(module, out) and None)
    whole = lambda: sum(flat.whole.untyped_storage().nbytes() for flat in sharded._flats) // UNIT  # noqa: E731
    model(x).square().mean().backward()
    return found


def test_a_frozen_unit_asks_for_the_next_at_once():
    """It has no gradients, so the next one is its second. A trained one asks when it is done."""
    frozen = (1, 2, 4)
    for found in fw.simulate(at_work, frozen=frozen, ranks=2, cluster=NETWORK).values:
        assert found == [2 if k in frozen else 1 for k in reversed(range(UNITS))]


class AsksEarly(Zero3):
    """Asks for the next unit when this one begins."""

    def _before_backward(self, unit, visit=None):
        super()._before_backward(unit, visit)
        self._ahead(unit, -1)


class KeepsTheSum(Zero3):
    """Looks at what a sum has brought only when the next one is to begin."""

    def _gather(self, unit):
        flying, self._flying = self._flying, deque()
        super()._gather(unit)
        self._flying = flying


class KeepsThePassed(Zero3):
    def _free_the_passed(self, unit):
        pass


class Eager(Zero3):
    """Takes a unit's memory when its gather is asked for, while a sum is still before it in the lane."""

    def _begin_gather(self, unit):
        for flat in unit.flats if unit.state == "free" else ():
            flat.grow()
        super()._begin_gather(unit)


MUTANTS = [
    (AsksEarly, {}, (2, 2, 3, 2)),
    (KeepsTheSum, CASES["sum in place"], (1, 2, 3, 2)),
    (KeepsThePassed, CASES["a unit left out"], (2, 2, 3, 3)),
    (Eager, {"prefetch": "early"}, (2, 2, 4, 2)),
]


@pytest.mark.parametrize("make, options, units", MUTANTS, ids=[make.__name__ for make, _, _ in MUTANTS])
def test_a_unit_too_many_is_seen(make, options, units):
    assert most(make=make, **options) == units


def trained(comm, **options):
    model, sharded, x = build(comm, **options)
    for step in range(3):
        model(x * (1 + comm.rank + step)).square().mean().backward()
        sharded.step()
        sharded.zero_grad()
    return sharded.full_parameters()


def test_the_choice_changes_no_bit_and_no_byte():
    runs = [fw.simulate(trained, ranks=3, cluster=NETWORK, checks=False, **options) for options in PREFETCH]
    for run in runs[1:]:
        assert [run.trace.bytes_sent(r) for r in range(3)] == [runs[0].trace.bytes_sent(r) for r in range(3)]
        for own, other in zip(run.values, runs[0].values, strict=True):
            assert all(torch.equal(own[name], p) for name, p in other.items())


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
    """To the picosecond. By default one gather of forward, and all of backward; early also waits for the first of backward and
    the last sum only; else for every one.
    """
    for exposed, gather, one_sum in fw.simulate(waited, ranks=2, cluster=NETWORK, **options).values:
        assert 0 < gather < round(SECONDS * 1e12) and 0 < one_sum < round(SECONDS * 1e12)
        assert exposed == waits[0] * gather + waits[1] * one_sum
