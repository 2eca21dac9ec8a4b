"""What to keep and what to run again: schedules of recomputation as data, and what each costs in bytes and in work.

A chain of steps is reversed from its end. A plan says for each stretch whether its steps are taped (run once, everything that
their backward needs is kept) or forgotten (only the stretch's input is kept, and when backward comes the stretch is run again by
a plan of its own). Every scheme is such a plan: keep all, one by one, segments, square root, Revolve, and planner.py's best.

    n steps in k segments:  k inputs kept, n/k steps taped at a time, every step run twice        least memory at k = sqrt(n)

Reference: Chen et al. 2016 (arXiv:1604.06174); Griewank and Walther 2000, Algorithm 799 (revolve).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Again",
    "Forecast",
    "Step",
    "Tape",
    "Way",
    "cost",
    "forecast",
    "keep_all",
    "revolve",
    "revolve_runs",
    "runs",
    "segments",
    "show",
    "square_root",
    "steps_of",
]


class Way(NamedTuple):
    """One way to tape a step: bytes kept beside its input and output, and what its backward costs beyond the usual."""

    name: str
    kept: int
    extra: float = 0.0


class Step(NamedTuple):
    """One step of a chain. forward: its cost (seconds or FLOPs). output: bytes. ways: how it can be taped, the usual one first.

    saves_output: its backward needs its output too, as Tanh's does. forward_extra, backward_extra: bytes alive for a moment in
    its forward (beside input, output and kept) and in its backward (beside those and the output's gradient).
    """

    forward: float
    output: int
    ways: tuple[Way, ...] = (Way("all", 0),)
    saves_output: bool = False
    forward_extra: int = 0
    backward_extra: int = 0


class Tape(NamedTuple):
    """Step number `step` is run once and taped, in the way with that number."""

    step: int
    way: int = 0


class Again(NamedTuple):
    """These steps are run and forgotten; in backward they are run again, by `plan`."""

    plan: tuple


# --- plans ------------------------------------------------------------------------------------------------------------
def keep_all(n: int) -> tuple:
    """No recomputation: n steps, all taped."""
    return tuple(Tape(k) for k in range(n))


def segments(n: int, pieces: int, *, wrap_last: bool = True) -> tuple:
    """n steps in `pieces` stretches of nearly equal length, each forgotten and then run again. wrap_last False tapes the last one
    at once, since backward begins there. pieces = n is one by one, "full" recomputation.
    """
    if not isinstance(pieces, int) or isinstance(pieces, bool) or not 1 <= pieces <= n:
        raise ValueError(f"{n} steps in {pieces!r} segments; allowed: 1 to {n}")
    edges = [round(k * n / pieces) for k in range(pieces + 1)]
    parts = [tuple(Tape(k) for k in range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    return tuple(Again(part) for part in parts[: -1 if not wrap_last else None]) + (() if wrap_last else parts[-1])


def square_root(n: int) -> tuple:
    """About sqrt(n) segments: the number of kept inputs plus the length of one segment is least. Chen et al. 2016
    (arXiv:1604.06174).
    """
    return segments(n, min(range(1, n + 1), key=lambda k: (k + math.ceil(n / k), abs(k - math.sqrt(n)))))


def revolve(n: int, slots: int) -> tuple:
    """The fewest forward runs of n equal steps, with room for the chain's input, `slots` more steps' inputs, and one taped step.

    With no slot every step is reached from the start again: n (n + 1) / 2 runs. Griewank and Walther 2000.
    """
    if slots < 0 or n < 1:
        raise ValueError(f"{n} steps and {slots} slots; at least 1 step and 0 slots")
    table: dict[tuple[int, int], tuple[int, int]] = {}  # (length, slots) -> (runs, length of the forgotten stretch)
    for length in range(1, n + 1):
        for c in range(slots + 1):
            best = (1, 0)
            if length > 1:
                best = (length + table[length - 1, c][0], length - 1)  # the last step's input needs no slot
            if c:
                best = min([best] + [(k + table[length - k, c - 1][0] + table[k, c][0], k) for k in range(1, length - 1)])
            table[length, c] = best

    def build(first: int, length: int, c: int) -> tuple:
        k = table[length, c][1]
        if not k:
            return (Tape(first),)
        right = (Tape(first + k),) if k == length - 1 else build(first + k, length - k, c - 1)
        return (Again(build(first, k, c)), *right)

    return build(0, n, slots)


def revolve_runs(n: int, slots: int) -> int:
    """Forward runs of `revolve(n, slots)` in closed form: (r + 1) n - C(s + r, r - 1), with s = slots + 1 and the least r for
    which C(s + r, s) >= n.
    """
    s, r = slots + 1, 0
    while math.comb(s + r, s) < n:
        r += 1
    return (r + 1) * n - (math.comb(s + r, r - 1) if r else 0)


def steps_of(plan: Sequence) -> list[int]:
    """The steps of a plan in order. ValueError where it is no plan, or its steps do not follow each other."""
    found = []
    for node in plan:
        if isinstance(node, Tape):
            found.append(node.step)
        elif isinstance(node, Again) and node.plan:
            found += steps_of(node.plan)
        else:
            raise ValueError(f"a plan is a tuple of Tape(step) and Again(plan) with something in it; found {node!r}")
    if found != list(range(found[0] if found else 0, (found[0] if found else 0) + len(found))):
        raise ValueError(f"the plan's steps {found} do not follow each other")
    return found


def show(plan: Sequence) -> str:
    """A plan as text: `0 1` are taped, `[2 3]` are forgotten and run again; a way that is not the usual one follows a dot."""
    words = [
        f"{node.step}" + (f".{node.way}" if node.way else "") if isinstance(node, Tape) else f"[{show(node.plan)}]"
        for node in plan
    ]
    return " ".join(words)


# --- what a plan costs ------------------------------------------------------------------------------------------------
def runs(plan: Sequence) -> list[int]:
    """How often each step's forward is run. Running again ends as soon as nothing more is owed, so a forgotten stretch at the end
    of another is not run through for nothing.
    """
    count = dict.fromkeys(steps_of(plan), 0)

    def sweep(nodes, whole):
        for place, node in enumerate(nodes):
            if isinstance(node, Tape):
                count[node.step] += 1
            elif whole or place < len(nodes) - 1:
                sweep(node.plan, True)

    def reverse(nodes):
        for node in reversed(nodes):
            if isinstance(node, Again):
                sweep(node.plan, False)
                reverse(node.plan)

    sweep(plan, True)
    reverse(plan)
    return list(count.values())


def cost(chain: Sequence[Step], plan: Sequence) -> float:
    """All forward work under the plan, in the chain's unit, with what the chosen ways add in backward."""
    return sum(n * step.forward for n, step in zip(runs(plan), chain, strict=True)) + sum(
        chain[node.step].ways[node.way].extra for node in _taped(plan)
    )


def _taped(plan: Sequence) -> Iterator[Tape]:
    for node in plan:
        if isinstance(node, Tape):
            yield node
        else:
            yield from _taped(node.plan)


class Forecast(NamedTuple):
    """Bytes of activations by plan: kept after forward, and the most at any moment; `curve`: (what, bytes) moment by moment."""

    kept: int
    peak: int
    curve: list[tuple[str, int]]


def forecast(chain: Sequence[Step], plan: Sequence, *, input: int, output_grad: int | None = None) -> Forecast:
    """Bytes alive under a plan: the chain's input, what is kept or recomputed, gradients of activations, and passing extras.

    input: bytes of the chain's input. output_grad: bytes of the gradient of the chain's output (default: as many as the output).
    Parameters and their gradients are left out. The chain's own output is counted while the last step runs, and later only
    where the last step's backward needs it.
    """
    if steps_of(plan) != list(range(len(chain))):
        raise ValueError(f"the plan has steps {steps_of(plan)}, the chain has {len(chain)}")
    curve = [("start", input)]

    def forward(nodes, held, whole, grad, word):
        """Run nodes in a row; `held` bytes are alive, the first input among them. Gives back what is alive after."""
        for place, node in enumerate(nodes):
            last = place == len(nodes) - 1
            if isinstance(node, Tape):
                step = chain[node.step]
                kept = step.ways[node.way].kept
                curve.append((f"{word} {node.step}", held + kept + step.output + step.forward_extra + grad))
                held += kept + (step.output if not last or step.saves_output else 0)
            elif whole or not last:
                passing = 0  # the input of the running step; the first one is held
                for k in steps_of(node.plan):
                    curve.append((f"{word} {k}", held + passing + chain[k].output + chain[k].forward_extra + grad))
                    passing = chain[k].output
                held += passing if not last else 0
        return held

    def backward(nodes, held, grad):
        """Reverse nodes; `grad`: bytes of the gradient that comes in at their end."""
        for place in reversed(range(len(nodes))):
            node, last = nodes[place], place == len(nodes) - 1
            end = chain[node.step if isinstance(node, Tape) else steps_of(node.plan)[-1]]
            grad = grad if last else end.output
            if isinstance(node, Tape):
                curve.append((f"backward {node.step}", held + grad + end.backward_extra))
                held -= end.ways[node.way].kept + (end.output if end.saves_output else 0)
            else:
                again = forward(node.plan, held, False, grad, "again")
                assert backward(node.plan, again, grad) == held
            before = nodes[place - 1] if place else None
            if before is not None and not (isinstance(before, Tape) and chain[before.step].saves_output):
                held -= chain[before.step if isinstance(before, Tape) else steps_of(before.plan)[-1]].output
        return held

    kept = forward(plan, input, True, 0, "forward")
    curve.append(("kept", kept))
    assert backward(plan, kept, chain[-1].output if output_grad is None else output_grad) == input
    return Forecast(kept, max(n for _, n in curve), curve)
