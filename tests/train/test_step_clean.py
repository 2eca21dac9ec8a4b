"""Each step is of its own batch alone: what a refused batch or a second backward would leave behind changes nothing."""

import pytest
import torch

import fourwalls as fw
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline.catalogue import build
from fourwalls.train.step import Step

from .one_device import BOUND, NETWORK, configuration, rows

SMALL = configuration(layers=2)


def step_of(comm, grid, **options):
    step = Step(SMALL, Mesh(comm, grid), build("1f1b", grid.p, 2), dtype=torch.float64, lr=1e-2, **options)
    return step, [x.tensor_split(grid.d)[step.mesh.place.d] for x in rows(0)]


def parameters(step):
    return {n: p.detach().clone() for n, p in step.named_parameters()}


def furthest(found, want):
    assert found.keys() == want.keys()
    return max(float((found[n] - want[n]).abs().max()) for n in want)


def after_a_refusal(comm, spoil, zero, checks):
    """How far two good steps end from where they end without the bad batch before them, and what was said of it."""
    ends, said = [], ""
    for bad in (False, True):
        step, (x, y) = step_of(comm, Grid(d=comm.size), zero=zero)
        if bad:
            before = parameters(step)
            wrong = spoil(step, y)
            with pytest.raises(ValueError) as error:
                step(x, wrong)
            said = str(error.value)
            for n, p in step.named_parameters():
                p.data.copy_(before[n])
        losses = [step(x, y), step(x, y)]
        ends.append({**parameters(step), "losses": torch.tensor(losses)})
    return furthest(*ends), said


def last_target(step, y):
    """A target that does not exist, in the last micro-batch: the first one's gradients are there already."""
    y = y.clone()
    y[-1, -1] = 99
    return y


def huge_norm(step, y):
    next(p for n, p in step.named_parameters() if n == "norm.weight").data.fill_(float("inf"))
    return y


@pytest.mark.parametrize("spoil, ranks, zero, checks, says", [
    (last_target, 1, False, True, "target 99"),
    (last_target, 2, True, False, "target 99"),
    (huge_norm, 1, True, False, "step 0: the loss is nan"),
    (huge_norm, 2, False, False, "step 0: the loss is nan"),
], ids=["target", "target-zero", "nan-zero", "nan"])  # fmt: skip
def test_a_refused_batch_leaves_nothing_behind(spoil, ranks, zero, checks, says):
    for far, said in fw.simulate(after_a_refusal, spoil, zero, checks, ranks=ranks, cluster=NETWORK, checks=checks).values:
        assert says in said and far < BOUND


@pytest.mark.parametrize("grid, options", [
    (Grid(p=2), {}), (Grid(d=2), {}), (Grid(t=2), {"sequence": True}), (Grid(d=2), {"zero": True}),
], ids=["tied-ends", "replicas", "sequence", "zero"])  # fmt: skip
def test_gradients_are_of_the_last_backward_alone(grid, options):
    """Summed over ranks once more, the first backward's would count once for each rank."""

    def program(comm, times):
        step, batch = step_of(comm, grid, **options)
        for _ in range(times):
            step.backward(*batch)
        return float(step.norm())

    once, twice = (fw.simulate(program, times, ranks=grid.ranks, cluster=NETWORK).values for times in (1, 2))
    assert twice == once
