"""Asks the system how much memory a rank's process has of its own, while it waits for an answer: at each of its messages (Scale),
or when it asks for the time (Pause).

A process cannot say less about itself than the kernel does: pages that it has written and not given back count, whatever holds
them. What it has more than the process of which it was forked, which only waits, it has got in this run.

    growth of a rank = max over its messages of (anonymous + shared pages)  -  those of the process of which it was forked

Reference: Linux, Documentation/filesystems/proc.rst, RssAnon and RssShmem. Elsewhere nothing is asked, and nothing found.
"""

from pathlib import Path

import psutil

from .expect import Wrong

__all__ = ["Pause", "Scale", "resident", "weigh"]

FREED = 2**20  # bytes of what was there before a run that it may give back
SENDS = frozenset({"send", "isend", "exchange"})


class Scale:
    """`s.run(..., each=scale)` with `scale = Scale(s.apart.pid)`; then scale.growth(rank) in bytes, or None where it is not told.

    Memory in another process is no way out: there may be no more processes than ranks. Still open: memory in files.
    """

    def __init__(self, parent: int):
        self._parent, self._process, self._before = parent, {}, resident(parent)
        self._usual, self.beside = _below(parent), 0  # processes that are no ranks
        self.seen: dict[int, list] = {}  # rank -> bytes at each message

    def __call__(self, rank: int, child: int, verb: str) -> None:
        if verb in SENDS:
            if rank not in self._process:
                self._process[rank] = _seen_from_here(self._parent, child)
                self.beside = max(self.beside, _below(self._parent) - self._usual)
            self.seen.setdefault(rank, []).append(resident(self._process[rank]))

    def growth(self, rank: int) -> int | None:
        """Bytes that it has got, at most, at one of its messages."""
        seen = self.seen.get(rank, [])
        return None if not seen or None in (*seen, self._before) else max(seen) - self._before

    def shrunk(self, rank: int) -> int:
        """Bytes that it had from before the run and gave back in it: room in which something else could hide."""
        return max(0, self._before - min(self.seen[rank]))


class Pause:
    """`s.run(..., each=pause)` with `pause = Pause(s.apart.pid)`; then pause.most: the most bytes of its own that a rank's
    process had when it asked for the time; None where the system does not tell. Pages that it shares with the process of which
    it was forked are not its own: what was taken before the run, and is given back in it, makes no room.
    """

    def __init__(self, parent: int):
        self._parent, self._process, self.most = parent, None, None

    def __call__(self, rank: int, child: int, verb: str) -> None:
        if verb == "clock":
            self._process = self._process or _seen_from_here(self._parent, child)
            found = _private(self._process)
            self.most = found if self.most is None or found is None else max(self.most, found)


def _private(process) -> int | None:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def weigh(scale, n, limit, whole, what):
    """Wrong if a process has grown by more than `limit` bytes; else what there is to say."""
    grown = [scale.growth(r) for r in range(n)]
    if None in grown:
        return "memory of processes is not told on this system"
    mib = 2**20
    if scale.beside > n:
        raise Wrong(f"{n} ranks: {scale.beside} processes are at work", "a rank is one process: who started the others?")
    if max(map(scale.shrunk, range(n))) > FREED:
        given = max(map(scale.shrunk, range(n))) / mib
        raise Wrong(f"{n} ranks: a process has given back {given:.1f} MiB that it had taken before", "what was that for?")
    if max(grown) > limit:
        said = f"{n} ranks, {whole / mib:.0f} MiB of {what}: a process has grown by {max(grown) / mib:.1f} MiB, "
        raise Wrong(said + f"target {limit / mib:.1f} (the system's count)", "who holds on to what has been sent?")
    return f"a process grows by {max(grown) / mib:.1f} MiB, of {whole / mib:.0f} MiB of {what}"


def resident(process: int | None) -> int | None:
    """Bytes of memory of its own that a process has; None where the system does not tell."""
    fields = _status(process)
    if "RssAnon" not in fields:
        return None
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _below(parent: int) -> int:
    try:
        return len(psutil.Process(parent).children(recursive=True))
    except psutil.Error:
        return 0


def _status(process) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _seen_from_here(parent: int, child: int) -> int | None:
    """The number that a process below `parent`, which calls itself `child`, has here: a sandbox may count for itself."""
    if _status(child).get("PPid", "").strip() == str(parent):
        return child
    try:
        below = psutil.Process(parent).children(recursive=True)
    except psutil.Error:
        return None
    return next((p.pid for p in below if _status(p.pid).get("NSpid", "").split()[-1:] == [str(child)]), None)
