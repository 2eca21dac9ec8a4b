"""Lab 7, how `Scaler` and `master_step` are judged.

A scaler is led through a day of steps with overflows, some on one rank only: what it lets the optimiser use, and its scale, must
be those of one device that sees all gradients. The master step is compared with Adam in float64, within half a tick of the 16-bit
format; what lives between and within steps is counted in bytes.

    g = grad(scale loss) / scale        w16 = round(w32),     w32 -= lr m / (sqrt(v) + eps)

Reference: Micikevicius et al. 2018 (arXiv:1710.03740); torch.amp.GradScaler, whose trajectory it is.
"""

import math

import torch

from .arrivals import must_use
from .expect import Wrong, close, draw, expect, own_products, tensor
from .problem import Session

__all__ = [
    "agreed",
    "arrivals",
    "first_step",
    "live_bytes",
    "many_steps",
    "no_float_product",
    "scale_over_time",
    "scaler_cost",
    "used",
]

LIMIT = 8.0  # seconds of a run
RANKS = (3, 1)
STEPS, SCALE, INTERVAL, MAX_NORM = 10, 2.0**16, 3, 0.5
CLOSE = 2e-5  # relatively: a norm of some numbers in float32, and the 1e-6 that some add to it


# --- the scaler ---------------------------------------------------------------------------------------------------------
def _day(s: Session, n: int):
    """Gradients by step and rank: mostly small, with a spike, a NaN, a step above the norm; on one rank each time."""
    shapes = [[(3, 2), (4,)] if r != 2 or n != 3 else [] for r in range(n)]
    days = [[[0.02 * draw(s, *shape).float() for shape in mine] for mine in shapes] for _ in range(STEPS)]
    loud = [r for r in range(n) if shapes[r]]
    for step in (0, 4, 8):
        days[step][s.dice.choice(loud)][0].mul_(20)  # above the norm; at a large scale beyond 16 bits as well
    days[2][s.dice.choice(loud)][1][3] = 300.0
    days[6][s.dice.choice(loud)][0][0, 1] = math.nan
    for day in days:
        day[0].append(None)  # a frozen parameter
    return days


def _right(s: Session, days):
    """What one device that sees everything does: by step, the gradients by rank (None if it skips), and the scale after it."""
    scale, good, found, scales = SCALE, 0, [], []
    for day in days:
        arrived = [[None if g is None else (g * scale).half().double() / scale for g in mine] for mine in day]
        numbers = torch.cat([g.flatten() for mine in arrived for g in mine if g is not None])
        if not bool(numbers.isfinite().all()):
            found.append(None)
            scale, good = scale / s.twist["back"], 0
        else:
            norm = float(numbers.norm() if s.twist["norm"] == "2" else numbers.abs().max())
            factor = min(1.0, MAX_NORM / norm)
            found.append([[None if g is None else g * factor for g in mine] for mine in arrived])
            good += 1
            if good == INTERVAL:
                scale, good = scale * 2, 0
        scales.append(scale)
    return found, scales


def _scaled(s: Session, n: int):
    """(what each rank told, right gradients, right scales, the Trace)."""
    if n not in s.remembered:
        days = _day(s, n)
        outcome = s.run(SCALE, INTERVAL, MAX_NORM, ranks=n, per_rank=[([day[r] for day in days],) for r in range(n)], limit=LIMIT)
        s.remembered[n] = outcome.values, *_right(s, days), outcome.trace
    return s.remembered[n]


def agreed(s: Session):
    for n in RANKS:
        told, right, _, _ = _scaled(s, n)
        for step in range(STEPS):
            did = [len(told[r]["used"][step]) for r in range(n)]
            who = f"{n} ranks, step {step + 1}"
            for r in range(n):
                expect(did[r] <= 1, f"{who}: rank {r} called opt.step() {did[r]} times")
                hint = "who knows that a gradient overflowed, and who must?"
                expect(did[r] == did[0], f"{who}: rank {r} {_did(did[r])}, rank 0 {_did(did[0])}", hint)
                wanted = right[step] is not None
                hint = "look at the gradients that arrive: are all finite?"
                expect(bool(did[r]) == wanted, f"{who}: rank {r} {_did(did[r])}", hint)
                said = told[r]["said"][step]
                expect(said is True or said is False, f"{who}: step returned {type(said).__name__}", "wanted is True or False")
                expect(said == wanted, f"{who}: rank {r} {_did(did[r])} and returned {said}")


def _did(times):
    return "stepped" if times else "did not step"


def used(s: Session):
    for n in RANKS:
        told, right, scales, _ = _scaled(s, n)
        for r in range(n):
            _used(told[r], right, scales, n, r)


def _used(told, right, scales, n, r):
    """Wrong unless rank r stepped with the right gradients, where it stepped."""
    for step in range(STEPS):
        before, found = SCALE if step == 0 else scales[step - 1], told["used"][step]
        for k, exact in enumerate(right[step][r] if right[step] is not None and found else ()):
            where = f"{n} ranks, step {step + 1}, rank {r}, parameter {k}"
            if exact is None:
                expect(found[0][k] is None, f"{where} is frozen, and has a gradient now")
                continue
            value = tensor(found[0][k], exact.shape, torch.float32, where)
            close(value, exact, CLOSE * exact.abs() + 1e-12, where, _factor(value, exact, before))


def arrivals(s: Session):
    """A day on which every message is altered goes another way."""
    n = RANKS[0]
    days = _day(s, n)
    right, scales = _right(s, days)

    def all_right(r, told):
        try:
            _used(told, right, scales, n, r)
        except Wrong:
            return False
        return told["scales"] == scales

    must_use(s, all_right, SCALE, INTERVAL, MAX_NORM, ranks=n, per_rank=[([day[r] for day in days],) for r in range(n)])


def _factor(value, exact, scale):
    """By which number all of it is wrong, if it is one."""
    ratio = float((value.double() * exact).sum() / exact.square().sum())
    if not bool(((value - ratio * exact).abs() <= 1e-3 * abs(ratio) * exact.abs()).all()) or ratio == 0:
        return "no factor explains it"
    for number, words in ((ratio, "times"), (1 / ratio, "times too small:")):
        if abs(number / scale - 1) < 0.5:
            return f"{number:,.0f} {words} the scale was {scale:,.0f} here. Which comes first, clipping or unscaling?"
    return f"it is {ratio:.4g} times what is right: whose norm was used, and compared with what?"


def scale_over_time(s: Session):
    for n in RANKS:
        told, right, scales, _ = _scaled(s, n)
        for step in range(STEPS):
            found = [told[r]["scales"][step] for r in range(n)]
            before = SCALE if step == 0 else scales[step - 1]
            for r in range(n):
                what = "skipped" if right[step] is None else "good"
                said = f"{n} ranks: rank {r} goes from {before:,.0f} to {found[r]:,.0f} in step {step + 1}, a {what} one"
                expect(found[r] == scales[step], said, "how many good steps in a row were there?")
    return f"from {SCALE:,.0f} over {min(scales):,.0f} to {scales[-1]:,.0f}"


def scaler_cost(s: Session):
    n = RANKS[0]
    sent, most = _scaled(s, n)[3].bytes_sent(), STEPS * 2 * 2 * (n - 1) * 8
    hint = "how many numbers must the others know of your gradients?"
    expect(sent <= most, f"{n} ranks, {STEPS} steps: {sent:,} bytes, target {most:,}", hint)
    return f"{sent:,} bytes in {STEPS} steps of {n} ranks"


# --- the master step ----------------------------------------------------------------------------------------------------
LR, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1
COUNT, ROWS, COLUMNS, TRAINED = 10, 8, 24, 12  # weights, their size, steps


def _dtype(s: Session):
    return getattr(torch, s.twist["dtype"])


def _trained(s: Session):
    """(what came, the right weights after one and after all steps in float64)."""
    if "trained" not in s.remembered:
        shape = (ROWS, COLUMNS)
        large = 1.0 if s.twist["dtype"] == "bfloat16" else 4.0  # a step is less than half a tick of it
        sizes = [0.02 if k % 2 else large for k in range(COUNT)]
        weights = [(draw(s, *shape).sign() * size * (1 + draw(s, *shape).abs())).to(_dtype(s)) for size in sizes]
        means = [0.01 * draw(s, *shape) for _ in range(COUNT)]
        steps = [[(mean + 0.002 * draw(s, *shape)).to(_dtype(s)) for mean in means] for _ in range(TRAINED)]
        marks = [s.dice.randrange(2, 6) for _ in range(3)]
        told = s.run(marks, weights, steps, limit=LIMIT).values[0]
        s.remembered["trained"] = told, _adam(s, weights, steps[:1]), _adam(s, weights, steps), marks
    return s.remembered["trained"]


def _adam(s: Session, weights, steps):
    """The weights after these steps, in float64."""
    found = []
    for k, w in enumerate(weights):
        w, m, v = w.double(), 0.0, 0.0
        for t, gradients in enumerate(steps, 1):
            g = gradients[k].double()
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
            w = w * (1 - LR * DECAY * s.twist["decay"])
            w = w - LR * (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS)
        found.append(w)
    return found


def _tick(s: Session, w):
    """How far apart the 16-bit numbers around w are."""
    return torch.exp2(w.abs().log2().floor()) * torch.finfo(_dtype(s)).eps


def _compared(s: Session, found, right, steps):
    for k, (value, exact) in enumerate(zip(found, right, strict=True)):
        where = f"after {steps} step{'s' if steps > 1 else ''}, weight {k}"
        value = tensor(value, exact.shape, _dtype(s), where)
        tick = _tick(s, exact)
        moved = f"a step is about {LR / float(tick.mean()):.2f} of the distance between two numbers of {s.twist['dtype']} here"
        # half a tick, and what float32 adds in so many steps
        close(value, exact, tick / 2 + steps * 2.0**-22 * (exact.abs() + 4 * LR), where, moved)


def first_step(s: Session):
    told, right, _, _ = _trained(s)
    _compared(s, [torch.tensor(w, dtype=_dtype(s)) for w in told["first"]], right, 1)


def many_steps(s: Session):
    told, _, right, _ = _trained(s)
    _compared(s, told["last"], right, TRAINED)


def live_bytes(s: Session):
    told, _, _, sizes = _trained(s)
    own_products(told["seen"], sizes)
    size = ROWS * COLUMNS
    each = [live / (COUNT * size) for live in told["live"]]
    most = max(range(TRAINED), key=lambda k: each[k])
    said = f"after step {most + 1} {4 + each[most]:.1f} bytes a parameter live, target 16"
    expect(each[most] <= 12.2, said, "what of it does the next step need?")
    more = (told["seen"]["peak"] - 12 * COUNT * size) / (4 * size)
    said = f"within a step {more:.1f} more float32 tensors of a weight's size live, target 6"
    expect(more <= 6.2, said, f"there are {COUNT} weights: who is finished with the first when the last begins?")
    return f"{4 + each[-1]:.1f} bytes a parameter"


def no_float_product(s: Session):
    told, _, _, sizes = _trained(s)
    own = own_products(told["seen"], sizes)
    wide = [kind for _, kind, _ in own if kind != s.twist["dtype"]]
    said = f"{len(wide)} of {len(own)} products are of {wide[0] if wide else ''}"
    expect(not wide, said, "with which weights does the model compute?")
    expect(len(own) == COUNT, f"{len(own)} products were seen, not {COUNT}")
