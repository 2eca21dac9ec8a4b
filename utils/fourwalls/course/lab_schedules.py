"""Lab 6, schedules: GPipe, 1F1B and a zero bubble as lists of `2F0`, and the loop that runs such a list on ranks.

A list is legal or it is not, and what it costs follows: the checker, the simulator and a one-device run decide, not a list to be
matched. A twist lays the first stage on the last rank, lets GPipe go back in the reverse order, or doubles 1F1B's warm-up.

    slots of GPipe and 1F1B at B = 2F:  3 (m + p - 1)        peak of stage s in 1F1B:  min(p - s, m)

Reference: Narayanan et al. 2021 (arXiv:2104.04473); Qi et al. 2023 (arXiv:2401.10241).
"""

import random
from dataclasses import replace
from functools import partial

import torch

from ..cost.hardware import uniform
from ..parallel.pipeline.actions import read
from ..parallel.pipeline.fill import fill
from ..parallel.pipeline.legality import IllegalSchedule, check
from ..parallel.pipeline.schedules import gpipe, held_by_1f1b, one_f_one_b
from ..parallel.pipeline.simulate import simulate
from ..viz.schedule_grid import plot_schedule_grid
from ..viz.timeline import plot_timeline
from .arrivals import must_use
from .expect import judged
from .problem import Check, Finding, Problem, Session, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = ("fourwalls.parallel", "fourwalls.train", "fourwalls.plan", "fourwalls.bench", "torch.distributed.pipelining")
PLAIN = {"reverse": False, "back": "first", "doubled": False}
PURE, RUN = "fourwalls.course.drivers.pure", "fourwalls.course.drivers.run_stage"
WIRE = uniform(0.0, 1e15)  # messages cost nothing: what is left is the order of the work
SECONDS = {"forward": 1.0, "backward": 2.0}
WIDTH, ROWS = 5, 3  # of the stage that `execute` runs


def twist(seed: int | None) -> dict:
    """What this class's pipelines are like."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"schedules {seed}")
    return {"reverse": dice.choice((False, True)), "back": dice.choice(("first", "last")), "doubled": dice.choice((False, True))}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    where = "rank r runs stage r" if not t["reverse"] else "rank r runs stage p - 1 - r: the first stage is on the last rank"
    form = f"A list with one list for each rank, of texts like '2F0': stage, F or B, micro-batch; {where}."
    back = f"the backward passes begin with the {t['back']} micro-batch"
    warm = "p - s" if not t["doubled"] else "2 (p - s) - 1"
    made = [
        Problem(
            "schedules.gpipe",
            Spec(
                "GPipe: all forward, then all backward",
                "def gpipe(p, m):",
                (form, f"p stages on p ranks, m micro-batches, also m < p; {back}."),
                minutes=15,
                difficulty=1,
                importance=4,
            ),
            (Check("legal", _legal(0)), Check("the order asked for", _gpipe_order), Check("cost", _cost(_gpipe_cost))),
            3,
            (Target("time at B = 2F", "3 (m + p - 1)"), Target("activations held", "m on every rank")),
            driver=PURE,
        ),
        Problem(
            "schedules.one_f_one_b",
            Spec(
                "1F1B: go back as soon as you can",
                "def one_f_one_b(p, m):",
                (form, f"Stage s begins with {warm} forward passes (at most m), then one backward and one forward in turn."),
                minutes=30,
                difficulty=3,
                importance=5,
            ),
            (Check("legal", _legal(1)), Check("cost", _cost(_1f1b_cost))),
            5,
            (Target("time at B = 2F", "3 (m + p - 1)"), Target("activations stage s holds", f"min({warm}, m)")),
            driver=PURE,
        ),
        Problem(
            "schedules.fill",
            Spec(
                "Fill the holes: B becomes I and W",
                "def fill(p, m, limit):",
                (
                    "Lists of texts as before, with two kinds in the place of B: I, the gradient of the input, and W, that of",
                    "the weights.",
                    "W(s, m) needs I(s, m), and nobody waits for it. F, I and W take one slot each.",
                    "No rank holds more than limit activations (limit is at least p); one dies with its W.",
                    f"{where[0].upper()}{where[1:]}.",
                ),
                minutes=45,
                difficulty=5,
                importance=4,
            ),
            (Check("legal", _legal(2)), Check("memory", _fill_memory), Check("slots", _fill_slots)),
            6,
            (Target("slots, p = 4, m = 8, limit 4", "27"), Target("slots, p = 8, m = 32, limit 8", "103")),
            driver=PURE,
        ),
        Problem(
            "schedules.execute",
            Spec(
                "Run it: a list, a stage, a communicator",
                "def execute(actions, stage, comm):",
                (
                    "actions: this rank's list, of F and B. stage.forward(microbatch, x) gives y, and",
                    f"stage.backward(microbatch, dy) gives dx; each is float64, {ROWS} x {WIDTH}. The first stage takes x=None,",
                    "the last one dy=None. Send y to the rank of the next stage, dx to that of the stage before.",
                    f"{where[0].upper()}{where[1:]}. Any legal list must run, and none may hang.",
                ),
                minutes=30,
                difficulty=3,
                importance=5,
            ),
            (
                Check("gradients equal one device", _gradients),
                Check("the order of the list", _ran_in_order),
                Check("cost", _run_cost),
                judged("what arrives is used", _arrivals),
            ),
            6,
            (Target("bytes", "2 (p - 1) m times the activation's"), Target("time", "that of the list with free messages")),
            driver=RUN,
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, cluster=WIRE, twist=t, picture=_picture) for p in made}


# --- schedules ----------------------------------------------------------------------------------------------------------
CASES = ((4, 8), (1, 3), (3, 2), (2, 5))


def _asked(s: Session, p, m, *more):
    """The learner's schedule, with stage s in row s, or a Finding that says what is wrong with its form."""
    value = s.run(p, m, *more).values[0]
    if not isinstance(value, (list, tuple)) or len(value) != p or not all(isinstance(row, (list, tuple)) for row in value):
        return Finding(False, f"p={p}, m={m}: wanted is a list of {p} lists of texts")
    try:
        rows = read([list(row) for row in value])
    except ValueError as error:
        return Finding(False, f"p={p}, m={m}: {error}")
    if not all(rows):
        return Finding(False, f"p={p}, m={m}: rank {[bool(row) for row in rows].index(False)} has nothing to do")
    stages = [sorted({cell.stage for cell in row if hasattr(cell, "stage")}) for row in rows]
    wanted = [[p - 1 - r] if s.twist["reverse"] else [r] for r in range(p)]
    if stages != wanted:
        rank = next(r for r in range(p) if stages[r] != wanted[r])
        return Finding(False, f"p={p}, m={m}: rank {rank} runs stages {stages[rank]}", "which stage lies on which rank here?")
    return rows


def _cases(s: Session, which):
    cases = [*CASES, (s.dice.randrange(3, 9), s.dice.randrange(1, 17))]
    if which < 2:
        return cases
    p = s.dice.choice((3, 5, 6))
    return [(4, 8, 4), (8, 32, 8), (2, 3, 2), (p, s.dice.randrange(p, 13), p)]


def _legal(which):
    def legal(s: Session) -> Finding:
        for case in _cases(s, which):
            rows = _asked(s, *case)
            if isinstance(rows, Finding):
                return rows
            p, m = case[:2]
            kinds = {cell.kind for row in rows for cell in row}
            if kinds != ({"F", "B"} if which < 2 else {"F", "I", "W"}):
                return Finding(False, f"p={p}, m={m}: kinds {', '.join(sorted(kinds))}")
            try:
                check(rows, stages=p, microbatches=m)
            except IllegalSchedule as error:
                s.sketch = partial(_grid, rows, p, m, mark=(error.rank, error.place))
                return Finding(False, f"p={p}, m={m}: {error}")
            s.remembered[case] = rows
            s.sketch = s.sketch or partial(_times, rows, p, m)
        return Finding(True)

    return legal


def _known(s: Session):
    """The legal schedules that the first check has seen; the check behind it has nothing to judge if there are none."""
    return s.remembered.items()


def _needs_legal(s: Session):
    return None if s.remembered else Finding(False, "no legal schedule to judge")


def _gpipe_order(s: Session) -> Finding:
    for (p, m), rows in _known(s):
        forward = list(range(m))
        wanted = [("F", k) for k in forward] + [("B", k) for k in (forward if s.twist["back"] == "first" else forward[::-1])]
        for rank, row in enumerate(rows):
            for place, (cell, w) in enumerate(zip(row, wanted, strict=False)):
                if (cell.kind, cell.microbatch) != w:
                    said = f"p={p}, m={m}: rank {rank}, cell {place + 1} is {cell}"
                    s.sketch = partial(_grid, rows, p, m, mark=(rank, place))
                    return Finding(False, said, "which comes first on the way back?")
    return _needs_legal(s) or Finding(True)


def _cost(judge):
    def cost(s: Session) -> Finding:
        for (p, m), rows in _known(s):
            finding = judge(s, p, m, simulate(rows, **SECONDS), rows)
            if not finding.passed:
                s.sketch = partial(_times, rows, p, m)
                return finding
        return _needs_legal(s) or Finding(True)

    return cost


def _peaks(run, rows):
    """Activations held at most, by stage."""
    return {row[0].stage: round(peak) for row, peak in zip(rows, run.peaks, strict=True)}


def _gpipe_cost(s, p, m, run, rows) -> Finding:
    best = simulate(gpipe(p, m), **SECONDS).makespan
    if run.makespan > best + 1e-9 and s.twist["back"] == "first":
        return Finding(False, f"p={p}, m={m}: {run.makespan:g} long, target {best:g}", "on which rank is there a hole?")
    return Finding(True)


def _1f1b_cost(s, p, m, run, rows) -> Finding:
    best = simulate(one_f_one_b(p, m, doubled=s.twist["doubled"]), **SECONDS).makespan
    for stage, held in sorted(_peaks(run, rows).items()):
        most = held_by_1f1b(p, m, stage, doubled=s.twist["doubled"])
        if held > most:
            hint = "when may an activation die, and how many are under way by then?"
            return Finding(False, f"p={p}, m={m}: stage {stage} holds {held}, target {most}", hint)
    if run.makespan > best + 1e-9:
        trace = run.trace
        rank = max(range(p), key=trace.waiting)
        first = next((e for e in trace if e.rank == rank and e.kind == "wait" and e.start > 0), None)
        at = f"rank {rank} waits from {first.start / 1e12:g} on: what else was legal there?" if first else "who waits?"
        return Finding(False, f"p={p}, m={m}: {run.makespan:g} long, target {best:g}", at)
    warm = [next((k for k, cell in enumerate(row) if cell.kind == "B"), 0) for row in rows]
    wanted = [held_by_1f1b(p, m, row[0].stage, doubled=s.twist["doubled"]) for row in rows]
    if warm != wanted:
        rank = next(r for r in range(p) if warm[r] != wanted[r])
        said = f"p={p}, m={m}: rank {rank} begins with {warm[rank]} forward passes"
        return Finding(False, said, "what is this class's warm-up?")
    return Finding(True)


def _fill_memory(s: Session) -> Finding:
    for (p, m, limit), rows in _known(s):
        for stage, held in sorted(_peaks(simulate(rows), rows).items()):
            if held > limit:
                hint = "an activation lives until its W has run"
                s.sketch = partial(_times, rows, p, m)
                return Finding(False, f"p={p}, m={m}: stage {stage} holds {held}, limit {limit}", hint)
    return _needs_legal(s) or Finding(True)


def _fill_slots(s: Session) -> Finding:
    for (p, m, limit), rows in _known(s):
        best, run = simulate(fill(p, m, limit, objective="makespan")).makespan, simulate(rows)
        slack = 0 if (p, m) in ((4, 8), (8, 32)) else max(2, best // 8)  # elsewhere a good rule is enough
        if run.makespan > best + slack + 1e-9:
            rank = max(range(p), key=run.trace.waiting)
            said = f"p={p}, m={m}: {run.makespan:g} slots, target {best + slack:g}"
            s.sketch = partial(_times, rows, p, m)
            return Finding(False, said, f"rank {rank} has the most holes: which W could stand there?")
    return _needs_legal(s) or Finding(True)


# --- the executor -------------------------------------------------------------------------------------------------------
def _lists(s: Session, p, m, kind):
    """Rows by rank, as texts, of a schedule of ours."""
    rows = gpipe(p, m) if kind == "gpipe" else one_f_one_b(p, m, doubled=kind == "doubled")
    if kind == "shuffled":  # GPipe with the micro-batches in an order of their own, the same on all ranks
        order = s.dice.sample(range(m), m)
        if order == sorted(order):  # by chance the order that a loop of one's own would take
            order.reverse()
        rows = [[cell._replace(microbatch=order[cell.microbatch]) for cell in row] for row in rows]
    return [[str(cell) for cell in row] for row in (rows[::-1] if s.twist["reverse"] else rows)]


def _execute(s: Session, p, m, kind):
    """Run the learner's `execute` on p ranks; (outcome, stages of the ranks, weights, inputs)."""
    args, lists, *case = _case(s, p, m, kind)
    outcome = s.run(ranks=p, per_rank=args)
    s.remembered[p, m, kind] = outcome, lists
    return outcome, *case


def _case(s: Session, p, m, kind):
    """(arguments by rank, lists, stages of the ranks, weights, inputs)."""
    dice = torch.Generator().manual_seed(s.dice.randrange(2**31))
    weights = [torch.randn(WIDTH, WIDTH, generator=dice, dtype=torch.float64) / WIDTH**0.5 for _ in range(p)]
    inputs = torch.randn(m, ROWS, WIDTH, generator=dice, dtype=torch.float64)
    lists = _lists(s, p, m, kind)
    stage_of = [p - 1 - r if s.twist["reverse"] else r for r in range(p)]
    args = [(lists[r], weights[stage_of[r]], inputs if stage_of[r] == 0 else None, stage_of[r], p) for r in range(p)]
    return args, lists, stage_of, weights, inputs


def _exact(stage_of, weights, inputs):
    """The gradient of each rank's weight, on one device."""
    leaves = [w.clone().requires_grad_() for w in weights]
    x = inputs
    for w in leaves:
        x = torch.tanh(x @ w)
    x.square().sum().backward()
    return [leaves[stage].grad for stage in stage_of]


def _equal(value, exact) -> bool:
    return bool(((value - exact).abs() <= 1e-12 * (1 + exact.abs().max())).all())


def _arrivals(s: Session):
    """What a stage gets from others is all that it knows of them."""
    p = 3
    args, _, *case = _case(s, p, 4, "1f1b")
    exact = _exact(*case)
    must_use(s, lambda r, value: _equal(value, exact[r]), ranks=p, per_rank=args)


def _gradients(s: Session) -> Finding:
    for p, m, kind in ((2, 3, "gpipe"), (3, 5, "1f1b"), (1, 2, "gpipe"), (4, 6, "doubled"), (3, 4, "shuffled")):
        outcome, stage_of, weights, inputs = _execute(s, p, m, kind)
        for rank, (value, exact) in enumerate(zip(outcome.values, _exact(stage_of, weights, inputs), strict=True)):
            if not isinstance(value, torch.Tensor) or value.shape != exact.shape:
                return Finding(False, f"{p} ranks, {kind}: rank {rank} made no gradient")
            if not _equal(value, exact):
                hint = "is what arrives the micro-batch that the action names?"
                return Finding(False, f"{p} ranks, {m} micro-batches, {kind}: the weight gradient on rank {rank} differs", hint)
    return Finding(True)


def _ran_in_order(s: Session) -> Finding:
    for (p, _, kind), (outcome, lists) in s.remembered.items():
        for rank in range(p):
            ran = [e.name for e in outcome.trace if e.rank == rank and e.kind in ("forward", "backward")]
            if ran != lists[rank]:
                pairs = zip(ran, lists[rank], strict=False)
                place = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(ran), len(lists[rank])))
                return Finding(False, f"{p} ranks, {kind}: rank {rank} left its list at cell {place + 1}")
    return Finding(True) if s.remembered else Finding(False, "no run to judge")


def _run_cost(s: Session) -> Finding:
    for (p, m, kind), (outcome, lists) in s.remembered.items():
        wanted, sent = 2 * (p - 1) * m * ROWS * WIDTH * 8, outcome.trace.bytes_sent()
        if sent != wanted:
            said = f"{p} ranks, {kind}: {sent:,} bytes, target {wanted:,}"
            return Finding(False, said, "one y or dx a crossing and micro-batch")
        best = simulate(lists, **SECONDS).makespan
        if outcome.trace.makespan > best * (1 + 1e-6):
            hint = "a send waits for its receive: may the sender go on meanwhile?"
            return Finding(False, f"{p} ranks, {kind}: {outcome.trace.makespan:g} long, target {best:g}", hint)
    return Finding(True) if s.remembered else Finding(False, "no run to judge")


def _grid(rows, p, m, ax=None, *, mark):
    """The learner's lists as they stand, one cell outlined."""
    return plot_schedule_grid(rows, mark=mark, ax=ax, title=f"your schedule, p={p}, m={m}: cell {mark[1] + 1} of rank {mark[0]}")


def _times(rows, p, m, ax=None):
    """The learner's lists over time, where B takes two slots and each other action one."""
    seconds = SECONDS if any(cell.kind == "B" for row in rows for cell in row) else {}
    trace = simulate(rows, **seconds).trace
    return plot_timeline(trace, ax=ax, title=f"your schedule, p={p}, m={m}", held="activations")


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
