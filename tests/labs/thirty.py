"""Thirty submissions of lab 1, right, partly right and hostile, graded in one command: are the grades exactly as expected?

    python -m tests.labs.thirty [FOLDER] [--kill]       from the root of the checkout; minutes, so no part of the tests

FOLDER: where it happens; interrupted, the same command goes on.
--kill: grade the same class once more in another folder, kill the grader when ten are done, go on, and compare the tables.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fourwalls.course.mutants import AIMED, mutants_of

from . import handed_in as given
from .handed_in import LAB, ROOT, TASKS, TWIST, without, write

COMMAND = [sys.executable, "-m", "fourwalls.course", "grade", "--lab", LAB, "--twist", str(TWIST)]
CANARY = "canary-of-thirty"
CHEATS = ("adds_into_x", "always_equal", "exits_at_once", "library_imported", "looks_for_the_oracle", "native_collective",
          "patched_judge", "sent_twice", "through_a_file", "swallows_everything")  # fmt: skip


def hand_in(folder: Path) -> dict:
    """Write the class; student -> points by task, or the beginning of the reason why there are none."""
    canary = folder.parent / CANARY
    mine = write(folder / "00 Ådne Ærlig" / "ring.ipynb", given.leaves_files(canary))
    expected = {"00 Ådne Ærlig": TASKS}

    def add(name, notebook, comes_to, file="ring.ipynb"):
        write(folder / name / file, notebook)
        expected[name] = comes_to

    for name in ("张伟", "Müller, Jürgen", "o'brien", "right", "right-2"):
        add(name, given.right(), TASKS)
    add("unsolved", given.release(), without(*TASKS))
    add("no shift", given.wrong("shift"), without("shift"))
    add("no scatter", given.wrong("reduce_scatter"), without("reduce_scatter", "all_reduce"))
    add("no gather", given.wrong("all_gather"), without("all_gather", "all_reduce"))
    for name in CHEATS:
        (path,) = [path for path in mutants_of(ROOT, LAB) if path.stem == name]
        notebook, text = given.right(), path.read_text(encoding="utf-8")
        notebook["cells"].append(given.own(text, "cheat"))
        task = AIMED.match(text)[1]
        hurt = {"reduce_scatter": ("reduce_scatter", "all_reduce"), "all_gather": ("all_gather", "all_reduce")}.get(task, (task,))
        add(f"cheat {name}", notebook, without(*hurt))
    add("messy", given.messy(), TASKS)
    add("stripped", given.stripped(), TASKS)
    add("bombs", given.bombs(), without("shift", "reduce_scatter", "all_reduce"))
    add("burglar", given.burglar(mine, 9, canary), without(*TASKS))
    add("exits", given.exits("all_gather"), without("all_gather", "all_reduce"))
    add("dies", given.dies_at_once(), "dead kernel")
    add("never loads", given.never_loads(), TASKS)
    add("corrupt", json.dumps(given.right()).encode()[:-40], "unreadable")
    add("huge", b'{"cells": [], "x": "' + b"x" * (50 * 2**20) + b'"}', "too large")
    add("foreign", given.foreign(), "foreign kernel")
    add("misnamed", given.right(), "wrong file name", "lab1.ipynb")
    write(folder / "twice" / "ring.ipynb", given.wrong("shift"), modified=1_000_000)
    add("twice", given.right(), TASKS, "ring (1).ipynb")
    return expected


def outcome(folder):
    """student -> points by task, or the reason."""
    lines = (folder / "graded" / LAB / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in map(json.loads, lines):
        found[line["student"]] = {t: task["points"] for t, task in line["tasks"].items()} or line["reason"]
    return found


def differences(found, expected):
    """In words, where they differ."""
    wrong = []
    for student, comes_to in expected.items():
        got = found.get(student, "nothing")
        same = got == comes_to if isinstance(comes_to, dict) else isinstance(got, str) and got.startswith(comes_to)
        wrong += [] if same else [f"{student}: {got} instead of {comes_to}"]
    return wrong + [f"{student}: nobody's" for student in found.keys() - expected.keys()]


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    base = options.folder or Path(tempfile.mkdtemp(prefix="thirty-"))
    folder = base / ("killed" if options.kill else "whole")
    expected = hand_in(folder)
    print(f"{len(expected)} submissions in {folder}", flush=True)
    begin = time.monotonic()
    if options.kill:
        with subprocess.Popen([*COMMAND, str(folder)], cwd=ROOT) as first:
            book = folder / "graded" / LAB / "verdicts.jsonl"
            while first.poll() is None and (not book.exists() or book.read_text().count("\n") < 15):
                time.sleep(0.1)
            first.send_signal(signal.SIGKILL)
        print(f"killed after {time.monotonic() - begin:.0f} s, {len(outcome(folder))} noted", flush=True)
    code = subprocess.call([*COMMAND, str(folder)], cwd=ROOT)
    seconds = time.monotonic() - begin
    wrong = differences(outcome(folder), expected)
    left = [d for d in (base, folder, "/tmp", "/var/tmp", "/dev/shm", ROOT) if Path(d, CANARY).exists()]
    print(f"{len(expected) - len(wrong)} of {len(expected)} as expected, in {seconds:.0f} s; exit code {code}", *wrong, sep="\n")
    print(f"files left outside: {left or 'none'}")
    return 1 if wrong or left or code else 0


if __name__ == "__main__":
    sys.exit(main())
