"""The one-device models: against torch's own transformer in float64, finite differences, tied heads, causality, sizes."""

import dataclasses
import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from fourwalls.cost.flops import iteration_flops
from fourwalls.nn import attention
from fourwalls.nn.attention import Attention, attend, merge_heads, split_heads
from fourwalls.nn.gpt import GPT, Block, GPTConfig
from fourwalls.nn.init import draw, initialise
from fourwalls.nn.layers import LayerNorm, Linear
from fourwalls.nn.mlp import MLP
from fourwalls.nn.text import batch

SMALL = GPTConfig(vocabulary=13, length=6, width=12, layers=2, heads=3, seed=1)
F64 = {"dtype": torch.float64}


def close(actual, expected, terms, dtype=torch.float64):
    scale = max(expected.abs().max().item(), 1e-3)
    return (actual.double() - expected.double()).abs().max().item() <= 8 * torch.finfo(dtype).eps * terms * scale


def tokens(config, b=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (2, b, config.length), generator=g).unbind()


def wiggle(model, seed=0):
    """Move every parameter off its start, so that biases and norms are not 0 and 1."""
    for name, p in model.named_parameters():
        p.data += draw(name, p.shape, seed=seed + 99, std=0.1).to(p.dtype)
    return model


# --- against torch's own ---------------------------------------------------------------------------------------------
def torch_block(block: Block, config: GPTConfig) -> torch.nn.TransformerEncoderLayer:
    gelu = torch.nn.GELU("tanh")
    theirs = torch.nn.TransformerEncoderLayer(
        config.width, config.heads, config.ff, 0.0, gelu, batch_first=True, norm_first=True, **F64
    )
    with torch.no_grad():
        at = block.attention
        theirs.self_attn.in_proj_weight.copy_(torch.cat([at.query.weight, at.key.weight, at.value.weight]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([at.query.bias, at.key.bias, at.value.bias]))
        theirs.self_attn.out_proj.load_state_dict(at.output.state_dict())
        theirs.linear1.load_state_dict(block.mlp.up.state_dict())
        theirs.linear2.load_state_dict(block.mlp.down.state_dict())
        theirs.norm1.load_state_dict(block.norm1.state_dict())
        theirs.norm2.load_state_dict(block.norm2.state_dict())
    return theirs


@pytest.mark.parametrize("fused", [False, True])
def test_block_equals_torch_in_values_and_every_gradient(fused):
    config = dataclasses.replace(SMALL, fused=fused)
    block = wiggle(initialise(Block(config, **F64)))
    theirs = torch_block(block, config)
    a = draw("x", (2, 6, 12), std=1.0).requires_grad_()
    b = a.detach().clone().requires_grad_()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6, **F64)
    mine, other = block(a), theirs(b, src_mask=mask, is_causal=True)
    assert close(mine, other, 100)
    up = draw("up", mine.shape, std=1.0)
    mine.backward(up)
    other.backward(up)
    at, sa = block.attention, theirs.self_attn
    pairs = [
        (a.grad, b.grad),
        (torch.cat([at.query.weight.grad, at.key.weight.grad, at.value.weight.grad]), sa.in_proj_weight.grad),
        (torch.cat([at.query.bias.grad, at.key.bias.grad, at.value.bias.grad]), sa.in_proj_bias.grad),
        (at.output.weight.grad, sa.out_proj.weight.grad),
        (at.output.bias.grad, sa.out_proj.bias.grad),
        (block.mlp.up.weight.grad, theirs.linear1.weight.grad),
        (block.mlp.up.bias.grad, theirs.linear1.bias.grad),
        (block.mlp.down.weight.grad, theirs.linear2.weight.grad),
        (block.mlp.down.bias.grad, theirs.linear2.bias.grad),
        *((getattr(block, n).weight.grad, getattr(theirs, n).weight.grad) for n in ("norm1", "norm2")),
        *((getattr(block, n).bias.grad, getattr(theirs, n).bias.grad) for n in ("norm1", "norm2")),
    ]
    for k, (x, y) in enumerate(pairs):
        assert close(x, y, 200), k
        off = y.clone()
        off.view(-1)[0] += 10 * 8 * torch.finfo(torch.float64).eps * 200 * max(off.abs().max().item(), 1e-3)
        assert not close(off, y, 200)  # one element off by ten times the bound


def test_attention_heads_and_gradcheck():
    x = draw("x", (2, 5, 6), std=1.0)
    assert torch.equal(merge_heads(split_heads(x, 3)), x)
    assert split_heads(x, 3)[1, 2, 4, 0] == x[1, 4, 2 * 2]
    q, k, v = (draw(n, (1, 2, 3, 2), std=1.0).requires_grad_() for n in "qkv")
    assert gradcheck(attend, (q, k, v))
    with pytest.raises(ValueError, match="multiple"):
        Attention(10, 3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gpt_gradient_by_finite_differences(tied, p):
    """Along random directions of all parameters together: (L(w + e d) - L(w - e d)) / 2e = grad . d, dropout masks held fixed."""
    model = wiggle(GPT(dataclasses.replace(SMALL, tied=tied, dropout=p), **F64))
    x, y = tokens(SMALL)

    def loss():
        torch.manual_seed(7)
        return model.loss(x, y)

    grads = torch.autograd.grad(loss(), list(model.parameters()))
    for k in range(3):
        direction = [draw(f"{k}.{i}", q.shape, std=1.0) for i, q in enumerate(model.parameters())]
        length = sum(d.square().sum() for d in direction).sqrt()
        direction = [d / length for d in direction]
        step, values = 1e-4, []
        for sign in (1, -1):
            for q, d in zip(model.parameters(), direction, strict=True):
                q.data += sign * step * d
            values.append(loss().item())
            for q, d in zip(model.parameters(), direction, strict=True):
                q.data -= sign * step * d
        slope = sum((g * d).sum().item() for g, d in zip(grads, direction, strict=True))
        # a central difference errs by step^2 times the third derivative, and by rounding: eps * loss / step
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_float32_against_the_float64_oracle(tied, p):
    config = dataclasses.replace(SMALL, tied=tied, dropout=p)
    low = wiggle(GPT(config))
    high = GPT(config, **F64)
    high.load_state_dict({k: v.double() for k, v in low.state_dict().items()})
    x, y = tokens(config)
    losses = []
    for model in (low, high):
        torch.manual_seed(3)  # the same masks in both dtypes
        losses.append(model.loss(x, y))
        losses[-1].backward()
    assert close(losses[0], losses[1], 32, torch.float32)
    for (name, a), b in zip(low.named_parameters(), high.parameters(), strict=True):
        # sums over 18 tokens, 48 and 12 wide, through 2 layers
        assert close(a.grad, b.grad, 100, torch.float32), name


def test_mlp_oracle_and_gradcheck():
    model = MLP((4, 6, 6, 3), activation="tanh", **F64)
    x = draw("x", (5, 4), std=1.0).requires_grad_()
    assert gradcheck(model, (x,))
    w = list(model.parameters())
    expected = torch.tanh(torch.tanh(x @ w[0].T + w[1]) @ w[2].T + w[3]) @ w[4].T + w[5]
    assert close(model(x), expected, 20)
    assert all(torch.equal(a, b) for a, b in zip(w, MLP((4, 6, 6, 3), activation="tanh", **F64).parameters(), strict=True))
    assert (
        sum(isinstance(m, torch.nn.Module) and type(m).__name__ == "Dropout" for m in MLP((4, 6, 6, 3), dropout=0.1).layers) == 2
    )
    for bad in (lambda: MLP((4,)), lambda: MLP((4, 2), activation="swish")):
        with pytest.raises(ValueError):
            bad()


# --- what the architecture promises ----------------------------------------------------------------------------------
def test_tied_gradient_is_the_sum_of_both_uses():
    tied, untied = wiggle(GPT(SMALL, **F64)), GPT(dataclasses.replace(SMALL, tied=False), **F64)
    state = tied.state_dict()
    untied.load_state_dict({**state, "head.weight": state["tokens.weight"]})
    x, y = tokens(SMALL)
    assert torch.equal(tied(x), untied(x))
    tied.loss(x, y).backward()
    untied.loss(x, y).backward()
    assert close(tied.tokens.weight.grad, untied.tokens.weight.grad + untied.head.weight.grad, 60)
    assert not close(tied.tokens.weight.grad, untied.tokens.weight.grad, 60)


@pytest.mark.parametrize("fused", [False, True])
def test_no_token_sees_a_later_one(fused):
    model = wiggle(GPT(dataclasses.replace(SMALL, fused=fused), **F64))
    x, _ = tokens(SMALL)
    other = x.clone()
    other[:, 4] = (other[:, 4] + 1) % 13
    before, after = model(x), model(other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4]) and not torch.equal(before[:, 5], after[:, 5])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_equal_the_formula(tied, bias):
    config = dataclasses.replace(SMALL, tied=tied, bias=bias, ff=20)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.shape().parameter_count


@pytest.mark.parametrize("tied", [True, False])
def test_flops_equal_the_formula(tied):
    config = GPTConfig(vocabulary=32, length=16, width=24, layers=2, heads=3, tied=tied)
    model = GPT(config, device="meta")
    x = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(x, x).backward()
    assert counter.get_total_flops() == iteration_flops(config.shape(), 2)


def test_a_step_learns():
    """Two steps of plain descent on one batch go down; a new model is near log V (and no exact loss is claimed: the text
    varies).
    """
    model = GPT()
    x, y = batch(0, 0, batch=4, length=32)
    losses = []
    for _ in range(3):
        loss = model.loss(x, y)
        losses.append(loss.item())
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.5 * g
    assert abs(losses[0] - 5.545) < 0.5 and losses[0] > losses[1] > losses[2]


def test_meta_costs_nothing():
    """A layer of a 175B model: its shapes without its 3.6 GB."""
    config = GPTConfig(vocabulary=51200, length=2048, width=12288, layers=96, heads=96)
    block = Block(config, device="meta", dtype=torch.bfloat16)
    out = block(torch.empty(1, 2048, 12288, device="meta", dtype=torch.bfloat16))
    assert out.shape == (1, 2048, 12288) and out.dtype == torch.bfloat16
    assert sum(p.numel() for p in block.parameters()) == config.shape().layer_parameters().total


# --- sizes and starts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, hint",
    [
        ({"heads": 5}, "width 10 or 15, or heads 4"),
        ({"width": 0}, "at least 1"),
        ({"layers": 1.0}, "whole number"),
        ({"dropout": 1.0}, "0 <= dropout < 1"),
        ({"dropout": -0.1}, "0 <= dropout < 1"),
        ({"vocabulary": True}, "whole number"),
    ],
)
def test_bad_sizes(change, hint):
    with pytest.raises(ValueError, match=hint):
        dataclasses.replace(SMALL, **change)


def test_sequences_that_do_not_fit():
    model = GPT(SMALL)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 13)
    for bad in (torch.zeros(1, 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="at most 6"):
            model(bad)


def test_start_is_a_function_of_name_and_seed():
    a, b = GPT(SMALL), GPT(SMALL)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    other = GPT(dataclasses.replace(SMALL, seed=2))
    assert not torch.equal(a.blocks[0].mlp.up.weight, other.blocks[0].mlp.up.weight)
    assert not torch.equal(a.blocks[0].mlp.up.weight, a.blocks[1].mlp.up.weight)
    high = GPT(SMALL, **F64)
    assert all(torch.equal(p, q.float()) for p, q in zip(a.parameters(), high.parameters(), strict=True))
    torch.manual_seed(123)
    assert torch.equal(torch.rand(3), (torch.manual_seed(123), GPT(SMALL), torch.rand(3))[2])  # the global generator is untouched


def test_start_statistics():
    w = draw("w", (300, 400), seed=4, std=0.02)
    assert abs(w.mean().item()) < 6 * 0.02 / 300 / 2 and w.std().item() == pytest.approx(0.02, rel=0.01)
    assert w.abs().max().item() <= 0.02 * 3**0.5
    block = Block(SMALL)
    assert torch.equal(block.norm1.weight, torch.ones(12)) and torch.equal(block.mlp.up.bias, torch.zeros(48))
    deep = GPT(dataclasses.replace(SMALL, width=48, layers=8)).blocks[3]
    assert deep.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert deep.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_start_is_the_same_on_every_machine():
    """Trial c25: also for any number of ranks, since a rank cuts its shard from the whole. These are the bits of Linear 6 x 4,
    seed 0.
    """
    layer = Linear(6, 4, dtype=torch.float64)
    digest = hashlib.sha256(layer.weight.detach().numpy().tobytes()).hexdigest()[:16]
    assert digest == "2f62f66742630435"
    for n in (1, 2, 3):
        shards = [draw("linear.weight", (4, 6)).tensor_split(n)[r] for r in range(n)]
        assert torch.equal(torch.cat(shards), layer.weight.detach())


def test_start_and_text_do_not_depend_on_the_process():
    code = """if True:
        import hashlib
        from fourwalls.nn.gpt import GPT
        from fourwalls.nn.text import batch
        start = b"".join(p.detach().numpy().tobytes() for p in GPT().parameters())
        print(hashlib.sha256(start).hexdigest(), batch(3, 4, 5, batch=2, length=8)[0].tolist(), sep=chr(10))
    """
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120).stdout
    here = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in GPT().parameters())).hexdigest()
    assert out.split(chr(10))[:2] == [here, str(batch(3, 4, 5, batch=2, length=8)[0].tolist())]


@pytest.mark.parametrize("whole_core", [True, False])
def test_flops_of_selective_recompute(whole_core, monkeypatch):
    """Doing the attention core's forward again costs 4 b s^2 h a layer; only its scores are needed, which is half of that."""
    config = GPTConfig(vocabulary=32, length=16, width=24, layers=2, heads=3)
    core = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, **more: checkpoint(core, q, k, v, use_reentrant=False))
    x = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    model = GPT(config, device="meta")
    with set_checkpoint_early_stop(not whole_core), FlopCounterMode(display=False) as counter:
        model.loss(x, x).backward()
    extra = counter.get_total_flops() - iteration_flops(config.shape(), 2)
    formula = iteration_flops(config.shape(), 2, recompute="selective") - iteration_flops(config.shape(), 2)
    assert extra == (formula if whole_core else formula // 2) == (4 if whole_core else 2) * 2 * 2 * 16 * 16 * 24


def test_layer_norm_width_is_kept():
    assert "12" in repr(LayerNorm(12)) and "GELU" in repr(Block(SMALL))
