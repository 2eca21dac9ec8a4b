"""A lab's notebook as somebody who has solved it runs it: a kernel, each cell in its turn, each check twice. What does it take?

    python -m tests.labs.as_learner [LAB ...]     a line for each check, and one for each lab

Seconds on the clock and of computing (of the kernel and everything below it), and the most memory that they held at once: the sum
of their proportional set sizes, looked at four times a second or less. Before the first check it waits, with a line of its own,
until the process for the learner's code is up, as it is for somebody who reads what is asked.
Reference: labs/README.md, "A seat on a hub".
"""

import argparse
import importlib
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from jupyter_client.manager import start_new_kernel

from fourwalls.course.lab import LABS
from fourwalls.course.mutants import source_of

ROOT = Path(__file__).resolve().parents[2]
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
MOST_SECONDS, OFTEN = 180.0, 0.25  # of one cell; between two looks at the memory
MOST_CHECK, MOST_LAB = 4.0, 30.0  # what is promised: a check's seconds, and a whole lab's


class Watched:
    """A process and all that it starts from now on: `computed()` seconds so far, and `peak` bytes.

    The kernel's account of a control group is exact (version 1, root). Where there is none, ticks are counted: ranks that live
    for milliseconds escape them.
    """

    def __init__(self, pid: int):
        self.process, self.peak, self._over = psutil.Process(pid), 0, threading.Event()
        self.folder: Path | None = ACCOUNTS / f"fourwalls-{pid}"
        try:
            self.folder.mkdir()
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.folder = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def computed(self) -> float:
        """Seconds of computing."""
        if self.folder is not None:
            return int((self.folder / "cpuacct.usage").read_text()) / 1e9
        total = 0.0
        for process in self._all():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def stop(self) -> None:
        """No more looking; called when the process has ended."""
        self._over.set()
        self._thread.join()
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()

    def _all(self):
        with suppress(psutil.Error):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def _look(self):
        wait = OFTEN
        while not self._over.wait(wait):
            held, begin = 0, time.perf_counter()
            for process in self._all():
                with suppress(psutil.Error, OSError):
                    held += process.memory_full_info().pss
            self.peak = max(self.peak, held)
            wait = max(OFTEN, 10 * (time.perf_counter() - begin))  # looking is work, and must not be what is measured


def run_lab(lab: str, *, twist: int | None = None, twice: bool = True, say=lambda *_: None) -> dict:
    """Run the reference's notebook in a kernel: {"cells": [(name, seconds, computed, shown)], "seconds", "computed", "peak"}.

    A check's cell is run twice, and its name ends with "again" the second time; "seconds" and "computed" count it once.
    say(name, seconds, computed, shown): told of each cell.
    """
    drawn = next(iter(importlib.import_module(f"fourwalls.course.{LABS[lab]}").problems(twist).values())).twist
    cells = [cell for cell in source_of(ROOT, lab)["cells"] if cell["cell_type"] == "code"]
    begin, left_out = time.perf_counter(), [0.0, 0.0]
    with tempfile.TemporaryDirectory(prefix="as-learner-", ignore_cleanup_errors=True) as folder:
        manager, client = start_new_kernel(cwd=folder, env=os.environ | {"FOURWALLS_MY": folder})
        watched = Watched(manager.provisioner.pid)
        rows = [("the kernel's start", time.perf_counter() - begin, watched.computed(), "")]
        try:
            for cell in cells:
                source = "".join(cell["source"]).replace("lab.reference", repr(drawn)).replace("twist=None", f"twist={twist}")
                is_check = "-check-" in cell["id"]
                if is_check and not any("-check-" in row[0] for row in rows):
                    rows.append(("until the process is up", *_run(client, watched, "with lab._lock: pass")))
                    say(*rows[-1])
                for word in ("", " again")[: 1 + (is_check and twice)]:
                    rows.append((cell["id"] + word, *_run(client, watched, source)))
                    say(*rows[-1])
                    if word:
                        left_out = [left_out[0] + rows[-1][1], left_out[1] + rows[-1][2]]
            whole = time.perf_counter() - begin - left_out[0], watched.computed() - left_out[1]
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=False)
            watched.stop()
    return {"cells": rows, "seconds": whole[0], "computed": whole[1], "peak": watched.peak}


def unsolved(found: dict) -> dict:
    """{name: what it showed} of the checks that did not give all points."""
    return {name: shown for name, _, _, shown in found["cells"] if not _solved(name, shown)}


def _solved(name, shown):
    return "-check-" not in name or ("no  " not in shown and " points" in shown)


def _run(client, watched, source):
    """(seconds, computed, what it showed as plain text) of a cell. Raises RuntimeError where it fails."""
    begin, computed, shown = time.perf_counter(), watched.computed(), []

    def keep(message):
        content = message["content"]
        if message["msg_type"] == "error":
            raise RuntimeError("\n".join(content["traceback"]))
        shown.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))

    client.execute_interactive(source, timeout=MOST_SECONDS, output_hook=keep, store_history=False)
    return time.perf_counter() - begin, watched.computed() - computed, "\n".join(shown)


def print_cell(name: str, seconds: float, computed: float, shown: str) -> None:
    """One line for a check, and for what takes long."""
    if "-check-" in name or seconds > 0.5:
        mark, slow = "ok " if _solved(name, shown) else "NO ", ", slow" * ("-check-" in name and seconds > MOST_CHECK)
        print(f"{mark} {name:34} {seconds:6.2f} s  computed {computed:6.2f} s{slow}", flush=True)


def main() -> int:
    """Returns the exit code: 0 if every check of every lab has its points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", metavar="LAB")
    options, code = parser.parse_args(), 0
    for lab in options.labs or LABS:
        found = run_lab(lab, say=print_cell)
        wrong, slow = unsolved(found), ", slow" * (found["seconds"] > MOST_LAB)
        times = f"{found['seconds']:6.2f} s  computed {found['computed']:6.2f} s  {found['peak'] / 2**20:5.0f} MiB"
        print(f"{'NO ' if wrong else 'ok '} {lab + ', whole':34} {times}{slow}", *wrong.values(), sep="\n", flush=True)
        code |= bool(wrong)
    return code


if __name__ == "__main__":
    sys.exit(main())
