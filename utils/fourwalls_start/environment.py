"""The environment of everything that start.py runs: .venv first, foreign packages out, and somewhere to write.

Variables that make Python or pip look elsewhere are taken out. Where the home folder cannot be written (a container, a shared
machine) Jupyter, IPython and matplotlib would fail at start; then their folders go to one place below the temporary folder.

    a place can be written  <=>  the nearest folder above it that exists can be

Reference: Jupyter documentation, "Common directories and file locations"; XDG Base Directory Specification.
"""

import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["can_write", "child_environment", "venv_python"]

WINDOWS = os.name == "nt"


def venv_python(root: Path) -> Path:
    """The Python of `root/.venv`, whether it is there or not."""
    return root / ".venv" / ("Scripts/python.exe" if WINDOWS else "bin/python")


def can_write(path: str | os.PathLike) -> bool:
    """Whether `path` can be written, or made if it is not there."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK)


def child_environment(root: Path, torch: str | None, environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """(environment, a word to the user or ""). torch: "existing" keeps what may be needed to find a torch outside .venv."""
    env, home = dict(environ), environ.get("HOME") or os.path.expanduser("~")
    env["VIRTUAL_ENV"] = str(root / ".venv")
    env["PATH"] = str(venv_python(root).parent) + os.pathsep + env.get("PATH", os.defpath)
    env["JUPYTER_PREFER_ENV_PATH"] = "1"
    for name in ("PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"):
        env.pop(name, None)
    if torch != "existing":
        env.pop("PYTHONPATH", None)
        env["PYTHONNOUSERSITE"] = "1"
    places = _places(env, home)
    closed = [name for name in places if not can_write(places[name])]
    if not closed:
        return env, ""
    state = _state_folder()
    for name in closed:
        env[name] = str(state / name.lower())
        Path(env[name]).mkdir(exist_ok=True)
    return env, f"The home folder cannot be written: settings and caches go to {state}"


def _places(env: Mapping[str, str], home: str) -> dict[str, str]:
    """Where Jupyter, IPython and matplotlib will write, by the variable that moves each."""
    share = os.path.join(home, "Library" if platform.system() == "Darwin" else os.path.join(".local", "share"))
    data = env.get("JUPYTER_DATA_DIR") or os.path.join(
        env.get("XDG_DATA_HOME") or share, "Jupyter" if platform.system() == "Darwin" else "jupyter"
    )
    return {
        "JUPYTER_CONFIG_DIR": env.get("JUPYTER_CONFIG_DIR") or os.path.join(home, ".jupyter"),
        "JUPYTER_DATA_DIR": data,
        "JUPYTER_RUNTIME_DIR": env.get("JUPYTER_RUNTIME_DIR") or os.path.join(data, "runtime"),
        "IPYTHONDIR": env.get("IPYTHONDIR") or os.path.join(home, ".ipython"),
        "MPLCONFIGDIR": env.get("MPLCONFIGDIR") or os.path.join(env.get("XDG_CONFIG_HOME") or f"{home}/.config", "matplotlib"),
        "XDG_CACHE_HOME": env.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
    }


def _state_folder() -> Path:
    """One private folder per user below the temporary folder, the same each time."""
    user = os.getuid() if hasattr(os, "getuid") else "me"
    folder = Path(tempfile.gettempdir(), f"fourwalls-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):  # someone else's: do not trust it
        return Path(tempfile.mkdtemp(prefix="fourwalls-"))
    return folder
