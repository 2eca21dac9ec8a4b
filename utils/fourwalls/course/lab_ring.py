"""Lab 1, the ring: shift, reduce-scatter, all-gather, all-reduce, each on 1 to 8 ranks, and what each may cost.

Values are compared with a float64 sum made here, within the bound of summing n numbers; bytes, messages and virtual time with
the formulas of the ring. A twist turns the ring round, moves the chunk that a rank ends with, gives the odd elements to the
last chunks, or weighs each rank's tensor.

    bytes, all ranks together = 2 (n - 1) S      time <= 2 (n - 1) (alpha + ceil(N / n) element beta)

Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import math
import random
from dataclasses import replace

import torch

from ..cost.hardware import uniform
from ..viz.timeline import plot_timeline
from .arrivals import must_use
from .expect import judged
from .problem import Check, Finding, Problem, Session, Spec, Target

__all__ = ["problems", "twist"]

ALPHA, BANDWIDTH = 10e-6, 1e9
WIRE = uniform(ALPHA, BANDWIDTH)  # computing takes no time: what is left is messages
FORBIDDEN = tuple(f"fourwalls.{name}" for name in ("collectives", "parallel", "train", "plan", "bench", "course.carry"))
PLAIN = {"step": 1, "offset": 0, "odd": "first", "weighted": False}


def twist(seed: int | None) -> dict:
    """What this class's ring is like: step +1 or -1, offset of the finished chunk, who takes the odd elements, weights."""
    if seed is None:
        return dict(PLAIN)
    dice = random.Random(f"ring {seed}")
    return {
        "step": dice.choice((1, -1)),
        "offset": dice.choice((1, 2)),
        "odd": dice.choice(("first", "last")),
        "weighted": dice.choice((False, True)),
    }


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    way, back = ("right", "left") if t["step"] == 1 else ("left", "right")
    chunks = f"cut the flattened x into n chunks; where n does not divide, the {t['odd']} chunks are one element longer"
    owner = "chunk r" if t["offset"] == 0 else f"chunk (r + {t['offset']}) mod n"
    total = "the sum of all ranks' x" if not t["weighted"] else "the sum of (r + 1) times the x of rank r"
    ring = f"Messages go to the {way} neighbour only, rank {'r + 1' if t['step'] == 1 else 'r - 1'} (mod n)"
    half = (Target("bytes of all ranks", "(n - 1) S"), Target("messages a rank sends", "at most n - 1"))
    full = (
        Target("bytes of all ranks", "2 (n - 1) S", "each chunk travels 2 (n - 1) hops"),
        Target("messages a rank sends", "at most 2 (n - 1)"),
        Target("time", "2 (n - 1) (alpha + ceil(N / n) beta)", f"alpha {ALPHA * 1e6:g} µs, {BANDWIDTH / 1e9:g} GB/s"),
    )
    made = [
        Problem(
            "ring.shift",
            Spec(
                f"Pass it on: everybody sends to the {way}, everybody receives from the {back}",
                "def shift(comm, x):",
                (f"Return the x of the {back} neighbour. {ring}. Any number of ranks, 1 too; do not change x.",),
                minutes=10,
                difficulty=1,
                importance=4,
            ),
            _checks(_shift, _shift_cost),
            4,
            (Target("messages a rank sends", "1 (none with one rank)"), Target("time", "alpha + S beta")),
        ),
        Problem(
            "ring.reduce_scatter",
            Spec(
                "Reduce-scatter: everybody ends with one finished chunk",
                "def reduce_scatter(comm, x):",
                (f"Return {owner} of {total}, flat. To make it, {chunks}.", f"{ring}. Do not change x."),
                minutes=35,
                difficulty=3,
                importance=5,
            ),
            _checks(_reduce_scatter, _half_cost(_reduce_scatter)),
            6,
            half,
        ),
        Problem(
            "ring.all_gather",
            Spec(
                "All-gather: everybody's chunk to everybody",
                "def all_gather(comm, part, numel):",
                (
                    f"part is {owner} of a flat tensor of numel elements, cut in the same way. Return the whole tensor, flat.",
                    f"{ring}. Do not change part.",
                ),
                minutes=25,
                difficulty=2,
                importance=5,
            ),
            _checks(_all_gather, _half_cost(_all_gather), given="part"),
            6,
            half,
        ),
        Problem(
            "ring.all_reduce",
            Spec(
                "All-reduce: your two halves, one behind the other",
                "def all_reduce(comm, x):",
                (f"Return {total}, in the shape of x, the same bits on every rank. {ring}. Do not change x.",),
                minutes=20,
                difficulty=2,
                importance=5,
            ),
            _checks(_all_reduce, _full_cost, Check("the same bits on every rank", _same_bits)),
            8,
            full,
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, cluster=WIRE, twist=t, picture=_picture) for p in made}


def _checks(value, cost, *more, given="x"):
    return (
        Check("values on 1 to 8 ranks", lambda s: _values(s, value)),
        *more,
        Check(f"{given} is left as it was, neighbours only", lambda s: _manners(s, given)),
        Check("cost", cost),
        judged("what arrives is used", _arrivals, value),
    )


# --- inputs and oracles -------------------------------------------------------------------------------------------------
def sizes_of(numel: int, n: int, odd: str) -> list[int]:
    """Elements of each of the n chunks."""
    longer = numel % n
    extra = range(longer) if odd == "first" else range(n - longer, n)
    return [numel // n + (k in extra) for k in range(n)]


def _inputs(s: Session, n: int, numel: int, whole: bool):
    """A tensor for each rank; whole: small whole numbers, whose sums are exact."""
    dice = torch.Generator().manual_seed(s.dice.randrange(2**31))
    if whole:
        return [torch.randint(-99, 100, (numel,), generator=dice).float() for _ in range(n)]
    return [torch.randn(numel, generator=dice) for _ in range(n)]


def _total(s: Session, xs):
    """(sum in float64, bound for a float32 sum in any order, the products with the weights included)."""
    weights = [r + 1 if s.twist["weighted"] else 1 for r in range(len(xs))]
    wide = torch.stack([w * x.double() for w, x in zip(weights, xs, strict=True)])
    growth = (1 + torch.finfo(torch.float32).eps / 2) ** len(xs) - 1
    return wide.sum(0), growth * wide.abs().sum(0) + 1e-30


def _owner(s: Session, r: int, n: int) -> int:
    return (r + s.twist["offset"]) % n


def _shift(s, n, numel, whole):
    xs = _inputs(s, n, numel, whole)
    zero = torch.zeros(numel, dtype=torch.float64)
    return [(x,) for x in xs], [(xs[(r - s.twist["step"]) % n].double(), zero) for r in range(n)]


def _reduce_scatter(s, n, numel, whole):
    xs = _inputs(s, n, numel, whole)
    value, bound = (v.split(sizes_of(numel, n, s.twist["odd"])) for v in _total(s, xs))
    return [(x,) for x in xs], [(value[_owner(s, r, n)], bound[_owner(s, r, n)]) for r in range(n)]


def _all_gather(s, n, numel, whole):
    (x,) = _inputs(s, 1, numel, whole)
    parts = x.split(sizes_of(numel, n, s.twist["odd"]))
    return [(parts[_owner(s, r, n)].clone(), numel) for r in range(n)], [(x.double(), torch.zeros(numel).double())] * n


def _all_reduce(s, n, numel, whole):
    xs = _inputs(s, n, numel, whole)
    return [(x,) for x in xs], [_total(s, xs)] * n


# --- checks -------------------------------------------------------------------------------------------------------------
def _values(s: Session, make) -> Finding:
    """On one, few and many ranks, with sizes that do not divide, one element, and none."""
    odd = s.dice.choice((3, 5))
    for n in (2, odd, 1, s.dice.choice((6, 7, 8))):
        for whole in (True, False) if n in (2, odd) else (True,):
            numel = s.dice.choice((n, 3 * n + 1, 8 * n - 1, 100 + s.dice.randrange(100)) if n <= 4 else (n - 1, 1, 3 * n + 2))
            finding = _one_run(s, make, n, numel, whole)
            if finding is not None:
                return finding
    return _one_run(s, make, 4, 0, True) or Finding(True)


def _one_run(s, make, n, numel, whole):
    args, wanted = make(s, n, numel, whole)
    outcome = s.run(ranks=n, per_rank=args)
    s.remembered[n, numel] = outcome
    return _compared(s, n, numel, outcome.values, wanted)


def _compared(s, n, numel, values, wanted):
    """What is wrong with the values of n ranks, or None."""
    where = f"{n} ranks, {numel} elements"
    for r, (value, (exact, bound)) in enumerate(zip(values, wanted, strict=True)):
        if not isinstance(value, torch.Tensor):
            return Finding(False, f"{where}: rank {r} returned {type(value).__name__}, not a tensor")
        if tuple(value.shape) != tuple(exact.shape):
            return Finding(False, f"{where}: rank {r} returned shape {tuple(value.shape)}", f"wanted is {tuple(exact.shape)}")
        if value.dtype != torch.float32:
            return Finding(False, f"{where}: rank {r} returned {value.dtype}; x is float32")
        wrong = (~((value.double() - exact).abs() <= bound)).nonzero().flatten().tolist()
        if wrong:
            said = f"{where}: rank {r} has {len(wrong)} of {value.numel()} elements wrong"
            return Finding(False, said, _which(s, wrong, value.numel(), n, numel))
    return None


def _which(s, wrong, returned, n, numel):
    """In words: which chunks the wrong elements lie in."""
    sizes = sizes_of(numel, n, s.twist["odd"])
    if len(wrong) == returned:
        long = f"chunks have {' or '.join(str(k) for k in sorted(set(sizes)))} elements here"
        if returned != numel:  # a rank's own chunk: complete, and the right one?
            return f"all of it is wrong: had this chunk been on every rank when the last hop ended? {long}"
        return f"all of it is wrong; {long}"
    if returned != numel:
        return f"its first wrong element is number {wrong[0]} of {returned}"
    edges = [sum(sizes[:k]) for k in range(n)]
    chunks = sorted({max(k for k in range(n) if edges[k] <= i) for i in wrong})
    return f"the wrong ones lie in chunk {', '.join(map(str, chunks))} of {n}: which hop touched that last?"


def _same_bits(s: Session) -> Finding:
    args, _ = _all_reduce(s, 5, 61, False)
    values = s.run(ranks=5, per_rank=args).values
    differ = [r for r, v in enumerate(values) if not torch.equal(v, values[0])]
    hint = "in which order are the numbers added on each rank?"
    return Finding(not differ, f"ranks {differ} differ from rank 0" if differ else "", hint)


def _manners(s: Session, given: str) -> Finding:
    """The input is unchanged, and every message goes to the one neighbour."""
    outcome = _last(s, 5)
    step = s.twist["step"] % outcome.trace.ranks
    for e in outcome.trace:
        if e.kind == "send" and (e.peer - e.rank) % outcome.trace.ranks != step:
            return Finding(False, f"rank {e.rank} sent to rank {e.peer}", "look at the picture: who is whose neighbour here?")
    args, wanted = _MAKE[s.functions[-1]](s, 3, numel := s.dice.randrange(9, 30), True)
    told = s.run(ranks=3, per_rank=args, driver="fourwalls.course.drivers.inputs_after").values
    for r, (inputs, (_, after)) in enumerate(zip(args, told, strict=True)):
        if not torch.equal(inputs[0], after[0]):
            return Finding(False, f"{given} was changed on rank {r}", "write into memory of your own")
    return _compared(s, 3, numel, [value for value, _ in told], wanted) or Finding(True)


def _arrivals(s: Session, make):
    """Altered messages give other values."""
    numel = s.dice.randrange(9, 30)
    args, wanted = make(s, 3, numel, True)
    must_use(s, lambda r, value: _compared(s, 3, numel, [value], wanted[r : r + 1]) is None, ranks=3, per_rank=args)


def _last(s, n):
    """A run on n ranks that the value check made, else a new one."""
    found = [o for (k, numel), o in s.remembered.items() if k == n and numel]
    if found:
        return found[-1]
    args, _ = _MAKE[s.functions[-1]](s, n, 3 * n + 2, True)
    return s.run(ranks=n, per_rank=args)


def _cost(s: Session, make, hops: int, total: float, whole_time: bool) -> Finding:
    """hops: messages a rank may send, times (n - 1); total: bytes of all ranks over (n - 1) S."""
    for n, numel in ((4, 4 * s.dice.randrange(40, 80)), (6, 6 * s.dice.randrange(40, 60) + 3)):
        args, wanted = make(s, n, numel, True)
        outcome = s.run(ranks=n, per_rank=args)
        if finding := _compared(s, n, numel, outcome.values, wanted):
            return finding  # right values in one run and the right price in another is not a price
        trace, size = outcome.trace, numel * 4
        wanted, sent = round(total * (n - 1) * size), trace.bytes_sent()
        if sent != wanted:
            hop = max((e.bytes for e in trace if e.kind == "send"), default=0)
            hint = f"the largest message carried {hop / size:.2f} S; how much of x changes in one hop?"
            return Finding(False, f"{n} ranks: {sent:,} bytes in all, target {wanted:,}", hint)
        most = max(trace.messages_sent(r) for r in range(n))
        if most > hops * (n - 1):
            return Finding(False, f"{n} ranks: a rank sent {most} messages, target {hops * (n - 1)}")
        longest = hops * (n - 1) * (ALPHA + math.ceil(numel / n) * 4 / BANDWIDTH)
        if whole_time and trace.makespan > longest * (1 + 1e-9):
            hint = "where does the timeline show a rank that waits while its neighbour does?"
            return Finding(False, f"{n} ranks: {trace.makespan * 1e6:.1f} µs, target {longest * 1e6:.1f} µs", hint)
    return Finding(True, f"{sent:,} bytes, {trace.makespan * 1e6:.1f} µs on {n} ranks")


def _half_cost(make):
    return lambda s: _cost(s, make, 1, 1.0, True)


def _full_cost(s: Session) -> Finding:
    return _cost(s, _all_reduce, 2, 2.0, True)


def _shift_cost(s: Session) -> Finding:
    numel = s.dice.randrange(30, 60)
    args, right = _shift(s, 5, numel, True)
    outcome = s.run(ranks=5, per_rank=args)
    if finding := _compared(s, 5, numel, outcome.values, right):
        return finding
    trace = outcome.trace
    most, wanted = max(trace.messages_sent(r) for r in range(5)), ALPHA + 4 * numel / BANDWIDTH
    if most != 1:
        return Finding(False, f"5 ranks: a rank sent {most} messages, target 1")
    late = trace.makespan > wanted * (1 + 1e-9)
    hint = "the timeline shows who waits for whom: can they all send at once?"
    return Finding(not late, f"5 ranks: {trace.makespan * 1e6:.2f} µs, target {wanted * 1e6:.2f} µs" if late else "", hint)


_MAKE = {"shift": _shift, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather, "all_reduce": _all_reduce}


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
