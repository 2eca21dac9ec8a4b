"""What this machine can do for the course: one line each, green, or with what falls back and the one fix.

Only a few things are essential (torch loads, ranks meet, real and simulated); everything else has something that takes its
place, and the line says what. What could hang or crash is tried in a process of its own, so that one broken thing cannot hide
the other lines.

    exit code = 1 if any line is broken, else 0

`python3 start.py check` runs this file with the Python of .venv. Reference: torch.distributed documentation, "Which backend
to use?"; ipywidgets documentation, "Installation", on the versions of kernel and front end.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from .environment import can_write
from .machine import allowed_cores, find_chromium, memory_limit

__all__ = ["LINES", "Line", "report", "widget_verdict"]

OK, FALLS_BACK, BROKEN = "ok", "falls back", "broken"
MiB, GiB = 2**20, 2**30

# Run in a process of its own: a rank that hangs or a torch that crashes must not take the other lines with it.
RANKS_PROBE = """
import json, time, fourwalls as fw
def meet(comm):
    comm.barrier()
    return comm.rank
start = time.perf_counter(); first = fw.run(meet, ranks=2, timeout=20).values; middle = time.perf_counter()
second = fw.run(meet, ranks=2, timeout=20).values; end = time.perf_counter()
assert list(first) == list(second) == [0, 1], (first, second)
print("PROBE", json.dumps([middle - start, end - middle]))
"""
SIMULATOR_PROBE = """
import json, time, fourwalls as fw
def meet(comm):
    comm.barrier()
    return comm.rank
start = time.perf_counter(); values = fw.simulate(meet, ranks=64).values; end = time.perf_counter()
assert list(values) == list(range(64)), values
print("PROBE", json.dumps([end - start]))
"""
TORCH_PROBE = """
import json, torch, torch.distributed as d
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = d.is_available() and d.is_nccl_available()
print("PROBE", json.dumps([torch.__version__, torch.version.cuda, gpus, nccl]))
"""


@dataclass(frozen=True)
class Line:
    """One finding. state: "ok", "falls back" or "broken" (the course cannot run)."""

    state: str
    name: str
    text: str


def widget_verdict(kernel: str, front_end: str | None, anywidget: str, anywidget_front: str | None) -> Line:
    """Whether the widgets of the kernel and those of the page fit together, and which side to upgrade.

    kernel: version of ipywidgets. front_end: version of @jupyter-widgets/jupyterlab-manager as JupyterLab will load it.
    anywidget, anywidget_front: the same two for anywidget. None: the page has none. Pairs: ipywidgets 8 with manager 5
    (jupyterlab_widgets 3), ipywidgets 7 with manager 3 (jupyterlab_widgets 1).
    """
    manager = {7: 3, 8: 5}.get(_major(kernel))
    still = "pictures are shown, nothing can be moved"
    if front_end is None:
        return Line(FALLS_BACK, "widgets", f"JupyterLab has no widget extension: {still}. Install jupyterlab_widgets")
    if manager is None:
        return Line(FALLS_BACK, "widgets", f"ipywidgets {kernel} is not known here: {still}, perhaps. Install ipywidgets 8")
    if _major(front_end) != manager:
        upgrade = "jupyterlab_widgets" if _major(front_end) < manager else "ipywidgets"
        versions = f"ipywidgets {kernel} in the kernel, manager {front_end} in the page"
        return Line(FALLS_BACK, "widgets", f"{versions}: {still}. Upgrade {upgrade}")
    if anywidget_front is None or anywidget.split(".")[:2] != anywidget_front.split(".")[:2]:
        versions = f"anywidget {anywidget} in the kernel, {anywidget_front or 'none'} in the page"
        return Line(FALLS_BACK, "widgets", f"{versions}: {still}. Upgrade anywidget")
    return Line(OK, "widgets", f"ipywidgets {kernel} and anywidget {anywidget}, kernel and page agree")


def _cores() -> Line:
    cores, why = allowed_cores()
    if cores == 1:
        return Line(FALLS_BACK, "cores", f"1 ({why}): ranks take turns; bytes, virtual time and pacing still show everything")
    return Line(OK, "cores", f"{cores} ({why}); the machine has {os.cpu_count()}")


def _memory() -> Line:
    limit = memory_limit()
    if not limit:
        return Line(FALLS_BACK, "memory", "not to be found out on this system; 2 GB are enough")
    small = limit < 1.9e9
    text = f"{limit / GiB:.1f} GiB" + (": less than 2 GB; close other programs, use at most 4 real ranks" if small else "")
    return Line(FALLS_BACK if small else OK, "memory", text)


def _shared_memory() -> Line:
    path = "/dev/shm"
    if not sys.platform.startswith("linux"):
        return Line(OK, "shared memory", "not used on this system; ranks talk through sockets")
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        return Line(FALLS_BACK, "shared memory", "no /dev/shm to write to: ranks talk through sockets, as they do by default")
    size = shutil.disk_usage(path).total
    if size <= 64 * MiB:
        text = f"/dev/shm has {size // MiB} MiB: enough, as ranks talk through sockets (a DataLoader with workers may fail)"
        return Line(FALLS_BACK, "shared memory", text)
    return Line(OK, "shared memory", f"/dev/shm has {size / GiB:.1f} GiB")


def _torch() -> list[Line]:
    found, error = _probe(TORCH_PROBE, 120)
    if found is None:
        return [Line(BROKEN, "torch", f"does not load: {error}")]
    version, cuda, gpus, nccl = found
    lines = [Line(OK, "torch", f"{version} ({'CUDA ' + cuda if cuda else 'CPU build'})")]
    if not gpus:
        lines.append(Line(FALLS_BACK, "GPUs", "none: ranks are processes on the CPU and talk through gloo"))
    elif len(gpus) == 1 or not nccl:
        why = "one GPU takes one NCCL rank" if nccl else "this torch has no NCCL"
        lines.append(Line(FALLS_BACK, "GPUs", f"{len(gpus)} ({gpus[0]}): {why}; several ranks run on the CPU through gloo"))
    else:
        lines.append(Line(OK, "GPUs", f"{len(gpus)} ({gpus[0]}), NCCL is there"))
    return lines


def _ranks() -> list[Line]:
    if os.name == "nt":
        return [Line(FALLS_BACK, "real ranks", "not on Windows itself: use WSL; without it the simulator runs every program")]
    found, error = _probe(RANKS_PROBE, 120)
    if found is None:
        return [Line(BROKEN, "real ranks", f"two ranks did not meet: {error}")]
    first, second = found
    slow = second > 2
    lines = [Line(OK, "fork server", f"started, and two gloo ranks met, after {first:.1f} s")]
    text = f"two fresh ranks start, meet and end in {second:.2f} s" + (": slow; is the machine busy?" if slow else "")
    return [*lines, Line(FALLS_BACK if slow else OK, "gloo ranks", text)]


def _simulator() -> Line:
    found, error = _probe(SIMULATOR_PROBE, 120)
    if found is None:
        return Line(BROKEN, "simulator", f"64 simulated ranks did not meet: {error}")
    return Line(OK, "simulator", f"64 simulated ranks met in {found[0]:.2f} s")


def _widgets() -> Line:
    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "0 (missing)"

    import jupyter_core.paths

    folders = [pathlib.Path(folder) / "labextensions" for folder in jupyter_core.paths.jupyter_path()]

    def in_page(name):  # the first folder wins, as in JupyterLab
        for folder in folders:
            file = folder / name / "package.json"
            if file.is_file():
                return json.loads(file.read_text(encoding="utf-8")).get("version")
        return None

    manager = in_page("@jupyter-widgets/jupyterlab-manager")
    return widget_verdict(version("ipywidgets"), manager, version("anywidget"), in_page("anywidget"))


def _compiler() -> Line:
    wanted = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    found = next((shutil.which(name.split()[0]) for name in wanted if name.strip() and shutil.which(name.split()[0])), None)
    if found:
        return Line(OK, "C++ compiler", f"{found} (for torch.compile)")
    fix = "xcode-select --install" if sys.platform == "darwin" else "install g++ with your system's package manager"
    return Line(FALLS_BACK, "C++ compiler", f"none: torch.compile is left out, everything else runs. Fix: {fix}")


def _chromium() -> Line:
    found = find_chromium()
    if found:
        return Line(OK, "Chromium", f"{found} (for the browser tests)")
    return Line(FALLS_BACK, "Chromium", "none: only the browser tests need it; your own browser opens the notebooks")


def _disk() -> Line:
    free = shutil.disk_usage(pathlib.Path(__file__).resolve().parent).free
    if free < 1e9:
        return Line(FALLS_BACK, "disk", f"{free / MiB:.0f} MiB free: little; recorded benchmarks and checkpoints may not fit")
    return Line(OK, "disk", f"{free / GiB:.1f} GiB free")


def _home() -> Line:
    home = os.path.expanduser("~")
    if can_write(home):
        return Line(OK, "home folder", f"{home} can be written")
    return Line(FALLS_BACK, "home folder", f"{home} cannot be written: settings and caches go to a temporary folder")


LINES: tuple[Callable[[], Line | list[Line]], ...] = (
    _cores, _memory, _shared_memory, _disk, _home, _torch, _ranks, _simulator, _widgets, _compiler, _chromium,
)  # fmt: skip


def report(lines=LINES, *, stream=None) -> int:
    """Print every line as soon as it is known. Returns 0, or 1 if something essential is broken."""
    stream = stream or sys.stdout
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")
    unicode = "utf" in (getattr(stream, "encoding", None) or "").lower()
    symbols = {OK: "✓", FALLS_BACK: "~", BROKEN: "✗"} if unicode else {OK: "+", FALLS_BACK: "~", BROKEN: "x"}
    colours = {OK: "\x1b[32m", FALLS_BACK: "\x1b[33m", BROKEN: "\x1b[31m"}
    states = []
    for find in lines:
        try:
            found = find()
        except Exception as error:  # a probe that fails is a finding, and the other lines still count
            found = Line(FALLS_BACK, find.__name__.strip("_"), f"could not be found out: {type(error).__name__}: {error}")
        for line in [found] if isinstance(found, Line) else found:
            head = f"{symbols[line.state]} {line.state:<10}"
            head = f"{colours[line.state]}{head}\x1b[0m" if coloured else head
            print(f"{head} {line.name:<14} {line.text}", file=stream, flush=True)
            states.append(line.state)
    broken = states.count(BROKEN)
    print(f"{states.count(OK)} ok, {states.count(FALLS_BACK)} fall back, {broken} broken.", file=stream)
    return 1 if broken else 0


def _major(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdigit() else 0


def _probe(program: str, seconds: float) -> tuple[list | None, str]:
    """What `program` prints after PROBE, as (values, ""), or (None, the last line of its error)."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer after {time.perf_counter() - start:.0f} s"
    for row in done.stdout.splitlines():
        if row.startswith("PROBE "):
            return json.loads(row[6:]), ""
    said = [row for row in done.stderr.strip().splitlines() if row.strip()]
    return None, said[-1].strip() if said else f"exit code {done.returncode}, and it said nothing"


if __name__ == "__main__":
    sys.exit(report())
