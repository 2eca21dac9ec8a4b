"""What a learner wrote in one lab carries the next: their ring of lab 1 moves the gradients of labs 2 and 3.

On their own machine `lab.check` loads what they kept (`fw.keep`) into the process of their code. It is tried alone first: the
sums of this class's lab 1 at the price of lab 1, else a ring of ours takes its place, and the report says which one it was.
Functions are handed in as arguments; so a check can hand in another one, through a rank that it has drawn, and see in the Trace
that messages take that way.

    kept, and right when alone -> yours         else -> the reference, with the same cut and the same weights

Reference: DESIGN, section 8 ("a learner's earlier functions are used by later labs, and a probe proves they ran").
"""

import contextlib
import io
import math

import torch

from ..cost.hardware import uniform

__all__ = ["CARRIED", "bring", "cut_sizes", "hand_in", "off_the_way", "ready", "ring", "star", "votes", "weight", "words"]

CARRIED = {"data": ("all_reduce",), "zero": ("reduce_scatter", "all_gather")}  # lab -> functions of lab 1 that carry it
NAMES = frozenset(name for names in CARRIED.values() for name in names)
ALPHA, BANDWIDTH = 10e-6, 1e9  # the wire on which they are tried
RANKS, NUMEL = 3, 7


# --- on the judge's side ------------------------------------------------------------------------------------------------
def bring(apart, lab: str) -> None:
    """Load what the learner kept for `lab` into `apart`, their process. What cannot be loaded is told by `ready`."""
    from .keep import kept

    apart.carried = {}
    for name in CARRIED.get(lab, ()):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            function = kept(name, None)
        if function is not None:
            apart.load(**{name: function})
        apart.carried[name] = (function is not None, said.getvalue().strip())


def ready(s, lab: str, how: dict) -> str:
    """Let the session's runs use what was brought and is right when alone; a sentence that says what carries.

    how: the cut and the weights of this class's lab 1. A process to which nothing was brought (a grader's) uses the reference.
    """
    if "carried" not in s.remembered:
        used, left = [], []
        for name in CARRIED[lab]:
            here, said = getattr(s.apart, "carried", {}).get(name, (False, f"no {name} kept: using the reference"))
            misfit = _misfit(s, name, how) if here else said.rstrip(".")
            if misfit:
                left.append(f"your {name} of lab 1 {misfit}: using the reference" if here else misfit)
            else:
                used.append(name)
        s.functions = (*used, *(f for f in s.functions if f not in NAMES))
        carried = [f"carried by your {' and '.join(used)} of lab 1"] if used else []
        s.remembered["carried"] = "; ".join(carried + left)
    return s.remembered["carried"]


def words(s) -> str:
    """What `ready` said."""
    return s.remembered.get("carried", "")


def off_the_way(trace, root: int) -> str:
    """A message of a run that was handed `star(how)` and does not touch `root`, in words; "" where all do, and some are there."""
    sends = [e for e in trace if e.kind == "send"]
    lost = next((e for e in sends if root not in (e.rank, e.peer)), None)
    if lost is not None:
        return f"rank {lost.rank} sent {lost.bytes:,} bytes to rank {lost.peer}"
    return "" if sends else "no message was sent at all"


def _misfit(s, name, how) -> str:
    """What is wrong with the carried function when it runs alone on three ranks; "" if nothing is."""
    xs = [torch.tensor([float(s.dice.randrange(-99, 100)) for _ in range(NUMEL)], dtype=torch.float64) for _ in range(RANKS)]
    total = sum(weight(how, r) * x for r, x in enumerate(xs))
    sizes = cut_sizes(NUMEL, RANKS, how["odd"])
    owned = [total.split(sizes)[(r + how["offset"]) % RANKS] for r in range(RANKS)]
    args = [(owned[r], NUMEL) for r in range(RANKS)] if name == "all_gather" else [(x,) for x in xs]
    wanted = owned if name == "reduce_scatter" else [total] * RANKS
    wire = uniform(ALPHA, BANDWIDTH)
    outcome = s.apart.run("fourwalls.course.drivers.call", [name], ranks=RANKS, per_rank=args, cluster=wire, limit=3.0)
    if outcome.failure is not None:
        return f"does not run ({outcome.failure.kind} on {RANKS} ranks)"
    for value, exact in zip(outcome.values, wanted, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != exact.shape or not bool((value == exact).all()):
            return f"gives something else on {RANKS} ranks than this class's lab 1 asks for"
    halves = 2 if name == "all_reduce" else 1
    hops = halves * (RANKS - 1)
    longest = hops * (ALPHA + math.ceil(NUMEL / RANKS) * 8 / BANDWIDTH) * (1 + 1e-9)
    if outcome.trace.bytes_sent() > hops * NUMEL * 8 or outcome.trace.makespan > longest:
        return "costs more than lab 1 allows"
    return ""


# --- on the learner's side, and by hand ------------------------------------------------------------------------------------
def cut_sizes(numel: int, n: int, odd: str) -> list[int]:
    """Elements of each of the n chunks of lab 1. odd: "first" or "last", the chunks that are one longer."""
    longer = numel % n
    extra = range(longer) if odd == "first" else range(n - longer, n)
    return [numel // n + (k in extra) for k in range(n)]


def weight(how: dict, rank: int) -> int:
    """How often this class's sums count what rank `rank` has."""
    return rank + 1 if how["weighted"] else 1


def votes(how: dict, n: int) -> int:
    """The sum of all weights: what a sum over n ranks is divided by to be a mean."""
    return sum(weight(how, r) for r in range(n))


def hand_in(functions: dict, how: dict) -> dict:
    """{name: collective} that a run is given: through rank how["root"] if there is one, else what is carried, else our ring."""
    if "root" in how:
        return star(how)
    return {**ring(how), **{name: f for name, f in functions.items() if name in NAMES}}


def ring(how: dict) -> dict:
    """The reference: lab 1's functions with the direction, owner, cut and weights of `how`. Values and bytes of lab 1."""

    def turn(comm, chunks, first, adds):
        """n - 1 hops: chunk `first` leaves; what arrives is added, or put in its place, and leaves next."""
        n, step = comm.size, how["step"]
        for hop in range(n - 1):
            give, take = (chunks[(first - step * k) % n] for k in (hop, hop + 1))
            got = comm.exchange(give, (comm.rank + step) % n, torch.empty_like(take), (comm.rank - step) % n)
            if adds:
                take.add_(got)
            else:
                take.copy_(got)

    def reduce_scatter(comm, x):
        flat = x.reshape(-1) * weight(how, comm.rank)
        chunks = flat.split(cut_sizes(flat.numel(), comm.size, how["odd"]))
        turn(comm, chunks, comm.rank + how["offset"] - how["step"], True)
        return chunks[(comm.rank + how["offset"]) % comm.size].clone()

    def all_gather(comm, part, numel):
        flat = torch.empty(numel, dtype=part.dtype)
        chunks = flat.split(cut_sizes(numel, comm.size, how["odd"]))
        chunks[(comm.rank + how["offset"]) % comm.size].copy_(part)
        turn(comm, chunks, comm.rank + how["offset"], False)
        return flat

    def all_reduce(comm, x):
        return all_gather(comm, reduce_scatter(comm, x), x.numel()).reshape(x.shape)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def star(how: dict) -> dict:
    """The same three, all messages to and from rank how["root"]: nobody writes this by accident."""
    root = how["root"]

    def through(comm, x, given, taken, answer):
        """Everybody's x to the root, and from there answer(all of them, r) to each rank r. given, taken: elements by rank."""
        n, r = comm.size, comm.rank
        if r != root:
            comm.send(x, root)
            return comm.recv(torch.empty(taken[r], dtype=x.dtype), root)
        parts = [x if k == root else comm.recv(torch.empty(given[k], dtype=x.dtype), k) for k in range(n)]
        for k in (k for k in range(n) if k != root):
            comm.send(answer(parts, k), k)
        return answer(parts, root).clone()

    def total(parts, _=None):
        return sum(weight(how, k) * part for k, part in enumerate(parts))

    def owned(numel, n):
        sizes = cut_sizes(numel, n, how["odd"])
        return sizes, [sizes[(r + how["offset"]) % n] for r in range(n)]

    def all_reduce(comm, x):
        whole = [x.numel()] * comm.size
        return through(comm, x.reshape(-1), whole, whole, total).reshape(x.shape)

    def reduce_scatter(comm, x):
        sizes, mine = owned(x.numel(), comm.size)
        answer = lambda parts, k: total(parts).split(sizes)[(k + how["offset"]) % comm.size]  # noqa: E731
        return through(comm, x.reshape(-1), [x.numel()] * comm.size, mine, answer)

    def all_gather(comm, part, numel):
        n, (_, mine) = comm.size, owned(numel, comm.size)
        answer = lambda parts, _: torch.cat([parts[(c - how["offset"]) % n] for c in range(n)])  # noqa: E731
        return through(comm, part, mine, [numel] * n, answer)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
