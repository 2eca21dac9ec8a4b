"""What a learner reads of a task: whole sentences, a kind word for an empty cell, and a picture that says what it shows."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot

import fourwalls as fw
from fourwalls.course import problem as module
from fourwalls.course.arrivals import must_use
from fourwalls.course.lab import LABS
from fourwalls.course.problem import Check, Finding, Problem, Report, Session, Spec, Stopped
from fourwalls.course.stand_in import Failure
from fourwalls.viz.timeline import plot_timeline

EMPTY = Failure("NotImplementedError", "", 0, "In [3] line 3 in shift: raise NotImplementedError()")


class Fake:
    """In the place of the learner's process: every run has the same outcome; values may be a function of the arguments."""

    def __init__(self, *, values=list, failure=None, trace=()):
        self.values, self.failure, self.trace = values, failure, trace

    def run(self, driver, functions, args, **options):
        return SimpleNamespace(failure=self.failure, values=self.values(*args), trace=self.trace)


def task(name="ring.shift", checks=(), **options):
    return Problem(name, Spec("t", "def shift(comm, x):", ("w.",), 1, 1, 1), tuple(checks), **options)


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize("twist", [None, 7])
def test_paragraphs_are_whole_sentences(lab, twist, monkeypatch):
    shown = []
    monkeypatch.setattr(module, "show", lambda text, markup: shown.append(markup))
    for each in importlib.import_module(f"fourwalls.course.{LABS[lab]}").problems(twist).values():
        each.show()
    assert shown
    for markup in shown:
        assert "`" not in markup, "code stands there with its backticks"
        *texts, last = re.findall(r"<p>(.*?)</p>", markup)
        assert texts and all(text.endswith(".") for text in texts), texts
        assert "points" in last


def test_a_cell_that_is_empty_is_told_apart_from_an_error():
    checks = [Check(name, lambda s: s.run()) for name in ("values", "cost")]
    first, second, _ = task(checks=checks).judge(Fake(failure=EMPTY), seed=1).lines()
    assert first == "no  values: not written yet\n  at In [3] line 3 in shift: raise NotImplementedError()"
    assert second == "no  cost: not written yet, as above"
    own = Failure("NotImplementedError", "no tensors of this kind", 0, "In [3] line 9")
    assert "NotImplementedError: no tensors" in task(checks=checks).judge(Fake(failure=own), seed=1).lines()[0]


def test_nothing_passes_for_a_function_that_never_ran():
    session = Session(Fake(failure=EMPTY), SimpleNamespace(randrange=lambda n: 0), {}, ("shift",), "driver")
    with pytest.raises(Stopped):
        session.run()
    with pytest.raises(Stopped):
        must_use(session, lambda rank, value: False, ranks=2)


def test_a_verdict_does_not_break_in_two():
    said = Finding(False, "long\nlines", "a <hint>")
    markup = Report(task(), ((Check("cost", None), said),))._repr_html_()
    assert "✗&nbsp;not&nbsp;yet" in markup and "long<br>lines<br><em>a &lt;hint&gt;</em>" in markup


def test_the_picture_says_which_run_it_is():
    run = fw.simulate(lambda comm, x: comm.exchange(x, 1 - comm.rank, torch.empty_like(x), 1 - comm.rank), torch.ones(6), ranks=2)
    checks = [Check("values", lambda s: Finding(False)), Check("cost", lambda s: Finding(s.run() is not None))]
    drawn = task(checks=checks, picture=lambda outcome, ax: plot_timeline(outcome.trace, ax=ax, title="your run"))
    ax = drawn.judge(Fake(trace=run.trace), seed=1).timeline()
    assert ax.get_title() == "your run on 2 ranks, for “cost”, largest message 24 bytes"
    pyplot.close(ax.figure)


@pytest.mark.parametrize("place", [None, 1])
def test_a_schedule_is_drawn_and_its_first_bad_cell_is_marked(place):
    def gpipe(p, m):
        rows = [[f"{s}{kind}{k}" for kind in "FB" for k in range(m)] for s in range(p)]
        if place is not None:
            rows[1].insert(place, rows[1].pop(m + 1))  # 1B1 before anything can have come back
        return [rows]

    report = importlib.import_module("fourwalls.course.lab_schedules").problems()["gpipe"].judge(Fake(values=gpipe), seed=1)
    assert report.passed == (place is None)
    ax = report.timeline()
    assert ax.get_title() == "your schedule, p=4, m=8" + (": cell 2 of rank 1" if place else "")
    assert [patch.get_gid() for patch in ax.patches].count("fw-cell-marked") == (place is not None)
    pyplot.close(ax.figure)
