"""The place of one submission: its command line, its folder, its bounds, and its end.

    a box is left  =>  no process of it is alive, and no file of it is there

Reference: sandbox.py, which says what kinds there are; confine.py, which carries them out.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .control_groups import Group, make_group
from .watch import Watch, below

__all__ = ["KINDS", "Bounds", "Box"]

MiB = 2**20
HERE = Path(__file__).resolve().parent
KINDS = ("bubblewrap", "namespaces", "another user", "none")
NAMESPACES = ["mount", "pid", "net", "ipc", "uts"]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/nix")


@dataclass(frozen=True)
class Bounds:
    """What one submission may use. Bytes, numbers, seconds of the whole notebook."""

    memory: int = 1536 * MiB
    processes: int = 64
    disk: int = 64 * MiB
    file: int = 16 * MiB
    seconds: float = 600.0


@dataclass
class Box:
    """The place of one submission: `wrap` for Apart, and what was seen of it."""

    sandbox: "Sandbox"  # noqa: F821
    name: str
    alone: bool
    folder: Path = field(init=False)
    group: Group = field(init=False)
    watch: Watch | None = field(init=False, default=None)
    heard: int = field(init=False, default=0)

    def __post_init__(self):
        bounds, kind = self.sandbox.bounds, self.sandbox.kind
        self.folder = self.sandbox.folder / f"box-{self.name}"
        self.folder.mkdir(mode=0o700)
        self.user = _free_user() if kind in ("namespaces", "another user") and os.getuid() == 0 else None
        if self.user is not None:
            os.chown(self.folder, self.user, self.user)
        self.group = make_group(self.name, bounds.memory, bounds.processes) if self.sandbox.groups else Group({})
        unguarded = {"memory", "pids"} - self.group.guards
        if self.alone and (unguarded or kind not in KINDS[:2]):
            disk = bounds.disk if kind not in KINDS[:2] else None
            most = {"memory": bounds.memory, "pids": bounds.processes}
            self.watch = Watch({name: most[name] for name in unguarded}, self.folder, disk)

    @property
    def paths(self) -> list[str]:
        """What is put in front of the submission's module path."""
        return [self.sandbox.library_inside]

    def wrap(self, command: list[str]) -> list[str]:
        """The command line that runs `command` in here."""
        kind, bounds = self.sandbox.kind, self.sandbox.bounds
        inside = kind in KINDS[:2]
        home = "/tmp" if inside else str(self.folder)
        limits = {"FSIZE": bounds.file, "CORE": 0}
        if "pids" not in self.group.guards and (self.user is not None or kind in KINDS[:2]):
            limits["NPROC"] = bounds.processes
        plan = {"environment": _environment(home), "folder": home, "limits": limits}
        first = {"join": self.group.entrances}
        confine = [sys.executable, "-I", "-S"]
        if kind == "bubblewrap":
            shim = str(Path(self.sandbox.library_inside, "fourwalls", "course", "confine.py"))
            around = [*confine, str(HERE / "confine.py"), json.dumps(first), *self._bubblewrap()]
            return [*around, *confine, shim, json.dumps(plan), *command]
        if kind == "namespaces":
            spaces = NAMESPACES if os.getuid() == 0 else [*NAMESPACES, "user"]
            plan |= {"namespaces": spaces, "root": str(self.folder), "binds": _binds(self.sandbox), "user": self.user or 61000}
            plan |= {"tmp": bounds.disk, "shm": bounds.disk}
        elif kind == "another user":
            plan["user"] = self.user
        return [*confine, str(HERE / "confine.py"), json.dumps(first | plan), *command]

    def size(self) -> int:
        """How many processes it has."""
        if not self.alone:
            return len(self.group.members() or _below(self.user))
        return sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below())

    def news(self) -> str:
        """Why something of it was ended from outside since this was asked last, or ""."""
        ended = self.group.ended_for_memory()
        if ended > self.heard:
            self.heard = ended
            return f"it used more than {self.sandbox.bounds.memory / MiB:.0f} MiB of memory and was ended"
        said = self.watch.said if self.watch else ""
        if said:
            self.watch.said = ""
        return said

    def kill(self) -> None:
        """End every process of it, those too that have left their parents."""
        left = {process.pid for process in below()} if self.alone else set()
        for pid in left | {*self.group.members(), *_below(self.user)}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End and remove everything."""
        if self.watch:
            self.watch.stop()
        for _ in range(100):
            self.kill()
            _reap(self.alone)
            if not _below(self.user) and not (self.alone and below()):
                break
            time.sleep(0.02)
        self.group.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.user is not None and self.sandbox.kind == "another user":
            _remove_files_of(self.user)

    def _bubblewrap(self):
        words = [shutil.which("bwrap"), "--unshare-all", "--unshare-user", "--uid", "61000", "--gid", "61000"]
        words += ["--die-with-parent", "--new-session", "--clearenv", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        words += ["--chdir", "/tmp"]
        for source, target in _binds(self.sandbox):
            words += ["--symlink", os.readlink(source), target] if os.path.islink(source) else ["--ro-bind", source, target]
        return [*words, "--"]


def _binds(sandbox):
    """[(from, to)] of what is seen in the first two kinds, parents before what lies in them."""
    wanted = {path for path in SYSTEM if os.path.exists(path)} | {"/sys/devices/system/cpu"}
    roots = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
    roots |= {os.path.dirname(os.path.realpath(sys.executable)), str(Path(importlib.util.find_spec("torch").origin).parents[1])}
    wanted |= {path for path in roots if os.path.exists(path)}
    kept = [p for p in sorted(wanted) if os.path.exists(p) and not any(p != q and Path(q) in Path(p).parents for q in wanted)]
    pairs = [(path if path in SYSTEM else os.path.realpath(path), path) for path in kept]
    return [*pairs, (str(sandbox.library), "/library")]


def _environment(home):
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    names = {"HOME": home, "TMPDIR": home, "USER": "student", "LOGNAME": "student", "MPLCONFIGDIR": home, "MPLBACKEND": "agg"}
    path = os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"])
    return kept | names | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}


def _free_user() -> int:
    """A number that belongs to nobody and runs nothing: one for each box, so that boxes cannot touch each other."""
    import pwd

    taken = {process.info["uids"].real for process in psutil.process_iter(["uids"]) if process.info["uids"]}
    start = 61_200 + os.getpid() % 300 * 10
    for number in range(start, start + 4000):
        with contextlib.suppress(KeyError):
            pwd.getpwuid(number)
            continue
        if number not in taken:
            return number
    raise OSError("no free user number")


def _below(user) -> list[int]:
    """Processes of this user number."""
    if user is None:
        return []
    return [p.pid for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real == user]


def _reap(alone):
    """Take in the ends of orphans: zombies count as processes."""
    while alone:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _remove_files_of(user):
    for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.stat(follow_symlinks=False).st_uid != user:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
