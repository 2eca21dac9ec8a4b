"""A lab in a notebook: `lab = fw.lab("ring")`, then `lab.show("shift")` and `lab.check(shift)`.

The tasks of one lab share a process for the learner's code, started in the background while the first lines are read, so that a
check answers in seconds. Under the grader something of the same shape takes its place, and the judge is outside (ranks/apart.py).

    lab.check(f) -> Report        points of the lab = sum over its tasks

Reference: DESIGN, section 8.
"""

import atexit
import importlib
import threading
from contextlib import suppress

from . import carry, progress
from .judge import Apart
from .problem import Problem, Report, apart_for
from .stand_in import Failed

__all__ = ["LABS", "Lab", "lab"]

LABS = {  # name -> module of its checks
    "ring": "lab_ring",
    "data": "lab_data",
    "zero": "lab_zero",
    "recompute": "lab_recompute",
    "tensor": "lab_tensor",
    "schedules": "lab_schedules",
    "precision": "lab_precision",
    "quantize": "lab_quantize",
}


class Lab:
    """The tasks of one lab, by the name of the function asked for."""

    def __init__(self, name: str, twist: int | None, problems: dict[str, Problem]):
        self.name, self.twist, self.problems = name, twist, problems
        self._apart: Apart | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Lab({self.name!r}: {', '.join(self.problems)}; {sum(p.points for p in self.problems.values()):g} points)"

    @property
    def reference(self) -> dict:
        """What this class's variation is, for the reference solution; under the grader a student's code finds None here."""
        return next(iter(self.problems.values())).twist

    def show(self, task: str) -> None:
        """What is wanted of `task`, and what it may cost."""
        self._problem(task).show()

    def check(self, function, task: str | None = None) -> Report:
        """Try the learner's function; task: its name, where the function is called otherwise."""
        name = task or getattr(function, "__name__", "")
        problem = self._problem(name)
        if not callable(function):
            raise ValueError(f"check takes a function, not {type(function).__name__}: write it without the parentheses")
        with self._lock:
            apart = self._started()
            apart.load(**{problem.asked: function})
            carry.bring(apart, self.name)
            report = problem.judge(apart)
            if not apart.alive:
                apart.close()
                self._apart = None
        progress.remember_check(problem.name, report.passed)
        return report

    def warm(self) -> None:
        """Start the learner's process in the background."""
        threading.Thread(target=self._warm, daemon=True).start()

    def close(self) -> None:
        """End the learner's process."""
        with self._lock:
            if self._apart is not None:
                self._apart.close()
                self._apart = None

    def _warm(self):
        with self._lock:
            apart = self._started()
            with suppress(Failed, OSError):
                apart.run("fourwalls.course.drivers.rehearse", [], ranks=2)

    def _started(self):
        if self._apart is None:
            self._apart = apart_for(self.problems.values())
        return self._apart

    def _problem(self, name):
        if name not in self.problems:
            raise ValueError(f"{name!r} is no task of the lab {self.name}; its tasks are {', '.join(self.problems)}")
        return self.problems[name]


def lab(name: str, *, twist: int | None = None) -> Lab:
    """The lab `name`. twist: the class's seed, as the student copy has it; None: the plain tasks.

    Raises ValueError for a lab that does not exist.
    """
    if name not in LABS:
        raise ValueError(f"there is no lab {name!r}; there are {', '.join(LABS)}")
    module = importlib.import_module(f".{LABS[name]}", __package__)
    made = Lab(name, twist, module.problems(twist))
    made.warm()
    atexit.register(made.close)
    return made
