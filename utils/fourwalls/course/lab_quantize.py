"""Lab 8, quantization: one scale for many numbers, a product of whole numbers, outliers in the weights, two weights in a byte.

What is asked for, and this class's twist: the range of the integers, the layout of weights, the half in which a column lies, the
group that is shorter. How it is judged stands in lab_quantize_values.py and lab_quantize_weights.py.

    y = s_x s_w (x_q w_q^T), the sum exact        bits a weight = 4 + 16 / group

Reference: Jacob et al. 2018 (arXiv:1712.05877); Xiao et al. 2023 (arXiv:2211.10438); Frantar et al. 2022 (arXiv:2210.17323).
"""

import random
from dataclasses import replace

from .expect import judged
from .lab_quantize_values import exact_sum, form, linear_cost, linear_scales, quantize_cost, rounding, zeros
from .lab_quantize_weights import dead, pack_bits, pack_form, pack_loss, pack_values, smooth_error, smooth_values
from .problem import Problem, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = tuple(
    f"fourwalls.{name}"
    for name in ("numerics", "parallel", "train", "plan", "bench")
    + ("course.lab_quantize", "course.lab_quantize_values", "course.lab_quantize_weights")
)
DRIVER = "fourwalls.course.drivers_quantize.probed"
PLAIN = {"range": "narrow", "layout": "out, in", "low": "even", "short": "last"}


def twist(seed: int | None) -> dict:
    """What this class's integers and layouts are like."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"quantize {seed}")
    choices = {"range": ("narrow", "full"), "layout": ("out, in", "in, out"), "low": ("even", "odd"), "short": ("last", "first")}
    return {name: dice.choice(options) for name, options in choices.items()}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    narrow = t["range"] == "narrow"
    ends = "from -h to h, with h = 2^(bits - 1) - 1" if narrow else "from -h to h - 1, with h = 2^(bits - 1)"
    w = "w is (n, k), an output in each row" if t["layout"] == "out, in" else "w is (k, n), an output in each column"
    low, high = ("even", "odd") if t["low"] == "even" else ("odd", "even")
    made = [
        Problem(
            "quantize.quantize",
            Spec(
                "A scale, and whole numbers",
                "def quantize(x, bits, axis):",
                (
                    "x: float32, any number of dims. axis None: one scale for all of x; else one for each index along axis,",
                    "which may be negative. Return (q, scale): q is int8 in x's shape; scale is float32 with as many dims as x,",
                    "1 where it is shared, so that q * scale is nearly x.",
                    f"q goes {ends}; the scale is the largest |x| under it, divided by h. Each q is the nearest whole",
                    "number in range. A scale over nothing but zeros is 1. bits: 2 to 8.",
                ),
                minutes=25,
                difficulty=2,
                importance=5,
            ),
            (
                judged("form and range", form),
                judged("scales and rounding", rounding),
                judged("zeros", zeros),
                judged("cost", quantize_cost),
            ),
            5,
            (Target("operators of torch", "as many for 24 channels as for 3"),),
        ),
        Problem(
            "quantize.int8_linear",
            Spec(
                "A linear layer that multiplies whole numbers",
                "def int8_linear(xq, sx, wq, sw):",
                (
                    "xq (m, k) and wq (n, k) are int8; sx is (m, 1) or (1, 1), sw is (n, 1) or (1, 1), as your quantize gives",
                    "them with axis 0 or None. Return (m, n) in float32: the sum over k of whole numbers, exact in int32, then",
                    "the scales.",
                ),
                minutes=20,
                difficulty=2,
                importance=5,
            ),
            (judged("the sum is exact", exact_sum), judged("scales", linear_scales), judged("cost", linear_cost)),
            5,
            (
                Target("products", "one, of whole numbers; none of floats"),
                Target("elements of a float tensor", "at most m n", "what is rounded stays rounded"),
            ),
        ),
        Problem(
            "quantize.smooth",
            Spec(
                "Move the outliers",
                "def smooth(xmax, w, a):",
                (
                    f"xmax (k,): the largest |x| of each input channel. {w}; a: 0 to 1. Return s (k,), by which channel j of",
                    "x will be divided and its weights multiplied: xmax_j to the power a, over the largest |w| of that channel",
                    "to the power 1 - a. Where either of the two is 0, s is 1.",
                ),
                minutes=15,
                difficulty=2,
                importance=3,
            ),
            (judged("values", smooth_values), judged("dead channels", dead), judged("error of the product", smooth_error)),
            4,
            (Target("error of the int8 product", "that of the formula"),),
        ),
        Problem(
            "quantize.pack4",
            Spec(
                "Two weights in a byte",
                "def pack4(w, group):",
                (
                    "w (n, k) float32. Every `group` columns of a row share a scale; where group does not divide k, the",
                    f"{t['short']} group is the shorter one. Return (data, scale).",
                    "scale (n, groups), bfloat16: as in quantize with 4 bits. Weights are rounded with what is stored.",
                    "data (n, (k + 1) // 2), uint8: q + 8 in four bits, columns 2j and 2j + 1 in byte j: the",
                    f"{low} column in the low half, the {high} one in the high half. An odd k leaves one half unused.",
                ),
                minutes=30,
                difficulty=4,
                importance=4,
            ),
            (
                judged("form", pack_form),
                judged("values", pack_values),
                judged("bits a weight", pack_bits),
                judged("the model's loss", pack_loss),
            ),
            6,
            (Target("bits a weight, scales included", "4 + 16 / group", "at most 4.5 from a group of 32 on"),),
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, twist=t, driver=DRIVER) for p in made}
