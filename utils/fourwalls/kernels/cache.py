"""A modelled cache: which pages of which storages it holds, and what it must fetch and write back.

It holds so many pages, and the one that was used longest ago makes room for a new one; a page that was changed is written to
memory when it leaves. A storage that is freed leaves nothing behind. Real caches keep lines of 64 bytes in sets, and fetch ahead;
what a whole tensor or a block of rows costs is the same.

    fetched = pages read that were not there        written back = changed pages that leave, or are there at the end

Reference: Mattson et al. 1970, "Evaluation techniques for storage hierarchies" (least recently used).
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterable

import torch

__all__ = ["PAGE", "Cache", "pages_of"]

PAGE = 4096  # bytes: what is kept or dropped at once


class Cache:
    """Pages of storages, the one that was used last at the end; each clean or dirty."""

    def __init__(self, pages: int):
        self.capacity = pages
        self._held: OrderedDict[tuple[int, int], bool] = OrderedDict()  # (storage, page) -> dirty
        self._numbers: dict[int, int] = {}  # by address of the storage's C++ object, living ones only
        self._sizes: dict[int, int] = {}
        self._guards: dict[int, weakref.ref] = {}
        self._next = 0

    def touch(self, tensor: torch.Tensor, *, write: bool) -> tuple[int, int]:
        """(bytes missed, bytes written back to make room)."""
        number = self._number(tensor.untyped_storage())
        missed = back = 0
        for page in pages_of(tensor):
            key = number, page
            dirty = self._held.pop(key, None)
            if dirty is None and not write:
                missed += self._bytes(key)
            self._held[key] = write or bool(dirty)
            if len(self._held) > self.capacity:
                oldest, was_dirty = self._held.popitem(last=False)
                back += self._bytes(oldest) if was_dirty else 0
        return missed, back

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all its pages are here."""
        number = self._number(tensor.untyped_storage())
        return all((number, page) in self._held for page in pages_of(tensor))

    def flush(self) -> int:
        """Bytes that are still to be written back."""
        return sum(self._bytes(key) for key, dirty in self._held.items() if dirty)

    def _bytes(self, key: tuple[int, int]) -> int:
        return min(PAGE, self._sizes[key[0]] - key[1] * PAGE)  # the last page of a storage may be short

    def _number(self, storage) -> int:
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[address], self._sizes[number] = number, storage.nbytes()
            self._guards[number] = weakref.ref(storage, lambda _: self._forget(address, number))
        return number

    def _forget(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        for page in range(-(-self._sizes[number] // PAGE)):
            self._held.pop((number, page), None)


def pages_of(t: torch.Tensor) -> Iterable[int]:
    """The pages of its storage that a tensor's elements lie in."""
    if t.numel() == 0:
        return ()
    size, run, rest = t.element_size(), 1, []
    for stride, n in sorted((stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if stride and n > 1):
        if stride == run and not rest:
            run *= n  # so many elements lie next to each other
        else:
            rest.append((stride, n))
    starts = [t.storage_offset()]
    for stride, n in reversed(rest):
        starts = [start + k * stride for start in starts for k in range(n)]
    if len(starts) == 1:
        return range(starts[0] * size // PAGE, ((starts[0] + run) * size - 1) // PAGE + 1)
    found: dict[int, None] = {}
    for start in starts:
        found.update(dict.fromkeys(range(start * size // PAGE, ((start + run) * size - 1) // PAGE + 1)))
    return found
