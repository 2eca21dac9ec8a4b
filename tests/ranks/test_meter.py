"""The meter's counts against counts made by hand."""

import torch

from fourwalls.ranks.meter import Meter


def test_a_product_forward_and_backward():
    x, w = torch.ones(4, 8), torch.ones(8, 16, requires_grad=True)
    with Meter() as forward:
        y = x @ w
    assert forward.flops == 2 * 4 * 8 * 16
    assert forward.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    with Meter() as backward:
        y.backward(torch.ones_like(y))
    assert backward.flops >= 2 * 8 * 4 * 16  # dW = x^T dY; x needs no gradient
    assert backward.flops < 2 * 2 * 8 * 4 * 16


def test_views_are_free_and_copies_compute_nothing():
    x = torch.ones(10, 10)
    with Meter() as m:
        x.view(100)[5:].reshape(5, 19).t()
        torch.empty(1000)
    assert (m.flops, m.bytes, m.ops) == (0, 0, 0)
    with Meter() as m:
        x.clone()
    assert (m.flops, m.bytes) == (0, 800)


def test_the_same_tensor_twice_is_read_once():
    x = torch.ones(10)
    with Meter() as m:
        x * x
    assert (m.flops, m.bytes) == (10, 80)


def test_meta_tensors_count_as_real_ones_do():
    counts = []
    for device in ("cpu", "meta"):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)).to(
            device
        )
        with Meter() as m:
            layer(torch.ones(4, 8, device=device)).sum().backward()
        counts.append(m.flops)
    assert counts[0] == counts[1] > 0


def test_each_is_told_every_operator():
    seen = []
    with Meter(each=lambda flops, moved, dtype: seen.append((flops, moved, dtype))):
        torch.ones(2, dtype=torch.bfloat16) + 1
    assert seen == [(0, 4, torch.bfloat16), (2, 8, torch.bfloat16)]
