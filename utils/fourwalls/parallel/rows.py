"""Which part owns which row of a table, and what a batch really asks for: each row once, in order of its owner.

A batch of ids holds the frequent ones again and again. Merged, each row is fetched once, used as often as it occurs, and its
gradient is added up before it travels back. The rule from id to owner must be the same on all ranks and in all runs; `modulo`
deals the rows out like cards, so that frequent ids, which have small numbers, do not all fall to one owner; `block` cuts the
table into slabs, so that they do.

    modulo: owner(i) = i mod n, place i div n            block: owner(i) = the slab of about rows/n that holds i

Reference: Mudigere et al. 2022 (arXiv:2104.05158), row-wise sharding of embedding tables.
"""

from dataclasses import dataclass

import torch

__all__ = ["RULES", "Request", "RowOwners", "make_request"]

RULES = ("modulo", "block")
ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class RowOwners:
    """`rows` rows dealt out to `parts` owners by a rule of RULES. Every function is arithmetic: nothing is looked up."""

    rows: int
    parts: int
    rule: str = "modulo"

    def __post_init__(self):
        for word in ("rows", "parts"):
            value = getattr(self, word)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{word} is {value!r}; it is a whole number of at least 1")
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; allowed: {', '.join(RULES)}")

    def check(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (k,). ValueError that names the first id that no part owns, or a dtype that is none of an id."""
        if ids.dtype not in ID_DTYPES:
            raise ValueError(f"ids are {str(ids.dtype).removeprefix('torch.')}; allowed: int32, int64; try ids.long()")
        flat = ids.reshape(-1)
        bad = (flat < 0) | (flat >= self.rows)
        if bad.any():
            place = int(bad.nonzero()[0])
            raise ValueError(f"id {int(flat[place])} at place {place} has no owner: the table has rows 0 to {self.rows - 1}")
        return flat

    def owner(self, ids: torch.Tensor) -> torch.Tensor:
        """The part that owns each id."""
        if self.rule == "modulo":
            return ids % self.parts
        size, more = divmod(self.rows, self.parts)  # the first `more` slabs have one row more
        cut = more * (size + 1)
        return torch.where(ids < cut, ids // (size + 1), more + (ids - cut) // max(size, 1))

    def place(self, ids: torch.Tensor) -> torch.Tensor:
        """The row of its owner's shard in which each id lies; int64, to index with."""
        ids = ids.long()
        if self.rule == "modulo":
            return ids // self.parts
        size, more = divmod(self.rows, self.parts)
        owner = self.owner(ids)
        return ids - owner * size - owner.clamp(max=more)

    def ids_of(self, part: int) -> torch.Tensor:
        """The ids that `part` owns, in the order of its shard."""
        if self.rule == "modulo":
            return torch.arange(min(part, self.rows), self.rows, self.parts)  # a part beyond the last row owns nothing
        size, more = divmod(self.rows, self.parts)
        start = part * size + min(part, more)
        return torch.arange(start, start + size + (part < more))


@dataclass(frozen=True)
class Request:
    """What one batch asks for. `wanted`: its different ids, those of owner 0 first; counts[q]: how many of them q owns;
    `place`: for each id of the batch, in which of `wanted` it is; `shape`: the batch's.
    """

    wanted: torch.Tensor
    counts: list[int]
    place: torch.Tensor
    shape: tuple[int, ...]


def make_request(ids: torch.Tensor, owners: RowOwners) -> Request:
    """ids (...) of int32 or int64 -> Request. ValueError for an id that nobody owns."""
    flat = owners.check(ids)
    unique, place = torch.unique(flat, return_inverse=True)
    owner = owners.owner(unique)
    order = torch.argsort(owner, stable=True)
    where = torch.empty_like(order)
    where[order] = torch.arange(len(order))
    counts = torch.bincount(owner.long(), minlength=owners.parts).tolist()
    return Request(unique[order].contiguous(), counts, where[place], tuple(ids.shape))
