"""The learner's copies: made once, followed while untouched, never overwritten afterwards."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourwalls.course import place


def notebook(*sources, outputs=True):
    cells = [{"cell_type": "markdown", "id": "m", "metadata": {}, "source": ["# title\n"]}]
    for number, source in enumerate(sources, 1):
        cells.append(
            {
                "cell_type": "code",
                "id": f"c{number}",
                "metadata": {"tags": ["nbval-ignore-output"], "execution": {"iopub.execute_input": "2026"}},
                "source": [source],
                "execution_count": number if outputs else None,
                "outputs": [{"output_type": "stream", "name": "stdout", "text": ["the answer\n"]}] if outputs else [],
            }
        )
    metadata = {"kernelspec": {"name": "python3"}, "widgets": {"state": 1}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def root(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_walls.ipynb").write_text(notebook("a = 1"))
    (tmp_path / "notebooks" / "03_ring.ipynb").write_text(notebook("b = 1", "print(b)"))
    return tmp_path


def edit(root, name, old, new):
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_copies_show_no_answer_and_keep_cells_and_tags(root):
    done = place.prepare(root)
    assert done.new == ["00_walls.ipynb", "03_ring.ipynb"]
    assert not (done.updated or done.kept or done.behind or done.broken)
    text = (root / "my" / "03_ring.ipynb").read_text()
    assert "the answer" not in text
    book = json.loads(text)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [None, None]
    assert [cell["outputs"] for cell in code] == [[], []]
    assert code[0]["metadata"] == {"tags": ["nbval-ignore-output"]}
    assert [cell["id"] for cell in book["cells"]] == ["m", "c1", "c2"]
    assert "widgets" not in book["metadata"]


def test_second_time_changes_nothing(root):
    place.prepare(root)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "my").iterdir()}
    done = place.prepare(root)
    assert done == place.Prepared()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "my").iterdir()} == before


def test_untouched_copy_follows_the_notebook(root):
    place.prepare(root)
    edit(root, "notebooks/00_walls.ipynb", "a = 1", "a = 2")
    assert place.prepare(root).updated == ["00_walls.ipynb"]
    assert "a = 2" in (root / "my" / "00_walls.ipynb").read_text()
    edit(root, "notebooks/00_walls.ipynb", "a = 2", "a = 3")  # and again: the record moved on with it
    assert place.prepare(root).updated == ["00_walls.ipynb"]


@pytest.mark.parametrize("work", ["text", "run", "damage"])
def test_edited_copy_is_never_overwritten(root, work):
    place.prepare(root)
    copy = root / "my" / "00_walls.ipynb"
    if work == "text":
        edit(root, "my/00_walls.ipynb", "a = 1", "a = my_own_work")
    elif work == "run":
        book = json.loads(copy.read_text())
        book["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "mine"}]
        copy.write_text(json.dumps(book))
    else:
        copy.write_text("{ half a notebook")
    mine = copy.read_bytes()
    done = place.prepare(root)
    assert done.kept == ["00_walls.ipynb"]
    assert done.behind == []
    edit(root, "notebooks/00_walls.ipynb", "a = 1", "a = 2")
    done = place.prepare(root)
    assert done.kept == done.behind == ["00_walls.ipynb"]
    assert copy.read_bytes() == mine


def test_opening_and_saving_is_not_an_edit(root):
    place.prepare(root)
    copy = root / "my" / "00_walls.ipynb"
    book = json.loads(copy.read_text())
    book["metadata"]["language_info"] = {"version": "3.13"}
    book["cells"][1]["source"] = "".join(book["cells"][1]["source"])  # a string instead of a list of lines: the same cell
    copy.write_text(json.dumps(book))
    edit(root, "notebooks/00_walls.ipynb", "a = 1", "a = 2")
    assert place.prepare(root).updated == ["00_walls.ipynb"]


def test_lost_record_keeps_what_differs(root):
    place.prepare(root)
    edit(root, "my/00_walls.ipynb", "a = 1", "a = mine")
    (root / "my" / place.RECORD).write_text("nonsense")
    assert place.prepare(root).kept == ["00_walls.ipynb"]
    assert "a = mine" in (root / "my" / "00_walls.ipynb").read_text()


def test_broken_notebook_is_named_and_the_others_are_given(root):
    (root / "notebooks" / "01_half.ipynb").write_text('{"cells": ')
    (root / "notebooks" / "02_list.ipynb").write_text("[]")
    done = place.prepare(root)
    assert sorted(done.broken) == ["01_half.ipynb", "02_list.ipynb"]
    assert all("not a notebook" in reason for reason in done.broken.values())
    assert done.new == ["00_walls.ipynb", "03_ring.ipynb"]


@pytest.mark.parametrize("name", ["03", "03_ring", "03_ring.ipynb", "my/03_ring.ipynb"])
def test_reset_gives_a_fresh_copy_and_keeps_the_old_under_a_dated_name(root, name):
    place.prepare(root)
    edit(root, "my/03_ring.ipynb", "b = 1", "b = 7")
    copy, kept = place.reset(root, name)
    assert copy == root / "my" / "03_ring.ipynb"
    assert "b = 1" in copy.read_text()
    assert re.fullmatch(r"03_ring\.kept_\d{4}-\d\d-\d\d_\d{6}\.ipynb", kept.name)
    assert "b = 7" in kept.read_text()
    assert place.prepare(root) == place.Prepared()


def test_two_resets_in_one_second_keep_both(root):
    place.prepare(root)
    kept = []
    for value in (7, 8, 9):
        edit(root, "my/03_ring.ipynb", "b = 1", f"b = {value}")
        kept.append(place.reset(root, "03")[1])
    assert [f"b = {value}" in path.read_text() for path, value in zip(kept, (7, 8, 9), strict=True)] == [True] * 3


def test_reset_of_an_untouched_or_missing_copy_keeps_nothing(root):
    assert place.reset(root, "03") == (root / "my" / "03_ring.ipynb", None)
    assert place.reset(root, "03") == (root / "my" / "03_ring.ipynb", None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("03_rnig", "did you mean 03_ring"),
        ("0", "fits 00_walls, 03_ring"),
        ("", "no notebook named"),
        ("9", "There are: 00_walls"),
    ],
)
def test_reset_of_an_unclear_name(root, name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        place.reset(root, name)


def test_no_stray_files(root):
    place.prepare(root)
    place.reset(root, "03")
    assert sorted(path.name for path in (root / "my").iterdir()) == [place.RECORD, "00_walls.ipynb", "03_ring.ipynb"]


def test_a_fresh_copy_asks_its_questions_anew(root):
    place.prepare(root)
    path = root / "my" / "progress.json"
    guesses = {
        "03-bytes": {"guess": 7, "right": True},
        "03-who": {"guess": 1, "right": None},
        "00-a": {"guess": 2, "right": False},
    }
    data = {"version": 1, "checks": {"03-ring": True}, "guesses": guesses, "place": "03_ring.ipynb"}
    path.write_text(json.dumps(data))
    place.reset(root, "03")
    assert json.loads(path.read_text()) == {**data, "guesses": {"00-a": guesses["00-a"]}}
    before = path.stat().st_mtime_ns
    place.reset(root, "03")
    assert path.stat().st_mtime_ns == before, "nothing to forget, nothing written"


@pytest.mark.parametrize("text", ["", "[1]", '{"guesses": 3}', "{"])
def test_progress_that_cannot_be_read_does_not_stop_a_reset(root, text):
    place.prepare(root)
    path = root / "my" / "progress.json"
    path.write_text(text)
    place.reset(root, "03")
    assert path.read_text() == text, "progress.py puts it aside when it is next read"


@pytest.fixture
def with_lab(root):
    folder = root / "labs" / "source" / "ring"
    folder.mkdir(parents=True)
    solution = "def shift(comm, x):\n    ### BEGIN SOLUTION\n    return the_answer(comm, x)\n    ### END SOLUTION\n"
    book = json.loads(notebook(solution, "lab.check(shift)"))
    ids = ({"grade_id": "shift", "solution": True}, {"grade_id": "check-shift", "grade": True, "points": 4})
    for cell, mark in zip(book["cells"][1:], ids, strict=True):
        cell["metadata"] = {"nbgrader": mark}
    (folder / "ring.ipynb").write_text(json.dumps(book))
    (folder / "notes.ipynb").write_text(notebook("not a lab"))
    return root


def test_a_lab_is_given_without_its_solution(with_lab):
    done = place.prepare(with_lab)
    assert done.new == ["00_walls.ipynb", "03_ring.ipynb", "labs/ring.ipynb"]
    text = (with_lab / "my" / "labs" / "ring.ipynb").read_text()
    assert "the_answer" not in text and "the answer" not in text
    assert "raise NotImplementedError()" in text and "lab.check(shift)" in text
    assert place.prepare(with_lab).new == []


def test_a_lab_that_was_worked_in_is_kept_and_reset_on_request(with_lab):
    place.prepare(with_lab)
    edit(with_lab, "my/labs/ring.ipynb", "raise NotImplementedError()", "return x")
    edit(with_lab, "labs/source/ring/ring.ipynb", "def shift(comm, x)", "def shift(comm, given)")
    done = place.prepare(with_lab)
    assert done.kept == done.behind == ["labs/ring.ipynb"] and "return x" in (with_lab / "my/labs/ring.ipynb").read_text()
    copy, kept = place.reset(with_lab, "ring")
    assert copy == with_lab / "my/labs/ring.ipynb" and "given" in copy.read_text() and "the_answer" not in copy.read_text()
    assert kept.parent == copy.parent and "return x" in kept.read_text()
    assert place.prepare(with_lab) == place.Prepared()


def test_a_lab_whose_solution_is_not_marked_is_not_given(with_lab):
    edit(with_lab, "labs/source/ring/ring.ipynb", "### BEGIN SOLUTION", "# solution")
    done = place.prepare(with_lab)
    assert list(done.broken) == ["labs/ring.ipynb"] and not (with_lab / "my" / "labs").exists()


def test_the_file_alone_finds_what_it_needs(with_lab):
    """start.py loads it before anything is installed: neither torch nor the library may be touched."""
    course = Path(place.__file__).parent
    program = (
        "import importlib.util as u, sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        f"spec = u.spec_from_file_location('alone', {str(course / 'place.py')!r}, submodule_search_locations=[{str(course)!r}])\n"
        "module = u.module_from_spec(spec); sys.modules['alone'] = module; spec.loader.exec_module(module)\n"
        f"print(module.prepare({str(with_lab)!r}).new); assert not {{'torch', 'fourwalls'}} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=30)
    assert said.returncode == 0, said.stderr
    assert "labs/ring.ipynb" in said.stdout
