"""Counts what a submission uses where the kernel does not: the memory, the number and the files of its processes.

Shared pages are divided among those who share them (the proportional set size), since ranks are forks of one process that has
loaded torch. The processes counted are all below this one, however they were forked: this one takes in the orphans.

    used = sum of proportional set sizes of everything below this process

Reference: the Linux kernel's documentation of /proc/PID/smaps_rollup; man page prctl(2), PR_SET_CHILD_SUBREAPER.
"""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["Watch", "adopt_orphans", "below"]

SECONDS, MiB = 0.25, 2**20
SET_CHILD_SUBREAPER = 36


class Watch(threading.Thread):
    """Ends everything below this process when it uses too much. said: why, or "".

    most: {"memory": bytes, "pids": a number}, the bounds that the kernel does not keep. disk: bytes in `folder`, or None.
    """

    def __init__(self, most: dict[str, int], folder: Path, disk: int | None):
        super().__init__(daemon=True)
        self.most, self.folder, self.disk, self.said = most, folder, disk, ""
        self._over = threading.Event()
        self.start()

    def run(self):
        while not self._over.wait(SECONDS):
            if word := self._too_much():
                self.said = word
                for process in below():
                    with suppress(psutil.Error):
                        process.kill()

    def stop(self) -> None:
        """No more counting."""
        self._over.set()
        self.join(5.0)

    def _too_much(self):
        processes = below()
        if "pids" in self.most and len(processes) > self.most["pids"]:
            return f"it started more than {self.most['pids']} processes and was ended"
        if "memory" in self.most and sum(map(_memory, processes)) > self.most["memory"]:
            return f"it used more than {self.most['memory'] / MiB:.0f} MiB of memory and was ended"
        if self.disk is not None and _size(self.folder) > self.disk:
            return f"it wrote more than {self.disk / MiB:.0f} MiB of files and was ended"
        return ""


def below() -> list[psutil.Process]:
    """Every process below this one."""
    with suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def adopt_orphans() -> None:
    """From now on, processes whose parents have ended become children of this one, and can be found (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _memory(process) -> int:
    with suppress(psutil.Error, OSError):
        used = process.memory_full_info()
        return getattr(used, "pss", None) or used.uss
    return 0


def _size(folder) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
