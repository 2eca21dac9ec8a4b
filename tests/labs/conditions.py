"""Every lab's reference solution where machines are poor: one core, 2 GB, no shared memory, other twists, twice the same.

    .venv/bin/python tests/labs/conditions.py [LAB ...]     a line for each lab and condition; exit code 0 if all have full marks

Linux, and root for a memory limit by the kernel and a machine without /dev/shm; what cannot be had is said and left out.
Reference: labs/README.md, "A seat on a hub".
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
CONDITIONS = (  # name, twist, what is taken away
    ("plain", None, ()),
    ("plain, again", None, ()),
    ("twist 1", 1, ()),
    ("twist 2, one core", 2, ("cores",)),
    ("twist 3, 2 GB", 3, ("memory",)),
    ("twist 4, no /dev/shm", 4, ("shm",)),
    ("twist 5, all three", 5, ("cores", "memory", "shm")),
)
NO_SHM = 'mount -t tmpfs -o size=4k,ro tmpfs /dev/shm && exec "$@"'


def grade(lab: str, twist: int | None) -> dict:
    """In a process of its own: what the reference scores, and the seconds it took."""
    from fourwalls.course.grade import grade_notebook
    from fourwalls.course.mutants import source_of

    begin = time.perf_counter()
    graded = grade_notebook(source_of(ROOT, lab), lab, twist=twist, reference=True)
    taken = time.perf_counter() - begin
    scores = {name: report.points for name, report in graded.reports.items()}
    wrong = {name: str(report) for name, report in graded.reports.items() if not report.passed}
    return {"scores": scores, "wrong": wrong, "reason": graded.reason, "seconds": taken}


def tried(lab: str, twist: int | None, without) -> dict:
    """`grade` under a condition, with the most memory that its processes held at once, in bytes."""
    from fourwalls.course.control_groups import make_group

    command = [sys.executable, __file__, "--one", lab, json.dumps(twist)]
    if "cores" in without:
        command = ["taskset", "-c", "0", *command]
    if "shm" in without:
        command = ["unshare", "--mount", "sh", "-c", NO_SHM, "sh", *command]
    group = make_group(f"{os.getpid()}-{lab}", (2 if "memory" in without else 64) * GIB, 512)
    try:
        entrances = group.entrances
        missing = "memory" in without and "memory" not in group.guards
        join = "".join(f'echo 0 > "{entrance}" && ' for entrance in entrances)
        done = subprocess.run(["sh", "-c", f'{join}exec "$@"', "sh", *command], capture_output=True, text=True, timeout=600)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        said = json.loads(lines[-1]) if lines else {"reason": done.stderr[-500:] or f"ended with {done.returncode}"}
        return {"scores": {}, "wrong": {}, "seconds": 0.0, **said, "peak": _peak(group), "missing": missing}
    finally:
        group.close()


def _peak(group) -> int:
    folder = group.folders.get("memory")
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if folder is not None and (folder / name).exists():
            return int((folder / name).read_text())
    return 0


def main(labs) -> int:
    """Print the table."""
    from fourwalls.course.lab import LABS

    wrong = 0
    for lab in labs or LABS:
        before = None
        for name, twist, without in CONDITIONS:
            if shutil.which("unshare") is None or os.geteuid() != 0:
                without = tuple(word for word in without if word != "shm")
            found = tried(lab, twist, without)
            full = bool(found["scores"]) and not found["wrong"] and not found["reason"]
            right = full and found["scores"] == (before or found["scores"])
            before, wrong = found["scores"], wrong + (not right)
            points = sum(found["scores"].values())
            note = ", no kernel's limit here" if found["missing"] else ""
            size = f"{found['seconds']:6.1f} s {found['peak'] / 2**20:7.0f} MiB"
            print(f"{'ok ' if right else 'NO '} {lab:12} {name + note:24} {points:5g} points {size}")
            for text in (*found["wrong"].values(), found["reason"]):
                print(text, end="\n" if text else "")
            sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(grade(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        sys.exit(main(sys.argv[1:]))
