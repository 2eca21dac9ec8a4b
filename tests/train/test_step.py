"""Five Adam steps on a mesh of data, pipeline and tensor axes end where one device ends."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.nn.gpt import GPT
from fourwalls.nn.init import name_seed
from fourwalls.parallel.pipeline.actions import stages_of
from fourwalls.parallel.pipeline.microbatches import split_batch
from fourwalls.parallel.pipeline.running import RunningStage
from fourwalls.parallel.pipeline.stages import even_cuts

from .one_device import BOUND, CLIP, NETWORK, configuration, distance, grid_of, on_mesh, one_device, rows, schedule_of

TABLE = [  # mesh (d, p, t), schedule, m, tied, rounds of accumulation, other options; clipping everywhere
    ((1, 1, 1), "gpipe", 2, True, 1, {}),
    ((1, 1, 1), "zb-v", 2, False, 3, {"zero": True}),
    ((2, 1, 1), "1f1b", 2, True, 3, {}),
    ((2, 1, 1), "interleaved", 2, False, 1, {"zero": True}),
    ((1, 2, 1), "zb-h1", 4, True, 1, {}),
    ((1, 2, 1), "interleaved", 2, False, 3, {"recompute": True}),
    ((1, 1, 2), "zb-v", 2, True, 1, {}),
    ((1, 1, 2), "1f1b", 2, False, 3, {"sequence": True}),
    ((2, 2, 1), "zb-v", 3, True, 1, {}),
    ((2, 2, 1), "1f1b", 3, True, 2, {"zero": True}),  # row c22 of the trials
    ((2, 2, 1), "gpipe", 2, False, 3, {}),
    ((2, 1, 2), "gpipe", 2, True, 1, {"sequence": True}),
    ((2, 1, 2), "zb-h1", 2, False, 1, {"zero": True}),
    ((1, 2, 2), "1f1b", 2, True, 1, {"recompute": True, "sequence": True}),
    ((1, 2, 2), "zb-h1", 2, False, 1, {}),
    ((2, 2, 2), "1f1b", 2, True, 1, {}),
    ((2, 2, 2), "interleaved", 2, False, 1, {}),
    ((2, 2, 2), "zb-v", 2, True, 1, {"zero": True, "sequence": True}),
]
NAMES = [
    "-".join(["x".join(map(str, mesh)), name, "tied" * tied or "untied", *options]) for mesh, name, _, tied, _, options in TABLE
]


@pytest.mark.parametrize(("mesh", "name", "m", "tied", "accumulate", "options"), TABLE, ids=NAMES)
def test_parameters_after_five_steps_are_those_of_one_device(mesh, name, m, tied, accumulate, options):
    """Losses, clipped norms, the last gradients and all parameters, on every rank; the rows are dealt unevenly."""
    grid, schedule = grid_of(*mesh), schedule_of(name, mesh[1], m)
    config = configuration(tied, layers=max(2, stages_of(schedule)))
    options = {"accumulate": accumulate, "checks": grid.ranks == 4, **options}  # checks cost half of the time
    run = fw.simulate(on_mesh, config, grid, schedule, ranks=grid.ranks, cluster=NETWORK, **options)
    assert distance(run.values, one_device(config)) < BOUND


def test_the_clip_bites_in_every_step():
    for tied, layers in itertools.product((True, False), (2, 4)):
        assert min(one_device(configuration(tied, layers))[3]) > CLIP * 1.01


def test_one_element_off_by_ten_bounds_is_seen():
    want = one_device(configuration(layers=2))
    for place in (1, 2):
        for name, x in want[place].items():
            off = x.clone()
            off.view(-1)[-1] += 10 * BOUND
            value = list(want)
            value[place] = {**want[place], name: off}
            assert distance([tuple(value)], want) > BOUND, name
    assert distance([want], want) == 0


# --- dropout ------------------------------------------------------------------------------------------------------------
def loss_with_dropout(config, grid, m, stages):
    """One device that draws its masks as the micro-batches of each replica do: the loss of step 0 and its gradients."""
    model, cuts = GPT(config, dtype=torch.float64), even_cuts(config.layers, stages)
    x, y = rows(0)
    total = int((y != -100).sum())

    def part(s):
        def run(x):
            x = model.embed(x) if s == 0 else x
            for k in range(cuts[s], cuts[s + 1]):
                x = model.blocks[k](x)
            return model.logits(x) if s == stages - 1 else x

        return run

    loss = 0.0
    for d, (inputs, targets) in enumerate(zip(x.tensor_split(grid.d), y.tensor_split(grid.d), strict=True)):
        seed = name_seed(0, f"step 0, round 0, replica {d}")
        for micro in split_batch(inputs, targets, count=m):
            x = micro.inputs
            for s in range(stages):
                options = {"loss": sum_of_losses, "divide_by": total, "seed": seed}
                x = RunningStage(part(s), s, stages, **options)._compute(
                    micro.index, x, micro.targets if s == stages - 1 else None
                )
            loss = loss + x
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def sum_of_losses(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("options", [{}, {"recompute": True, "sequence": True}], ids=["plain", "recompute-sequence"])
def test_dropout_draws_the_masks_of_one_device(options):
    config, grid = configuration(layers=2, dropout=0.2), grid_of(2, 2, 2)
    run = fw.simulate(
        on_mesh, config, grid, schedule_of("1f1b", 2, 2), steps=1, clip=None, exact=True, ranks=8, cluster=NETWORK, **options
    )
    loss, gradients = loss_with_dropout(config, grid, 2, 2)
    for losses, _, got, _ in run.values:
        assert losses == pytest.approx([loss], abs=BOUND)
        assert max(float((g - gradients[n]).abs().max()) for n, g in got.items()) < BOUND


# --- real ranks ---------------------------------------------------------------------------------------------------------
def three_meshes(comm, cases):
    return [
        on_mesh(comm, configuration(layers=2), grid_of(*mesh), schedule_of(name, mesh[1], 2), steps=2) for mesh, name in cases
    ]


def test_two_axes_on_four_real_ranks():
    cases = [((2, 2, 1), "zb-h1"), ((2, 1, 2), "gpipe"), ((1, 2, 2), "1f1b")]
    run = fw.run(three_meshes, cases, ranks=4, stream=False)
    for k in range(len(cases)):
        assert distance([value[k] for value in run.values], one_device(configuration(layers=2), steps=2)) < BOUND
