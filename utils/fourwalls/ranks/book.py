"""The book in which ranks of one machine write what they have begun and what they wait for.

Both sides of a message write a line, then look for the other side's line; whoever comes second compares the two, so shapes,
dtypes and calls that do not fit are refused before any byte moves. The same lines tell the supervisor who waits for a call
that nobody has made. A rank writes only its own lines (but for one byte, "answered", in its peer's), so no lock is needed.

    line = (n-th message, communicator, tag, sender, receiver, side) -> what was called, where, with which shape

Reference: MPI message matching (order is kept within one sender, receiver, communicator and tag).
"""

import itertools
import mmap
import struct
from types import CodeType
from typing import NamedTuple

from .comm import Call

__all__ = [
    "DONE",
    "READY",
    "RUNNING",
    "SETTLING",
    "STARTING",
    "WAITING",
    "Book",
    "Status",
    "book_bytes",
    "read_text",
    "write_text",
]

STARTING, READY, RUNNING, WAITING, SETTLING, DONE = range(6)  # settling: has returned, and sees its last messages through
SLOTS = 1024  # lines a rank can have open at once; beyond that messages travel unchecked
SEND, RECV = 1, 2

_HEAD = 64
_STATUS = struct.Struct("<QQBBH")  # changes so far, since when (ns), state, unsure, line
_STATUS_BYTES = 64
_KEY = struct.Struct("<IHHHHBBH")  # n, communicator, tag, sender, receiver, side, used, unused
_DETAIL_BYTES = 512
_STATEMENT = struct.Struct("<IIHH4x")  # communicator, k, length of the text, used
STATEMENTS = 32  # of a rank's last collective calls that are remembered
_LINES = 64 + SLOTS * (_KEY.size + _DETAIL_BYTES)
_AREA = _LINES + STATEMENTS * (_STATEMENT.size + _DETAIL_BYTES)
_TEXT = _DETAIL_BYTES - 4
_NOTHING = bytes(4)


class Status(NamedTuple):
    """What one rank last said of itself. `since` in perf_counter nanoseconds; `slot` is the line it waits on."""

    changes: int
    since: int
    state: int
    unsure: int
    slot: int


def book_bytes(ranks: int) -> int:
    """Size of the shared memory for `ranks` ranks. Only pages that are used take memory."""
    return _round_up(_HEAD + ranks * (_STATUS_BYTES + _AREA), mmap.PAGESIZE)


class Book:
    """The shared memory, seen by one rank (`rank`) or by the supervisor (`rank` None, reads only)."""

    def __init__(self, memory: mmap.mmap, ranks: int, rank: int | None = None):
        self._memory, self._view, self.ranks, self.rank = memory, memoryview(memory), ranks, rank
        self._free = list(range(SLOTS - 1, -1, -1)) if rank is not None else []
        self._top, self._changes = 0, 0
        self._stated = itertools.count(1)  # two threads of a rank may state at once, and next() gives each a number of its own
        if rank is not None:  # asked for on every message
            self._own, self._own_status = self._area(rank), _HEAD + rank * _STATUS_BYTES

    # --- a rank writes ---------------------------------------------------------------------------------------------
    def post(self, sending: bool, peer: int, context: int, tag: int, n: int, text: bytes) -> tuple[int, bytes | None]:
        """Write a line and look for the other side's: (slot, the other's text, or None if it has not come yet).

        slot is -1 when all lines are in use: that message is neither checked nor seen by the supervisor.
        """
        if not self._free:
            return -1, None
        slot, memory, rank, n = self._free.pop(), self._memory, self.rank, n & 0xFFFFFFFF
        area = self._own
        detail = area + 64 + SLOTS * _KEY.size + slot * _DETAIL_BYTES
        if text:
            text = text[:_TEXT]
            memory[detail : detail + 4 + len(text)] = struct.pack("<BBH", 0, 0, len(text)) + text
        else:
            memory[detail : detail + 4] = _NOTHING
        pair = (rank, peer) if sending else (peer, rank)
        _KEY.pack_into(memory, area + 64 + slot * _KEY.size, n, context, tag, *pair, SEND if sending else RECV, 1, 0)
        if slot >= self._top:
            self._top = slot + 1
            struct.pack_into("<I", memory, area, self._top)
        # From here on the peer can find this line; if it wrote its own before, we find that. Both may see each other: both
        # compare.
        there = self._area(peer)
        keys = there + 64
        (top,) = struct.unpack_from("<I", memory, there)
        table = bytes(self._view[keys : keys + top * _KEY.size])
        wanted = _KEY.pack(n, context, tag, *pair, RECV if sending else SEND, 1, 0)
        found = table.find(wanted)
        while found % _KEY.size and found >= 0:
            found = table.find(wanted, found + 1)
        if found < 0:
            return slot, None
        other = there + 64 + SLOTS * _KEY.size + found // _KEY.size * _DETAIL_BYTES
        memory[other] = memory[detail] = 1
        (length,) = struct.unpack_from("<H", memory, other + 2)
        return slot, memory[other + 4 : other + 4 + length]

    def release(self, slot: int) -> None:
        """The message of this line is over; the line may be used again."""
        if slot >= 0:
            self._memory[self._own + 64 + slot * _KEY.size + 13] = 0
            self._free.append(slot)

    def state(self, context: int, k: int, members: tuple[int, ...], text: bytes) -> list[tuple[int, bytes]]:
        """Write the k-th statement of this rank in a communicator; (rank, text) of the members that have made theirs already."""
        memory, text = self._memory, text[:_DETAIL_BYTES]
        slot = next(self._stated) % STATEMENTS
        own = self._area(self.rank) + _LINES
        detail = own + STATEMENTS * _STATEMENT.size + slot * _DETAIL_BYTES
        _STATEMENT.pack_into(memory, own + slot * _STATEMENT.size, 0, 0, 0, 0)
        memory[detail : detail + len(text)] = text
        _STATEMENT.pack_into(memory, own + slot * _STATEMENT.size, context, k & 0xFFFFFFFF, len(text), 1)
        wanted, found = struct.pack("<II", context, k & 0xFFFFFFFF), []
        for rank in members:
            there = self._area(rank) + _LINES
            place = bytes(self._view[there : there + STATEMENTS * _STATEMENT.size]).find(wanted)
            if rank != self.rank and place >= 0 and place % _STATEMENT.size == 0:
                _, _, length, used = _STATEMENT.unpack_from(memory, there + place)
                detail = there + STATEMENTS * _STATEMENT.size + place // _STATEMENT.size * _DETAIL_BYTES
                if used:
                    found.append((rank, memory[detail : detail + length]))
        return found

    def forget_statements(self) -> None:
        """A new program begins: its statements are not to be compared with an earlier program's."""
        own = self._area(self.rank) + _LINES
        self._memory[own : own + STATEMENTS * _STATEMENT.size] = bytes(STATEMENTS * _STATEMENT.size)

    def say(self, state: int, now: int, slot: int = 0, unsure: bool = False) -> None:
        """Tell the supervisor what this rank does from `now` (perf_counter ns) on; `unsure`: more than this may be going on."""
        self._changes += 1
        _STATUS.pack_into(self._memory, self._own_status, self._changes, now, state, unsure, slot if slot > 0 else 0)

    # --- the supervisor reads --------------------------------------------------------------------------------------
    def status(self, rank: int) -> Status:
        return Status._make(_STATUS.unpack_from(self._memory, _HEAD + rank * _STATUS_BYTES))

    def answered(self, rank: int, slot: int) -> bool:
        """Whether the other side of this line has been called too."""
        return self._memory[self._detail(rank, slot)] != 0

    def call(self, rank: int, slot: int) -> Call:
        """The call behind a line."""
        n, context, tag, src, dst, side, used, _ = _KEY.unpack_from(self._memory, self._area(rank) + 64 + slot * _KEY.size)
        detail = self._detail(rank, slot)
        (length,) = struct.unpack_from("<H", self._memory, detail + 2)
        return read_text(self._memory[detail + 4 : detail + 4 + length], rank, dst if side == SEND else src, tag)

    def unanswered(self, rank: int) -> list[Call]:
        """Calls of this rank that were begun and that nobody has answered."""
        area = self._area(rank)
        (top,) = struct.unpack_from("<I", self._memory, area)
        open_ = [s for s in range(min(top, SLOTS)) if self._memory[area + 64 + s * _KEY.size + 13] and not self.answered(rank, s)]
        return [self.call(rank, s) for s in open_]

    def close(self) -> None:
        self._view.release()
        self._memory.close()

    def _area(self, rank: int) -> int:
        return _HEAD + self.ranks * _STATUS_BYTES + rank * _AREA

    def _detail(self, rank: int, slot: int) -> int:
        return self._area(rank) + 64 + SLOTS * _KEY.size + slot * _DETAIL_BYTES


def write_text(op: str, signature: str, site: tuple[CodeType, int]) -> bytes:
    """What a line says: the call's name, its tensor as "float32 (4,)" (or the name of an internal call), the learner's line."""
    code, line = site
    return f"{op}\0{signature[:120]}\0{line}\0{code.co_name[:60]}\0{code.co_filename[-240:]}".encode(errors="replace")


def read_text(text: bytes, rank: int, peer: int | None, tag: int) -> Call:
    """The Call that `write_text` described."""
    parts = text.decode(errors="replace").split("\0")
    op, signature, line, function, file = parts + [""] * (5 - len(parts))
    dtype, _, shape = signature.partition(" ")
    call = Call(rank, op, peer, tag)
    if shape:  # a barrier or a split signs with its name alone
        call.dtype = dtype
        call.shape = tuple(int(s) for s in shape.strip("()").split(",") if s.strip().isdigit())
    call.file, call.line, call.function = file, int(line) if line.isdigit() else 0, function
    return call


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
