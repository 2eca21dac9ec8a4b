"""Bytes that a rank of a (d, p, t) mesh sends in one step, axis by axis: what decides which axis belongs on which wire.

Tensor parallelism sends activations in every layer, the pipeline once for each boundary, data parallelism sends gradients once a
step. So the first two grow with the tokens of the step, the third with the parameters, and their ratio does not depend on the
number of ranks.

    t:  4 L/p x 2 (t-1)/t x T h        p:  2 x T h        d:  2 (d-1)/d x P/(p t)      numbers, T tokens of one replica
    t over d, two ranks each, the whole batch:  4 L T h / P  ~  T / (3 h)

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 3; rings as in `cost.collectives`.
"""

from fractions import Fraction

from .shape import Shape
from .terms import Term, Terms, exact

__all__ = ["axis_bytes"]


def axis_bytes(
    shape: Shape,
    *,
    tokens: int,
    d: int = 1,
    p: int = 1,
    t: int = 1,
    stage: int = 0,
    layers: int | None = None,
    element: int = 2,
    gradient: int | None = None,
    softmax: int = 4,
) -> dict[str, Terms]:
    """`t`, `p` and `d` -> what a rank of `stage` (one stage a rank) sends along that axis in a step, line by line, in bytes.

    tokens: of one replica in the whole step.  layers: of this stage (None: L/p).  element: bytes of an activation, gradient: of a
    gradient (None: the same), softmax: of a number of the loss.  Sizes that t divides; no sequence parallelism (which sends the
    same along t, and 1/t along p), every rank of t sends its copy of an activation on, and gradients are summed by rings.
    ValueError for a stage that there is not.
    """
    for word, value in (("d", d), ("p", p), ("t", t)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{word} is {value!r}; it is a whole number of at least 1")
    if not 0 <= stage < p:
        raise ValueError(f"stage {stage} of {p}; allowed: 0 to {p - 1}")
    gradient, here = gradient or element, exact(Fraction(shape.layers, p)) if layers is None else layers
    first, last, h = stage == 0, stage == p - 1, shape.width
    activation = tokens * h * element

    def ring(name: str, formula: str, nbytes, n: int, count=1) -> Term:
        return Term(name, f"2 (n-1)/n {formula}", exact(Fraction(2 * (n - 1), n) * nbytes), count)

    along_t = [ring("layers: 2 forward, 2 backward", "T h", activation, t, exact(4 * here))]
    if first:
        along_t.append(ring("token table, forward", "T h", activation, t))
    if last:
        along_t.append(ring("head, backward", "T h", activation, t))
        along_t.append(ring("loss", "3 T", 3 * tokens * softmax, t))
    table = exact(Fraction(shape.vocabulary * h, t))
    along_p = [Term("activations", "T h", activation * (not last)), Term("gradients", "T h", activation * (not first))]
    if shape.tied and p > 1 and (first or last):
        along_p.append(Term("tied table", "V h/t", table * gradient))
    ends = {term.name: term.total for term in shape.end_parameters(t)}
    held = here * shape.layer_parameters(t).total
    held += (ends["token embedding"] + ends.get("positions", 0)) * first
    held += (ends["last norm"] + (ends["output head"] if not shape.tied else table * (p > 1))) * last
    along_d = [ring("parameters of the rank", "P", exact(held * gradient), d)]
    where = f"stage {stage} of {p}, {tokens:,} tokens"
    return {axis: Terms(lines, title=f"sent along {axis}: {where}") for axis, lines in
            (("t", along_t), ("p", along_p), ("d", along_d))}  # fmt: skip
