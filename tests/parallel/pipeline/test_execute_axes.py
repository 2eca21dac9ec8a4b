"""A pipeline beside other axes: replicas that are summed stage by stage, and stages whose products are shared."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline import schedules, zero_bubble
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.microbatches import split_batch
from fourwalls.parallel.tensor import TensorFeedForward

from .small_stages import BOUND, NETWORK, W, batch, far, layer, oracle, squares


def replicas(comm, schedule, how="by hand"):
    """d = 2 x p = 2: each replica has half of the rows; a stage sums over its replicas once its last gradient is there.

    how: "by hand" an all-reduce a parameter, "early" the same after the first gradient (wrong), else DataParallel in that mode.
    """
    mesh = Mesh(comm, Grid(d=2, p=2))
    x, target = (t[mesh.d.rank :: 2] for t in batch(8))
    mine = {mesh.p.rank: layer(mesh.p.rank)}

    by_hand = how in ("by hand", "early")
    replicas = None if by_hand else DataParallel(mine[mesh.p.rank], mesh.d, mode=how, average="none", bucket_bytes=256)

    def sum_up(stage):
        if not by_hand:
            replicas.synchronise()
            return
        for p in mine[stage].parameters():
            p.grad = ring.all_reduce(mesh.d, p.grad)

    done = []

    def watch(action, running):
        if how == "early" and action.kind in "BW" and not done:
            done.append(sum_up(action.stage))

    hook = None if how == "early" else sum_up
    execute(schedule, mine, mesh.p, split_batch(x, target, count=4), squares, divide_by=8, after_stage=hook, watch=watch)
    return mesh.p.rank, far(mine, oracle(2, divide_by=8.0)), [p.grad for p in mine[mesh.p.rank].parameters()]


BESIDE = [
    (schedules.one_f_one_b(2, 4), "by hand"),
    (schedules.one_f_one_b(2, 4), "bucketed"),
    (zero_bubble.zb_h1(2, 4), "bucketed"),
    (zero_bubble.zb_h1(2, 4), "naive"),
    (schedules.gpipe(2, 4), "naive"),
]


@pytest.mark.parametrize(("schedule", "how"), BESIDE)
def test_d11_replicas_of_every_stage_are_equal(schedule, how):
    run = fw.simulate(replicas, schedule, how, ranks=4, cluster=NETWORK)
    for stage in (0, 1):
        one, two = (grads for s, _, grads in run.values if s == stage)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert max(value[1] for value in run.values) < BOUND


def test_mutant_summing_replicas_before_the_last_microbatch_is_caught():
    run = fw.simulate(replicas, schedules.one_f_one_b(2, 4), "early", ranks=4, cluster=NETWORK)
    assert max(value[1] for value in run.values) > 1e-3


def tensor_stages(comm, schedule):
    """t = 2 x p = 2: each stage is an MLP whose products two ranks share."""
    mesh = Mesh(comm, Grid(p=2, t=2))
    torch.manual_seed(0)
    module = TensorFeedForward(mesh.t, W, 2 * W, std=0.4, out_std=0.4, dtype=torch.float64)
    for m in (module.up, module.down):
        m.init_parameters(f"{mesh.p.rank}", 0)
    x, target = batch(6)
    execute(schedule, {mesh.p.rank: module}, mesh.p, split_batch(x, target, count=3), squares)
    return mesh.place, {n: (p.detach(), p.grad) for n, p in module.named_parameters()}


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(2, 3), zero_bubble.zb_h1(2, 3)])
def test_tensor_parallel_stages(schedule):
    run = fw.simulate(tensor_stages, schedule, ranks=4, cluster=NETWORK)
    parts_of = {(place.p, place.t): tensors for place, tensors in run.values}

    def whole(p, name, k):
        one, two = parts_of[p, 0][name][k], parts_of[p, 1][name][k]
        if name == "down.bias":
            assert torch.equal(one, two)
            return one
        return torch.cat([one, two], dim=1 if name == "down.weight" else 0)

    names = list(parts_of[0, 0])
    weights = {(p, n): whole(p, n, 0).clone().requires_grad_() for p in (0, 1) for n in names}
    x, target = batch(6)
    for p in (0, 1):
        x = torch.nn.functional.linear(x, weights[p, "up.weight"], weights[p, "up.bias"])
        x = torch.nn.functional.gelu(x, approximate="tanh")
        x = torch.nn.functional.linear(x, weights[p, "down.weight"], weights[p, "down.bias"])
    squares(x, target).backward()
    for (p, n), w in weights.items():
        assert float((whole(p, n, 1) - w.grad).abs().max()) < BOUND, (p, n)
