"""Whole units gone: not a bit of the output changes where they were zero, the shapes shrink, and the counted work with them."""

import pytest
import torch
from torch import nn

from fourwalls.cost.flops import forward_flops, layer_ops
from fourwalls.nn.attention import Attention
from fourwalls.nn.gpt import GPT, FeedForward, GPTConfig
from fourwalls.numerics.prune import (
    block_ops,
    head_scores,
    keep_heads,
    keep_layers,
    keep_neurons,
    model_flops,
    neuron_scores,
    predicted_speedup,
    prune_masks,
    shrink,
)

torch.set_num_threads(1)


def whole_numbers(*shape, seed, factor=1):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double() * factor


@torch.no_grad()
def with_whole_numbers(module, factor=16):
    """Weights so large and whole that GELU and softmax are exact, so every order of adding gives the same bits."""
    for k, p in enumerate(module.parameters()):
        p.copy_(whole_numbers(*p.shape, seed=k, factor=factor))
    return module


@pytest.mark.parametrize("bias", (True, False))
def test_neurons_that_write_zero_go_without_a_bits_change(bias):
    mlp = with_whole_numbers(FeedForward(8, 12, bias=bias, dtype=torch.float64))
    gone, keep = [0, 5, 6, 11], [1, 2, 3, 4, 7, 8, 9, 10]
    x = whole_numbers(3, 5, 8, seed=50)
    before = mlp(x)
    with torch.no_grad():
        mlp.down.weight[:, gone] = 0
    whole = mlp(x)
    assert not torch.equal(whole, before)
    assert torch.equal(keep_neurons(mlp, keep)(x), whole)
    assert mlp.up.weight.shape == (8, 8) and mlp.down.weight.shape == (8, 8) and mlp.up.outputs == mlp.down.inputs == 8
    if bias:
        assert mlp.up.bias.shape == (8,) and mlp.down.bias.shape == (8,)
    with torch.no_grad():  # the mutant: a neuron too many is gone
        assert not torch.equal(keep_neurons(mlp, range(1, 8))(x), whole)


def attention_without(heads, gone, kv_heads=None, rotary=False):
    attention = with_whole_numbers(Attention(32, heads, kv_heads=kv_heads, rotary=rotary, dtype=torch.float64))
    with torch.no_grad():
        d = 32 // heads
        for k in gone:
            attention.output.weight[:, k * d : (k + 1) * d] = 0
    return attention


@pytest.mark.parametrize(
    ("kv_heads", "gone", "left"),
    (
        (None, (0, 3), (6, 6)),
        (2, (0, 1, 2, 3), (4, 1)),  # a whole group
        (2, (1, 6), (6, 2)),  # one of each group
        (4, (0, 2, 4, 6), (4, 4)),
        (1, (5,), (7, 1)),
    ),
)
def test_heads_that_write_zero_go_without_a_bits_change(kv_heads, gone, left):
    attention = attention_without(8, gone, kv_heads)
    keep = [k for k in range(8) if k not in gone]
    x = whole_numbers(2, 2, 32, seed=60)  # 2 tokens: weights are 0, 1 or 1/2, all exact
    whole = attention(x)
    assert torch.equal(keep_heads(attention, keep)(x), whole)
    assert (attention.heads, attention.kv_heads) == left
    assert attention.query.weight.shape == (4 * left[0], 32) and attention.key.weight.shape == (4 * left[1], 32)
    attention.fused = True
    assert torch.allclose(attention(x), whole, rtol=1e-12)


def test_rotary_heads_go_too_and_a_wrong_head_is_seen():
    """Rotations are no whole numbers: 32 products in float64, each off by 2^-53 of about 1e6, hence a bound and no equality."""
    x = whole_numbers(2, 5, 32, seed=61)
    wholes = [attention_without(8, (2, 7), rotary=True)(x)]
    for keep in ([0, 1, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6]):
        found = keep_heads(attention_without(8, (2, 7), rotary=True), keep)(x)
        assert bool(((found - wholes[0]).abs() <= 1e-6).all()) is (2 not in keep)


def test_a_block_that_adds_zero_goes_without_a_bits_change():
    model = GPT(GPTConfig(layers=3, width=16, heads=2, length=8, vocabulary=32))
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        for layer in (model.blocks[1].attention.output, model.blocks[1].mlp.down):
            layer.weight.zero_()
    whole = model(tokens)
    keep_layers(model, [0, 2])
    assert torch.equal(model(tokens), whole) and model.config.layers == 2
    assert not torch.equal(keep_layers(model, [1])(tokens), whole)


def test_random_weights_within_rounding_and_gradients_too():
    """Float64, sums of at most 64 numbers of order 1: 1e-12 is a hundred times what rounding can do."""
    mlp = FeedForward(16, 64, std=0.3, out_std=0.3, dtype=torch.float64)
    mlp.up.init_parameters("a"), mlp.down.init_parameters("b")
    with torch.no_grad():
        mlp.down.weight[:, ::2] = 0
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    whole = mlp(x)
    (slope,) = torch.autograd.grad(whole.sum(), x)
    kept = keep_neurons(mlp, range(1, 64, 2))(x)
    assert (kept - whole).abs().max() < 1e-12 and (torch.autograd.grad(kept.sum(), x)[0] - slope).abs().max() < 1e-12


def test_what_is_refused():
    model = GPT(GPTConfig(layers=2, width=16, heads=4, kv_heads=2, length=8, vocabulary=32))
    block = model.blocks[0]
    for call, says in (
        (lambda: keep_neurons(block.mlp, []), "pruning everything leaves no model"),
        (lambda: keep_neurons(block.mlp, [0, 64]), "different numbers of 0 to 63"),
        (lambda: keep_neurons(block.mlp, [3, 3]), "different numbers"),
        (lambda: keep_heads(block.attention, []), "no head is kept"),
        (lambda: keep_heads(block.attention, [0, 1, 2]), "equally many in each group of 2"),
        (lambda: keep_layers(model, []), "no layer is kept"),
        (lambda: shrink(model, 1.0), "share is 1.0"),
        (lambda: shrink(model, 0.3), "nearest legal shares: 0/2 or 1/2"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    assert block.attention.heads == 4 and block.mlp.up.outputs == 64  # a refusal changes nothing


def test_the_least_worth_go_and_ties_fall_the_same_way():
    model = GPT(GPTConfig(layers=1, width=16, heads=4, ff=8, length=8, vocabulary=32))
    block = model.blocks[0]
    with torch.no_grad():
        for p in (block.mlp.up.weight, block.mlp.down.weight, block.attention.value.weight, block.attention.output.weight):
            p.fill_(1.0)
        block.mlp.down.weight[:, 6] = 5.0
        block.mlp.up.weight[1] = 0.1
        block.attention.output.weight[:, 12:] = 3.0
    assert neuron_scores(block.mlp).argmax() == 6 and neuron_scores(block.mlp).argmin() == 1
    assert head_scores(block.attention).tolist() == pytest.approx([64.0, 64.0, 64.0, 192.0])
    marks = torch.arange(8.0)
    with torch.no_grad():
        block.mlp.up.bias.copy_(marks * 1e-6)
        block.attention.query.bias.copy_(torch.arange(16.0))
    small = shrink(model, 0.5)
    assert torch.equal(small.blocks[0].mlp.up.bias, (marks * 1e-6)[[0, 2, 3, 6]])
    assert small.blocks[0].attention.query.bias.tolist() == [0.0, 1, 2, 3, 12, 13, 14, 15]
    assert model.blocks[0].mlp.up.outputs == 8 and small.config.ff == 4


@pytest.mark.parametrize("kv_heads", (None, 2))
def test_flops_are_those_of_the_formulas_and_halve_with_the_shapes(kv_heads):
    config = GPTConfig(layers=2, width=32, heads=4, kv_heads=kv_heads, length=8, vocabulary=64)
    model = GPT(config)
    ours, theirs = block_ops(model.blocks[0], 3, 8), layer_ops(config.shape(), 3)
    assert [(op.name, op.forward) for op in ours] == [(op.name, op.forward) for op in theirs]
    assert model_flops(model, 3, 8) == forward_flops(config.shape(), 3)
    small = shrink(model, 0.5)
    assert [2 * op.forward for op in block_ops(small.blocks[0], 3, 8)] == [op.forward for op in ours]
    head = 2 * 3 * 8 * 32 * 64
    assert predicted_speedup(model, small, 3, 8) == (2 * model_flops(small, 3, 8) - head) / model_flops(small, 3, 8)
    neurons = shrink(model, 0.5, heads=False)
    assert model_flops(neurons, 3, 8) == forward_flops(neurons.config.shape(), 3)
    assert small(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 64)
    assert 2 * sum(p.numel() for n, p in small.named_parameters() if p.dim() > 1 and "blocks" in n) == sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "blocks" in n
    )


def test_masks_predict_no_speed():
    model = GPT(GPTConfig(layers=1, width=16, heads=2, length=8, vocabulary=32))
    before = model_flops(model, 1, 8)
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, nn.Parameter) and "mlp" in name and p.dim() == 2}
    prune_masks(weights, 0.5).apply_()
    assert sum(int((p == 0).sum()) for p in weights.values()) * 2 == sum(p.numel() for p in weights.values())
    assert model_flops(model, 1, 8) == before
