"""Where a submission runs: without network, without sources, other submissions or your files, and within bounds.

What this machine allows is found out once, from the strongest kind down: bubblewrap, namespaces of our own (confine.py), another
user, nothing but a loud warning. In the first two a submission sees the system's libraries, this Python, a copy of the library
without the answers, and a folder of its own in memory; the kernel ends the rest of it with its first process.

    a kind is taken  <=>  a trial run in it can import the library, and can neither read this file nor reach the network

Reference: DESIGN, section 8; man page bwrap(1).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from .box import KINDS, Bounds, Box
from .control_groups import make_group, sweep

__all__ = ["MARK", "Sandbox", "library_without_answers", "tidy"]

HERE = Path(__file__).resolve()
MARK = "fourwalls-grade-"  # of folders
TRIAL = """
import os, socket, sys
sys.path[:0] = [sys.argv[1]]
import fourwalls
assert fourwalls.__file__.startswith(sys.argv[1]), fourwalls.__file__
seen = os.access(sys.argv[2], os.R_OK)
try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))
    network = True
except OSError:
    network = False
for _ in range(4):  # a bound on processes that counts those of others would let no rank begin
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
print("TRIAL", int(seen), int(network), os.getuid(), flush=True)
"""


def library_without_answers(target: Path, forbidden=()) -> Path:
    """Copy the library into `target`, without the modules named in `forbidden`, the checks, and what grades. Returns `target`."""
    source = HERE.parents[1]
    answers = {Path(*name.split(".")[1:]) for name in forbidden if name.startswith("fourwalls.")}
    ours = {"judge", "stand_in", "problem", "release", "mutants", "grade", "__main__"}

    def left_out(folder, names):
        place = Path(folder).relative_to(source)
        gone = {name for name in names if place / Path(name).stem in answers or name == "__pycache__"}
        if place == Path("course"):
            gone |= {n for n in names if n.startswith("lab_") or Path(n).stem in ours}
        return gone

    shutil.copytree(source, target / source.name, ignore=left_out)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


class Sandbox:
    """How submissions are run here. kind: one of KINDS; refused: {kind: why it is not taken}.

    folder     where boxes are made; it is ours and nobody else's
    library    the copy of the library without answers
    secret     a file that a submission must not be able to read
    """

    def __init__(self, folder: Path, library: Path, *, bounds: Bounds | None = None, kinds=KINDS, secret: Path = HERE):
        self.folder, self.library, self.bounds, self.secret = folder, library, bounds or Bounds(), secret
        self.kind, self.refused, self.reads_secret, self.has_network = "none", {}, True, True
        self.groups = self._can_join()
        for kind in kinds:
            try:
                self.reads_secret, self.has_network = self._trial(kind)
            except (OSError, RuntimeError) as error:
                self.refused[kind] = str(error).strip().rpartition("\n")[2][:200]
                continue
            if kind in KINDS[:2] and (self.reads_secret or self.has_network):
                self.refused[kind] = "it would read this checkout or reach the network"
                continue
            self.kind = kind
            break

    def describe(self) -> list[str]:
        """What protects, and what does not, in lines for the teacher."""
        with self.box("words") as box:
            guards = box.group.guards
        kept = [f"{name} by a control group" if name in guards else f"{name} by counting" for name in ("memory", "pids")]
        lines = [f"Isolation: {self.kind}; {', '.join(kept)}".replace("pids", "processes")]
        if self.kind in KINDS[:2]:
            return lines
        open_to = [word for word, so in (("the network", self.has_network), ("files of this checkout", self.reads_secret)) if so]
        if self.kind == "none" or open_to:
            why = "; ".join(f"{kind}: {reason}" for kind, reason in self.refused.items())
            lines += [
                "WARNING: a submission can reach " + (" and ".join(open_to) or "whatever you can"),
                "         Fix: sudo apt install bubblewrap, or grade in a container or virtual machine of its own",
                f"         ({why})",
            ]
        return lines

    @contextlib.contextmanager
    def box(self, name: str, *, alone: bool = False):
        """A Box for one submission. When it is left, none of its processes and files are.

        alone: nothing but the submission runs below this process, so that all of that may be counted, and ended.
        """
        box = Box(self, f"{os.getpid()}-{name}", alone)
        try:
            yield box
        finally:
            box.close()

    def _can_join(self):
        """Whether a process can enter a control group that we have made."""
        group = make_group(f"{os.getpid()}-trial", self.bounds.memory, self.bounds.processes)
        try:
            command = [sys.executable, "-I", "-S", str(HERE.with_name("confine.py")), json.dumps({"join": group.entrances})]
            done = subprocess.run([*command, sys.executable, "-S", "-c", ""], capture_output=True, timeout=60, check=False)
            return done.returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False
        finally:
            group.close()

    def _trial(self, kind):
        """(reads the secret, reaches the network) of a run of this kind. Raises OSError or RuntimeError where it cannot be."""
        before, self.kind = self.kind, kind
        try:
            if kind == "bubblewrap" and not shutil.which("bwrap"):
                raise RuntimeError("not installed")
            if kind == "another user" and (not hasattr(os, "getuid") or os.getuid() != 0):
                raise RuntimeError("only root can become another user")
            with self.box("trial") as box:
                command = [sys.executable, "-s", "-c", TRIAL, str(self.library_inside), str(self.secret)]
                done = subprocess.run(
                    box.wrap(command), capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
                )
            said = [line.split() for line in done.stdout.splitlines() if line.startswith("TRIAL ")]
            if not said:
                raise RuntimeError(done.stderr or f"exit code {done.returncode}")
            return said[0][1] == "1", said[0][2] == "1"
        except subprocess.TimeoutExpired:
            raise RuntimeError("no answer") from None
        finally:
            self.kind = before

    @property
    def library_inside(self) -> str:
        """Where a submission finds the library."""
        return "/library" if self.kind in KINDS[:2] else str(self.library)


def tidy() -> None:
    """Remove what graders that were killed have left: their folders and control groups."""
    sweep()
    for folder in Path(tempfile.gettempdir()).glob(f"{MARK}*"):
        maker = folder.name.removeprefix(MARK).partition("-")[0]
        if maker.isdigit() and not psutil.pid_exists(int(maker)) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
