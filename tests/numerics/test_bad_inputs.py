"""Inputs that once gave a wrong result without a word: shared and lone layers, states that lost a part, constants, infinities."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.optim import SGD
from fourwalls.numerics import onednn
from fourwalls.numerics.convert import convert, watch_inputs
from fourwalls.numerics.distill import soft_loss
from fourwalls.numerics.fold import fold_batch_norm
from fourwalls.numerics.gptq import gptq
from fourwalls.numerics.grids import Grid
from fourwalls.numerics.int8 import FakeLinear, Int8Linear, int8_linear
from fourwalls.numerics.int8_training import Int8TrainingLinear, int8_training
from fourwalls.numerics.kv_cache import Cache, decode
from fourwalls.numerics.loss_scale import LossScaler
from fourwalls.numerics.mixed import MasterWeights
from fourwalls.numerics.observers import Observer
from fourwalls.numerics.outliers import DecomposedLinear, inject
from fourwalls.numerics.packing import pack4, unpack4
from fourwalls.numerics.prune import prune_masks, scan, scan_blocks, shrink
from fourwalls.numerics.qat import QATLinear, prepare_qat
from fourwalls.numerics.quantize import quantize, round_with
from fourwalls.numerics.smooth import rescale, smooth

torch.set_num_threads(1)
INF, NAN = math.inf, math.nan


def floats(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Twice(nn.Module):
    """One layer in two places, and a head that shares the table's weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.again = nn.Sequential(nn.ReLU(), self.first)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.again(self.first(self.table(tokens))))


WAYS = {"convert": convert, "int8_training": int8_training, "prepare_qat": lambda model: prepare_qat(model, 8)}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_two_places_is_changed_in_both_and_stays_one(way):
    """The second place kept the float layer: half of the model was not quantised, and trained apart."""
    model = Twice()
    changed = WAYS[way](model)
    assert changed.first is changed.again[1] and not isinstance(changed.first, nn.Linear)
    assert isinstance(model.again[1], nn.Linear)  # the original is left alone
    tokens = torch.arange(7)
    assert (changed(tokens) - model(tokens)).abs().max() < 0.3
    if way != "convert":  # what trains keeps its ties
        assert changed.head.weight is changed.table.weight is not model.table.weight
        changed(tokens).sum().backward()
        assert changed.table.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_one_layer_is_changed(way):
    """It came back as it was: there is no parent to put the new layer into."""
    layer = nn.Linear(6, 3)
    changed = WAYS[way](layer)
    assert type(changed) is not nn.Linear and (changed(floats(2, 6)) - layer(floats(2, 6))).abs().max() < 0.1
    assert watch_inputs(nn.Sequential(layer), [floats(6)])["0"].shape == (1, 6)  # one row without a batch


def test_frozen_layers_stay_frozen():
    model = GPT(GPTConfig(layers=1, width=8, heads=2, length=8, vocabulary=16)).requires_grad_(False)
    assert not any(p.requires_grad for p in shrink(model, 0.5).parameters())
    rounded = prepare_qat(nn.Sequential(nn.Linear(4, 4).requires_grad_(False)))
    assert not rounded[0].weight.requires_grad and not rounded[0].bias.requires_grad and rounded[0].w_round.step.requires_grad


def test_a_cache_takes_only_what_goes_on_with_what_it_holds():
    """Keys of three tokens and values of two were taken, and counted as three."""
    k = floats(1, 2, 3, 4)
    for bits in (8, None):
        cache = Cache(bits)
        with pytest.raises(ValueError, match="equal shapes"):
            cache.append(k, k[:, :, :2])
        cache.append(k, k)
        with pytest.raises(ValueError, match="only the tokens differ"):
            cache.append(*[floats(2, 2, 3, 4)] * 2)
        cache.append(k[:, :, :1], k[:, :, :1])
        assert cache.tokens == 4


@pytest.mark.parametrize("scale", (0.0, -1.0, NAN, INF))
def test_a_scale_is_a_finite_number_above_0(scale):
    with pytest.raises(ValueError, match="not a finite number above 0"):
        round_with(floats(3), torch.tensor([scale]), torch.zeros(1, dtype=torch.int32), Grid())
    with pytest.raises(ValueError, match="the saved scale is"):
        LossScaler().load_state_dict(LossScaler().state_dict() | {"value": scale})


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_integer_products_in_16_bits_do_not_overflow(dtype):
    """The integer sum itself was taken to the dtype of x: five products of 127 by 127 are infinite in fp16."""
    layer = nn.Linear(256, 8)
    exact = layer(floats(5, 256).to(dtype).float())
    trained = Int8TrainingLinear(copy.deepcopy(layer).to(dtype))
    x = floats(5, 256).to(dtype).requires_grad_()
    y = trained(x)
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == dtype
    assert (y.float() - exact).norm() < 0.02 * exact.norm()
    wanted = layer.weight.sum(0).detach()
    assert (x.grad.float() - wanted).norm() < 0.02 * wanted.norm() * 5**0.5
    q = torch.full((2, 64), 127, dtype=torch.int8)
    assert torch.equal(int8_linear(q, 1e-3, q, 1e-3, dtype=dtype), torch.full((2, 2), 64 * 127 * 127 * 1e-6).to(dtype))


def test_an_empty_batch_trains_and_second_derivatives_are_refused():
    x = torch.empty(0, 4, requires_grad=True)
    for layer in (Int8TrainingLinear(nn.Linear(4, 3)), QATLinear(nn.Linear(4, 3), 8, x_bits=8).train()):
        if isinstance(layer, QATLinear):
            layer(floats(5, 4))  # calibrates
        layer(x).sum().backward()
        assert layer(x).shape == (0, 3) and layer.weight.grad.abs().sum() == 0
    x = floats(2, 4).requires_grad_()
    (slope,) = torch.autograd.grad(Int8TrainingLinear(nn.Linear(4, 3))(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("bits", (8, 7, 5))
def test_a_constant_row_is_exact_in_every_number_of_bits(bits):
    """With 7 bits, on processors without dot products of bytes, a row of equal numbers came out as 0."""
    if not onednn.is_available():
        pytest.skip("no oneDNN")
    w = torch.randint(-127, 128, (4, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    w[:, ::2] = 3  # small enough for 8 bits of input on every processor
    x = torch.tensor([3.0, -0.25, 0.0]).unsqueeze(1).expand(3, 16)
    y = onednn.linear_onednn(x, onednn.pack(w // 4), torch.ones(4), bits=bits)
    assert torch.equal(y, x @ (w // 4).float().t())
    mixed = floats(2, 16)
    exact = mixed @ (w // 4).float().t()
    scale = mixed.abs().amax(1, keepdim=True) / Grid(bits).high
    assert bool(
        ((onednn.linear_onednn(mixed, onednn.pack(w // 4), torch.ones(4), bits=bits) - exact).abs() <= 16 * 32 * scale).all()
    )


def test_the_decomposition_keeps_all_of_itself_in_its_state():
    """The int8 columns were in no state: a loaded layer had the float columns of one and the int8 ones of another."""
    fixed, x = torch.tensor([1, 5]), floats(4, 8)
    one, other = (DecomposedLinear(nn.Linear(8, 3), fixed=fixed) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x)) and torch.equal(copy.deepcopy(one)(x), one(x))
    for bad in ([1, 1], [8], [-1], [0.5]):
        with pytest.raises(ValueError, match="different indices of 0 to 7"):
            DecomposedLinear(nn.Linear(8, 3), fixed=torch.tensor(bad))
    layer = nn.Linear(8, 3)
    assert (DecomposedLinear(layer, fixed=torch.tensor([]))(x) - layer(x)).abs().max() < 0.1


def test_a_state_with_rounded_inputs_comes_back():
    model = prepare_qat(nn.Sequential(nn.Linear(4, 3)), 8, x_bits=8)
    model(floats(5, 4))  # calibrates
    fresh = prepare_qat(nn.Sequential(nn.Linear(4, 3)), 8, x_bits=8)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(floats(5, 4)), model.eval()(floats(5, 4)))


def test_what_is_not_finite_is_named_and_never_an_integer():
    for bad in (NAN, INF):
        with pytest.raises(ValueError, match=r"1 values that are not finite, the first .* at index \(0,\)"):
            round_with(torch.tensor([bad, 1.0]), torch.tensor(0.1), torch.tensor(0), Grid())
        with pytest.raises(ValueError, match="xmax has 1 values that are not finite"):
            smooth(torch.tensor([1.0, bad]), torch.ones(2, 2))
        with pytest.raises(ValueError, match="w has 1 values that are not finite"):
            smooth(torch.ones(2), torch.tensor([[1.0, bad]]))
        for look in (lambda model, bad=bad: scan(model, lambda _: bad), lambda model, bad=bad: scan_blocks(model, lambda _: bad)):
            with pytest.raises(ValueError, match="loss of the whole model is"):
                look(GPT(GPTConfig(layers=2, width=8, heads=2, length=8, vocabulary=16)))
    with pytest.raises(ValueError, match="beyond bfloat16"):
        pack4(torch.tensor([[1e300, -1e300]], dtype=torch.float64), 2)


def test_a_short_last_group_is_not_judged_by_zeros_that_are_not_there():
    x = torch.cat([floats(1, 64), torch.tensor([[1.0, 2, 3, 4]])], 1)
    q = quantize(x, 8, group=64, observer="percentile", share=0.95)
    assert (q.dequantize()[0, 64:] - x[0, 64:]).abs().max() <= 4 / 127 / 2 * 1.01
    constant = torch.cat([floats(1, 8), torch.full((1, 3), 0.3)], 1)
    assert torch.equal(quantize(constant, 4, group=8).dequantize()[0, 8:], constant[0, 8:])


def test_a_padding_other_than_zeros_and_a_transposed_convolution_are_refused():
    with pytest.raises(ValueError, match="pads with 'reflect'; allowed: zeros"):
        prepare_qat(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")))
    with pytest.raises(ValueError, match="ConvTranspose2d is transposed"):
        fold_batch_norm(nn.ConvTranspose2d(3, 3, 3), nn.BatchNorm2d(3))


def test_a_weight_that_readers_share_is_rescaled_once():
    norm, layer, x = nn.LayerNorm(4), nn.Linear(4, 4), floats(3, 4)
    before = layer(norm(x))
    rescale(norm, [layer, layer], torch.tensor([2.0, 4.0, 0.5, 1.0]))
    assert torch.equal(layer(norm(x)), before)


def test_classes_that_the_teacher_rules_out_cost_nothing():
    teacher, student = torch.tensor([[0.0, 1.0, -INF]]), torch.tensor([[0.5, 0.0, -INF]]).requires_grad_()
    loss = soft_loss(student, teacher, temperature=1.0)
    loss.backward()
    two = soft_loss(torch.tensor([[0.5, 0.0]]), torch.tensor([[0.0, 1.0]]), temperature=1.0)
    assert torch.allclose(loss, two) and torch.isfinite(student.grad).all()
    assert soft_loss(torch.tensor([[-INF, 0.0]]), torch.zeros(1, 2)) == INF  # the student rules out what may be
    z, t = floats(4, 9, dtype=torch.float64), floats(4, 9, seed=1, dtype=torch.float64)
    assert torch.equal(
        soft_loss(z, t, temperature=1.0), F.kl_div(z.log_softmax(-1), t.log_softmax(-1), reduction="batchmean", log_target=True)
    )


def test_a_scale_below_one_that_overflows_in_the_division_is_skipped():
    p = nn.Parameter(torch.ones(2))
    scaler, optimizer = LossScaler(scale=2.0**-20), SGD([p], lr=1.0)
    p.grad = torch.tensor([1e35, 1.0])
    assert not scaler.step(optimizer) and torch.equal(p.detach(), torch.ones(2))
    scaler.update()
    assert scaler.value == 2.0**-21


def test_a_gradient_that_two_optimisers_share_is_divided_once():
    p = nn.Parameter(torch.ones(2))
    one, other = (SGD([p], lr=0.0) for _ in range(2))
    scaler = LossScaler(scale=4.0)
    for _ in range(2):  # and again after update()
        p.grad = torch.full((2,), 4.0)
        scaler.unscale_(one), scaler.unscale_(other)
        assert torch.equal(p.grad, torch.ones(2))
        scaler.step(one), scaler.step(other), scaler.update()


def test_masters_one_for_each_parameter_and_gradients_survive_a_refusal():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="some of them twice"):
        MasterWeights([p, p], lambda masters: SGD(masters, lr=0.1))
    masters = MasterWeights([p], lambda masters: SGD(masters, lr=0.5))
    p.grad = torch.ones_like(p)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="inside an autocast region"):
        masters.step()
    assert masters.step() and torch.equal(p.detach(), torch.full_like(p, 0.5))  # outside, with the same gradients


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("bits", (8, None))
def test_a_cache_gives_back_the_dtype_that_it_was_given(dtype, bits):
    model = GPT(GPTConfig(layers=2, width=8, heads=2, length=8, vocabulary=16), dtype=dtype)
    tokens = torch.arange(8).view(1, 8)
    caches = [Cache(bits) for _ in model.blocks]
    decode(model, tokens[:, :5], caches)
    logits = decode(model, tokens[:, 5:], caches)
    assert logits.dtype == dtype
    assert (logits - model(tokens)[:, 5:]).abs().max() < (1e-12 if (dtype, bits) == (torch.float64, None) else 0.01)


REFUSED = {
    "a share for nobody": (lambda: prune_masks({"a": floats(4, 4)}, {"a": 0.5, "typo": 0.9}), "a share for 'typo'"),
    "damping below 0": (lambda: gptq(floats(3, 6), torch.eye(6, dtype=torch.float64), damping=-0.5), "damping is -0.5"),
    "an infinite factor": (
        lambda: inject(GPT(GPTConfig(layers=1, width=8, heads=2, length=8, vocabulary=16)), [0], INF), "a power of two"),
    "keep nothing": (lambda: Observer(keep=0), "keep is 0"),
    "another layer's weight": (lambda: FakeLinear(nn.Linear(4, 3), weight=quantize(floats(5, 4), 8, 0)), r"\(5, 4\) for a layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        call()


def test_odd_sizes_and_states_of_what_was_right_already():
    for n, k, group in ((3, 7, 4), (1, 1, 64), (0, 5, 4), (3, 0, 4), (2, 65, 64)):
        w = floats(n, k)
        assert unpack4(pack4(w, group)).shape == (n, k)
        assert (unpack4(pack4(w, group)) - w).abs().sum() <= 0.3 * w.abs().sum()
    layer, x = Int8Linear.of(nn.Linear(8, 3)), floats(8)
    other = Int8Linear.of(nn.Linear(8, 3))
    other.load_state_dict(layer.state_dict())
    assert layer(x).shape == (3,) and torch.equal(layer(x), other(x))
