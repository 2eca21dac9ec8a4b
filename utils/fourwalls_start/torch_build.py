"""Which build of torch to install: for the CPU, for CUDA, or the one that the calling Python already has.

An NVIDIA driver that answers means CUDA, everything else the CPU build, a fifteenth of its size. PyTorch's CPU index is
asked besides the usual one, never instead of it: a build marked +cpu outranks the plain one of the same version, and where
that index cannot be reached the usual one still serves.

    2.13.0+cpu > 2.13.0        (a local version label sorts after the version without one)

Reference: PEP 440, "Version Identification", section "Local version identifiers".
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable

from .needs import Stop

__all__ = ["CPU_INDEX", "existing_torch", "has_nvidia_driver", "reachable", "requirement"]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_nvidia_driver(*, which=shutil.which, proc: str = "/proc/driver/nvidia/version") -> bool:
    """Whether an NVIDIA driver answers: it, not the card, decides whether the CUDA build is of use."""
    if os.path.exists(proc):
        return True
    tool = which("nvidia-smi") or which("/usr/lib/wsl/lib/nvidia-smi")
    if not tool:
        return False
    try:
        done = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def reachable(url: str, seconds: float = 3.0) -> bool:
    """Whether `url` answers within `seconds`, through whatever proxy is set."""
    answered = threading.Event()

    def ask():
        with contextlib.suppress(Exception):
            urllib.request.urlopen(url, timeout=seconds).close()
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up knows no time-out: never wait for it
    asking.start()
    asking.join(seconds)
    return answered.is_set()


def requirement(choice: str, pin: str, system: str, reach: Callable[[str], bool] = reachable) -> tuple[list[str], str]:
    """(arguments for pip, a word to the user or "") that give torch as `choice` ("cpu" or "cuda") at version `pin`.

    pin: "torch==2.13.0". system: platform.system(). reach(url): whether it answers. Raises Stop where there is no such build.
    """
    if choice == "cuda":
        if system == "Darwin":
            raise Stop("There is no CUDA on a Mac.", "leave --torch out; the CPU build is what runs here")
        if system == "Windows":
            raise Stop("On Windows itself only the CPU build is installed.", "use WSL, then:  python3 start.py --torch cuda")
        return [f"{pin},!={pin.partition('==')[2]}+cpu"], ""
    if system != "Linux" or os.environ.get("PIP_NO_INDEX"):
        return [pin], ""
    if reach(f"{CPU_INDEX}/torch/"):
        return [pin, "--extra-index-url", CPU_INDEX], ""
    return [pin], "PyTorch's CPU index does not answer; the usual index may give the CUDA build: about 3 GB instead of 0.2"


def existing_torch(python: str = sys.executable) -> tuple[str, str, bool]:
    """(version, folder that holds it, whether `python` is itself a virtual environment) of the torch that `python` has."""
    show = (
        "import torch, os, sys, json; print('FOUND', json.dumps([torch.__version__,"
        " os.path.dirname(os.path.dirname(torch.__file__)), sys.prefix != sys.base_prefix]))"
    )
    done = subprocess.run([python, "-c", show], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    for row in done.stdout.decode().splitlines():
        if row.startswith("FOUND "):
            return tuple(json.loads(row[6:]))
    fix = "run start.py with the Python that has it, or leave --torch out"
    raise Stop(f"--torch existing: {python} has no torch that loads.", fix)
