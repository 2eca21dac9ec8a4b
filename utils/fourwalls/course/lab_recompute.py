"""Lab 4, recompute: forget what a function kept, compute it again in backward, and decide what to forget.

What is asked for, this class's twist (which segments are longer, whether the last one is forgotten, which part of a block, what a
plan counts), and how `checkpoint` and `plan` are judged. The two that forget more than one function are judged in
lab_recompute_layers.py.

    kept: inputs instead of everything        price: one more forward

Reference: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198) for selective recomputation.
"""

import random
from dataclasses import replace

import torch

from .drivers_recompute import DEPTH, deep
from .expect import Wrong, close, draw, expect, judged, own_products, tensor
from .lab_recompute_layers import (
    segments_kept,
    segments_order,
    segments_peak,
    segments_values,
    selective_calls,
    selective_kept,
    selective_values,
    weighed,
)
from .problem import Problem, Session, Spec, Target
from .process_memory import Pause

__all__ = ["problems", "twist"]

FORBIDDEN = tuple(
    f"fourwalls.{name}"
    for name in ("memory", "parallel", "train", "plan", "bench", "course.lab_recompute", "course.lab_recompute_layers")
)
DRIVER = "fourwalls.course.drivers_recompute."
PLAIN = {"longer": "first", "tail": False, "part": "attend", "counted": "kept"}
LIMIT = 4.0  # seconds of a run


def twist(seed: int | None) -> dict:
    """What this class forgets."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"recompute {seed}")
    choices = {"longer": ("first", "last"), "tail": (False, True), "part": ("attend", "mlp"), "counted": ("kept", "both")}
    return {name: dice.choice(options) for name, options in choices.items()}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    tail = "The last segment is not forgotten: backward begins there." if t["tail"] else "The last segment is forgotten, too."
    part = "the attention core, block.attend," if t["part"] == "attend" else "the wide part, block.mlp,"
    counted = "the bytes of all layers that are kept"
    if t["counted"] == "both":
        counted += ", and those of the largest one that is forgotten (it is there again for a moment),"
    made = [
        Problem(
            "recompute.checkpoint",
            Spec(
                "Forget it, and compute it again",
                "def checkpoint(fn, *xs):",
                (
                    "Return fn(*xs), a tensor, and keep nothing of what fn computes but that; in backward, run fn again. xs are",
                    "tensors, some of whole numbers, some without gradient, perhaps all. fn may use weights that are not among",
                    "xs: they get their gradient all the same. It may draw random numbers: the gradient is that of the first",
                    "run, and whoever draws after backward gets what would have come without you.",
                ),
                minutes=35,
                difficulty=4,
                importance=5,
            ),
            (
                judged("values and gradients", _gradients, ("plain", "ids")),
                judged("dropout", _gradients, ("dropout",)),
                judged("frozen inputs", _gradients, ("frozen", "gate")),
                judged("saved bytes", _kept),
                judged("forwards", _forwards),
            ),
            6,
            (Target("bytes after forward", "those of the result", "inputs are there anyway"), Target("runs of fn", "2")),
            driver=DRIVER + "checkpointed",
        ),
        Problem(
            "recompute.run_segments",
            Spec(
                "A chain in segments",
                "def run_segments(layers, x, k):",
                (
                    "layers: functions of one tensor. Run x through all of them, in k segments (1 to len(layers)) of consecutive",
                    "layers, each of which keeps only its input. Where k does not divide, the "
                    f"{t['longer']} segments are one layer longer.",
                    f"{tail} Use your checkpoint.",
                ),
                minutes=15,
                difficulty=2,
                importance=5,
            ),
            (
                judged("values and gradients", segments_values),
                judged("which layers run, and when", segments_order),
                judged("saved bytes", segments_kept),
                judged("peak in backward", segments_peak),
            ),
            5,
            (
                Target("bytes after forward", "one tensor a segment, within 5%"),
                Target("runs of a layer", "at most 2"),
                Target("peak", "that and one segment's activations"),
            ),
            driver=DRIVER + "segmented",
        ),
        Problem(
            "recompute.selective",
            Spec(
                "Only the part that is large and cheap",
                "def selective(block):",
                (
                    "block has four parts: project(x) gives q, k, v; attend(q, k, v); join(mixed); mlp(h). Return a function of",
                    "x that gives h + block.mlp(h) with h = x + join(attend(*project(x))), and forgets what is inside of",
                    f"{part} and nothing else.",
                ),
                minutes=15,
                difficulty=2,
                importance=4,
            ),
            (
                judged("values and gradients", selective_values),
                judged("what runs again", selective_calls),
                judged("saved bytes", selective_kept),
            ),
            4,
            (Target("bytes after forward", "all, less the inside of that part, within 5%"), Target("runs of the others", "1")),
            driver=DRIVER + "selected",
        ),
        Problem(
            "recompute.plan",
            Spec(
                "What to forget?",
                "def plan(nbytes, flops, budget):",
                (
                    "Layer i keeps nbytes[i] bytes unless it is forgotten, and costs flops[i] to compute again; all are whole",
                    f"numbers above 0. Return a list of bools, True where a layer is forgotten, so that {counted}",
                    "fit into budget, and the flops of those that are forgotten are as few as they can be. budget is what the",
                    "states leave, perhaps less than nothing: raise ValueError where no plan fits. There may be 40 layers.",
                ),
                minutes=20,
                difficulty=3,
                importance=3,
            ),
            (
                judged("fits the budget", _fits),
                judged("least work", _least),
                judged("nothing fits", _impossible),
                judged("many layers", _many),
            ),
            5,
            (Target("extra flops", "the fewest of all 2^L plans"),),
            driver=DRIVER + "planned",
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, twist=t) for p in made}


# --- checkpoint ---------------------------------------------------------------------------------------------------------
def _case(s: Session, kind: str, rows: int, width: int):
    """(kind of the driver, tensors, which need a gradient, gradient of the result)."""
    tensors = [draw(s, width, width) / width**0.5, draw(s, rows, width)]
    needs = [True, kind not in ("frozen", "gate")]
    if kind == "ids":
        tensors.append(torch.tensor([s.dice.randrange(rows) for _ in range(rows + 2)]))
        needs.append(False)
    if kind == "gate":  # x and the gate, both frozen
        tensors.append(draw(s, rows, width))
        needs.append(False)
    return kind, tensors, needs, draw(s, rows + 2 * (kind == "ids"), width)


def _checkpointed(s: Session, kind, rows=5, width=7, weigh=None):
    """(what came, what is right: y, gradients, random numbers afterwards)."""
    if (kind, rows) not in s.remembered:
        kind, tensors, needs, c = _case(s, kind, rows, width)
        seed, sizes = s.dice.randrange(2**31), [s.dice.randrange(2, 6) for _ in range(3)]
        told = s.run(sizes, kind, tensors, needs, c, seed, limit=LIMIT, each=weigh).values[0]
        leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            y = deep(kind, *leaves)
            torch.rand(3)
            y.backward(c)
            after = torch.rand(4)
        s.remembered[kind, rows] = told, (y.detach(), [leaf.grad for leaf in leaves], after), sizes
    return s.remembered[kind, rows]


def _gradients(s: Session, kinds):
    for kind in kinds:
        _same(kind, *_checkpointed(s, kind)[:2])


def _same(kind, told, exact):
    y, grads, after = exact
    close(tensor(told["y"], y.shape, torch.float64, "the result"), y, 1e-12, f"{kind}: the result")
    names = ["a weight that fn uses", "x", "the second input"]
    for name, found, exact in zip(names, told["grads"], grads, strict=False):
        where = f"{kind}: the gradient of {name}"
        if exact is None:
            expect(found is None, f"{where} is there, and nobody asked for it")
            continue
        hint = "no input needs a gradient: who tells autograd that the result does?" if kind in ("frozen", "gate") else ""
        expect(found is not None, f"{where} is missing", hint)
        hint = "equal without dropout? What differed before the second run?" if kind == "dropout" else "compare with fn alone"
        close(tensor(found, exact.shape, torch.float64, where), exact, 1e-11 * (1 + exact.abs().max()), where, hint)
    hint = "how many random numbers were drawn, and how many would have been?"
    expect(torch.equal(told["after"], after), f"{kind}: random numbers drawn after backward are others", hint)


def _kept(s: Session):
    told, (y, _, _), sizes = _checkpointed(s, "plain", rows=128, width=128)
    own_products(told["seen"], sizes)
    ratio = told["kept"] / y.nbytes
    said = f"{told['kept']:,} bytes live after forward: {ratio:.2f} times the result"
    expect(ratio <= 1.05, said, "who still holds what fn computed? Look for what autograd saved on the way")
    pause = Pause(s.apart.pid)
    told, exact, _ = _checkpointed(s, "plain", rows=32768, width=32, weigh=pause)
    _same("plain", told, exact)
    size = exact[0].nbytes
    return f"{said}; {weighed(pause, 2 * size, (DEPTH - 1) * size)}"


def _forwards(s: Session):
    for kind in ("plain", "dropout"):
        told, _, _ = _checkpointed(s, kind)
        first, runs = told["forward calls"], len(told["calls"])
        expect(first == 1, f"{kind}: in forward fn ran {_times(first)}, target once")
        hint = "each gradient by a run of its own?" if runs > 2 else "where does backward take from what it needs?"
        expect(runs == 2, f"{kind}: in all fn ran {_times(runs)}, target twice", hint)


def _times(count: int) -> str:
    """How often, in words."""
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


# --- plan ---------------------------------------------------------------------------------------------------------------
def _cost(s: Session, nbytes, forgotten) -> int:
    """Bytes that a plan needs."""
    kept = sum(b for b, gone in zip(nbytes, forgotten, strict=True) if not gone)
    again = max((b for b, gone in zip(nbytes, forgotten, strict=True) if gone), default=0)
    return kept + (again if s.twist["counted"] == "both" else 0)


def fewest(nbytes, flops, budget, counted) -> int | None:
    """The fewest flops of all plans that fit, by dynamic programming over bytes; None where nothing fits."""
    best = None
    for room in sorted({0, *nbytes}) if counted == "both" else [max(nbytes)]:
        must = [k for k, b in enumerate(nbytes) if b > room]  # kept, as the largest that is forgotten is `room`
        left = budget - (room if counted == "both" else 0) - sum(nbytes[k] for k in must)
        if left < 0:
            continue
        saved = [0] * (left + 1)  # the most flops that need not be done again, by bytes
        for k, b in enumerate(nbytes):
            if b <= room:
                for at in range(left, b - 1, -1):
                    saved[at] = max(saved[at], saved[at - b] + flops[k])
        extra = sum(f for k, f in enumerate(flops) if k not in must) - saved[left]
        best = extra if best is None else min(best, extra)
    return best


def _drawn(s: Session, layers: int, most: int = 30):
    """A case that fits, in which no layer keeps more than `most`."""
    while True:
        nbytes = [s.dice.randrange(1, most + 1) for _ in range(layers)]
        flops = [s.dice.randrange(1, 50) for _ in range(layers)]
        budget = s.dice.randrange(sum(nbytes) // 3, sum(nbytes) * 3 // 4 + 1)
        if fewest(nbytes, flops, budget, s.twist["counted"]) is not None:
            return nbytes, flops, budget


def _plans(s: Session, cases):
    """For each case (case, plan, where), in the right form."""
    found = []
    for case, value in zip(cases, s.run([list(case) for case in cases], limit=LIMIT).values[0], strict=True):
        nbytes, _, budget = case
        where = f"{len(nbytes)} layers, budget {budget}"
        expect(not isinstance(value, str), f"{where}: ValueError, but a plan fits", f"nbytes {nbytes}")
        is_list = isinstance(value, (list, tuple)) and len(value) == len(nbytes)
        expect(is_list, f"{where}: wanted is a list of {len(nbytes)} bools")
        expect(all(type(v) is bool for v in value), f"{where}: what is in the list is no bool")
        found.append((case, value, where))
    return found


def _known(s: Session):
    """Cases with the learner's plans: by hand, at random, and one in which everything may be kept."""
    if "plans" not in s.remembered:
        budget = 11 if s.twist["counted"] == "both" else 10
        cases = [([6, 5, 5], [7, 5, 5], budget), ([3], [5], 3), *(_drawn(s, n) for n in (4, 8, 12)), ([2, 4, 3], [1, 1, 1], 9)]
        s.remembered["plans"] = _plans(s, cases)
    return s.remembered["plans"]


def _fits(s: Session):
    for (nbytes, _, budget), value, where in _known(s):
        cost = _cost(s, nbytes, value)
        expect(cost <= budget, f"{where}: {cost} bytes are needed", f"nbytes {nbytes}; forgotten are {_places(value)}")


def _places(value):
    return ", ".join(str(k) for k, gone in enumerate(value) if gone) or "none"


def _least(s: Session):
    for case, value, where in _known(s):
        nbytes, flops, _ = case
        extra = sum(f for f, gone in zip(flops, value, strict=True) if gone)
        hint = f"nbytes {nbytes}, flops {flops}; you forget {_places(value)}: which exchange of layers would still fit?"
        expect(extra <= fewest(*case, s.twist["counted"]), f"{where}: {extra} flops are done again, and fewer would do", hint)


def _impossible(s: Session):
    case = ([5, 9, 4], [1, 2, 3], 8 if s.twist["counted"] == "both" else -1)
    (value,) = s.run([list(case)], limit=LIMIT).values[0]
    expect(isinstance(value, str), f"budget {case[2]}: no ValueError", "how many bytes are needed at least?")


def _many(s: Session):
    ((case, value, where),) = _plans(s, [_drawn(s, 40, 12)])
    extra = sum(f for f, gone in zip(case[1], value, strict=True) if gone)
    right = fewest(*case, s.twist["counted"])
    if _cost(s, case[0], value) > case[2] or extra > right:
        raise Wrong(f"{where}: it does not fit, or fewer flops would do", "the small cases pass: what is other here?")
