"""Two stages on each rank, laid out as a V: down the ranks and up again, so that the last stage sits beside the first.

Rank r has the stages r and 2 p - 1 - r. The loss is computed on rank 0, whose backward pass can start at once, and early
and late stages, which hold activations long and shortly, share a rank: all ranks hold the same. ZB-V fills the gaps with W;
DualPipe-V joins a forward pass with a backward pass of another micro-batch, so that the messages of one hide behind the other.

    stage s < p on rank s, else on 2 p - 1 - s        ZB-V: no bubble at F = I = W;        holds 2 p half-sized activations

Reference: Qi et al. 2023 (arXiv:2401.10241), section 6; DeepSeek-AI 2024 (arXiv:2412.19437) and the README of DualPipe.
"""

from .actions import Action, Cell, Joined, Schedule
from .schedules import whole

__all__ = ["dualpipe_v", "zb_v"]


class _Row:
    """A rank's list as it grows: `down` and `up` are its two stages; each kind counts its own micro-batches."""

    def __init__(self, rank: int, ranks: int):
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.cells, self.count, self.owed = [], {}, []

    def next(self, stage: int, kind: str) -> Action:
        """The next action of this kind on this stage. B counts as I and W at once; the W of an I is owed."""
        counter = stage, "I" if kind == "B" else kind
        microbatch = self.count.get(counter, 0)
        self.count[counter] = microbatch + 1
        if kind == "I":
            self.owed.append(Action(stage, "W", microbatch))
        return Action(stage, kind, microbatch)

    def add(self, stage: int, kind: str) -> None:
        self.cells.append(self.next(stage, kind))

    def pay(self, stage: int | None = None) -> None:
        """The W that has been owed longest (of one stage, if given), if any is."""
        found = next((w for w in self.owed if stage in (None, w.stage)), None)
        if found is not None:
            self.owed.remove(found)
            self.cells.append(found)

    def join(self, forward: int, backward: int) -> None:
        """A forward pass of one stage and a whole backward pass of the other, as one."""
        self.cells.append(Joined((self.next(forward, "F"), self.next(backward, "B"))))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble in a V. Fewer than 2 p - 1 micro-batches: as with 2 p - 1, and what does not exist is left out."""
    whole(ranks=ranks, microbatches=microbatches)
    planned = max(microbatches, 2 * ranks - 1)
    return [[cell for cell in _zb_v_row(r, ranks, planned) if cell.microbatch < microbatches] for r in range(ranks)]


def _zb_v_row(rank: int, ranks: int, planned: int) -> list[Action]:
    row = _Row(rank, ranks)
    down, up, left = row.down, row.up, ranks - rank

    def work(stage: int) -> None:
        row.add(stage, "I")
        row.pay(stage)

    for _ in range(2 * left - 1):  # down the V, until the first micro-batch comes back up
        row.add(down, "F")
    for _ in range(rank):
        row.add(up, "F")
        row.add(down, "F")
    for _ in range(left):
        row.add(up, "F")
        work(up)
    sent, back = 2 * left - 1 + rank, left + rank
    while sent < planned or back < sent:  # steady: forward and backward on either arm
        if sent < planned:
            row.add(down, "F")
            sent += 1
        work(down)
        row.add(up, "F")
        back += 1
        work(up)
    for _ in range(rank):  # only I, so that the ranks before are not kept waiting; W comes after
        row.add(down, "I")
        row.add(up, "I")
    for _ in range(left):
        work(down)
    while any(w.stage == up for w in row.owed):
        row.pay(up)
    while row.owed:
        row.pay(down)
    return row.cells


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Forward and backward passes joined through the steady part. ValueError with fewer than 2 p micro-batches."""
    whole(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        wanted = f"{2 * ranks} stages and needs as many micro-batches"
        raise ValueError(f"DualPipe-V on {ranks} ranks has {wanted}; got {microbatches}, nearest legal: {2 * ranks}")
    return [_dualpipe_v_row(r, ranks, microbatches) for r in range(ranks)]


def _dualpipe_v_row(rank: int, ranks: int, microbatches: int) -> list[Cell]:
    row = _Row(rank, ranks)
    down, up, behind = row.down, row.up, ranks - rank - 1
    for _ in range(2 * behind):  # fill the way down and up
        row.add(down, "F")
    for _ in range(rank + 1):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(behind):
        row.add(up, "I")
        row.pay()
        row.add(up, "F")
    for k in range(microbatches - 2 * ranks + rank + 1):  # steady: both arms, joined crosswise
        if k == 0 and behind == 0:  # the turning point would wait for itself if it joined its first pair
            row.add(down, "F")
            row.add(up, "B")
        else:
            row.join(down, up)
        row.join(up, down)
    for _ in range(behind):  # nothing new comes down
        row.add(up, "B")
        row.join(up, down)
    whole_ones = rank + 1  # of the 2 (rank + 1) backward passes left, the first half are whole, then W is put off
    for k in range(2 * (rank + 1)):
        row.add(down if k % 2 else up, "B" if k < whole_ones else "I")
    for _ in range(behind):
        row.pay()
        row.add(down, "I")
    while row.owed:
        row.pay()
    return row.cells
