"""What a teacher runs, behind start.py: `labs` makes student copies, `grade` grades them, `mutants` proves that this is sound.

    python3 start.py labs [--twist SEED] [NAME ...]      python3 start.py mutants [NAME ...]
    python3 start.py grade DIR --lab NAME [--twist SEED] [--out COURSE] [--workers N] [--again]

Reference: labs/README.md.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from .lab import LABS
from .mutants import print_table, source_of, table
from .release import Unmarked, find_leaks, secret_lines, student_copy

__all__ = ["main", "release"]

CHECKS = Path(__file__).resolve().parent


def main(arguments: list[str], root: Path) -> int:
    """Carry out one command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    labs = commands.add_parser("labs", help="student copies into labs/release/")
    labs.add_argument("--twist", type=int, help="the class's seed: each class gets a variation of the tasks")
    mutants = commands.add_parser("mutants", help="the table mutants x checks")
    graded = commands.add_parser("grade", help="gradebook, feedback and tables from what was handed in")
    graded.add_argument("folder", type=Path, metavar="DIR", help="what was handed in; labs/README.md tells how it may look")
    graded.add_argument("--lab", required=True, choices=list(LABS))
    graded.add_argument("--twist", type=int, help="the class's seed, as given to `labs`")
    graded.add_argument("--out", type=Path, metavar="COURSE", help="nbgrader's course directory (default: DIR/graded)")
    graded.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", help="how many at a time (cores, at most 2)")
    graded.add_argument("--again", action="store_true", help="also what was graded before")
    graded.add_argument("--here", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)  # where the teacher stands
    for command in (labs, mutants):
        command.add_argument("names", nargs="*", help=f"some of {', '.join(LABS)}; all if none is given")
    options = parser.parse_args(arguments)
    if options.command == "grade":
        return _grade(options, root)
    unknown = [name for name in options.names if name not in LABS]
    if unknown:
        parser.error(f"there is no lab {', '.join(unknown)}; there are {', '.join(LABS)}")
    names = options.names or list(LABS)
    if options.command == "mutants":
        return print_table(table(root, names, workers=min(2, os.cpu_count() or 1)))
    try:
        for name in names:
            print(f"{release(root, name, twist=options.twist)}: no answer in it")
    except Unmarked as error:
        print(f"No copy was made of {name}: {error}", file=sys.stderr)
        return 1
    return 0


def _grade(options, root) -> int:
    """Exit code: 0 everything was dealt with, 1 not, 130 interrupted."""
    # jsonschema would load a grammar for addresses in every script, which no notebook has, for seconds.
    sys.modules.setdefault("rfc3987_syntax", None)
    from .grading import Grading, Stopped  # nbgrader is there for this command alone

    out = options.here / options.out if options.out else None
    folder = options.here / options.folder
    try:
        Grading(root, folder, options.lab, options.twist, out, options.workers, options.again).run()
    except Stopped as stopped:
        print(f"Not everything is graded: {stopped}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. What was graded is kept; the same command goes on from there.", file=sys.stderr)
        return 130
    return 0


def release(root: Path, name: str, *, twist: int | None = None) -> Path:
    """Write labs/release/NAME/NAME.ipynb; its path below `root`. Raises Unmarked where an answer would be in it."""
    source = source_of(root, name)
    copied = student_copy(source, twist=twist)
    leaks = find_leaks(copied, secret_lines(source, *sorted(CHECKS.glob(f"{LABS[name]}*.py"))))
    if leaks:
        raise Unmarked(f"found in the copy: {'; '.join(leaks)}")
    folder = root / "labs" / "release" / name
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".ipynb")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(copied, file, indent=1, ensure_ascii=False)
    os.chmod(temporary, 0o644)
    os.replace(temporary, folder / f"{name}.ipynb")
    return (folder / f"{name}.ipynb").relative_to(root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path.cwd()))
