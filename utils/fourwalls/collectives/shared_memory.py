"""All-reduce for ranks of one host: no wire at all, only memory that all of them see.

The tensor is cut into one chunk per rank, as for the ring, and goes through the common memory block by block. For each block a
rank lays out its pieces of the others' chunks, adds up the pieces of its own chunk in the order in which the ring would have
met them, and fetches the finished pieces of the others. Three blocks are under way at a time, so that nobody waits for the
slowest step. Small tensors take a shorter way: everybody lays out everything, once, and adds up all of it.

    chunk c  =  x_c + (x_(c-1) + ( ... (x_(c+2) + x_(c+1)))),   rank numbers mod n: the bits of the ring
    copied by a rank  =  about 2 (n-1)/n S out of and 2 (n-1)/n S into its own tensor;   bytes and messages sent  =  0

Reference: Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives", 2008.
"""

import sys
from collections.abc import Callable

import torch

from ..ranks.comm import Comm
from ..ranks.shared import Area, open_area
from . import ring
from .agree import agree
from .chunks import check_segment, chunk_sizes, cut, finish, flat_input, result_buffer, segment_count
from .reductions import get_reduction

__all__ = ["BUFFERS", "SMALL_BYTES", "all_reduce", "row_bytes"]

BUFFERS = 3  # blocks in the memory at once: one being laid out, one added up, one fetched
SMALL_BYTES = 2**18  # up to n S of this, one round of tokens with more copying beats two rounds; fits into a row
GIVEN, DONE = 0, 1  # tokens: "my pieces of this block are there", "my chunk of this block is finished"
ALIGN = 64


def all_reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", segment_bytes: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every rank returns the reduction over all ranks: the bits of `ring.all_reduce`, and the same on every rank. `out=x` works
    in place.

    The memory is made at the first call on `comm` and kept with it. segment_bytes: at most so much of a chunk at a time (None: as
    much as fits). Where there is no memory in common (other hosts, GPUs, simulated ranks, not Linux) rank 0 says so on its
    standard error, once, and the ring stands in. Raises ValueError for an operation that the dtype lacks, MismatchError (checks
    on) where calls differ.
    """
    reduction = get_reduction(op, x.dtype)
    check_segment(segment_bytes)
    agree(comm, "all_reduce", x, algorithm="shared_memory", op=op, segment_bytes=segment_bytes)
    room = _room(comm) if comm.size > 1 else None
    if isinstance(room, str) or x.is_meta:  # the ring says what to do with a tensor that has no data
        return ring.all_reduce(comm, x, op=op, out=out)
    source, result = flat_input(x), result_buffer(x, x.shape, out)
    if comm.size == 1:
        reduction.finish(result.copy_(source), 1)
    elif source.nbytes * comm.size <= SMALL_BYTES and segment_bytes is None:
        room.all_at_once(comm, source, result, reduction)
    else:
        room.block_by_block(comm, source, result, reduction, segment_bytes)
    return finish(result, x.shape, out)


def row_bytes(n: int) -> int:
    """Room for one block, all chunks' pieces of it: 2 MiB, less for many ranks, whose n rows would otherwise fill the memory."""
    return max(min(2**21, 2**23 // n) // (n * ALIGN), 1) * n * ALIGN


def _room(comm: Comm) -> "_Room | str":
    """The common memory of this communicator, made when first asked for; in words why there is none."""
    room = getattr(comm, "_room", None)
    if room is None:
        area = open_area(comm, BUFFERS * comm.size * row_bytes(comm.size))
        room = comm._room = area if isinstance(area, str) else _Room(area, comm.size, comm.rank)
        if isinstance(room, str) and comm.rank == 0:
            print(f"shared memory: {room}; the ring stands in, with the same result", file=sys.stderr)
    return room


class _Room:
    """What stands where: `BUFFERS` blocks of n rows. Row i, chunk c holds the piece of rank (c + 1 + i) mod n: what the ring
    would add in its step i. The last row, whose pieces are their owners', takes the finished ones.
    """

    def __init__(self, area: Area, n: int, rank: int):
        self.area, self.n, self.rank, self.block = area, n, rank, 0
        self.width = row_bytes(n) // n  # bytes of one piece
        self.rows = area.data.view(BUFFERS, n, n * self.width)
        self.others = [(rank + 1 + i) % n for i in range(n - 1)]
        self.cells: dict[torch.dtype, list] = {}
        self.plans: dict[tuple, list] = {}

    def all_at_once(self, comm: Comm, source: torch.Tensor, result: torch.Tensor, reduction) -> None:
        """One block: lay out all chunks, hear from everybody, add up all rows."""
        area, (sizes, plan) = self.area, self._plan(source)
        pieces, rows = plan[self.block % BUFFERS]
        self.block += 1
        torch._foreach_copy_(pieces, source.split(sizes))
        for peer in self.others:
            area.tell(peer, GIVEN)
        for peer in self.others:
            area.hear(peer, GIVEN)
        _fold(comm, reduction, rows, result)
        reduction.finish(result, self.n)

    def block_by_block(self, comm: Comm, source, result, reduction, segment_bytes: int | None) -> None:
        """Blocks in a row, each laid out while the one before it is added up and fetched.

        A block's place is used again three blocks later: by then everybody has said DONE to the second after it, and so has
        fetched the first.
        """
        n, me, area, cells, first = self.n, self.rank, self.area, self._cells(source), self.block
        piece = max(1, min(self.width, segment_bytes or self.width) // source.element_size())
        count = segment_count(source.numel(), 1, n, piece)
        ours = [cut(chunk, count) for chunk in cut(source, n)]
        ends = [cut(chunk, count) for chunk in cut(result, n)]
        self.block += count

        def lay_out(k):
            for c in self.others:
                cells[(first + k) % BUFFERS][(me - c - 1) % n][c][: ours[c][k].numel()].copy_(ours[c][k])
            for peer in self.others:
                area.tell(peer, GIVEN)

        def add_up(k):
            mine, rows = ours[me][k], cells[(first + k) % BUFFERS]
            arriving = [rows[i][me][: mine.numel()] for i in range(n - 1)]
            finished = rows[n - 1][me][: mine.numel()]
            _fold(comm, reduction, [*arriving, mine], finished, before=lambda i: i < n - 1 and area.hear(self.others[i], GIVEN))
            reduction.finish(finished, n)
            for peer in self.others:
                area.tell(peer, DONE)
            ends[me][k].copy_(finished)

        def fetch(k):
            for c in self.others:
                area.hear(c, DONE)
                ends[c][k].copy_(cells[(first + k) % BUFFERS][n - 1][c][: ends[c][k].numel()])

        lay_out(0)
        for k in range(count):
            if k + 1 < count:
                lay_out(k + 1)
            add_up(k)
            fetch(k)

    def _cells(self, x) -> list:
        """[buffer][row][chunk]: views in the dtype of `x`."""
        if x.dtype not in self.cells:
            typed = self.rows.view(BUFFERS, self.n, self.n, self.width)[..., : self.width // x.element_size() * x.element_size()]
            self.cells[x.dtype] = [[list(row.view(x.dtype).unbind()) for row in block.unbind()] for block in typed.unbind()]
        return self.cells[x.dtype]

    def _plan(self, x) -> tuple[list[int], list]:
        """(chunk sizes, for each buffer (where this rank's chunks go, the rows to add)) for a small tensor like `x`."""
        key = (x.numel(), x.dtype)
        if key not in self.plans:
            if len(self.plans) > 64:
                self.plans.clear()
            n, sizes = self.n, chunk_sizes(x.numel(), self.n)
            blocks = []
            for block in self.rows.unbind():
                rows = [row[: x.nbytes].view(x.dtype) for row in block.unbind()]
                blocks.append(([rows[(self.rank - c - 1) % n].split(sizes)[c] for c in range(n)], rows))
            self.plans[key] = sizes, blocks
        return self.plans[key]


def _fold(comm, reduction, parts, into, before: Callable[[int], object] = lambda i: None) -> None:
    """into = parts[-1] (op) ( ... (parts[1] (op) parts[0])); `before(i)` is called before part i is read."""
    before(0)
    total = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        before(i)
        if comm.checks:
            size = part.numel()
            with comm.compute(reduction.verb, flops=size, bytes=3 * part.nbytes, kind="reduce"):
                reduction.combine(part, total, out=into)
        else:
            reduction.combine(part, total, out=into)
        total = into
