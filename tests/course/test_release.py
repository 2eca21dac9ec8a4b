"""A student's copy holds no answer, and the proof of it fails when an answer is planted, wherever it is put."""

import base64
import copy
import json
import re
from pathlib import Path

import pytest

from fourwalls.course import lab as labs
from fourwalls.course.release import BEGIN, END, Unmarked, find_leaks, secret_lines, student_copy

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "utils" / "fourwalls" / "course"


def source_of(name):
    return json.loads((ROOT / "labs" / "source" / name / f"{name}.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", labs.LABS)
@pytest.mark.parametrize("twist", [None, 11])
def test_no_answer_is_in_a_copy(name, twist):
    source = source_of(name)
    copied = student_copy(source, twist=twist)
    secrets = secret_lines(source, *sorted(CHECKS.glob(f"{labs.LABS[name]}*.py")))
    assert len(secrets) > 30
    assert find_leaks(copied, secrets) == []
    assert BEGIN not in json.dumps(copied) and "raise NotImplementedError()" in json.dumps(copied)
    assert all(not cell.get("outputs") and "attachments" not in cell for cell in copied["cells"])
    begin = "".join(copied["cells"][1]["source"])
    assert f"twist={twist}" in begin


@pytest.mark.parametrize("name", labs.LABS)
def test_the_source_itself_is_full_of_answers(name):
    source = source_of(name)
    assert find_leaks(source, secret_lines(source)) != []


SECRET = "    take += comm.exchange(give, (r + t['step']) % n, torch.empty_like(take))"


def small():
    """A source with one solution."""
    body = f"def f(comm, x):\n    {BEGIN}\n{SECRET}\n    return take\n    {END}\n"
    mark = {"grade": False, "solution": True, "grade_id": "f", "locked": False, "schema_version": 3, "task": False}
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["Words.\n", "More words."]},
        {"cell_type": "code", "id": "b", "metadata": {"nbgrader": mark}, "source": body, "outputs": [], "execution_count": 3},
    ]
    return {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}, "author": "me"}, "nbformat": 4, "nbformat_minor": 5}


PLACES = {
    "a cell": lambda nb: nb["cells"].append({"cell_type": "code", "metadata": {}, "source": SECRET, "outputs": []}),
    "a cell in pieces": lambda nb: nb["cells"].append({"cell_type": "raw", "metadata": {}, "source": [SECRET[:30], SECRET[30:]]}),
    "with other spaces": lambda nb: nb["cells"][0].update(source=re.sub(" ", "  ", SECRET)),
    "an output": lambda nb: nb["cells"][1].update(outputs=[{"output_type": "stream", "text": [SECRET]}]),
    "a traceback": lambda nb: nb["cells"][1].update(outputs=[{"output_type": "error", "traceback": [f"-> {SECRET}"]}]),
    "metadata": lambda nb: nb["metadata"].update(widgets={"state": {"x": SECRET}}),
    "cell metadata": lambda nb: nb["cells"][0]["metadata"].update(note=SECRET),
    "an attachment": lambda nb: nb["cells"][0].update(
        attachments={"a.txt": {"text/plain": base64.b64encode(SECRET.encode()).decode()}}
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_answer_is_found(place):
    source = small()
    secrets = secret_lines(source)
    copied = student_copy(source)
    assert find_leaks(copied, secrets) == []
    PLACES[place](copied)
    assert find_leaks(copied, secrets) == ["the solution of f"]


def test_what_was_in_outputs_metadata_and_attachments_of_the_source_does_not_get_out():
    source = small()
    for place in ("an output", "metadata", "cell metadata", "an attachment"):
        PLACES[place](source)
    copied = student_copy(source)
    assert find_leaks(copied, secret_lines(small())) == []
    assert set(copied["metadata"]) == {"kernelspec"} and copied["cells"][1]["execution_count"] is None


def changed(**mark):
    source = small()
    source["cells"][1]["metadata"]["nbgrader"].update(mark)
    return source


def twice():
    source = small()
    source["cells"].append(copy.deepcopy(source["cells"][1]))
    return source


def unmarked():
    source = small()
    source["cells"][1]["source"] = f"def f(comm, x):\n{SECRET}\n"
    return source


def unended():
    source = small()
    source["cells"][1]["source"] = source["cells"][1]["source"].replace(END, "")
    return source


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (changed(solution=False), "not marked"),
        (changed(grade=True), "no points"),
        (changed(grade_id=""), "id of its own"),
        (twice(), "id of its own"),
        (unmarked(), "without ### BEGIN"),
        (unended(), "do not match"),
    ],
)
def test_a_source_that_would_leak_is_refused(source, says):
    with pytest.raises(Unmarked, match=says):
        student_copy(source)


def test_the_stub_stands_where_the_solution_stood():
    text = student_copy(small())["cells"][1]["source"]
    assert text == "def f(comm, x):\n    # YOUR CODE HERE\n    raise NotImplementedError()\n"
    compile(text, "cell", "exec")
