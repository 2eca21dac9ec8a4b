"""When does each action run? From the order of the actions and how long each takes, to a timeline, bubbles and live activations.

Each rank runs its list in order, as early as it can: an action starts when the rank is free and its inputs are there, and an
input from another rank is there `link` after it was made. Messages travel beside the work and do not get in each other's way.

    start = max(end of the action before on this rank, end of each input + link)        end = start + duration

    bubble of total  =  idle / (ranks x makespan)        bubble of ideal  =  idle / work

Reference: Narayanan et al. 2021 divides by the ideal time, Qi et al. 2023 by the total (and takes the longest span of a rank, not
the makespan, since their optimizer needs no barrier); both have a name of their own here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from ...ranks.trace import PS, Trace
from .actions import Cell, Joined, Schedule, microbatches_of, parts, placement, read, stages_of
from .legality import check, check_complete

__all__ = ["Simulated", "Times", "simulate"]

KIND_OF = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True)
class Times:
    """Seconds that an action takes: one number for all stages, or a list with one for each stage.

    backward: a whole B (default input + weight).  link: from the end of an action until another rank has its result.
    joined: a joined cell takes this share of the sum of its parts (1: nothing is gained by joining).
    """

    forward: float | Sequence[float] = 1.0
    input: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None
    link: float = 0.0
    joined: float = 1.0

    def __post_init__(self):
        for word in ("forward", "input", "weight", "backward", "link", "joined"):
            value = getattr(self, word)
            if value is None and word == "backward":
                continue
            if isinstance(value, Sequence) and word in ("link", "joined"):
                raise ValueError(f"{word} is {value!r}; allowed: one number of at least 0, the same everywhere")
            for number in value if isinstance(value, Sequence) else (value,):
                if not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
                    raise ValueError(f"{word} is {value!r}; allowed: seconds of at least 0, one number or one for each stage")

    def slower(self, stage: int, factor: float, stages: int) -> "Times":
        """The same with one stage slower by `factor` in all it does."""
        if not 0 <= stage < stages:
            raise ValueError(f"stage {stage} of {stages}; allowed: 0 to {stages - 1}")

        def scaled(value):
            if value is None:
                return None
            row = _per_stage(value, stages, "time")
            return tuple(t * factor if s == stage else t for s, t in enumerate(row))

        names = ("forward", "input", "weight", "backward")
        return Times(**{n: scaled(getattr(self, n)) for n in names}, link=self.link, joined=self.joined)

    def picoseconds(self, stages: int) -> dict[str, list[int]]:
        """Kind -> picoseconds on each stage."""
        table = {"F": self.forward, "I": self.input, "W": self.weight}
        table = {k: [round(t * PS) for t in _per_stage(v, stages, k)] for k, v in table.items()}
        whole = [i + w for i, w in zip(table["I"], table["W"], strict=True)]
        given = self.backward
        return {**table, "B": whole if given is None else [round(t * PS) for t in _per_stage(given, stages, "B")]}


def _per_stage(value, stages: int, word: str) -> list[float]:
    row = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(row) != stages:
        raise ValueError(f"times of {word}: {len(row)} numbers for {stages} stages; one for each stage, or one number for all")
    return row


def simulate(
    schedule,
    times: Times | Mapping | None = None,
    *,
    activation: float | Sequence[float] = 1.0,
    after_input: float = 1.0,
    message_bytes: int = 0,
    checked: bool = True,
    forward_only: bool = False,
    **seconds,
) -> "Simulated":
    """Run `schedule` (any form that `actions.read` takes) on paper; IllegalSchedule where it could not run.

    times: a Times, or its fields as keywords (`forward=1, backward=2, link=0.25`); default: F, I and W take a second each.
    activation: what an F keeps, in units (or bytes) of your own, one number or one for each stage; after I a W still holds
    `after_input` of it.  message_bytes: payload of a message between ranks; without bytes or link the Trace shows no messages.
    checked=False: skip the check that nothing is missing, for a schedule that has just passed it.
    """
    if isinstance(times, Mapping):
        times = Times(**times)
    if seconds:
        if times is not None:
            raise ValueError(f"give times or {', '.join(seconds)}, not both")
        times = Times(**seconds)
    schedule = read(schedule)
    stages, microbatches = stages_of(schedule), microbatches_of(schedule)
    if checked:  # whether it would hang shows itself below
        check_complete(schedule, forward_only=forward_only, stages=stages, microbatches=microbatches)
    weights = _per_stage(activation, stages, "activations")
    for word, value in (*(("activation", w) for w in weights), ("after_input", after_input), ("message_bytes", message_bytes)):
        if not isinstance(value, Real) or not 0 <= value < float("inf"):
            raise ValueError(f"{word} is {value!r}; allowed: a number of at least 0")
    return Simulated(schedule, stages, microbatches, times or Times(), tuple(weights), after_input, message_bytes)


class Simulated:
    """A schedule with its times. start[rank][place], end[rank][place]: picoseconds, idle slots left out.

    schedule: the cells that ran.  trace: as Events, with waits (for whom), messages and live activations.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: int,
        microbatches: int,
        times: Times,
        activation: tuple[float, ...],
        after_input: float,
        message_bytes: int,
    ):
        self.schedule = [[cell for cell in row if cell is not None] for row in schedule]
        self.ranks, self.stages, self.microbatches = len(schedule), stages, microbatches
        self.times, self.activation, self.after_input, self.message_bytes = times, activation, after_input, message_bytes
        self.start: list[list[int]] = []
        self.end: list[list[int]] = []
        self._place()

    def _place(self) -> None:
        """Give every cell its start and end: each rank runs until it misses an input, and goes on once that is made.

        Every cell is looked at twice at most, so the time grows linearly with the actions.
        """
        n, stages = self.microbatches, self.stages
        where = placement(self.schedule)
        rank_of = [where[stage] for stage in range(stages)]
        link = round(self.times.link * PS)
        into = [0] + [link * (rank_of[s] != rank_of[s - 1]) for s in range(1, stages)]  # from stage s - 1 to s, and back
        table = self._table(into)
        # by product: when it was made (-1: not yet), and the rank that waits for it (-1: none)
        made = [-1] * (2 * stages * n) + [0] * n + [-1] * n
        waits = [-1] * len(made)
        ready = list(range(self.ranks))
        starts: list[list[int]] = [[] for _ in self.schedule]
        ends: list[list[int]] = [[] for _ in self.schedule]
        walks = [iter(row) for row in self.schedule]
        stopped: list[Cell] = [None] * self.ranks  # the cell at which a walk stands because it misses an input
        clocks = [0] * self.ranks
        while ready:
            rank = ready.pop()
            clock, walk = clocks[rank], walks[rank]
            begun, ended = starts[rank].append, ends[rank].append
            cell = stopped[rank] or next(walk, None)
            while cell is not None:
                if type(cell) is Joined:
                    begin, took, missing = self._joined(cell, clock, table, made)
                    if missing >= 0:
                        waits[missing] = rank
                        break
                    keys = [table[kind][stage][1] + microbatch for stage, kind, microbatch in cell.actions]
                else:
                    stage, kind, microbatch = cell
                    need, give, took, hop = table[kind][stage]
                    begin = made[need + microbatch]
                    if begin < 0:
                        waits[need + microbatch] = rank
                        break
                    begin += hop
                    if clock > begin:
                        begin = clock
                    keys = (give + microbatch,)
                clock = begin + took
                begun(begin)
                ended(clock)
                for key in keys:
                    made[key] = clock
                    if waits[key] >= 0:
                        ready.append(waits[key])
                cell = next(walk, None)
            stopped[rank], clocks[rank] = cell, clock
        if any(cell is not None for cell in stopped):
            check(self.schedule)  # says why
        self.start, self.end, self._rank_of, self._into = starts, ends, rank_of, into

    def _table(self, into: list[int]) -> dict[str, list[tuple[int, int, int, int]]]:
        """kind -> for each stage (index of what it needs, of what it makes, picoseconds, hop of what it needs); micro-batch 0.

        Outputs come first, then gradients of inputs, then what is always there, then what nobody reads.
        """
        n, stages = self.microbatches, self.stages
        gradients, always, nobody = stages * n, 2 * stages * n, (2 * stages + 1) * n
        seconds = self.times.picoseconds(stages)
        forward = [((s - 1) * n if s else always, s * n, seconds["F"][s], into[s]) for s in range(stages)]
        table = {"F": forward, "W": [(gradients + s * n, nobody, seconds["W"][s], 0) for s in range(stages)]}
        for kind in "BI":  # the gradient from the stage behind implies the own output; the last stage looks for that itself
            table[kind] = [
                (gradients + (s + 1) * n, gradients + s * n, seconds[kind][s], into[s + 1])
                if s < stages - 1
                else (s * n, gradients + s * n, seconds[kind][s], 0)
                for s in range(stages)
            ]
        return table

    def _joined(self, cell: Joined, clock: int, table: dict, made: list[int]) -> tuple[int, int, int]:
        """(start, duration, -1) of a joined cell, or the index of an input that is missing in the third place."""
        total = 0
        for stage, kind, microbatch in cell.actions:
            need, _, took, hop = table[kind][stage]
            if made[need + microbatch] < 0:
                return 0, 0, need + microbatch
            clock = max(clock, made[need + microbatch] + hop)
            total += took
        return clock, round(total * self.times.joined), -1

    @property
    def makespan_ps(self) -> int:
        return max((row[-1] for row in self.end if row), default=0)

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the last end."""
        return self.makespan_ps / PS

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Seconds from the first start to the last end of each rank."""
        return tuple((e[-1] - s[0]) / PS if e else 0.0 for s, e in zip(self.start, self.end, strict=True))

    @property
    def longest_span_ps(self) -> int:
        return max((e[-1] - s[0] for s, e in zip(self.start, self.end, strict=True) if e), default=0)

    @property
    def longest_span(self) -> float:
        """Seconds from the first start to the last end, on the rank where that is longest."""
        return self.longest_span_ps / PS

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds in which each rank works."""
        return tuple((sum(e) - sum(s)) / PS for s, e in zip(self.start, self.end, strict=True))

    @property
    def bubble_of_total(self) -> float:
        """Idle time as a share of all ranks' time: idle / (ranks x makespan)."""
        whole = self.ranks * self.makespan
        return (whole - sum(self.work)) / whole if whole else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over working time: (ranks x makespan - work) / work."""
        work = sum(self.work)
        return (self.ranks * self.makespan - work) / work if work else 0.0

    @property
    def span_bubble_of_total(self) -> float:
        """As Qi et al. count: (longest span - longest work) / longest span, where ranks need not start or end together."""
        return (self.longest_span - max(self.work)) / self.longest_span if self.longest_span else 0.0

    @cached_property
    def live(self) -> list[list[tuple[int, float]]]:
        """For each rank [(picoseconds, what is kept from then on)]: F takes at its start, B, I and W free at their end."""
        share = {"F": 1.0, "B": -1.0, "I": self.after_input - 1.0, "W": -self.after_input}
        curves = []
        for row, starts, ends in zip(self.schedule, self.start, self.end, strict=True):
            curve, held = [(0, 0.0)], 0.0
            for cell, begin, end in zip(row, starts, ends, strict=True):
                actions = parts(cell)
                for moment, first in ((begin, True), (end, False)):
                    before = held
                    for stage, kind, _ in actions:
                        if (kind == "F") is first:
                            held += share[kind] * self.activation[stage]
                    if held != before:
                        if curve[-1][0] == moment:
                            curve[-1] = (moment, held)
                        else:
                            curve.append((moment, held))
            curves.append(curve)
        return curves

    @property
    def peaks(self) -> tuple[float, ...]:
        """The most that each rank keeps at once."""
        return tuple(max(held for _, held in curve) for curve in self.live)

    @property
    def peak(self) -> float:
        return max(self.peaks, default=0.0)

    @cached_property
    def trace(self) -> Trace:
        """Every action as an Event, with waits for inputs (and for whom), messages, and live activations as "live" bytes."""
        return Trace(_events(self), ranks=self.ranks)

    def waiting(self, rank: int) -> float:
        """Seconds in which `rank` stood still for an input, before its last action."""
        spans = zip([0, *self.end[rank]], self.start[rank], strict=False)
        return sum(begin - before for before, begin in spans) / PS

    def __repr__(self) -> str:
        size = f"{self.ranks} ranks, {self.microbatches} micro-batches, {self.makespan:g} s"
        bubbles = f"{self.bubble_of_total:.4f} of total, {self.bubble_of_ideal:.4f} of ideal"
        return f"Simulated({size}, bubble {bubbles}, peak {self.peak:g})"


def _events(run: Simulated):
    """Rows of the Trace, rank by rank."""
    rank_of, into, nbytes = run._rank_of, run._into, run.message_bytes
    source, shown = "modelled", bool(nbytes or any(into))  # a message of no bytes and no time is nothing to see
    for rank, row in enumerate(run.schedule):
        clock = 0
        for cell, begin, end in zip(row, run.start[rank], run.end[rank], strict=True):
            if begin > clock:
                yield (rank, "compute", "wait", f"for {cell}", clock, begin, 0, _latest_sender(run, cell), None, None, source)
            yield from _work_rows(rank, cell, begin, end, source)
            for stage, kind, microbatch in parts(cell):
                other = stage + 1 if kind == "F" else stage - 1 if kind in "BI" else -1
                if shown and 0 <= other < run.stages and rank_of[other] != rank:
                    arrives = end + into[max(stage, other)]
                    what = (f"{stage}{kind}{microbatch}", end, arrives, nbytes)
                    yield (rank, "send", "send", *what, rank_of[other], microbatch, stage, source)
                    yield (rank_of[other], "recv", "recv", *what, rank, microbatch, other, source)
            clock = end
        for moment, held in run.live[rank]:
            yield (rank, "memory", "live", "activations", moment, moment, held, None, None, None, source)


def _work_rows(rank: int, cell: Cell, begin: int, end: int, source: str):
    """A cell as compute events; the parts of a joined one share its time, since a lane holds one thing at a time."""
    actions = parts(cell)
    for k, (stage, kind, microbatch) in enumerate(actions):
        a, b = (begin + (end - begin) * j // len(actions) for j in (k, k + 1))
        yield (rank, "compute", KIND_OF[kind], f"{stage}{kind}{microbatch}", a, b, 0, None, microbatch, stage, source)


def _latest_sender(run: Simulated, cell: Cell) -> int | None:
    """The rank whose message this cell waited for: of several, the first that comes from another rank."""
    for stage, kind, _ in parts(cell):
        other = stage - 1 if kind == "F" else stage + 1 if kind in "BI" else -1
        if 0 <= other < run.stages:
            return run._rank_of[other]
    return None
