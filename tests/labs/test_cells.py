"""Loading a notebook's cells, and starting again: what a cell or a task may cost the others. Without any process."""

import pytest

from fourwalls.course import grade
from fourwalls.course.grade import _judged, _Learner, code_cells
from fourwalls.course.problem import Check, Finding, Problem, Spec
from fourwalls.course.stand_in import Failed, Failure


class FakeApart:
    """A learner's process in which the cells named in `bad` fail in the way given."""

    def __init__(self, bad):
        self.bad, self.alive, self.loaded = bad, True, []

    def load_cells(self, cells, *, limit, reference):
        ((name, _),) = cells
        if name in self.bad:
            raise self.bad[name]
        self.loaded.append(name)
        return ["ZeroDivisionError: division by zero" if name == "divides" else None]

    def kill(self):
        self.alive = False

    def close(self):
        self.alive = False


class FakeBox:
    """A box with so many processes, and this to say."""

    def __init__(self, sizes=(1,), words=()):
        self.sizes, self.words = list(sizes), list(words)

    def size(self):
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def news(self):
        return self.words.pop(0) if self.words else ""

    def kill(self):
        pass


def learner(cells, bad=None, box=None):
    made = []

    def start():
        made.append(FakeApart(bad or {}))
        return made[-1]

    found = _Learner(start, [(name, "") for name in cells], None, box)
    found.made = made
    return found


HANG, DEAD = Failed(Failure("hang", "the notebook's cells took more than 30 s")), Failed(Failure("dead", "ended"))


def problem(*found):
    checks = tuple(Check(f"check {k}", lambda s, finding=finding: finding) for k, finding in enumerate(found))
    return Problem("ring.f", Spec("f", "def f():", (), 1, 1, 1), checks, 4)


def test_a_cell_that_never_ends_is_left_out_and_the_others_run_afresh():
    one = learner(["a", "stuck", "b"], {"stuck": HANG})
    one.begin()
    assert [made.loaded for made in one.made] == [["a"], ["a", "b"]] and [made.alive for made in one.made] == [False, True]
    assert one.errors == {"stuck": "was still running after 30 s and was left out"}


def test_three_that_never_end_are_a_dead_kernel():
    with pytest.raises(Failed, match="dead kernel: 3 cells never ended, the last of them c"):
        learner(["a", "b", "c"], {"a": HANG, "b": HANG, "c": HANG}).begin()


@pytest.mark.parametrize(
    ("error", "words", "says"),
    [
        (DEAD, [], "dead kernel: the process ended in cell b"),
        (DEAD, ["it used more than 9 MiB of memory and was ended"], "it used more than 9 MiB of memory and was ended in cell b"),
        (ValueError("rubbish"), [], r"the process talked nonsense \(ValueError\) in cell b"),
    ],
)
def test_a_cell_that_ends_the_process_is_named(error, words, says):
    with pytest.raises(Failed, match=says):
        learner(["a", "b", "c"], {"b": error}, FakeBox(words=words)).begin()


def test_cells_that_leave_a_crowd_behind_are_a_dead_kernel():
    with pytest.raises(Failed, match="its cells left 30 processes running"):
        learner(["a"], box=FakeBox([30])).begin()
    learner(["a"], box=FakeBox([3])).begin()


def test_a_failing_cell_stops_nobody():
    one = learner(["divides", "b"])
    one.begin()
    assert one.made[0].loaded == ["divides", "b"] and one.errors == {"divides": "ZeroDivisionError: division by zero"}


def test_the_next_task_gets_a_sound_process_and_only_when_it_needs_one(monkeypatch):
    monkeypatch.setattr(grade.time, "sleep", lambda _: None)
    one = learner(["a"], box=FakeBox([2]))
    one.begin()
    one.renew()
    assert len(one.made) == 1
    one.made[0].alive = False
    one.renew()
    assert len(one.made) == 2 and one.apart.alive
    ticks = iter(range(100))
    monkeypatch.setattr(grade.time, "monotonic", lambda: next(ticks))
    one.box = FakeBox([5, 2])
    one.renew()
    assert len(one.made) == 3 and not one.made[1].alive


def test_a_task_is_not_tried_when_the_time_is_over_or_the_cells_do_not_run_again():
    one = learner(["a"], {})
    one.begin()
    report, note = _judged(problem(Finding(True)), one, 0.0, 600.0)
    assert report.points == 0 and "not tried: the 600 s of this notebook were over" in str(report) and note
    one.made[0].alive, one.start = False, lambda: FakeApart({"a": DEAD})
    report, _ = _judged(problem(Finding(True)), one, float("inf"), 600.0)
    assert report.points == 0 and "the cells could not be run again: dead kernel" in str(report)


def test_nonsense_ends_one_task_and_the_judge_goes_on():
    def nonsense(session):
        raise KeyError("verb")

    one = learner(["a"])
    one.begin()
    broken = Problem("ring.f", Spec("f", "def f():", (), 1, 1, 1), (Check("values", nonsense),), 4)
    report, _ = _judged(broken, one, float("inf"), 600.0)
    assert report.points == 0 and "talked nonsense (KeyError)" in str(report)
    report, note = _judged(problem(Finding(True), Finding(True)), one, float("inf"), 600.0)
    assert report.points == 4 and note == "" and len(one.made) == 2


def test_magics_and_test_cells_are_not_run():
    test = {"nbgrader": {"grade": True, "solution": False, "grade_id": "t"}}
    cells = [
        {"cell_type": "code", "id": "a", "metadata": {}, "source": "%%time\n!rm -rf /\nx = 1"},
        {"cell_type": "code", "id": "b", "metadata": test, "source": "y"},
        {"cell_type": "markdown", "id": "c", "metadata": {}, "source": "z"},
    ]
    assert code_cells({"cells": cells}) == [("a", "pass\npass\nx = 1")]
