"""Memory that the ranks of one host have in common, and tokens by which they tell each other how far they are.

The memory is a file without a name (memfd): rank 0 makes it, the others open it through /proc, and nothing is left when the
processes end, however they end; /dev/shm may be full, small or read-only. A token is a semaphore inside that memory: posting it
releases what was written before, taking it acquires it, on every processor. A rank that waits long for a token writes a line into
the book, so that a deadlock or a straggler is seen as with messages.

    what q reads after hear(p)  =  at least all that p wrote before tell(q)

Reference: memfd_create(2), sem_overview(7); Boehm and Adve, "Foundations of the C++ concurrency memory model", 2008.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence

import torch

from . import book as lines
from .comm import Call, Comm, call_site
from .messages import PeerLost

__all__ = ["Area", "hosts", "open_area"]

CELL = 64  # bytes between semaphores: a cache line each, and more than any sem_t
KINDS = 2  # semaphores for each ordered pair of ranks
TRIES = 20  # looks at a semaphore, giving way to other processes in between, before sleeping on it: some 10 microseconds
NAP, LOOK = 0.02, 1.0  # seconds asleep before the wait is written into the book, and between looks at the clock after that
_SHARED_CONTEXT = 2**15  # added to a communicator's number in the book: no message has such a line


def hosts(comm: Comm) -> list[int]:
    """For each rank of `comm` a number that ranks of one host, and only they, have in common. All ranks must call it the first
    time.

    Simulated: the cluster's nodes. Real: the machine's boot, and under torchrun the node's number in the job.
    """
    if comm.simulated:
        return [comm._world.cluster.node(rank) for rank in comm._members]
    if getattr(comm, "_hosts", None) is None:
        comm._hosts = [row[0] for row in _tell_all(comm, [_number(_boot(), os.environ.get("GROUP_RANK", ""))], "find hosts")]
    return comm._hosts


def open_area(comm: Comm, nbytes: int) -> "Area | str":
    """`nbytes` of memory in common for the ranks of `comm`, all of which must call; the same on every rank: the Area, or in words
    why there is none.
    """
    if comm.simulated:
        return "simulated ranks have no memory of a host to share"
    size = Area.head(comm.size) + nbytes
    fd, proof, trouble = -1, secrets.randbits(62), _unable(comm)
    if comm.rank == 0 and not trouble:
        fd, trouble = _make(size)
    address = None
    if fd >= 0:
        try:
            address = Area.prepare(fd, size, comm.size, proof)
        except (OSError, ValueError) as error:  # no room among this process's addresses
            trouble = getattr(error, "errno", None) or errno.ENOMEM
    here = _number(_boot(), os.environ.get("GROUP_RANK", ""), _processes())
    rows = _tell_all(comm, [here, os.getpid(), fd, proof, trouble], "all_reduce")
    word = _differ([row[0] for row in rows]) or _trouble([row[4] for row in rows])
    if word:
        _close(fd)
        return word
    _, pid, theirs, proof, _ = rows[0]
    memory, trouble = (address, 0) if comm.rank == 0 else _open(pid, theirs, size, proof)
    word = _trouble([row[0] for row in _tell_all(comm, [trouble], "all_reduce")])
    _close(fd)
    return word or Area(comm, memory, size)


class Area:
    """The memory in common, seen by one rank. `data`: a uint8 tensor over it. Made by `open_area`."""

    def __init__(self, comm: Comm, memory: mmap.mmap, size: int):
        n, self._world, self._members, self._me = comm.size, comm._world, comm._members, comm.rank
        self._context, self._memory, self._n = comm._context + _SHARED_CONTEXT, memory, n
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.data = whole[self.head(n) : size]
        self._semaphores = _Semaphores()
        base = whole.data_ptr() + CELL
        # [kind][peer]: where this rank's tokens for it lie, and its tokens for this rank
        self._to = [[base + ((k * n + self._me) * n + p) * CELL for p in range(n)] for k in range(KINDS)]
        self._from = [[base + ((k * n + p) * n + self._me) * CELL for p in range(n)] for k in range(KINDS)]
        self._told = [[0] * n for _ in range(KINDS)]
        self._heard = [[0] * n for _ in range(KINDS)]
        self._asleep = CELL + KINDS * n * n * CELL  # a byte for each (who sleeps, on whom)

    @staticmethod
    def head(n: int) -> int:
        """Bytes ahead of the data: a proof of identity, the semaphores, and who is asleep; whole pages."""
        return -(-(CELL + KINDS * n * n * CELL + n * n) // mmap.PAGESIZE) * mmap.PAGESIZE

    @staticmethod
    def prepare(fd: int, size: int, n: int, proof: int) -> mmap.mmap:
        """Rank 0, before anybody else can look: every semaphore at 0, and the number by which the others know the memory."""
        memory = mmap.mmap(fd, size)
        base, semaphores = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), _Semaphores()
        for k in range(KINDS * n * n):
            semaphores.init(base + CELL + k * CELL, 1, 0)
        memory[:8] = proof.to_bytes(8, "little")
        return memory

    def tell(self, peer: int, kind: int = 0) -> None:
        """Give rank `peer` a token: what this rank wrote before is there for it."""
        self._semaphores.post(self._to[kind][peer])
        n, self._told[kind][peer] = self._told[kind][peer], self._told[kind][peer] + 1
        if self._memory[self._asleep + peer * self._n + self._me]:
            book = self._world.book  # its wait stands in the book: answer it, as a message would
            slot, _ = book.post(True, self._members[peer], self._context, kind, n, b"")
            book.release(slot)

    def hear(self, peer: int, kind: int = 0) -> None:
        """Take a token of rank `peer`; wait until there is one."""
        address, take = self._from[kind][peer], self._semaphores.trywait
        if take(address):
            before = time.perf_counter_ns()
            give_way = os.sched_yield
            for _ in range(TRIES):
                give_way()
                if not take(address):
                    break
            else:
                if not self._semaphores.sleep(address, NAP):
                    self._sleep(peer, kind, address, before)
            world, after = self._world, time.perf_counter_ns()
            begin, end, name = (before - world.start) * 1000, (after - world.start) * 1000, "wait for shared memory"
            if threading.get_ident() == world.main:  # a second thread waits while the program works
                row = ("compute", "wait", name, begin, end, 0, self._members[peer], None, None, "measured")
                world.events.append((world.rank, *row))
        self._heard[kind][peer] += 1

    def _sleep(self, peer, kind, address, before):
        """Wait in a way that others can see."""
        world, target, n = self._world, self._members[peer], self._heard[kind][peer]
        site, slot, flag = call_site(2), -1, self._asleep + self._me * self._n + peer
        aside = threading.get_ident() != world.main
        unsure = world.waiting > 0 or (aside and not world.joined)
        if isinstance(world.book, lines.Book):
            slot, _ = world.book.post(False, target, self._context, kind, n, lines.write_text("all_reduce", "", site))
        self._memory[flag] = 1
        if aside:
            world.behind = before, slot
        world.waiting += 1
        world.book.say(lines.WAITING, before, slot, unsure or slot < 0)
        try:
            while not self._semaphores.sleep(address, LOOK):
                if time.perf_counter_ns() - before > world.patience.total_seconds() * 1e9:
                    call = Call(world.rank, "all_reduce", target, site=site)
                    text = f"rank {world.rank} waited {world.patience.total_seconds():g} s for rank {target} in {call}"
                    raise PeerLost(text, rank=target, call=call, late=True)
        finally:
            world.waiting -= 1
            self._memory[flag] = 0
            world.book.say(lines.RUNNING, time.perf_counter_ns())
            if aside:
                world.behind = None
            if slot >= 0:
                world.book.release(slot)


class _Semaphores:
    """POSIX semaphores at an address. The quick calls keep the interpreter's lock, the one that sleeps gives it up."""

    def __init__(self):
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self.init, self.post, self.trywait, self._timed = quick.sem_init, quick.sem_post, quick.sem_trywait, slow.sem_timedwait
        self.init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post.argtypes = self.trywait.argtypes = (ctypes.c_void_p,)
        self._timed.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))

    def sleep(self, address: int, seconds: float) -> bool:
        """Whether a token was taken within so many seconds; False too when a signal came in between."""
        until = time.time() + seconds
        found = self._timed(address, _Timespec(int(until), int(until % 1 * 1e9)))
        if found and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return found == 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _tell_all(comm, row: Sequence[int], name: str) -> list[list[int]]:
    """Every rank's row of whole numbers, by rank, after ceil(log2 n) rounds; leaves no trace."""
    size, have = comm.size, 1
    known = torch.zeros(size, len(row), dtype=torch.int64)  # row i belongs to rank (comm.rank - i) % size
    known[0] = torch.tensor(row)
    while have < size:
        heard = torch.empty(min(have, size - have), len(row), dtype=torch.int64)
        comm._silently(known[: len(heard)].clone(), (comm.rank + have) % size, heard, (comm.rank - have) % size, name)
        known[have : have + len(heard)] = heard
        have += len(heard)
    return [known[(comm.rank - rank) % size].tolist() for rank in range(size)]


def _make(size: int) -> tuple[int, int]:
    """(file descriptor of new memory, errno)."""
    fd = -1
    try:
        fd = os.memfd_create("fourwalls-shared", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, size)  # now, in words, rather than later by a signal
        return fd, 0
    except OSError as error:
        _close(fd)
        return -1, error.errno


def _open(pid: int, fd: int, size: int, proof: int) -> tuple[mmap.mmap | None, int]:
    """(the memory that process `pid` has open as `fd`, errno). `proof`: the number that must stand at its beginning."""
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(own, size)
        finally:
            os.close(own)
    except (OSError, ValueError) as error:
        return None, getattr(error, "errno", None) or errno.ENOENT
    return (memory, 0) if memory[:8] == proof.to_bytes(8, "little") else (None, errno.ESTALE)


def _unable(comm) -> int:
    """An errno where this rank can have no part in shared memory whatever the others do, else 0."""
    if comm.device.type != "cpu":
        return errno.ENODEV
    able = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(ctypes.CDLL(None), "sem_init")
    return 0 if able else errno.ENOSYS


_WORDS = {errno.ENODEV: "its tensors are on a GPU", errno.ENOSYS: "its system has no memfd and semaphores as Linux has them"}


def _trouble(numbers: list[int]) -> str:
    rank = next((rank for rank, number in enumerate(numbers) if number), None)
    return "" if rank is None else f"rank {rank} cannot: {_WORDS.get(numbers[rank]) or os.strerror(numbers[rank])}"


def _differ(numbers: list[int]) -> str:
    other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    return "" if other is None else f"ranks 0 and {other} are on different hosts (or in containers that do not see each other)"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _processes() -> str:
    """Which numbering of processes this one belongs to: /proc/<pid> means the same only inside one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _number(*words: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest(), "little") >> 1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
