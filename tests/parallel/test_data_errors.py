"""What can go wrong with replicas is named, by rank and by parameter, and nothing hangs."""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import SGD
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.replicas import check_replicas, differing, digest

NETWORK = uniform(1e-6, 1e9)


def simulate(program, *args, ranks=4, **kwargs):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **kwargs)


def step_with(comm, *, spoil=None, weights=lambda rank: 0, options=None, model=None, x=None, shadow=False, steps=1):
    """Steps of a small model; `spoil(rank, model)` is called after backward. Gives back the parameters' gradients."""
    model = model(comm.rank) if model else MLP((6, 8, 3), seed=weights(comm.rank))
    dp = DataParallel(model, comm, bucket_bytes=100, **(options or {}))
    for _ in range(steps):
        dp.module.zero_grad()
        if not (shadow and comm.rank == 1):
            loss = dp(torch.ones(4, 6) * (comm.rank + 1) if x is None else x(comm.rank)).square().mean()
            loss.backward()
        if spoil:
            spoil(comm.rank, model)
        dp.synchronise(shadow=shadow and comm.rank == 1)
    return {n: p.grad for n, p in model.named_parameters()}, {n: p.detach().clone() for n, p in model.named_parameters()}


# --- replicas ---------------------------------------------------------------------------------------------------------
def test_different_weights_at_the_start_are_named():
    with pytest.raises(fw.RankError, match=r"differ before the first step. Not what rank 0 holds: rank 2: layers.0.weight"):
        simulate(step_with, weights=lambda rank: int(rank == 2))
    (_, first), *_, (_, last) = simulate(step_with, weights=lambda rank: rank, options={"start": "broadcast"}).values
    assert all(torch.equal(x, last[n]) for n, x in first.items())


def other_model(rank):
    return MLP((6, 8, 3) if rank != 3 else (6, 8, 8, 3))


def one_bit(comm):
    x = torch.ones(1000)
    if comm.rank == 1:
        x.view(torch.int32)[777] ^= 1
    y = torch.zeros(0)
    return differing(comm, [("x", x), ("y", y)])


def test_other_models_and_single_bits_are_seen():
    with pytest.raises(fw.RankError, match=r"rank 3: \(other names\)"):
        simulate(step_with, model=other_model)
    assert simulate(one_bit, ranks=3).values == [{1: ["x"]}] * 3
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, 1)) != digest(torch.zeros(2, 1, dtype=torch.int32))
    assert digest(torch.zeros(1)) != digest(-torch.zeros(1))  # the same number, other bits


def drift(comm):
    model = MLP((3, 3))
    dp = DataParallel(model, comm, mode="bucketed")
    dp(torch.ones(1, 3) * comm.rank).sum().backward()
    SGD(model.parameters(), lr=0.1).step()  # without synchronise()
    dp.check_equal("after step 1")


def test_a_forgotten_synchronise_is_found_by_check_equal():
    with pytest.raises(fw.RankError, match=r"differ after step 1. Not what rank 0 holds: rank 1: layers.0.weight, grad"):
        simulate(drift)


def forgotten(comm):
    model = MLP((3, 3))
    dp = DataParallel(model, comm)
    for _ in range(2):
        dp(torch.ones(1, 3)).sum().backward()


def test_a_forgotten_synchronise_is_found_by_the_next_backward():
    with pytest.raises(fw.RankError, match=r"layers.0.bias arrives a second time, when its bucket has been sent: sync"):
        simulate(forgotten, ranks=2)


# --- backward ---------------------------------------------------------------------------------------------------------
def skips(comm, everything):
    model = MLP((6, 8, 3))
    dp = DataParallel(model, comm, bucket_bytes=100)
    if comm.rank != 1:
        dp(torch.ones(4, 6)).sum().backward()
    if comm.rank != 1 or not everything:
        dp.synchronise()


@pytest.mark.parametrize("real", [False, True])
def test_a_rank_that_skips_backward_is_named(real):
    start = (lambda *a: fw.run(*a, ranks=2, stream=False)) if real else (lambda *a: simulate(*a, ranks=3))
    with pytest.raises(fw.RankError, match=r"rank 1, step 0: synchronise\(\) without a backward") as found:
        start(skips, False)
    assert found.value.rank == 1
    with pytest.raises(fw.CommError, match="rank 1") as found:  # it is gone: whoever waits for it says so, and does not hang
        start(skips, True)
    assert "waiting for rank 1, which returned without making the matching call" in str(found.value)
    assert "in skips: dp(torch.ones(4, 6)).sum().backward()" in str(found.value) or not real


def half_used(rank):
    model = MLP((6, 8, 3))
    model.spare = torch.nn.Parameter(torch.ones(2))
    model.sometimes = torch.nn.Parameter(torch.full((1,), 2.0))
    forward = model.forward
    model.forward = lambda x: forward(x) * (model.sometimes if rank == 2 else 1)
    return model


def test_a_parameter_without_gradient_is_named_or_counts_as_zero():
    with pytest.raises(fw.RankError, match=r"no gradient for (spare|sometimes).*Freeze it .* or give unused='zeros'"):
        simulate(step_with, model=half_used)
    values = simulate(step_with, model=half_used, options={"unused": "zeros"}).values
    for grads, _ in values:
        assert grads["spare"] is None  # nobody has one: an optimiser must not step it
        assert torch.equal(grads["sometimes"], values[0][0]["sometimes"]) and grads["sometimes"].abs() > 0
    for mode in ("naive", "bucketed"):
        other = simulate(step_with, model=half_used, options={"unused": "zeros", "mode": mode}).values
        assert torch.equal(other[0][0]["sometimes"], values[0][0]["sometimes"]) and other[0][0]["spare"] is None


def test_nan_is_named_before_it_spreads():
    def spoil(rank, model):
        if rank == 3:
            model.layers[2].bias.grad[1] = float("nan")

    for mode in ("bucketed", "naive"):
        with pytest.raises(fw.RankError, match=r"rank 3, step 0: nan or inf in the gradient of layers.2.bias, before") as found:
            simulate(step_with, spoil=spoil, options={"mode": mode})
        assert found.value.rank == 3
    with pytest.raises(fw.RankError, match=r"rank 1, step 0: nan or inf in the gradient of layers.2"):  # inside backward
        simulate(step_with, x=lambda rank: torch.full((4, 6), float("inf") if rank == 1 else 1.0))
    values = simulate(step_with, x=lambda rank: torch.full((4, 6), float("inf") if rank == 1 else 1.0), options={"finite": False})
    assert all(g["layers.0.weight"].isnan().any() for g, _ in values.values)  # loss scaling wants to see them


def test_large_gradients_that_sum_to_infinity_are_no_nan():
    def spoil(rank, model):
        for p in model.parameters():
            p.grad.fill_(3e38)

    grads, _ = simulate(step_with, spoil=spoil, options={"mode": "bucketed"}, ranks=1).values[0]
    assert all(g.isfinite().all() for g in grads.values())


def unfreezes(comm):
    model = MLP((3, 3, 3))
    model.layers[0].weight.requires_grad_(False)
    dp = DataParallel(model, comm)
    model.layers[0].weight.requires_grad_(True)
    dp(torch.ones(2, 3)).sum().backward()
    dp.synchronise()


def wrapped_twice(comm, close):
    model = MLP((3, 3))
    first = DataParallel(model, comm)
    if close:
        first.close()
    dp = DataParallel(model, comm)
    dp(torch.ones(2, 3)).sum().backward()
    dp.synchronise()
    return first.all_reduces


def test_models_that_change_or_are_wrapped_twice():
    with pytest.raises(fw.RankError, match="layers.0.weight was frozen when DataParallel was made"):
        simulate(unfreezes, ranks=2)
    with pytest.raises(fw.RankError, match=r"close\(\) that one first"):
        simulate(wrapped_twice, False, ranks=2)
    assert simulate(wrapped_twice, True, ranks=2).values == [0, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "async"}, "mode is 'async'; one of 'naive', 'bucketed', 'overlapped'"),
        ({"average": "mean"}, "'ranks', 'tokens', 'none'"),
        ({"unused": "find"}, "'refuse', 'zeros'"),
        ({"start": "hope"}, "'refuse', 'broadcast'"),
        ({"buffers": "all"}, "'first', 'average', 'local'"),
        ({"bucket_bytes": 0}, "at least 1"),
        ({"bucket_bytes": 25e6}, "whole number"),
        ({"all_reduce": "rign"}, "did you mean 'ring'"),
        ({"average": "tokens"}, r"needs synchronise\(tokens=...\)"),
    ],
)
def test_refusals(options, says):
    def program(comm):
        model = MLP((2, 2))
        dp = DataParallel(model, comm, **options)
        dp(torch.ones(1, 2)).sum().backward()
        dp.synchronise()

    with pytest.raises(fw.RankError, match=says):
        simulate(program, ranks=1)


def test_a_model_without_parameters_and_tokens_that_are_not_wanted():
    def nothing(comm):
        DataParallel(torch.nn.ReLU(), comm)

    def tokens(comm):
        dp = DataParallel(MLP((2, 2)), comm)
        dp(torch.ones(1, 2)).sum().backward()
        dp.synchronise(tokens=3)

    with pytest.raises(fw.RankError, match="no parameter to train"):
        simulate(nothing, ranks=1)
    with pytest.raises(fw.RankError, match="average='ranks' takes no tokens"):
        simulate(tokens, ranks=1)


# --- hard cases that must work ----------------------------------------------------------------------------------------
def in_other_order(comm):
    """The ranks run two branches in opposite order, so that their buckets fill in opposite order."""
    a, b = MLP((4, 4, 4), seed=1), MLP((4, 4, 4), seed=2)
    both = torch.nn.ModuleList([a, b])
    dp = DataParallel(both, comm, bucket_bytes=1)
    x = torch.full((2, 4), comm.rank + 1.0)
    (b(a(x)) if comm.rank % 2 else a(b(x))).sum().backward()
    dp.synchronise()
    dp.check_equal()
    return [p.grad.clone() for p in both.parameters()]


def in_other_order_on_one(ranks):
    """The mean gradient of what the ranks compute, on one device."""
    a, b = MLP((4, 4, 4), seed=1), MLP((4, 4, 4), seed=2)
    for rank in range(ranks):
        x = torch.full((2, 4), rank + 1.0)
        ((b(a(x)) if rank % 2 else a(b(x))).sum() / ranks).backward()
    return [p.grad for p in torch.nn.ModuleList([a, b]).parameters()]


def test_ranks_whose_buckets_fill_in_another_order_still_meet():
    for ranks, run in ((4, simulate(in_other_order, ranks=4)), (2, fw.run(in_other_order, ranks=2, stream=False))):
        wanted = in_other_order_on_one(ranks)
        for grads in run.values:
            assert all(torch.allclose(g, w, rtol=1e-5, atol=1e-6) for g, w in zip(grads, wanted, strict=True))


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = MLP((4, 5), dtype=torch.float32)
        self.b = MLP((5, 6), dtype=torch.bfloat16)
        self.c = MLP((6, 1), dtype=torch.float64)

    def forward(self, x):
        return self.c(self.b(self.a(x).bfloat16()).double())


def mixed(comm):
    model = Mixed()
    dp = DataParallel(model, comm, bucket_bytes=64)
    dp(torch.full((2, 4), 1.0 + comm.rank)).sum().backward()
    dp.synchronise()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, sorted({str(b.dtype) for b in dp.buckets})


def test_mixed_dtypes():
    values = simulate(mixed, ranks=2).values
    assert values[0][1] == ["torch.bfloat16", "torch.float32", "torch.float64"]
    want = {}
    for rank in range(2):
        model = Mixed()
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        for n, p in model.named_parameters():
            want[n] = want.get(n, 0) + p.grad.double() / 2
    for n, g in values[0][0].items():
        assert g.dtype == dict(Mixed().named_parameters())[n].dtype
        assert (g.double() - want[n]).abs().max() <= 4 * torch.finfo(g.dtype).eps * want[n].abs().max()


def test_check_replicas_on_one_rank_is_silent():
    simulate(lambda comm: check_replicas(comm, [("x", torch.ones(1))]), ranks=1)
