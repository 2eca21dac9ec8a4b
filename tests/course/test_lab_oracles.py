"""What labs 4, 7 and 8 are judged with: the probe counts right, comparisons see ten bounds, oracles equal other oracles."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from fourwalls.course import lab_precision, lab_precision_steps, lab_quantize, lab_recompute
from fourwalls.course.expect import Wrong, close, expect, judged, own_products, tensor
from fourwalls.course.probe import Probe, mark


def test_the_probe_counts_storages_from_birth_to_death_and_views_once():
    x = torch.ones(8, 8)
    with Probe() as seen:
        y = x @ x.T
        z = y.view(64)[:3]
        assert seen.live == 256
        w = y + 1
        assert seen.live == 512
        del y, z, w
        assert seen.live == 0 and seen.peak == 512
        seen.restart()
        assert seen.peak == 0


def test_the_probe_sees_products_their_dtypes_and_the_widest_float():
    a = torch.ones(2, 3, dtype=torch.int8)
    with Probe() as seen:
        mark((2, 3, 4))
        _ = a.int() @ a.int().T
        mark((2, 3, 4))
    report = seen.report()
    assert own_products(report, (2, 3, 4)) == [["aten::mm", "int32", [[2, 3], [3, 2]]]]
    assert report["widest float"] == 12 and report["names"]["aten::mm"] == 3
    with pytest.raises(Wrong, match="does not see"):
        own_products(report, (2, 3, 5))
    with pytest.raises(Wrong, match="does not see"):
        own_products(report | {"products": report["products"][:1]}, (2, 3, 4))


def test_a_comparison_fails_for_one_element_off_by_ten_bounds_for_nan_and_for_other_forms():
    exact = torch.ones(4, 5, dtype=torch.float64)
    for off in (1e-5, float("nan")):
        value = exact.clone()
        value[2, 3] += off
        with pytest.raises(Wrong, match=r"1 of 20 elements are wrong, the first at \(2, 3\)"):
            close(value, exact, 1e-6, "it")
    value = exact.clone()
    value[2, 3] += 1e-7
    close(value, exact, 1e-6, "it")
    for bad in (exact.float(), exact[:3], exact.to("meta"), 3.0, None, [1.0]):
        with pytest.raises(Wrong):
            tensor(bad, (4, 5), torch.float64, "it")


def test_what_a_replaced_driver_sends_fails_the_check_and_nothing_else():
    def reads(s):
        return s.told["value"]

    for told in (None, {}, 3, []):
        assert not judged("a", reads).run(SimpleNamespace(told=told)).passed
    assert judged("a", lambda s: expect(True, "no")).run(None).passed


@pytest.mark.parametrize(("dtype", "e", "m"), [(torch.float16, 5, 10), (torch.bfloat16, 8, 7), (torch.float8_e5m2, 5, 2)])
def test_the_list_of_numbers_rounds_as_torch_casts_bit_by_bit(dtype, e, m):
    s = SimpleNamespace(dice=random.Random(str(dtype)))
    x = torch.cat([lab_precision._inputs(s, which, e, m) for which in ("normal", "halfway", "subnormal", "ends")])
    right = x.to(dtype).float()
    found = lab_precision.nearest_number(x, e, m, "even", "infinity")
    same = (found.view(torch.int32) == right.view(torch.int32)) | (found.isnan() & right.isnan())
    assert bool(same.all()) and len(x) > 150


def test_ties_and_ends_of_the_other_class_differ():
    x = torch.tensor([1.0625, -1.0625, 1e9, 2.0**-10])  # halves of e4m3's distances, and beyond its end
    even, away = (lab_precision.nearest_number(x, 4, 3, ties, "largest") for ties in ("even", "away"))
    assert even.tolist() == [1.0, -1.0, 240.0, 0.0] and away.tolist() == [1.125, -1.125, 240.0, 2.0**-9]


def test_the_trajectory_of_the_scale_is_that_of_torchs_scaler():
    s = SimpleNamespace(dice=random.Random(2), twist={"norm": "2", "back": 2})
    days = lab_precision_steps._day(s, 1)
    used, scales = lab_precision_steps._right(s, days)
    p = torch.nn.Parameter(torch.zeros(10))
    own = torch.amp.GradScaler("cpu", init_scale=lab_precision_steps.SCALE, growth_interval=lab_precision_steps.INTERVAL)
    optimizer, found = torch.optim.SGD([p], lr=1.0), []
    own.scale(torch.zeros(1))
    for day in days:
        flat = torch.cat([g.flatten() for g in day[0] if g is not None])
        p.grad = (flat * own.get_scale()).half().float()
        own.step(optimizer)
        own.update()
        found.append(own.get_scale())
    assert found == scales and None in used and min(scales) < scales[0] < lab_precision_steps.SCALE * 4


def test_the_fewest_flops_are_those_of_all_plans():
    dice = random.Random(3)
    for counted in ("kept", "both"):
        s = SimpleNamespace(twist={"counted": counted})
        for _ in range(40):
            nbytes, flops = ([dice.randrange(1, 9) for _ in range(6)] for _ in range(2))
            budget = dice.randrange(0, sum(nbytes) + 2)
            plans = [p for p in itertools.product((False, True), repeat=6) if lab_recompute._cost(s, nbytes, p) <= budget]
            best = min((sum(f for f, gone in zip(flops, p, strict=True) if gone) for p in plans), default=None)
            assert lab_recompute.fewest(nbytes, flops, budget, counted) == best


@pytest.mark.parametrize("module", [lab_quantize, lab_precision, lab_recompute])
def test_classes_differ_and_the_plain_one_is_there(module):
    drawn = [module.twist(seed) for seed in range(30)]
    for name, plain in module.twist(None).items():
        assert {plain} < {d[name] for d in drawn}
    assert drawn[7] == module.twist(7) and all(module.problems(seed) for seed in (None, 1, 2))
