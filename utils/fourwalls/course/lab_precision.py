"""Lab 7, mixed precision: rounding to any format, a scale for the loss that all ranks agree on, weights with a master copy.

What is asked for, this class's twist (ties, what is too large, the norm, the decay, the 16-bit format), and how `round_to` is
judged: all numbers of the format are listed, and the nearest of them must come back, bit by bit. The other two are judged in
lab_precision_steps.py.

    x = (-1)^s 2^(e - bias) (1 + m / 2^mantissa)        16 bytes a parameter = 2 + 2 + (4 + 4 + 4)

Reference: IEEE 754-2019; Micikevicius et al. 2018 (arXiv:1710.03740).
"""

import random
from dataclasses import replace

import torch

from ..viz.timeline import plot_timeline
from .expect import draw, expect, judged, own_products, tensor
from .lab_precision_steps import (
    agreed,
    arrivals,
    first_step,
    live_bytes,
    many_steps,
    no_float_product,
    scale_over_time,
    scaler_cost,
    used,
)
from .problem import Problem, Session, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = tuple(
    f"fourwalls.{name}"
    for name in ("numerics", "parallel", "train", "plan", "bench", "course.lab_precision", "course.lab_precision_steps")
)
DRIVER = "fourwalls.course.drivers_precision."
PLAIN = {"ties": "even", "beyond": "infinity", "norm": "2", "back": 2, "decay": False, "dtype": "bfloat16"}
LIMIT = 4.0  # seconds of a run
POINTS = 24  # numbers of a format at which it is tried


def twist(seed: int | None) -> dict:
    """What this class's rounding and steps are like."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"precision {seed}")
    choices = {
        "ties": ("even", "away"),
        "beyond": ("infinity", "largest"),
        "norm": ("2", "largest"),
        "back": (2, 4),
        "decay": (False, True),
        "dtype": ("bfloat16", "float16"),
    }
    return {name: dice.choice(options) for name, options in choices.items()}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    ties = "to the one whose last mantissa bit is 0" if t["ties"] == "even" else "away from zero"
    beyond = "infinity" if t["beyond"] == "infinity" else "the largest number, and so does infinity itself"
    norm = "root of the sum of squares of" if t["norm"] == "2" else "largest absolute value among"
    decay = "Before that, w is multiplied by 1 - lr 0.1 (decoupled decay)." if t["decay"] else "No weight decay."
    made = [
        Problem(
            "precision.round_to",
            Spec(
                "To the nearest number of a format",
                "def round_to(x, exponent_bits, mantissa_bits):",
                (
                    "x: float32, any shape. Return float32 in x's shape: each number rounded to the nearest one of a format with",
                    "a sign, exponent_bits (2 to 8) and mantissa_bits (1 to 10), built as IEEE 754 builds its own: bias",
                    "2^(exponent_bits - 1) - 1, subnormal numbers, the highest exponent for infinity and NaN alone.",
                    f"Between two numbers, halfway: {ties}. What rounds beyond the largest number becomes {beyond}.",
                    "NaN stays NaN, and zero keeps its sign.",
                ),
                minutes=25,
                difficulty=4,
                importance=4,
            ),
            (
                judged("normal numbers", _rounded, "normal"),
                judged("halfway", _rounded, "halfway"),
                judged("subnormal numbers", _rounded, "subnormal"),
                judged("both ends", _rounded, "ends"),
                judged("cost", _round_cost),
            ),
            6,
            (Target("operators of torch", "as many for 100 numbers as for 10"),),
            driver=DRIVER + "probed",
        ),
        Problem(
            "precision.Scaler",
            Spec(
                "Scale the loss, together",
                "class Scaler:\n    def __init__(self, scale, interval, max_norm): ...\n    def step(self, opt, comm): ...",
                (
                    "self.scale is by what the loss is multiplied now. Every rank holds parameters of its own, opt.params",
                    "(perhaps none); p.grad, float32 or None, came out of a 16-bit backward of scale times loss.",
                    "step divides all p.grad by the scale. If one of them is infinite or NaN, on any rank, then nobody steps,",
                    f"and the scale is divided by {t['back']}. Else, if the norm, the {norm} all gradients of",
                    "all ranks, is above max_norm, every p.grad is multiplied by max_norm / norm; then opt.step(). After",
                    "interval good steps in a row the scale is doubled, and counting begins anew. Return whether it stepped.",
                    "You may use fw.collectives.ring.all_reduce(comm, x, op=...), or the all_reduce that you wrote in lab 1.",
                ),
                minutes=25,
                difficulty=3,
                importance=5,
            ),
            (
                judged("everybody steps, or nobody", agreed),
                judged("gradients that are used", used),
                judged("the scale over time", scale_over_time),
                judged("cost", scaler_cost),
                judged("what arrives is used", arrivals),
            ),
            6,
            (Target("bytes a step, all ranks", "at most 2 all-reduces of one number: 4 (n - 1) 8 bytes"),),
            driver=DRIVER + "scaled",
        ),
        Problem(
            "precision.master_step",
            Spec(
                "16 bits to compute with, 32 to remember",
                "def master_step(w16, g16, state):",
                (
                    f"w16, g16: lists of {t['dtype']} tensors, weights and their gradients. state: a dict of your own, empty at",
                    "first. Change the tensors of w16 in place by one step of Adam (lr 1e-3, beta 0.9 and 0.999, eps 1e-8 added",
                    f"to the root, both means corrected for their start at zero), computed in float32. {decay}",
                    "Between two steps there are a float32 copy of each weight, and Adam's two means: no more.",
                ),
                minutes=20,
                difficulty=3,
                importance=5,
            ),
            (
                judged("one step", first_step),
                judged("small steps add up", many_steps),
                judged("16 bytes a parameter", live_bytes),
                judged("no float32 product", no_float_product),
            ),
            6,
            (
                Target("bytes between two steps", "2 + 2 + 12 a parameter"),
                Target("more than that within a step", "six float32 tensors as large as the largest weight", "tensor by tensor"),
                Target("products of float32", "none"),
            ),
            driver=DRIVER + "trained",
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, twist=t, picture=_picture) for p in made}


# --- formats ------------------------------------------------------------------------------------------------------------
def _numbers(exponent: int, mantissa: int) -> torch.Tensor:
    """Zero and all positive numbers of the format, ascending, in float64, and the one that would come next. A number's place is
    its bit pattern, so that even places have the last mantissa bit 0.
    """
    patterns = torch.arange((2**exponent - 1) * 2**mantissa + 1)
    e, m = patterns >> mantissa, (patterns & (2**mantissa - 1)).double() / 2**mantissa
    bias = 2 ** (exponent - 1) - 1
    return torch.where(e > 0, 1 + m, m) * torch.exp2((e.clamp(min=1) - bias).double())


def nearest_number(x: torch.Tensor, exponent: int, mantissa: int, ties: str, beyond: str) -> torch.Tensor:
    """What round_to must return, from the list of all numbers."""
    numbers = _numbers(exponent, mantissa)
    size = x.double().abs().nan_to_num(nan=0.0)
    below = (torch.searchsorted(numbers, size, right=True) - 1).clamp(max=len(numbers) - 2)
    middle = (numbers[below] + numbers[below + 1]) / 2
    up = (size > middle) | ((size == middle) & (below % 2 == 1 if ties == "even" else True))
    place = below + up.long()
    found = numbers[place]
    last = len(numbers) - 1
    found = torch.where(place == last, torch.inf if beyond == "infinity" else numbers[last - 1], found)
    return torch.where(x.isnan(), torch.nan, found.copysign(x.double())).float()


def _formats(s: Session):
    """Known ones and one that nobody has."""
    if "formats" not in s.remembered:
        s.remembered["formats"] = (5, 10), (8, 7), (4, 3), (s.dice.randrange(2, 8), s.dice.randrange(1, 10))
    return s.remembered["formats"]


def _inputs(s: Session, which: str, exponent: int, mantissa: int) -> torch.Tensor:
    """Numbers for one check: around and between those of the format, on both sides of every halfway point."""
    numbers = _numbers(exponent, mantissa)
    first = 2**mantissa  # the smallest normal number
    dice = torch.Generator().manual_seed(s.dice.randrange(2**31))
    if which == "ends":
        last, after = numbers[-2], numbers[-1]
        x = torch.stack([last, (last + after) / 2, after, last * 0.999, last * 4]).clamp(max=torch.finfo(torch.float32).max)
        x = torch.cat([x, torch.tensor([0.0, torch.inf, torch.nan])]).float()
        return torch.cat([x, -x])
    low, high = (0, first) if which == "subnormal" else (first, len(numbers) - 2)
    places = torch.randint(low, high, (POINTS,), generator=dice)
    below, above = numbers[places], numbers[places + 1]
    if which == "halfway":
        x = torch.cat([(below + above) / 2, numbers[:first][-6:] + numbers[1] / 2]).float()
        x = torch.cat([x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(torch.inf))])
    else:
        x = torch.cat([below, below + (above - below) * torch.rand(POINTS, generator=dice, dtype=torch.float64)]).float()
    return x * (torch.randint(0, 2, x.shape, generator=dice) * 2 - 1)


def _rounded(s: Session, which: str):
    cases = [[_inputs(s, which, *f), *f] for f in _formats(s)]
    told = s.run([1, 1, 1], cases, limit=LIMIT).values[0]
    for (x, exponent, mantissa), one in zip(cases, told, strict=True):
        where = f"{exponent} exponent bits, {mantissa} mantissa bits"
        value = tensor(one["value"], x.shape, torch.float32, where)
        right = nearest_number(x, exponent, mantissa, s.twist["ties"], s.twist["beyond"])
        wrong = ~((value.view(torch.int32) == right.view(torch.int32)) | (value.isnan() & right.isnan()))
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            said = f"{where}: {int(wrong.sum())} of {len(x)} numbers are wrong, the first from x = {float(x[first]):.9g}"
            hint = f"it became {float(value[first]):.9g}; {_place(float(x[first]), exponent, mantissa)}"
            expect(False, said, hint)


def _place(x: float, exponent: int, mantissa: int) -> str:
    """Where x lies in the format, in words."""
    bias = 2 ** (exponent - 1) - 1
    size, largest = abs(x), (2 - 2.0**-mantissa) * 2.0**bias
    if x == 0 or not size < float("inf"):
        return "zero has a sign, infinity and NaN are numbers too"
    if size < 2.0 ** (1 - bias):
        return f"below 2^{1 - bias} numbers are all as far apart as there"
    if size > largest:
        return "it is beyond the largest number: by half of the last distance, or by less?"
    return "how far apart are the two numbers between which it lies, and is it halfway?"


def _round_cost(s: Session):
    sizes = [s.dice.randrange(2, 6) for _ in range(3)]
    few = s.dice.randrange(5, 15)
    form = s.dice.randrange(3, 9), s.dice.randrange(2, 10)
    cases = [[draw(s, count, dtype=torch.float32), *form] for count in (few, 10 * few)]
    told = s.run(sizes, cases, limit=LIMIT).values[0]
    for (x, exponent, mantissa), one in zip(cases, told, strict=True):
        own_products(one["seen"], sizes)
        right = nearest_number(x, exponent, mantissa, s.twist["ties"], s.twist["beyond"])
        where = f"{len(x)} numbers, {exponent} exponent bits, {mantissa} mantissa bits"
        expect(torch.equal(tensor(one["value"], x.shape, torch.float32, where), right), f"{where}: some are wrong")
    few, many = (one["seen"]["calls"] for one in told)
    said = f"{few} operators for {len(cases[0][0])} numbers, {many} for {len(cases[1][0])}"
    expect(many <= few, said, "all numbers at once")
    return f"{many} operators"


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
