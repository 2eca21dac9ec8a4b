"""What a teacher runs, behind start.py: `labs` makes student copies, `mutants` proves that the labs cannot be fooled.

    python3 start.py labs [--twist SEED] [NAME ...]      python3 start.py mutants [NAME ...]

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
    for command in (labs, mutants):
        command.add_argument("names", nargs="*", help=f"some of {', '.join(LABS)}; all if none is given")
    options = parser.parse_args(arguments)
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


def release(root: Path, name: str, *, twist: int | None = None) -> Path:
    """Write labs/release/NAME/NAME.ipynb; its path below `root`. Raises Unmarked where an answer would be in it."""
    source = source_of(root, name)
    copied = student_copy(source, twist=twist)
    leaks = find_leaks(copied, secret_lines(source, CHECKS / f"{LABS[name]}.py"))
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
