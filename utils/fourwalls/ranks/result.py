"""What a run gives back, and how to hand each rank its own argument.

The kernel's own objects are never changed by a run: each rank works on copies, and what it returns comes back here. The same
record is filled by real processes and by the simulator, so whatever reads it need not know which it was.

    run.values[r] = what program(comm, ...) returned on rank r

Reference: DESIGN, "The rank program".
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .trace import Trace

__all__ = ["PerRank", "Run", "per_rank"]


def per_rank(items: Sequence) -> "PerRank":
    """`fw.run(program, fw.per_rank([a, b]), ranks=2)` calls `program(comm, a)` on rank 0 and `program(comm, b)` on rank 1."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise ValueError(f"per_rank({items!r}): a list with one item for each rank")
    return PerRank(items)


class PerRank:
    """One argument for each rank; rank r is given item r."""

    def __init__(self, items: Sequence):
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, rank: int) -> Any:
        return self.items[rank]

    def __iter__(self) -> Iterator:
        return iter(self.items)

    def __repr__(self) -> str:
        return f"per_rank({self.items!r})"


@dataclass(frozen=True, repr=False)
class Run:
    """One run of a program on `ranks` ranks.

    values   what the program returned, by rank (tensors on the CPU)
    trace    what each rank did and when (Trace)
    outputs  what each rank printed, by rank: standard output and error in the order written, at most the shown part (a note
             says where the rest lies)
    seconds  wall time of the call, start and end of the processes included
    backend  "gloo", "nccl" or "simulator"
    files    by rank: the path of the file with the output beyond the shown part, or None
    """

    values: list
    trace: Trace
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    backend: str = "gloo"
    ranks: int = 1
    files: list = field(default_factory=list)

    @property
    def output(self) -> str:
        """Everything printed, ordered by rank, each line with its label: `[rank 0] hello`."""
        return "".join(f"[rank {r}] {line}\n" for r, text in enumerate(self.outputs) for line in text.splitlines())

    @property
    def makespan(self) -> float:
        """Seconds from the start of the programs to the last event of the trace."""
        return self.trace.makespan

    def timeline(self, ax=None):
        """Draw ranks down, time across. Returns the matplotlib axes."""
        # The one look upward: `viz` stands above `ranks` and imports the Trace from here. Asking by name at the moment of
        # the call keeps a run usable without matplotlib, and keeps the import order free of circles.
        return importlib.import_module("fourwalls.viz.timeline").plot_timeline(self.trace, ax=ax)

    def __repr__(self) -> str:
        return f"Run({self.ranks} ranks, {self.backend}, {self.seconds:.3g} s, {len(self.trace)} events)"
