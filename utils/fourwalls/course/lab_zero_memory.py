"""Asks the system how much memory a rank's process has of its own, at each of its messages, while it waits for the answer.

A process cannot say less about itself than the kernel does: pages that it has written and not given back count, whatever holds
them. What it has more than the process of which it was forked, which only waits, it has got in this run.

    growth of a rank = max over its messages of (anonymous + shared pages)  -  those of the process of which it was forked

Reference: Linux, Documentation/filesystems/proc.rst, RssAnon and RssShmem. Elsewhere nothing is asked, and nothing found.
"""

from pathlib import Path

import psutil

from .expect import Wrong

__all__ = ["Scale", "resident", "weigh"]

SENDS = frozenset({"send", "isend", "exchange"})


class Scale:
    """`s.run(..., each=scale)` with `scale = Scale(s.apart.pid)`; then scale.growth(rank) in bytes, or None where it is not told.

    Still open: memory in files or in other processes, and what a learner's code took before the run and gave back in it.
    """

    def __init__(self, parent: int):
        self._parent, self._process, self._before = parent, {}, resident(parent)
        self.seen: dict[int, list] = {}  # rank -> bytes at each message

    def __call__(self, rank: int, child: int, verb: str) -> None:
        if verb in SENDS:
            if rank not in self._process:
                self._process[rank] = _seen_from_here(self._parent, child)
            self.seen.setdefault(rank, []).append(resident(self._process[rank]))

    def growth(self, rank: int) -> int | None:
        """Bytes that it has got, at most, at one of its messages."""
        seen = self.seen.get(rank, [])
        return None if not seen or None in (*seen, self._before) else max(seen) - self._before


def weigh(scale, n, limit, whole, what):
    """Wrong if a process has grown by more than `limit` bytes; else what there is to say."""
    grown = [scale.growth(r) for r in range(n)]
    if None in grown:
        return "memory of processes is not told on this system"
    mib = 2**20
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
