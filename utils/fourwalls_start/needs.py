"""What must be there before anything can be installed, each with the one thing that mends it.

The checks cost nothing and run before the first byte is downloaded: a Python that the pinned packages support, its venv
module (Debian and Ubuntu leave it out), a folder that can be written, room on the disk.

    room needed = packages on disk + what is under way while they are unpacked

Reference: PEP 405, "Python Virtual Environments"; Python packaging guide, "Platform compatibility tags".
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

__all__ = ["NEWEST", "OLDEST", "Stop", "check_disk", "check_python", "check_venv_module", "check_writable"]

OLDEST, NEWEST = (3, 11), (3, 14)


class Stop(Exception):
    """The end of the road: what is wrong in one sentence, and in `fix` the one thing that mends it."""

    def __init__(self, wrong: str, fix: str):
        super().__init__(wrong)
        self.fix = fix


def check_python(version=sys.version_info, *, which=shutil.which, system=platform.system, machine=platform.machine) -> None:
    """Raise Stop if the pinned packages are not built for this Python or machine. (start.py itself refuses older Pythons.)"""
    if tuple(version[:2]) > NEWEST:
        other = next((name for name in _pythons() if which(name)), None)
        fix = f"run:  {other} start.py" if other else f"install Python 3.{NEWEST[1] - 1}, then run start.py with it"
        here = f"{version[0]}.{version[1]}"
        raise Stop(f"This Python is {here}, too new: the pinned packages are built for 3.{OLDEST[1]} to 3.{NEWEST[1]}.", fix)
    if system() == "Darwin" and machine() == "x86_64":
        raise Stop("PyTorch is no longer built for Intel Macs by its makers.", "use conda:  conda env create -f environment.yml")


def check_venv_module(*, find=importlib.util.find_spec, os_release: str = "/etc/os-release") -> None:
    """Raise Stop if this Python cannot make a virtual environment."""
    if find("venv") is not None and find("ensurepip") is not None:
        return
    try:
        debian = "debian" in Path(os_release).read_text().lower()
    except OSError:
        debian = False
    fix = f"sudo apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    if not debian:
        fix = f"install the venv module of {sys.executable} with your system's package manager"
    raise Stop("This Python cannot make a virtual environment: its venv module is incomplete.", fix)


def check_writable(root: Path) -> None:
    """Raise Stop if nothing can be made in `root`."""
    if not os.access(root, os.W_OK):
        raise Stop(f"The folder {root} cannot be written.", "copy it to a folder of your own and run start.py there")


def check_disk(root: Path, needed_mb: int, *, usage=shutil.disk_usage) -> int:
    """Megabytes free on the disk that holds `root`. Raises Stop if they are fewer than `needed_mb`."""
    free_mb = usage(root).free // 10**6
    if free_mb < needed_mb:
        wrong = f"The disk that holds {root} has {free_mb:,} MB free; set-up needs about {needed_mb:,} MB."
        raise Stop(wrong, f"free {needed_mb - free_mb:,} MB there, or move this folder to a larger disk")
    return free_mb


def _pythons() -> list[str]:
    return [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
