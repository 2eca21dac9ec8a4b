"""What the tests of a mesh compare with: a GPT on one device, and the same rows for everybody."""

from functools import cache

import torch

from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.optim import Adam, clip_
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline.catalogue import build
from fourwalls.train.step import Step

NETWORK = uniform(1e-6, 1e10)
ROWS, LENGTH, VOCABULARY = 13, 4, 11  # two replicas get 7 and 6 rows; two ranks do not divide the vocabulary
CLIP = 0.3  # below the norm of every step here
LR = 1e-2
BOUND = 1e-12  # float64; sums of some hundred numbers below 1, and Adam's quotient makes a gradient's error 1e4 times larger


def configuration(tied=True, layers=4, dropout=0.0):
    return GPTConfig(vocabulary=VOCABULARY, length=LENGTH, width=8, layers=layers, heads=2, tied=tied, dropout=dropout)


def rows(step):
    """Inputs and targets of the whole batch. Some targets do not count, and not equally many in each half."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    y[0], y[1, :2], y[8, 1] = -100, -100, -100
    return x, y


@cache
def one_device(config, steps=5, clip=CLIP):
    """(losses, parameters by name, gradients of the last step before clipping, norms before clipping)."""
    model = GPT(config, dtype=torch.float64)
    optimizer = Adam(model.parameters(), lr=LR)
    losses, norms = [], []
    for k in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*rows(k))
        loss.backward()
        losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        if clip is not None:
            norms.append(float(clip_(model.parameters(), clip)))
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}, gradients, norms


def on_mesh(comm, config, grid, schedule, steps=5, accumulate=1, clip=CLIP, **options):
    """The same on the ranks of a mesh: this rank's (losses, whole parameters, whole gradients of the last step, norms)."""
    step = Step(config, Mesh(comm, grid), schedule, dtype=torch.float64, lr=LR, **options)
    losses, norms, gradients = [], [], {}
    for k in range(steps):
        mine = (x.tensor_split(grid.d)[step.mesh.place.d] for x in rows(k))
        losses.append(step.backward(*mine, accumulate=accumulate))
        if k == steps - 1 and not options.get("zero"):
            gradients = {n: g.clone() for n, g in step.whole_gradients().items()}
        if clip is not None:
            norms.append(float(step.clip_(clip)))
        step.update()
    return losses, step.whole_parameters(), gradients, norms


def schedule_of(name, p, m):
    return build(name, p, m, chunks=2)


def distance(values, want):
    """How far the ranks' results are from one device's, in the worst number; inf where a parameter is nowhere."""
    far = 0.0
    for losses, _, _, norms in values:
        far = max([far, *(abs(a - b) for a, b in zip(losses + norms, want[0] + want[3], strict=True))])
    for place in (1, 2):
        got = [value[place] for value in values]
        if any(got):
            missing = set(want[place]) - {name for one in got for name in one}
            far = float("inf") if missing else far
        far = max([far, *(float((x - want[place][n]).abs().max()) for one in got for n, x in one.items())])
    return far


def grid_of(d, p, t):
    return Grid(d=d, p=p, t=t)
