"""A learner's session: guess, run, see, keep a function, restart the kernel, go on with it; and come back another day."""

import json

import pytest

from .lab import errors_of, guess_all

BEFORE = [
    "import fourwalls as fw, torch\nasked = fw.predict('session', 'How many?', choices=['two', 'three'])",
    "asked.reveal('two')",
    "def my_double(x):\n    return 2 * x\nfw.keep(my_double)",
]
AFTER = ["import fourwalls as fw\nkept = fw.kept('my_double', None)", "print(kept(21))"]


@pytest.fixture
def session(server):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for i, source in enumerate(BEFORE + AFTER)
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = server.folder / "session.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    yield path.name
    path.unlink()
    (server.folder / "kept" / "my_double.py").unlink(missing_ok=True)


def test_what_was_kept_is_there_after_a_restart(lab, server, session):
    lab.open(session)
    for index in range(len(BEFORE)):
        lab.run_cell(index)
        assert guess_all(lab) == (index == 0)
    shown = lab.page.locator(".jp-Notebook").inner_text()
    assert "you said two" in shown
    assert (server.folder / "kept" / "my_double.py").is_file()
    lab.restart()
    for index in range(len(BEFORE), len(BEFORE + AFTER)):
        lab.run_cell(index)
    assert errors_of(lab) == []
    said = [
        "".join(output.get("text", ""))
        for index, _, outputs in lab.outputs()
        for output in outputs
        if index == len(BEFORE + AFTER) - 1
    ]
    assert said == ["42\n"]
    lab.screenshot("session")
    assert lab.console_errors == []
