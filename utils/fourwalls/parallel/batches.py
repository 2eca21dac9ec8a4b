"""Who gets which rows, for as long as anybody has some: an order that is a function of (seed, epoch), and steps that end
together.

The order of an epoch comes from a generator of its own, seeded by seed and epoch: all ranks draw the same one without a message,
nobody's random numbers move, and each epoch is shuffled anew. Where ranks bring batches of their own, `together` keeps them in
step: one that has run out takes part with nothing until the last is done.

    rows of rank r in step k  =  piece r of  order(seed, epoch)[k B : (k + 1) B],     B = n b

Reference: torch's DistributedSampler (whose epoch the caller must set) and its Join.
"""

from collections.abc import Iterable, Iterator

import torch

from ..collectives import all_gather
from ..collectives.chunks import chunk_sizes
from ..nn.init import name_seed
from ..ranks.comm import Comm

__all__ = ["Shuffled", "own_part", "reseed", "together"]

WHEN = ("shadow", "shortest", "refuse")


class Shuffled:
    """`for rows in Shuffled(1000, rank=comm.rank, size=comm.size, batch=8)`: this rank's row numbers, step by step, one epoch.

    Each `for` is the next epoch, in another order; `epoch` can be set. batch: rows of a rank. last: what becomes of the rows that
    do not fill a step: "split" them as evenly as can be (a rank may get an empty tensor, and takes a shadow step), or "drop"
    them. All ranks get the same number of steps.
    """

    def __init__(self, count: int, *, rank: int, size: int, batch: int, seed: int = 0, last: str = "split"):
        for word, value, least in (("count", count, 1), ("size", size, 1), ("batch", batch, 1), ("rank", rank, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{word} is {value!r}; a whole number of at least {least}")
        if rank >= size:
            raise ValueError(f"rank {rank} of {size}; ranks are 0 to {size - 1}")
        if last not in ("split", "drop"):
            raise ValueError(f"last is {last!r}; 'split' or 'drop'")
        if last == "drop" and count < size * batch:
            raise ValueError(f"{count} rows fill no step of {size} x {batch}; largest batch: {count // size}, or last='split'")
        self.count, self.rank, self.size, self.batch, self.seed, self.last, self.epoch = count, rank, size, batch, seed, last, 0

    def __len__(self) -> int:
        whole, rest = divmod(self.count, self.size * self.batch)
        return whole + (rest > 0 and self.last == "split")

    def order(self, epoch: int) -> torch.Tensor:
        """All row numbers in the order of that epoch."""
        generator = torch.Generator().manual_seed(name_seed(self.seed, f"epoch {epoch}"))
        return torch.randperm(self.count, generator=generator)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, step = self.order(self.epoch), self.size * self.batch
        self.epoch += 1
        for k in range(len(self)):
            yield order[k * step : (k + 1) * step].tensor_split(self.size)[self.rank]


def own_part(x: torch.Tensor, rank: int, size: int, *, empty: bool = False) -> torch.Tensor:
    """Rank's piece of a batch along dim 0; pieces differ by at most one row. ValueError where one gets none (unless `empty`), and
    for a rank that does not exist.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}; ranks are 0 to {size - 1}")
    if len(x) < size and not empty:
        legal = f"nearest legal: {size} rows, or {len(x)} ranks"
        raise ValueError(f"a batch of {len(x)} rows on {size} ranks leaves {size - len(x)} without any; {legal}")
    return x.split(chunk_sizes(len(x), size))[rank]


def together(comm: Comm, batches: Iterable, *, when: str = "shadow") -> Iterator:
    """This rank's `batches`, one a step, on every rank equally often.

    when: what happens once a rank has run out. "shadow": it gets None until all have (then it calls `synchronise(shadow=True)`).
    "shortest": all stop. "refuse": ValueError on every rank, which names it. Also ends loops that each rank would end by its own
    clock. A rank sends 8 (n - 1) bytes a step; every rank must go on until it ends.
    """
    if when not in WHEN:
        raise ValueError(f"when is {when!r}; one of {', '.join(map(repr, WHEN))}")
    own, step, nothing = iter(batches), 0, object()
    while True:
        item = next(own, nothing)
        have = all_gather(comm, torch.tensor(int(item is not nothing), device=comm.device)).tolist()
        out = [rank for rank, one in enumerate(have) if not one]
        if len(out) == comm.size or (out and when == "shortest"):
            return
        if out and when == "refuse":
            raise ValueError(
                f"rank {out[0]} ran out of batches after {step}, and rank {have.index(1)} has more; deal them evenly, or give "
                "when='shadow' or 'shortest'"
            )
        yield None if item is nothing else item
        step += 1


def reseed(seed: int, step: int, microbatch: int) -> None:
    """Seed torch's default generator for one micro-batch of the whole step, counted over all ranks: what is dropped in it is then
    the same on any number of ranks.
    """
    torch.default_generator.manual_seed(name_seed(seed, f"step {step}, micro-batch {microbatch}"))
