"""A batch cut into micro-batches that know their number.

A pipeline feeds its first stage with inputs and its last stage with targets, on different ranks and minutes apart; what holds the
two together is the number of the micro-batch. Sizes differ by at most one row, or follow a size that is given; an empty
micro-batch is refused, since its mean would be nan and its sum would hide the mistake.

    sum over micro-batches of (sum of losses) / (count of the whole batch)  =  mean loss of the batch,  whatever the cuts

Reference: Huang et al. 2019 (GPipe, arXiv:1811.06965), section 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["MicroBatch", "check_numbers", "count_targets", "split_batch"]


class MicroBatch(NamedTuple):
    """Micro-batch number `index`: rows for the first stage, targets for the last. Either may be None where it is not needed."""

    index: int
    inputs: torch.Tensor | None
    targets: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many examples it holds."""
        return len(self.inputs if self.inputs is not None else self.targets)


def split_batch(
    inputs: torch.Tensor, targets: torch.Tensor | None = None, *, count: int | None = None, size: int | None = None
) -> list[MicroBatch]:
    """Cut along dim 0 into `count` micro-batches whose rows differ by at most one, or into ones of `size` rows, the last smaller.

    Views, no copies. With both given they must fit. ValueError where a micro-batch would be empty, with the numbers that work.
    """
    for word, value in (("inputs", inputs), ("targets", targets)):
        if not (isinstance(value, torch.Tensor) and value.dim()) and (value is not None or word == "inputs"):
            raise ValueError(f"{word} is {value!r:.60}; allowed: a tensor whose first dim counts the rows of the batch")
    rows = len(inputs)
    if targets is not None and len(targets) != rows:
        raise ValueError(f"{rows} rows of inputs and {len(targets)} of targets; allowed: as many of each")
    if count is None and size is None:
        raise ValueError("give count (number of micro-batches) or size (rows in each)")
    for word, value in (("count", count), ("size", size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{word} is {value!r}; allowed: a whole number of at least 1, nearest 1")
    if size is not None:
        needed = -(-rows // size)
        if count is not None and count != needed:
            raise ValueError(f"{rows} rows in micro-batches of {size} make {needed}, not {count}; nearest: count={needed}")
        sizes = [size] * (rows // size) + [rows % size] * (rows % size > 0)
    else:
        if count > rows:
            raise ValueError(f"{rows} rows cannot fill {count} micro-batches; allowed: count from 1 to {rows}, nearest {rows}")
        sizes = [rows // count + (k < rows % count) for k in range(count)]
    if not sizes:
        raise ValueError("the batch has no rows; allowed: at least one")
    parts = inputs.split(sizes), targets.split(sizes) if targets is not None else [None] * len(sizes)
    return [MicroBatch(k, x, y) for k, (x, y) in enumerate(zip(*parts, strict=True))]


def check_numbers(microbatches: Sequence[MicroBatch], count: int) -> None:
    """ValueError unless there are `count` micro-batches and each stands at its number, none of them empty."""
    if len(microbatches) != count:
        raise ValueError(f"{len(microbatches)} micro-batches for a schedule of {count}; allowed: {count}")
    for place, micro in enumerate(microbatches):
        if not isinstance(micro, MicroBatch):
            raise ValueError(f"micro-batch {place} is a {type(micro).__name__}; allowed: MicroBatch, as split_batch makes them")
        if micro.index != place:
            raise ValueError(
                f"micro-batch {micro.index} stands at place {place}: outputs of micro-batch {place} would meet the targets of "
                f"{micro.index}; allowed: micro-batches in the order of their numbers"
            )
        if micro.inputs is not None and micro.targets is not None and len(micro.inputs) != len(micro.targets):
            raise ValueError(f"micro-batch {place}: {len(micro.inputs)} rows of inputs, {len(micro.targets)} of targets")
        if (micro.inputs is not None or micro.targets is not None) and micro.rows == 0:
            raise ValueError(f"micro-batch {place} has no rows; allowed: at least one")


def count_targets(microbatches: Sequence[MicroBatch], *, ignore: int = -100) -> int:
    """Targets that count in all micro-batches: what a sum of losses is divided by to be the mean of the whole batch."""
    return sum(int((micro.targets != ignore).sum()) for micro in microbatches)
