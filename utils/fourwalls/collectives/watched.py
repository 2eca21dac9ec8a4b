"""A rank watched from outside: what it computes, receives and keeps, without a change to its program.

Rank r puts the number 16**r into each cell, so a sum shows who is in it and how often; a second part of the number says which
cell it belongs to. Every operation of the rank and every message it receives is looked at, and the cell takes the value
written last.

    cell value = sum over contributors of (16**r  +  2**32 * (position + 1)**3)

Reference: the encoding is a number in base 16 with one digit per rank; torch's dispatch modes show each operation.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ranks.comm import Comm, Request

__all__ = ["Watch", "WatchedComm", "Watcher", "decode", "encode", "values_of"]

BASE, SHIFT = 16, 32
CREATE = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "resize_", "set_")


def encode(rank: int, cells: int) -> torch.Tensor:
    """The buffer that rank `rank` brings: float64, shape (cells,). Whole numbers below 2**52, so sums are exact."""
    return torch.tensor([BASE**rank + (p + 1) ** 3 * 2.0**SHIFT for p in range(cells)], dtype=torch.float64)


def decode(value: float, ranks: int, cells: int) -> tuple[int | None, dict[int, int]] | None:
    """(cell, {contributor: times}); cell None: several cells mixed. None: no sum of encoded numbers. 0 -> (None, {})."""
    if not 0 <= value < 2.0**52 or value != int(value):
        return None
    high, low = divmod(int(value), 2**SHIFT)
    digits = {r: low // BASE**r % BASE for r in range(ranks)}
    counts = {r: n for r, n in digits.items() if n}
    total = sum(counts.values())
    if low >= BASE**ranks or not total:
        return (None, {}) if value == 0 else None
    cell = next((p for p in range(cells) if (p + 1) ** 3 * total == high), None)
    return (cell, counts) if cell is not None or high else None


def values_of(tensor: torch.Tensor) -> list[float]:
    """The elements as numbers, in order; none of a complex or meta tensor."""
    return tensor.detach().reshape(-1).to(torch.float64).tolist() if not tensor.is_complex() and not tensor.is_meta else []


class Watcher:
    """What one rank holds: for each cell the value written last, and in which storage."""

    def __init__(self, rank, ranks, cells):
        self.rank, self.ranks, self.cells, self.quiet = rank, ranks, cells, 0
        self.held: list[tuple[dict, object]] = []
        self.log: list[tuple[int, list[dict]]] = []

    def begin(self, x):
        self.held = [({self.rank: 1}, x.untyped_storage()) for _ in range(self.cells)]
        self.log = [(0, [cell for cell, _ in self.held])]

    @contextmanager
    def silence(self):
        """What happens inside is the transport's doing, not the rank's."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def settle(self, clock, out=None):
        """Write down the cells as they are at `clock`, if anything changed."""
        if out is not None:
            self.wrote(out)
        now = [cell for cell, _ in self.held]
        if now != self.log[-1][1]:
            self.log.append((clock, now))

    def wrote(self, tensor, *, received=False):
        """`tensor` has new contents. A received one counts in the working buffer, or where it adds to the cell."""
        if tensor.dtype != torch.float64 or tensor.numel() > 64 * self.cells:
            return
        with self.silence():
            values, storage = values_of(tensor), tensor.untyped_storage()
            place = self._places(tensor, storage)
        for k, value in enumerate(values):
            found = decode(value, self.ranks, self.cells)
            if found is None:
                continue
            cell, counts = found
            at = place[k] if place else None
            if at is not None and cell != at:
                counts, cell = ({**counts, -1: 1} if counts else {}), at
            if cell is None:
                continue
            before, where = self.held[cell]
            grows = all(counts.get(r, 0) >= n for r, n in before.items())
            if not received or grows or where.data_ptr() == storage.data_ptr():
                self.held[cell] = (counts, storage)

    def _places(self, tensor, storage):
        """The cells that the elements of `tensor` lie in, if it is part of the buffer that holds most of them."""
        inside = sum(s.data_ptr() == storage.data_ptr() for _, s in self.held)
        if storage.nbytes() != self.cells * tensor.element_size() or 2 * inside <= self.cells:
            return None
        index = torch.arange(self.cells).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return index.reshape(-1).tolist()


class Watch(TorchDispatchMode):
    """Tells the watcher of every tensor that an operation of this rank makes or changes."""

    def __init__(self, watcher):
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.watcher.quiet or func._schema.name.partition("::")[2] in CREATE:
            return out
        results = out if isinstance(out, (tuple, list)) else [out]
        for result, declared in zip(results, func._schema.returns, strict=False):
            view = declared.alias_info is not None and not declared.alias_info.is_write
            if isinstance(result, torch.Tensor) and not view:
                self.watcher.wrote(result)
        return out


class _WatchedRequest(Request):
    def __init__(self, request, comm, buf):
        self._request, self._comm, self._buf = request, comm, buf

    def wait(self):
        self._comm._note()
        with self._comm._watcher.silence():
            out = self._request.wait()
        if self._buf is not None:
            self._comm._watcher.wrote(self._buf, received=True)
            self._buf = None
        return out

    @property
    def done(self):
        with self._comm._watcher.silence():
            return self._request.done


class WatchedComm(Comm):
    """The simulated Comm, seen through a watcher; its programs cannot tell the difference."""

    def __init__(self, comm, watcher):
        self._comm, self._watcher = comm, watcher
        self.rank, self.size, self.device, self.seed = comm.rank, comm.size, comm.device, comm.seed
        self.simulated, self.checks = comm.simulated, comm.checks

    def _note(self):
        self._watcher.settle(self._comm.clock())

    def isend(self, x, to, tag=0):
        self._note()
        with self._watcher.silence():
            return _WatchedRequest(self._comm.isend(x, to, tag), self, None)

    def irecv(self, buf, frm, tag=0):
        self._note()
        with self._watcher.silence():
            return _WatchedRequest(self._comm.irecv(buf, frm, tag), self, buf)

    def agree(self, call):
        with self._watcher.silence():
            self._comm.agree(call)

    def barrier(self):
        self._note()
        with self._watcher.silence():
            self._comm.barrier()

    def split(self, color, key=0):
        self._note()
        with self._watcher.silence():
            part = self._comm.split(color, key)
        return None if part is None else WatchedComm(part, self._watcher)

    def compute(self, label, **cost):
        self._note()
        return self._comm.compute(label, **cost)

    def clock(self):
        return self._comm.clock()

    def mark_live(self, bytes):
        self._comm.mark_live(bytes)

    @property
    def native(self):
        return self._comm.native
