"""FLOPs of a training step, from the matrix products alone, and what follows from them: days, and the two utilisations.

A product of (m, k) by (k, n) costs 2mkn. Its backward makes two such products, one for the input's gradient and one for the
weight's, so a training step costs three forwards, or four where every layer's forward is done again.

    6 P D  <  F = 72 B s L h^2 (1 + s/(6h) + V/(12 h L))        with full recompute  96 B s L h^2 (1 + s/(6h) + V/(16 L h))

Reference: Narayanan et al. 2021 (arXiv:2104.04473) eqs 2-4; Korthikanti et al. 2022 (arXiv:2205.05198) eqs 7-8; Kaplan et al.
2020.
"""

from dataclasses import dataclass
from fractions import Fraction

from .shape import Shape
from .terms import exact

__all__ = [
    "RECOMPUTE",
    "Op",
    "forward_flops",
    "iteration_flops",
    "korthikanti_hardware_flops",
    "korthikanti_model_flops",
    "layer_ops",
    "logits_op",
    "narayanan_flops",
    "narayanan_parameters",
    "narayanan_seconds",
    "six_n_d",
    "training_seconds",
    "utilization",
]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Op:
    """One kind of matrix product in a forward pass: `forward` FLOPs; its backward costs twice that."""

    name: str
    formula: str
    forward: int

    @property
    def backward(self) -> int:
        return 2 * self.forward


def layer_ops(shape: Shape, batch: int, length: int | None = None, *, causal: bool = False) -> list[Op]:
    """The matrix products of one layer for `batch` sequences of `length` tokens.

    causal False counts the whole (s, s) square, as the papers do; True counts only the s (s + 1) / 2 pairs that are looked at.
    With experts, a token passes through top_k of them.
    """
    b, s, h, f, kv = batch, shape.length if length is None else length, shape.width, shape.ff, shape.kv_width
    pairs, square = (s * (s + 1) // 2, "s(s+1)/2") if causal else (s * s, "s^2")
    up, k = (2 if shape.gated else 1), shape.top_k
    times = f"{k} * " if k > 1 else ""
    ops = [
        Op("query, key, value", "2 b s h (h + 2 kv)", 2 * b * s * h * (h + 2 * kv)),
        Op("scores", f"2 b {square} h", 2 * b * pairs * h),
        Op("weighted values", f"2 b {square} h", 2 * b * pairs * h),
        Op("attention output", "2 b s h^2", 2 * b * s * h * h),
        Op("MLP up", f"{times}{2 * up} b s h f", k * up * 2 * b * s * h * f),
        Op("MLP down", f"{times}2 b s f h", k * 2 * b * s * f * h),
    ]
    if shape.experts > 1:
        ops.append(Op("router", "2 b s h e", 2 * b * s * h * shape.experts))
    return ops


def logits_op(shape: Shape, batch: int, length: int | None = None) -> Op:
    """The product with the output head, kept apart: it belongs to one pipeline stage, not to the layers."""
    s = shape.length if length is None else length
    return Op("logits", "2 b s h V", 2 * batch * s * shape.width * shape.vocabulary)


def forward_flops(shape: Shape, batch: int, length: int | None = None, *, causal: bool = False) -> int:
    """FLOPs of one forward pass of the whole model (matrix products)."""
    return (
        shape.layers * sum(op.forward for op in layer_ops(shape, batch, length, causal=causal))
        + logits_op(shape, batch, length).forward
    )


def iteration_flops(shape: Shape, batch: int, *, length: int | None = None, recompute: str = "none", causal: bool = False) -> int:
    """FLOPs of forward and backward for a global batch, plus what is computed again.

    recompute "full": every layer's forward once more (not the logits). "selective": scores and weighted values once more.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}; allowed: {', '.join(RECOMPUTE)}")
    ops = layer_ops(shape, batch, length, causal=causal)
    again = {"none": (), "selective": ("scores", "weighted values"), "full": tuple(op.name for op in ops)}[recompute]
    layer = sum(op.forward + op.backward + (op.forward if op.name in again else 0) for op in ops)
    head = logits_op(shape, batch, length)
    return shape.layers * layer + head.forward + head.backward


def narayanan_parameters(layers: int, width: int, vocabulary: int, length: int) -> int:
    """Eq. 2: P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), a whole number; the last norm's 2h are left out."""
    p = 12 * layers * width**2 * (1 + Fraction(13, 12 * width) + Fraction(vocabulary + length, 12 * layers * width))
    return exact(p)


def narayanan_flops(batch: int, length: int, layers: int, width: int, vocabulary: int) -> int:
    """Eq. 3, with full recompute: F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h))."""
    return exact(
        96 * batch * length * layers * width**2 * (1 + Fraction(length, 6 * width) + Fraction(vocabulary, 16 * layers * width))
    )


def narayanan_seconds(tokens: float, parameters: float, gpus: int, flops_per_gpu: float) -> float:
    """Eq. 4: about 8 T P / (n X), end to end, with full recompute."""
    return 8 * tokens * parameters / (gpus * flops_per_gpu)


def korthikanti_model_flops(batch: int, length: int, layers: int, width: int, vocabulary: int) -> int:
    """Eq. 7, what the model needs: 72 B L s h^2 (1 + s/(6h) + v/(12 h L))."""
    return exact(
        72 * batch * layers * length * width**2 * (1 + Fraction(length, 6 * width) + Fraction(vocabulary, 12 * width * layers))
    )


def korthikanti_hardware_flops(batch: int, length: int, layers: int, width: int, vocabulary: int) -> int:
    """Eq. 8, what the hardware does with selective recompute as the paper prints it: 72 B L s h^2 (1 + s/(3h) + v/(12 h L)).

    The paper adds 12 B L s^2 h for the second pass over scores and weighted values, but one forward of these two costs only
    4 B L s^2 h (`layer_ops`), which would make s/(4.5h) of s/(3h). `iteration_flops(..., recompute="selective")` counts the 4.
    """
    return exact(
        72 * batch * layers * length * width**2 * (1 + Fraction(length, 3 * width) + Fraction(vocabulary, 12 * width * layers))
    )


def six_n_d(parameters: float, tokens: float) -> float:
    """The rule of thumb: 6 FLOPs for each parameter and token (2 forward, 4 backward), attention scores left out. Kaplan et al.
    2020.
    """
    return 6 * parameters * tokens


def training_seconds(
    shape: Shape, tokens: float, *, batch: int, gpus: int, flops_per_gpu: float, recompute: str = "none"
) -> float:
    """Seconds to train on `tokens` at an achieved `flops_per_gpu`, iteration by iteration of `batch` sequences."""
    iterations = tokens / (batch * shape.length)
    return iterations * iteration_flops(shape, batch, recompute=recompute) / (gpus * flops_per_gpu)


def utilization(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Share of the peak: MFU with the model's FLOPs, HFU with those the hardware does. Chowdhery et al. 2022
    (arXiv:2204.02311), appendix B.
    """
    for word, value in (("seconds", seconds), ("gpus", gpus), ("peak", peak)):
        if not value > 0:
            raise ValueError(f"{word} is {value!r}; it must be above 0")
    return flops / (seconds * gpus * peak)
