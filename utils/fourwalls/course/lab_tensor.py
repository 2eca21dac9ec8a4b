"""Lab 5, tensor parallelism: the two conjugate functions, column and row products, a loss over a cut vocabulary.

Outputs and every gradient, of input, weight and bias, are compared with one device in float64; the Trace tells how much was
sent, a meter in the learner's process how much was multiplied. A twist turns the layout of the weights, or asks for another
reduction of the loss.

    an MLP sends  2 all-reduces of (tokens x h), one forward and one backward:   2 x 2 (t - 1) S bytes in all

Reference: Shoeybi et al. 2019 (arXiv:1909.08053).
"""

import random
from dataclasses import replace

import torch
from torch.nn import functional

from ..cost.hardware import uniform
from ..viz.timeline import plot_timeline
from .arrivals import must_use
from .expect import judged
from .problem import Check, Finding, Problem, Session, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = ("fourwalls.parallel", "fourwalls.train", "fourwalls.plan", "fourwalls.bench", "fourwalls.collectives.autograd")
DRIVER = "fourwalls.course.drivers_tensor."
PLAIN = {"layout": "out, in", "reduction": "mean"}
WIRE = uniform(1e-6, 1e10)
CLOSE = 1e-11  # float64, some hundred terms


def twist(seed: int | None) -> dict:
    """What this class's layers are like."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"tensor {seed}")
    return {"layout": dice.choice(("out, in", "in, out")), "reduction": dice.choice(("mean", "sum"))}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    product = "y = x w^T + b, w as (out, in)" if t["layout"] == "out, in" else "y = x w + b, w as (in, out)"
    column_w, row_w = ("(f/t, h)", "(h, f/t)") if t["layout"] == "out, in" else ("(h, f/t)", "(f/t, h)")
    sums = "You may use fw.collectives.ring.all_reduce(comm, x), or the all_reduce that you wrote in lab 1."
    made = [
        Problem(
            "tensor.copy_in",
            Spec(
                "Into the parallel part: the same x for everybody",
                "def copy_in(comm, x):",
                ("Return x; its gradient is the sum of what the ranks make of it. A torch.autograd.Function.", sums),
                minutes=15,
                difficulty=2,
                importance=5,
            ),
            (Check("output", _out("copy_in")), Check("gradient", _grad("copy_in")), *_costs("copy_in")),
            3,
            (Target("bytes forward", "0"), Target("bytes backward, all ranks", "2 (t - 1) S")),
            driver=DRIVER + "conjugate",
        ),
        Problem(
            "tensor.sum_out",
            Spec(
                "Out of it: one sum",
                "def sum_out(comm, x):",
                ("Return the sum of the ranks' x. Everybody's gradient is the one that arrives, as it is.", sums),
                minutes=10,
                difficulty=2,
                importance=5,
            ),
            (Check("output", _out("sum_out")), Check("gradient", _grad("sum_out")), *_costs("sum_out")),
            3,
            (Target("bytes forward, all ranks", "2 (t - 1) S"), Target("bytes backward", "0")),
            driver=DRIVER + "conjugate",
        ),
        Problem(
            "tensor.column",
            Spec(
                "A product cut by columns of its output",
                "def column(comm, x, w, b):",
                (
                    f"{product}. x is (tokens, h), the same on every rank; w is this rank's {column_w}, b its (f/t,).",
                    "Return this rank's (tokens, f/t). The gradient of x is complete on every rank.",
                ),
                minutes=20,
                difficulty=2,
                importance=5,
            ),
            _of_layer("column"),
            4,
            (Target("bytes of all ranks", "2 (t - 1) S of x, backward"), Target("products a rank", "1/t of one device's")),
            driver=DRIVER + "layer",
        ),
        Problem(
            "tensor.row",
            Spec(
                "A product cut by rows of its input",
                "def row(comm, x, w, b):",
                (
                    f"{product}. x is this rank's (tokens, f/t), w its {row_w}; b is (h,), the same on every rank.",
                    "Return the complete (tokens, h) on every rank.",
                ),
                minutes=20,
                difficulty=2,
                importance=5,
            ),
            _of_layer("row"),
            4,
            (Target("bytes of all ranks", "2 (t - 1) S of y, forward"), Target("products a rank", "1/t of one device's")),
            driver=DRIVER + "layer",
        ),
        Problem(
            "tensor.vocab_loss",
            Spec(
                "Cross-entropy without ever holding all logits",
                "def vocab_loss(comm, logits, y, first):",
                (
                    "logits is (tokens, V_r): the scores of the ids first, ..., first + V_r - 1. V_r differs between ranks.",
                    f"y is (tokens,), ids of the whole vocabulary. Return the {t['reduction']} of the cross-entropy,",
                    "the same on every rank. The gradient of logits is that of one device. Scores may be as large as 1000.",
                ),
                minutes=35,
                difficulty=4,
                importance=4,
            ),
            (Check("loss", _vocab("loss")), Check("gradient", _vocab("grad")), *_costs("vocab_loss")),
            6,
            (Target("bytes of all ranks", "at most 3 all-reduces of one number a token: 6 (t - 1) S"),),
            driver=DRIVER + "vocabulary",
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, cluster=WIRE, twist=t, picture=_picture) for p in made}


def _of_layer(name):
    return Check("output", _layer(name, "y")), Check("gradients", _layer(name, "grad")), *_costs(name)


def _costs(name):
    cost = {"column": _layer_cost("column"), "row": _layer_cost("row"), "vocab_loss": _vocab_cost}.get(name, _conjugate_cost)
    return Check("cost", cost), judged("what arrives is used", _arrivals, name)


def _arrivals(s: Session, name):
    """On three ranks, with messages that were altered on the way."""
    case = {"column": _layer_case, "row": _layer_case, "vocab_loss": _vocab_case}.get(name, _conjugate_case)
    args, right = case(s, name, 3)

    def all_right(r, value):
        found = value["values"] if "values" in value else [value["loss" if "loss" in value else "y"], value["grad"]]
        return all(_differs(v, exact, "it", 3, r) is None for v, exact in zip(found, right(r), strict=True))

    must_use(s, all_right, ranks=3, per_rank=args)


# --- helpers ------------------------------------------------------------------------------------------------------------
def _sizes(s: Session):
    """Numbers of ranks, one of them drawn."""
    return 2, 3, 1, s.remembered.setdefault("most", s.dice.choice((4, 6)))


def _draw(s: Session, *shape):
    dice = torch.Generator().manual_seed(s.dice.randrange(2**31))
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def _differs(value, exact, what, t, rank) -> Finding | None:
    """A Finding if `value` is not `exact`; a factor that the learner can recognise is named."""
    if not isinstance(value, torch.Tensor):
        return Finding(False, f"t={t}: rank {rank} gave no {what}")
    if tuple(value.shape) != tuple(exact.shape):
        return Finding(False, f"t={t}: rank {rank}: {what} has shape {tuple(value.shape)}", f"wanted is {tuple(exact.shape)}")
    error = (value - exact).abs().max().item() if exact.numel() else 0.0
    if error <= CLOSE * (1 + exact.abs().max().item()):
        return None
    ratio = (value * exact).sum() / (exact * exact).sum()
    same = bool((value - ratio * exact).abs().max() <= 1e-9)
    hint = f"yours is {ratio:.3f} times one device's" if same else "no multiple of one device's: whose share is missing?"
    if t > 1 and abs(ratio - t) < 1e-6:
        hint += f": which number here is {t}?"
    elif t > 1 and abs(ratio * t - 1) < 1e-6:
        hint += f": who divided by {t}?"
    return Finding(False, f"t={t}: rank {rank}: the {what} is not one device's", hint)


def _first(findings) -> Finding:
    return next((f for f in findings if f is not None), Finding(True))


# --- the conjugate functions --------------------------------------------------------------------------------------------
def _conjugate(s: Session, name, t):
    """(outcome, outputs and gradients that are right) of one run on t ranks."""
    if (t, "run") not in s.remembered:
        args, right = _conjugate_case(s, name, t)
        outcome = s.run(ranks=t, per_rank=args)
        s.remembered[t, "run"] = outcome, list(zip(*map(right, range(t)), strict=True))
    return s.remembered[t, "run"]


def _conjugate_case(s: Session, name, t):
    """(arguments by rank, right(rank) = (output, gradient))."""
    xs = [_draw(s, 4, 3)] * t if name == "copy_in" else [_draw(s, 4, 3) for _ in range(t)]
    cs = [_draw(s, 4, 3) for _ in range(t)] if name == "copy_in" else [_draw(s, 4, 3)] * t
    right = (xs, [sum(cs)] * t) if name == "copy_in" else ([sum(xs)] * t, cs)
    return list(zip(xs, cs, strict=True)), lambda r: (right[0][r], right[1][r])


def _out(name):
    def output(s):
        runs = [(t, *_conjugate(s, name, t)) for t in _sizes(s)]
        return _first(_differs(o.values[r]["y"], right[0][r], "output", t, r) for t, o, right in runs for r in range(t))

    return output


def _grad(name):
    def gradient(s):
        runs = [(t, *_conjugate(s, name, t)) for t in _sizes(s)]
        return _first(_differs(o.values[r]["grad"], right[1][r], "gradient", t, r) for t, o, right in runs for r in range(t))

    return gradient


def _conjugate_cost(s) -> Finding:
    name = s.functions[-1]
    for t in _sizes(s):
        outcome, _ = _conjugate(s, name, t)
        wanted, sent = 2 * (t - 1) * 12 * 8, outcome.trace.bytes_sent()
        if sent != wanted:
            return Finding(False, f"t={t}: {sent:,} bytes in all, target {wanted:,}", "one way is free: which?")
        wrong = [r for r in range(t) if (outcome.values[r]["forward bytes"] > 0) != (name == "sum_out" and t > 1)]
        if wrong:
            return Finding(False, f"t={t}: rank {wrong[0]} sent in the wrong direction", "forward or backward?")
    return Finding(True)


# --- layers -------------------------------------------------------------------------------------------------------------
TOKENS, H, F = 6, 5, 12


def _linear(s, x, w, b):
    return x @ (w.T if s.twist["layout"] == "out, in" else w) + b


def _layers(s: Session, name, t):
    """(outcome, what is right) of one layer on t ranks: y and the gradients of x, w, b by rank."""
    if (t, "run") not in s.remembered:
        args, right = _layer_case(s, name, t)
        s.remembered[t, "run"] = s.run(ranks=t, per_rank=args), [right(r) for r in range(t)]
    return s.remembered[t, "run"]


def _layer_case(s: Session, name, t):
    """(arguments by rank, right(rank) = (y, gradients of x, w and b))."""
    inside, outside = (H, F) if name == "column" else (F, H)
    x, b = _draw(s, TOKENS, inside), _draw(s, outside)
    w = _draw(s, outside, inside) if s.twist["layout"] == "out, in" else _draw(s, inside, outside)
    c = _draw(s, TOKENS, outside)
    leaves = [v.clone().requires_grad_() for v in (x, w, b)]
    y = _linear(s, *leaves)
    (y * c).sum().backward()
    cut_w = 0 if (s.twist["layout"] == "out, in") == (name == "column") else 1
    ws, grad_w = w.chunk(t, cut_w), leaves[1].grad.chunk(t, cut_w)
    if name == "column":
        args = [(x, ws[r], b.chunk(t)[r], c.chunk(t, 1)[r]) for r in range(t)]
        right = [(y.detach().chunk(t, 1)[r], leaves[0].grad, grad_w[r], leaves[2].grad.chunk(t)[r]) for r in range(t)]
    else:
        args = [(x.chunk(t, 1)[r], ws[r], b, c) for r in range(t)]
        right = [(y.detach(), leaves[0].grad.chunk(t, 1)[r], grad_w[r], leaves[2].grad) for r in range(t)]
    return args, lambda r: right[r]


def _layer(name, which):
    words = {"y": ("output",), "grad": ("gradient of x", "gradient of w", "gradient of b")}[which]

    def compare(s):
        runs = [(t, *_layers(s, name, t)) for t in _sizes(s)]
        first = 0 if which == "y" else 1
        return _first(
            _differs(o.values[r]["values"][first + k], right[r][first + k], word, t, r)
            for t, o, right in runs
            for r in range(t)
            for k, word in enumerate(words)
        )

    return compare


def _layer_cost(name):
    def cost(s):
        for t in _sizes(s):
            outcome, _ = _layers(s, name, t)
            wanted, sent = 2 * (t - 1) * TOKENS * H * 8, outcome.trace.bytes_sent()
            if sent != wanted:
                return Finding(False, f"t={t}: {sent:,} bytes in all, target {wanted:,}", "what must every rank know, and when?")
            most = max(value["flops"] for value in outcome.values)
            if most > 6 * TOKENS * H * F / t:
                said = f"t={t}: a rank did {most / (6 * TOKENS * H * F / t):.2f} times its share of the products"
                return Finding(False, said, "which matrix was larger than this rank's part?")
        return Finding(True)

    return cost


# --- the vocabulary -----------------------------------------------------------------------------------------------------
def _vocabulary(s: Session, t):
    if (t, "run") not in s.remembered:
        args, right = _vocab_case(s, "vocab_loss", t)
        s.remembered[t, "run"] = s.run(ranks=t, per_rank=args), (right(0)[0], [right(r)[1] for r in range(t)])
    return s.remembered[t, "run"]


def _vocab_case(s: Session, _, t):
    """(arguments by rank, right(rank) = (loss, gradient))."""
    sizes = [3 + (2 * r) % 5 for r in range(t)]
    scale = 1000.0 if t == 3 else 1.0
    logits, y = _draw(s, TOKENS, sum(sizes)) * scale, torch.tensor([s.dice.randrange(sum(sizes)) for _ in range(TOKENS)])
    leaf = logits.clone().requires_grad_()
    loss = functional.cross_entropy(leaf, y, reduction=s.twist["reduction"])
    loss.backward()
    firsts = [sum(sizes[:r]) for r in range(t)]
    args = [(logits.split(sizes, 1)[r], y, firsts[r]) for r in range(t)]
    grads = leaf.grad.split(sizes, 1)
    return args, lambda r: (loss.detach(), grads[r])


def _vocab(which):
    def compare(s):
        runs = [(t, *_vocabulary(s, t)) for t in _sizes(s)]
        return _first(
            _differs(o.values[r][which], right[0] if which == "loss" else right[1][r], which, t, r)
            for t, o, right in runs
            for r in range(t)
        )

    return compare


def _vocab_cost(s) -> Finding:
    for t in _sizes(s):
        outcome, _ = _vocabulary(s, t)
        wanted, sent = 3 * 2 * (t - 1) * TOKENS * 8, outcome.trace.bytes_sent()
        if sent > wanted:
            said = f"t={t}: {sent:,} bytes in all, target {wanted:,}"
            return Finding(False, said, "how many numbers a token must the ranks share?")
    return Finding(True)


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
