"""What this machine allows: cores, memory, and a Chromium to drive. Facts only; `check.py` judges them.

A container's limits count as the machine's: cores by affinity and by CPU quota, memory by its control group and all groups
above it, in both versions of cgroups.

    cores = max(1, floor(min(cores of the affinity mask, quota / period)))

Reference: Linux kernel documentation, "Control Group v2" (cpu.max, memory.max) and "CFS Bandwidth Control".
"""

import glob
import math
import os
import pathlib
import shutil

__all__ = ["allowed_cores", "find_chromium", "memory_limit"]


def allowed_cores(cgroup: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> tuple[int, str]:
    """(cores this process may use, how that number came about)."""
    if hasattr(os, "sched_getaffinity"):
        cores, why = len(os.sched_getaffinity(0)), "affinity"
    else:
        cores, why = os.cpu_count() or 1, "all there are"
    quotas = [_share(*text.split()[:2]) for text in _cgroup_values(cgroup, groups, "cpu", "cpu.max")]
    periods = _cgroup_values(cgroup, groups, "cpu", "cpu.cfs_period_us")
    limits = _cgroup_values(cgroup, groups, "cpu", "cpu.cfs_quota_us")
    quotas += [_share(quota, period) for quota, period in zip(limits, periods, strict=False)]
    quota = min(quotas, default=math.inf)
    if quota < cores:
        return max(1, int(quota)), f"CPU quota {quota:g}, affinity {cores}"
    return cores, why


def memory_limit(cgroup: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup", total: int | None = None) -> int:
    """Bytes this process may use at most: the machine's memory or the smallest limit of its cgroups."""
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    texts = _cgroup_values(cgroup, groups, "memory", "memory.max")
    texts += _cgroup_values(cgroup, groups, "memory", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.isdigit()]
    return min([*limits, total]) if total else min(limits, default=0)


def find_chromium() -> str | None:
    """Path of a Chromium that the browser tests can drive: $FOURWALLS_CHROMIUM, one on the PATH, or playwright's own."""
    given = os.environ.get("FOURWALLS_CHROMIUM")
    if given:
        return given if os.access(given, os.X_OK) else None
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    home = os.path.expanduser("~")
    places = [
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        *(
            os.path.join(folder, "chromium-*", *tail)
            for folder in (
                os.environ.get("PLAYWRIGHT_BROWSERS_PATH", ""),
                f"{home}/.cache/ms-playwright",
                f"{home}/Library/Caches/ms-playwright",
            )
            if folder
            for tail in (("chrome-linux*", "chrome"), ("chrome-mac*", "*.app", "Contents", "MacOS", "*"))
        ),
    ]
    found = [path for place in places for path in sorted(glob.glob(place)) if os.access(path, os.X_OK)]
    return found[-1] if found else None


def _share(quota: str, period: str) -> float:
    """Cores that a CPU quota allows; infinite if there is none ("max" or a negative number)."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return math.inf
    return int(quota) / int(period)


def _cgroup_values(cgroup: str, groups: str, controller: str, name: str) -> list[str]:
    """The contents of file `name` in this process's cgroup and all cgroups above it (versions 1 and 2)."""
    try:
        rows = pathlib.Path(groups).read_text().splitlines()
    except OSError:
        return []
    texts = []
    for row in rows:
        controllers, _, path = row.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = pathlib.Path(cgroup) / controller if controllers else pathlib.Path(cgroup)
        path = pathlib.PurePosixPath(path.lstrip("/"))
        for folder in [path, *path.parents]:
            try:
                texts.append((top / folder / name).read_text().strip())
            except OSError:
                continue
    return [text for text in texts if text]
