"""Setting up: whole or not at all, recognised when it is there, mended when it is not. pip is a small script here."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fourwalls_start import install, needs
from fourwalls_start.environment import venv_python

PYPROJECT = """
[project]
dependencies = ["torch==2.13.0", "torch-like==1", "numpy==2.4.6"]
[project.optional-dependencies]
lab = ["jupyterlab==4.6.6"]
test = ["pytest==9.2.0"]
"""

# Stands for .venv/bin/python: answers the questions that set-up asks, and notes what pip would have installed.
FAKE = """#!{python} -IS
import json, os, pathlib, sys, time
root = pathlib.Path(__file__).parents[2]
words = sys.argv[1:]
behave = json.loads((root / "behave.json").read_text()) if (root / "behave.json").exists() else {{}}
if words[:3] == ["-m", "pip", "--version"]:
    print("pip 23.2 from somewhere")
elif words[:3] == ["-m", "pip", "install"]:
    with open(root / "pip.log", "a") as log:
        constraint = words[words.index("--constraint") + 1] if "--constraint" in words else None
        log.write(json.dumps([words[3:], open(constraint).read() if constraint else None]) + "\\n")
    print("Collecting something", flush=True)
    time.sleep(behave.get("seconds", 0))
    print(behave.get("says", "Installing collected packages: a, b"))
    sys.exit(behave.get("exit", 0))
elif words[:2] == ["-m", "compileall"]:
    with open(root / "pip.log", "a") as log:
        log.write(json.dumps([["compileall"], None]) + "\\n")
elif "sys.version_info" in words[-1]:
    print(behave.get("version", "{major} {minor} True"))
elif "torch.version.cuda" in words[-1]:
    print(behave.get("cuda", "None"))
elif "version('torch')" in words[-1]:
    print("2.13.0+cpu")
"""


def fake(folder, setattr):
    """Make `folder` a checkout whose `python -m venv` makes the fake. setattr: as monkeypatch has it."""

    def make(venv, found):
        python = venv_python(venv.parent)
        python.parent.mkdir(parents=True)
        python.write_text(FAKE.format(python=sys.executable, major=sys.version_info[0], minor=sys.version_info[1]))
        python.chmod(0o755)
        (venv / "made").write_text(str(bool(found)))

    (folder / "pyproject.toml").write_text(PYPROJECT)
    setattr(install, "_make_venv", make)
    setattr(install, "requirement", lambda choice, pin, system: ([pin, f"--for-{choice}"], ""))
    setattr(install, "has_nvidia_driver", lambda: False)
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    return fake(tmp_path, monkeypatch.setattr)


def asked(root):
    """What pip was asked for: [(words, constraint)], options that are always there left out. Empties the log.

    All is compiled once, after the last of them.
    """
    log = root / "pip.log"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    compiled = [words == ["compileall"] for words, _ in rows]
    assert [False, *("--editable" in words for words, _ in rows)] == [*compiled, False]  # behind the library, and only there
    rows = [row for row in rows if row[0] != ["compileall"]]
    always = ["--no-input", "--disable-pip-version-check", "--retries", "2", "--no-compile", "--progress-bar", "off"]
    assert all(words[: len(always)] == always for words, _ in rows)
    cut = [[word for word in words[len(always) :] if not word.endswith("torch.txt")] for words, _ in rows]
    return [(words, row[1]) for words, row in zip(cut, rows, strict=True)]


def behave(root, **how):
    (root / "behave.json").write_text(json.dumps(how))


def state(root):
    return install.read_stamp(root)


def test_torch_comes_first_then_the_rest_holds_it_fast_then_the_library(root, capsys):
    install.ensure(root, ["lab"])
    assert asked(root) == [
        (["torch==2.13.0", "--for-cpu"], None),
        (["torch-like==1", "numpy==2.4.6", "jupyterlab==4.6.6", "--constraint"], "torch==2.13.0+cpu\n"),
        (["--no-deps", "--editable", str(root)], None),
    ]
    said = capsys.readouterr().out
    assert "Setting up Four Walls: nothing is set up yet." in said
    assert "MB to download" in said
    assert "MB free" in said
    assert state(root)["state"] == "ready"
    overrides = json.loads((root / ".venv/share/jupyter/lab/settings/overrides.json").read_text())
    assert overrides["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false", "checkForUpdates": False}
    assert (root / ".venv/setup.log").read_text().count("$ ") == 3


def test_all_is_compiled_but_tests_and_what_is_no_python_stops_nothing(tmp_path):
    venv = tmp_path / "tests" / ".venv"  # only below .venv is a folder of that name left out
    for name, text in {"a/b.py": "x = 1", "a/broken.py": "print 1", "a/tests/c.py": "y = 2"}.items():
        (venv / name).parent.mkdir(parents=True, exist_ok=True)
        (venv / name).write_text(text)
    install._compile(Path(sys.executable), venv, dict(os.environ), tmp_path / "log")
    assert [path.name.partition(".")[0] for path in venv.rglob("*.pyc")] == ["b"]
    assert "broken.py" in (tmp_path / "log").read_text()


def test_the_second_time_is_silent_and_quick(root, capsys):
    install.ensure(root, ["lab"])
    asked(root)
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    start = time.perf_counter()
    install.ensure(root, ["lab"])
    assert time.perf_counter() - start < 2  # 0.03 s when the machine is idle
    assert asked(root) == []
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_more_groups_are_added_and_stay(root, capsys):
    install.ensure(root, ["lab"])
    asked(root)
    install.ensure(root, ["lab", "test"])
    assert asked(root)[1][0] == ["torch-like==1", "numpy==2.4.6", "jupyterlab==4.6.6", "pytest==9.2.0", "--constraint"]
    assert "this command needs more packages" in capsys.readouterr().out
    install.ensure(root, ["lab"])
    assert asked(root) == []
    assert state(root)["groups"] == ["lab", "test"]


def test_an_update_for_one_command_keeps_what_another_needed(root):
    install.ensure(root, ["lab", "test"])
    asked(root)
    (root / "pyproject.toml").write_text(PYPROJECT.replace("pytest==9.2.0", "pytest==9.3.0"))
    install.ensure(root, ["lab"])
    assert "pytest==9.3.0" in asked(root)[1][0]
    assert state(root)["groups"] == ["lab", "test"]


@pytest.mark.parametrize("old", ["numpy==2.4.6", "torch==2.13.0", "jupyterlab==4.6.6"])
def test_a_moved_pin_is_followed(root, capsys, old):
    install.ensure(root, ["lab"])
    asked(root)
    (root / "pyproject.toml").write_text(PYPROJECT.replace(old, old + ".1"))
    install.ensure(root, ["lab"])
    assert any(old + ".1" in words for words, _ in asked(root))
    assert "the pinned versions changed" in capsys.readouterr().out
    install.ensure(root, ["lab"])
    assert asked(root) == []


def test_a_pin_of_a_group_that_is_not_installed_changes_nothing(root):
    install.ensure(root, ["lab"])
    asked(root)
    (root / "pyproject.toml").write_text(PYPROJECT.replace("pytest==9.2.0", "pytest==9.3.0"))
    install.ensure(root, ["lab"])
    assert asked(root) == []


def spoil_stamp(root):
    (root / ".venv" / "four_walls.json").write_text(json.dumps({**state(root), "state": "building"}))


def spoil_python(root):
    venv_python(root).unlink()


def spoil_version(root):
    behave(root, version="3 4 True")


def spoil_place(root):
    (root / ".venv" / "four_walls.json").write_text(json.dumps({**state(root), "root": "/elsewhere"}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_stamp, "an earlier set-up was interrupted"),
        (spoil_python, "the Python that .venv was made with is gone or changed"),
        (spoil_version, "the Python that .venv was made with is gone or changed"),
        (spoil_place, "this folder was moved or copied"),
    ],
)
def test_a_broken_venv_is_made_anew(root, capsys, spoil, why):
    install.ensure(root, ["lab"])
    (root / ".venv" / "old").write_text("")
    spoil(root)
    capsys.readouterr()
    install.ensure(root, ["lab"])
    assert f"Setting up Four Walls: {why}." in capsys.readouterr().out
    assert not (root / ".venv" / "old").exists()
    assert len(asked(root)) == 6


def test_another_torch_is_another_venv_and_is_remembered(root):
    install.ensure(root, ["lab"])
    behave(root, cuda="13.0")
    asked(root)
    install.ensure(root, ["lab"], torch="cuda")
    assert asked(root)[0][0] == ["torch==2.13.0", "--for-cuda"]
    install.ensure(root, ["lab"])  # no --torch: what is there stays
    assert asked(root) == []


def test_a_driver_means_cuda(root, monkeypatch):
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: True)
    behave(root, cuda="13.0")
    install.ensure(root, ["lab"])
    assert state(root)["torch"] == ("cuda" if sys.platform == "linux" else "cpu")


def test_cuda_without_cuda_is_said(root):
    with pytest.raises(needs.Stop, match="without CUDA"):
        install.ensure(root, ["lab"], torch="cuda")
    assert state(root)["state"] == "building"


def test_existing_torch_is_not_installed_again(root, monkeypatch):
    monkeypatch.setattr(install, "existing_torch", lambda: ("2.9.0", "/somewhere", False))
    install.ensure(root, ["lab"], torch="existing")
    rows = asked(root)
    assert len(rows) == 2
    assert not any(word.startswith("torch=") for words, _ in rows for word in words)
    assert (root / ".venv" / "made").read_text() == "True"


def test_a_failing_pip_leaves_a_venv_that_is_made_anew(root, capsys):
    behave(root, exit=1, says="ERROR: Could not install: [Errno 28] No space left on device")
    with pytest.raises(needs.Stop, match="The disk is full"):
        install.ensure(root, ["lab"])
    assert state(root)["state"] == "building"
    behave(root)
    install.ensure(root, ["lab"])
    assert state(root)["state"] == "ready"
    assert "an earlier set-up was interrupted" in capsys.readouterr().out


def test_an_interrupt_ends_pip_and_the_next_time_starts_afresh(root):
    behave(root, seconds=60)
    program = """if True:
        import pathlib, sys
        sys.path[:0] = sys.argv[2:]
        import test_install
        test_install.install.ensure(test_install.fake(pathlib.Path(sys.argv[1]), setattr), ["lab"])
    """
    folders = [str(Path(install.__file__).parents[1]), str(Path(__file__).parent)]
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(root), *folders], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 30
    while not (root / "pip.log").exists():
        assert time.monotonic() < end
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    child.communicate(timeout=20)
    with pytest.raises(ProcessLookupError):  # nobody of that group is left
        os.killpg(child.pid, 0)
    assert state(root) == {"root": str(root), "state": "building"}
    behave(root)
    install.ensure(root, ["lab"])
    assert state(root)["state"] == "ready"


def test_an_interrupt_while_the_venv_is_made_leaves_it_start_pys_own(root, monkeypatch):
    make = install._make_venv

    def half(venv, found):
        (venv / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_make_venv", half)
    with pytest.raises(KeyboardInterrupt):
        install.ensure(root, ["lab"])
    monkeypatch.setattr(install, "_make_venv", make)
    install.ensure(root, ["lab"])
    assert not (root / ".venv" / "half").exists()
    assert list(root.glob(".venv.before_*")) == []


def test_someone_elses_venv_is_put_aside_untouched(root, capsys):
    (root / ".venv").mkdir()
    (root / ".venv" / "precious").write_text("x")
    install.ensure(root, ["lab"])
    aside = list(root.glob(".venv.before_*"))
    assert [(path / "precious").read_text() for path in aside] == ["x"]
    assert f"it is now {aside[0].name}" in capsys.readouterr().out


def test_two_set_ups_at_once_take_turns(root):
    behave(root, seconds=0.2)
    threads = [threading.Thread(target=install.ensure, args=(root, ["lab"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked(root)) == 3  # one did it, the others found it done
    assert state(root)["state"] == "ready"


def test_too_small_a_disk_is_said_before_anything_is_made(root, monkeypatch):
    free = type("usage", (), {"free": 500 * 10**6})()
    monkeypatch.setattr(install, "check_disk", lambda folder, mb: needs.check_disk(folder, mb, usage=lambda _: free))
    with pytest.raises(needs.Stop, match="has 500 MB free; set-up needs about 1,950 MB") as stop:
        install.ensure(root, ["lab"])
    assert stop.value.fix.startswith("free 1,450 MB there")
    assert not (root / ".venv").exists()


def test_a_folder_that_cannot_be_written_is_said(root, monkeypatch):
    monkeypatch.setattr(needs.os, "access", lambda path, mode: False)
    with pytest.raises(needs.Stop, match="cannot be written"):
        install.ensure(root, ["lab"])


@pytest.mark.parametrize(("answer", "goes_on"), [("", True), ("y", True), ("n", False), ("No", False)])
def test_a_person_is_asked(root, monkeypatch, answer, goes_on):
    terminal = type("terminal", (), {"isatty": lambda self: True, "write": lambda self, text: None, "flush": lambda self: None})()
    monkeypatch.setattr(install.sys, "stdin", terminal)
    monkeypatch.setattr(install.sys, "stdout", terminal)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    monkeypatch.setattr(
        install, "Progress", lambda: type("quiet", (), {"say": lambda *_, **__: 0, "pip": lambda *_: 0, "close": lambda *_: 0})()
    )
    if goes_on:
        install.ensure(root, ["lab"])
        assert state(root)["state"] == "ready"
    else:
        with pytest.raises(needs.Stop, match="Nothing was changed"):
            install.ensure(root, ["lab"])
        assert not (root / ".venv").exists()
        install.ensure(root, ["lab"], yes=True)  # --yes does not ask
        assert state(root)["state"] == "ready"


def test_pins_of_the_project():
    pins = install.read_pins(Path(__file__).resolve().parents[2])
    assert pins["torch"] == ["torch==2.13.0"]
    assert not any(line.startswith("torch==") for line in pins["core"])
    assert {"core", "torch", "lab", "test", "dev", "grade"} == set(pins)


def test_pins_whose_name_begins_with_torch_are_not_torch(root):
    assert install.read_pins(root)["core"] == ["torch-like==1", "numpy==2.4.6"]
