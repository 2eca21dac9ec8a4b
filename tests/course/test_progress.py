"""One file, whole at all times, that forgets nothing it was told and survives damage and company."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourwalls.course import home, progress
from fourwalls.course.progress import load, remember_check, remember_guess, remember_place


def test_guesses_checks_and_place_are_remembered(project, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "my/03_ring.ipynb")
    remember_guess("a", 3)
    remember_guess("a", 3, True)
    remember_guess("b", "left", False)
    remember_guess("c", 1)
    remember_check("ring", False)
    seen = progress.progress()
    assert (seen.right, seen.judged, seen.passed) == (1, 2, 0)
    text = str(seen)
    assert "you were right once of 2." in text and "Checks: 0 of 1 passed." in text
    assert "Still open: ring." in text and "Resume with: 03_ring.ipynb." in text
    assert json.loads((project / "my" / progress.FILE).read_text())["guesses"]["c"] == {"guess": 1, "right": None}


def test_an_answer_met_once_stays_and_so_does_a_check_passed(project):
    remember_guess("a", 3, False)
    remember_guess("a", 4, True)
    assert load()["guesses"]["a"] == {"guess": 3, "right": False}
    remember_check("ring", True)
    remember_check("ring", False)
    assert load()["checks"]["ring"] is True


def test_nothing_done_yet(project):
    assert str(progress.progress()).splitlines() == [
        "Predictions: none yet.",
        "Checks: none yet.",
        "Resume with: the first notebook.",
    ]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"checks": 1}', '{"checks": {}, "guesses": {"a": 3}, "place": ""}', "\udcff"])
def test_a_damaged_file_is_put_aside_and_named(project, capsys, damage):
    path = project / "my" / progress.FILE
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    remember_place("01.ipynb")
    assert load()["place"] == "01.ipynb"
    assert "kept as progress.damaged_1.json" in capsys.readouterr().out
    assert (project / "my" / "progress.damaged_1.json").read_bytes() == damage.encode("utf-8", "surrogateescape")
    path.write_text("{")
    load()
    assert (project / "my" / "progress.damaged_2.json").exists()


def test_a_crash_while_writing_leaves_the_old_file_and_no_litter(project, monkeypatch):
    remember_place("old.ipynb")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress.json, "dump", fail)
    remember_place("new.ipynb")  # no error reaches the reader
    monkeypatch.undo()
    assert json.loads((project / "my" / progress.FILE).read_text())["place"] == "old.ipynb"
    assert [p.name for p in (project / "my").iterdir() if p.name.startswith(".progress_")] == []


def test_kernels_side_by_side_lose_nothing(project):
    code = "import sys\nfrom fourwalls.course.progress import remember_guess\n"
    code += "for k in range(20): remember_guess(f'{sys.argv[1]}-{k}', k)"
    utils = Path(home.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(utils)}
    running = [subprocess.Popen([sys.executable, "-c", code, name], cwd=project / "my", env=env) for name in "abc"]
    assert [p.wait(60) for p in running] == [0, 0, 0]
    assert len(load()["guesses"]) == 60


def test_outside_my_nothing_is_written_there(project, monkeypatch):
    monkeypatch.chdir(project / "notebooks")
    remember_guess("a", 1, True)
    assert "until the kernel stops" in str(progress.progress())
    assert list((project / "my").iterdir()) == [] and list((project / "notebooks").iterdir()) == []
