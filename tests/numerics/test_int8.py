"""Integer products: exact in int32 on every shape, refused or split before they overflow, equal to fake quantization."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourwalls.bench.int8 import exact_shapes
from fourwalls.nn.layers import Linear
from fourwalls.numerics import product as product_file
from fourwalls.numerics.int8 import FakeLinear, Int8Linear, int8_linear, linear_in_blocks, row_scale
from fourwalls.numerics.int8_training import Int8Product, Int8TrainingLinear, int8_training
from fourwalls.numerics.product import HOW, LONGEST_FLOAT, LONGEST_INT32, int_product, plain, self_test
from fourwalls.numerics.quantize import fake_quantize, quantize

torch.set_num_threads(1)


def ints(*shape, seed=0, low=-128):
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_thousand_random_shapes_are_exact():
    assert exact_shapes(1000) == 0


def test_a_wrong_integer_is_counted(monkeypatch):
    real = product_file._float

    def wrong(a, b, out):
        real(a, b, out)
        out[-1, -1] += 1
        return out

    monkeypatch.setattr(product_file, "_float", wrong)
    assert exact_shapes(20) > 10


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "shape", ((0, 5, 3), (3, 0, 4), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 64, 32), (2, 1023, 3), (2, 1025, 3), (5, 3000, 1))
)
def test_empty_odd_and_thin_shapes(how, shape):
    m, k, n = shape
    a, b = ints(m, k), ints(n, k, seed=1)
    a[:, ::2] = -128
    got = int_product(a, b, how=how)
    assert got.dtype == torch.int32 and torch.equal(got, a.to(torch.int32) @ b.to(torch.int32).t())
    out = torch.full((m, n), 7, dtype=torch.int32)
    assert int_product(a, b, how=how, out=out) is out and torch.equal(out, got)


@pytest.mark.parametrize("how", HOW)
def test_rows_of_stride_zero_and_views(how):
    """Trial f07: one row with stride 0 counts as contiguous. Cousins: expanded rows, cut columns, transposed, one-row weights."""
    w = ints(512, 512)
    row = ints(1, 512, seed=2)
    odd = row.as_strided((1, 512), (0, 1))
    assert odd.is_contiguous() and plain(odd).stride() == (512, 1)
    kinds = [odd, row.expand(7, 512), ints(1, 1).expand(3, 512), ints(512, 5).t()]
    kinds += [ints(4, 1024)[:, ::2], ints(9, 512)[1:8:3]]
    for a in kinds:
        assert torch.equal(int_product(a, w, how=how), a.to(torch.int32) @ w.to(torch.int32).t())
        b = a.as_strided((1, 512), (0, 1)) if a.shape[0] == 1 else a
        assert torch.equal(int_product(w, b, how=how), w.to(torch.int32) @ b.to(torch.int32).t())


def test_sums_that_pass_int32_are_made_in_int64():
    """Trial f05: 127 times 127, 200,000 times, is 3,225,800,000."""
    a = torch.full((1, 200_000), 127, dtype=torch.int8)
    assert torch._int_mm(a, a.t().contiguous()).item() == -1_069_167_296  # what torch says: wrapped, without a word
    for how in HOW:
        got = int_product(a, a, how=how)
        assert got.dtype == torch.int64 and got.item() == 3_225_800_000
    edge = torch.full((1, LONGEST_INT32), -128, dtype=torch.int8)
    assert int_product(edge, edge).dtype == torch.int32 and int_product(edge, edge).item() == LONGEST_INT32 * 2**14 < 2**31
    assert (LONGEST_INT32 + 1) * 2**14 == 2**31 and LONGEST_FLOAT * 2**14 == 2**24
    with pytest.raises(ValueError, match="may pass int32, so use out=None"):
        int_product(a, a, out=torch.empty(1, 1, dtype=torch.int32))
    y = int8_linear(a, 0.5, a, torch.tensor([[2.0]]))
    assert y.item() == pytest.approx(3_225_800_000, rel=1e-6)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    """Were the integer kernel to read a stride of 0, or to saturate, the self-test says so and floats take over."""
    real = torch._int_mm

    def saturating(a, b, **out):
        return real((a // 2) * 2, b, **out)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    self_test.cache_clear()
    try:
        assert not self_test("cpu")
        a, b = ints(9, 33), ints(7, 33, seed=1)
        assert torch.equal(int_product(a, b), a.to(torch.int32) @ b.to(torch.int32).t())
    finally:
        monkeypatch.undo()
        self_test.cache_clear()
    assert self_test("cpu")


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda: int_product(ints(2, 3), ints(3, 2)), "differ in their last dim"),
        (lambda: int_product(ints(2, 3), floats(2, 3)), "b is torch.float32"),
        (lambda: int_product(ints(6), ints(2, 3)), "allowed: int8 of two dims"),
        (lambda: int_product(ints(2, 3), ints(2, 3), how="fast"), "how is 'fast'; allowed: integer, float32, auto"),
        (lambda: int_product(ints(2, 3), ints(4, 3), out=torch.empty(2, 3, dtype=torch.int32)), "allowed: int32 .2, 4."),
        (
            lambda: int8_linear(ints(2, 3), torch.ones(1, 3), ints(4, 3), 1.0),
            "sx has shape .1, 3.; allowed: one number, or .2, 1.",
        ),
        (lambda: int8_linear(ints(2, 3), 1.0, ints(4, 3), torch.ones(3)), "sw has shape .3,."),
        (lambda: linear_in_blocks(floats(2, 3), ints(4, 3), torch.ones(4, 1), rows=0), "rows is 0"),
        (lambda: linear_in_blocks(floats(2, 3) / 0, ints(4, 3), torch.ones(4, 1)), "not finite, the first .* at index .0, 0."),
        (lambda: Int8Linear.of(Int8Linear.of(Linear(3, 4))), "quantised already"),
        (lambda: Int8Linear(quantize(floats(3, 4), 8, 1)), "allowed: symmetric int8, axis 0 or None"),
        (lambda: FakeLinear(nn.ReLU()), "ReLU is no linear layer"),
    ),
)
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def compare(found, x, w, bias):
    """How many roundings of float32 the worst element is off what float64 makes of the same integers."""
    xq, wq = (fake_quantize(t, 8, 0).double() for t in (x, w))
    exact = F.linear(xq, wq, None if bias is None else bias.double())
    bound = (xq.abs() @ wq.abs().t() + (0 if bias is None else bias.abs())) * (x.shape[1] + 6) * 2.0**-24
    return float(((found.double() - exact).abs() / bound.clamp(min=1e-30)).max())


def test_true_and_fake_give_the_same_numbers():
    for m, k, n in ((1, 1, 1), (5, 33, 7), (300, 65, 40)):
        x, w, bias = floats(m, k), floats(n, k, seed=1), floats(n, seed=2)
        x[0] = 0.0
        layer = nn.Linear(k, n)
        layer.weight.data, layer.bias.data = w, bias
        for layer_kind in (Int8Linear.of(layer), Int8Linear.of(layer, rows=None, how="integer"), FakeLinear(layer)):
            found = layer_kind(x)
            assert compare(found, x, w, bias) <= 1
            found = found.clone()
            found[-1, -1] += 10 * (x[-1].abs() @ w[-1].abs() + bias[-1].abs()) * (k + 6) * 2.0**-24
            assert compare(found, x, w, bias) > 5


def test_blocks_change_no_bit():
    x, wq = floats(70, 40), quantize(floats(9, 40, seed=1), 8, 0)
    x[3], x[4] = 0.0, 2.5  # a row of zeros, a constant row
    whole = linear_in_blocks(x, wq.values, wq.scale, rows=None)
    for rows in (1, 7, 64, 70, 1000):
        assert torch.equal(linear_in_blocks(x, wq.values, wq.scale, rows=rows), whole)
    assert torch.equal(row_scale(x), quantize(x, 8, 0).scale)
    assert torch.equal(whole[:5], linear_in_blocks(x[:5], wq.values, wq.scale))  # a row does not depend on the others
    assert linear_in_blocks(x[:0], wq.values, wq.scale).shape == (0, 9)
    half = linear_in_blocks(x.bfloat16(), wq.values, wq.scale)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, linear_in_blocks(x.bfloat16().float(), wq.values, wq.scale).bfloat16())
    long = torch.full((1, 200_000), 3.0)
    q = quantize(long, 8, 0)
    assert linear_in_blocks(long, q.values, q.scale, how="float32").item() == pytest.approx(9 * 200_000)
    assert Int8Linear.of(nn.Linear(4, 3))(floats(2, 5, 4)).shape == (2, 5, 3)


@pytest.mark.parametrize(("signed", "symmetric"), ((True, False), (False, True), (False, False)))
def test_zero_points_are_taken_out_of_the_sum(signed, symmetric):
    """Unsigned inputs, and ranges that lie to one side of zero."""
    x, w = floats(6, 50).abs() + 0.1, floats(5, 50, seed=1)
    xq, wq = quantize(x, 8, 0, signed=signed, symmetric=symmetric), quantize(w, 8, 0)
    got = int8_linear(xq.values, xq.scale, wq.values, wq.scale, zero=xq.zero, dtype=torch.float64)
    exact = xq.dequantize().double() @ wq.dequantize().double().t()
    assert torch.allclose(got, exact, rtol=1e-5, atol=1e-4)
    forgotten = int8_linear(xq.values, xq.scale, wq.values, wq.scale, zero=128 * (not signed), dtype=torch.float64)
    if not symmetric:
        assert not torch.allclose(forgotten, exact, rtol=1e-2, atol=1e-2)


def test_only_integers_are_multiplied(monkeypatch):
    """One call of torch._int_mm, and nothing goes through floats."""
    real, calls = torch._int_mm, []

    def counted(a, b, **out):
        calls.append((a.dtype, b.dtype))
        return real(a, b, **out)

    self_test("cpu")
    monkeypatch.setattr(torch, "_int_mm", counted)
    monkeypatch.setattr(product_file, "_float", None)
    xq, wq = quantize(floats(8, 16), 8, 0), quantize(floats(4, 16), 8, 0)
    y = int8_linear(xq.values, xq.scale, wq.values, wq.scale)
    assert calls == [(torch.int8, torch.int8)] and y.shape == (8, 4)


# ---- training


def gradients(x, w, dy):
    """What float64 makes of the integers of the three products: Y, dX, dW, db."""
    q = {
        name: fake_quantize(t, 8, axis).double()
        for name, t, axis in (("xr", x, 0), ("wr", w, 0), ("gr", dy, 0), ("wc", w, 1), ("gc", dy, 1))
    }
    xc = fake_quantize(fake_quantize(x, 8, 0), 8, 1).double()
    return q["xr"] @ q["wr"].t(), q["gr"] @ q["wc"], q["gc"].t() @ xc, dy.double().sum(0)


def apply(x, w, bias, dy, function=Int8Product, how="integer"):
    x, w, bias = (t.clone().requires_grad_() for t in (x, w, bias))
    y = function.apply(x, w, bias, how)
    y.backward(dy)
    return y.detach() - bias.detach(), x.grad, w.grad, bias.grad


def off(found, exact):
    return max(float(((f.double() - e).abs() / (e.abs().mean() + e.abs())).max()) for f, e in zip(found, exact, strict=True))


def case():
    x, w, bias, dy = floats(40, 24), floats(10, 24, seed=1), floats(10, seed=2), floats(40, 10, seed=3) * 1e-4
    return x, w, bias, dy * torch.logspace(0, 2, 40).unsqueeze(1)


def test_all_three_products_are_of_int8_and_right():
    x, w, bias, dy = case()
    exact = gradients(x, w, dy)
    for how in HOW:
        assert off(apply(x, w, bias, dy, how=how), exact) < 1e-4
    plain_grads = (x @ w.t(), dy @ w, dy.t() @ x, dy.sum(0))
    assert off(apply(x, w, bias, dy), plain_grads) < 0.3  # rounding is all that differs


class ScaleOfForward(Int8Product):
    """The mutant: the gradient's integers are read with the scale of the input, which was at hand."""

    @staticmethod
    def backward(ctx, dy):
        values, scale, weight = ctx.saved_tensors
        gq, wq = quantize(dy, 8, 0), quantize(weight.t(), 8, 0)
        dx = int8_linear(gq.values, scale, wq.values, wq.scale)
        return dx, *Int8Product.backward(ctx, dy)[1:]


class WrongAxis(Int8Product):
    """The mutant: the weight keeps the scales of forward, which lie along the dim that backward sums over."""

    @staticmethod
    def backward(ctx, dy):
        values, scale, weight = ctx.saved_tensors
        gq, wq = quantize(dy, 8, 0), quantize(weight, 8, 0)
        dx = int8_linear(gq.values, gq.scale, wq.values.t().contiguous(), float(wq.scale.mean()))
        return dx, *Int8Product.backward(ctx, dy)[1:]


class Transposed(Int8Product):
    """The mutant: dW from gradient rows with their row scales left out."""

    @staticmethod
    def backward(ctx, dy):
        values, scale, weight = ctx.saved_tensors
        gq = quantize(dy, 8, 1)
        dw = int8_linear(gq.values.t().contiguous(), gq.scale.t(), values.t().contiguous(), float(scale.mean()))
        dx, _, *rest = Int8Product.backward(ctx, dy)
        return dx, dw, *rest


@pytest.mark.parametrize("wrong", (ScaleOfForward, WrongAxis, Transposed))
def test_wrong_twins_of_the_gradients_are_caught(wrong):
    x, w, bias, dy = case()
    w = w * torch.logspace(0, 1, 10).unsqueeze(1)
    x = x * torch.logspace(0, 1, 40).unsqueeze(1)
    assert off(apply(x, w, bias, dy), gradients(x, w, dy)) < 1e-4 < 0.05 < off(apply(x, w, bias, dy, wrong), gradients(x, w, dy))


def test_what_is_kept_for_backward_is_a_quarter():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        w = floats(10, 64).requires_grad_()
        Int8Product.apply(floats(32, 64), w, None, "auto")
    assert sum(t.nbytes for t in kept if t is not w and t.shape != w.shape) == 32 * 64 + 32 * 4


def test_frozen_inputs_and_weights():
    x, w, dy = floats(6, 8), floats(3, 8), floats(6, 3)
    only = w.clone().requires_grad_()
    Int8Product.apply(x, only, None, "auto").backward(dy)
    assert only.grad.shape == w.shape
    only = x.clone().requires_grad_()
    Int8Product.apply(only, w, None, "auto").backward(dy)
    assert only.grad.shape == x.shape


def test_a_model_is_converted_once_and_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    eighth = int8_training(model)
    assert [type(m) for m in eighth][::2] == [Int8TrainingLinear] * 2 and type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="no linear layer"):
        int8_training(eighth)
    x = floats(64, 6)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for net in (model, eighth):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
        for _ in range(70):
            optimizer.zero_grad()
            error = F.mse_loss(net(x), y)
            error.backward()
            optimizer.step()
        losses.append(float(error.detach()))
    assert losses[1] < 0.4 * float(y.square().mean()) and abs(losses[1] - losses[0]) < 0.2 * float(y.square().mean())
