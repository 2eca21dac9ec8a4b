"""Lab 8, how `quantize` and `int8_linear` are judged.

Whatever scale comes back is first compared with the largest number that it must hold; then every integer must be the nearest one
under that very scale, in float64. Sums of whole numbers must be exact, beyond 2^24 too, where float32 has gaps. A probe in the
learner's process counts products by dtype.

    |clip(x / s) - q| <= 1/2        y = s_x s_w (sum over k of x_q w_q)

Reference: Jacob et al. 2018 (arXiv:1712.05877).
"""

import torch

from .expect import close, draw, expect, own_products, tensor
from .problem import Session

__all__ = [
    "SINGLE",
    "exact_sum",
    "form",
    "linear_cost",
    "linear_scales",
    "nearest",
    "pair",
    "quantize_cost",
    "ran",
    "range_of",
    "rounding",
    "scales_of",
    "zeros",
]

LIMIT = 4.0  # seconds of a run, of which a right one takes a hundredth
FLOATS = ("float64", "float32", "bfloat16", "float16")
SINGLE = 2.0**-24  # a rounding in float32, relatively


def ran(s: Session, *cases, more=0):
    """For each case, a tuple of inputs: (the function's value, what the probe saw, the sizes of its marks)."""
    sizes = [s.dice.randrange(2, 6) for _ in range(3)]
    found = []
    for inputs, told in zip(cases, s.run(sizes, [list(case) for case in cases], more, limit=LIMIT).values[0], strict=True):
        changed = [k for k, (a, b) in enumerate(zip(inputs, told["inputs"], strict=True)) if not _same(a, b)]
        expect(not changed, f"input {changed[0] + 1 if changed else 0} was changed", "work on a tensor of your own")
        found.append((told["value"], told["seen"], sizes))
    return found


def _same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def pair(value, what):
    expect(isinstance(value, (tuple, list)) and len(value) == 2, f"{what}: wanted are two tensors, (q, scale) or (data, scale)")
    return value


def range_of(s: Session, bits: int):
    """(lowest, highest integer, what the largest |x| is divided by)."""
    h = 2 ** (bits - 1)
    return (1 - h, h - 1, h - 1) if s.twist["range"] == "narrow" else (-h, h - 1, h)


def scales_of(s: Session, x, bits, axis):
    """The scales of x in float64, dims kept."""
    others = tuple(range(x.dim())) if axis is None else tuple(d for d in range(x.dim()) if d != axis % x.dim())
    largest = x.double().abs().amax(others, keepdim=True) if others else x.double().abs()
    return torch.where(largest > 0, largest / range_of(s, bits)[2], 1.0)


def nearest(s: Session, x, scale, bits):
    """There and back in float64."""
    low, high, _ = range_of(s, bits)
    return (x.double() / scale).round().clamp(low, high) * scale


# --- quantize -----------------------------------------------------------------------------------------------------------
CASES = (((4, 6), 8, 0), ((5, 5), 8, 1), ((7,), 4, None), ((3, 5, 7), 5, 1), ((2, 3, 4, 3), 3, -1), ((1, 9), 2, 0))


def _channels(s: Session, shape, axis):
    """x, whose channels differ in size, so that a wrong axis is seen."""
    x = draw(s, *shape)
    if axis is not None:
        sizes = [1] * len(shape)
        sizes[axis] = shape[axis]
        x = x * torch.logspace(-2, 2, shape[axis])[s.dice.sample(range(shape[axis]), shape[axis])].reshape(sizes)
    return x.float()


def _quantized(s: Session):
    """For each case (where, x, bits, axis, q, scale), in the right form."""
    if "quantized" not in s.remembered:
        xs = [_channels(s, shape, axis) for shape, _, axis in CASES]
        values = ran(s, *((x, bits, axis) for x, (_, bits, axis) in zip(xs, CASES, strict=True)))
        s.remembered["quantized"] = xs, [value for value, _, _ in values]
    for x, value, (shape, bits, axis) in zip(*s.remembered["quantized"], CASES, strict=True):
        where = f"x {shape}, {bits} bits, axis {axis}"
        q, scale = pair(value, where)
        q = tensor(q, shape, torch.int8, f"{where}: q")
        wanted = scales_of(s, x, bits, axis)
        if axis is not None and isinstance(scale, torch.Tensor) and scale.shape != wanted.shape:
            expect(False, f"{where}: the scale has shape {tuple(scale.shape)}", _compared(s, x, q, scale, bits))
        yield where, x, bits, axis, q, tensor(scale, wanted.shape, torch.float32, f"{where}: the scale")


def _compared(s, x, q, scale, bits):
    """A hint for scales of a wrong shape: what their error is beside that of one scale for all."""
    try:
        error = float((q.double() * scale.double() - x.double()).square().mean().sqrt())
    except RuntimeError:
        return "q * scale cannot be formed: which dims does a scale keep?"
    one = float((nearest(s, x, scales_of(s, x, bits, None), bits) - x.double()).square().mean().sqrt())
    if not error <= one:
        return f"error {error:.2g}, with one scale for all {one:.2g}: a scale for each channel cannot lose if the axis is right"
    return "which dims does a scale keep?"


def form(s: Session):
    for where, _, bits, _, q, _ in _quantized(s):
        low, high, _ = range_of(s, bits)
        least, most = int(q.min()), int(q.max())
        expect(low <= least and most <= high, f"{where}: q goes from {least} to {most}", "which whole numbers has this class?")


def rounding(s: Session):
    for where, x, bits, axis, q, scale in _quantized(s):
        exact = scales_of(s, x, bits, axis)
        close(scale, exact, 4 * SINGLE * exact, f"{where}: scale", "which number must just fit, and what is it divided by?")
        low, high, h = range_of(s, bits)
        steps = (x.double() / scale.double()).clamp(low, high)
        hint = "is it the nearest whole number, or the one below?"
        close(q, steps, 0.5 + 4 * SINGLE * h, f"{where}: q", hint)


def zeros(s: Session):
    some = draw(s, 4, 6).float()
    some[s.dice.randrange(1, 4)], some[0] = 0, -2.5
    cases = [(some, 8, 0), (torch.zeros(2, 3), 8, None)]
    for (x, _, axis), (value, _, _) in zip(cases, ran(s, *cases), strict=True):
        q, scale = pair(value, "zeros")
        exact = scales_of(s, x, 8, axis)
        q, scale = tensor(q, x.shape, torch.int8, "q"), tensor(scale, exact.shape, torch.float32, "the scale")
        close(scale, exact, 4 * SINGLE * exact, "rows of zeros: scale", "0 divided by h is no scale")
        close(q * scale, nearest(s, x, scale.double(), 8), 4 * SINGLE * x.abs().double(), "rows of zeros: q * scale")


def quantize_cost(s: Session):
    calls, columns = [], s.dice.randrange(6, 11)
    few, many = (channels := s.dice.randrange(2, 5)), 8 * channels
    xs = [draw(s, rows, columns).float() for rows in (few, many)]
    for x, (value, seen, sizes) in zip(xs, ran(s, *((x, 8, 0) for x in xs)), strict=True):
        own_products(seen, sizes)
        q, scale = pair(value, f"{len(x)} channels")
        exact = scales_of(s, x, 8, 0)
        q, scale = tensor(q, x.shape, torch.int8, "q"), tensor(scale, exact.shape, torch.float32, "the scale")
        low, high, _ = range_of(s, 8)
        held = x.double().clamp(low * exact, high * exact)  # where -h is held and h is not, the largest x may be a step too far
        close(q * scale, held, (0.5 + 1e-3) * exact.expand_as(x), f"{len(x)} channels: q * scale")
        native = sorted(name for name in seen["names"] if "quantize" in name)
        expect(not native, f"torch's own {', '.join(native)} was called", "it is three steps: write them")
        calls.append(seen["calls"])
    said = f"{calls[0]} operators for {few} channels, {calls[1]} for {many}"
    expect(calls[1] <= calls[0], said, "can all channels be asked at once for their largest?")
    return f"{calls[1]} operators"


# --- int8_linear --------------------------------------------------------------------------------------------------------
def _bytes(s: Session, *shape):
    dice = torch.Generator().manual_seed(s.dice.randrange(2**31))
    return torch.randint(-127, 128, shape, generator=dice).to(torch.int8)


def _products(s: Session, *cases, more=0):
    """For each case (m, n, k, sx, sw, whether sums are as large as they can be): (where, y, the sums, seen, sizes of marks).

    more: what every product of whole numbers is too large by, in the learner's process.
    """
    inputs, sums = [], []
    for m, n, k, sx, sw, largest in cases:
        xq, wq = _bytes(s, m, k), _bytes(s, n, k)
        if largest:
            xq[:], wq[:] = 127, 127
            wq[:, 0] = torch.arange(n) + 1
        inputs.append((xq, sx, wq, sw))
        sums.append(xq.long() @ wq.long().T)
    for (m, n, k, *_), exact, (value, seen, sizes) in zip(cases, sums, ran(s, *inputs, more=more), strict=True):
        where = f"m={m}, n={n}, k={k}"
        yield where, tensor(value, (m, n), torch.float32, f"{where}: y"), exact, seen, sizes


def exact_sum(s: Session):
    scale = 2.0 ** -s.dice.randrange(3, 9)  # a power of two: no further rounding
    sizes = ((5, 7, 96, False), (1, 3, 1, False), (3, 2, 1500, True))
    cases = [(m, n, k, torch.full((m, 1), scale), torch.ones(n, 1), largest) for m, n, k, largest in sizes]
    for where, y, sums, _, _ in _products(s, *cases):
        hint = f"the largest sum here is {int(sums.abs().max()):,}: in which dtype was it made?"
        close(y, sums.float().double() * scale, 0.0, where, hint)


def linear_scales(s: Session):
    cases = []
    for m, n, k, rows, outputs in ((4, 6, 33, 4, 6), (4, 4, 32, 4, 1), (6, 6, 40, 1, 6), (2, 3, 8, 1, 1)):
        cases.append((m, n, k, *(draw(s, r, 1).abs().float() + 0.01 for r in (rows, outputs)), False))
    for (_, _, _, sx, sw, _), (where, y, sums, _, _) in zip(cases, _products(s, *cases), strict=True):
        exact = sums.double() * sx.double() * sw.double().T
        close(y, exact, 4 * SINGLE * exact.abs(), f"{where}, sx {tuple(sx.shape)}, sw {tuple(sw.shape)}", "whose scale is which?")


def linear_cost(s: Session):
    m, n, k = s.dice.randrange(5, 8), s.dice.randrange(8, 11), s.dice.randrange(96, 129)
    more = s.dice.randrange(1000, 2000)  # who takes y from elsewhere does not see it
    case = (m, n, k, torch.full((m, 1), 0.5), torch.full((n, 1), 0.25), False)
    ((where, y, sums, seen, sizes),) = _products(s, case, more=more)
    own = own_products(seen, sizes)
    floats = [" x ".join(str(tuple(shape)) for shape in shapes) for _, kind, shapes in own if kind in FLOATS]
    hint = "what is exact before it meets a scale?"
    expect(not floats, f"{where}: {len(floats)} product of floats, {floats[0] if floats else ''}", hint)
    wide = seen["widest float"]
    expect(wide <= m * n, f"{where}: a float tensor of {wide} elements; y has {m * n}", "what of x and w must never be a float?")
    expect(len(own) == 1, f"{where}: {len(own)} products of whole numbers were seen", "one product of matrices does it")
    close(y, (sums + more).double() / 8, 0.0, f"{where}: y", "is it made of that product?")
    most = max(m, n) * k
    expect(seen["widest"] <= most, f"{where}: a tensor of {seen['widest']} elements; x and w have at most {most}")
    return f"one product of {own[0][1]}, no float wider than y"
