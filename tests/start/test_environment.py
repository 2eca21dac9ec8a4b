"""The environment of what start.py runs: foreign packages out, and somewhere to write where the home has none."""

import os
import sys
from pathlib import Path

import pytest

from fourwalls_start import environment

PLACES = ["IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """(home that can be written, temporary folder)."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(environment.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home", tmp_path / "temporary"


def test_venv_first_and_foreign_packages_out(home):
    given = {"HOME": str(home[0]), "PATH": "/bin", "PYTHONPATH": "/x", "PYTHONHOME": "/y", "PIP_USER": "1", "PIP_CERT": "/c"}
    env, word = environment.child_environment(Path("/r"), "cpu", given)
    assert word == ""
    assert env["PATH"].split(os.pathsep) == [str(environment.venv_python(Path("/r")).parent), "/bin"]
    assert env["VIRTUAL_ENV"] == str(Path("/r/.venv"))
    assert env["PYTHONNOUSERSITE"] == "1"
    assert env["PIP_CERT"] == "/c"
    assert not {"PYTHONPATH", "PYTHONHOME", "PIP_USER", *PLACES} & set(env)
    assert given["PYTHONPATH"] == "/x"


def test_an_existing_torch_may_need_the_path_to_it(home):
    env, _ = environment.child_environment(Path("/r"), "existing", {"HOME": str(home[0]), "PYTHONPATH": "/x"})
    assert env["PYTHONPATH"] == "/x"
    assert "PYTHONNOUSERSITE" not in env


def closed(monkeypatch, folder):
    """`folder`, and all below it, cannot be written (told so, since root may write anywhere)."""
    real = os.access
    monkeypatch.setattr(environment.os, "access", lambda path, mode: not str(path).startswith(str(folder)) and real(path, mode))


def test_a_read_only_home_gets_one_private_place_elsewhere_the_same_each_time(home, monkeypatch):
    closed(monkeypatch, home[0])
    env, word = environment.child_environment(Path("/r"), "cpu", {"HOME": str(home[0])})
    state = home[1] / f"fourwalls-{os.getuid()}"
    assert sorted(name for name in env if env[name].startswith(str(state))) == PLACES
    assert all(Path(env[name]).is_dir() for name in PLACES)
    assert state.stat().st_mode & 0o777 == 0o700
    assert str(state) in word
    assert environment.child_environment(Path("/r"), "cpu", {"HOME": str(home[0])})[0] == env
    assert list(home[0].iterdir()) == []


def test_only_what_cannot_be_written_moves(home, monkeypatch, tmp_path):
    closed(monkeypatch, home[0])
    mine = {"HOME": str(home[0]), "JUPYTER_CONFIG_DIR": str(tmp_path / "cfg"), "XDG_DATA_HOME": str(tmp_path / "data")}
    env, word = environment.child_environment(Path("/r"), "cpu", mine)
    assert env["JUPYTER_CONFIG_DIR"] == str(tmp_path / "cfg")
    assert word
    assert sorted(name for name in env if "fourwalls-" in env[name]) == (
        ["IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"]
        if sys.platform != "darwin"
        else sorted(set(PLACES) - {"JUPYTER_CONFIG_DIR"})
    )


def test_someone_elses_folder_of_that_name_is_not_trusted(home, monkeypatch):
    closed(monkeypatch, home[0])
    bait = home[1] / "bait"
    bait.mkdir()
    (home[1] / f"fourwalls-{os.getuid()}").symlink_to(bait)
    environment.child_environment(Path("/r"), "cpu", {"HOME": str(home[0])})
    assert list(bait.iterdir()) == []


@pytest.mark.parametrize(("path", "can"), [("there", True), ("there/not/yet", True)])
def test_can_write(tmp_path, path, can):
    (tmp_path / "there").mkdir()
    assert environment.can_write(tmp_path / path) is can
    assert not (tmp_path / "there/not").exists()
