"""Lab 8, how `smooth` and `pack4` are judged.

s must be that of the formula, and the error of an int8 product with an outlier channel must fall as far as the formula lets it.
Packed weights are unpacked here, by this class's layout; every one must be the nearest under the scale as it is stored, what was
stored is counted in bytes, and the loss of a classifier tells whether it matters.

    s_j = max|x_j|^a / max|W_j|^(1 - a)        bits a weight = 4 + 16 / group

Reference: Xiao et al. 2023 (arXiv:2211.10438), equation 4; Frantar et al. 2022 (arXiv:2210.17323).
"""

import torch
from torch.nn import functional

from .expect import close, draw, expect, own_products, tensor
from .lab_quantize_values import SINGLE, nearest, pair, ran, range_of, scales_of
from .problem import Session

__all__ = ["dead", "pack_bits", "pack_form", "pack_loss", "pack_values", "smooth_error", "smooth_values"]

POWER = 4e-6  # a power in float32, relatively: its logarithm is rounded first


def _exact_s(xmax, w, a):
    """s of xmax (k,) and w (n, k), in float64."""
    wmax = w.double().abs().amax(0)
    return torch.where((xmax > 0) & (wmax > 0), xmax.double() ** a / wmax ** (1 - a), 1.0)


def _smoothed(s: Session, *cases):
    """For each case (xmax, w (n, k), a): (where, s, what is right)."""
    given = [(xmax, w if s.twist["layout"] == "out, in" else w.T.contiguous(), a) for xmax, w, a in cases]
    for (xmax, w, a), (value, seen, sizes) in zip(cases, ran(s, *given), strict=True):
        own_products(seen, sizes)
        where = f"k={w.shape[1]}, n={w.shape[0]}, a={a}"
        yield where, tensor(value, xmax.shape, torch.float32, where), _exact_s(xmax, w, a)


def smooth_values(s: Session):
    sizes = ((5, 7, 0.5), (6, 6, round(s.dice.uniform(0.2, 0.8), 2)), (3, 4, 1.0), (4, 1, 0.0))
    cases = [((draw(s, k).abs() * 10 + 0.01).float(), draw(s, n, k).float(), a) for n, k, a in sizes]
    for where, value, exact in _smoothed(s, *cases):
        close(value, exact, POWER * exact, where, "which power goes with which of the two?")


def dead(s: Session):
    xmax, w = (draw(s, 6).abs() + 0.1).float(), draw(s, 4, 6).float()
    k = s.dice.randrange(5)
    xmax[k], w[:, k + 1] = 0, 0
    for where, value, exact in _smoothed(s, *((xmax, w, a) for a in (0.5, 0.0, 1.0))):
        close(value, exact, POWER * exact, f"{where}, a channel without x and one without w")


def _int8_error(s: Session, x, w, by):
    """The relative error of the int8 product of x / by and w by, a scale for x and one for each output."""
    x8, w8 = x / by, w * by
    y = nearest(s, x8, scales_of(s, x8, 8, None), 8) @ nearest(s, w8, scales_of(s, w8, 8, 0), 8).T
    return float((y - x @ w.T).norm() / (x @ w.T).norm())


def smooth_error(s: Session):
    x, w = draw(s, 24, 16), draw(s, 12, 16).float()
    x[:, s.dice.randrange(16)] *= 80
    xmax = x.abs().amax(0).float()
    ((_, found, right),) = _smoothed(s, (xmax, w, 0.5))
    expect(bool((found.isfinite() & (found > 0)).all()), "s has numbers that are not above 0")
    before, after = _int8_error(s, x, w.double(), torch.ones(16)), _int8_error(s, x, w.double(), found.double())
    best = _int8_error(s, x, w.double(), right)
    said = f"error of the int8 product {before:.1%} before, {after:.1%} after"
    expect(after <= 1.01 * best, said, "one channel is 80 times as large: is it still?")
    return said


# --- pack4 --------------------------------------------------------------------------------------------------------------
PACKED = ((3, 8, 4), (4, 7, 4), (2, 10, 4), (40, 64, 32), (1, 5, 8))


def _group_of(s: Session, k, group):
    """(k,): the number of each column's group."""
    return (torch.arange(k) + (-k % group if s.twist["short"] == "first" else 0)) // group


def _packed(s: Session):
    """For each case (where, w, group, data, scale), in the right form."""
    if "packed" not in s.remembered:
        ws = [draw(s, n, k).float() for n, k, _ in PACKED]
        for w, (n, _, group) in zip(ws, PACKED, strict=True):
            w[0, : group * (n > 1)] = 0  # a group without any weight
        values = ran(s, *((w, group) for w, (_, _, group) in zip(ws, PACKED, strict=True)))
        s.remembered["packed"] = [(w, group, value) for w, (_, _, group), (value, _, _) in zip(ws, PACKED, values, strict=True)]
    for w, group, value in s.remembered["packed"]:
        yield _read(w, group, value)


def _read(w, group, value):
    """(where, w, group, data, scale), if it can be read."""
    n, k = w.shape
    where = f"w ({n}, {k}), group {group}"
    data, scale = pair(value, where)
    data = tensor(data, (n, (k + 1) // 2), torch.uint8, f"{where}: data")
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what it costs, another check says
    return where, w, group, data, tensor(scale, (n, -(-k // group)), kinds, f"{where}: scale")


def _halves(s: Session, data, k):
    """(n, k): q of each column."""
    low, high = data & 15, data >> 4
    first, second = (low, high) if s.twist["low"] == "even" else (high, low)
    return torch.stack([first, second], -1).flatten(1)[:, :k].to(torch.int32) - 8


def pack_form(s: Session):
    for where, w, _, data, scale in _packed(s):
        least = int(_halves(s, data, w.shape[1]).min())
        expect(least >= range_of(s, 4)[0], f"{where}: q goes down to {least}", "which whole numbers has this class?")
        expect(bool((scale.isfinite() & (scale > 0)).all()), f"{where}: a scale is not above 0")


def _largest(s: Session, w, group):
    """(n, groups): the largest |w| of each group, float64."""
    of = _group_of(s, w.shape[1], group)
    return torch.stack([w.double()[:, of == g].abs().amax(1) for g in range(int(of.max()) + 1)], 1)


def pack_values(s: Session):
    for where, w, group, data, scale in _packed(s):
        low, high, h = range_of(s, 4)
        largest = _largest(s, w, group)
        exact = torch.where(largest > 0, largest / h, 1.0)
        close(scale, exact, 1.01 * 2.0**-8 * exact, f"{where}: scale", "which columns share this one?")
        of = scale.double()[:, _group_of(s, w.shape[1], group)]
        steps = (w.double() / of).clamp(low, high)
        hint = "which half holds which column, and with which scale was it rounded?"
        close(_halves(s, data, w.shape[1]), steps, 0.5 + 4 * SINGLE * h, f"{where}: q", hint)


def pack_bits(s: Session):
    for where, w, group, data, scale in _packed(s):
        n, k = w.shape
        bits, wanted = (8 * (data.nbytes + b) / w.numel() for b in (scale.nbytes, 2 * n * -(-k // group)))
        expect(bits <= wanted, f"{where}: {bits:.2f} bits a weight, target {wanted:.2f}", "how many bits is a scale?")
        if group == 32:
            said = f"{bits:.2f} bits a weight, scales included, in groups of 32"
    return said


def pack_loss(s: Session):
    """A classifier of 10 classes by 64 features, its weights packed."""
    w, x = draw(s, 10, 64), draw(s, 300, 64)
    y = (x @ w.T + 2 * draw(s, 300, 10)).argmax(1)
    group = 16
    where, _, _, data, scale = _read(w.float(), group, ran(s, (w.float(), group))[0][0])
    of = _group_of(s, 64, group)
    back = _halves(s, data, 64) * scale.double()[:, of]
    ours = (_largest(s, w.float(), group) / range_of(s, 4)[2]).bfloat16().double()[:, of]
    losses = [float(functional.cross_entropy(x @ v.T / 2, y)) for v in (w, back, nearest(s, w.float(), ours, 4))]
    said = f"{where}: loss {losses[0]:.4f} with floats, {losses[1]:.4f} with 4 bits"
    expect(losses[1] <= losses[2] * 1.001, said, "unpack it by hand: which weights are far off?")
    return said
