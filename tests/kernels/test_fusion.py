"""Bias and GELU, dropout and residual: equal to float64's within a bound, the same noise in any blocks, one byte kept."""

import math

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import fusion as fusion_file
from fourwalls.kernels.fusion import bias_gelu_blocks, bias_gelu_separate, dropout_residual_blocks, dropout_residual_separate
from fourwalls.memory.ledger import Ledger

from .judge import numbers, planted, spoiled, unit, wrong

torch.set_num_threads(1)
GELU = {"separate": bias_gelu_separate, "blocks": bias_gelu_blocks, "blocks of 2": lambda x, b: bias_gelu_blocks(x, b, rows=2)}


def gelu_bound(x, bias):
    """A dozen operations on numbers no larger than |u| + 1; the cube's error is damped by tanh, and 1 + tanh may cancel."""
    return 16 * unit(x.dtype) * (1 + (x.double() + bias.double()).abs()) + 4 * unit(x.dtype) * x.double().abs()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("form", GELU)
def test_bias_gelu_is_float64s_within_the_bound(form, dtype):
    for shape in ((7, 10), (2, 3, 33), (5,), (4, 1)):
        x, bias = numbers(*shape, dtype=dtype, scale=3.0), numbers(shape[-1], seed=1, dtype=dtype)
        exact, bound = F.gelu(x.double() + bias.double(), approximate="tanh"), gelu_bound(x, bias)
        assert wrong(GELU[form](x, bias), exact, bound) == 0
        assert wrong(F.gelu(x + bias, approximate="tanh"), exact, bound) == 0
        assert wrong(spoiled(exact, bound), exact, bound) == 1


@pytest.mark.parametrize("form", GELU)
def test_bias_gelu_of_odd_rows(form):
    x = torch.tensor([[0.0, -0.0, 1e-45, 1e-40], [30.0, -30.0, 1e5, -1e5], [math.inf, math.nan, 1, 2]])
    want = F.gelu(x, approximate="tanh")
    assert wrong(GELU[form](x, torch.zeros(4)), want.double(), 1e-6) == 0
    assert GELU[form](torch.empty(0, 4), torch.zeros(4)).shape == (0, 4)
    over = x.clone()
    assert bias_gelu_blocks(over, torch.zeros(4), out=over) is over and over[0, 0] == 0
    with pytest.raises(ValueError, match=r"bias \(3,\) does not fit x \(3, 4\); allowed: \(4,\)"):
        GELU[form](x, torch.zeros(3))


def state():
    return torch.Generator().manual_seed(5)


DROPOUT = {
    "separate": dropout_residual_separate,
    "blocks": dropout_residual_blocks,
    "blocks of 3": lambda *given, **options: dropout_residual_blocks(*given, rows=3, **options),
}


@pytest.mark.parametrize("form", DROPOUT)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_dropout_and_residual_forward_and_backward_for_the_noise_of_a_generator(form, dtype):
    for shape, p in (((7, 10), 0.25), ((2, 3, 37), 0.5), ((5,), 0.0), ((40,), 0.9)):
        x, residual, up = (numbers(*shape, seed=s, dtype=dtype) for s in range(3))
        stays = torch.rand(shape, generator=state()) >= p  # float32, whatever the dtype; drawn number after number
        exact = residual.double() + x.double() * stays / (1 - p)
        bound = 4 * unit(dtype) * (x.double().abs() / (1 - p) + residual.double().abs())
        leaves = x.clone().requires_grad_(), residual.clone().requires_grad_()
        out = DROPOUT[form](*leaves, p, generator=state())
        assert wrong(out, exact, bound) == 0 and wrong(spoiled(exact, bound), exact, bound) == 1
        dx, dresidual = torch.autograd.grad(out, leaves, up)
        assert wrong(dx, up.double() * stays / (1 - p), 4 * unit(dtype) * up.double().abs() / (1 - p)) == 0
        assert torch.equal(dresidual, up)


def test_what_is_dropped_has_the_right_share_and_follows_no_pattern():
    x, nothing = torch.ones(200, 500), torch.zeros(200, 500)
    out = dropout_residual_blocks(x, nothing, 0.3, generator=state(), rows=7)
    dropped = (out == 0).double()
    deviation = (0.3 * 0.7 / 1e5) ** 0.5
    assert abs(float(dropped.mean()) - 0.3) < 5 * deviation
    assert float((dropped.mean(0) - 0.3).abs().max()) < 5 * (0.21 / 200) ** 0.5
    assert (out[out != 0] - 1 / 0.7).abs().max() < 1e-6


def test_the_mask_is_one_byte_a_number_and_the_separate_form_keeps_as_much():
    x, residual = torch.ones(64, 32, requires_grad=True), torch.ones(64, 32, requires_grad=True)
    with Ledger(lines=False) as ledger:
        out = dropout_residual_blocks(x, residual, 0.5)
        ledger.phase("backward")
        assert ledger.saved() == 64 * 32
        out.sum().backward()


def test_odd_values_pass_and_wrong_asks_are_refused():
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1e-45]])
    for form in DROPOUT.values():
        assert wrong(form(x, torch.zeros(1, 4), 0.0), x.double(), 0) == 0
        assert form(torch.empty(0, 4), torch.empty(0, 4), 0.5).shape == (0, 4)
        for call, words in (
            (lambda form=form: form(x, x[:, :3], 0.5), "does not fit"),
            (lambda form=form: form(x, x.double(), 0.5), "dtype"),
            (lambda form=form: form(x, x, 1.0), "probability 1.0; allowed: 0 <= p < 1"),
            (lambda form=form: form(x.long(), x.long(), 0.5), "int64"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
    with pytest.raises(ValueError, match="has no backward"):
        bias_gelu_blocks(torch.ones(2, 2, requires_grad=True), torch.ones(2))


FAULTS = {  # name: (old, new, what is wrong, what stays right)
    "kept numbers not scaled": ("target[block].mul_(1 / (1 - p)).add_(other[block])", "target[block].add_(other[block])", 0, 1),
    "gradient not scaled": (
        "            target[block].mul_(1 / (1 - p))\n        return", "            target[block]\n        return", 1, 0),
    "mask forgotten in backward": (
        "torch.mul(source[block], stays[block], out=target[block])\n            target[block].mul_(1 / (1 - p))\n        return",
        "target[block].copy_(source[block])\n            target[block].mul_(1 / (1 - p))\n        return", 1, 0),
    "the first block's noise again": (".uniform_(generator=generator)", ".uniform_(generator=generator.manual_seed(5))", 0, None),
    "drops what should stay": ("torch.ge(noise, p, out=stays[block])", "torch.lt(noise, p, out=stays[block])", 0, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_dropout_is_caught(name):
    old, new, spoils, right = FAULTS[name]
    x, residual, up = (numbers(9, 10, seed=s) for s in range(3))
    stays = torch.rand(9, 10, generator=state()) >= 0.3
    want = residual + x * stays / 0.7, up * stays / 0.7

    def faults(module):
        leaf = x.clone().requires_grad_()
        out = module.dropout_residual_blocks(leaf, residual, 0.3, generator=state(), rows=2)
        found = out, torch.autograd.grad(out, leaf, up)[0]
        return [wrong(g, w, 1e-14 * (1 + w.abs())) for g, w in zip(found, want, strict=True)]

    assert faults(fusion_file) == [0, 0]
    found = faults(planted(fusion_file, old, new))
    assert found[spoils] > 0 and (right is None or found[right] == 0)


@pytest.mark.parametrize(
    ("old", "new"),
    (
        ("torch.add(u, y, alpha=CUBE, out=y)", "torch.add(u, y, out=y)"),
        ("torch.pow(u, 3, out=y)", "torch.pow(u, 2, out=y)"),
        ("y.mul_(SLOPE).tanh_().add_(1).mul_(0.5).mul_(u)", "y.mul_(SLOPE).tanh_().add_(1).mul_(u)"),
        ("torch.add(source[block], bias, out=u)", "u.copy_(source[block])"),
    ),
)
def test_a_fault_in_gelu_is_caught(old, new):
    x, bias = numbers(7, 10), numbers(10, seed=1)
    exact = F.gelu(x + bias, approximate="tanh")
    assert wrong(bias_gelu_blocks(x, bias), exact, gelu_bound(x, bias)) == 0
    assert wrong(planted(fusion_file, old, new).bias_gelu_blocks(x, bias), exact, gelu_bound(x, bias)) > 0
