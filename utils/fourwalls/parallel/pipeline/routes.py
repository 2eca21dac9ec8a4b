"""What a rank of a pipeline must send and receive, read off the schedule before anything runs.

The schedule is known to every rank, so each knows who will consume what it makes, who makes what it needs, and, when something
arrives, how far the sender had come: everything that the sender did before has taken its inputs, so those messages are over.

    message (product, stage, micro-batch):  from rank(stage) to rank(stage + 1) for outputs, to rank(stage - 1) for gradients
    tag = 1 + 2 (stage m + micro-batch) + [gradient],  modulo the tags that there are

Reference: Lamport 1978 (what is known to have happened before); the needs are those of `actions.needs`.
"""

from typing import NamedTuple

from ...ranks.comm import MAX_TAG
from .actions import Schedule, microbatches_of, needs, parts, placement, stages_of

__all__ = ["Need", "Routes"]


class Need(NamedTuple):
    """An input of a cell that comes from another rank: ("F" or "G", stage that makes it, micro-batch), and who has it."""

    product: tuple[str, int, int]
    rank: int


class Routes:
    """The messages of rank `rank`. needs[place]: what cell `place` waits for from other ranks.

    rank_of: stage -> rank.  stages, microbatches: of the schedule.  Idle cells are left out of `cells`.
    """

    def __init__(self, schedule: Schedule, rank: int):
        self.stages, self.microbatches, self.rank_of = stages_of(schedule), microbatches_of(schedule), placement(schedule)
        self.rank = rank
        rows = [[cell for cell in row if cell is not None] for row in schedule]
        self.cells = rows[rank] if rank < len(rows) else []
        self.mine = sorted({a.stage for cell in self.cells for a in parts(cell)})
        self.needs = [self._needs_of(cell) for cell in self.cells]
        self._made, self._used = {}, {}  # product -> place in its maker's row; (product, rank) -> place in its user's row
        for row in rows:
            for place, cell in enumerate(row):
                for action in parts(cell):
                    if action.kind != "W":
                        self._made["F" if action.kind == "F" else "G", action.stage, action.microbatch] = place
                        for product in self._from_elsewhere(action):
                            self._used[product] = place

    def goes_to(self, product: tuple[str, int, int]) -> int | None:
        """The rank that needs this product of ours, or None: nobody, or this rank itself."""
        kind, stage, _ = product
        other = stage + 1 if kind == "F" else stage - 1
        rank = self.rank_of.get(other)
        return None if rank is None or rank == self.rank_of[stage] or product not in self._used else rank

    def is_over(self, sent: tuple[str, int, int], arrived: tuple[str, int, int]) -> bool:
        """Whether `sent` must have been received, now that `arrived` has come from the rank that receives it."""
        return self._used[sent] < self._made[arrived]

    def tag(self, product: tuple[str, int, int]) -> int:
        """The message's tag. Numbers that fall together (beyond 32 thousand) are told apart by their order."""
        kind, stage, microbatch = product
        return 1 + (2 * (stage * self.microbatches + microbatch) + (kind == "G")) % MAX_TAG

    def _needs_of(self, cell) -> list[Need]:
        return [Need(product, self.rank_of[product[1]]) for action in parts(cell) for product in self._from_elsewhere(action)]

    def _from_elsewhere(self, action):
        """Products of other stages on other ranks that this action needs."""
        for product in needs(action, self.stages):
            if action.kind != "W" and product[1] != action.stage and self.rank_of[product[1]] != self.rank_of[action.stage]:
                yield product
