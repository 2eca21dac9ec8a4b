"""Grouped queries and rotary positions: against torch, against the formula, by finite differences; and what they promise."""

import dataclasses
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fourwalls.cost.memory import layer_activations
from fourwalls.memory.ledger import Ledger
from fourwalls.nn.attention import Attention, attend, split_heads
from fourwalls.nn.gpt import GPT, Block, GPTConfig
from fourwalls.nn.init import draw, initialise
from fourwalls.nn.rotary import rotate

GROUPED = GPTConfig(vocabulary=13, length=6, width=24, layers=2, heads=6, kv_heads=2, rotary=True, seed=1)
F64 = {"dtype": torch.float64}
EPS = torch.finfo(torch.float64).eps


def close(actual, expected, terms):
    return (actual - expected).abs().max().item() <= 8 * EPS * terms * max(expected.abs().max().item(), 1e-3)


def heads_of(name, heads, s=5, d=4, b=2):
    return draw(name, (b, heads, s, d), std=1.0).requires_grad_()


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_grouped_queries_equal_repeated_keys_and_values(kv):
    """Values and every gradient; the gradient of a shared key is the sum over the heads that share it."""
    q, k, v = heads_of("q", 6), heads_of("k", kv), heads_of("v", kv)
    q2, k2, v2 = (x.detach().clone().requires_grad_() for x in (q, k, v))
    ours = attend(q, k, v)
    theirs = attend(q2, k2.repeat_interleave(6 // kv, 1), v2.repeat_interleave(6 // kv, 1))
    up = draw("up", ours.shape, std=1.0)
    ours.backward(up)
    theirs.backward(up)
    pairs = [(ours, theirs), (q.grad, q2.grad), (k.grad, k2.grad), (v.grad, v2.grad)]
    for got, wanted in pairs:
        assert close(got, wanted, 40)
        off = wanted.detach().clone()
        off.view(-1)[0] += 10 * 8 * EPS * 40 * off.abs().max()
        assert not close(off, wanted, 40)
    if kv not in (1, 6):  # heads in the wrong order: head i must ask i // group, not i mod kv
        assert not close(attend(q, k.repeat(1, 6 // kv, 1, 1), v.repeat(1, 6 // kv, 1, 1)), ours, 40)


@pytest.mark.parametrize("rotary", [False, True])
def test_gradcheck_of_the_core_and_the_fused_kernel(rotary):
    turn = rotate if rotary else lambda x: x
    q, k, v = heads_of("q", 4, 3, 2, 1), heads_of("k", 2, 3, 2, 1), heads_of("v", 2, 3, 2, 1)
    assert gradcheck(lambda q, k, v: attend(turn(q), turn(k), v), (q, k, v))
    layers = [Attention(24, 6, kv_heads=2, rotary=rotary, fused=fused, std=0.3, **F64) for fused in (False, True)]
    x = draw("x", (2, 5, 24), std=1.0)
    assert close(layers[0](x), layers[1](x), 60)


def test_a_turn_is_a_turn():
    x = draw("x", (2, 3, 7, 6), std=1.0).requires_grad_()
    assert gradcheck(rotate, (x,)) and gradgradcheck(rotate, (x,))
    y = rotate(x)
    assert close(y.norm(dim=-1), x.norm(dim=-1), 12) and torch.equal(y[..., 0, :], x[..., 0, :])
    # as products of complex numbers: x_i + i x_(i+d/2), times e^(i position angle)
    place, angle = torch.arange(7, **F64), 10000.0 ** (-torch.arange(3, **F64) / 3)
    z = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(7, 3, **F64), place[:, None] * angle)
    assert close(y, torch.cat([z.real, z.imag], -1), 12)
    assert torch.equal(rotate(x[..., 2:5, :], torch.arange(2, 5)), y[..., 2:5, :])
    assert rotate(x.to(torch.bfloat16)).dtype == torch.bfloat16
    a, b = rotate(x.float()), y.float()
    assert (a - b).abs().max() <= 8 * torch.finfo(torch.float32).eps * x.abs().max()


def test_only_the_distance_counts():
    q, k = draw("q", (1, 8), std=1.0), draw("k", (1, 8), std=1.0)
    at = lambda x, place: rotate(x, torch.tensor([place]))  # noqa: E731
    one = (at(q, 9) * at(k, 4)).sum()
    assert math.isclose(one, (at(q, 1009) * at(k, 1004)).sum(), rel_tol=1e-9)
    assert not math.isclose(one, (at(q, 9) * at(k, 5)).sum(), rel_tol=1e-3)


def test_a_turn_keeps_nothing():
    with Ledger() as ledger:
        ledger.phase("forward")
        x = torch.ones(2, 3, 8, 4, requires_grad=True)
        y = rotate(x * 1.0)
    assert y.requires_grad and ledger.saved("forward") == 0


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 1, 3])
def test_parameters_equal_the_formula(kv_heads, rotary):
    config = dataclasses.replace(GROUPED, kv_heads=kv_heads, rotary=rotary)
    model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == config.shape().parameter_count
    assert ("positions.weight" in dict(model.named_parameters())) != rotary


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_saved_bytes_equal_the_formula(kv_heads):
    """Trial i05 in training: what keys and values keep scales with kv_heads. Beyond the formula: statistics of two norms."""
    b, s = 2, 32
    config = GPTConfig(vocabulary=64, length=s, width=64, layers=1, heads=8, kv_heads=kv_heads, rotary=True, dropout=0.1)
    block = Block(config, device="meta", dtype=torch.bfloat16)
    with Ledger(block) as ledger:
        ledger.phase("forward")
        x = torch.empty(b, s, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        y = block(x)
    assert y.requires_grad
    assert ledger.saved("forward") == layer_activations(config.shape(), b).total + 16 * s * b


def test_gradient_of_the_model_by_finite_differences():
    model = initialise(GPT(GROUPED, **F64))
    for name, p in model.named_parameters():
        p.data += draw(name, p.shape, seed=9, std=0.1)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(13, (2, 3, 6), generator=g).unbind()
    grads = torch.autograd.grad(model.loss(x, y), list(model.parameters()))
    direction = [draw(str(i), q.shape, std=1.0) for i, q in enumerate(model.parameters())]
    length, step, values = sum(d.square().sum() for d in direction).sqrt(), 1e-4, []
    for sign in (1, -2):
        for q, d in zip(model.parameters(), direction, strict=True):
            q.data += sign * step * d / length
        values.append(model.loss(x, y).item())
    slope = sum((g * d / length).sum().item() for g, d in zip(grads, direction, strict=True))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_positions_matter_without_a_table():
    model = GPT(GROUPED, **F64)
    for name, p in model.named_parameters():
        p.data += draw(name, p.shape, seed=9, std=0.3)
    x = torch.tensor([[1, 2, 3, 4, 5, 6]])
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    assert not close(model(x)[:, 5], model(swapped)[:, 5], 1000)  # the last token tells the order of the first two
    # with no positions at all it could not, by one layer of attention
    one = GPT(dataclasses.replace(GROUPED, layers=1, rotary=False), **F64)
    one.positions.weight.data.zero_()
    assert close(one(x)[:, 5], one(swapped)[:, 5], 1000)


@pytest.mark.parametrize(
    "change, hint",
    [
        ({"kv_heads": 4}, "allowed: 1, 2, 3, 6"),
        ({"kv_heads": 0}, "allowed: 1, 2, 3, 6"),
        ({"kv_heads": 2.0}, "allowed: 1, 2, 3, 6"),
        ({"heads": 8, "rotary": True}, "3 wide; allowed: an even width"),
        ({"heads": 5}, "heads 4 or|width 20 or 25, or heads 4"),
    ],
)
def test_bad_sizes(change, hint):
    with pytest.raises(ValueError, match=hint):
        dataclasses.replace(GROUPED, **change)


def test_bad_turns():
    for bad, hint in ((torch.ones(2, 3), "even"), (torch.ones(2, 4), r"allowed: \(2,\)")):
        with pytest.raises(ValueError, match=hint):
            rotate(bad, torch.arange(3))
    assert split_heads(torch.ones(1, 2, 6), 3).shape == (1, 3, 2, 2)


def test_another_core_takes_the_place_of_attend():
    layer, seen = Attention(24, 6, kv_heads=2), []

    def core(q, k, v, **options):
        seen.append((q.shape, k.shape))
        return attend(q, k, v, **options)

    x = torch.ones(2, 5, 24)
    plain = layer(x)
    layer.core = core
    assert torch.equal(layer(x), plain) and seen == [((2, 6, 5, 4), (2, 2, 5, 4))]
