"""Judges the second half of lab 2: buckets by their order and size, overlap by gradients, bytes, and what the Trace shows.

On the wires of a run (odd ranks) the sums travel, on the even ranks backward computes, so what is hidden behind it, and what
sticks out, is read off the judge's own clock. A bucket given too early carries gradients that are not there yet, and is wrong.

    exposed = end of the step - end of backward <= 1.1 * 2 (n - 1) (alpha + ceil(N_last / n) beta)

Reference: Li et al. 2020 (arXiv:2006.15704), section 3.2.
"""

import math

from ..cost.hardware import Cluster, Link
from ..ranks.trace import PS
from . import carry
from .drivers_data import Net
from .expect import Wrong, draw, expect
from .lab_data_grads import layers, layout, mean_of, names_of, same_gradients
from .problem import Session

__all__ = [
    "WIRES",
    "as_few",
    "begins_early",
    "exposed",
    "never_waits",
    "one_sum",
    "order",
    "places",
    "size",
    "special",
    "two_steps",
]

ALPHA, BANDWIDTH = 10e-6, 4e6
WIRES = Cluster(  # ranks 2 r and 2 r + 1 are one rank's program and its wire
    "a wire beside each rank", None, Link("beside", 0.0, math.inf), Link("wire", ALPHA, BANDWIDTH), 2, source="stated"
)
LAYER_SECONDS = 0.8e-3  # of backward; two layers take longer than their bucket on three wires


# --- fill_buckets -------------------------------------------------------------------------------------------------------
def _buckets(s: Session):
    """[(what was asked, the learner's buckets as places)] of a few lists of parameters."""
    if "buckets" not in s.remembered:
        found, bytes_of = [], {"float64": 8, "float32": 4, "float16": 2}
        for count, most in ((9, "some"), (6, "each"), (5, "all"), (3, "none trained"), (s.dice.randrange(7, 14), "some")):
            dtype = s.dice.choice(sorted(bytes_of))
            shapes = [[s.dice.randrange(2, 9) for _ in range(1 + k % 2)] for k in range(count)]
            sizes = [math.prod(shape) * bytes_of[dtype] for shape in shapes]
            frozen = list(range(count)) if most == "none trained" else s.dice.sample(range(count), 2)
            nbytes = {"some": s.dice.randrange(max(sizes) // 2, sum(sizes) // 2), "each": 1}.get(most, sum(sizes))
            (value,) = s.run(shapes, dtype, frozen, nbytes).values
            found.append(((sizes, frozen, nbytes, f"{count} parameters of {dtype}, nbytes = {nbytes:,}"), value))
        s.remembered["buckets"] = found
    return s.remembered["buckets"]


def _wanted(s, sizes, frozen):
    """The trained places in the order of backward."""
    trained = [k for k in range(len(sizes)) if k not in frozen]
    return trained[::-1] if s.twist["listed"] == "forward" else trained


def places(s: Session):
    """Every trained parameter is in one bucket, and nothing else is."""
    for (sizes, frozen, _, where), found in _buckets(s):
        expect(all(found), f"{where}: an empty bucket", "what would it carry?")
        flat = [k for bucket in found for k in bucket]
        expect(-1 not in flat, f"{where}: something in a bucket is none of params")
        expect(not set(flat) & set(frozen), f"{where}: a frozen parameter is in a bucket", "will its gradient ever come?")
        lost = set(range(len(sizes))) - set(frozen) - set(flat)
        expect(not lost, f"{where}: parameter {min(lost, default=0)} is in no bucket")
        expect(len(flat) == len(set(flat)), f"{where}: a parameter is in two buckets")


def order(s: Session):
    """The order in which backward makes gradients."""
    for (sizes, frozen, _, where), found in _buckets(s):
        flat, wanted = [k for bucket in found for k in bucket], _wanted(s, sizes, frozen)
        bad = next((place for place, (a, b) in enumerate(zip(flat, wanted, strict=False)) if a != b), None)
        if bad is not None:
            raise Wrong(f"{where}: place {bad} holds parameter {flat[bad]} of the list", "whose gradient comes first?")


def size(s: Session):
    """No bucket is larger than nbytes, but for one parameter alone."""
    for (sizes, _, nbytes, where), found in _buckets(s):
        for k, bucket in enumerate(found):
            held = sum(sizes[i] for i in bucket)
            expect(held <= nbytes or len(bucket) == 1, f"{where}: bucket {k} holds {held:,} bytes", "what are they measured in?")


def as_few(s: Session):
    """In that order, no fewer buckets would do."""
    for (sizes, frozen, nbytes, where), found in _buckets(s):
        least, held = 0, math.inf
        for k in _wanted(s, sizes, frozen):
            least, held = (least + 1, sizes[k]) if held + sizes[k] > nbytes else (least, held + sizes[k])
        expect(len(found) <= least, f"{where}: {len(found)} buckets, {least} would do", "which neighbours fit into one?")


# --- overlap ------------------------------------------------------------------------------------------------------------
def _overlap(s: Session, n, *, count=4, width=4, passes=1, steps=1, frozen=(), uses=None, idle=(), per_bucket=4):
    """(outcome, one device's gradients by step, the last bucket's elements) of `overlapped` with n ranks and their n wires.

    uses[r][k]: layers of micro-batch k on rank r. idle: (rank, micro-batch) without rows.
    """
    carry.ready(s, "data", layout(s))
    net = layers(s, count, width)
    model = Net(net, frozen)
    params = list(model.parameters())
    trained = [k for k in reversed(range(len(params))) if params[k].requires_grad]
    buckets = [trained[k : k + per_bucket] for k in range(0, len(trained), per_bucket)]
    uses = uses or [[list(range(count))] * passes] * n
    rows = [
        [[None if (r, k) in idle else draw(s, 2 + r % 2, width) for k in range(passes)] for _ in range(steps)] for r in range(n)
    ]
    args = [(rows[r // 2], uses[r // 2]) for r in range(2 * n)]
    shared = (layout(s), net, list(frozen), buckets, passes, LAYER_SECONDS)
    outcome = s.run(*shared, ranks=2 * n, per_rank=args)
    exact = []
    for step in range(steps):
        by_rank = []
        for r in range(n):
            model.zero_grad()
            for x, use in zip(rows[r][step], uses[r], strict=True):
                if x is not None:
                    model.loss(x, use).backward()
            by_rank.append([p.grad for p in params])
        exact.append(mean_of(s, by_rank, [p.requires_grad for p in params]))
    return outcome, exact, buckets, params


def _compare(outcome, exact, n, count):
    for r, value in enumerate(outcome.values[::2]):
        for step, (found, wanted) in enumerate(zip(value, exact, strict=True)):
            same_gradients(found, wanted, f"{n} ranks: rank {r}, step {step}", names_of(count))


def two_steps(s: Session):
    """Gradients, with several passes, and once more."""
    for n, passes, steps in ((s.dice.choice((2, 4)), 2, 2), (1, 1, 1)):
        outcome, exact, _, _ = _overlap(s, n, passes=passes, steps=steps)
        _compare(outcome, exact, n, 4)
    return carry.words(s)


def special(s: Session):
    """Layer 0 is tied, a weight is frozen, one rank does not use the last layer, another has one micro-batch less."""
    lazy = s.dice.randrange(3)
    uses = [[[0, 1, 0] if r == lazy else [0, 1, 2, 0]] * 2 for r in range(3)]
    outcome, exact, _, _ = _overlap(s, 3, count=3, passes=2, frozen=(2,), uses=uses, idle=(((lazy + 1) % 3, 1),), per_bucket=2)
    _compare(outcome, exact, 3, 3)


N, COUNT, WIDTH, PASSES, STEPS = 3, 6, 12, 2, 2


def _timed(s: Session):
    """(trace, the last bucket's elements, bytes of all, number of buckets) of two steps of two passes on three ranks."""
    if "timed" not in s.remembered:
        width = s.dice.choice((WIDTH, WIDTH + 1))
        outcome, exact, buckets, params = _overlap(s, N, count=COUNT, width=width, passes=PASSES, steps=STEPS)
        _compare(outcome, exact, N, COUNT)
        last = sum(params[k].numel() for k in buckets[-1])
        s.remembered["timed"] = outcome.trace, last, sum(p.nbytes for p in params), len(buckets)
    return s.remembered["timed"]


def _backward(trace, rank):
    """(start, end) of the last pass of the last step on an even rank."""
    events = sorted((e for e in trace if e.rank == 2 * rank and e.kind == "backward"), key=lambda e: e.start)
    said = f"rank {rank}: {len(events)} layers were seen in backward, where {STEPS * PASSES * COUNT} were to be"
    expect(len(events) == STEPS * PASSES * COUNT, said)
    return events[-COUNT].start, events[-1].end


def _sends(trace, since):
    """Messages from rank to rank, not those to a wire of one's own."""
    return [e for e in trace if e.kind == "send" and e.rank // 2 != e.peer // 2 and e.start >= since]


def one_sum(s: Session):
    """Every gradient travels once a step, in as many sums as there are buckets, on the wires."""
    trace, _, whole, count = _timed(s)
    begin = min((e.start for e in trace if e.kind == "backward"), default=0)  # before it, the wires were set up
    sends = _sends(trace, begin)
    aside = next((e for e in sends if e.rank % 2 == 0), None)
    if aside is not None:
        raise Wrong(f"rank {aside.rank // 2} sent a message itself", "whose work is that, beside the program?")
    wanted, sent = 2 * (N - 1) * whole * STEPS, sum(e.bytes for e in sends)
    said = f"{N} ranks, {STEPS} steps of {PASSES} passes: {sent:,} bytes in all, target {wanted:,}"
    expect(sent == wanted, said, "in which pass is a sum due?")
    given = sum(1 for e in trace.where(kind="send", rank=0, peer=1) if e.start >= begin and e.bytes > 8)  # the others say a size
    expect(given == count * STEPS, f"{given} sums were begun, for {count * STEPS} buckets", "what travels together?")


def begins_early(s: Session):
    """The first message leaves before backward is over, on every rank."""
    trace, _, _, _ = _timed(s)
    for r in range(N):
        start, end = _backward(trace, r)
        first = min((e.start for e in _sends(trace, start) if e.rank == 2 * r + 1), default=math.inf)
        late = f"rank {r}: backward ends after {(end - start) / PS * 1e3:.1f} ms, and no message has left by then"
        expect(first < end, late, "the wire's lane is empty under backward: which bucket was complete first?")


def never_waits(s: Session):
    """Between the first and the last layer of backward, the even ranks do nothing but compute."""
    trace, _, _, _ = _timed(s)
    for r in range(N):
        start, end = _backward(trace, r)
        stops = [e for e in trace if e.rank == 2 * r and e.kind == "wait" and start <= e.start < end]
        lost = sum(e.seconds for e in stops) * 1e3
        done = sum(1 for e in trace if e.rank == 2 * r and e.kind == "backward" and stops and start < e.end <= stops[0].start)
        said = f"rank {r}: backward stands still for {lost:.2f} ms, first after layer {COUNT - done}"
        expect(not stops, said, "the backward lane is idle under a bucket: who waits there, and need they?")


def exposed(s: Session):
    """What sticks out behind backward is the last bucket's sum."""
    trace, last, _, _ = _timed(s)
    end = max(_backward(trace, r)[1] for r in range(N))
    out = (trace.makespan_ps - end) / PS
    target = 1.1 * 2 * (N - 1) * (ALPHA + math.ceil(last / N) * 8 / BANDWIDTH)
    said = f"the step ends {out * 1e3:.2f} ms after backward, target {target * 1e3:.2f} ms"
    expect(out <= target, said, "how many sums are still under way then, and when could they have begun?")
    return f"{out * 1e3:.2f} ms of the step are exposed"
