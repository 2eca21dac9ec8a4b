"""Four observers on the same data: what each gives up, the definition each keeps, and what calibration refuses."""

import pytest
import torch

from fourwalls.numerics.grids import Grid
from fourwalls.numerics.observers import OBSERVERS, Observer, absmax, entropy, mse, percentile
from fourwalls.numerics.quantize import quantize, round_with

torch.set_num_threads(1)


def outlier():
    """Trial f11: N(0, 1) and one value of 100."""
    x = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(1))
    x[0, 77] = 100
    return x


def error_of_the_rest(x, ends):
    grid = Grid()
    scale, zero = grid.place(*ends)
    back = round_with(x, scale.unsqueeze(1), zero.unsqueeze(1), grid).dequantize()
    rest = x.abs() < 10
    return float((back - x)[rest].square().mean().sqrt())


def test_one_lone_value_ruins_absmax_and_not_the_others():
    x, grid = outlier(), Grid()
    errors = {name: error_of_the_rest(x, find(x, grid)) for name, find in OBSERVERS.items()}
    assert errors["absmax"] > 0.2  # 100 / 127 / sqrt(12)
    assert errors["percentile"] < errors["absmax"] / 10 and errors["entropy"] < errors["absmax"] / 3
    total = {name: float((quantize(x, observer=name).dequantize() - x).square().sum()) for name in OBSERVERS}
    assert total["mse"] == min(total.values()) and total["mse"] < total["absmax"]


def test_percentile_keeps_the_share_that_was_asked_for():
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(2))
    lo, hi = percentile(x, Grid(), share=0.99)
    assert ((x > hi.unsqueeze(1)) | (x < lo.unsqueeze(1))).sum(1).tolist() == [10, 10, 10]
    lo, hi = percentile(x, Grid(symmetric=False), share=0.99)
    assert ((x > hi.unsqueeze(1)).sum(1) == 5).all() and ((x < lo.unsqueeze(1)).sum(1) == 5).all()
    assert [e.tolist() for e in percentile(x, Grid(), share=1.0)] == [e.tolist() for e in absmax(x, Grid())]
    mostly_zero = torch.zeros(1, 10_000)
    mostly_zero[0, 3] = 4.0  # what is left would be all zero
    assert percentile(mostly_zero, Grid())[1] == 4


@pytest.mark.parametrize("symmetric", (True, False))
def test_mse_finds_the_least_of_its_candidates(symmetric):
    x, grid = torch.randn(1, 400, generator=torch.Generator().manual_seed(3)) + 0.5, Grid(3, symmetric=symmetric)

    def total(lo, hi):
        scale, zero = grid.place(lo, hi)
        return float((round_with(x, scale.unsqueeze(1), zero.unsqueeze(1), grid).dequantize() - x).square().sum())

    lo, hi = absmax(x, grid)
    best = min(total(lo * r / 100, hi * r / 100) for r in range(1, 101))
    found = total(*mse(x, grid))
    assert found == pytest.approx(best, rel=1e-5) and found < total(lo, hi)


def test_entropy_clips_long_tails_and_leaves_flat_data_alone():
    dice = torch.Generator().manual_seed(4)
    flat, peaked = torch.rand(1, 20_000, generator=dice), torch.randn(1, 20_000, generator=dice) ** 3
    assert entropy(flat, Grid())[1] > 0.9 * flat.max()
    assert entropy(peaked, Grid())[1] < 0.7 * peaked.max()
    assert entropy(torch.full((1, 5), 2.0), Grid())[1] == 2  # constant: nothing to clip


def test_an_observer_sees_what_all_batches_hold():
    parts = torch.randn(5, 40, 6, generator=torch.Generator().manual_seed(5))
    for name in OBSERVERS:
        for axis in (None, 1):
            observer = Observer(name, axis=axis)
            for part in parts:
                assert observer.watch(part) is part
            scale, zero = observer.place()
            whole = quantize(parts.flatten(0, 1), 8, axis, observer=name)
            assert torch.allclose(scale, whole.scale, rtol=1e-6) and torch.equal(zero, whole.zero)
    small = Observer(keep=10)
    small.watch(torch.arange(1000.0))
    small.watch(torch.tensor([-5.0, 7.0]))
    assert small.place()[0] == pytest.approx(999 / 127)  # the largest is never forgotten


def test_calibration_without_data_is_refused():
    for watched in ((), (torch.empty(0, 4),)):
        observer = Observer()
        for x in watched:
            observer.watch(x)
        with pytest.raises(ValueError, match="has seen no data"):
            observer.place()
    observer = Observer(axis=1)
    observer.watch(torch.ones(3, 4))
    with pytest.raises(ValueError, match="5 slices along axis 1, those before had 4"):
        observer.watch(torch.ones(3, 5))
