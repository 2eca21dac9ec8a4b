"""Every lab's reference solution where machines are poor: one core, 2 GB, no shared memory, other twists, twice the same.

    python -m tests.labs.conditions [LAB ...] [--only NAME ...] [--notebook]     from the root of the checkout

A line for each lab and condition: points, seconds on the clock, seconds of computing, and the most memory held at once (the sum
of the proportional set sizes of all its processes, looked at four times a second or less). Exit code 0 if all have full marks.
--only: the conditions whose names begin so. --notebook: a kernel runs the notebook, as a learner's does.
Linux, and root for a memory limit by the kernel and a machine without /dev/shm; what cannot be had is said and left out.
Reference: labs/README.md, "A seat on a hub".
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

from fourwalls.course.control_groups import make_group
from fourwalls.course.grade import grade_notebook
from fourwalls.course.lab import LABS
from fourwalls.course.mutants import source_of

from .as_learner import ROOT, Watched, run_lab, unsolved

GIB = 2**30
CONDITIONS = (  # name, twist, what is taken away
    ("plain", None, ()),
    ("plain, again", None, ()),
    ("twist 1", 1, ()),
    ("twist 2, one core", 2, ("cores",)),
    ("twist 3, 2 GB", 3, ("memory",)),
    ("twist 4, no /dev/shm", 4, ("shm",)),
    ("twist 5, all three", 5, ("cores", "memory", "shm")),
    ("a seat", None, ("cores", "memory", "64 MB", "network")),
)
NO_SHM = "mount -t tmpfs -o size=4k,ro tmpfs /dev/shm && "
SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
NO_NETWORK = "ip link set lo up && "  # a kernel and its notebook talk over this machine's own address


def grade(lab: str, twist: int | None) -> dict:
    """What the reference scores by the judge of `start.py grade`: {"scores", "wrong", "reason", "seconds"}."""
    begin = time.perf_counter()
    graded = grade_notebook(source_of(ROOT, lab), lab, twist=twist, reference=True)
    taken = time.perf_counter() - begin
    scores = {name: report.points for name, report in graded.reports.items()}
    wrong = {name: str(report) for name, report in graded.reports.items() if not report.passed}
    return {"scores": scores, "wrong": wrong, "reason": graded.reason, "seconds": taken}


def learn(lab: str, twist: int | None) -> dict:
    """The same of a notebook in a kernel, and {"computed", "peak"} of the kernel and all below it."""
    found = run_lab(lab, twist=twist, twice=False)
    wrong = unsolved(found)
    checks = [name for name, *_ in found["cells"] if "-check-" in name]
    return {**found, "scores": {name: int(name not in wrong) for name in checks}, "wrong": wrong, "reason": "", "cells": ()}


def tried(lab: str, twist: int | None, without, *, notebook: bool = False) -> dict:
    """`grade` or `learn` in a process of its own under a condition, with "computed", "peak" and "missing" (no kernel's limit)."""
    command = [sys.executable, "-m", __spec__.name, "--one", json.dumps([lab, twist, notebook])]
    group = make_group(f"{os.getpid()}-{lab}", (2 if "memory" in without else 64) * GIB, 512)
    try:
        join = "".join(f'echo 0 > "{entrance}" && ' for entrance in group.entrances)
        inside = ["sh", "-c", f'{join}exec "$@"', "sh", *_around(command, without)]
        with subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            watched = Watched(process.pid)
            out, err = process.communicate(timeout=600)
        computed = watched.computed()
        watched.stop()
        lines = out.splitlines() if process.returncode == 0 else []
        said = json.loads(lines[-1]) if lines else {"reason": err[-500:] or f"ended with {process.returncode}"}
        missing = "memory" in without and "memory" not in group.guards
        ended = f"{group.ended_for_memory()} processes ended for memory" if group.ended_for_memory() else ""
        found = {"scores": {}, "wrong": {}, "seconds": 0.0, "computed": computed, "peak": watched.peak, **said}
        return found | {"missing": missing, "reason": found["reason"] or ended}
    finally:
        group.close()


def _around(command, without):
    """The command line that runs `command` without these."""
    if "cores" in without:
        command = ["taskset", "-c", "0", *command]
    first = [text for word, text in (("shm", NO_SHM), ("64 MB", SMALL_SHM), ("network", NO_NETWORK)) if word in without]
    if not first:
        return command
    spaces = ["--mount"] if {"shm", "64 MB"} & set(without) else []
    spaces += ["--net"] if "network" in without else []
    return ["unshare", *spaces, "sh", "-c", "".join(first) + 'exec "$@"', "sh", *command]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", metavar="LAB")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--notebook", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        lab, twist, notebook = options.one
        print(json.dumps((learn if notebook else grade)(lab, twist)))
        return 0
    wrong, may = 0, shutil.which("unshare") and os.geteuid() == 0
    for lab in options.labs or LABS:
        before = None
        for name, twist, without in CONDITIONS:
            if not name.startswith(tuple(options.only)):
                continue
            can = without if may else tuple(word for word in without if word in ("cores", "memory"))
            found = tried(lab, twist, can, notebook=options.notebook)
            full = bool(found["scores"]) and not found["wrong"] and not found["reason"]
            right = full and found["scores"] == (before or found["scores"])
            before, wrong = found["scores"], wrong + (not right)
            left = ", no kernel's limit here" * found["missing"] + ", not all of it here" * (can != without)
            times = f"{found['seconds']:6.1f} s  computed {found['computed']:6.1f} s  {found['peak'] / 2**20:5.0f} MiB"
            points = f"{sum(found['scores'].values()):g} points"
            print(f"{'ok ' if right else 'NO '} {lab:10} {name + left:22} {points:>9}  {times}")
            for text in (*found["wrong"].values(), found["reason"]):
                print(text, end="\n" if text else "")
            sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
