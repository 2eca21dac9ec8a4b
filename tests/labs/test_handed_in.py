"""What students do to names, files and cells without any ill will, and with some: nobody is lost, merged, or costs the others."""

import json
import os
import unicodedata

import pytest

from fourwalls.course import grading as grading_module
from fourwalls.course.grade import code_cells
from fourwalls.course.grades_csv import write_tables
from fourwalls.course.grading import Stopped
from fourwalls.course.restore import restore
from fourwalls.course.submissions import MOST_NAME, find, read
from fourwalls.course.verdicts import Verdict

from . import handed_in as given
from .handed_in import LAB, write

pytestmark = pytest.mark.filterwarnings("default")  # nbgrader's own are not ours


def reasons(folder):
    return {one.student: one.reason or one.path.name for one in find(folder, LAB)}


# --- names and files ----------------------------------------------------------------------------------------------------
def test_an_archive_and_a_notebook_with_another_ending_are_somebodys_work(tmp_path):
    (tmp_path / "anna").mkdir()
    for name in ("anna/ring.ipynb.txt", "ben_12_34_ring.zip", "carl_ring.ipynb.json", "roster.csv", "eve/ring.tar.gz"):
        write(tmp_path / name, b"x")
    assert reasons(tmp_path) == {
        "anna": "wrong file name: ring.ipynb.txt does not end in .ipynb",
        "ben_12": "ben_12_34_ring.zip is an archive: unpack it",
        "carl": "wrong file name: carl_ring.ipynb.json does not end in .ipynb",
        "eve": "ring.tar.gz is an archive: unpack it",
    }


def test_two_students_whose_names_become_one_are_not_taken_for_one(tmp_path):
    for name in ("a:b", "a?b", "José", unicodedata.normalize("NFD", "José"), "anna", "Anna"):
        write(tmp_path / name / "ring.ipynb", given.release())
    found = {one.student: one for one in find(tmp_path, LAB)}
    assert found["a_b"].path is None and found["a_b"].reason == "two names become one (a:b, a?b): rename one of them"
    assert found["José"].path and "2 files" in found["José"].notes[0], "one name, spelt in two ways"
    assert found["anna"].path != found["Anna"].path


def test_long_names_stay_apart_and_fit_into_a_file_system(tmp_path):
    for name in ("x" * 200 + "1", "x" * 200 + "2", "\U0001d160" * 60):  # the last is three times as long when composed
        write(tmp_path / name / "ring.ipynb", given.release())
    students = [one.student for one in find(tmp_path, LAB)]
    assert len(set(students)) == 3 and all(len(s.encode()) <= MOST_NAME and s.isprintable() for s in students)


def test_a_name_in_another_encoding_a_leading_dash_and_dots_are_names(tmp_path):
    for name in (b"J\xf6rg", b"-rf", b"x..", b"tab\tand\x1b[31mred"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        with open(os.path.join(folder, b"lab\xf6.ipynb"), "w") as file:
            json.dump(given.release(), file)
    found = find(tmp_path, LAB)
    assert {one.student for one in found} == {"J_rg", "-rf", "x", "tab_and_[31mred"}
    for one in found:
        line = json.dumps(Verdict(one.student, "not graded", one.reason).reason, ensure_ascii=False)
        assert line.encode() and line.isprintable()


def test_a_folder_that_cannot_be_read_costs_its_own_student(tmp_path, monkeypatch):
    for name in ("anna", "ben"):
        write(tmp_path / name / "ring.ipynb", given.release())
    listed = type(tmp_path).iterdir

    def refuses(self):
        if self.name == "ben":
            raise PermissionError(13, "Permission denied")
        return listed(self)

    monkeypatch.setattr(type(tmp_path), "iterdir", refuses)
    assert reasons(tmp_path) == {"anna": "ring.ipynb", "ben": "the folder cannot be read (Permission denied)"}


def test_a_folder_that_is_called_like_a_notebook_does_not_stand_before_one(tmp_path):
    write(tmp_path / "anna" / "ring.ipynb", given.release(), modified=1_000_000)
    (tmp_path / "anna" / "ring (1).ipynb").mkdir()
    (tmp_path / "ben" / "ring.ipynb").mkdir(parents=True)
    assert reasons(tmp_path)["anna"] == "ring.ipynb"
    assert reasons(tmp_path)["ben"] == "ring.ipynb"
    with pytest.raises(ValueError, match="no ordinary file"):
        read(tmp_path / "ben" / "ring.ipynb")


def test_attachments_that_are_none_are_dropped(tmp_path):
    given_ones = ({"a": 3}, 7, {"a": {"b": "c"}})
    cells = [given.own("x", f"c{k}", "markdown") | {"attachments": what} for k, what in enumerate(given_ones)]
    kept = [cell.get("attachments") for cell in read(write(tmp_path / "a.ipynb", {"cells": cells, "metadata": {}}))["cells"]]
    assert kept == [None, None, {"a": {"b": "c"}}]


# --- cells --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("x = (7\n     % 4)", "x = (7\n     % 4)"),
        ("%matplotlib inline\nx = (7\n     % 4)", "pass\nx = (7\n     % 4)"),
        ("files = !ls\n?len\nlen??\nx = 3", "pass\npass\npass\nx = 3"),
        ("def f():\n    %time g()\n    return '(' # )\n%%capture\nx = 3", "def f():\n    pass\n    return '(' # )\npass\nx = 3"),
    ],
)
def test_what_begins_with_a_percent_sign_is_a_magic_only_where_it_is_no_python(source, runs):
    ((_, kept),) = code_cells({"cells": [{"cell_type": "code", "id": "a", "metadata": {}, "source": source}]})
    assert kept == runs
    exec(compile(kept, "cell", "exec"), space := {})
    assert space["x"] == 3


def test_a_cell_that_walks_the_stack_is_pointed_out_and_no_other():
    notebook = given.changed("shift", given.steps("import sys", "seen = sys._getframe(1)"))
    cells = [{"cell_type": c["cell_type"], "source": "".join(c["source"]), "metadata": c["metadata"], "id": c["id"]}
             for c in notebook["cells"]]  # fmt: skip
    assert restore({"cells": cells, "metadata": {}}, given.release())[1] == ["cell ring-shift: look at it, it uses _getframe"]


# --- tables, verdicts, and two graders ------------------------------------------------------------------------------------
def test_no_cell_of_a_table_is_a_formula_and_no_word_acts_on_a_terminal(tmp_path):
    names = ("=1+1", "+cmd", "-2", "@SUM(A1)", "anna")
    verdicts = {name: Verdict(name, "not graded", "a\x1b]0;x\x07b\udcf6", notes=["\x9b2J"]) for name in names}
    assert {v.reason for v in verdicts.values()} == {"a\ufffd]0;x\ufffdb\ufffd"} and verdicts["anna"].notes == ["\ufffd2J"]
    for path in write_tables(tmp_path, LAB, {"ring-check-shift": (4.0, False)}, verdicts, []):
        cells = [cell.strip('"') for line in path.read_text(encoding="utf-8").splitlines() for cell in line.split(",")]
        assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))] == []
        assert "anna" in cells and "'=1+1" in cells


def test_one_grader_at_a_time(tmp_path):
    (tmp_path / "other").mkdir()
    alone = grading_module._alone
    with alone(tmp_path), alone(tmp_path / "other"), pytest.raises(Stopped, match="another grader is at work in"):
        alone(tmp_path).__enter__()
    with alone(tmp_path):
        pass


def test_a_time_that_is_none_is_no_reason_not_to_grade(tmp_path):
    path = write(tmp_path / "anna" / "ring.ipynb", given.release())
    for text, kept in (("2026-11-30 04:00:00 UTC", "2026-11-30 04:00:00 UTC"), ("yesterday, honestly", ""), ("=1+1", "")):
        path.with_name("timestamp.txt").write_text(text)
        assert grading_module._timestamp(path) == kept
