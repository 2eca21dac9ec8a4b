"""Quantising: what comes back, within half a scale, for every form; what is refused; and wrong twins, each caught by name."""

import itertools
import math

import pytest
import torch

from fourwalls.numerics.granularity import expand_scale, scale_shape
from fourwalls.numerics.grids import Grid
from fourwalls.numerics.observers import OBSERVERS, Observer
from fourwalls.numerics.quantize import Quantized, dequantize, fake_quantize, quantize, zero_share

torch.set_num_threads(1)
FORMS = list(itertools.product((True, False), (True, False)))  # signed, symmetric


def sample(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def largest_excess(x, q):
    """How many half scales (and roundings of the float type) the worst value is off: at most 1 where nothing is clipped."""
    wide = x.double()
    half = expand_scale(q.scale, x.shape, q.group).double() / 2
    half = half + wide.abs() * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps * 2
    if x.dtype in (torch.float16, torch.bfloat16):
        half = half + wide.abs() * torch.finfo(x.dtype).eps
    if not q.grid.symmetric:
        half = half * 2  # the zero point is rounded too, so an end may lie half a scale outside
    return float(((dequantize(q).double() - wide).abs() / half).max()) if x.numel() else 0.0


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("signed", "symmetric"), FORMS)
def test_no_value_is_off_by_more_than_half_a_scale(bits, signed, symmetric):
    for shape, axis, group in (((7, 33), None, None), ((7, 33), 0, None), ((4, 5, 6), -1, None), ((7, 33), None, 8)):
        x = sample(*shape, seed=bits) + 0.3
        q = quantize(x, bits, axis, group=group, signed=signed, symmetric=symmetric)
        assert q.values.shape == x.shape and q.values.dtype == (torch.int8 if signed else torch.uint8)
        assert tuple(q.scale.shape) == tuple(q.zero.shape) == scale_shape(shape, axis, group)
        assert int(q.values.min()) >= q.grid.low and int(q.values.max()) <= q.grid.high
        assert largest_excess(x, q) <= 1


def test_the_comparison_sees_one_value_ten_times_off():
    x = sample(7, 33)
    q = quantize(x, 8, 0)
    values = q.values.clone()
    values[3, 5] += 5 if values[3, 5] < 0 else -5
    assert largest_excess(x, Quantized(values, q.scale, q.zero, q.grid, q.axis, q.group, q.dtype)) > 9


@pytest.mark.parametrize(("signed", "symmetric"), FORMS)
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_zero_comes_back_as_zero(bits, signed, symmetric):
    """Trial f13: [-1, 0, 1] as int8 and uint8."""
    for values in ([-1.0, 0.0, 1.0], [0.0, 5.0], [-5.0, 0.0], [0.0, 1.0, 1.1], [-3.0, 0.0, 1e-3]):
        for observer in OBSERVERS:
            q = quantize(torch.tensor(values), bits, signed=signed, symmetric=symmetric, observer=observer)
            assert dequantize(q)[values.index(0.0)] == 0.0
    if symmetric and not signed:
        assert int(quantize(torch.tensor([-1.0, 0.0, 1.0]), bits, signed=False).zero) == 2 ** (bits - 1)  # 128, not 0


def test_symmetric_grids_leave_the_lowest_integer_out():
    assert [(Grid(8, s, y).low, Grid(8, s, y).high) for s, y in FORMS] == [(-127, 127), (-128, 127), (1, 255), (0, 255)]
    x = sample(64, 64)
    plus, minus = quantize(x), quantize(-x)
    assert torch.equal(plus.values, -minus.values) and int(plus.values.abs().max()) == 127


@pytest.mark.parametrize(("signed", "symmetric"), FORMS)
def test_constant_and_zero_tensors_come_back_exactly(signed, symmetric):
    """Trial f01, with cousins: negative, one value, a constant channel, a zero channel among others."""
    kinds = {"signed": signed, "symmetric": symmetric}
    for x in (torch.zeros(4), torch.full((4,), 3.0), torch.full((4,), -2.7), torch.tensor(5.1), torch.full((2, 1), 7e-20)):
        q = quantize(x, 8, **kinds)
        assert torch.isfinite(q.scale).all() and (q.scale > 0).all() and torch.equal(dequantize(q), x)
    mixed = torch.stack([torch.zeros(6), torch.full((6,), -0.3), sample(6)])
    q = quantize(mixed, 4, 0, **kinds)
    assert torch.equal(dequantize(q)[:2], mixed[:2]) and largest_excess(mixed, q) <= 1


@pytest.mark.parametrize("value", (1e-45, 1e-40, -1e-42, 2e-38))
def test_denormal_values_have_a_finite_scale(value):
    """Trial f02: the scale is never below the smallest normal number, and what is smaller becomes 0."""
    for signed, symmetric in FORMS:
        for x in (torch.full((4,), value), torch.tensor([value, 0.0, value / 2])):
            q = quantize(x, 8, signed=signed, symmetric=symmetric)
            back = dequantize(q)
            assert (q.scale >= torch.finfo(torch.float32).tiny).all() and torch.isfinite(back).all()
            assert ((back - x).abs() <= q.scale).all()
    x = torch.full((3,), 1e-310, dtype=torch.float64)
    assert quantize(x).scale.dtype == torch.float64 and torch.isfinite(fake_quantize(x)).all()


def test_values_at_the_end_of_the_floats():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        big = torch.finfo(dtype).max
        for values in ([big, -big, 0.0], [big, 0.0], [-big, big / 3]):
            x = torch.tensor(values, dtype=dtype)
            for signed, symmetric in FORMS:
                back = fake_quantize(x, 8, signed=signed, symmetric=symmetric)
                assert back.dtype == dtype and torch.isfinite(back).all()
                assert ((back.double() - x.double()).abs() <= big / 100).all()


@pytest.mark.parametrize(("bad", "word"), ((math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")))
def test_infinities_and_nan_are_refused_with_their_place(bad, word):
    x = sample(3, 4)
    x[1, 2] = x[2, 0] = bad
    for call in (lambda: quantize(x, 8, 0), lambda: quantize(x.half(), 4, group=2), lambda: Observer().watch(x)):
        with pytest.raises(ValueError, match=rf"2 values that are not finite, the first \({word}\) at index \(1, 2\)"):
            call()


def test_empty_tensors():
    for shape, axis, group in (((0,), None, None), ((0, 3), 0, None), ((3, 0), 0, None), ((3, 0), None, 4)):
        q = quantize(torch.empty(shape), 8, axis, group=group)
        assert q.values.shape == shape and dequantize(q).shape == shape
        assert tuple(q.scale.shape) == scale_shape(shape, axis, group)


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda x: quantize(x, 9), "bits is 9; it is a whole number from 2 to 8; nearest legal: 8"),
        (lambda x: quantize(x, 1), "nearest legal: 2"),
        (lambda x: quantize(x, 8.0), "bits is 8.0"),
        (lambda x: quantize(x, True), "bits is True"),
        (lambda x: quantize(x, 8, 2), "axis 2 for shape .3, 5.; allowed: -2 to 1, or None; nearest legal: 1"),
        (lambda x: quantize(x, 8, 0, group=4), "allowed: one of them"),
        (lambda x: quantize(x, 8, group=0), "group is 0"),
        (lambda x: quantize(x, 8, observer="median"), "observer is 'median'; allowed: absmax, percentile, mse, entropy"),
        (lambda x: quantize(x, 8, observer="percentile", share=1.5), "share is 1.5"),
        (lambda x: quantize(x.to(torch.int8)), "Whole numbers are quantised already"),
        (lambda x: quantize([1.0]), "x is list"),
        (lambda x: quantize(quantize(x, 8), 4), "quantised already"),
        (lambda x: quantize(quantize(x, 8, 0), 8, 1), "quantised already"),
    ),
)
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(sample(3, 5))


def test_quantising_twice_changes_nothing():
    x = sample(6, 8)
    for options in ({}, {"axis": 0}, {"axis": -1}, {"group": 4}):
        q = quantize(x, 4, **options)
        assert quantize(q, 4, **options) is q
    assert quantize(quantize(x, 8, 1), 8, -1).axis == 1  # the same axis by another name


def test_each_axis_has_its_own_scales():
    """Trial f04: rows of 1, 10, 100; axis 0 and -1; three dims. The error per channel is below that per tensor."""
    w = sample(3, 5) * torch.tensor([[1.0], [10.0], [100.0]])

    def error(**options):
        return (fake_quantize(w, 8, **options) - w).square().sum(1)

    whole, rows, columns = error(), error(axis=0), error(axis=-1)
    assert (rows[:2] < whole[:2] / 30).all() and rows.sum() < whole.sum() and rows.sum() < columns.sum()
    assert torch.equal(quantize(w, 8, 0).scale.flatten(), w.abs().amax(1) / 127)
    assert torch.equal(quantize(w, 8, -1).scale.flatten(), w.abs().amax(0) / 127)
    three = sample(4, 3, 5) * torch.logspace(0, 3, 3).reshape(1, 3, 1)
    assert torch.equal(quantize(three, 8, 1).scale.flatten(), three.abs().amax((0, 2)) / 127)
    assert torch.equal(quantize(three, 8, (0, 1)).scale.squeeze(-1), three.abs().amax(2) / 127)  # per token
    errors = {a: (fake_quantize(three, 8, a) - three)[:, :2].square().sum() for a in (None, 0, 1, -1)}
    assert errors[1] < min(errors[a] for a in (None, 0, -1)) / 30  # of the small channels, which have scales of their own


def test_groups_are_those_of_a_loop():
    x = sample(3, 10)  # groups of 4, 4 and 2
    q = quantize(x, 4, group=4)
    for r in range(3):
        for g, part in enumerate(x[r].split(4)):
            assert q.scale[r, g] == part.abs().max() / 7
            assert torch.equal(q.dequantize()[r, 4 * g : 4 * g + 4], fake_quantize(part, 4))
    assert quantize(x, 8, group=10).scale.shape == (3, 1) and quantize(x, 8, group=99).scale.shape == (3, 1)
    assert q.bits_per_value == 4 + 9 * 32 / 30


MUTANTS = {
    "wrong axis": lambda x, q: quantize(x, 8, 1 - q.axis),
    "clip at -128": lambda x, q: _changed(q, values=torch.round(x / (q.scale * 127 / 128)).clamp(-128, 127).to(torch.int8)),
    "zero point of unsigned": lambda x, q: _changed(quantize(x, 8, 0, signed=False), zero=torch.zeros_like(q.zero)),
    "another scale": lambda x, q: _changed(q, scale=q.scale.roll(1, 0)),
    "truncated": lambda x, q: _changed(q, values=(x / q.scale).to(torch.int8)),
}


def _changed(q, **change):
    return Quantized(**({name: getattr(q, name) for name in Quantized.__dataclass_fields__} | change))


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_twins_are_caught(name):
    x = sample(6, 40) * torch.logspace(0, 2, 6).unsqueeze(1)
    q = quantize(x, 8, 0)
    assert largest_excess(x, q) <= 1
    wrong = MUTANTS[name](x, q)
    channels = (x.abs() * (dequantize(wrong) - x).abs()).sum() > 0
    off = (dequantize(wrong) - x).abs() / (q.scale / 2)
    assert channels and float(off.max()) > 1.5


def test_shares_of_zero_and_bits():
    x = torch.tensor([[0.001, 0.0, 1.0, -1.0, 0.002]])
    assert zero_share(x, quantize(x, 8)) == 0.5 and zero_share(x[:0], quantize(x[:0], 8)) == 0
    assert zero_share(x, quantize(x, 8, signed=False)) == 0.5
    assert quantize(sample(64, 64), 8, 0).bits_per_value == 8 + 32 / 64
