"""Every two touches of common memory, one of them writing, must stand in an order that words between ranks force: whatever the
speeds of the ranks, nobody reads too early and nothing is overwritten too early.

Each rank's part of the protocol runs alone, on memory of its own, with words that are noted and never waited for; torch itself
says what it touches. Vector clocks then say what happened before what: the m-th word heard is the m-th word told.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourwalls.collectives import shared_memory
from fourwalls.collectives.reductions import get_reduction

SMALL = [(100, None), (1, None)]
CALLS = [(70_000, 8192), *SMALL, (50_000, 16_384), *SMALL, *SMALL, (3, 8), (9_000, 512), (0, None), *SMALL]


class _Noted:
    """One rank's view: memory, the words that it tells and hears, and a log of both and of all touches, in order."""

    def __init__(self, n):
        self.data, self.log = torch.zeros(shared_memory._Room.bytes(n), dtype=torch.uint8), []

    def tell(self, peer, kind=0):
        self.log.append(("tell", peer, kind))

    def hear(self, peer, kind=0):
        self.log.append(("hear", peer, kind))


class _Touches(TorchDispatchMode):
    def __init__(self, area):
        super().__init__()
        self.area, self.start = area, area.data.data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in ("add", "copy_", "_foreach_copy_"):
            out = kwargs.get("out")
            written = [out] if out is not None else args[0]
            self.touch("write", written)
            self.touch("read", args if out is not None else args[1])
        return func(*args, **kwargs)

    def touch(self, kind, tensors):
        for x in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            first = x.data_ptr() - self.start
            if isinstance(x, torch.Tensor) and x.numel() and 0 <= first < self.area.data.numel():
                self.area.log.append((kind, first, first + x.nbytes))


def logs_of(n, calls):
    """What each rank tells, hears and touches in these calls: (elements, segment_bytes)."""
    found, sum_ = [], get_reduction("sum", torch.float32)
    for rank in range(n):
        area, comm = _Noted(n), SimpleNamespace(size=n, rank=rank, checks=False)
        room = shared_memory._Room(area, n, rank)
        with _Touches(area):
            for numel, segment_bytes in calls:
                x = torch.zeros(numel)
                if n == 2:
                    room.as_a_pair(comm, x, x, sum_, segment_bytes)
                elif numel * 4 * n <= shared_memory.SMALL_BYTES and segment_bytes is None:
                    room.all_at_once(comm, x, x, sum_)
                else:
                    room.in_a_chain(comm, x, x, sum_, segment_bytes)
        found.append(area.log)
    return found


def races(logs):
    """(touches, pairs of touches that no chain of words orders, words told and never heard)."""
    n = len(logs)
    clocks, at, told = [[0] * n for _ in range(n)], [0] * n, {}
    seen: dict[int, list] = {}  # 64-byte line -> (rank, its clock's entry, writes, first, behind)
    touches = found = 0
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            clock = clocks[rank]
            while at[rank] < len(log):
                kind, a, b = log[at[rank]]
                if kind == "hear":
                    words = told.get((a, rank, b))
                    if not words:
                        break
                    clock[:] = map(max, clock, words.pop(0))
                clock[rank] += 1
                if kind == "tell":
                    told.setdefault((rank, a, b), []).append(list(clock))
                elif kind != "hear":
                    touches += 1
                    for line in (a // 64, (b - 1) // 64):  # pieces are the same for all: their ends stand for them
                        others = seen.setdefault(line, [])
                        for r, then, writes, first, behind in others:
                            if r != rank and (writes or kind == "write") and first < b and a < behind:
                                found += clock[r] < then
                        others.append((rank, clock[rank], kind == "write", a, b))
                at[rank] += 1
                moved = True
    assert at == [len(log) for log in logs], "a rank waits for a word that nobody tells"
    return touches, found, sum(map(len, told.values()))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_no_touch_of_common_memory_is_left_to_chance(n):
    touches, found, unheard = races(logs_of(n, CALLS))
    assert touches > 100 and found == 0 and unheard == 0


@pytest.mark.parametrize(("n", "name", "value"), [(2, "LAYERS", 3), (4, "buffers", lambda n: n + 2), (3, "LAYERS", 1)])
def test_one_place_less_is_a_race(monkeypatch, n, name, value):
    monkeypatch.setattr(shared_memory, name, value)
    assert races(logs_of(n, CALLS))[1] > 0


@pytest.mark.parametrize("kind", [shared_memory.GIVEN, shared_memory.DONE])
def test_a_word_that_is_not_waited_for_is_a_race(kind):
    logs = logs_of(4, CALLS)
    word = next(entry for entry in logs[1] if entry[0] == "hear" and entry[2] == kind)
    logs[1].remove(word)  # and is heard at the very end instead
    assert races([log + [word] * (log is logs[1]) for log in logs])[1] > 0
