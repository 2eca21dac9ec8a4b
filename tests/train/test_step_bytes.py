"""What a step sends along each axis, counted in the Trace, is the formula of cost.axes to the byte."""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.axes import axis_bytes
from fourwalls.nn.gpt import GPTConfig
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline.catalogue import build
from fourwalls.parallel.pipeline.shapes import table_bytes
from fourwalls.train.step import Step

from .one_device import NETWORK

ROWS, LENGTH, M = 8, 4, 3
SMALL = 8  # the count of tokens, the loss and the norm travel as one number each


def one_step(comm, config, grid, sequence):
    step = Step(config, Mesh(comm, grid), build("1f1b", grid.p, M), clip=1.0, dtype=torch.float64, sequence=sequence)
    generator = torch.Generator().manual_seed(comm.rank // (grid.p * grid.t))
    begin = comm.clock()  # what was sent before set the mesh up
    step(*(torch.randint(0, 12, (ROWS, LENGTH), generator=generator) for _ in range(2)))
    return begin


def axis_of(grid, event):
    """The axis in which sender and receiver differ."""
    a, b = grid.place(event.rank), grid.place(event.peer)
    (axis,) = [axis for axis in "dpt" if getattr(a, axis) != getattr(b, axis)]
    return axis


def sent_by(run, grid, rank):
    """Axis -> bytes of the step, without single numbers and the tables of shapes (one from each stage but the last)."""
    sent = dict.fromkeys("dpt", 0)
    for event in run.trace:
        if event.kind == "send" and event.rank == rank and event.start >= run.values[rank] and event.bytes > SMALL:
            sent[axis_of(grid, event)] += event.bytes
    sent["p"] -= table_bytes(M) * (grid.place(rank).p < grid.p - 1)
    return sent


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_every_axis_are_the_formula(tied):
    config, grid = GPTConfig(vocabulary=12, length=LENGTH, width=8, layers=3, heads=2, tied=tied), Grid(d=2, p=2, t=2)
    run = fw.simulate(one_step, config, grid, False, ranks=8, cluster=NETWORK)
    for rank in range(8):
        stage = grid.place(rank).p
        sizes = {"d": 2, "p": 2, "t": 2, "stage": stage, "layers": (2, 1)[stage]}
        want = axis_bytes(config.shape(), tokens=ROWS * LENGTH, element=8, softmax=8, **sizes)
        assert sent_by(run, grid, rank) == {axis: want[axis].total for axis in "dpt"}, rank


def test_sequence_parallelism_sends_a_share_along_the_pipeline():
    config, grid = GPTConfig(vocabulary=12, length=LENGTH, width=8, layers=2, heads=2, tied=False), Grid(p=2, t=2)
    runs = [fw.simulate(one_step, config, grid, sequence, ranks=4, cluster=NETWORK) for sequence in (False, True)]
    plain, cut = (sent_by(run, grid, 0)["p"] for run in runs)
    assert plain == 2 * cut == ROWS * LENGTH * 8 * 8
