"""Stages of one small layer, a batch, and one device to compare with: for the tests of executed schedules."""

import torch

from fourwalls.cost.hardware import uniform
from fourwalls.parallel.pipeline.actions import parts, placement
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.microbatches import split_batch

NETWORK = uniform(1e-6, 1e10)
W = 6
BOUND = 1e-12


def layer(k, width=W):
    module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()).double()
    generator = torch.Generator().manual_seed(k)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def batch(rows=8, width=W, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))


def squares(y, target):
    return (y - target).square().sum()


def oracle(layers, rows=8, divide_by=1.0, seed=5):
    x, target = batch(rows, seed=seed)
    model = [layer(k) for k in range(layers)]
    for module in model:
        x = module(x)
    (squares(x, target) / divide_by).backward()
    return [[p.grad for p in module.parameters()] for module in model]


def far(modules, want):
    """The largest distance between the gradients of {stage: module} and the oracle's."""
    return max(
        float((p.grad - w).abs().max()) if p.grad is not None else float("inf")
        for s, module in modules.items()
        for p, w in zip(module.parameters(), want[s], strict=True)
    )


def run_once(comm, schedule, rows=8, **options):
    where = placement(schedule)
    mine = {s: layer(s) for s in where if where[s] == comm.rank}
    count = 1 + max(a.microbatch for row in schedule for cell in row for a in parts(cell))
    out = execute(schedule, mine, comm, split_batch(*batch(rows), count=count), squares, **options)
    return mine, out
