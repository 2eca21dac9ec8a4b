"""Bytes that training holds: the states of every parameter, and the activations that backward waits for.

States grow with parameters and are divided by ZeRO; activations grow with batch and length and are divided by tensor and sequence
parallelism or computed again. Each is a list of named lines that sum to the total.

    states = 16 B a parameter (mixed precision, Adam)        activations of a layer = s b h (34 + 5 a s / h)

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), Table 1; Korthikanti et al. 2022 (arXiv:2205.05198), Table 2 and eqs 1-6.
"""

from fractions import Fraction
from numbers import Rational

from .flops import RECOMPUTE
from .shape import Shape, nearest_multiples
from .terms import Term, Terms, exact

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "bytes_per_parameter",
    "end_activations",
    "inference_memory",
    "interleave_factor",
    "kv_cache",
    "layer_activations",
    "state_memory",
    "training_memory",
]

# weights, gradients, master copy, and each of the optimiser's own numbers: bytes a parameter
PRECISIONS = {
    "fp32": {"weights": 4, "gradients": 4, "master weights": 0, "moment": 4},
    "mixed": {"weights": 2, "gradients": 2, "master weights": 4, "moment": 4},  # ZeRO's K = 12 for Adam
    "mixed-fp32-gradients": {"weights": 2, "gradients": 4, "master weights": 4, "moment": 4},  # Megatron's 18 bytes
    "half": {"weights": 2, "gradients": 2, "master weights": 0, "moment": 2},  # everything in 16 bits
}
OPTIMIZERS = {"none": (), "sgd": (), "momentum": ("momentum",), "adam": ("momentum", "variance")}
_ELEMENT = {"fp32": 4, "mixed": 2, "mixed-fp32-gradients": 2, "half": 2}


def _choose(word: str, value: object, table) -> None:
    if value not in table:
        raise ValueError(f"{word} is {value!r}; allowed: {', '.join(map(str, table))}")


def _count(word: str, value: int) -> None:
    if not isinstance(value, Rational) or value < 0:
        raise ValueError(f"{word} is {value!r}; it is a whole number of at least 0")


def _divides(word: str, value: int, by_word: str, by: int) -> None:
    if not isinstance(by, int) or isinstance(by, bool) or by < 1:
        raise ValueError(f"{by_word} is {by!r}; it is a whole number of at least 1")
    if value % by:
        legal = [d for d in range(1, value + 1) if value % d == 0]
        near = sorted(sorted(legal, key=lambda d: abs(d - by))[:2])
        raise ValueError(
            f"{word} {value} cannot be shared by {by_word} {by}; nearest legal {by_word}: {' or '.join(map(str, near))} "
            f"(or {word} {nearest_multiples(value, by)})"
        )


def bytes_per_parameter(optimizer: str = "adam", precision: str = "mixed") -> Terms:
    """The table that adds up: mixed with Adam 2 + 2 + 4 + 4 + 4 = 16; fp32 with Adam 4 + 4 + 4 + 4 = 16. Optimizer "none":
    weights only.
    """
    _choose("optimizer", optimizer, OPTIMIZERS)
    _choose("precision", precision, PRECISIONS)
    size = PRECISIONS[precision]
    lines = [Term("weights", f"{size['weights']} B", size["weights"])]
    if optimizer != "none":
        lines.append(Term("gradients", f"{size['gradients']} B", size["gradients"]))
        if size["master weights"]:
            lines.append(Term("master weights", f"{size['master weights']} B", size["master weights"]))
        lines += [Term(name, f"{size['moment']} B", size["moment"]) for name in OPTIMIZERS[optimizer]]
    return Terms(lines, title=f"bytes a parameter: {optimizer}, {precision}")


def state_memory(parameters: int, *, optimizer: str = "adam", precision: str = "mixed", dp: int = 1, stage: int = 0) -> Terms:
    """Bytes of model states on one rank: ZeRO divides the optimiser's by dp (1), gradients too (2), weights too (3).

    Exact shares: where dp does not divide, the largest rank holds one parameter's states more. ZeRO, Table 1 and section 5.
    """
    _choose("stage", stage, (0, 1, 2, 3))
    _divides("one", 0, "dp", dp)
    _count("parameters", parameters)
    lines = []
    for term in bytes_per_parameter(optimizer, precision):
        first = {"weights": 3, "gradients": 2}.get(term.name, 1)  # the stage from which this is divided
        share = dp if stage >= first else 1
        lines.append(
            Term(term.name, f"{term.each} P" + (f" / {dp}" if share > 1 else ""), exact(Fraction(term.each * parameters, share)))
        )
    return Terms(
        lines, title=f"states of {parameters:,} parameters: {optimizer}, {precision}, ZeRO stage {stage} over {dp} ranks"
    )


def layer_activations(
    shape: Shape,
    batch: int,
    *,
    length: int | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    regather: bool = True,
    recompute: str = "none",
    flash: bool = False,
    dropout: bool = True,
    element: int = 2,
) -> Terms:
    """Bytes that one layer keeps for its backward on one rank, line by line.

    element: bytes of a number. sequence_parallel: norms, dropout and the inputs of both column-parallel products are split along
    the sequence too; regather False keeps those two inputs whole, which saves gathering them again. flash: no (s, s) matrix, a
    float32 log-sum-exp instead. Left out, as in the paper: statistics of norms (8 s b bytes for each norm in float32).
    Source: Table 2, eqs 1-4.
    """
    _choose("recompute", recompute, RECOMPUTE)
    _divides("heads", shape.heads, "tp", tp)
    _divides("kv_heads", shape.kv_heads, "tp", tp)
    _divides("ff", shape.ff, "tp", tp)
    _count("batch", batch)
    b, s, h, e = batch, shape.length if length is None else length, shape.width, element
    if sequence_parallel:
        _divides("length", s, "tp", tp)
    sp = tp if sequence_parallel else 1  # share of the parts outside the tensor-parallel blocks
    whole = sp if regather else 1  # share of the inputs of the column-parallel products
    title = f"activations of one layer: b={b}, s={s}, h={h}, a={shape.heads}, tp={tp}, {e} B a number, recompute {recompute}"
    over = {n: f" / {n}" if n > 1 else "" for n in (1, tp)}
    lines: list[Term] = []

    def line(name: str, formula: str, numbers: int, size: int, share: int, count: int = 1) -> None:
        lines.append(Term(name, formula + over[share], exact(Fraction(numbers * size, share)), count))

    if recompute == "full":
        line("layer input", f"{e}sbh", s * b * h, e, sp)  # cut where the sequence is; Table 2's row is without
        return Terms(lines, title=title)
    core = recompute == "none"  # the attention core's inner results are kept
    k = shape.top_k
    line("norm inputs", f"{e}sbh", s * b * h, e, sp, 2)
    line("input of query, key, value", f"{e}sbh", s * b * h, e, whole)
    line("query", f"{e}sbh", s * b * h, e, tp)
    line("key, value", f"{e}sb kv", s * b * shape.kv_width, e, tp, 2)
    if flash:
        if core:
            line("log-sum-exp of scores", "4sba", s * b * shape.heads, 4, tp)
    elif core:
        line("softmax output", f"{e}a s^2 b", shape.heads * s * s * b, e, tp)
        if dropout:
            line("dropout mask of scores", "a s^2 b", shape.heads * s * s * b, 1, tp)
            line("scores after dropout", f"{e}a s^2 b", shape.heads * s * s * b, e, tp)
    line("input of attention output", f"{e}sbh", s * b * h, e, tp)
    if dropout:
        line("dropout mask after attention", "sbh", s * b * h, 1, sp)
    line("input of MLP up", f"{e}sbh", s * b * h, e, whole)
    line("input of the activation", f"{e}sbf", s * b * shape.ff, e, tp, k)
    if shape.gated:
        line("activation's output", f"{e}sbf", s * b * shape.ff, e, tp, k)
        line("gated factor", f"{e}sbf", s * b * shape.ff, e, tp, k)
    line("input of MLP down", f"{e}sbf", s * b * shape.ff, e, tp, k)
    if dropout:
        line("dropout mask after MLP", "sbh", s * b * h, 1, sp)
    return Terms(lines, title=title)


def end_activations(
    shape: Shape, batch: int, *, length: int | None = None, tp: int = 1, pp: int = 1, element: int = 2, dropout: bool = True
) -> Terms:
    """What the ends of the model keep on the first stage: embedding dropout for the pp micro-batches in flight and, where there
    is only one stage, the last norm, the output head and float32 logits. With sequence parallelism. Korthikanti et al. 2022,
    section 4.3.
    """
    b, s, h = batch, shape.length if length is None else length, shape.width
    over = f" / {tp}" if tp > 1 else ""
    lines = []
    if dropout:
        lines.append(Term("embedding dropout mask", f"sbh{over}", exact(Fraction(s * b * h, tp)), pp))
    if pp == 1:
        lines += [
            Term("last norm's input", f"{element}sbh{over}", exact(Fraction(element * s * b * h, tp))),
            Term("output head's input", f"{element}sbh{over}", exact(Fraction(element * s * b * h, tp))),
            Term("logits (float32)", f"4sbV{over}", exact(Fraction(4 * s * b * shape.vocabulary, tp))),
        ]
    return Terms(lines, title=f"activations at the ends: b={b}, s={s}, V={shape.vocabulary}, tp={tp}, pp={pp}")


def interleave_factor(pp: int, chunks: int = 1) -> Fraction:
    """How much more the interleaved schedule holds on the first stage: 1 + (p - 1) / (p v); 1 without interleaving (chunks 1)."""
    return Fraction(1) if chunks == 1 else 1 + Fraction(pp - 1, pp * chunks)


def training_memory(
    shape: Shape,
    batch: int,
    *,
    optimizer: str = "adam",
    precision: str = "mixed",
    dp: int = 1,
    stage: int = 0,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    **activations,
) -> Terms:
    """Everything that the first pipeline stage's rank holds in training: states, layers' activations, ends. Lines sum to the
    total.

    1F1B keeps pp micro-batches of L/pp layers alive on the first stage, so L layers' worth (eq. 5). Norms and the biases after a
    sum over ranks are on every tensor-parallel rank. What nobody models here, buffers and the allocator's fragments, is for a
    measurement to show. ValueError where heads, MLP width, vocabulary, length or layers cannot be shared (pad the vocabulary).
    """
    _divides("layers", shape.layers, "pp", pp * chunks)
    _divides("vocabulary", shape.vocabulary, "tp", tp)
    mine = shape.rank_parameters(tp, pp).total
    states = state_memory(1, optimizer=optimizer, precision=precision, dp=dp, stage=stage).times(mine)
    element = activations.pop("element", _ELEMENT[precision])
    layer = layer_activations(shape, batch, tp=tp, element=element, **activations).times(
        shape.layers * interleave_factor(pp, chunks)
    )
    ends = end_activations(
        shape, batch, length=activations.get("length"), tp=tp, pp=pp, element=element, dropout=activations.get("dropout", True)
    )
    title = (
        f"training {shape.name or 'model'}: {shape.parameter_count:,} parameters, micro-batch {batch}, "
        f"s={activations.get('length') or shape.length}, "
        f"{optimizer}, {precision}, dp={dp} (ZeRO {stage}), tp={tp}, pp={pp}"
    )
    return Terms([*states, *layer, *ends], title=title)


def kv_cache(shape: Shape, batch: int, *, length: int | None = None, element: int = 2) -> Terms:
    """Keys and values that generation keeps: 2 L s b kv numbers. Grouped queries keep kv_heads, not heads."""
    s = shape.length if length is None else length
    each = element * s * batch * shape.kv_width
    return Terms(
        [Term("key, value cache", f"{element}sb kv", each, 2 * shape.layers)],
        title=f"cache: b={batch}, s={s}, kv={shape.kv_width}",
    )


def inference_memory(shape: Shape, batch: int, *, length: int | None = None, element: int = 2) -> Terms:
    """Weights and cache: no gradient, no optimiser, nothing kept for a backward."""
    weights = Term("weights", f"{element} P", element, shape.parameter_count)
    title = f"inference {shape.name or 'model'}: b={batch}, s={length or shape.length}, {element} B a number"
    return Terms([weights, *kv_cache(shape, batch, length=length, element=element)], title=title)
