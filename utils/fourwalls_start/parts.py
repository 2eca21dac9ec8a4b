"""The tests in five parts, each timed; one that fails does not hide the others.

    lint        ruff, in the notebooks too
    imports     which package may import which
    unit        everything below tests/ that needs no browser
    notebooks   every notebook run from top to bottom and compared with what is committed (nbval, strict)
    browser     every notebook in JupyterLab in a headless Chromium

The last three run in two processes where there are two cores; those of the browser have a JupyterLab and a Chromium each.

    exit code = 0  <=>  no part failed        (a part that cannot run is not counted as passed, and says so)
    threads of torch in each of the two processes  =  cores / 2

Two processes that each think both cores their own wait for each other's threads by spinning: the one-device sides of the tests,
small tensors all, took up to seven times the processor time. Ranks set their own number of threads whatever is said here. What
notebooks print must not hang on it: their committed output, made with all cores, is compared with what half of them print.

Reference: pytest documentation, "Exit codes"; nbval documentation; OpenMP API 5.2, OMP_NUM_THREADS.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .environment import child_environment, venv_python
from .install import read_stamp
from .machine import allowed_cores, find_chromium
from .needs import Stop
from .progress import running

__all__ = ["PARTS", "Result", "command_of", "count", "run_parts", "threads_of"]

PARTS = ("lint", "imports", "unit", "notebooks", "browser")
SPREAD = ("unit", "notebooks", "browser")  # two processes that share the cores


@dataclass
class Result:
    """How one part went. state: "passed", "failed" or "not run"."""

    part: str
    state: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def run_parts(root: Path, only: list[str], arguments: list[str]) -> int:
    """Run the parts named in `only` (none: all; just "unit" if there are arguments for pytest). Returns the exit code."""
    wrong = [word for word in only if word not in PARTS]
    if wrong:
        raise Stop(f"There is no part {', '.join(wrong)}.", f"choose from {', '.join(PARTS)}")
    env, word = child_environment(root, (read_stamp(root) or {}).get("torch"))
    if word:
        print(word)
    cores, _ = allowed_cores()
    results = [_run(part, root, cores, arguments, env) for part in only or (["unit"] if arguments else PARTS)]
    print(f"\n== what each part took {'=' * 56}")
    for row in results:
        counts = f"{row.passed:>5} passed {row.failed:>4} failed {row.skipped:>4} skipped"
        print(f"{row.part:<10} {row.state:<8} {counts} {row.seconds:>8.1f} s")
    print(f"{'together':<10} {sum(row.seconds for row in results):>53.1f} s")
    passed, failed, skipped = (sum(getattr(row, name) for row in results) for name in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if any(row.state == "failed" for row in results) else 0


def command_of(part: str, root: Path, cores: int, arguments: list[str]) -> list[str]:
    """The command line of one part. arguments: for pytest; paths among them take the place of the part's own."""
    python = str(venv_python(root))
    if part == "lint":
        return [python, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider"]
    spread = ["-n", "2", "--dist", "loadfile"] if cores > 1 else []
    one_by_one = ["-n", "2", "--dist", "load", "--maxschedchunk", "1"] if cores > 1 else []  # few and long: the longest first
    given = any(not word.startswith("-") and (root / word.partition("::")[0]).exists() for word in arguments)
    if part == "imports":
        return [*pytest, "tests/test_imports.py", *arguments]
    if part == "unit":
        own = ["tests", "--ignore=tests/browser", "--ignore=tests/test_imports.py"]
        return [*pytest, *spread, "-m", "not measured", *([] if given else own), *arguments]
    if part == "notebooks":
        nbval = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=240", "-W", "default"]
        return [*pytest, *spread, *nbval, *([] if given else ["notebooks"]), *arguments]
    return [*pytest, *one_by_one, *([] if given else ["tests/browser"]), *arguments]


def threads_of(part: str, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a part says of threads: each of its two processes gets half of the cores, unless told otherwise."""
    if part not in SPREAD or cores < 2 or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(cores // 2)}


def count(report: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) from pytest's junit file; zeros if there is none."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return 0, 0, 0
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return max(0, tests - failures - errors - skipped), failures + errors, skipped


def _run(part: str, root: Path, cores: int, arguments: list[str], env: dict[str, str]) -> Result:
    print(f"\n== {part} {'=' * (76 - len(part))}", flush=True)
    if part == "browser" and find_chromium() is None:
        print(f"not run: there is no Chromium. Fix:  {_chromium_fix()}", flush=True)
        needed = bool(os.environ.get("CI"))
        return Result(part, "failed" if needed else "not run", failed=int(needed))
    command, start = command_of(part, root, cores, arguments), time.monotonic()
    env = env | threads_of(part, cores, env)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        if part != "lint":
            command += ["--junitxml", str(report), *(["--color=yes"] if sys.stdout.isatty() else [])]
        with running(command, env=env, cwd=root, stdin=subprocess.DEVNULL) as child:
            code = child.wait()
        passed, failed, skipped = (int(code == 0), int(code != 0), 0) if part == "lint" else count(report)
    if code and not failed:
        failed = 1  # it broke before a test could fail, and that must not read "0 failed"
    return Result(part, "failed" if code else "passed", passed, failed, skipped, time.monotonic() - start)


def _chromium_fix() -> str:
    if platform.system() == "Linux" and "ID=debian" in Path("/etc/os-release").read_text(errors="replace").split():
        return "sudo apt install chromium"
    return ".venv/bin/python -m playwright install chromium"
