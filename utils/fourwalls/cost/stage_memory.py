"""Memory of every stage of a pipeline, colour by colour, and what each way of saving it costs in bytes sent and in FLOPs.

Parameters differ by stage, since the ends hold the tables; activations differ more, since the schedule lets the first stage run
ahead; logits are the last stage's alone. So each stage has its own bar, and the tallest one decides whether a training runs.

    stage i holds  states_i / ZeRO  +  (L/p) x in flight_i x activations of a layer  +  ends_i

Reference: Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5, Table 2; Rajbhandari et al. 2020 (arXiv:1910.02054),
section 5; Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from .bubble import activations_held
from .flops import RECOMPUTE, iteration_flops, layer_ops
from .memory import layer_activations, state_memory
from .shape import Shape, nearest_multiples
from .terms import Term, Terms, exact

__all__ = [
    "PARTS",
    "SCHEDULES",
    "SEQUENCE",
    "Training",
    "extra_flops",
    "gated_width",
    "stage_memory",
    "stage_parameters",
    "wire_bytes",
]

PARTS = ("parameters", "gradients", "optimizer", "activations", "recomputed", "logits")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
SEQUENCE = ("off", "gather again", "keep")
_ELEMENT = {"fp32": 4, "mixed": 2, "mixed-fp32-gradients": 2, "half": 2}


@dataclass(frozen=True)
class Training:
    """How a model is trained: batch (sequences of a step, all ranks), micro-batch, length, ranks of each axis, and the switches.

    sequence: one of SEQUENCE.  chunks: of a rank, for the interleaved schedule.  flash: the attention core in tiles, so that no
    (s, s) matrix is kept.  ValueError, with the nearest legal value, for what cannot be shared.
    """

    shape: Shape
    batch: int
    microbatch: int = 1
    length: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    sequence: str = "off"
    recompute: str = "none"
    precision: str = "mixed"
    schedule: str = "1f1b"
    chunks: int = 2
    flash: bool = False
    dropout: bool = True

    def __post_init__(self):
        choices = {
            "sequence": SEQUENCE,
            "recompute": RECOMPUTE,
            "precision": _ELEMENT,
            "schedule": SCHEDULES,
            "zero": (0, 1, 2, 3),
        }
        for word, legal in choices.items():
            value = getattr(self, word)
            if value not in legal:
                raise ValueError(f"{word} is {value!r}; allowed: {', '.join(map(str, legal))}")
        for word in ("batch", "microbatch", "tp", "pp", "dp", "chunks"):
            value = getattr(self, word)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{word} is {value!r}; it is a whole number of at least 1")
        s, parts = self.shape, self.pp * (self.chunks if self.looped else 1)
        object.__setattr__(self, "length", self.length or s.length)
        shares = [("batch", self.batch, self.dp * self.microbatch, "dp x micro-batch"), ("layers", s.layers, parts, "stages")]
        names = {"heads": s.heads, "kv_heads": s.kv_heads, "ff": s.ff, "vocabulary": s.vocabulary}
        shares += [(word, value, self.tp, "tp") for word, value in names.items()]
        shares += [("length", self.length, self.tp, "tp")] if self.sequence != "off" else []
        for word, value, by, what in shares:
            if value % by:
                raise ValueError(
                    f"{word} {value} cannot be shared by {what} {by}; nearest legal {word}: {nearest_multiples(value, by)}"
                )

    @property
    def looped(self) -> bool:
        """Interleaved on more than one stage: each rank holds `chunks` pieces of the model."""
        return self.schedule == "interleaved" and self.pp > 1 and self.chunks > 1

    @property
    def microbatches(self) -> int:
        """Of a step, for each pipeline."""
        return self.batch // (self.dp * self.microbatch)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def element(self) -> int:
        """Bytes of a number of an activation."""
        return _ELEMENT[self.precision]

    def in_flight(self, stage: int) -> Fraction:
        """Micro-batches whose activations a stage holds at its peak, in units of its whole share of one."""
        if not self.looped:
            name = "1f1b" if self.schedule == "interleaved" else self.schedule
            return Fraction(activations_held(name, self.pp, self.microbatches, rank=stage))
        if self.microbatches % self.pp:
            raise ValueError(
                f"interleaved stages take whole groups of {self.pp} micro-batches; there are {self.microbatches}, nearest: "
                f"{nearest_multiples(self.microbatches, self.pp)}"
            )
        chunks = min((self.chunks - 1) * self.pp + 2 * (self.pp - 1 - stage) + 1, self.chunks * self.microbatches)
        return Fraction(chunks, self.chunks)

    def turned(self, **change) -> "Training":
        """The same with some switches turned."""
        return replace(self, **change)


def gated_width(width: int) -> int:
    """f of a gated MLP with as many parameters as 4h without a gate: 8h/3, up to a multiple of 256. Touvron et al. 2023."""
    return -(-8 * width // (3 * 256)) * 256


def stage_parameters(training: Training, stage: int) -> int | Fraction:
    """Parameters on one rank of a stage: L/p layers; the first holds the tables too, the last the norm and the output head (its
    own copy of the table, where it is tied and there is more than one stage)."""
    shape, t, p = training.shape, training.tp, training.pp
    ends = {term.name: term.total for term in shape.end_parameters(t)}
    mine = shape.layer_parameters(t).total * Fraction(shape.layers, p)
    if stage == 0:
        mine += ends["token embedding"] + ends.get("positions", 0)
    if stage == p - 1:
        mine += ends["last norm"] + ends.get("output head", ends["token embedding"] if p > 1 else 0)
    return exact(mine)


def stage_memory(training: Training, stage: int) -> Terms:
    """The lines of one stage's bar, in bytes on each of its ranks, named by PARTS ("recomputed" and "logits" where they are).

    activations: of the layers, for all micro-batches in flight, and the embedding's dropout mask on the first stage. recomputed:
    what one layer needs again while its backward runs, which the papers leave out. logits: last norm, output head, and logits in
    float32, on the last stage (every micro-batch's with GPipe, else one's).
    """
    c = training
    if not 0 <= stage < c.pp:
        raise ValueError(f"stage {stage} of {c.pp}; allowed: 0 to {c.pp - 1}")
    states = state_memory(1, optimizer="adam", precision=c.precision, dp=c.dp, stage=c.zero).times(stage_parameters(c, stage))
    sums = {"parameters": Fraction(0), "gradients": Fraction(0), "optimizer": Fraction(0)}
    for term in states:
        sums[{"weights": "parameters", "gradients": "gradients"}.get(term.name, "optimizer")] += term.total
    held, cut = c.in_flight(stage), c.sequence != "off"
    layer = _layer(c).total
    lines = [Term(name, f"ZeRO {c.zero} over {c.dp}", exact(total)) for name, total in sums.items()]
    activations = layer * Fraction(c.shape.layers, c.pp) * held
    tokens, h, e = c.microbatch * c.length, c.shape.width, c.element
    share = c.tp if cut else 1
    if stage == 0 and c.dropout:
        activations += Fraction(tokens * h, share) * (min(2 * c.pp - 1, c.microbatches) if c.looped else held)
    lines.append(Term("activations", f"{float(held):g} in flight x {c.shape.layers}/{c.pp} layers", exact(activations)))
    if c.recompute != "none":
        again = _layer(c.turned(recompute="none")).total - layer
        lines.append(Term("recomputed", "one layer, while its backward runs", exact(again)))
    if stage == c.pp - 1:
        ends = Fraction(2 * e * tokens * h, share) + Fraction(4 * tokens * c.shape.vocabulary, c.tp)
        count = c.microbatches if c.schedule == "gpipe" else 1
        lines.append(Term("logits", "(4h + 4V/t) s b", exact(ends), count))
    return Terms(lines, title=f"stage {stage} of {c.pp}: a rank holds")


def _layer(training: Training) -> Terms:
    c = training
    return layer_activations(
        c.shape, c.microbatch, length=c.length, tp=c.tp, sequence_parallel=c.sequence != "off", regather=c.sequence != "keep",
        recompute=c.recompute, flash=c.flash, dropout=c.dropout, element=c.element,
    )  # fmt: skip


def wire_bytes(training: Training, stage: int = 0) -> Mapping[str, int | Fraction]:
    """Bytes that one rank of a stage sends in a step, by axis: {"tensor", "pipeline", "data"}. Rings; the ends' sums left out.

    tensor: 4 all-reduces of s b h for each layer and micro-batch (or as many bytes in gathers and scatters; a quarter more to
    gather again), and two more where the layer is computed again; without dropout, whose mask waits behind it, nobody waits for
    the layer's last sum, and the second run ends before it. pipeline: s b h at each boundary (1/t of it with sequence
    parallelism). data: an all-reduce's bytes for ZeRO 0 and 1; with 2 and 3 gradients are scattered in every backward, with 3
    parameters are gathered twice for each micro-batch.
    """
    c = training
    t, m, chunks = c.tp, c.microbatches, c.chunks if c.looped else 1
    whole = c.microbatch * c.length * c.shape.width * c.element
    half = Fraction(t - 1, t) * whole  # a gather or a scatter
    halves = 8 + 2 * (c.sequence == "gather again")
    if c.recompute == "full":
        halves += 4 if c.dropout else 3 - (c.sequence == "off")  # the last sum is an all-reduce, or half of one
    layers = Fraction(c.shape.layers, c.pp)
    sends = 0 if c.pp == 1 else 2 * chunks - (stage == 0) - (stage == c.pp - 1)  # forward and backward, but at the model's ends
    boundary = Fraction(whole, t if c.sequence != "off" else 1) * sends * m
    lines = {term.name: term.total for term in state_memory(1, precision=c.precision)}
    p, n = stage_parameters(c, stage), c.dp
    scatters, gathers = {0: (1, 1), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[c.zero]
    gathered = lines["gradients"] if c.zero == 0 else lines["weights"]
    data = Fraction(n - 1, n) * p * (scatters * lines["gradients"] + gathers * gathered)
    return {"tensor": exact(layers * m * halves * half), "pipeline": exact(boundary), "data": exact(data)}


def extra_flops(training: Training) -> float:
    """FLOPs of a step that are done only because something was forgotten, as a share of those without recomputation.

    Attention in tiles forgets too: its backward makes the scores once more (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
    """
    c = training
    plain = iteration_flops(c.shape, c.batch, length=c.length)
    done = iteration_flops(c.shape, c.batch, length=c.length, recompute=c.recompute)
    if c.flash:
        done += c.shape.layers * next(op.forward for op in layer_ops(c.shape, c.batch, c.length) if op.name == "scores")
    return done / plain - 1
