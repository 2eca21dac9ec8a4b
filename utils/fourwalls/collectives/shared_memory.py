"""All-reduce for ranks of one host: no wire at all, only memory that all of them see.

The tensor is cut into one chunk per rank, as for the ring, and goes through the common memory block by block. The sum of a chunk
lies there: the first rank of its chain lays out its own numbers, each next one adds its own in place and passes the word on, and
the last, the chunk's owner, tells everybody, who fetch it. All ranks are busy at once, each with another chunk, and a rank works
on several blocks at a time, so that a word has always had time to come. Small tensors take a shorter way: everybody lays out
everything, and adds up all of it. So do two ranks with any tensor, block by block.

    chunk c  =  x_c + (x_(c-1) + ( ... (x_(c+2) + x_(c+1)))),   rank numbers mod n: the bits of the ring
    a rank passes over its tensor twice, out of it and into it;   bytes and messages sent  =  0

Reference: Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives", 2008.
"""

import sys

import torch

from ..ranks.comm import Comm
from ..ranks.shared import Area, open_area
from . import ring
from .agree import agree
from .chunks import check_segment, chunk_sizes, cut, finish, flat_input, result_buffer, segment_count
from .reductions import get_reduction

__all__ = ["SMALL_BYTES", "all_reduce", "buffers", "layer_bytes", "row_bytes"]

PIECE_BYTES = 2**18  # of a chunk at a time in a chain: stays in a core's own cache, and is large beside what a word costs
ROOM_BYTES = 2**24  # about what all blocks of a chain may take together
SMALL_BYTES = 2**18  # up to n S of this, one round of words with more copying beats a chain of n
PAIR_BYTES = 2**19  # of a tensor at a time where two ranks lay out everything
LAYERS = 4  # blocks of which everything is laid out: see `_Room.all_at_once`
GIVEN, DONE = 0, 1  # words: "your turn with this chunk", "my chunk of this block is finished"
ALIGN = 64


def all_reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", segment_bytes: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every rank returns the reduction over all ranks: the bits of `ring.all_reduce` (but perhaps for those inside a
    nan, and for the sign of a zero where max or min found both), and the same bits on every rank. `out=x` works in place.

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
    elif comm.size == 2:
        room.as_a_pair(comm, source, result, reduction, segment_bytes)
    elif source.nbytes * comm.size <= SMALL_BYTES and segment_bytes is None:
        room.all_at_once(comm, source, result, reduction)
    else:
        room.in_a_chain(comm, source, result, reduction, segment_bytes)
    return finish(result, x.shape, out)


def row_bytes(n: int) -> int:
    """Room for one block of a chain, a piece of each chunk; smaller pieces for many ranks, whose blocks would fill the memory."""
    return max(min(PIECE_BYTES, ROOM_BYTES // n**2) // ALIGN, 1) * ALIGN * n


def buffers(n: int) -> int:
    """Blocks of a chain in the memory at once. Two ranks need none.

    In its round t a rank does step s with block t - s, and at the end fetches block t - n. When it begins block k, in round k,
    it has heard in round k - 1 that block k - 1 - n is finished, so everybody has begun round k - 2 and ended round k - 3, with
    the fetch of block k - 3 - n: that place is free.
    """
    return n + 3 if n > 2 else 0


def _room(comm: Comm) -> "_Room | str":
    """The common memory of this communicator, made when first asked for; in words why there is none."""
    room = getattr(comm, "_room", None)
    if room is None:
        area = open_area(comm, _Room.bytes(comm.size))
        room = comm._room = area if isinstance(area, str) else _Room(area, comm.size, comm.rank)
        if isinstance(room, str) and comm.rank == 0:
            print(f"shared memory: {room}; the ring stands in, with the same result", file=sys.stderr)
    return room


def layer_bytes(n: int) -> int:
    """Room for all that one rank lays out of a block."""
    return PAIR_BYTES if n == 2 else -(-SMALL_BYTES // n // ALIGN) * ALIGN


class _Room:
    """What stands where: `buffers(n)` blocks of a chain, each with one piece of every chunk; behind them `LAYERS` blocks of n
    rows: row i, chunk c holds the piece of rank (c + 1 + i) mod n, what the ring would add in its step i. Of two ranks row r is
    rank r's.
    """

    def __init__(self, area: Area, n: int, rank: int):
        self.area, self.n, self.rank, self.block, self.layer = area, n, rank, 0, 0
        chain = buffers(n) * row_bytes(n)
        self.blocks = area.data[:chain].view(buffers(n), n, row_bytes(n) // n)
        self.layers = area.data[chain : self.bytes(n)].view(LAYERS, n, layer_bytes(n))
        self.others = [(rank + 1 + i) % n for i in range(n - 1)]
        self.cells: dict[torch.dtype, list] = {}
        self.plans: dict[tuple, list] = {}

    @staticmethod
    def bytes(n: int) -> int:
        """All of it."""
        return buffers(n) * row_bytes(n) + LAYERS * n * layer_bytes(n)

    def all_at_once(self, comm: Comm, source: torch.Tensor, result: torch.Tensor, reduction) -> None:
        """One block: lay out all chunks, hear from everybody, add up all rows."""
        area, (sizes, plan) = self.area, self._plan(source)
        pieces, rows = plan[self.layer % LAYERS]
        self.layer += 1
        torch._foreach_copy_(pieces, source.split(sizes))
        for peer in self.others:
            area.tell(peer, GIVEN)
        for peer in self.others:
            area.hear(peer, GIVEN)
        total = rows[0]
        for row in rows[1:]:
            _add(comm, reduction, row, total, result)
            total = result
        reduction.finish(result, self.n)

    def as_a_pair(self, comm: Comm, source, result, reduction, segment_bytes: int | None) -> None:
        """Lay out a block, hear of the other's, add the two: of two numbers the sum is the ring's, whichever comes first. Rank
        0's does, on both ranks, since nan + nan and max(0.0, -0.0) depend on it. Each block is laid out before the one ahead of
        it is added up.

        A place is used again four blocks later: who lays out block k has heard of the other's block k - 2, which the other gave
        when it had added up block k - 4.
        """
        area, peer, layers, first = self.area, self.others[0], self._typed(self.layers, source.dtype), self.layer
        room = layer_bytes(2) if segment_bytes is None else min(layer_bytes(2), 2 * segment_bytes)
        ours, ends = (x.split(max(1, room // source.element_size())) for x in (source, result))
        self.layer += len(ours)

        def lay_out(k):
            _part(layers[(first + k) % LAYERS][self.rank], ours[k]).copy_(ours[k])
            area.tell(peer, GIVEN)

        lay_out(0)
        for k, mine in enumerate(ours):
            if k + 1 < len(ours):
                lay_out(k + 1)
            area.hear(peer, GIVEN)
            theirs = _part(layers[(first + k) % LAYERS][peer], mine)
            _add(comm, reduction, *((mine, theirs) if self.rank == 0 else (theirs, mine)), ends[k])
            reduction.finish(ends[k], 2)

    def in_a_chain(self, comm: Comm, source, result, reduction, segment_bytes: int | None) -> None:
        """Step s of a block: the chunk that the left neighbour had in step s - 1, whose word is waited for. Step 0 lays out, the
        others add, step n - 1 is the owner's. In one round a rank does each step for another block, the earliest step for the
        latest block, and then fetches a block that was finished in the round before.
        """
        n, me, area, first = self.n, self.rank, self.area, self.block
        cells = self._typed(self.blocks, source.dtype)
        piece = max(1, min(row_bytes(n) // n, segment_bytes or PIECE_BYTES) // source.element_size())
        count = segment_count(source.numel(), 1, n, piece)
        ours = [cut(chunk, count) for chunk in cut(source, n)]
        ends = [cut(chunk, count) for chunk in cut(result, n)]
        self.block += count

        def place(k, c):
            return _part(cells[(first + k) % len(cells)][c], ours[c][k])

        def step(s, k):
            c = (me - 1 - s) % n
            mine, total = ours[c][k], place(k, c)
            if s == 0:
                total.copy_(mine)
            else:
                area.hear((me - 1) % n, GIVEN)
                _add(comm, reduction, mine, total, total)
            if s < n - 1:
                area.tell((me + 1) % n, GIVEN)
                return
            reduction.finish(total, n)
            for peer in self.others:
                area.tell(peer, DONE)
            ends[me][k].copy_(total)

        def fetch(k):
            for c in self.others:
                area.hear(c, DONE)
                ends[c][k].copy_(place(k, c))

        for t in range(count + n):
            for s in range(n):
                if 0 <= t - s < count:
                    step(s, t - s)
            if t >= n:
                fetch(t - n)

    def _typed(self, blocks: torch.Tensor, dtype: torch.dtype) -> list:
        """[block][row]: views in that dtype."""
        if dtype not in self.cells:
            self.cells[dtype] = [list(block.view(dtype).unbind()) for block in blocks.unbind()]
        return self.cells[dtype]

    def _plan(self, x) -> tuple[list[int], list]:
        """(chunk sizes, for each buffer (where this rank's chunks go, the rows to add)) for a small tensor like `x`."""
        key = (x.numel(), x.dtype)
        if key not in self.plans:
            if len(self.plans) > 64:
                self.plans.clear()
            n, sizes = self.n, chunk_sizes(x.numel(), self.n)
            blocks = []
            for block in self.layers.unbind():
                rows = [row[: x.nbytes].view(x.dtype) for row in block.unbind()]
                blocks.append(([rows[(self.rank - c - 1) % n].split(sizes)[c] for c in range(n)], rows))
            self.plans[key] = sizes, blocks
        return self.plans[key]


def _part(cell: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """As many elements of the cell as `like` has."""
    return cell if cell.numel() == like.numel() else cell[: like.numel()]


def _add(comm, reduction, mine, total, into) -> None:
    """into = mine (op) total. With checks on it is recorded as work."""
    if comm.checks:
        with comm.compute(reduction.verb, flops=mine.numel(), bytes=3 * mine.nbytes, kind="reduce"):
            reduction.combine(mine, total, out=into)
    else:
        reduction.combine(mine, total, out=into)
