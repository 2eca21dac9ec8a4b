"""Layer norm: every form equal to float64's within its bound; the running variance keeps its digits where two sums lose them."""

import math

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import norm as norm_file
from fourwalls.kernels.norm import (
    layer_norm_blocks,
    layer_norm_online,
    layer_norm_separate,
    running_mean_and_variance,
    two_sums_variance,
)

from .judge import norm_bound, numbers, planted, spoiled, unit, wrong

torch.set_num_threads(1)
FORMS = {
    "separate": layer_norm_separate,
    "blocks": layer_norm_blocks,
    "blocks of 2": lambda *given: layer_norm_blocks(*given, rows=2),
    "online": layer_norm_online,
    "online by 1": lambda *given: layer_norm_online(*given, columns=1),
    "online by 7": lambda *given: layer_norm_online(*given, columns=7),
}


def given(*shape, dtype, mean=0.0):
    x = (numbers(*shape) + mean).to(dtype)
    return x, numbers(shape[-1], seed=1, dtype=dtype), numbers(shape[-1], seed=2, dtype=dtype)


def exactly(x, w, b):
    return F.layer_norm(x.double(), x.shape[-1:], w.double(), b.double())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_float64_within_the_bound(form, dtype):
    for shape, mean in (((7, 10), 0.0), ((2, 3, 33), 100.0), ((5,), 0.0), ((4, 1), 3.0)):
        x, w, b = given(*shape, dtype=dtype, mean=mean)
        exact = exactly(x, w, b)
        bound = norm_bound(x, w, b)
        got = FORMS[form](x, w, b)
        assert got.dtype == dtype and wrong(got, exact, bound) == 0
        assert wrong(F.layer_norm(x, x.shape[-1:], w, b), exact, bound) == 0
        assert wrong(spoiled(exact, bound), exact, bound) == 1


@pytest.mark.parametrize("form", FORMS)
def test_odd_rows_and_empty_inputs(form):
    inf, nan = math.inf, math.nan
    x = torch.tensor([[0.0] * 4, [3.0] * 4, [1e-45, 0, 1e-40, 0], [inf, 0, 1, 2], [-inf] * 4, [nan, 0, 1, 2], [1, 2, 3, 4]])
    w, b = torch.ones(4), torch.zeros(4)
    want, got = F.layer_norm(x, (4,), w, b), FORMS[form](x, w, b)
    assert wrong(got, want.double(), 1e-6) == 0
    assert got[3:6].isnan().all() and not got[[0, 1, 2, 6]].isnan().any()
    for shape in ((0, 4), (2, 0, 4)):
        assert FORMS[form](torch.empty(shape), w, b).shape == shape
    strided = numbers(4, 9, dtype=torch.float32).t()
    assert wrong(FORMS[form](strided, w, b), exactly(strided, w, b), norm_bound(strided, w, b)) == 0


def test_running_mean_and_variance_of_any_chunk():
    x = numbers(3, 4, 50) + 5
    for columns in (None, 1, 7, 50):
        mean, variance = running_mean_and_variance(x, columns=columns)
        assert torch.allclose(mean, x.mean(-1, keepdim=True), rtol=1e-13, atol=0)
        assert torch.allclose(variance, x.var(-1, correction=0, keepdim=True), rtol=1e-12, atol=0)
    assert running_mean_and_variance(torch.empty(0, 3))[1].shape == (0, 1)


def test_two_sums_lose_every_digit_where_the_running_variance_loses_none():
    """Numbers near 10,000 with a spread of 1, in float32: u mean^2 is 6, as large as what is looked for."""
    x = (numbers(20, 500) + 10_000).float()
    exact = x.double().var(-1, correction=0, keepdim=True)
    running = running_mean_and_variance(x, columns=50)[1].double()
    lost = two_sums_variance(x)[1].double()
    assert float(((running - exact).abs() / exact).max()) < 500 * 10_000 * unit(torch.float32) / 10
    assert float(((lost - exact).abs() / exact).max()) > 1
    near = numbers(20, 500)
    assert torch.allclose(two_sums_variance(near)[1], near.var(-1, correction=0, keepdim=True))


def test_results_go_where_they_are_asked_to_and_wrong_asks_are_refused():
    x, w, b = given(6, 8, dtype=torch.float32)
    want = layer_norm_separate(x, w, b)
    for form in (layer_norm_blocks, layer_norm_online):
        over = x.clone()
        assert form(over, w, b, out=over) is over and torch.allclose(over, want, atol=1e-6)
        with pytest.raises(ValueError, match="has no backward; .* use layer_norm_separate"):
            form(x, w.clone().requires_grad_(), b)
    for call, words in (
        (lambda: layer_norm_blocks(x, w[:3], b), r"weight \(3,\) .* allowed: \(8,\) for both"),
        (lambda: layer_norm_online(x, w, b, eps=-1.0), "eps is -1.0"),
        (lambda: layer_norm_separate(x.long(), w, b), "int64"),
        (lambda: layer_norm_blocks(x, w, b, rows=-2), "rows is -2"),
        (lambda: layer_norm_online(x, w, b, columns=0), "columns is 0"),
        (lambda: layer_norm_separate(torch.tensor(1.0), w, b), "at least one dim"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


FAULTS = {
    "variance without the distance of the means": (" + apart * apart * (seen * share)", "", "layer_norm_online"),
    "mean of means": ("mean = mean + apart * share", "mean = mean + apart / 2", "layer_norm_online"),
    "divided by n - 1": ("spread / max(seen, 1)", "spread / (seen - 1)", "layer_norm_online"),
    "scale and shift changed over": ("torch.addcmul(bias, y, weight, out=y)", "torch.addcmul(weight, y, bias, out=y)",
                                     "layer_norm_blocks"),
    "mean not taken away": ("torch.sub(x, stat, out=y)", "y.copy_(x)", "layer_norm_blocks"),
    "eps forgotten": ("stat.add_(eps).rsqrt_()", "stat.rsqrt_()", "layer_norm_blocks"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    old, new, form = FAULTS[name]
    x, w, b = given(5, 30, dtype=torch.float32, mean=0.5)
    x = x * 0.01  # so that eps counts
    options = {"columns": 7} if form == "layer_norm_online" else {}
    exact, bound = exactly(x, w, b), norm_bound(x, w, b)
    assert wrong(getattr(norm_file, form)(x, w, b, **options), exact, bound) == 0
    assert wrong(getattr(planted(norm_file, old, new), form)(x, w, b, **options), exact, bound) > 0
