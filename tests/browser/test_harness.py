"""The harness sees what it is there to see: an error in a cell, an error on the console, a dead control, a request outside."""

import json

import pytest

from .lab import changed, errors_of, guess_all

WIDGET = """<div class='fw-widget' data-testid='fw-fake'>
<button class='live' onclick='document.querySelector(".fw-words").textContent += "x"'>live</button>
<button class='dead'>dead</button>
<div class='fw-stage'></div><div class='fw-words'></div></div>"""
PREDICTION = """<div class='fw-predict'><div class='fw-guess'><input type=radio></div>
<button class='fw-commit'>Commit</button></div>"""

CELLS = [
    ([], "1 / 0"),
    (["raises-exception"], "[][1]"),
    ([], "from IPython.display import Javascript; Javascript('console.error(\"planted\")')"),
    ([], "from IPython.display import Javascript; Javascript('fetch(\"http://127.0.0.1:9/x\").catch(() => 0)')"),
    ([], "print('fine')"),
]


@pytest.fixture
def planted(server):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tags}, "source": source, "outputs": [], "execution_count": None}
        for i, (tags, source) in enumerate(CELLS)
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = server.folder / "planted.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    yield path.name
    path.unlink()


def test_planted_faults_are_seen(lab, planted):
    lab.open(planted)
    assert lab.console_errors == []
    assert lab.outside == []
    for index, _ in lab.cells():
        lab.run_cell(index)
    assert errors_of(lab) == ["cell 0: ZeroDivisionError: division by zero"]
    assert [output["text"] for index, _, outputs in lab.outputs() if index == 4 for output in outputs] == ["fine\n"]
    assert any("planted" in error for error in lab.console_errors)
    assert lab.outside == ["http://127.0.0.1:9/x"]


def test_a_dead_control_is_seen(browser):
    page = browser.new_page()
    page.set_content(WIDGET)
    lab = type("Tab", (), {"page": page})()
    widget = page.locator(".fw-widget")
    changed(lab, widget, widget.locator(".live").click, "live")
    with pytest.raises(AssertionError, match="dead: the picture did not change"):
        changed(lab, widget, widget.locator(".dead").click, "dead")
    page.close()


def test_a_prediction_that_takes_no_guess_is_seen(browser):
    page = browser.new_page()
    page.set_content(PREDICTION)
    with pytest.raises(AssertionError, match="before there is a guess"):
        guess_all(type("Tab", (), {"page": page})())
    page.close()
