"""A gradient goes into its bucket as soon as backward gives it, divided already: more of it, or none of it, may come after that.

Two losses with a backward each, and a step that was begun and thrown away, against one device in float64. Whoever takes a
gradient out of its bucket again is told.
Every gradient is a sum of few products of numbers about 1; the division and its undoing round each at most twice more.
"""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.data import DataParallel

NETWORK = uniform(1e-6, 1e9)
BOUND = 200 * torch.finfo(torch.float64).eps


class TwoTrunks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        dice = torch.Generator().manual_seed(5)
        make = lambda *shape: torch.nn.Parameter(torch.randn(*shape, generator=dice, dtype=torch.float64) / 3)  # noqa: E731
        self.left, self.right, self.head = make(6, 5), make(6, 5), make(5)

    def forward(self, x, trunk):
        return ((x @ getattr(self, trunk)).tanh() @ self.head).square().mean()


def batches(rank):
    dice = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=dice, dtype=torch.float64) for _ in range(3)]


def two_losses(model, xs, clear):
    for trunk, x in zip(("left", "right"), xs, strict=False):
        model(x, trunk).backward()


def begun_and_thrown_away(model, xs, clear):
    model(xs[2], "left").backward()
    clear()
    two_losses(model, xs, clear)


def one_device(story, ranks):
    """The mean over ranks of what one rank's batches give."""
    total = None
    for rank in range(ranks):
        model = TwoTrunks()
        story(model, batches(rank), model.zero_grad)
        grads = [p.grad / ranks for p in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    return total


def in_parallel(comm, story, bucket_bytes, average):
    model = TwoTrunks()
    dp = DataParallel(model, comm, bucket_bytes=bucket_bytes, average=average)
    story(dp, batches(comm.rank), model.zero_grad)
    dp.synchronise()
    grads = [p.grad for p in model.parameters()]
    return grads if average == "ranks" else [g / comm.size for g in grads]


def begun_otherwise(model, xs, clear):
    model(xs[2], "left").backward()
    clear()
    for trunk, x in zip(("right", "left"), xs, strict=False):  # what was thrown away comes last
        model(x, trunk).backward()


def apart(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("story", [two_losses, begun_and_thrown_away, begun_otherwise])
@pytest.mark.parametrize(
    ("ranks", "average", "checks"), [(2, "ranks", True), (3, "ranks", False), (3, "none", True), (4, "ranks", False)]
)
def test_more_or_nothing_after_it_was_placed(story, ranks, average, checks):
    run = fw.simulate(in_parallel, story, 10**6, average, ranks=ranks, cluster=NETWORK, checks=checks)
    right = one_device(story, ranks)
    assert max(float(g.abs().max()) for g in right) > 0.1
    for grads in run.values:
        assert apart(grads, right) <= BOUND
    off = [g.clone() for g in right]
    off[0][0, 0] += 10 * BOUND
    assert apart(off, right) > BOUND


class Undivided(DataParallel):
    def _put_back(self, bucket, place):
        bucket.placed.discard(bucket.names[place])


def with_the_twin(comm):
    model = TwoTrunks()
    dp = Undivided(model, comm, bucket_bytes=10**6)
    two_losses(dp, batches(comm.rank), model.zero_grad)
    dp.synchronise()
    return [p.grad for p in model.parameters()]


def test_a_twin_that_divides_the_first_part_twice_is_caught():
    run = fw.simulate(with_the_twin, ranks=2, cluster=NETWORK)
    assert apart(run.values[0], one_device(two_losses, 2)) > 10**6 * BOUND


def placed_early(comm):
    """Names whose gradient stands in its bucket before the bucket is full, and whether p.grad is that place."""
    model = TwoTrunks()
    dp = DataParallel(model, comm, bucket_bytes=10**6)
    dp(batches(0)[0], "left").backward()
    bucket = dp.buckets[0]
    found = sorted(bucket.placed), all(bucket.is_placed(i) for i, n in enumerate(bucket.names) if n in bucket.placed)
    model.zero_grad()
    dp.synchronise(shadow=True)
    return found


def test_a_gradient_is_placed_when_it_comes():
    assert fw.simulate(placed_early, ranks=2, cluster=NETWORK).values == [(["head", "left"], True)] * 2


def nothing_else(dp, model):
    pass


def replaces_in_a_hook(dp, model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(-1, 1)))


def replaces_one_later(dp, model):
    def hook(p):
        if dp.buckets[0].launched:  # by this one, the last to come
            p.grad = p.grad * 2

    model.right.register_post_accumulate_grad_hook(hook)


def is_cast(dp, model):
    two_losses(dp, batches(dp.comm.rank), model.zero_grad)
    dp.synchronise()
    model.float().double()
    model.zero_grad()


def meddled_with(comm, meddle):
    model = TwoTrunks()
    dp = DataParallel(model, comm, bucket_bytes=10**6)
    meddle(dp, model)
    two_losses(dp, batches(comm.rank), model.zero_grad)
    dp.synchronise()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("meddle", "word"),
    [
        (replaces_in_a_hook, "put into its bucket and then p.grad was made another tensor"),
        (replaces_one_later, "gradient of right was put into its bucket and then p.grad was made another tensor"),
        (is_cast, "was cast or moved since the first step; make a new DataParallel"),
    ],
)
def test_a_gradient_taken_out_of_its_bucket_is_seen(meddle, word):
    """Each gave wrong gradients without a word: divided twice, never summed, or the last step's."""
    with pytest.raises(fw.RankError, match=word):
        fw.simulate(meddled_with, meddle, ranks=3, cluster=NETWORK, checks=False)
    assert apart(fw.simulate(meddled_with, nothing_else, ranks=3, cluster=NETWORK).values[0], one_device(two_losses, 3)) <= BOUND


def repeats_after_nan(comm, mode):
    model, xs = TwoTrunks(), batches(comm.rank)
    dp = DataParallel(model, comm, bucket_bytes=10**6, mode=mode, finite=True)
    two_losses(dp, [xs[0], xs[1] * float("nan")], model.zero_grad)
    with pytest.raises(ValueError, match="nan or inf in the gradient of"):
        dp.synchronise()
    model.zero_grad(set_to_none=False)
    two_losses(dp, xs, model.zero_grad)
    dp.synchronise()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("mode", ["naive", "bucketed"])
def test_a_step_repeated_after_nan_is_divided_once(mode):
    found = fw.simulate(repeats_after_nan, mode, ranks=3, cluster=NETWORK, checks=False).values
    assert all(apart(grads, one_device(two_losses, 3)) <= BOUND for grads in found)
