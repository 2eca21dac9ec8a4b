"""my/ is used from inside it, never from elsewhere, and never where it cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourwalls.course import home
from fourwalls.course.home import find_home, find_root, notebook_name, reset


def test_inside_my_things_last(project, monkeypatch):
    assert find_home().path == project / "my" and find_home().lasting and not find_home().note
    (project / "my" / "deep").mkdir()
    monkeypatch.chdir(project / "my" / "deep")
    assert find_home().path == project / "my"


@pytest.mark.parametrize("folder", ["notebooks", "."])
def test_elsewhere_in_the_project_nothing_is_left_behind(project, monkeypatch, folder):
    monkeypatch.chdir(project / folder)
    found = find_home()
    assert not found.lasting and project not in found.path.parents and "until the kernel stops" in found.note
    assert found.path == find_home().path, "the same folder for the whole process"


def test_a_named_folder_comes_first(project, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("FOURWALLS_MY", str(other))
    assert find_home().path == other and find_home().lasting


def test_a_folder_that_cannot_be_written_is_not_used(project, monkeypatch):
    monkeypatch.setenv("FOURWALLS_MY", str(project / "start.py"))  # a file: nobody can write into it, not even root
    found = find_home()
    assert not found.lasting and "start.py/ cannot be written" in found.note


def test_the_temporary_folder_ends_with_the_process(tmp_path):
    code = "from fourwalls.course.home import find_home; p = find_home().path; (p / 'x').write_text('y'); print(p)"
    utils = Path(home.__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(utils)}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert not Path(out.stdout.strip()).exists()


def test_root_and_notebook_name(project, monkeypatch, tmp_path_factory):
    assert find_root() == project
    assert find_root(tmp_path_factory.mktemp("alone")) is None
    monkeypatch.setenv("JPY_SESSION_NAME", "my/03_ring.ipynb")
    assert notebook_name() == "03_ring.ipynb"
    monkeypatch.setenv("JPY_SESSION_NAME", "console-1")
    assert notebook_name() == ""


def test_reset_gives_a_fresh_copy_and_keeps_the_old_one(project, capsys, monkeypatch, tmp_path_factory):
    (project / "notebooks" / "02_ranks.ipynb").write_text('{"cells": [], "metadata": {}}')
    (project / "my" / "02_ranks.ipynb").write_text('{"cells": [{"cell_type": "code", "source": "mine"}], "metadata": {}}')
    reset("02")
    said = capsys.readouterr().out
    assert "Fresh copy: my/02_ranks.ipynb." in said and "kept as 02_ranks.kept_" in said
    assert "mine" not in (project / "my" / "02_ranks.ipynb").read_text()
    monkeypatch.chdir(tmp_path_factory.mktemp("alone"))
    with pytest.raises(ValueError, match="inside the project"):
        reset("02")
