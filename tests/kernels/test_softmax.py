"""Softmax: every form equal to float64's within its bound, odd rows as torch has them, and planted faults caught."""

import math

import pytest
import torch

from fourwalls.kernels import softmax as softmax_file
from fourwalls.kernels.rows import BLOCK_BYTES, rows_that_fit
from fourwalls.kernels.softmax import running_max_and_sum, softmax_blocks, softmax_online, softmax_separate

from .judge import numbers, planted, softmax_bound, spoiled, wrong

torch.set_num_threads(1)
INF, NAN = math.inf, math.nan
FORMS = {
    "separate": softmax_separate,
    "blocks": softmax_blocks,
    "blocks of 1": lambda x: softmax_blocks(x, rows=1),
    "blocks of 3": lambda x: softmax_blocks(x, rows=3),
    "online": softmax_online,
    "online by 1": lambda x: softmax_online(x, columns=1),
    "online by 4": lambda x: softmax_online(x, columns=4),
}
DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_float64_within_the_bound(form, dtype):
    for shape, scale in (((7, 10), 1.0), ((2, 3, 33), 30.0), ((5,), 1.0), ((4, 1), 1.0), ((1, 300), 1e4)):
        x = numbers(*shape, dtype=dtype, scale=scale)
        exact = torch.softmax(x.double(), -1)
        bound = softmax_bound(x, exact)
        got = FORMS[form](x)
        assert got.dtype == dtype and wrong(got, exact, bound) == 0
        assert wrong(torch.softmax(x, -1), exact, bound) == 0  # torch's own, by the same measure
        assert wrong(spoiled(exact, bound), exact, bound) == 1


ROWS = {
    "zero": [0.0] * 6,
    "constant": [3.0] * 6,
    "denormal": [1e-45, 0, 2e-45, 1e-40, 0, -1e-42],
    "largest": [3e38, -3e38, 3e38, 0, 0, 0],
    "one infinity": [INF, 1, 2, 3, 4, 5],
    "two infinities": [0, INF, 2, 3, INF, 5],
    "-inf first": [-INF, -INF, -INF, -INF, 1, 2],
    "-inf last": [1, 2, -INF, -INF, -INF, -INF],
    "only -inf": [-INF] * 6,
    "inf after -inf": [-INF] * 5 + [INF],
    "nan": [0, 1, NAN, 3, 4, 5],
    "nan and -inf": [-INF, -INF, -INF, -INF, -INF, NAN],
}


@pytest.mark.parametrize("form", FORMS)
def test_odd_rows_are_as_torch_has_them_and_spoil_no_other(form):
    x = torch.tensor([*ROWS.values(), [0.5, 1, 2, 3, 4, 5]])
    want, got = torch.softmax(x, -1), FORMS[form](x)
    for name, w, g in zip((*ROWS, "plain"), want, got, strict=True):
        assert wrong(g, w.double(), 1e-6 * w.double().nan_to_num(0)) == 0, (name, g, w)
    assert got[[*ROWS].index("only -inf")].isnan().all() and got[[*ROWS].index("one infinity")].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_empty_and_strided_inputs(form):
    for shape in ((0, 5), (3, 0), (0,), (2, 0, 4)):
        assert FORMS[form](torch.empty(shape)).shape == shape
    x = numbers(9, 8, dtype=torch.float32)
    for view in (x.t(), x[:, ::2], x[:1].expand(4, 8)):
        exact = torch.softmax(view.double(), -1)
        assert wrong(FORMS[form](view), exact, softmax_bound(view, exact)) == 0


def test_results_go_where_they_are_asked_to():
    x = numbers(9, 8, dtype=torch.float32)
    want = torch.softmax(x, -1)
    for form in (softmax_blocks, softmax_online):
        place = torch.empty_like(x)
        assert form(x, out=place) is place and torch.allclose(place, want)
        over = x.clone()
        assert form(over, out=over) is over and torch.allclose(over, want)
        with pytest.raises(ValueError, match="allowed: a contiguous"):
            form(x, out=torch.empty(8, 9).t())


def test_running_sums_of_any_chunk_are_those_of_the_row():
    x = numbers(3, 4, 50, scale=20.0)
    for columns in (None, 1, 7, 50, 99):
        largest, total = running_max_and_sum(x, columns=columns)
        assert torch.equal(largest, x.amax(-1, keepdim=True))
        assert torch.allclose(total, (x - largest).exp().sum(-1, keepdim=True), rtol=1e-13, atol=0)
    largest, total = running_max_and_sum(torch.full((2, 3), -INF))
    assert largest.eq(-INF).all() and total.eq(0).all()
    assert running_max_and_sum(torch.empty(0, 3))[0].shape == (0, 1)


def test_blocks_fit_into_the_cache():
    assert rows_that_fit(1024, 4) * 1024 * 4 * 2 == BLOCK_BYTES
    assert rows_that_fit(10**9, 8) == 1 and rows_that_fit(0, 4) > 0


def test_wrong_asks_are_refused():
    x = torch.ones(3, 4)
    for call, words in (
        (lambda: softmax_separate(torch.ones(3, dtype=torch.int64)), "int64; allowed: a floating dtype"),
        (lambda: softmax_blocks(x, rows=0), "rows is 0; allowed"),
        (lambda: softmax_online(x, columns=2.0), "columns is 2.0; allowed"),
        (lambda: softmax_blocks(torch.tensor(1.0)), "no rows"),
        (lambda: softmax_blocks(x.requires_grad_()), "softmax_blocks has no backward"),
        (lambda: softmax_online(x.requires_grad_()), "use softmax_separate"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with torch.no_grad():
        assert torch.equal(softmax_blocks(x), torch.full((3, 4), 0.25))


FAULTS = {  # name: (old, new, the form that it spoils)
    "sum not rescaled by the running maximum": ("total * shrink + weights", "total + weights", "softmax_online"),
    "chunk's maximum in place of the running one": (
        "newest = torch.maximum(largest, part.amax(-1, keepdim=True))", "newest = part.amax(-1, keepdim=True)", "softmax_online"),
    "sum of the first chunk only": ("        largest = newest\n", "        largest = newest\n        break\n", "softmax_online"),
    "sum over the block and not the row": (
        "torch.sum(y, -1, keepdim=True, dtype=total.dtype, out=total)", "total.copy_(y.sum())", "softmax_blocks"),
    "maximum not taken away": ("torch.sub(x, largest, out=y)", "y.copy_(x)", "softmax_blocks"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    old, new, form = FAULTS[name]
    x = numbers(6, 40, scale=300.0, dtype=torch.float32)
    exact = torch.softmax(x.double(), -1)
    options = {"columns": 9} if form == "softmax_online" else {}
    bound = softmax_bound(x, exact)
    assert wrong(getattr(softmax_file, form)(x, **options), exact, bound) == 0
    assert wrong(getattr(planted(softmax_file, old, new), form)(x, **options), exact, bound) > 0
