"""The commands of start.py, one function each.

Each ends in an exit code: what a command could not do is a `Stop`, printed as one sentence and the one thing that mends it.
JupyterLab takes this process's place, so that signals reach it and nothing stays behind.

    exit code: 0 done, 1 not done, 2 not understood, 130 interrupted

Reference: JupyterLab documentation, "Starting JupyterLab"; Python documentation, `os.execve`.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from . import needs, parts
from .environment import child_environment, venv_python
from .install import ensure, read_stamp
from .progress import running

__all__ = ["main", "parse"]

# What a command needs besides the library's own packages; all others: ["lab"].
GROUPS = {"test": ["lab", "test", "dev", "grade"], "grade": ["lab", "grade"]}
COMMANDS = ("lab", "setup", "check", "test", "reset", "labs", "mutants", "grade")
TEACHING = ("labs", "mutants", "grade")  # carried out by fourwalls.course, which needs what is installed


def main(argv: list[str], root: Path, description: str = "") -> int:
    """Carry out one command line. Returns the exit code."""
    try:
        needs.check_python()
        options = parse(argv, description)
        if options.command == "reset":
            return _reset(root, options.extra)
        ensure(root, GROUPS.get(options.command, ["lab"]), torch=options.torch, yes=options.yes)
        if options.command == "test":
            return parts.run_parts(root, [word for word in (options.only or "").split(",") if word], options.extra)
        if options.command in TEACHING:
            return _teach(root, options)
        return {"lab": _lab, "setup": _setup, "check": _check}[options.command](root, options)
    except needs.Stop as stop:
        sys.stdout.flush()
        print(f"\n{stop}\nFix: {stop.fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("\nStopped. Run the same command again whenever you like.", file=sys.stderr)
        return 130


def parse(argv: list[str], description: str = "") -> argparse.Namespace:
    """The options; `.extra` has what belongs to pytest (test), to JupyterLab (behind --), to a teacher's command, or to reset."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, behind = argv[:at], argv[at + 1 :]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="start.py", description=description, formatter_class=form, allow_abbrev=False)
    parser.add_argument("command", nargs="?", default="lab", choices=COMMANDS, metavar="COMMAND", help="lab if none is given")
    torch = "which build of torch (default: CUDA where an NVIDIA driver answers, else CPU)"
    parser.add_argument("--torch", choices=["cpu", "cuda", "existing"], help=torch)
    parser.add_argument("--yes", action="store_true", help="do not ask before installing")
    parser.add_argument("--no-browser", action="store_true", help="start JupyterLab without opening a browser")
    parser.add_argument("--port", type=int, help="JupyterLab's port (default: 8888, or the next free one)")
    parser.add_argument("--only", metavar="PARTS", help=f"with test: some of {','.join(parts.PARTS)}, commas between")
    options, extra = parser.parse_known_args(own)
    if extra and options.command not in ("test", "reset", *TEACHING):
        hint = "; what JupyterLab shall get stands behind --" if options.command == "lab" else ""
        parser.error(f"{extra[0]} is not known here{hint}")
    options.extra = extra + behind
    return options


def _lab(root: Path, options: argparse.Namespace) -> int:
    done = _prepare(root)
    env = _environment(root)
    without = str(root / "utils" / "fourwalls_start" / "jupyter")  # what only teachers need is switched off there
    env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [without, env.get("JUPYTER_CONFIG_PATH", "")]))
    command = [str(venv_python(root)), "-m", "jupyterlab", f"--ServerApp.root_dir={root / 'my'}", "--ServerApp.answer_yes=True"]
    command += ["--log-level=WARN", "--LabApp.extension_manager=readonly"]  # the address and troubles; no look-ups in an index
    if "00_four_walls.ipynb" in done.new:
        command.append("--LabApp.default_url=/lab/tree/00_four_walls.ipynb")
    command += ["--no-browser"] if options.no_browser else []
    command += ["--port", str(options.port)] if options.port is not None else []
    command += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    command += options.extra
    print("JupyterLab opens in my/. Ctrl-C here ends it.\n", flush=True)
    os.chdir(root / "my")
    if os.name == "nt":
        print("On Windows itself real ranks do not run; use WSL for them. The simulator runs every program.", flush=True)
        return subprocess.call(command, env=env)
    return os.execve(command[0], command, env)


def _setup(root: Path, _options: argparse.Namespace) -> int:
    _prepare(root)
    print("Ready. Now:  python3 start.py")
    return 0


def _check(root: Path, _options: argparse.Namespace) -> int:
    env = _environment(root)
    program = "import sys; sys.path.insert(0, sys.argv[1]); from fourwalls_start.check import report; sys.exit(report())"
    return subprocess.call([str(venv_python(root)), "-c", program, str(root / "utils")], env=env)


def _reset(root: Path, names: list[str]) -> int:
    if len(names) != 1:
        raise needs.Stop("reset takes one notebook.", "for example:  python3 start.py reset 03")
    try:
        copy, kept = _place(root).reset(root, names[0])
    except (ValueError, OSError) as error:
        raise needs.Stop(f"{error}.", "python3 start.py reset NAME") from None
    below = copy.parent.relative_to(root).as_posix()
    print(f"{below}/{copy.name} is fresh.{f' Yours is kept as {below}/{kept.name}.' if kept else ''}")
    return 0


def _teach(root: Path, options: argparse.Namespace) -> int:
    """A teacher's command. When it is interrupted it gets some seconds, in which grading writes its tables."""
    here = ["--here", os.getcwd()] if options.command == "grade" else []
    command = [str(venv_python(root)), "-m", "fourwalls.course", options.command, *here, *options.extra]
    with running(command, env=_environment(root), cwd=root) as child:
        return child.wait()


def _prepare(root: Path):
    """The learner's copies. Prints one line if there is news, and one for each copy that a newer notebook has left behind."""
    try:
        done = _place(root).prepare(root)
    except OSError as error:
        raise needs.Stop(f"my/ cannot be written: {error}.", "copy this folder to one of your own, run start.py there") from None
    news = [f"{len(names)} {word}" for names, word in ((done.new, "new"), (done.updated, "brought up to date")) if names]
    if news:
        print(f"my/: {', '.join(news)}" + (f", {len(done.kept)} with your work kept" if done.kept else ""))
    for name in done.behind:
        word = Path(name).stem if "/" in name else name[:2]
        print(f"my/{name}: yours is kept; there is a newer one (python3 start.py reset {word} gives it, and keeps yours too)")
    for name, reason in done.broken.items():
        print(f"{'' if '/' in name else 'notebooks/'}{name}: left out, {reason}")
    return done


def _place(root: Path):
    """The library's `course/place.py` and what stands beside it, alone: that needs nothing installed, the library needs torch."""
    course = root / "utils" / "fourwalls" / "course"
    spec = importlib.util.spec_from_file_location(
        "fourwalls_place", course / "place.py", submodule_search_locations=[str(course)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _environment(root: Path) -> dict[str, str]:
    env, word = child_environment(root, (read_stamp(root) or {}).get("torch"))
    if word:
        print(word, flush=True)
    return env
