#!/usr/bin/env python3
"""Four Walls in one command. With nothing but Python and git:

    python3 start.py                  set up what is missing, then open JupyterLab in my/, your own copies
    python3 start.py test [ARGS]      set up what is missing, then run all tests (ARGS go to pytest)
    python3 start.py setup            set up, nothing more
    python3 start.py check            what this machine can do, and what falls back
    python3 start.py reset NOTEBOOK   a fresh copy of one notebook in my/; yours is kept under a dated name
    python3 start.py labs [--twist N] for teachers: student copies of the labs into labs/release/, proven free of answers
    python3 start.py grade DIR --lab NAME [--twist N]    for teachers: gradebook, feedback and tables from what was handed in
    python3 start.py mutants          for teachers: wrong and cheating solutions against the labs' checks

Everything is installed into the folder .venv beside this file; deleting .venv and my/ undoes it all.
"""

# This file is kept readable for every Python 3, so that an old one gets as far as being told so. The work is done in
# utils/fourwalls_start, which needs only the standard library too.
import os
import shutil
import signal
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
OLDEST, GOOD = (3, 11), ["python3.13", "python3.12", "python3.11", "python3.14"]


def too_old(version, which=shutil.which):
    """What to tell someone whose Python cannot run the course; empty if it can."""
    if tuple(version[:2]) >= OLDEST:
        return ""
    other = [name for name in GOOD if which(name)]
    fix = "run:  {} start.py".format(other[0]) if other else "install Python 3.13, then:  python3.13 start.py"
    return "This Python is {}.{}, too old: Four Walls needs 3.{} or newer.\nFix: {}".format(
        version[0], version[1], OLDEST[1], fix
    )


def leave(number, frame):
    """Being asked to end is like Ctrl-C: children first, then one line."""
    raise KeyboardInterrupt


def main():
    """Returns the exit code."""
    word = too_old(sys.version_info)
    if word:
        sys.stderr.write(word + "\n")
        return 1
    sys.dont_write_bytecode = True  # the checkout may be read-only, and need not be littered
    sys.path.insert(0, os.path.join(ROOT, "utils"))
    from pathlib import Path

    from fourwalls_start import commands

    signal.signal(signal.SIGTERM, leave)
    return commands.main(sys.argv[1:], Path(ROOT), __doc__)


if __name__ == "__main__":
    sys.exit(main())
