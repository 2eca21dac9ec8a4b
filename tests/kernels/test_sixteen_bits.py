"""16 bits, borrowed memory, odd layouts: sums that overflow or stop to grow, results over inputs, rows that are all one row."""

import math

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import compile as compile_file
from fourwalls.kernels import formulas
from fourwalls.kernels.compile import Compiled
from fourwalls.kernels.cross_entropy import cross_entropy_blocks, cross_entropy_in_place, cross_entropy_separate
from fourwalls.kernels.fusion import bias_gelu_blocks, bias_gelu_separate
from fourwalls.kernels.norm import layer_norm_blocks, layer_norm_online, layer_norm_separate, running_mean_and_variance
from fourwalls.kernels.softmax import running_max_and_sum, softmax_blocks, softmax_online, softmax_separate
from fourwalls.kernels.traffic import traffic
from fourwalls.numerics.autocast import Autocast

from .judge import numbers, unit

torch.set_num_threads(1)
HALVES = (torch.float16, torch.bfloat16)
SOFTMAX = (softmax_separate, softmax_blocks, softmax_online, lambda x: softmax_online(x, columns=1000))
NORM = (layer_norm_separate, layer_norm_blocks, layer_norm_online, lambda *given: layer_norm_online(*given, columns=3))
LOSS = (cross_entropy_separate, cross_entropy_blocks, cross_entropy_in_place)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", SOFTMAX)
def test_softmax_of_long_rows_in_16_bits(form, dtype):
    """70,000 ones are more than fp16 can hold; in bfloat16 a sum of 1,000 at a time stops at 256 times as much."""
    x = torch.zeros(2, 70_000, dtype=dtype)
    x[1, 0] = 11.0
    exact = torch.softmax(x.double(), -1)
    got = form(x)
    least = 2.0**-24 if dtype == torch.float16 else 0.0  # fp16's last tick
    assert got.dtype == dtype and bool(((got.double() - exact).abs() <= 8 * unit(dtype) * exact + least).all())


def test_a_running_sum_in_bfloat16_goes_on_growing():
    x = torch.zeros(1, 600, dtype=torch.bfloat16)
    largest, total = running_max_and_sum(x, columns=1)
    assert total.dtype == torch.float32 and float(total) == 600 and largest.dtype == x.dtype
    mean, variance = running_mean_and_variance(torch.full((1, 600), 3.0, dtype=torch.bfloat16), columns=1)
    assert (float(mean), float(variance)) == (3.0, 0.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", NORM)
def test_layer_norm_of_large_numbers_in_16_bits(form, dtype):
    """The square of 1,000 is beyond fp16: it made every number 0."""
    x = numbers(3, 64, scale=1000.0).to(dtype)
    w, b = numbers(64, seed=1).to(dtype), numbers(64, seed=2).to(dtype)
    exact = F.layer_norm(x.double(), (64,), w.double(), b.double())
    got = form(x, w, b)
    assert got.dtype == dtype and bool(((got.double() - exact).abs() <= 2 * unit(dtype) * exact.abs().clamp(min=1)).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", LOSS)
def test_cross_entropy_over_many_columns_and_rows_in_16_bits(form, dtype):
    """The sum over 70,000 columns, and that sum times the rows, which the gradient is divided by."""
    for rows, columns in ((2, 70_000), (200, 600)):
        x, labels = torch.zeros(rows, columns, dtype=dtype), torch.arange(rows)
        leaf = x.clone().requires_grad_()
        loss = form(leaf * 1, labels)
        assert loss.dtype == dtype and abs(float(loss.detach()) - math.log(columns)) <= 4 * unit(dtype) * math.log(columns)
        gradient = torch.autograd.grad(loss, leaf)[0].double()
        exact = (1 / columns - F.one_hot(labels, columns).double()) / rows
        assert bool(((gradient - exact).abs() <= 8 * unit(dtype) * exact.abs() + 2.0**-24).all())


@pytest.mark.parametrize("table", ("careful", "cpu"))
def test_under_autocast_results_go_where_they_are_asked_to(table):
    """Every form that fills memory of its own was wrong: the region gave it a copy, and the result went into that."""
    x, w, b = numbers(6, 40).bfloat16(), torch.ones(40).bfloat16(), torch.zeros(40).bfloat16()
    labels, wide = torch.arange(6), x.double()
    left, right, place = torch.randn(3, 4), torch.randn(4, 5), torch.zeros(3, 5)
    with Autocast("bf16", table=table):
        torch.mm(left, right, out=place)
        found = {
            "softmax": [form(x) for form in SOFTMAX],
            "norm": [form(x, w, b) for form in NORM],
            "gelu": [form(x, b) for form in (bias_gelu_separate, bias_gelu_blocks)],
            "loss": [form(x.clone(), labels) for form in LOSS],
        }
    assert torch.equal(place, left @ right)
    exact = {
        "softmax": torch.softmax(wide, -1),
        "norm": F.layer_norm(wide, (40,)),
        "gelu": F.gelu(wide, approximate="tanh"),
        "loss": F.cross_entropy(wide, labels),
    }
    for what, results in found.items():
        for got in results:  # some ten roundings to eight bits
            assert bool(
                ((got.double() - exact[what]).abs() <= 10 * unit(torch.bfloat16) * exact[what].abs().clamp(min=0.5)).all()
            ), what


def test_a_result_over_a_part_of_its_input_is_refused():
    room = torch.randn(48)
    x = room[:40].view(5, 8)
    w = torch.ones(8)
    for form in (softmax_blocks, softmax_online, lambda x, out: layer_norm_blocks(x, w, w, out=out)):
        with pytest.raises(ValueError, match="out lies over a part of x; allowed: x itself"):
            form(x, out=room[8:].view(5, 8))
    square = room[:25].view(5, 5)
    with pytest.raises(ValueError, match="over a part of x"):
        softmax_blocks(square.t(), out=square)
    beside = torch.randn(2, 5, 8)  # one storage, two places
    assert torch.allclose(softmax_blocks(beside[0], out=beside[1]), torch.softmax(beside[0], -1))


def test_in_place_refuses_rows_that_lie_in_one_place():
    """Each row would have read the gradient of the one before as its logits."""
    row = torch.randn(1, 6)
    labels = torch.arange(4)
    for logits in (row.expand(4, 6), row[:, :1].expand(4, 6), torch.randn(9).as_strided((4, 6), (1, 1))):
        with pytest.raises(ValueError, match="share memory; allowed: a place for each"):
            cross_entropy_in_place(logits, labels, rows=1)
    base = torch.randn(12, 8)
    for logits in (base.t()[:4, :6], base[::3, ::2], base[:4].unsqueeze(0)[0]):
        want = F.cross_entropy(logits.clone(), labels % logits.shape[1])
        assert torch.allclose(cross_entropy_in_place(logits, labels % logits.shape[1], rows=1), want)


def test_gelu_of_the_largest_numbers_is_theirs():
    x, b = torch.tensor([[3e38, -3e38, 1e30, 0.0]]), torch.zeros(4)
    for form in (bias_gelu_separate, bias_gelu_blocks):
        assert torch.equal(form(x, b), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("rows", (1037, 150_000))
def test_of_many_rows_one_pass_moves_nothing_more(rows):
    """Three numbers a row left the cache, and one of them came back, though nobody wanted a gradient."""
    x, labels = torch.randn(rows, 8), torch.randint(8, (rows,))
    for gradient in (False, True):
        counted = traffic(cross_entropy_blocks, x.clone().requires_grad_(gradient), labels, cache=2**20)
        assert counted.bytes == formulas.one_pass_bytes("cross_entropy", rows, 8, gradient=gradient)


def test_where_torch_compiles_for_no_further_shape_the_function_runs_itself(monkeypatch):
    seen = []

    def picky(x):
        seen.append(x.shape)
        if len(set(seen)) > 2:
            raise RuntimeError("hard failure: so many shapes and no more")
        return softmax_separate(x)

    monkeypatch.setattr(compile_file.torch, "compile", lambda fn, **options: picky)
    said = []
    work = Compiled(softmax_separate, say=said.append)
    for n in (3, 4, 5, 6, 3):
        x = torch.randn(2, n)
        assert torch.equal(work(x), softmax_separate(x))
    assert len(said) == 1 and "RuntimeError: hard failure" in said[0] and work.fell_back
    assert len(seen) == 4  # twice the first, then each shape once, and nothing after the failure
    with pytest.raises(ValueError, match="softmax of int64"):
        work(torch.ones(3, dtype=torch.int64))
