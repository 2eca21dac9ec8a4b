"""GPTQ against its definition, 4 bits packed and counted, SmoothQuant and the decomposition that change no function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.layers import Linear
from fourwalls.numerics.convert import UnfoldedConv, convert, watch_inputs
from fourwalls.numerics.gptq import gptq, hessian, layer_error
from fourwalls.numerics.int8 import FakeLinear, Int8Linear
from fourwalls.numerics.outliers import DecomposedLinear, inject, outlier_columns, readers
from fourwalls.numerics.packing import WeightOnlyLinear, pack4, unpack4
from fourwalls.numerics.quantize import fake_quantize, quantize
from fourwalls.numerics.smooth import migrate, rescale, smooth

torch.set_num_threads(1)


def floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows=400, k=12):
    return floats(rows, k) @ (torch.eye(k) + 0.6 * floats(k, k, seed=1)) * torch.logspace(-1, 0.5, k)


def coordinate_updates(w, h, q, order, damping=0.01):
    """The definition, without any factor: round a column, then solve for later ones exactly, by the inverse of their own H."""
    w, h = w.double().clone(), h.clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    scale = (
        q.scale.double().expand(w.shape) if q.group is None else q.scale.double().repeat_interleave(q.group, 1)[:, : w.shape[1]]
    )
    out = torch.zeros_like(w)
    for place, j in enumerate(order):
        free = order[place:]
        inverse = torch.linalg.inv(h[free][:, free])
        out[:, j] = q.grid.snap(w[:, j], scale[:, j])
        error = (w[:, j] - out[:, j] * scale[:, j]) / inverse[0, 0]
        w[:, free] -= error.unsqueeze(1) * inverse[0]
    return out


@pytest.mark.parametrize("bits", (2, 3, 4))
@pytest.mark.parametrize("group", (None, 5))
@pytest.mark.parametrize("order", ("given", "hessian"))
def test_gptq_is_the_exact_coordinate_update(bits, group, order):
    x, w = correlated(), floats(7, 12, seed=2)
    h = hessian(x)
    q = gptq(w, h, bits, group=group, order=order)
    columns = list(range(12)) if order == "given" else torch.argsort(h.diagonal(), descending=True).tolist()
    assert torch.equal(q.values.double(), coordinate_updates(w, h, q, columns))
    assert not torch.equal(q.values.double(), coordinate_updates(w, h, q, columns[::-1]))  # the check sees another order


def test_gptq_has_a_smaller_error_than_rounding():
    x = correlated()
    h = hessian(x)
    assert torch.allclose(h, 2 / 400 * x.double().t() @ x.double())
    for bits in (2, 3, 4):
        for group in (None, 4):
            w = floats(30, 12, seed=bits)
            rounded = fake_quantize(w, bits, None if group else 0, group=group)
            solved = gptq(w, h, bits, group=group).dequantize()
            assert layer_error(w, solved, h) < 0.8 * layer_error(w, rounded, h)
            direct = float((x.double() @ (w - rounded).double().t()).square().mean(0).mean())
            assert layer_error(w, rounded, h) == pytest.approx(direct, rel=1e-9)


def test_gptq_on_dead_and_uncorrelated_channels_only_rounds():
    x = torch.eye(6).repeat(5, 1)
    w = floats(4, 6)
    assert torch.equal(gptq(w, hessian(x), 3).values, quantize(w, 3, 0).values)
    x = correlated(k=6)
    x[:, 2] = 0
    q = gptq(w, hessian(x), 3)
    assert torch.equal(q.values[:, 2], quantize(w, 3, 0).values[:, 2]) and torch.isfinite(q.dequantize()).all()
    assert gptq(torch.empty(0, 6), hessian(x), 3).values.shape == (0, 6)


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda: hessian(torch.empty(0, 4)), "at least one row"),
        (lambda: hessian(torch.full((2, 4), torch.nan)), "calibration inputs has 8 values that are not finite"),
        (lambda: gptq(floats(3, 4), torch.eye(5)), "allowed: .n, k. and .k, k."),
        (lambda: gptq(floats(3, 4), torch.eye(4), order="random"), "order is 'random'; allowed: given, hessian"),
        (lambda: gptq(floats(3, 2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "not positive definite"),
        (lambda: pack4(quantize(floats(3, 4), 8, group=64)), "bits=8"),
        (lambda: pack4(quantize(floats(3, 4), 4, group=2)), "group 2"),
        (lambda: smooth(torch.ones(3), floats(2, 4)), "allowed: .k,. and .n, k."),
        (lambda: smooth(torch.ones(4), floats(2, 4), 1.5), "nearest legal: 1"),
        (lambda: inject(GPT(), [3], 3.0), "allowed: a power of two, so that no bit changes; nearest: 4"),
        (lambda: inject(GPT(), [64]), "allowed: 0 to 63"),
        (lambda: convert(convert(nn.Sequential(nn.Linear(3, 3)))), "quantised already"),
        (lambda: convert(nn.Sequential(nn.Linear(3, 3)), skip=["1"]), "no linear layer '1'; there are 0"),
        (lambda: convert(nn.ReLU()), "no linear layer"),
        (lambda: watch_inputs(nn.Sequential(nn.Linear(3, 3)), []), "no calibration data"),
    ),
)
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(("n", "k", "group"), ((5, 64, 32), (3, 128, 64), (4, 7, 3), (1, 1, 64), (2, 9, 64), (0, 8, 4)))
def test_packing_loses_nothing_that_rounding_had_not(n, k, group):
    w = floats(n, k)
    packed = pack4(w, group)
    back = unpack4(packed)
    assert back.shape == w.shape and packed.data.dtype == torch.uint8 and packed.data.shape == (n, (k + 1) // 2)
    groups = -(-k // group)
    assert packed.nbytes == n * ((k + 1) // 2) + 2 * n * groups
    scale = packed.scale.double().repeat_interleave(group, 1)[:, :k]
    assert ((back.double() - w).abs() <= scale * 0.5 + 0.03 * scale).all()  # the stored scale is up to 1/256 smaller: 7 steps
    again = pack4(quantize(w, 4, group=group), group)
    assert torch.equal(unpack4(again)[back == 0], back[back == 0])
    assert torch.equal(again.data & 15, (quantize(w, 4, group=group).values[:, ::2] + 8).to(torch.uint8))


def test_bits_a_weight_count_the_scales():
    for group, bits in ((32, 4.5), (64, 4.25), (128, 4.125)):
        assert pack4(floats(16, 256), group).bits_per_weight == bits
    for value in (0.0, 3.0, 1e-40, 1e38, -5e37):
        assert torch.isfinite(unpack4(pack4(torch.full((2, 8), value), 4))).all()
    assert torch.equal(unpack4(pack4(torch.zeros(2, 8))), torch.zeros(2, 8))


def test_the_weight_only_layer_multiplies_what_it_stores():
    layer = Linear(10, 6, std=0.3)
    small = WeightOnlyLinear(layer, 4)
    x = floats(3, 5, 10)
    assert torch.equal(small(x), F.linear(x, unpack4(pack4(layer.weight.detach(), 4)), layer.bias))
    solved = gptq(layer.weight, hessian(floats(50, 10)), 4, group=4)
    assert torch.allclose(WeightOnlyLinear(layer, 4, weight=solved)(x), F.linear(x, solved.dequantize(), layer.bias), atol=0.02)


def tiny(seed=0):
    return GPT(GPTConfig(width=16, heads=2, length=8, layers=2, seed=seed))


TOKENS = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(5))


def test_smooth_is_the_formula_and_moves_nothing_that_is_not_there():
    xmax, w = torch.tensor([64.0, 1.0, 0.0, 4.0]), torch.tensor([[1.0, 2.0, 3.0, 0.0], [-4.0, 1.0, 1.0, 0.0]])
    assert smooth(xmax, w).tolist() == [4.0, pytest.approx(0.5**0.5), 1.0, 1.0]
    assert smooth(xmax, w, 1.0).tolist() == [64.0, 1.0, 1.0, 1.0] and smooth(xmax, w, 0.0)[0] == 0.25
    assert smooth(xmax, w, power_of_two=True).tolist() == [4.0, 0.5, 1.0, 1.0] or smooth(xmax, w, power_of_two=True)[1] == 1.0


def test_outliers_and_their_cure_change_no_bit():
    with torch.no_grad():
        plain = tiny()
        before = plain(TOKENS)
        spoilt = inject(copy.deepcopy(plain), (3, 7), 256.0)
        assert torch.equal(spoilt(TOKENS), before)
        inputs = watch_inputs(spoilt, [TOKENS])
        assert outlier_columns(inputs["blocks.0.attention.query"], 50.0).tolist() == [3, 7]
        cured = copy.deepcopy(spoilt)
        for k, (norm, linears) in enumerate(readers(cured)):
            path = f"blocks.{k // 2}." + ("mlp.up" if k % 2 else "attention.query")
            s = migrate(norm, linears, inputs[path].abs().amax(0))
            assert (s[[3, 7]] > 8 * s[[0, 1, 2]].max()).all()
        assert torch.equal(cured(TOKENS), before)
        # the mutant: one reader forgotten
        norm, linears = readers(spoilt)[0]
        rescale(norm, linears[:2], torch.full((16,), 2.0))
        assert not torch.allclose(spoilt(TOKENS), before, atol=1e-4)


def test_the_decomposition_recovers_what_outliers_took():
    x, layer = floats(30, 16), Linear(16, 9, std=0.3)
    x[:, [2, 11]] *= 200
    layer.weight.data[:, [2, 11]] /= 200
    exact = F.linear(x.double(), layer.weight.detach().double())
    errors = {name: float((y.double() - exact).norm()) for name, y in (
        ("int8", Int8Linear.of(layer)(x)), ("decomposed", DecomposedLinear(layer)(x)),
        ("fixed", DecomposedLinear(layer, fixed=torch.tensor([2, 11]))(x)), ("none", DecomposedLinear(layer, threshold=1e9)(x)),
    )}  # fmt: skip
    assert errors["decomposed"] < errors["int8"] / 20 and errors["fixed"] == pytest.approx(errors["decomposed"], rel=1e-3)
    assert errors["none"] == pytest.approx(errors["int8"])
    every = DecomposedLinear(layer, threshold=0.0)
    assert torch.allclose(every(x), F.linear(x, layer.weight, layer.bias), atol=1e-4) and every.share == 1


def test_a_convolution_is_a_product_over_patches():
    conv = nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    x = floats(2, 3, 9, 8)
    assert torch.allclose(UnfoldedConv(conv, lambda flat: flat)(x), conv(x), atol=1e-5)
    true, fake = (convert(nn.Sequential(conv), make)(x) for make in (Int8Linear.of, FakeLinear))
    assert torch.allclose(true, fake, atol=1e-5) and not torch.equal(true, conv(x))
    with pytest.raises(ValueError, match="allowed: one group"):
        UnfoldedConv(nn.Conv2d(4, 4, 3, groups=2), lambda flat: flat)


def test_a_model_keeps_its_skipped_layers_and_its_original():
    model = tiny()
    half = convert(model, skip=["blocks.0.mlp.up"])
    kinds = {name: type(m).__name__ for name, m in half.named_modules()}
    assert kinds["blocks.0.mlp.up"] == "Linear" and kinds["blocks.1.mlp.up"] == "Int8Linear"
    assert all(not isinstance(m, Int8Linear) for m in model.modules())
