"""Bad input of a step: refused before ranks start where it can be seen there, else in one message that says what to do."""

import math

import pytest
import torch

import fourwalls as fw
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline.catalogue import build
from fourwalls.train.stages import TensorStage
from fourwalls.train.step import Step, check_step

from .one_device import NETWORK, configuration, rows

SMALL = configuration(layers=2)


@pytest.mark.parametrize(
    ("grid", "schedule", "options", "words"),
    [
        ({"c": 2}, build("1f1b", 1, 2), {}, "c .context. is 2; allowed here: 1"),
        ({"p": 2}, build("1f1b", 3, 2), {}, "a schedule for 3 ranks, p is 2; allowed: as many lines as p"),
        ({"p": 4}, build("1f1b", 4, 2), {}, "2 layers cannot fill 4 stages; allowed: 1 to 2 stages"),
        ({"t": 3}, build("1f1b", 1, 2), {}, "2 heads cannot be shared by t 3; legal t: 1, 2"),
        ({"t": 2}, build("1f1b", 1, 2), {"sequence": True, "config": configuration().__class__(length=5, heads=4)}, "length 5"),
        ({"p": 3}, build("1f1b", 3, 2), {"cuts": [0, 1, 1, 2]}, "stage 1 has no layer"),
        ({"p": 2}, build("1f1b", 2, 2), {"cuts": [0, 2]}, "cuts .0, 2. make 1 stages, the schedule has 2; allowed: 3 numbers"),
        ({"p": 1}, "0F0 0F1 0B0", {}, "0F1 has no backward pass"),
        ({"p": 1}, "0f0 0b0", {}, "kinds are capital letters; did you mean 0F0"),
    ],
)
def test_what_does_not_go_together_is_refused_without_ranks(grid, schedule, options, words):
    config = options.pop("config", SMALL)
    with pytest.raises(ValueError, match=words):
        check_step(config, Grid(**grid), schedule, **options)


def refused(comm, what):
    grid = Grid(p=2) if what == "stage" else Grid(d=2)
    mesh = Mesh(comm, grid)
    options = {"clip": -1.0} if what == "clip" else {}
    step = Step(SMALL, mesh, build("1f1b", grid.p, 2), dtype=torch.float64, **options)
    x, y = (t.clone() for t in rows(0))
    if what == "rows":
        x, y = x[:1], y[:1]
    elif what == "rounds":
        step(x, y, accumulate=20)
    elif what == "nan" and comm.rank == 1:
        next(p for _, p in step.named_parameters()).data[0] = math.nan
    elif what == "stage" and comm.rank == 1:
        x = x.flip(0)
    elif what == "target":
        y[0, 0] = 99
    step(x, y)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rows", "1 rows cannot fill 2 micro-batches; allowed: count from 1 to 1"),
        ("rounds", "13 rows cannot fill 20 micro-batches"),
        ("clip", "clip is -1.0; allowed: a number above 0, or None"),
        ("nan", "rank 1 .*micro-batch 0: the loss is nan"),
        ("target", "target 99; with vocabulary 11 allowed are 0 to 10"),
        ("stage", "rows of a replica"),
    ],
)
def test_bad_input_is_refused_on_ranks(what, words):
    with pytest.raises((fw.RankError, fw.CommError), match=words):
        fw.simulate(refused, what, ranks=2, cluster=NETWORK)


@pytest.mark.parametrize("largest", [-1.0, math.nan])
def test_a_norm_to_clip_to_is_a_number_of_at_least_0(largest):
    def program(comm):
        Step(SMALL, Mesh(comm, Grid()), build("1f1b", 1, 2), dtype=torch.float64).clip_(largest)

    with pytest.raises(fw.RankError, match="the largest norm is a number of at least 0"):
        fw.simulate(program, ranks=1, cluster=NETWORK)


def test_a_batch_of_which_nothing_counts_is_no_nan():
    def program(comm):
        step = Step(SMALL, Mesh(comm, Grid(d=2)), build("1f1b", 1, 2), dtype=torch.float64, clip=1.0)
        before = {n: p.detach().clone() for n, p in step.named_parameters()}
        x, y = rows(0)
        return step(x, torch.full_like(y, -100)), all(torch.equal(p, before[n]) for n, p in step.named_parameters())

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [(0.0, True)] * 2


def test_one_replica_of_which_nothing_counts_leaves_the_others_mean():
    def program(comm):
        step = Step(SMALL, Mesh(comm, Grid(d=2)), build("1f1b", 1, 2), dtype=torch.float64)
        x, y = (t[2:8] for t in rows(0))
        return step(x, y if comm.rank else torch.full_like(y, -100))

    def alone(comm):
        return Step(SMALL, Mesh(comm, Grid()), build("1f1b", 1, 2), dtype=torch.float64)(*(t[2:8] for t in rows(0)))

    (want,) = fw.simulate(alone, ranks=1, cluster=NETWORK).values
    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [pytest.approx(want, abs=1e-13)] * 2


def test_sizes_may_change_from_step_to_step():
    def program(comm, grid):
        step = Step(SMALL, Mesh(comm, grid), build("1f1b", grid.p, 2), dtype=torch.float64)
        return [step(*(x[:count, :length] for x in rows(k))) for k, (count, length) in enumerate([(4, 4), (6, 3), (5, 4)])]

    (want,) = fw.simulate(program, Grid(), ranks=1, cluster=NETWORK).values
    for losses in fw.simulate(program, Grid(p=2, t=2), ranks=4, cluster=NETWORK).values:
        assert losses == pytest.approx(want, abs=1e-12)


def test_a_stage_that_does_not_exist_is_refused():
    def program(comm):
        TensorStage(SMALL, comm, [0, 1, 2], 2)

    with pytest.raises(fw.RankError, match="stage 2 of 2; allowed: 0 to 1"):
        fw.simulate(program, ranks=1, cluster=NETWORK)
