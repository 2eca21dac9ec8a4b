"""What this machine lets a program use: cores, GPUs, a loopback interface, and how it ends processes that ask for too much.

A container or a batch system often grants less than the hardware holds, so a core counts only if both the affinity mask and
the control group's quota allow it. GPUs are counted without a driver context in this process, and a rank's seed is mixed so
that nearby seeds and ranks share nothing.

    threads per rank = max(1, allowed cores // ranks)

Reference: the Linux control-group documentation (`cpu.max`, `memory.events`).
"""

import hashlib
import math
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "SESSION_MARK",
    "allowed_cores",
    "gpu_count",
    "is_stopped",
    "loopback_interface",
    "oom_kills",
    "repeatable",
    "seed_everything",
    "seed_of",
    "threads_per_rank",
    "under_torchrun",
]

SESSION_MARK = "FOURWALLS_SESSION"  # environment variable of ranks, by which what they leave behind is known


def allowed_cores() -> int:
    """Cores this process may use: the smaller of its affinity mask and its control group's quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota()
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def threads_per_rank(ranks: int) -> int:
    """How many threads each of `ranks` processes gets, so that together they do not exceed the allowed cores."""
    return max(1, allowed_cores() // ranks)


def gpu_count() -> int:
    """GPUs that ranks could use. torch asks the management library, so no driver context comes to life in this process.

    What happened here before cannot matter either: ranks that use GPUs are fresh interpreters.
    """
    import torch

    return torch.cuda.device_count()


def under_torchrun() -> bool:
    """Whether this process was started as one rank of many (its environment says so)."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in needed) and ("TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ)


def loopback_interface() -> str | None:
    """The name of the interface that reaches only this machine: "lo" on Linux, "lo0" on macOS; None if there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has killed for want of memory so far; None where it does not say."""
    for file, field in _memory_events():
        try:
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == field:
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def is_stopped(pid: int | None) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped this process; False where the system does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


def seed_of(seed: int, rank: int) -> int:
    """The seed of one rank's generators: 63 bits that mix (seed, rank), the same on real and on simulated ranks.

    Nearby seeds and ranks share nothing: rank 1 of seed 0 is not rank 0 of seed 1.
    """
    digest = hashlib.blake2b(f"fourwalls {int(seed)} {int(rank)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, rank: int) -> int:
    """Seed `random`, torch and, if it is loaded, numpy for this rank. Returns the seed used."""
    import torch

    mixed = seed_of(seed, rank)
    random.seed(mixed)
    torch.manual_seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)
    return mixed


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Inside, `random` and, if it is loaded, numpy begin from `seed`; afterwards they go on where they were."""
    numpy = sys.modules.get("numpy")
    before, numpys = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpys)


def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores granted by the control group's quota, the tightest from here to the root; None without one."""
    found = []
    for folder in _groups(root, own, "cpu"):
        try:  # version 2: "max 100000" or "150000 100000"
            granted, period = (folder / "cpu.max").read_text().split()
            if granted != "max":
                found.append(int(granted) / int(period))
        except (OSError, ValueError):
            pass
        try:  # version 1: -1 is no limit
            granted = int((folder / "cpu.cfs_quota_us").read_text())
            if granted > 0:
                found.append(granted / int((folder / "cpu.cfs_period_us").read_text()))
        except (OSError, ValueError):
            pass
    return min(found, default=None)


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and of the groups around it."""
    folders = []
    try:
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        rows = []
    for number, controllers, path in (row for row in rows if len(row) == 3):
        if number == "0" and not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inside = base / path.strip("/")
        folders += [inside, *(p for p in inside.parents if p == base or base in p.parents)]
    return folders or [root, root / controller]


def _memory_events() -> list[tuple[Path, str]]:
    folders = _groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), "memory")
    return [(f / "memory.events", "oom_kill") for f in folders] + [(f / "memory.oom_control", "oom_kill") for f in folders]
