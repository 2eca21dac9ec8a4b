"""Every lab: the reference passes, the unsolved copy scores nothing, each mutant fails at the check it is aimed at."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from fourwalls.course.lab import LABS
from fourwalls.course.mutants import AIMED, Row, mutants_of, print_table, rows_of, started

ROOT = Path(__file__).resolve().parents[2]
CASES = [(lab, path) for lab in LABS for path in (None, "unsolved", *mutants_of(ROOT, lab))]


@pytest.fixture(scope="module")
def bases():
    """A process for each lab, with nothing loaded, to be copied."""
    with ExitStack() as stack:
        yield cache(lambda lab: stack.enter_context(started(lab)))


@pytest.mark.parametrize(("lab", "path"), CASES, ids=[f"{lab}-{getattr(p, 'stem', p or 'reference')}" for lab, p in CASES])
def test_as_it_should_be(bases, lab, path):
    rows = rows_of(ROOT, lab, path, bases(lab), whole=False)  # `start.py mutants` tries what stands behind the aim as well
    assert rows and all(row.caught for row in rows), [row for row in rows if not row.caught]
    assert all((row.points > 0) == (path is None) for row in rows)


@pytest.mark.parametrize("lab", LABS)
def test_there_are_mutants_enough_and_each_says_where_it_is_aimed(lab):
    found = mutants_of(ROOT, lab)
    assert len(found) >= 8
    assert all(AIMED.match(path.read_text(encoding="utf-8")) for path in found)


def test_a_mutant_that_passes_makes_the_table_fail(capsys):
    right = Row("ring", "reference", "shift", "", True, {"values": "ok"}, 4)
    escaped = Row("ring", "sly", "shift", "values", False, {"values": "ok"}, 4)
    assert print_table([right]) == 0 and print_table([right, escaped]) == 1 and print_table([]) == 1
    assert "NO  ring/sly" in capsys.readouterr().out


def test_a_solution_that_is_right_is_not_taken_for_a_mutant(tmp_path, bases):
    path = tmp_path / "right.py"
    path.write_text('"""aimed at: shift: values. Nothing is wrong with it."""\n')
    (row,) = rows_of(ROOT, "ring", path, bases("ring"))
    assert not row.caught and row.points == 4
    (row,) = rows_of(ROOT, "ring", path, bases("ring"), whole=False)
    assert not row.caught and [said == "ok" for said in row.said.values()] == [True, False, False, False]


def test_a_mutant_whose_aim_is_no_check_is_not_caught(tmp_path, bases):
    path = tmp_path / "aimless.py"
    path.write_text('"""aimed at: shift: beauty. No such check."""\ndef shift(comm, x):\n    return x\n')
    (row,) = rows_of(ROOT, "ring", path, bases("ring"))
    assert not row.caught
