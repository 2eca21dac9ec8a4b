"""Training with rounded weights: the step's gradient by its definition, the fold, and an evaluation that asks nobody else."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.numerics.digits import accuracy, digits, digits_net, train_digits
from fourwalls.numerics.fold import fold_batch_norm, fold_model
from fourwalls.numerics.kv_cache import Cache, decode, rounded_core
from fourwalls.numerics.qat import FakeQuantizer, LearnedStep, QATLinear, prepare_qat, round_through

torch.set_num_threads(1)


def floats(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_composition(x, step, low, high):
    """The convention written out: rounding is the identity for backward, everything else is autograd's."""
    return torch.clamp(round_through(x / step), low, high) * step


@pytest.mark.parametrize("shape", ((), (1, 1), (6, 1), (1, 9)))
def test_the_steps_gradient_is_that_of_the_definition(shape):
    grads = []
    for function in (lambda x, s: LearnedStep.apply(x, s, -3, 3, 1.0), lambda x, s: by_composition(x, s, -3, 3)):
        x, step = floats(6, 9).requires_grad_(), torch.full(shape, 0.4, dtype=torch.float64).requires_grad_()
        y = function(x, step)
        (y * floats(6, 9, seed=1)).sum().backward()
        grads.append((y.detach(), x.grad, step.grad))
    # between the end and half a step beyond, the composition clamps after rounding, and its clamp lets the gradient through
    beyond = (floats(6, 9) / 0.4).abs()
    same = (beyond <= 3) | (beyond > 3.5)
    assert torch.equal(grads[0][0], grads[1][0]) and torch.allclose(grads[0][1][same], grads[1][1][same])
    if same.all():
        assert torch.allclose(grads[0][2], grads[1][2])


def test_the_gradient_outside_is_the_slope_and_inside_what_rounding_added():
    step = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for value, slope in ((5.0, 3.0), (-5.0, -3.0), (0.6, round(1.2) - 1.2), (0.45, round(0.9) - 0.9), (0.0, 0.0)):
        x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(LearnedStep.apply(x, step, -3, 3, 1.0), step, retain_graph=True)
        (dx,) = torch.autograd.grad(LearnedStep.apply(x, step, -3, 3, 1.0), x)
        assert float(found) == pytest.approx(slope) and float(dx) == (abs(value / 0.5) <= 3)
        if abs(value) == 5.0:  # clipped: the finite difference is the true slope
            ahead, behind = (float(LearnedStep.apply(x, step + d, -3, 3, 1.0).detach()) for d in (1e-6, -1e-6))
            assert (ahead - behind) / 2e-6 == pytest.approx(slope, abs=1e-6)
    x = floats(50).requires_grad_()
    one, tenth = (torch.autograd.grad(LearnedStep.apply(x, step, -3, 3, slow).sum(), step)[0] for slow in (1.0, 0.1))
    assert float(tenth) == pytest.approx(float(one) / 10)


def test_the_step_begins_as_the_paper_says_and_learns():
    x = floats(4, 100, dtype=torch.float32)
    rounder = FakeQuantizer(3, 0).begin(x)
    assert torch.allclose(rounder.step.flatten(), 2 * x.abs().mean(1) / math.sqrt(3))
    rounder.step.data *= 4
    first = float((rounder(x) - x).square().mean().detach())
    optimizer = torch.optim.Adam(rounder.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        error = (rounder(x) - x).square().mean() * 100
        error.backward()
        optimizer.step()
    assert float(error.detach()) / 100 < first / 4
    ticks = rounder(x) / rounder.step
    assert torch.allclose(ticks, ticks.round(), atol=1e-5) and float(ticks.detach().abs().max()) <= 3.0001


def test_what_is_refused():
    for call, says in (
        (lambda: FakeQuantizer(3)(torch.ones(3)), "has no step yet"),
        (lambda: FakeQuantizer(3).begin(torch.empty(0)), "without values"),
        (lambda: FakeQuantizer(9), "bits is 9"),
        (lambda: FakeQuantizer(3, signed=False).begin(-torch.ones(2)), "use signed=True"),
        (lambda: prepare_qat(prepare_qat(nn.Sequential(nn.Linear(2, 2)))), "rounded weights already"),
        (lambda: prepare_qat(digits_net()), "fold it into the layer before"),
        (lambda: prepare_qat(nn.ReLU()), "no linear layer or convolution"),
        (lambda: fold_batch_norm(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(4)), "4 channels, the layer 3"),
        (lambda: fold_batch_norm(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)), "running statistics"),
        (lambda: fold_model(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3))), "right before it"),
        (lambda: Cache(4), "bits is 4"),
        (lambda: Cache().read(), "the cache is empty"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("bias", (True, False))
def test_folding_keeps_the_function(affine, bias):
    torch.manual_seed(1)
    conv, norm = nn.Conv2d(3, 6, 3, bias=bias).double(), nn.BatchNorm2d(6, affine=affine).double()
    with torch.no_grad():
        norm.running_mean.copy_(floats(6)), norm.running_var.copy_(floats(6).abs() * 5 + 0.01)
        if affine:
            norm.weight.copy_(floats(6, seed=2)), norm.bias.copy_(floats(6, seed=3))
    norm.eval()
    x = floats(2, 3, 7, 7)
    folded = fold_batch_norm(conv, norm)
    assert torch.allclose(folded(x), norm(conv(x)), rtol=1e-12, atol=1e-12)
    norm.eps = 0.1  # the mutant: another eps
    assert not torch.allclose(folded(x), norm(conv(x)), rtol=1e-3)
    linear, flat = nn.Linear(5, 6).double(), nn.BatchNorm1d(6).double().eval()
    x = floats(4, 5)
    assert torch.allclose(fold_batch_norm(linear, flat)(x), flat(linear(x)), rtol=1e-12)


@pytest.fixture(scope="module")
def trained():
    return train_digits(digits_net(0, width=8), steps=60)


def test_evaluation_is_the_same_twice_and_for_one_picture_alone(trained):
    """Trial f10: after training with rounded weights, the same output twice, and in batches of 1 and of 32."""
    folded = fold_model(trained)
    x = digits()[2][:32]
    assert torch.allclose(folded(x), trained(x), atol=1e-4)
    aware = train_digits(prepare_qat(folded, 3, None), steps=25, lr=3e-4)
    with torch.no_grad():
        together, again = aware(x), aware(x)
        alone = torch.cat([aware(row.unsqueeze(0)) for row in x])
        aware.train()
        assert torch.equal(aware(x), together)  # training and evaluation are one function
        aware.eval()
    assert torch.equal(together, again)
    assert (together - alone).abs().max() <= 1e-5 * together.abs().max()
    assert accuracy(aware) > 85
    # the mutant: norms left in, evaluated with the statistics of the batch
    trained.train()
    with torch.no_grad():
        differs = (torch.cat([trained(row.unsqueeze(0)) for row in x[:4]]) - trained(x)[:4]).abs().max()
    trained.eval()
    assert differs > 0.1


def test_inputs_too_can_be_rounded():
    torch.manual_seed(0)
    layer = QATLinear(nn.Linear(6, 4), 4, x_bits=4)
    with pytest.raises(ValueError, match="has no step yet"):
        layer.eval()(torch.ones(2, 6))
    layer.train()
    x = floats(8, 6, dtype=torch.float32)
    layer(x).sum().backward()
    assert layer.x_round.step.grad is not None and layer.w_round.step.grad.shape == (4, 1)
    ticks = layer.x_round(x) / layer.x_round.step
    assert torch.allclose(ticks, ticks.round(), atol=1e-5)


# ---- key-value cache


def model(kv_heads=None):
    return GPT(GPTConfig(width=32, heads=4, length=12, layers=2, kv_heads=kv_heads, seed=3))


TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kv_heads", (None, 2))
@pytest.mark.parametrize("pieces", ((12,), (5, 4, 3), (1,) * 12))
def test_writing_token_by_token_equals_the_whole_text(kv_heads, pieces):
    net = model(kv_heads)
    with torch.no_grad():
        whole = net(TOKENS)
        caches = [Cache(None) for _ in net.blocks]
        parts = [decode(net, part, caches) for part in TOKENS.split(pieces, 1)]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
        caches = [Cache() for _ in net.blocks]
        eighth = torch.cat([decode(net, part, caches) for part in TOKENS.split(pieces, 1)], 1)
        for block in net.blocks:
            block.attention.core = rounded_core
        assert torch.allclose(eighth, net(TOKENS), atol=1e-5) and not torch.equal(eighth, whole)
    d, heads = 8, kv_heads or 4
    assert all(c.nbytes == 2 * 3 * 12 * heads * (d + 2) and c.tokens == 12 for c in caches)
    with pytest.raises(ValueError, match="12 tokens and 1 more; allowed: at most 12"):
        decode(net, TOKENS[:, :1], caches)
    with pytest.raises(ValueError, match="1 caches for 2 layers"):
        decode(net, TOKENS, caches[:1])


def test_bytes_are_a_quarter_and_the_scales():
    full, small = Cache(None), Cache()
    k, v = floats(2, 4, 5, 16, dtype=torch.float32), floats(2, 4, 5, 16, seed=1, dtype=torch.float32)
    k[0, 0, 0] = 0.0
    for cache in (full, small):
        cache.append(k, v)
    assert small.nbytes == full.nbytes // 4 + 2 * 2 * 4 * 5 * 2
    for kept, x in zip(small.read(), (k, v), strict=True):
        assert ((kept - x).abs() <= x.abs().amax(-1, keepdim=True) / 127 * 0.51 * (1 + 127 / 256)).all()
    k[0, 0, 1, 2] = torch.inf
    with pytest.raises(ValueError, match="keys or values has 1 values that are not finite"):
        small.append(k, v)


def test_cross_entropy_of_a_rounded_cache_stays_close():
    net = model()
    with torch.no_grad():
        exact = F.cross_entropy(net(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        for block in net.blocks:
            block.attention.core = rounded_core
        rounded = F.cross_entropy(net(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert abs(float(rounded - exact)) < 0.005
