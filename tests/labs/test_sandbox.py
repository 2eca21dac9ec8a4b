"""The place where a submission runs: what it sees and reaches in each kind that this machine has, its bounds, and its end."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fourwalls.course.box import KINDS, Bounds
from fourwalls.course.control_groups import MARK, Group, make_group, sweep
from fourwalls.course.sandbox import Sandbox, library_without_answers

ROOT = Path(__file__).resolve().parents[2]
STRONG = KINDS[:2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(folder, library) for sandboxes."""
    folder = tmp_path_factory.mktemp("boxes")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o011)
    return folder, library_without_answers(folder / "library", ("fourwalls.collectives", "fourwalls.nn.optim"))


@pytest.fixture(scope="module")
def sandboxes(place):
    """A Sandbox of each kind that can be had here."""
    made = {kind: Sandbox(*place, kinds=(kind,)) for kind in KINDS}
    return {kind: sandbox for kind, sandbox in made.items() if sandbox.kind == kind}


def run(sandbox, program, *words, **options):
    with sandbox.box("test") as box:
        command = box.wrap([sys.executable, "-s", "-c", program, box.paths[0], *map(str, words)])
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


LOOKS = """
import json, os, sys
seen = {path: os.path.exists(path) for path in sys.argv[2:]}
try:
    open("/canary-of-four-walls", "w")
    outside = True
except OSError:
    outside = False
print(json.dumps([seen, sorted(os.environ), os.getuid(), outside, sorted(p for p in os.listdir("/proc") if p.isdigit())]))
"""


def test_the_strongest_kind_that_works_is_taken(place, sandboxes):
    assert Sandbox(*place).kind == next(kind for kind in KINDS if kind in sandboxes)
    if shutil.which("unshare") and subprocess.run(["unshare", "-mpn", "--fork", "true"], check=False).returncode == 0:
        assert "namespaces" in sandboxes  # where it can be had it is had, so that no test below is left out for a fault of ours


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen(sandboxes, kind, tmp_path, monkeypatch):
    if kind not in sandboxes:
        pytest.skip(f"no {kind} here")
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("TEACHERS_TOKEN", "s3cret")
    done = run(sandboxes[kind], LOOKS, ROOT / "labs", tmp_path / "secret", Path.home() / ".bashrc")
    seen, environment, user, outside, processes = json.loads(done.stdout)
    assert "TEACHERS_TOKEN" not in environment
    if kind in STRONG:
        assert not any(seen.values()) and len(processes) <= 3
    if kind != "none":
        assert user != 0 and not outside
    (Path("/canary-of-four-walls")).unlink(missing_ok=True)


def test_a_command_can_be_run_as_somebody_else_within_limits(tmp_path):
    if os.name != "posix" or os.getuid() != 0:
        pytest.skip("only root can become another user")
    plan = {"user": 61_199, "limits": {"FSIZE": 1000, "CORE": 0}, "environment": {"PATH": "/usr/bin:/bin"}, "folder": "/"}
    confine = [sys.executable, "-I", "-S", str(ROOT / "utils/fourwalls/course/confine.py"), json.dumps(plan)]
    done = subprocess.run([*confine, "/bin/sh", "-c", "id -u; id -G; ulimit -f; env"], capture_output=True, text=True, check=True)
    user, groups, blocks, *environment = done.stdout.split()
    assert (user, groups, int(blocks) <= 2) == ("61199", "61199", True)
    assert {line.partition("=")[0] for line in environment} <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}


def test_the_library_has_no_answers_and_no_checks(place):
    names = {str(p.relative_to(place[1] / "fourwalls")) for p in (place[1] / "fourwalls").rglob("*.py")}
    assert {"ranks/apart.py", "course/drivers.py", "course/confine.py", "nn/gpt.py"} <= names
    gone = ("collectives/", "nn/optim.py", "course/lab_", "course/judge.py", "course/problem.py", "course/release.py")
    assert [name for name in names if name.startswith(gone)] == []


STAYS = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(120)
        os._exit(0)
open("mine", "w").write("x")
print("away", flush=True)
"""


def running(program):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if program in (p.info["cmdline"] or ())]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_what_runs_away_is_gone_when_the_box_is_left(sandboxes, kind):
    if kind not in sandboxes:
        pytest.skip(f"no {kind} here")
    with sandboxes[kind].box("away") as box:
        done = subprocess.run(box.wrap([sys.executable, "-c", STAYS]), capture_output=True, text=True, timeout=30, check=False)
        assert done.stdout == "away\n", done.stderr
        folder = box.folder
    assert not folder.exists()
    end = time.monotonic() + 5
    while running(STAYS) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(STAYS) == []


COUNTED = """
import subprocess, sys
from pathlib import Path
from fourwalls.course.box import Bounds
from fourwalls.course.sandbox import Sandbox
from fourwalls.course.watch import adopt_orphans
adopt_orphans()
bounds = Bounds(memory=150 * 2**20, processes=8, disk=2**20, file=10 * 2**20)
sandbox = Sandbox(Path(sys.argv[1]), Path(sys.argv[2]), kinds=(), bounds=bounds)
sandbox.groups = False
with sandbox.box("counted", alone=True) as box:
    subprocess.run(box.wrap([sys.executable, "-c", sys.argv[3]]), timeout=30, check=False)
    print(box.news())
"""
MEMORY = """
import time
held = []
for _ in range(20):
    held.append(bytearray(b"x") * 10**7)
    time.sleep(0.05)
time.sleep(20)
"""
PROCESSES = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
time.sleep(20)
"""
FILES = """
import time
open("a", "wb").write(bytes(3 * 2**20))
time.sleep(20)
"""
BOMBS = {"memory": (MEMORY, "150 MiB of memory"), "processes": (PROCESSES, "8 processes"), "files": (FILES, "1 MiB of files")}


@pytest.mark.parametrize("what", BOMBS)
def test_where_the_kernel_does_not_count_we_do(place, what):
    program, says = BOMBS[what]
    command = [sys.executable, "-c", COUNTED, *map(str, place), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"more than {says}" in done.stdout, (done.stdout, done.stderr)


def test_a_control_group_is_made_entered_and_removed_and_swept_when_its_maker_is_gone():
    group = make_group(f"{os.getpid()}-group", 2**30, 50)
    if not group.guards:
        pytest.skip("no control group can be made here")
    child = subprocess.Popen(["sleep", "60"])
    for entrance in group.entrances:
        Path(entrance).write_text(str(child.pid))
    assert group.members() == [child.pid] and group.ended_for_memory() == 0
    group.close()
    assert child.wait(5) == -9 and not any(folder.exists() for folder in group.folders.values())
    dead = subprocess.Popen(["true"])
    dead.wait()
    abandoned = make_group(f"{dead.pid}-group", 2**30, 50)
    sweep()
    assert all(f"{MARK}-{dead.pid}" in str(f) and not f.exists() for f in abandoned.folders.values())


def test_without_control_groups_nothing_is_guarded_and_nothing_breaks(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("")
    group = make_group("x", 1, 1, own=str(tmp_path))
    assert group.guards == set() and group.members() == [] and group.entrances == [] and group.ended_for_memory() == 0
    group.close()
    assert Group({}).guards == set()


def test_a_machine_without_any_of_it_warns_loudly(place):
    sandbox = Sandbox(*place, kinds=(), bounds=Bounds())
    said = "\n".join(sandbox.describe())
    assert "Isolation: none" in said and "WARNING: a submission can reach" in said and "bubblewrap" in said
