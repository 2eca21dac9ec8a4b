"""Control groups for one submission: the kernel itself keeps its memory and the number of its processes within bounds.

A group is made below the one that this process is in, where that can be written (version 1 or 2); everything that the submission
starts is in it, however it forks. Where no group can be made, sandbox.py counts for itself.

    memory of all its processes <= memory.max (else the kernel ends the largest),    processes <= pids.max (else fork fails)

Reference: the Linux kernel's documentation, "Control Group v2" and "Memory Resource Controller".
"""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Group", "make_group", "sweep"]

MARK = "fourwalls-grade"


class Group:
    """Folders of the control groups, by controller ("memory", "pids")."""

    def __init__(self, folders: dict[str, Path]):
        self.folders = folders

    @property
    def entrances(self) -> list[str]:
        """The files into which a process writes "0" to be in the group."""
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]

    @property
    def guards(self) -> set[str]:
        """What the kernel watches over: "memory", "pids", both or neither."""
        return set(self.folders)

    def members(self) -> list[int]:
        """Numbers of the processes in it."""
        found = set()
        for folder in dict.fromkeys(self.folders.values()):
            with suppress(OSError):
                found |= {int(word) for word in (folder / "cgroup.procs").read_text().split()}
        return sorted(found)

    def ended_for_memory(self) -> int:
        """How many processes the kernel has ended because the memory was used up."""
        folder = self.folders.get("memory")
        for name in ("memory.events", "memory.oom_control"):
            if folder is not None and (folder / name).exists():
                found = re.search(r"^oom_kill (\d+)", (folder / name).read_text(), flags=re.M)
                return int(found[1]) if found else 0
        return 0

    def close(self, seconds: float = 5.0) -> None:
        """End everything in it and remove it."""
        end = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < end:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for folder in dict.fromkeys(self.folders.values()):
            while folder.exists() and time.monotonic() < end:
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.02)


def make_group(name: str, memory: int, processes: int, *, own: str = "/proc/self") -> Group:
    """A group of at most `memory` bytes and so many processes, as far as this machine lets us. own: where /proc tells of us."""
    settings = {
        "memory": (("memory.max", memory), ("memory.limit_in_bytes", memory)),
        "pids": (("pids.max", processes),),
    }
    more = (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", memory))
    folders = {}
    for controller, wanted in settings.items():
        for parent in _parents(controller, own):
            folder = parent / f"{MARK}-{name}"
            try:
                folder.mkdir(exist_ok=True)
                _set(folder, wanted)
            except OSError:
                if folder not in folders.values():
                    with suppress(OSError):
                        folder.rmdir()
                continue
            with suppress(OSError):
                _set(folder, more if controller == "memory" else ())
            folders[controller] = folder
            break
    return Group(folders)


def sweep() -> None:
    """Remove the groups of graders that are no more. Their names begin with the number of the process that made them."""
    for controller in ("memory", "pids"):
        for parent in _parents(controller, "/proc/self"):
            for folder in parent.glob(f"{MARK}-*"):
                maker = folder.name.removeprefix(f"{MARK}-").partition("-")[0]
                if maker.isdigit() and not os.path.exists(f"/proc/{maker}"):
                    Group({controller: folder}).close(1.0)


def _set(folder, wanted):
    """Write the first of the settings that is there. Raises OSError if none is."""
    for file, value in wanted:
        if (folder / file).exists():
            (folder / file).write_text(str(value))
            return
    if wanted:
        raise OSError(f"{folder} has no {wanted[0][0]}")


def _parents(controller, own):
    """Folders below which a group with this controller may be made: our own, and in version 2 the one above."""
    try:
        lines = [line.split(":", 2) for line in Path(own, "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path(own, "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for words in mounts:
        kind, options = words[words.index("-") + 1], words[-1].split(",")
        if kind == "cgroup" and controller in options:
            path = next((path for _, names, path in lines if controller in names.split(",")), None)
        elif kind == "cgroup2":
            path = next((path for number, names, path in lines if number == "0" and not names), None)
        else:
            continue
        if path is None:
            continue
        folder = Path(words[4], os.path.relpath(path, words[3])) if path.startswith(words[3]) else Path(words[4])
        found += [folder] if kind == "cgroup" else [folder, folder.parent]
    return [folder for folder in found if os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists()]
