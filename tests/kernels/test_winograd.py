"""Winograd's convolution: matrices exact in fractions, results within their bound of float64, multiplications as counted."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import cook_toom as cook_toom_file
from fourwalls.kernels import winograd
from fourwalls.kernels.cook_toom import POINTS, cook_toom
from fourwalls.kernels.traffic import traffic
from fourwalls.kernels.winograd import TILES, count, direct_conv2d, error_bound, transform_weights, winograd_conv2d
from fourwalls.numerics.rounding import round_to

from .judge import planted

torch.set_num_threads(1)

# (b, c, k, height, width, padding): tiles that fill and that hang over, one channel, thin images, no batch, unequal padding
SHAPES = (
    (2, 3, 4, 8, 12, 1),
    (1, 1, 1, 3, 3, 0),
    (3, 5, 2, 9, 7, 0),
    (1, 4, 3, 1, 13, (1, 0)),
    (2, 2, 5, 6, 5, (0, 2)),
    (0, 3, 2, 5, 5, 1),
)


def inputs(b, c, k, height, width, dtype=torch.float64):
    dice = torch.Generator().manual_seed(b + 10 * c + 100 * k + height)
    x = torch.randn(b, c, height, width, generator=dice, dtype=torch.float64)
    return x.to(dtype), torch.randn(k, c, 3, 3, generator=dice, dtype=torch.float64).to(dtype)


def outside(y, x, weight, *, tile, padding, stored=None):
    """How many outputs lie further from float64's direct convolution than the bound; all, where the shape is wrong."""
    exact = F.conv2d(x.double(), weight.double(), padding=padding)
    if y.shape != exact.shape:
        return max(1, exact.numel())
    bound = error_bound(x, weight, tile=tile, padding=padding, stored=stored)
    if x.dtype == torch.float64:  # then the oracle rounds, too
        terms = 9 * x.shape[1] * torch.finfo(torch.float64).eps
        bound = bound + terms * F.conv2d(x.abs(), weight.abs(), padding=padding)
    return int((~((y.double() - exact).abs() <= bound)).sum())


# --- the matrices -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "r"), [(1, 1), (1, 3), (2, 3), (3, 2), (4, 3), (2, 5), (6, 3), (5, 5)])
def test_matrices_give_the_filter_for_all_numbers(m, r):
    t = cook_toom(m, r)
    assert t.n == m + r - 1 and t.exact
    d, g = [Fraction(7 * j % 5 - 2, 3) for j in range(t.n)], [Fraction(2 * k + 1, 7) for k in range(r)]
    products = [
        sum(a * b for a, b in zip(f, g, strict=True)) * sum(a * b for a, b in zip(i, d, strict=True))
        for f, i in zip(t.filter, t.input, strict=True)
    ]
    got = [sum(a * b for a, b in zip(row, products, strict=True)) for row in t.output]
    assert got == [sum(g[k] * d[i + k] for k in range(r)) for i in range(m)]  # not a digit off


def test_the_smallest_is_winograds_own():
    t = cook_toom(2, 3)
    assert t.input == ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1))
    half = Fraction(1, 2)
    assert t.filter == ((1, 0, 0), (half, half, half), (half, -half, half), (0, 0, 1))
    assert t.output == ((1, 1, 1, 0), (0, 1, -1, 1))
    assert cook_toom(4).input[0] == (4, 0, -5, 0, 1, 0) and cook_toom(4).filter[1] == (Fraction(1, 6),) * 3
    assert (t.tile_steps("input"), t.tile_steps("output")) == (32, 24)  # Lavin and Gray, section 4.1


def test_other_points_are_as_exact_and_bad_ones_are_refused():
    assert cook_toom(2, 3, points=(0, 3, "-1/5")).exact
    with pytest.raises(ValueError, match="needs 3 different ones"):
        cook_toom(2, 3, points=(0, 1, 1))
    with pytest.raises(ValueError, match="needs 3 different ones"):
        cook_toom(2, 3, points=(0, 1))
    with pytest.raises(ValueError, match=rf"needs 10 points, POINTS has {len(POINTS)}; give points=, or m=8"):
        cook_toom(9, 3)
    for m, r in ((0, 3), (2, 0), (2.0, 3), (True, 3)):
        with pytest.raises(ValueError, match="whole numbers of at least 1"):
            cook_toom(m, r)


@pytest.mark.parametrize("name", ["output", "filter", "input"])
def test_one_wrong_entry_is_not_exact(name):
    t = cook_toom(4)
    rows = [list(row) for row in getattr(t, name)]
    rows[1][2] += Fraction(1, 10**9)
    assert t.exact and not replace(t, **{name: tuple(map(tuple, rows))}).exact


# --- the convolution --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_output_is_within_its_bound(shape, tile):
    *sizes, padding = shape
    for dtype in (torch.float64, torch.float32):
        x, weight = inputs(*sizes, dtype)
        bias = torch.arange(len(weight), dtype=dtype)
        y = winograd_conv2d(x, weight, tile=tile, padding=padding)
        assert y.dtype == dtype and outside(y, x, weight, tile=tile, padding=padding) == 0
        assert torch.equal(winograd_conv2d(x, weight, bias, tile=tile, padding=padding), y + bias[:, None, None])


def test_strided_inputs_and_whole_numbers():
    x, weight = inputs(2, 3, 4, 9, 8, torch.float32)
    odd = x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert not odd.is_contiguous() and torch.equal(winograd_conv2d(odd, weight), winograd_conv2d(x, weight))
    x, weight = x.round(), (weight * 2).round() * 4  # halves of fours, and nothing is rounded
    assert torch.equal(winograd_conv2d(x, weight, padding=1), F.conv2d(x, weight, padding=1))


def test_the_bound_bites():
    x, weight = inputs(2, 3, 4, 8, 12, torch.float32)
    for stored in (None, "fp16"):
        y = winograd_conv2d(x, weight, tile=4, padding=1, stored=stored).double()
        assert outside(y, x, weight, tile=4, padding=1, stored=stored) == 0
        exact = F.conv2d(x.double(), weight.double(), padding=1)
        y[1, 2, 3, 4] = exact[1, 2, 3, 4] + 10 * error_bound(x, weight, tile=4, padding=1, stored=stored)[1, 2, 3, 4]
        assert outside(y, x, weight, tile=4, padding=1, stored=stored) == 1


@pytest.mark.parametrize("tile", TILES)
def test_gradients_are_those_of_direct_convolution(tile):
    x, weight = (v.requires_grad_() for v in inputs(2, 3, 4, 7, 5))
    bias = torch.ones(4, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 4, 7, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = torch.autograd.grad((winograd_conv2d(x, weight, bias, tile=tile, padding=1) * up).sum(), (x, weight, bias))
    want = torch.autograd.grad((F.conv2d(x, weight, bias, padding=1) * up).sum(), (x, weight, bias))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_what_is_stored_is_rounded_and_nothing_else():
    x, weight = inputs(2, 8, 4, 12, 12, torch.float32)
    errors = {}
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    for tile in (0, *TILES):
        for stored in (None, "fp16"):
            options = {"padding": 1, "stored": stored}
            y = winograd_conv2d(x, weight, tile=tile, **options) if tile else direct_conv2d(x, weight, **options)
            errors[tile, stored] = float((y.double() - exact).norm() / exact.norm())
            assert stored is None or torch.equal(y, round_to(y, stored))
            assert not tile or outside(y, x, weight, tile=tile, padding=1, stored=stored) == 0
    for stored in (None, "fp16"):
        assert errors[2, stored] < errors[4, stored] < errors[6, stored]
    assert errors[0, "fp16"] < errors[2, "fp16"] and errors[2, "fp16"] > 100 * errors[2, None]
    bias = torch.full((4,), 0.1)
    rounded = winograd_conv2d(x, weight, bias, padding=1, stored="bf16")
    assert torch.equal(rounded, round_to(rounded, "bf16"))


def test_weights_can_be_transformed_once():
    x, weight = inputs(1, 3, 4, 8, 8, torch.float32)
    u = transform_weights(weight, tile=4)
    assert u.shape == (36, 4, 3)
    assert torch.equal(winograd.winograd_transformed(x, u, tile=4, padding=1), winograd_conv2d(x, weight, tile=4, padding=1))


# --- counts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tile", "fewer"), [(2, Fraction(9, 4)), (4, Fraction(4)), (6, Fraction(81, 16))])
def test_exactly_so_many_fewer_multiplications_where_tiles_fill(tile, fewer):
    for b, c, k in ((1, 1, 1), (2, 3, 5)):
        found = count(b, c, k, 3 * tile, 2 * tile, tile=tile, padding=1)
        assert found.fewer == fewer and found.waste == 0
    over = count(1, 1, 1, 3 * tile + 1, 2 * tile, tile=tile, padding=1)
    assert over.fewer < fewer and over.waste == 1 - Fraction(3 * tile + 1, 4 * tile)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_multiplications_are_those_that_run(shape, monkeypatch):
    """All products are in one batched product; transforms are additions and scalings of whole tensors."""
    made, real = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: made.append(a.numel() * b.shape[2]) or real(a, b))
    *sizes, padding = shape
    x, weight = inputs(*sizes)
    for tile in TILES:
        b, c, k, height, width = sizes
        found = count(b, c, k, height, width, tile=tile, padding=padding)
        names = {row.name for row in traffic(winograd_conv2d, x, weight, tile=tile, padding=padding).rows}
        assert names <= {"constant_pad_nd", "mul", "add", "stack", "cat", "bmm", "clone"}, names
        y = F.conv2d(x, weight, padding=padding)
        assert made.pop() == found.winograd and made == [] and found.direct == 9 * c * y.numel()
        assert found.wanted == y.numel() // k


def test_few_channels_lose():
    """The transforms are shared by all filters and all channels; with one of each they are more than what is saved."""
    one, many = (count(1, c, c, 32, 32, tile=2, padding=1) for c in (1, 64))
    assert one.transforms == 256 * (32 + 24) and one.weights > 0
    assert one.fewer_steps < 1 < many.fewer_steps < 2.25


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stride": 2}, "stride=2: Winograd's tiles need stride=1; for others use torch.nn.functional.conv2d"),
        ({"stride": (1, 2)}, r"stride=\(1, 2\)"),
        ({"dilation": 2}, "need dilation=1"),
        ({"groups": 3}, "need groups=1"),
        ({"weight": torch.ones(4, 3, 5, 5)}, r"3x3 filters, \(k, c, 3, 3\)"),
        ({"weight": torch.ones(4, 3, 3, 1)}, r"3x3 filters"),
        ({"weight": torch.ones(4, 2, 3, 3)}, r"it is \(b, 2, height, width\)"),
        ({"weight": torch.ones(4, 3, 3, 3).double()}, "one float dtype"),
        ({"x": torch.ones(1, 3, 8, 8, dtype=torch.int64)}, "one float dtype"),
        ({"x": torch.ones(3, 8, 8)}, r"it is \(b, 3, height, width\)"),
        ({"x": torch.ones(1, 3, 2, 8)}, "smaller than the 3x3 filter; padding=1 makes it fit"),
        ({"bias": torch.ones(3)}, r"one number a filter: \(4,\)"),
        ({"padding": -1}, "a whole number of at least 0"),
        ({"padding": (1, 1, 1)}, "one for each of height and width"),
        ({"tile": 3}, "a side of 2, 4, 6"),
        ({"stored": "fp61"}, "no format 'fp61'"),
        ({"stored": "int8"}, "kept in a float format"),
        ({"weight": torch.ones(4, 3, 3, 3, requires_grad=True), "stored": "fp16"}, "no gradient"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_bad_input_is_refused_with_what_is_legal(change, words):
    given = {"x": torch.ones(1, 3, 8, 8), "weight": torch.ones(4, 3, 3, 3)} | change
    with pytest.raises(ValueError, match=words):
        winograd_conv2d(given.pop("x"), given.pop("weight"), given.pop("bias", None), **given)


def test_an_image_that_is_too_small_has_no_count():
    with pytest.raises(ValueError, match="has no output"):
        count(1, 1, 1, 2, 8)


# --- mutants ----------------------------------------------------------------------------------------------------------
def wrong_outputs(module):
    """Outputs outside the bound on shapes whose tiles fill, and that hang over."""
    wrong = 0
    for shape in (SHAPES[0], SHAPES[2]):
        *sizes, padding = shape
        x, weight = inputs(*sizes)
        for tile in (2, 4):
            y = module.winograd_conv2d(x, weight, tile=tile, padding=padding)
            wrong += outside(y, x, weight, tile=tile, padding=padding)
    return wrong


FLIP = "t = cook_toom(tile, TAPS)\n    return replace(t, {0}=(tuple(-c for c in t.{0}[0]), *t.{0}[1:]))"
FAULTS = {
    "a sign in the input's transform": ("return cook_toom(tile, TAPS)", FLIP.format("input")),
    "a sign in the output's transform": ("return cook_toom(tile, TAPS)", FLIP.format("output")),
    "a scaling by -1 left out": ("if scale == 1", "if abs(scale) == 1"),
    "tiles begin one place late": ("(pw, right, ph, below)", "(pw + 1, right - 1, ph, below)"),
    "overlap off by one": (
        "part[..., j : j + m * across : m]",
        "part[..., min(j + 1, n - 1) : min(j + 1, n - 1) + m * across : m]",
    ),
    "a tile turned on its side": (".permute(3, 2, 4, 0, 5, 1)", ".permute(3, 2, 4, 1, 5, 0)"),
    "cut at the wrong edge": ("[..., : wanted[0], : wanted[1]]", "[..., -wanted[0] :, -wanted[1] :]"),
    "filters turned on their side": ("lambda i: weight[:, :, i], lambda", "lambda i: weight[..., i], lambda"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    assert wrong_outputs(winograd) == 0
    old, new = FAULTS[name]
    assert wrong_outputs(planted(winograd, old, new, replace=replace)) > 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sign * c for c", "c for c"),
        ("a - root * b", "a + root * b"),
        ("point**t / abs(scale)", "point**t"),
        ("k == m - 1", "k == 0"),
    ],
)
def test_a_fault_in_the_derivation_is_no_exact_filter(old, new):
    with pytest.raises(AssertionError):
        planted(cook_toom_file, old, new).cook_toom(4)
