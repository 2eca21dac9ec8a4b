"""Setting up: one folder `.venv` beside `start.py`, whole or not at all.

A stamp inside `.venv` says "building" from the first moment and "ready" at the very end, with a fingerprint of the pinned
versions. So an interrupted set-up is seen and made anew, a finished one is recognised in a few hundredths of a second, a
`git pull` that moves a pin is followed, and a `.venv` that is someone else's is put aside, never deleted.

    ready  <=>  stamp = (this folder, these pins, this torch) and its Python starts

Reference: PEP 405, "Python Virtual Environments"; PEP 621, the [project] table where the pins stand.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from .environment import child_environment, venv_python
from .machine import allowed_cores
from .needs import Stop, check_disk, check_venv_module, check_writable
from .progress import Progress, pip_install, running
from .torch_build import existing_torch, has_nvidia_driver, requirement

__all__ = ["decide", "ensure", "fingerprint", "read_pins", "read_stamp"]

# Megabytes (to download, on disk), rounded up, measured on Linux x86-64; those for CUDA are an estimate.
SIZES = {"cpu": (200, 800), "cuda": (3000, 7000), "existing": (0, 0)}
SIZES |= {"lab": (190, 850), "test": (75, 270), "dev": (5, 20), "grade": (35, 90)}
RECIPE = 1  # what set-up does besides installing; a higher number makes everyone's .venv take the new steps


def read_pins(root: Path) -> dict[str, list[str]]:
    """{"torch": [...], "core": [...], "lab": [...], ...}: the requirements of pyproject.toml, the only place that pins them."""
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    pins = dict(project["optional-dependencies"])
    pins["torch"] = [line for line in project["dependencies"] if re.match(r"torch(?![\w.-])", line)]
    pins["core"] = [line for line in project["dependencies"] if line not in pins["torch"]]
    return pins


def fingerprint(pins: dict[str, list[str]], groups: list[str]) -> str:
    """A short name for what is installed when `groups` are: any other pin in them gives another name."""
    wanted = {group: sorted(pins.get(group, [])) for group in sorted({"torch", "core", *groups})}
    return hashlib.sha256(json.dumps([RECIPE, wanted], sort_keys=True).encode()).hexdigest()


def read_stamp(root: Path) -> dict | None:
    """What set-up noted inside .venv: {"state": "building" or "ready", "root": ..., ...}; None if there is no such note."""
    try:
        stamp = json.loads((root / ".venv" / "four_walls.json").read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def decide(stamp: dict | None, root: Path, groups: list[str], torch: str | None, pins: dict, runs: bool) -> tuple[str, str]:
    """("ready" | "update" | "build", why). stamp: what is there; torch: the build asked for; runs: .venv's Python starts."""
    if stamp is None:
        return "build", "nothing is set up yet"
    if stamp.get("root") != str(root):
        return "build", "this folder was moved or copied"
    if stamp.get("state") != "ready":
        return "build", "an earlier set-up was interrupted"
    if not runs:
        return "build", "the Python that .venv was made with is gone or changed"
    if torch not in (None, stamp.get("torch")):
        return "build", f"--torch {torch} instead of {stamp.get('torch')}"
    if fingerprint(pins, stamp.get("groups", [])) != stamp.get("pins"):
        return "update", "the pinned versions changed"
    if not set(groups) <= set(stamp.get("groups", [])):
        return "update", "this command needs more packages"
    return "ready", ""


def ensure(root: Path, groups: list[str], *, torch: str | None = None, yes: bool = False) -> None:
    """Bring `root/.venv` to what is wanted; silent and quick when it is there already. Raises Stop.

    groups: names in pyproject's optional-dependencies. torch: "cpu", "cuda", "existing", or None for what is there or fits.
    """
    pins = read_pins(root)

    def look():
        stamp = read_stamp(root)
        return stamp, *decide(stamp, root, groups, torch, pins, stamp is not None and _python_runs(root, stamp))

    if look()[1] == "ready":
        return
    check_writable(root)
    with _only_one(root):
        stamp, action, why = look()  # another set-up may have done it meanwhile
        if action == "ready":
            return
        check_venv_module()
        choice = torch or (stamp or {}).get("torch")
        if choice is None:
            choice = "cuda" if platform.system() == "Linux" and has_nvidia_driver() else "cpu"
        have = stamp.get("groups", []) if action == "update" else []
        _announce(root, action, why, choice, [group for group in groups if group not in have], pins)
        if not yes and not _agreed():
            raise Stop("Nothing was changed.", "run the same command again whenever you like")
        begin, progress = time.monotonic(), Progress()
        try:
            _build(root, action, choice, sorted({*groups, *have}), pins, progress)
        except OSError as error:
            raise Stop(f"Set-up stopped: {error}.", "mend that, then run the same command again") from None
        finally:
            progress.close()
    print(f"Set up in {time.monotonic() - begin:.0f} s.\n", flush=True)


def _python_runs(root: Path, stamp: dict) -> bool:
    """Whether .venv's Python starts, in .venv, with the version that the packages were installed for (about 30 ms)."""
    show = "import sys; print(sys.version_info[0], sys.version_info[1], sys.prefix != sys.base_prefix)"
    command = [str(venv_python(root)), "-I", "-c", show]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.decode().split() == [*map(str, stamp.get("python", [])), "True"]


@contextlib.contextmanager
def _only_one(root: Path):
    """Two set-ups of one folder take turns. The lock goes with the process, so nothing can stay locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this folder is running; waiting for it ...", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _announce(root: Path, action: str, why: str, choice: str, missing: list[str], pins: dict) -> None:
    """Say what will be done and how large it is. Raises Stop if the disk is too small."""
    parts = [choice, *missing] if action == "build" else missing
    load_mb, disk_mb = (sum(SIZES.get(part, (0, 0))[i] for part in parts) for i in (0, 1))
    free_mb = check_disk(root, disk_mb + 300)
    packages = sum(len(pins[group]) for group in (["core"] if action == "build" else []) + missing)
    print(f"Setting up Four Walls: {why}.")
    print(f"  where      {root / '.venv'}")
    if action == "build":
        word = {"cpu": "the CPU build", "cuda": "the CUDA build", "existing": f"the one of {sys.executable}"}[choice]
        print(f"  torch      {word if choice == 'existing' else pins['torch'][0].partition('==')[2] + ', ' + word}")
    if parts:
        print(f"  packages   {packages} pinned in pyproject.toml, and what they need")
        print(f"  size       about {load_mb:,} MB to download, {disk_mb:,} MB on disk ({free_mb:,} MB free)")
    sys.stdout.flush()


def _agreed() -> bool:
    """True unless a person at a terminal says no."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    return not input("Go on? [Y/n] ").strip().lower().startswith("n")


def _build(root: Path, action: str, choice: str, groups: list[str], pins: dict, progress: Progress) -> None:
    """Make or update .venv: torch first and alone, then the rest with torch held fast, then the library itself."""
    venv, python, log = root / ".venv", venv_python(root), root / ".venv" / "setup.log"
    env, _ = child_environment(root, choice)
    found = existing_torch() if choice == "existing" else None
    wanted, word = ([], "") if found else requirement(choice, pins["torch"][0], platform.system())
    if action == "build":
        _clear_away(root)
        venv.mkdir()
        _write_stamp(root, state="building")
        progress.say("making .venv")
        _make_venv(venv, found)
    _write_stamp(root, state="building")
    if word:
        progress.say(word)
    if wanted:
        progress.say("torch")
        pip_install(python, wanted, progress, env, log)
    progress.say("the other packages")
    version = _output([str(python), "-c", "from importlib.metadata import version; print(version('torch'))"], env)
    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder, "torch.txt")
        constraint.write_text(f"torch=={version}\n")
        rest = [line for group in ["core", *groups] for line in pins[group]]
        pip_install(python, [*rest, "--constraint", str(constraint)], progress, env, log)
    progress.say("the library itself")
    pip_install(python, ["--no-deps", "--editable", str(root)], progress, env, log)
    progress.say("compiling Python files")
    _compile(python, venv, env, log)
    progress.say("does torch load?", plain=False)
    cuda = _output([str(python), "-c", "import torch; print(torch.version.cuda)"], env)
    if choice == "cuda" and cuda == "None":
        raise Stop(
            "The package index gave a torch without CUDA.", "use the one your system has:  python3 start.py --torch existing"
        )
    _lab_settings(venv)
    facts = {"torch": choice, "groups": groups, "python": list(sys.version_info[:2]), "pins": fingerprint(pins, groups)}
    _write_stamp(root, state="ready", **facts)


def _clear_away(root: Path) -> None:
    """Remove a .venv that set-up made; put one that it did not make aside, untouched."""
    venv = root / ".venv"
    if not os.path.lexists(venv):
        return
    if read_stamp(root) is None and (venv.is_symlink() or not venv.is_dir() or any(venv.iterdir())):
        aside = root / time.strftime(".venv.before_%Y-%m-%d_%H%M%S")
        os.replace(venv, aside)
        print(f"  The .venv that was here is not start.py's; it is now {aside.name}", flush=True)
        return
    shutil.rmtree(venv)


def _make_venv(venv: Path, found: tuple[str, str, bool] | None) -> None:
    """found: the existing torch to be seen from inside, or None."""
    command = [getattr(sys, "_base_executable", None) or sys.executable, "-m", "venv", str(venv)]
    _output([*command, *(["--system-site-packages"] if found else [])], None, empty=True)
    if found and found[2]:  # what a virtual environment has is no system package: point at the folder that holds torch
        packages = next(venv.glob("Lib/site-packages" if os.name == "nt" else "lib/python*/site-packages"))
        (packages / "existing_torch.pth").write_text(found[1] + "\n")


def _compile(python: Path, venv: Path, env: dict[str, str], log: Path) -> None:
    """Compile the packages' Python files on all cores; pip does it on one, their tests too (a fifth, which nobody imports).

    A file that is no Python is passed over, as pip does; what was not compiled is compiled when it is imported. So nothing stops.
    """
    tests = "^" + re.escape(str(venv)) + r".*[/\\]tests[/\\]"
    command = [str(python), "-m", "compileall", "-q", "-j", str(min(8, allowed_cores()[0])), "-x", tests, str(venv)]
    with (
        open(log, "a", encoding="utf-8") as file,
        running(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT) as child,
    ):
        child.wait()


def _lab_settings(venv: Path) -> None:
    """No news, no update checks: nothing in JupyterLab asks the network for anything."""
    quiet = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    off = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    for path, settings in (("share/jupyter/lab/settings/overrides.json", quiet), ("etc/jupyter/labconfig/page_config.json", off)):
        (venv / path).parent.mkdir(parents=True, exist_ok=True)
        (venv / path).write_text(json.dumps(settings, indent=1))


def _write_stamp(root: Path, **facts) -> None:
    path = root / ".venv" / "four_walls.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"root": str(root), **facts}, indent=1, sort_keys=True))
    os.replace(temporary, path)


def _output(command: list[str], env: dict[str, str] | None, *, empty: bool = False) -> str:
    """The last line that `command` prints. Raises Stop with its last word if it fails."""
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    if done.returncode or not (lines or empty):
        word = lines[-1] if lines else f"exit code {done.returncode}"
        raise Stop(f"{' '.join(command)[:200]}\n  failed: {word}", "mend that, then run the same command again")
    return lines[-1] if lines else ""
