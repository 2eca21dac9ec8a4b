"""Judges stages 1 and 2 of lab 3: slices, parameters, gradients beside one device; what each rank keeps; what travelled.

State is what came back from a rank at the end of a step, since the next step is another process. Gradients are counted by hooks
that stand behind the learner's, and weighed by the system.

    state <= 2 (Psi / n + tensors)      gradients <= Psi / n + one parameter

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.
"""

import math

import torch

from ..nn.optim import Adam
from . import carry
from .expect import close, draw, expect, tensor
from .problem import Session
from .process_memory import Scale, weigh

__all__ = [
    "LAYERS",
    "SLACK",
    "WIDE",
    "bounds",
    "few_elements",
    "five_steps",
    "gradient_cost",
    "gradient_slices",
    "live_gradients",
    "mean_over_ranks",
    "on_the_way",
    "ready",
    "silent",
    "slices",
    "state",
    "step_cost",
    "two_backwards",
]

CLOSE = 1e-11  # float64, some hundred terms
LR, EPS = 0.01, 1e-3  # a large eps: what Adam makes of a rounding stays a rounding
WIDE, LAYERS = 256, 8  # of what is weighed by the system: a layer of WIDE x WIDE is half a MiB
SLACK = 3 * 2**19  # bytes of a message on its way, and of what the interpreter takes
ASTRAY = "this time other collectives were handed in, which send nothing there"


# --- inputs -------------------------------------------------------------------------------------------------------------
def ready(s: Session, root=None) -> dict:
    """The layout of this class's ring, through rank `root` if one is given; what is carried is in place."""
    how = {key: s.twist[key] for key in ("step", "offset", "odd", "weighted")}
    carry.ready(s, "zero", how)
    return how if root is None else how | {"root": root}


def bounds(how, numel, n, rank):
    """(start, stop) of a rank's slice."""
    sizes, k = carry.cut_sizes(numel, n, how["odd"]), (rank + how["offset"]) % n
    return sum(sizes[:k]), sum(sizes[: k + 1])


def mean_over_ranks(how, xs):
    """The mean of what each rank has, weighed as this class does."""
    return sum(carry.weight(how, r) * x for r, x in enumerate(xs)) / carry.votes(how, len(xs))


def _numel(shapes):
    return sum(math.prod(shape) for shape in shapes)


def _factor(got, exact) -> str:
    """In words: the number by which everything is wrong, if there is one."""
    ratio = float((got * exact).sum() / (exact * exact).sum()) if exact.numel() else 1.0
    if exact.numel() > 1 and bool((got - ratio * exact).abs().max() <= 1e-9):
        return f"it is {ratio:.3f} times one device's: which number here is that?"
    return "no factor mends it: whose slice is it, and of which sum?"


# --- my_slice -----------------------------------------------------------------------------------------------------------
def slices(s: Session):
    """The chunks of lab 1, of this class."""
    how = ready(s)
    for n in (3, 1, 4, s.dice.choice((5, 6, 7, 8))):
        numels = [0, 1, n - 1, n, 3 * n + 1, 8 * n - 1, 100 + s.dice.randrange(100)]
        outcome = s.run(numels, ranks=n)
        s.remembered[n, "slices"] = outcome
        for r, found in enumerate(outcome.values):
            for numel, got in zip(numels, found, strict=True):
                where = f"{n} ranks, {numel} elements: rank {r}"
                right = isinstance(got, list) and len(got) == 2 and all(type(x) is int for x in got)
                expect(right, f"{where} returned something else than (start, stop)")
                start, stop = bounds(how, numel, n, r)
                expect(got[1] - got[0] == stop - start, f"{where} has {got[1] - got[0]} of them", "who takes the odd ones here?")
                expect(got == [start, stop], f"{where} begins at {got[0]}", "with which chunk did rank r of your lab 1 end?")


def silent(s: Session):
    """Nobody needs to ask."""
    runs = [outcome for key, outcome in s.remembered.items() if key[-1] == "slices"]
    expect(bool(runs), "no run to judge")
    sent = sum(outcome.trace.messages_sent() for outcome in runs)
    expect(sent == 0, f"{sent} messages were sent", "what does a rank know without asking?")


# --- step1 --------------------------------------------------------------------------------------------------------------
SHAPES = ((7, 5), (5,), (6, 6), (7,))


def _train(s: Session, n, shapes, steps, root=None):
    """`steps` steps on n ranks, each a run; state is carried over by us. [(outcome, states)] of the steps."""
    how = ready(s, root)
    start = [draw(s, *shape) for shape in shapes]
    leaves = [p.clone().requires_grad_() for p in start]
    adam = Adam(leaves, lr=LR, eps=EPS)
    mine, states, runs = [start] * n, [{}] * n, []
    for step in range(steps):
        grads = [[draw(s, *shape) for shape in shapes] for _ in range(n)]
        outcome = s.run(how, ranks=n, per_rank=[(mine[r], grads[r], states[r]) for r in range(n)])
        for k, leaf in enumerate(leaves):
            leaf.grad = mean_over_ranks(how, [grads[r][k] for r in range(n)])
        adam.step()
        mine, states = [value["params"] for value in outcome.values], [value["state"] for value in outcome.values]
        _compare(mine, leaves, start, f"{n} ranks, {_numel(shapes)} elements, step {step + 1}")
        runs.append((outcome, states))
    return runs


def _compare(mine, leaves, start, where):
    exact = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
    for r, params in enumerate(mine):
        for k, (p, leaf) in enumerate(zip(params, leaves, strict=True)):
            tensor(p, leaf.shape, torch.float64, f"{where}: rank {r}: params[{k}]")
        flat = torch.cat([p.reshape(-1) for p in params])
        moved = int((flat != torch.cat([p.reshape(-1) for p in start])).sum())
        hint = f"{moved} of {flat.numel()} elements have moved: who has stepped the others?"
        hint = hint if moved < flat.numel() else "which step is it, and what is the mean of?"
        close(flat, exact, 1e-9, f"{where}: rank {r}", hint)
        same = all(torch.equal(a, b) for a, b in zip(params, mine[0], strict=True))
        expect(same, f"{where}: rank {r} has other bits than rank 0", "one model, or several?")


def five_steps(s: Session):
    """Parameters, on three ranks and on one."""
    s.remembered["steps"] = _train(s, 3, SHAPES, 5)
    _train(s, 1, SHAPES[:2], 2)
    return carry.words(s)


def few_elements(s: Session):
    """Three elements for more ranks: some have nothing to step."""
    _train(s, s.dice.choice((5, 7)), ((2,), (1,)), 1)


def _held(node) -> int:
    """Bytes of the tensors in plain data."""
    if isinstance(node, torch.Tensor):
        return node.nbytes
    if isinstance(node, dict):
        return sum(map(_held, node.values()))
    return sum(map(_held, node)) if isinstance(node, (list, tuple)) else 0


def _first_run(s: Session):
    """Five steps on three ranks, of the first check; or one more step, if that check has failed before."""
    return s.remembered["steps"] if "steps" in s.remembered else _train(s, 3, SHAPES, 1)


def state(s: Session):
    """What came back from each rank, and the memory behind it."""
    runs = _first_run(s)
    states = runs[-1][1]
    n, psi = len(states), _numel(SHAPES)
    limit = 2 * 8 * (math.ceil(psi / n) + len(SHAPES)) + 64
    for r, kept in enumerate(states):
        held, behind = _held(kept), max(outcome.values[r]["held"] for outcome, _ in runs)
        said = f"{n} ranks: values right; rank {r} keeps {held // 8} numbers, target {2 * math.ceil(psi / n)}"
        expect(held <= limit, said, f"params have {psi}: which of them does this rank ever step?")
        said = f"{n} ranks: values right; behind the state of rank {r} are {behind // 8} numbers in memory"
        expect(behind <= limit, said, "a slice of a large tensor keeps all of it alive")
    return f"{_held(states[0]) // 8} of {2 * psi} numbers on rank 0 of {n}"


def step_cost(s: Session):
    """Half an all-reduce, the step, the other half; over what was handed in."""
    psi = _numel(SHAPES)
    for outcome, _ in _first_run(s)[:1]:
        n, sent = outcome.trace.ranks, outcome.trace.bytes_sent()
        wanted = 2 * (n - 1) * psi * 8
        expect(sent == wanted, f"{n} ranks: {sent:,} bytes in all, target {wanted:,}", _rest(sent, wanted, (n - 1) * psi * 8))
    root = s.dice.randrange(3)
    for outcome, _ in _train(s, 3, SHAPES[:2], 1, root):
        on_the_way(outcome, root)


def on_the_way(outcome, root):
    """Wrong unless all messages went through the rank of the collectives that were handed in."""
    astray = carry.off_the_way(outcome.trace, root)
    expect(not astray, f"{outcome.trace.ranks} ranks: {astray}", ASTRAY)


def _rest(sent, wanted, half) -> str:
    more = (sent - wanted) / half
    if more == 1:
        return "gradient bytes doubled: who needed the rest of the sum?"
    return f"that is {sent / half:g} times (n - 1) Psi: who needs what, and when?"


# --- reduce_grads2 ------------------------------------------------------------------------------------------------------
def _reduced(s: Session, n, shapes, passes=1, frozen=(), root=None):
    """(outcome, by rank the slices that are right) of `passes` backwards."""
    how = ready(s, root)
    given = [[[draw(s, *shape) for shape in shapes] for _ in range(passes)] for _ in range(n)]
    outcome = s.run(how, [list(shape) for shape in shapes], list(frozen), ranks=n, per_rank=[(given[r],) for r in range(n)])
    exact = []
    for r in range(n):
        means = [sum(mean_over_ranks(how, [given[q][k][j] for q in range(n)]) for k in range(passes)) for j in range(len(shapes))]
        cuts = [slice(*bounds(how, mean.numel(), n, r)) for mean in means]
        exact.append([None if j in frozen else mean.reshape(-1)[cuts[j]] for j, mean in enumerate(means)])
    return outcome, exact


def _same_slices(outcome, exact, where):
    for r, value in enumerate(outcome.values):
        expect(len(value["mine"]) == len(exact[r]), f"{where}: rank {r} returned {len(value['mine'])} entries")
        for k, (got, wanted) in enumerate(zip(value["mine"], exact[r], strict=True)):
            if wanted is None:
                expect(got is None, f"{where}: rank {r}: mine[{k}] belongs to a frozen parameter", "who has a gradient?")
                continue
            tensor(got, wanted.shape, torch.float64, f"{where}: rank {r}: mine[{k}]")
            bound = CLOSE * (1 + (wanted.abs().max() if wanted.numel() else 0))
            close(got, wanted, bound, f"{where}: rank {r}: mine[{k}]", _factor(got, wanted))


def gradient_slices(s: Session):
    """One backward, sizes that do not divide, fewer elements than ranks."""
    for n in (4, s.dice.choice((2, 3)), 1):
        shapes = ((5, 3), (2,), (4, 4), (s.dice.randrange(5, 20),))
        outcome, exact = _reduced(s, n, shapes)
        _same_slices(outcome, exact, f"{n} ranks")
        s.remembered[n, "reduced"] = outcome, shapes
    return carry.words(s)


def two_backwards(s: Session):
    """They add up; a frozen parameter has no part in it."""
    outcome, exact = _reduced(s, 3, ((4, 3), (5,), (3, 3)), 2, frozen=(1,))
    _same_slices(outcome, exact, "3 ranks, two backwards")


def _first_reduced(s: Session):
    """A backward on four ranks, and its shapes: that of the first check, or another one, if that check has failed before."""
    if (4, "reduced") not in s.remembered:
        s.remembered[4, "reduced"] = _reduced(s, 4, SHAPES)[0], SHAPES
    return s.remembered[4, "reduced"]


def live_gradients(s: Session):
    """By what the hooks left behind, and then by what the system says of processes with megabytes."""
    outcome, shapes = _first_reduced(s)
    share, largest = sum(math.ceil(math.prod(x) / 4) for x in shapes), max(math.prod(x) for x in shapes)
    for r, value in enumerate(outcome.values):
        whole = [k for k, left in enumerate(value["left"]) if left]
        said = f"4 ranks: rank {r} still has the gradient of params[{', '.join(map(str, whole))}]"
        expect(not whole, said, "who needs it now?")
        held = value["peak"] // 8
        said = f"4 ranks: {held} numbers of gradients live on rank {r}, target {share + largest}; one device has {_numel(shapes)}"
        expect(held <= share + largest, said, "when is each of them summed, and what keeps it alive afterwards?")
    scale, n, whole = Scale(s.apart.pid), 4, LAYERS * WIDE * WIDE * 8
    ones = [[torch.ones((), dtype=torch.float64)] * LAYERS]
    outcome = s.run(ready(s), [[WIDE, WIDE]] * LAYERS, [], ranks=n, per_rank=[(ones,)] * n, each=scale)
    right = [[torch.ones(end - start, dtype=torch.float64)] * LAYERS for start, end in _cuts(s, n)]
    _same_slices(outcome, right, f"{n} ranks, {LAYERS} parameters of {WIDE} x {WIDE}")
    return weigh(scale, n, whole + whole // n + WIDE * WIDE * 8 + SLACK, whole, "parameters, and gradients")


def _cuts(s: Session, n):
    return [bounds(s.twist, WIDE * WIDE, n, r) for r in range(n)]


def gradient_cost(s: Session):
    """A reduce-scatter for each backward, of what was handed in."""
    n = 4
    outcome, shapes = _first_reduced(s)
    wanted, sent = (n - 1) * _numel(shapes) * 8, outcome.trace.bytes_sent()
    expect(sent == wanted, f"{n} ranks: {sent:,} bytes in all, target {wanted:,}", _rest(sent, wanted, wanted))
    root = s.dice.randrange(3)
    outcome, exact = _reduced(s, 3, ((4, 3), (5,)), root=root)
    _same_slices(outcome, exact, "3 ranks")
    on_the_way(outcome, root)
