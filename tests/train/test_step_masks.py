"""Dropout's masks in a step over ranks: new ones for each step, round and replica, and for each rank's own heads; and a clip that
has nothing to clip.
"""

import pytest
import torch

import fourwalls as fw
from fourwalls.nn.optim import SGD
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline.catalogue import build
from fourwalls.train.step import Step

from .one_device import NETWORK, configuration, rows

DROPPING = configuration(layers=2, dropout=0.5)


def resting(comm, grid, **options):
    """A step whose weights stay as they are, so that a loss differs by its masks alone."""
    return Step(DROPPING, Mesh(comm, grid), build("1f1b", grid.p, 2), dtype=torch.float64, optimizer=SGD, lr=0.0, **options)


def test_masks_are_new_in_each_step_round_and_replica():
    """Were they not, the same rows twice, in two rounds or on two replicas, would have the loss of once."""
    x, y = (t[:4] for t in rows(2))

    def program(comm, times, accumulate):
        step = resting(comm, Grid(d=comm.size))
        inputs, targets = (torch.cat([t] * accumulate) for t in (x, y))
        return [step(inputs, targets, accumulate=accumulate) for _ in range(times)]

    (steps,) = fw.simulate(program, 3, 1, ranks=1, cluster=NETWORK).values
    (rounds,) = fw.simulate(program, 1, 2, ranks=1, cluster=NETWORK).values
    replicas = fw.simulate(program, 1, 1, ranks=2, cluster=NETWORK).values
    assert replicas[0] == replicas[1]
    each = [*steps, *rounds, *replicas[0]]
    assert min(abs(a - b) for k, a in enumerate(each) for b in each[:k]) > 1e-6
    assert fw.simulate(program, 3, 1, ranks=1, cluster=NETWORK).values == [steps]  # and the same again from the same seed


def test_ranks_of_a_tensor_axis_draw_apart_what_is_cut_and_alike_what_is_whole():
    def program(comm):
        step = resting(comm, Grid(t=2))
        step(*rows(0))
        (stage,) = step.stages.values()
        return stage.streams.own.get_state(), stage.streams.shared.get_state()

    (own, shared), (other, same) = fw.simulate(program, ranks=2, cluster=NETWORK).values
    assert torch.equal(shared, same) and not torch.equal(own, other)


@pytest.mark.parametrize("zero", [False, True])
def test_a_norm_below_the_clip_is_left_alone(zero):
    """Scaling to the largest norm would be a larger step, not a clip."""

    def program(comm):
        step = Step(configuration(layers=2), Mesh(comm, Grid(d=2)), build("1f1b", 1, 2), dtype=torch.float64, zero=zero)
        step.backward(*(t.tensor_split(2)[comm.rank] for t in rows(0)))
        before = step.clip_(1e3)
        return float(before), float(step.norm())

    for before, after in fw.simulate(program, ranks=2, cluster=NETWORK).values:
        assert before == after < 1e3
