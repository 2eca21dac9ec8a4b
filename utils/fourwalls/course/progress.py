"""What the learner has done so far, in one local file: checks passed, guesses made, where to resume. Nothing leaves the machine.

The file is read, changed and replaced as a whole while a lock is held, so two kernels do not lose each other's entries and a
power cut leaves the old file or the new one. A damaged file is put aside, never silently thrown away.

    right of asked = |{guesses judged right}| / |{guesses judged}|

Reference: POSIX rename(2), which replaces a file in one step.
"""

import contextlib
import json
import os
import tempfile

from .home import find_home, notebook_name
from .place import LOCK, PROGRESS, alone

__all__ = ["FILE", "Progress", "load", "progress", "remember_check", "remember_guess", "remember_place", "update"]

FILE = PROGRESS
EMPTY = {"version": 1, "checks": {}, "guesses": {}, "place": ""}


class Progress:
    """A reading of the file: `checks` {name: passed}, `guesses` {question: {"guess", "right"}}, `place` (a notebook's name)."""

    def __init__(self, data: dict, note: str = ""):
        self.checks, self.guesses, self.place, self.note = data["checks"], data["guesses"], data["place"], note

    @property
    def judged(self) -> int:
        """Guesses that met their answer."""
        return sum(g.get("right") is not None for g in self.guesses.values())

    @property
    def right(self) -> int:
        """Guesses that turned out right."""
        return sum(g.get("right") is True for g in self.guesses.values())

    @property
    def passed(self) -> int:
        """Checks passed."""
        return sum(v is True for v in self.checks.values())

    def __str__(self) -> str:
        lines = []
        if self.judged:
            lines.append(f"Predictions: you were right {_times(self.right)} of {self.judged}.")
        else:
            lines.append("Predictions: none yet.")
        lines.append(f"Checks: {self.passed} of {len(self.checks)} passed." if self.checks else "Checks: none yet.")
        missed = sorted(name for name, passed in self.checks.items() if passed is not True)
        if missed:
            lines.append(f"Still open: {', '.join(missed)}.")
        lines.append(f"Resume with: {self.place}." if self.place else "Resume with: the first notebook.")
        return "\n".join(lines + ([self.note] if self.note else []))

    def __repr__(self) -> str:
        return str(self)


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def load() -> dict:
    """The file's contents; those of an empty one where there is none. A damaged file is renamed and reported in one line."""
    path = find_home().path / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return json.loads(json.dumps(EMPTY))
    except (ValueError, OSError):
        data = None
    good = (
        isinstance(data, dict)
        and isinstance(data.get("checks"), dict)
        and isinstance(data.get("guesses"), dict)
        and isinstance(data.get("place"), str)
    )
    good = good and all(isinstance(g, dict) for g in data["guesses"].values())
    if good:
        return data
    number = 1
    while (aside := path.with_name(f"progress.damaged_{number}.json")).exists():
        number += 1
    with contextlib.suppress(OSError):
        os.replace(path, aside)
        print(f"{FILE} was damaged: it is kept as {aside.name}, and progress starts anew.")
    return json.loads(json.dumps(EMPTY))


def update(change) -> None:
    """Read the file, let `change(data)` alter it, and replace it, under a lock. A full or read-only disk is no error."""
    folder = find_home().path
    with contextlib.suppress(OSError), alone(folder / LOCK):
        data = load()
        change(data)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".progress_")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1, sort_keys=True)
            os.replace(temporary, folder / FILE)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def remember_check(name: str, passed: bool) -> None:
    """A check's result. Once passed stays passed."""
    update(lambda data: data["checks"].__setitem__(name, bool(passed) or data["checks"].get(name) is True))
    remember_place()


def remember_guess(question: str, guess, right: bool | None = None) -> None:
    """A guess, and later whether it was right. The first judgement counts: guessing again changes nothing."""

    def change(data):
        before = data["guesses"].get(question, {})
        if before.get("right") is None:
            data["guesses"][question] = {"guess": guess, "right": right}

    update(change)
    remember_place()


def remember_place(notebook: str = "") -> None:
    """The notebook worked in last (default: this kernel's, where the front end named it)."""
    name = notebook or notebook_name()
    if name:
        update(lambda data: data.__setitem__("place", name))


def progress() -> Progress:
    """What you have done so far, as a few lines: predictions, checks, where to resume."""
    home = find_home()
    return Progress(load(), home.note)
