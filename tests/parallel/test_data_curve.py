"""The curve of one device: a GPT on real text, 4 real ranks, 50 steps, numbers of tokens that differ, within the bound."""

import pytest
import torch

import fourwalls as fw
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.layers import cross_entropy
from fourwalls.nn.optim import Adam
from fourwalls.nn.text import batch
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.token_loss import summed_loss

CONFIG = GPTConfig(length=16, width=16, layers=1, heads=2)
RANKS, ROWS, STEPS, LR, EPS = 4, 2, 50, 3e-3, 1e-3


def text(step, rank, dtype=torch.float64):
    """Two rows of real text of which rank r's count for about (r + 1) / 4 of their tokens."""
    tokens, targets = batch(0, step, rank, batch=ROWS, length=CONFIG.length)
    kept = torch.arange(CONFIG.length).expand(ROWS, -1) < (rank + 1) * CONFIG.length // RANKS - step % 3
    return tokens, targets.where(kept, torch.tensor(-100))


def on_ranks(comm, means=False):
    """The loss of the whole batch at every step, as this rank knows it after the sums."""
    model, curve = GPT(CONFIG, dtype=torch.float64), []
    dp = DataParallel(model, comm, bucket_bytes=16_000, average="ranks" if means else "tokens")
    adam = Adam(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        adam.zero_grad()
        tokens, targets = text(step, comm.rank)
        loss, count = summed_loss(dp(tokens), targets)
        (cross_entropy(dp(tokens), targets) if means else loss).backward()
        dp.synchronise(tokens=None if means else count)
        adam.step()
        both = fw.collectives.all_reduce(comm, torch.stack([loss.detach(), torch.tensor(float(count))]).double())
        curve.append(float(both[0] / both[1]))
    dp.check_equal()
    return curve


def on_one_device():
    """(losses, bound of each): the distance that roundings can reach, carried from step to step.

    Gradients may differ by e = 2 K u A (see test_data.py). Adam then moves parameters apart by at most 4 lr / eps e a step, and a
    loss changes by at most the 1-norm of its gradient times that; 10 for what parameters apart do to later gradients.
    """
    model, curve, bounds, apart = GPT(CONFIG, dtype=torch.float64), [], [], 0.0
    adam = Adam(model.parameters(), lr=LR, eps=EPS)
    h, s = CONFIG.width, CONFIG.length
    roundings = RANKS * ROWS * s + 2 * CONFIG.layers * (10 * h + s) + h + CONFIG.vocabulary
    for step in range(STEPS):
        adam.zero_grad()
        parts = [text(step, r) for r in range(RANKS)]
        loss, count = summed_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts]))
        (loss / count).backward()
        grads = [p.grad for p in model.parameters()]
        curve.append(float(loss.detach() / count))
        largest = max(float(g.abs().max()) for g in grads) * RANKS * ROWS  # more than the sum of all rows' contributions
        unit = torch.finfo(torch.float64).eps / 2
        bounds.append(sum(float(g.abs().sum()) for g in grads) * apart * 10 + 2 * roundings * unit * curve[-1])
        apart += 4 * LR / EPS * 2 * roundings * unit * largest
        adam.step()
    return curve, bounds


@pytest.fixture(scope="module")
def oracle():
    return on_one_device()


def test_four_real_ranks_follow_one_device_for_50_steps(oracle):
    want, bounds = oracle
    curves = fw.run(on_ranks, ranks=RANKS, stream=False).values
    assert all(curve == curves[0] for curve in curves)
    assert all(abs(a - b) <= bound for a, b, bound in zip(curves[0], want, bounds, strict=True))
    assert max(bounds) < 1e-6 and want[-1] < want[0] - 0.5  # it learns, and the bound is tight
    off = [w + 10 * b for w, b in zip(want, bounds, strict=True)]
    assert not any(abs(a - b) <= bound for a, b, bound in zip(off, want, bounds, strict=True))


def test_means_of_means_leave_the_curve(oracle):
    want, bounds = oracle
    curve = fw.simulate(on_ranks, True, ranks=RANKS).values[0]
    assert abs(curve[0] - want[0]) <= bounds[0]  # the first loss is before any step
    assert all(abs(a - b) > 100 * bound for a, b, bound in zip(curve[1:], want[1:], bounds[1:], strict=True))
