"""What a Ledger recorded, turned into answers: the curve of live bytes, the table by phase, the bytes by line.

A moment is the state after an operation; moment 0 is before the first. A storage keeps one category for its whole life, but an
activation counts as saved only until backward needs it no longer, and as temporary from then on. The categories of a moment sum
to its live bytes.

    live by category at k = sum of bytes of storages with first moment <= k <= last moment

Reference: none; this is bookkeeping.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["CATEGORIES", "PASSING", "Moment", "Saved", "Storage", "Story", "ranks_table"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporary", "buffers")
PASSING = ("temporary", "buffers")  # what a storage is until it is claimed or saved


@dataclass(eq=False)
class Storage:
    """One storage from its first moment to its last. `where`: the line that made it. `released`: last moment backward waited
    for it.
    """

    number: int
    bytes: int
    born: int
    category: str
    where: tuple[str, int, str]
    died: int | None = None
    holders: int = 0  # how many saved tensors refer to it now
    released: int | None = None
    was_saved: bool = False
    writes: int = 0  # in-place operations so far
    sizes: list = field(default_factory=list)  # (moment, bytes) where it was found resized
    guard: Any = None  # the weak reference that tells its end

    def __getstate__(self) -> dict:
        return {**vars(self), "guard": None}  # what a rank sends home


class Saved(NamedTuple):
    """A tensor that autograd saved: its storage, shape, dtype, the line (file, line, function) and the module that saved it."""

    storage: Storage
    shape: tuple[int, ...]
    dtype: str
    where: tuple[str, int, str]
    module: str

    @property
    def bytes(self) -> int:
        """Bytes of the whole storage, which is what stays alive."""
        return self.storage.bytes


class Moment(NamedTuple):
    """Live bytes by category after operation number `index` (0: before the first), its name, and picoseconds since the start."""

    index: int
    op: str
    time_ps: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Story:
    """Storages, saves, phases as (moment before its first operation, name), operations as (name, ps); it begins at `begin` ps."""

    def __init__(self, storages: list[Storage], saved: list[Saved], phases: list[tuple], ops: list[tuple], begin: int = 0):
        self.storages, self.saves, self.phases, self.ops, self.begin = storages, saved, phases, ops, begin

    def _spans(self, s: Storage) -> Iterator[tuple[int, int, str]]:
        """(first moment, last moment, category) of a storage's life."""
        last = len(self.ops) if s.died is None else s.died
        if not (s.was_saved and s.category in PASSING):
            yield s.born, last, s.category
            return
        until = last if s.holders or s.released is None else min(s.released, last)
        yield s.born, until, "activations"
        yield until + 1, last, s.category

    def curve(self) -> list[Moment]:
        """One Moment before the first operation and one after each."""
        change = [Counter() for _ in range(len(self.ops) + 2)]
        for s in self.storages:
            for begin, end, category in self._spans(s):
                if begin > end:
                    continue
                size = next((n for at, n in reversed(s.sizes) if at <= begin), s.sizes[0][1])
                change[begin][category] += size
                for at, n in s.sizes:
                    if begin < at <= end:
                        change[at][category] += n - size
                        size = n
                change[end + 1][category] -= size
        now, moments = Counter(), []
        for k in range(len(self.ops) + 1):
            now.update(change[k])
            op, at = self.ops[k - 1] if k else ("start", self.begin)
            moments.append(Moment(k, op, at, {c: now[c] for c in CATEGORIES}))
        return moments

    def categories(self) -> list[str]:
        """CATEGORIES, "buffers" only where there were any."""
        return [c for c in CATEGORIES if c != "buffers" or any(s.category == c for s in self.storages)]

    def ends(self) -> dict[str, int]:
        """Phase -> the moment at which it is over: the next one begins, or the block ends."""
        stops = [*(begin for begin, _ in self.phases), len(self.ops)][1:]
        return {name: stop for (_, name), stop in zip(self.phases, stops, strict=True)}

    def at(self, phase: str) -> Moment:
        """The last moment of a phase."""
        ends = self.ends()
        if phase not in ends:
            raise ValueError(f"no phase {phase!r}; recorded: {', '.join(ends) or 'none (call ledger.phase(name))'}")
        return self.curve()[ends[phase]]

    def saved_tensors(self) -> list[Saved]:
        """Each activation storage that was saved, where it was first saved; parameters and inputs left out."""
        seen: set[int] = set()
        first = []
        for save in self.saves:
            s = save.storage
            if s.category in PASSING and s.number not in seen:
                seen.add(s.number)
                first.append(save)
        return first

    def by(self, field: str) -> dict:
        """Bytes of saved activations by a field of Saved ("where", "module", "dtype"), largest first."""
        total = Counter()
        for save in self.saved_tensors():
            total[getattr(save, field)] += save.bytes
        return dict(total.most_common())

    def table(self) -> str:
        """Bytes by category at the end of each phase and at the peak."""
        curve = self.curve()
        top = max(curve, key=lambda m: m.total)
        columns = [("start", curve[0])] + [(f"after {name}", curve[k]) for name, k in self.ends().items()] + [("peak", top)]
        width = max(14, *(len(name) + 2 for name, _ in columns))
        rows = [" " * 18 + "".join(f"{name:>{width}}" for name, _ in columns)]
        rows += [f"{c:<18}" + "".join(f"{m.bytes[c]:>{width},}" for _, m in columns) for c in self.categories()]
        rows.append(f"{'total':<18}" + "".join(f"{m.total:>{width},}" for _, m in columns))
        return "\n".join(rows) + f"\nbytes; peak after operation {top.index} of {len(self.ops)} ({top.op})"


def ranks_table(stories: Sequence[Story], phase: str | None = None) -> str:
    """A line for each rank: bytes by category at the end of `phase`, or at the rank's own peak."""
    names = [c for c in CATEGORIES if any(c in story.categories() for story in stories)]
    rows = [f"{'rank':>4}" + "".join(f"{c:>14}" for c in (*names, "total"))]
    for rank, story in enumerate(stories):
        moment = story.at(phase) if phase is not None else max(story.curve(), key=lambda m: m.total)
        rows.append(f"{rank:>4}" + "".join(f"{moment.bytes[c]:>14,}" for c in names) + f"{moment.total:>14,}")
    return "\n".join(rows) + f"\nbytes {'after ' + phase if phase is not None else 'at the peak of each rank'}"
