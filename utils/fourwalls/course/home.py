"""Where the learner's own things live: `my/`, or a folder of this process alone where `my/` must not or cannot be written.

Somebody who works in `my/` gets kept functions and progress in `my/`. Who runs the notebooks where they are published (a
test, a build, a reader) must leave no trace in the repository, so everything goes to a temporary folder that ends with the
process.

    home = $FOURWALLS_MY, else my/ when working inside it, else temporary

Reference: none; the rule is that running a notebook changes nothing that is under version control.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["Home", "find_home", "find_root", "notebook_name", "reset"]


class Home:
    """A folder and whether it lasts. `note`: one sentence for the reader where it does not, else ""."""

    def __init__(self, path: Path, lasting: bool, note: str = ""):
        self.path, self.lasting, self.note = path, lasting, note

    def __repr__(self) -> str:
        return f"Home({'my/' if self.lasting else 'temporary'})"


def find_root(start: str | os.PathLike | None = None) -> Path | None:
    """The nearest folder at or above `start` (default: the working folder) that holds start.py, or None."""
    here = Path(os.getcwd() if start is None else start).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / "start.py").is_file()), None)


def find_home(start: str | os.PathLike | None = None) -> Home:
    """The learner's folder for a process that works in `start` (default: the working folder)."""
    here = Path(os.getcwd() if start is None else start).resolve()
    root = find_root(here)
    named = os.environ.get("FOURWALLS_MY", "")
    if named:
        wanted = Path(named).expanduser()
    elif root is not None and (root / "my" in (here, *here.parents)):
        wanted = root / "my"
    else:
        return Home(_temporary(os.getpid()), False, "Not running inside my/: this lasts until the kernel stops.")
    if _writable(wanted):
        return Home(wanted, True)
    return Home(_temporary(os.getpid()), False, f"{wanted.name}/ cannot be written: this lasts until the kernel stops.")


def notebook_name() -> str:
    """The name of the notebook that this kernel runs, as the front end gave it ("" where it did not)."""
    name = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    return name if name.endswith(".ipynb") else ""


def reset(name: str) -> None:
    """Give a fresh copy of a notebook in `my/`: `reset("02")`. The old copy stays beside it under another name; says what it did.

    Raises ValueError for a name that fits no notebook or several, or where there is no folder with start.py above this one.
    """
    from . import place

    root = find_root()
    if root is None:
        raise ValueError("reset works inside the project: no folder at or above this one holds start.py")
    copy, kept = place.reset(root, name)
    print(
        f"Fresh copy: {copy.parent.name}/{copy.name}. "
        + (f"Your old one is kept as {kept.name}. " if kept else "")
        + "Close its tab and open it again."
    )


def _writable(folder: Path) -> bool:
    """Whether a file can be made there (the folder is made if its parent exists). Tried, since permissions alone do not tell."""
    try:
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".trial_")
        os.close(handle)
        os.unlink(name)
    except OSError:
        return False
    return True


@cache
def _temporary(pid: int) -> Path:
    """One folder for each process, removed at its end. A forked child has another pid, so it leaves its parent's alone."""
    folder = Path(tempfile.mkdtemp(prefix="fourwalls_"))
    atexit.register(lambda: os.getpid() == pid and shutil.rmtree(folder, ignore_errors=True))
    return folder
