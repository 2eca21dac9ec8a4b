"""Tiled attention: output and gradients are float64's, its peak is a straight line in s, and its classic faults are caught."""

import math

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import attention as file
from fourwalls.kernels import tile as tile_file
from fourwalls.kernels.attention import bytes_per_token, peak_bytes, plain_attention, tiled_attention
from fourwalls.memory.ledger import Ledger

from .judge import numbers, planted, spoiled, unit, wrong

torch.set_num_threads(1)
NAMES = ("output", "dq", "dk", "dv")
# batch, query heads, key heads, queries, keys, width, tile, causal: pairs of sizes that divide and that do not
CASES = (
    (2, 4, 2, 13, 13, 5, 4, True), (1, 2, 2, 16, 16, 8, 4, True), (2, 3, 1, 9, 17, 3, 5, False), (1, 1, 1, 1, 1, 1, 128, True),
    (1, 2, 1, 7, 7, 4, 1, True), (2, 2, 2, 12, 8, 4, 4, False), (1, 4, 4, 6, 6, 16, 100, True), (1, 1, 1, 5, 1, 2, 2, False),
)  # fmt: skip


def given(case, dtype=torch.float64, scale=2.0):
    b, a, kv, s, n, d, _, _ = case
    shapes = (b, a, s, d), (b, kv, n, d), (b, kv, n, d), (b, a, s, d)
    return tuple(numbers(*shape, seed=i, dtype=dtype, scale=scale) for i, shape in enumerate(shapes))


def gradients(fn, q, k, v, up):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = fn(*leaves)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, up)), strict=True))


def exactly(q, k, v, up, causal):
    def oracle(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return gradients(oracle, *(x.double() for x in (q, k, v, up)))


def bounds(q, k, v, up, causal, dtype):
    """Of each element, from the sizes of what is added up for it: a product of n numbers is off by n u times their sum.

    An error of a score is a relative error of its weight; the running maximum and the rescaling add some roundings a key.
    """
    q, k, v, up = (x.double() for x in (q, k, v, up))
    group, d, u = q.shape[1] // k.shape[1], q.shape[3], unit(dtype)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s, n = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(torch.ones(s, n).triu(1).bool(), -math.inf)
    weights = torch.softmax(scores, -1)
    sizes = q.abs() @ k.abs().transpose(-2, -1) / math.sqrt(d)
    relative = 2 * u * ((d + 8) * sizes.amax(-1, keepdim=True) + n + 8)
    of_weights = relative * weights
    output = of_weights @ v.abs() + (n + 4) * u * (weights @ v.abs())
    down = up.abs() @ v.abs().transpose(-2, -1)
    delta = (up.abs() * (weights @ v.abs())).sum(-1, keepdim=True)
    size = weights * (down + delta)  # of the scores' gradient
    of_scores = (2 * relative + (2 * d + n + 8) * u) * size
    dq = (of_scores + (n + 4) * u * size) @ k.abs() / math.sqrt(d)
    dk = (of_scores + (s + 4) * u * size).transpose(-2, -1) @ q.abs() / math.sqrt(d)
    dv = (of_weights + (s + 4) * u * weights).transpose(-2, -1) @ up.abs()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dict(zip(NAMES, (output, dq, dk, dv), strict=True))


def faults(fn, case, dtype=torch.float64):
    """Which of output, dq, dk, dv are wrong."""
    tensors = given(case, dtype)
    got, exact, most = gradients(fn, *tensors), exactly(*tensors, case[-1]), bounds(*tensors, case[-1], dtype)
    return [name for name in NAMES if wrong(got[name], exact[name], most[name])]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_float64s_within_the_bound(case, dtype):
    assert faults(lambda q, k, v: tiled_attention(q, k, v, tile=case[6], causal=case[7]), case, dtype) == []
    assert faults(lambda q, k, v: plain_attention(q, k, v, causal=case[7]), case, dtype) == []
    tensors = given(case, dtype)
    exact, most = exactly(*tensors, case[-1]), bounds(*tensors, case[-1], dtype)
    assert all(wrong(spoiled(exact[name], most[name]), exact[name], most[name]) == 1 for name in NAMES)


@pytest.mark.parametrize(
    ("backward", "causal", "dtype"),
    ((False, True, torch.float32), (True, True, torch.float64), (True, False, torch.float32), (False, False, torch.float64)),
)
def test_the_peak_is_a_straight_line_in_s(backward, causal, dtype):
    heads, kv, d, tile = 4, 2, 8, 16
    slope = bytes_per_token(d, heads=heads, kv_heads=kv, batch=2, itemsize=dtype.itemsize, backward=backward)

    def rest(s):
        tensors = (torch.zeros(2, a, s, d, dtype=dtype) for a in (heads, kv, kv))
        return peak_bytes(lambda *x: tiled_attention(*x, causal=causal, tile=tile), *tensors, backward=backward) - slope * s

    constants = [rest(s) for s in (32, 64, 128)]
    assert len(set(constants)) == 1  # exactly linear
    assert 0 < constants[0] < 12 * 2 * heads * tile * max(tile, d) * dtype.itemsize  # some tiles of scores or of queries


def test_the_peak_of_plain_attention_is_a_parabola():
    heads, d = 2, 8

    def peak(s, **options):
        return peak_bytes(plain_attention, *(torch.zeros(1, heads, s, d) for _ in range(3)), **options)

    s = 16
    for backward, matrices in ((False, 2), (True, 3)):
        at = [peak(j * s, backward=backward) for j in (1, 2, 3, 4)]
        first = [b - a for a, b in zip(at, at[1:], strict=False)]
        second = [b - a for a, b in zip(first, first[1:], strict=False)]
        assert second[0] == second[1]  # exactly quadratic
        assert second[0] / (2 * s * s) >= matrices * heads * 4  # bytes for each pair of tokens: so many matrices of scores
    tensors = [torch.zeros(1, heads, 512, d) for _ in range(3)]
    assert peak(512) > 10 * peak_bytes(lambda *x: tiled_attention(*x, tile=64), *tensors)


def test_the_peak_is_the_ledgers():
    tensors = [torch.randn(1, 2, 12, 4) for _ in range(3)]
    for fn in (plain_attention, lambda *x: tiled_attention(*x, tile=4)):
        with Ledger(inputs=tensors) as ledger, torch.no_grad():
            fn(*tensors)
        assert peak_bytes(fn, *tensors) == ledger.peak


def test_backward_keeps_inputs_output_and_one_number_a_query():
    q, k, v = (torch.randn(2, 3, 32, 4).requires_grad_() for _ in range(3))
    with Ledger(inputs=(q, k, v), lines=False) as ledger:
        out = tiled_attention(q, k, v, tile=8)
        ledger.phase("backward")
        saved = ledger.saved_tensors()
        out.sum().backward()
    assert sum(x.storage.bytes for x in saved if x.storage.category != "inputs") == 4 * 2 * 3 * 32 * (4 + 1)


def test_odd_inputs():
    q, k, v = given((1, 1, 1, 9, 9, 4, 4, True))[:3]
    late = k.clone()
    late[:, :, 6] = math.nan  # queries 0 to 5 never see it
    out = tiled_attention(q, late, v, tile=4)
    assert torch.equal(out[:, :, :4], tiled_attention(q, k, v, tile=4)[:, :, :4]) and out[:, :, 6:].isnan().all()
    for fill in (0.0, 1e-310, 1e3):  # constant: each query takes the mean of the values it sees
        same = tiled_attention(torch.full_like(q, fill), torch.full_like(k, fill), v, tile=4)
        mean = v.cumsum(2) / torch.arange(1, 10)[:, None]
        assert torch.allclose(same, mean, rtol=1e-12)
    far = tiled_attention(q * 1e6, k, v, tile=4)  # one key takes all
    assert not far.isnan().any() and wrong(far, exactly(q * 1e6, k, v, v, True)["output"], 1e-6) == 0
    away = k.clone()
    away[:, :, 4:] = -math.inf
    assert not tiled_attention(q.abs(), away, v, tile=4)[:, :, :4].isnan().any()
    for s, n, causal in ((0, 0, True), (0, 5, False), (5, 0, False)):
        given_ = torch.ones(1, 2, s, 3), torch.ones(1, 2, n, 3), torch.ones(1, 2, n, 3)
        assert gradients(lambda *x, c=causal: tiled_attention(*x, causal=c), *given_, given_[0])["output"].eq(0).all()
    assert tiled_attention(q[..., :2, :].expand(1, 1, 2, 4), k[..., :2, :], v[..., :2, :].transpose(0, 1)).shape == (1, 1, 2, 4)


def test_wrong_asks_are_refused():
    q, k = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 6, 8)
    for call, words in (
        (lambda: tiled_attention(q, k[:, :, :5], k[:, :, :5]), "6 queries and 5 keys; causal"),
        (lambda: tiled_attention(q, k, k[..., :4]), "where kv divides a"),
        (lambda: tiled_attention(q, k[:, :0], k[:, :0]), "where kv divides a"),
        (lambda: tiled_attention(q[:, :3], k, k), "where kv divides a"),
        (lambda: tiled_attention(q[0], k, k), "where kv divides a"),
        (lambda: tiled_attention(q, k.double(), k), "one floating dtype"),
        (lambda: plain_attention(q.long(), k.long(), k.long()), "one floating dtype"),
        (lambda: tiled_attention(q, k, k, tile=0), "tile is 0"),
        (lambda: bytes_per_token(8, itemsize=2), "itemsize is 2"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def in_tile(old, new):
    changed = planted(tile_file, old, new)
    return planted(file, "__all__ = [", "__all__ = [", **{name: getattr(changed, name) for name in tile_file.__all__})


KEEP_OUT, KEEP_TOTAL = "self.out[..., rows, :] = self.out[..., rows, :] * shrink", "self.total[..., rows, :] * shrink"
SECOND = "                    scores = _scores(mine, k, rows, columns, causal, log_sum.dtype)"
FAULTS = {  # name: (what makes it, what is wrong, what stays right)
    "output not rescaled by the running maximum": (lambda: in_tile(KEEP_OUT, KEEP_OUT[:-9]), "output", ()),
    "sum not rescaled by the running maximum": (lambda: in_tile(KEEP_TOTAL, KEEP_TOTAL[:-9]), "output", ()),
    "log-sum of the first tile for all": (
        lambda: planted(file, "log_sum[..., rows, :], up, values", "log_sum[..., : up.shape[-2], :], up, values"),
        "dq", ("output",)),
    "delta of the first tile for all": (
        lambda: planted(file, "up, values, delta[..., rows, :])", "up, values, delta[..., : up.shape[-2], :])"),
        "dq", ("output", "dv")),
    "causal mask off by one tile": (
        lambda: planted(file, "columns.start < rows.stop", "columns.start < rows.start"), "output", ()),
    "mask off by one": (lambda: planted(file, "key[None] > query[:, None]", "key[None] >= query[:, None]"), "output", ()),
    "mask not applied in backward": (lambda: planted(file, SECOND, SECOND.replace("causal", "False")), "dq", ("output",)),
    "masked tiles skipped in backward too soon": (
        lambda: planted(file, "if _seen(rows, columns, causal):\n                    mine, up",
                        "if _seen(rows, columns, causal) and columns.start < rows.start:\n                    mine, up"),
        "dk", ("output",)),
    "delta forgotten": (lambda: in_tile("dweights.sub_(delta)", "dweights"), "dq", ("output", "dv")),
    "scale forgotten in backward": (lambda: planted(file, "dq.div_(math.sqrt(q.shape[-1]))", "dq"), "dq", ("output", "dk", "dv")),
    "gradients of keys of the last tile only": (lambda: planted(file, "of_keys += ", "of_keys = "), "dk", ("output", "dq", "dv")),
    "query heads ask the wrong key heads": (
        lambda: planted(file, "unflatten(1, (k.shape[1], -1))", "unflatten(1, (-1, k.shape[1])).transpose(1, 2)"),
        "output", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_name(name):
    make, spoils, right = FAULTS[name]
    case = (1, 4, 2, 12, 12, 5, 4, True)
    assert faults(lambda q, k, v: tiled_attention(q, k, v, tile=4), case) == []
    module = make()
    found = faults(lambda q, k, v: module.tiled_attention(q, k, v, tile=4), case)
    assert spoils in found and not set(right) & set(found), found
