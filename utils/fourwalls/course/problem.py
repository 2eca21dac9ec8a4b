"""A task with a judge: what is wanted, checks of value and of cost, and a verdict for each, at once and with a picture.

A check draws fresh inputs, runs the learner's function on several numbers of ranks in a process of its own (judge.py), and
compares plain results with a one-device oracle made here, and the counts of its Trace with a formula. A hint says where and what
shape, never the answer. A class seed draws a twist of each task, so that an answer copied from another class fails.

    points = all of the task's if every check passes, else none: right values at twice the price are another task

Reference: DESIGN, section 8.
"""

import html
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..viz.show import show
from . import progress
from .judge import Apart, Outcome
from .stand_in import Failure

__all__ = ["Check", "Finding", "Problem", "Report", "Session", "Spec", "Target", "apart_for"]

LEFT = '"text-align:left;vertical-align:top;padding:2px 12px 2px 0"'  # Jupyter: to the right; a feedback page: no room between
SECONDS = 10.0  # what one hanging run may cost
MOST_EVENTS = 4000  # of a run that is drawn


@dataclass(frozen=True)
class Spec:
    """What the learner reads. `wants`: lines of prose; `signature`: the def line; minutes, and 1 to 5 for the other two."""

    title: str
    signature: str
    wants: tuple[str, ...]
    minutes: int
    difficulty: int
    importance: int


@dataclass(frozen=True)
class Target:
    """A cost that a right solution meets: `name`, what it may be at most in words and symbols, and why."""

    name: str
    formula: str
    why: str = ""


@dataclass(frozen=True)
class Finding:
    """What one check found. said: one line for the learner, without any expected value. hint: place and shape, or ""."""

    passed: bool
    said: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Check:
    """One verdict. run(session) -> Finding; it may also raise, which fails the check with the message."""

    name: str
    run: Callable[["Session"], Finding]


@dataclass
class Session:
    """What a check works with: the learner's process, fresh dice, the twist, and the runs made so far."""

    apart: Apart
    dice: random.Random
    twist: dict
    functions: tuple[str, ...]
    driver: str
    cluster: object = None
    outcomes: list[Outcome] = field(default_factory=list)
    remembered: dict = field(default_factory=dict)  # what an earlier check of the same session made
    sketch: Callable | None = None  # sketch(ax) -> axes: what is drawn where the learner's function sends nothing itself

    def run(self, *args, ranks=1, per_rank=None, driver=None, cluster=None, limit=SECONDS, each=None, alter=None) -> Outcome:
        """Run the learner's function. Raises Stopped for a failure, which the check then reports."""
        outcome = self.apart.run(
            driver or self.driver,
            self.functions,
            args,
            ranks=ranks,
            per_rank=per_rank,
            cluster=cluster or self.cluster,
            seed=self.dice.randrange(2**31),
            limit=limit,
            each=each,
            alter=alter,
        )
        if alter is not None:
            return outcome  # the learner's own runs are those in which messages arrive as they were sent
        self.outcomes.append(outcome)
        if outcome.failure is not None:
            raise Stopped(outcome.failure)
        return outcome


def apart_for(problems, **options) -> Apart:
    """A process for the learner's code of these problems of one lab. options: of Apart."""
    problems = list(problems)
    return Apart(problems[0].forbidden, sorted({problem.driver for problem in problems}), **options)


class Stopped(Exception):
    """A run of the learner's function that did not come to its end."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True)
class Problem:
    """One task: `problem.show()`, `problem.check(my_function)`.

    name       "ring.reduce_scatter": the lab and the function
    checks     tried in this order; a hang or a death ends the trial
    targets    what a right solution costs, as the learner reads it
    forbidden  modules that hold the answer
    driver     "module.function" that calls it on the learner's side (course/drivers.py)
    twist      what this class's variation is
    picture    picture(outcome, ax) -> axes, of the learner's own run
    """

    name: str
    spec: Spec
    checks: tuple[Check, ...]
    points: float = 1
    targets: tuple[Target, ...] = ()
    forbidden: tuple[str, ...] = ()
    driver: str = "fourwalls.course.drivers.call"
    cluster: object = None
    twist: dict = field(default_factory=dict)
    picture: Callable | None = None

    def show(self) -> None:
        """What is wanted, and what it may cost."""
        spec = self.spec
        lines = [spec.title, spec.signature, *spec.wants]
        costs = [f"{t.name}: {t.formula}{f' ({t.why})' if t.why else ''}" for t in self.targets]
        last = (
            f"about {spec.minutes} minutes, difficulty {_dots(spec.difficulty)}, importance {_dots(spec.importance)}, "
            f"{self.points:g} points"
        )
        lines += [*(f"Cost, {cost}" for cost in costs), last]
        markup = f'<h4>{html.escape(spec.title)}</h4><pre style="margin-bottom:0.6em">{html.escape(spec.signature)}</pre>'
        markup += "".join(f"<p>{_marked(text)}</p>" for text in _paragraphs(spec.wants))
        if costs:
            markup += '<p style="margin-bottom:0">What it may cost:</p><ul style="margin-top:0.2em">'
            markup += "".join(f"<li>{_marked(cost)}</li>" for cost in costs) + "</ul>"
        markup += f"<p>{html.escape(last)}</p>"
        show("\n".join(lines), f'<div class="fw-problem">{markup}</div>')

    def check(self, function: Callable, *, seed: int | None = None) -> "Report":
        """Try the learner's `function`: a verdict for each check, shown at once and returned. seed: only to repeat a trial.

        Raises ValueError for what is no function, or cannot be sent to a process of its own.
        """
        if not callable(function):
            raise ValueError(f"check takes a function, not {type(function).__name__}: write it without the parentheses")
        with apart_for([self]) as apart:
            apart.load(**{self.asked: function})
            report = self.judge(apart, seed=seed)
        progress.remember_check(self.name, report.passed)
        return report

    @property
    def asked(self) -> str:
        """The name of the function."""
        return self.name.rpartition(".")[2]

    def judge(self, apart: Apart, *, seed: int | None = None, until: str = "") -> "Report":
        """All checks on the functions loaded in `apart`. Never raises for what the learner's code does.

        until: the beginning of a check's name; what stands behind the last of that name is not tried, and so has not passed.
        """
        asked = [k for k, check in enumerate(self.checks) if until and check.name.startswith(until)]
        last = max(asked, default=len(self.checks))
        dice = random.Random(seed) if seed is not None else random.SystemRandom()
        session = Session(apart, dice, self.twist, (self.asked,), self.driver, self.cluster)
        verdicts, stopped, makers = [], None, []
        for k, check in enumerate(self.checks):
            over = k > last or (stopped and stopped.kind in ("hang", "dead"))
            finding = Finding(False, "not tried: see above") if over else None
            if finding is None:
                try:
                    finding = check.run(session)
                except Stopped as stop:
                    again = stopped is not None and stopped.kind == stop.failure.kind
                    stopped = stop.failure
                    finding = Finding(False, _why(stopped, again))
            verdicts.append((check, finding))
            makers += [check.name] * (len(session.outcomes) - len(makers))
        return Report(self, tuple(verdicts), session.outcomes, tuple(makers), session.sketch)


@dataclass(frozen=True)
class Report:
    """The verdicts of one trial."""

    problem: Problem
    verdicts: tuple[tuple[Check, Finding], ...]
    outcomes: list = field(repr=False, default_factory=list)
    makers: tuple[str, ...] = field(repr=False, default=())  # the check that made each outcome
    sketch: Callable | None = field(repr=False, default=None)

    @property
    def points(self) -> float:
        """All of the task's points, or none."""
        return self.problem.points if self.passed else 0

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(finding.passed for _, finding in self.verdicts)

    def lines(self) -> list[str]:
        """One line for each verdict, and the sum."""
        said = []
        for check, finding in self.verdicts:
            mark = "ok  " if finding.passed else "no  "
            said.append(f"{mark}{check.name}{': ' + finding.said if finding.said else ''}")
            if finding.hint and not finding.passed:
                said.append(f"      hint: {finding.hint}")
        return [*said, f"{self.points:g} of {self.problem.points:g} points"]

    def timeline(self, ax=None):
        """The learner's own run, the last that came to its end, as a picture; None where none did, or it has too many events."""
        runs = [k for k, o in enumerate(self.outcomes) if o.failure is None and len(o.trace) and o.trace.ranks > 1]
        if not runs and self.sketch is not None:
            return self.sketch(ax)
        if not runs or self.problem.picture is None or len(self.outcomes[runs[-1]].trace) > MOST_EVENTS:
            return None
        ax = self.problem.picture(self.outcomes[runs[-1]], ax)
        if ax is not None and runs[-1] < len(self.makers):  # of many runs one is drawn: which?
            trace = self.outcomes[runs[-1]].trace
            largest = max((e.bytes for e in trace if e.kind == "send"), default=0)
            sent = f", largest message {largest:,} bytes" if largest else ""
            ax.title.set_text(f"your run on {trace.ranks} ranks, for “{self.makers[runs[-1]]}”{sent}")
            ax.title.set_fontsize(10)
        return ax

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _ipython_display_(self) -> None:
        """The verdicts as a table, with a plain twin, and the learner's own run under it."""
        show(repr(self), self._repr_html_())
        ax = self.timeline()
        if ax is not None:
            from IPython.display import display
            from matplotlib import pyplot

            display(ax.figure)
            pyplot.close(ax.figure)

    def _repr_html_(self) -> str:
        rows = []
        for check, finding in self.verdicts:
            mark, word = ("✓", "passed") if finding.passed else ("✗", "not yet")
            parts = [html.escape(finding.said).replace("\n", "<br>")] if finding.said else []
            parts += [f"<em>{html.escape(finding.hint)}</em>"] if finding.hint and not finding.passed else []
            cells = (f"{mark} {word}".replace(" ", "&nbsp;"), html.escape(check.name), "<br>".join(parts))
            rows.append(f"<tr>{''.join(f'<td style={LEFT}>{cell}</td>' for cell in cells)}</tr>")
        return (
            f'<table class="fw-report">{"".join(rows)}</table><strong>{self.points:g} of {self.problem.points:g} points</strong>'
        )


def _why(failure: Failure, again: bool) -> str:
    """A run that stopped, in words; the untouched cell is told apart from an error."""
    if failure.kind == "NotImplementedError" and not failure.text:
        return "not written yet, as above" if again else f"not written yet\n  at {failure.where}"
    return f"{failure.kind}, as above" if again else str(failure)


def _paragraphs(lines) -> list[str]:
    """Lines of a source file as paragraphs: one ends where a line ends with a full stop."""
    text = "\n".join(lines)
    return [part.replace("\n", " ") for part in re.split(r"(?<=\.)\n", text)]


def _marked(text: str) -> str:
    """HTML of a line in which `this` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _dots(n: int) -> str:
    return "●" * n + "○" * (5 - n)
