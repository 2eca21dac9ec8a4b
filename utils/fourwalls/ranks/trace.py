"""The one record: what each rank did, and when.

Real runs, simulated runs, schedules and published examples all become the same table of events.
Time is an integer number of picoseconds since the start of the run, so a modelled run can be compared
to the last digit; `seconds` converts. A rank has lanes (compute, send, receive, memory), which overlap.

    bytes a rank sends  =  sum of `bytes` over its events of kind "send"

Reference: the Chrome trace event format, which Perfetto reads.
"""

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["KINDS", "LANES", "PS", "SOURCES", "Event", "Trace"]

PS = 10**12  # picoseconds in a second

LANES = ("compute", "send", "recv", "memory", "mark")
SOURCES = ("measured", "modelled", "paced")
# compute-lane kinds carry colour; "wait" is the blocked rank itself; "live" events carry live bytes from `start` on
KINDS = (
    "compute",
    "forward",
    "backward",
    "input",
    "weight",
    "optimizer",
    "reduce",
    "recompute",
    "wait",
    "send",
    "recv",
    "live",
    "mark",
)


class Event(NamedTuple):
    """One thing that one rank did. `start` and `end` in picoseconds, `bytes` in bytes.

    lane: one of LANES.  kind: one of KINDS.  name: the label that a reader sees.
    peer: the other rank of a message, or the rank waited for; None where there is none.
    """

    rank: int
    lane: str
    kind: str
    name: str
    start: int
    end: int
    bytes: int = 0
    peer: int | None = None
    microbatch: int | None = None
    stage: int | None = None
    source: str = "modelled"

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / PS


class Trace:
    """A table of events with the questions that readers ask of it.

    `events` is any iterable of Event (or of tuples in Event's order); `ranks` is the number of ranks, so that
    a rank that did nothing still has its row. An iterator is gone through when somebody first asks.
    """

    def __init__(self, events: Iterable[tuple] = (), *, ranks: int | None = None):
        self._given, self._events = events if isinstance(events, Iterator) else list(events), None
        self.ranks = ranks if ranks is not None else 1 + max((e.rank for e in self.events), default=-1)

    @property
    def events(self) -> list[Event]:
        """All events, those of rank 0 first where the run recorded them so."""
        if self._events is None:  # on first use: a large run need not pay for names that nobody reads
            self._events = [e if type(e) is Event else Event._make(e) for e in self._given]
            self._given = None
        return self._events

    def __getstate__(self) -> dict:
        return {"_given": None, "_events": self.events, "ranks": self.ranks}

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __eq__(self, other) -> bool:
        return isinstance(other, Trace) and self.ranks == other.ranks and self.events == other.events

    __hash__ = None

    def __repr__(self) -> str:
        return f"Trace({len(self)} events, {self.ranks} ranks, {self.makespan:.6g} s, {'/'.join(self.sources) or 'empty'})"

    @property
    def sources(self) -> tuple[str, ...]:
        """Which of measured, modelled, paced occur, in that order."""
        found = {e.source for e in self.events}
        return tuple(s for s in SOURCES if s in found)

    @property
    def makespan_ps(self) -> int:
        """The latest end, in picoseconds (the run starts at 0)."""
        return max((e.end for e in self.events), default=0)

    @property
    def makespan(self) -> float:
        """The latest end, in seconds."""
        return self.makespan_ps / PS

    def where(self, **fields) -> "Trace":
        """The events whose fields all equal the given values: `trace.where(rank=3, kind="wait")`."""
        unknown = set(fields) - set(Event._fields)
        if unknown:
            raise ValueError(f"no such field: {sorted(unknown)}; an event has {list(Event._fields)}")
        chosen = [e for e in self.events if all(getattr(e, k) == v for k, v in fields.items())]
        return Trace(chosen, ranks=self.ranks)

    def bytes_sent(self, rank: int | None = None) -> int:
        """Payload bytes that `rank` (default: all ranks together) put on the wire."""
        return sum(e.bytes for e in self.events if e.kind == "send" and rank in (None, e.rank))

    def messages_sent(self, rank: int | None = None) -> int:
        """Messages that `rank` (default: all ranks together) sent."""
        return sum(1 for e in self.events if e.kind == "send" and rank in (None, e.rank))

    def busy(self, rank: int, lane: str = "compute") -> float:
        """Seconds in which `rank` worked in `lane`, waiting left out; overlapping events count once."""
        spans = sorted((e.start, e.end) for e in self.events if e.rank == rank and e.lane == lane and e.kind != "wait")
        total, reached = 0, 0
        for start, end in spans:
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
        return total / PS

    def waiting(self, rank: int) -> float:
        """Seconds in which `rank` stood still and waited for another."""
        return sum(e.seconds for e in self.events if e.rank == rank and e.kind == "wait")

    def to_pandas(self):
        """A DataFrame with Event's columns, and `seconds` for the length."""
        import pandas as pd

        frame = pd.DataFrame(self.events, columns=list(Event._fields))
        frame["seconds"] = (frame["end"] - frame["start"]) / PS
        return frame

    def to_chrome(self) -> str:
        """Chrome/Perfetto JSON: a process per rank, a thread per lane, microseconds, a counter for live bytes."""
        lanes = {lane: k for k, lane in enumerate(LANES)}
        rows = [{"ph": "M", "name": "process_name", "pid": r, "args": {"name": f"rank {r}"}} for r in range(self.ranks)] + [
            {"ph": "M", "name": "thread_name", "pid": r, "tid": t, "args": {"name": lane}}
            for r in range(self.ranks)
            for lane, t in lanes.items()
        ]
        for e in self.events:
            if e.kind == "live":
                rows.append({"ph": "C", "name": "live bytes", "pid": e.rank, "ts": e.start / 1e6, "args": {"bytes": e.bytes}})
                continue
            extra = {k: getattr(e, k) for k in ("bytes", "peer", "microbatch", "stage", "source")}
            rows.append(
                {
                    "ph": "X",
                    "name": e.name,
                    "cat": e.kind,
                    "pid": e.rank,
                    "tid": lanes.get(e.lane, len(lanes)),
                    "ts": e.start / 1e6,
                    "dur": (e.end - e.start) / 1e6,
                    "args": {k: v for k, v in extra.items() if v is not None},
                }
            )
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})
