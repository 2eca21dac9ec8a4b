"""Faults seen elsewhere, by their numbers in the list of trials: each is caught here, and the hint names the factor."""

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives as C
from fourwalls.cost.hardware import uniform
from fourwalls.nn.layers import cross_entropy
from fourwalls.nn.mlp import MLP
from fourwalls.parallel.batches import own_part
from fourwalls.parallel.compare import explain_difference
from fourwalls.parallel.data import MODES, DataParallel
from fourwalls.parallel.token_loss import scaled_loss, summed_loss, total_tokens

NETWORK = uniform(1e-6, 1e9)


def simulate(program, *args, ranks=2, **kwargs):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **kwargs)


def one_weight(start=1.0):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    return model


# --- factors ----------------------------------------------------------------------------------------------------------
def loss_is_a_sum(comm, average):
    """c10: x = [-1, 2, -3, 4], loss = sum((w x)^2): the whole gradient is 60."""
    x = torch.tensor([-1.0, 2.0, -3.0, 4.0], dtype=torch.float64).tensor_split(comm.size)[comm.rank]
    model = one_weight()
    dp = DataParallel(model, comm, average=average)
    (model.w * x).square().sum().backward()
    dp.synchronise(tokens=len(x) if average == "tokens" else None)
    return {"w": model.w.grad.clone()}


def test_c10_a_sum_is_not_averaged():
    right, hint = {"w": torch.tensor([60.0])}, {"bound": 1e-12, "world_size": 2}
    assert explain_difference(simulate(loss_is_a_sum, "none").values[0], right, **hint) == ""
    averaged = simulate(loss_is_a_sum, "ranks").values[0]
    assert averaged["w"].item() == 30.0
    said = explain_difference(averaged, right, **hint)
    assert said == "the gradients are exactly 2 times too small: the number of ranks (2). Divided by it twice?"
    assert simulate(loss_is_a_sum, "tokens").values[0]["w"].item() == 15.0  # the mean over 4


def averaged_by_hand_too(comm, how):
    """c11: something of the reader's own on top."""
    model = MLP((4, 3), dtype=torch.float64)
    dp = DataParallel(model, comm)
    loss = model(torch.full((1, 4), 1.0 + comm.rank, dtype=torch.float64)).square().mean()
    (loss * comm.size if how == "loss times ranks" else loss).backward()
    dp.synchronise()
    for p in model.parameters():
        if how == "summed again":
            p.grad = C.all_reduce(comm, p.grad)
        elif how == "divided again":
            p.grad /= comm.size
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("summed again", "exactly 4 times too large: the number of ranks (4)"),
        ("loss times ranks", "exactly 4 times too large"),
        ("divided again", "exactly 4 times too small: the number of ranks (4). Divided by it twice?"),
        ("", ""),
    ],
)
def test_c11_scaled_twice(how, says):
    model = MLP((4, 3), dtype=torch.float64)
    x = torch.stack([torch.full((4,), 1.0 + r, dtype=torch.float64) for r in range(4)])
    model(x).square().mean().backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    got = simulate(averaged_by_hand_too, how, ranks=4).values
    said = explain_difference(got[0], want, bound=1e-12, world_size=4)
    assert says in said and bool(says) == bool(said)


def test_hints_name_the_factor_or_the_place():
    want = {"a": torch.tensor([[1.0, -2.0], [3.0, 0.0]]), "b": torch.zeros(3), "frozen": None}
    sizes = {"world_size": 4, "accumulation": 2}

    def said(f, **change):
        got = {n: None if w is None else w * f for n, w in want.items()} | change
        return explain_difference(got, want, bound=1e-6, **sizes)

    assert said(1.0) == "" and said(1 + 1e-8) == ""
    assert "exactly 8 times too large: ranks times micro-batches (4 x 2)" in said(8.0)
    assert "exactly 8 times too small" in said(1 / 8)
    assert "exactly 2 times too large: the number of micro-batches (2)" in said(2.0)
    assert "exactly 16 times too large: the number of ranks (4), squared" in said(16.0)
    assert "1 of 2 gradients differ from one device's; first a[0, 0]: 3, one device has 1" in said(3.0)
    assert "first b[1]: 1e-05" in said(1.0, b=torch.tensor([0, 1e-5, 0]))
    assert "nan" in said(float("nan")) and "exactly" not in said(float("nan"))
    assert said(1.0, b=None) == "b: one device has one, here is none"
    assert said(1.0, frozen=torch.zeros(1)) == "frozen: here is one, one device has none"
    assert "shape (2,)" in said(1.0, b=torch.zeros(2)) and "other names" in said(1.0, c=None)
    assert "exactly" not in explain_difference({"a": torch.zeros(2)}, {"a": torch.full((2,), 1e-3)}, bound=1e-6, **sizes)


# --- tokens -----------------------------------------------------------------------------------------------------------
def valid(comm_size, counts, rank):
    """(logits' weight, targets) where rank r has counts[r] valid tokens of 8."""
    dice = torch.Generator().manual_seed(rank)
    y = torch.randint(0, 5, (8,), generator=dice)
    y[counts[rank] :] = -100
    return torch.randn(8, 6, generator=dice, dtype=torch.float64), y


def weighted(comm, counts, way):
    """c13: gradients by one of the ways to weight by tokens, or by none."""
    model = MLP((6, 5), dtype=torch.float64)
    average = {"synchronise": "tokens", "total first": "none", "for ddp": "ranks", "mean of means": "ranks"}[way]
    dp = DataParallel(model, comm, average=average)
    x, y = valid(comm.size, counts, comm.rank)
    loss, count = summed_loss(model(x), y)
    if way == "total first":
        loss = scaled_loss(loss, total_tokens(comm, count))
    elif way == "for ddp":
        loss = scaled_loss(loss, total_tokens(comm, count), divided_by=comm.size)
    elif way == "mean of means":
        loss = cross_entropy(model(x), y)
    loss.backward()
    divisor = dp.synchronise(tokens=count if average == "tokens" else None)
    assert divisor == {"tokens": max(1, sum(counts)), "none": 1, "ranks": comm.size}[average]
    return {n: p.grad for n, p in model.named_parameters()}


def on_one(counts):
    model = MLP((6, 5), dtype=torch.float64)
    parts = [valid(len(counts), counts, r) for r in range(len(counts))]
    loss, count = summed_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts]))
    scaled_loss(loss, count).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("counts", [(1, 7), (0, 5), (8, 8), (0, 0), (3, 0, 8, 1)])
@pytest.mark.parametrize("way", ["synchronise", "total first", "for ddp"])
def test_c13_tokens_weigh_the_same_wherever_they_are(counts, way):
    got = simulate(weighted, counts, way, ranks=len(counts)).values
    assert all(explain_difference(g, on_one(counts), bound=1e-13, world_size=len(counts)) == "" for g in got)


def test_c13_the_mean_of_means_is_wrong_where_counts_differ():
    assert "differ" in explain_difference(simulate(weighted, (1, 7), "mean of means").values[0], on_one((1, 7)), bound=1e-13)
    assert explain_difference(simulate(weighted, (8, 8), "mean of means").values[0], on_one((8, 8)), bound=1e-13) == ""
    assert total_tokens_refusal("-1") and total_tokens_refusal("1.5")


def total_tokens_refusal(count):
    with pytest.raises(fw.RankError, match="whole number of tokens"):
        simulate(lambda comm: total_tokens(comm, eval(count)), ranks=1)
    return True


def grid(comm, accumulation, bad=False):
    """c14: 16 samples over ranks and micro-batches."""
    model = MLP((3, 2), dtype=torch.float64)
    dp = DataParallel(model, comm, average="none" if bad else "ranks")
    x = torch.arange(48, dtype=torch.float64).view(16, 3) / 48
    parts = own_part(x, comm.rank, comm.size).tensor_split(accumulation)
    for k, part in enumerate(parts):
        loss = model(part).square().mean() / (1 if bad else accumulation)
        if k < accumulation - 1:
            with dp.no_sync():
                loss.backward()
        else:
            loss.backward()
    dp.synchronise()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_c14_ranks_times_accumulation(ranks, accumulation):
    model = MLP((3, 2), dtype=torch.float64)
    model(torch.arange(48, dtype=torch.float64).view(16, 3) / 48).square().mean().backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    sizes = {"world_size": ranks, "accumulation": accumulation}
    got = simulate(grid, accumulation, ranks=ranks).values
    assert [explain_difference(g, want, bound=1e-14, **sizes) for g in got] == [""] * ranks
    said = explain_difference(simulate(grid, accumulation, True, ranks=ranks).values[0], want, bound=1e-12, **sizes)
    factor = ranks * accumulation
    assert said == "" if factor == 1 else f"exactly {factor} times too large" in said


# --- micro-batches ----------------------------------------------------------------------------------------------------
def two_micro_batches(comm, which, mode):
    """c16, c17: inputs 1 + r and 3 + r; d loss / d w = input. Right: the mean of all four, times two, 5.0 on both ranks."""
    model = one_weight()
    dp = DataParallel(model, comm, mode=mode)
    losses = [(model.w * (first + comm.rank)).sum() for first in (1.0, 3.0)]  # both forwards outside no_sync
    if which == "first":
        losses[0].backward()
        dp.synchronise()
        with dp.no_sync():
            losses[1].backward()
    else:
        with dp.no_sync():
            losses[0].backward()
        alone = model.w.grad.item()
        losses[1].backward()
        dp.synchronise()
        assert alone == 1.0 + comm.rank and dp.all_reduces == 1  # c17: nothing was sent, though forward ran outside
    grad = model.w.grad.item()
    if which == "first":
        dp.check_equal("after the step")
    return grad


@pytest.mark.parametrize("mode", MODES)
def test_c16_c17_only_the_last_micro_batch_is_sent(mode):
    assert simulate(two_micro_batches, "last", mode).values == [5.0, 5.0]
    with pytest.raises(fw.RankError, match="rank 1: gradient of w. Some step was not synchronised, or its synch"):
        simulate(two_micro_batches, "first", mode)
