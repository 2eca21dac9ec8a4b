"""start.py, the file that every Python must be able to read, and what its commands do with their words."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourwalls_start import commands, needs

ROOT = Path(__file__).resolve().parents[1]
ALL = ["lab", "test", "dev", "grade"]  # what the tests need


@pytest.fixture(scope="module")
def start():
    namespace = {"__name__": "start", "__file__": str(ROOT / "start.py")}
    exec(compile((ROOT / "start.py").read_text(), "start.py", "exec"), namespace)
    return namespace


@pytest.fixture
def calls(monkeypatch):
    """`main` with its doing replaced by a list of what would be done."""
    done = []
    monkeypatch.setattr(commands, "ensure", lambda root, groups, *, torch, yes: done.append(("ensure", groups, torch, yes)))
    monkeypatch.setattr(commands.parts, "run_parts", lambda root, only, arguments: done.append(("test", only, arguments)) or 0)
    monkeypatch.setattr(
        commands, "_lab", lambda root, options: done.append(("lab", options.port, options.no_browser, options.extra)) or 0
    )
    monkeypatch.setattr(commands, "_check", lambda root, options: done.append(("check",)) or 1)
    monkeypatch.setattr(commands, "_setup", lambda root, options: done.append(("setup",)) or 0)
    return done


@pytest.mark.parametrize("minor", range(4, 11))
def test_an_old_python_can_read_start_py(minor):
    tree = ast.parse((ROOT / "start.py").read_text(), feature_version=(3, minor))  # a SyntaxError where it cannot
    assert tree.body


def test_start_py_uses_nothing_that_python_3_5_lacks():
    tree = ast.parse((ROOT / "start.py").read_text())  # feature_version lets f-strings and annotations pass
    forbidden = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, forbidden)] == []
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {alias.name for node in top for alias in node.names} <= {"os", "shutil", "signal", "sys"}


@pytest.mark.parametrize("version", [(3, 6, 0), (3, 10, 12)])
def test_an_old_python_is_told_the_one_fix(start, version):
    word = start["too_old"](version, which=lambda name: name == "python3.12")
    assert f"{version[0]}.{version[1]}, too old" in word
    assert word.endswith("Fix: run:  python3.12 start.py")
    assert start["too_old"](version, which=lambda name: None).endswith("Fix: install Python 3.13, then:  python3.13 start.py")


def test_python_3_11_is_new_enough(start):
    assert start["too_old"]((3, 11, 0), which=lambda name: None) == ""
    assert start["OLDEST"] == needs.OLDEST


def test_the_set_up_package_needs_only_the_standard_library():
    program = "import sys; sys.path.insert(0, sys.argv[1]); import fourwalls_start.commands; import fourwalls_start.check"
    program += "; print(sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'__main__'}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(ROOT / "utils")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['fourwalls_start']"


@pytest.mark.parametrize(
    ("words", "does"),
    [
        ([], [("ensure", ["lab"], None, False), ("lab", None, False, [])]),
        (["--no-browser", "--port", "9"], [("ensure", ["lab"], None, False), ("lab", 9, True, [])]),
        (["lab", "--", "--ip=0.0.0.0"], [("ensure", ["lab"], None, False), ("lab", None, False, ["--ip=0.0.0.0"])]),
        (["--torch", "cuda", "--yes", "setup"], [("ensure", ["lab"], "cuda", True), ("setup",)]),
        (["check"], [("ensure", ["lab"], None, False), ("check",)]),
        (["test"], [("ensure", ALL, None, False), ("test", [], [])]),
        (["test", "--only", "lint,unit"], [("ensure", ALL, None, False), ("test", ["lint", "unit"], [])]),
        (["test", "-k", "ring", "-x"], [("ensure", ALL, None, False), ("test", [], ["-k", "ring", "-x"])]),
        (["test", "tests/ranks"], [("ensure", ALL, None, False), ("test", [], ["tests/ranks"])]),
    ],
)
def test_what_a_command_line_does(calls, words, does):
    assert commands.main(words, ROOT) == (1 if ("check",) in does else 0)
    assert calls == does


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chek"], "invalid choice: 'chek'"),
        (["--prot=3"], "--prot=3 is not known here; what JupyterLab shall get stands behind --"),
        (["setup", "--fast"], "--fast is not known here"),
        (["--torch", "gpu"], "invalid choice: 'gpu'"),
        (["--port", "x"], "invalid int value"),
    ],
)
def test_a_word_that_is_not_known(calls, capsys, words, says):
    with pytest.raises(SystemExit) as stop:
        commands.main(words, ROOT)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
    assert calls == []


def test_trouble_is_one_sentence_and_one_fix(monkeypatch, capsys):
    def stop(*_, **__):
        raise needs.Stop("The disk is full.", "free some")

    monkeypatch.setattr(commands, "ensure", stop)
    assert commands.main(["setup"], ROOT) == 1
    assert capsys.readouterr().err == "\nThe disk is full.\nFix: free some\n"


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "ensure", interrupt)
    assert commands.main(["setup"], ROOT) == 130
    assert "Stopped." in capsys.readouterr().err


def tree(folder):
    """A checkout small enough to set nothing up: start.py, the set-up package, place.py with release.py, and one notebook."""
    for path in [
        "start.py",
        "utils/fourwalls/course/place.py",
        "utils/fourwalls/course/release.py",
        *(f"utils/fourwalls_start/{p.name}" for p in (ROOT / "utils/fourwalls_start").glob("*.py")),
    ]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "03_ring.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    return folder


def run(folder, *words, **options):
    return subprocess.run(
        [sys.executable, "start.py", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_reset_needs_no_set_up(tmp_path):
    tree(tmp_path)
    done = run(tmp_path, "reset", "03")
    assert (done.returncode, done.stdout) == (0, "my/03_ring.ipynb is fresh.\n")
    (tmp_path / "my" / "03_ring.ipynb").write_text("mine")
    assert "Yours is kept as my/03_ring.kept_" in run(tmp_path, "reset", "03_ring.ipynb").stdout
    assert sorted(path.name.split("_20")[0] for path in (tmp_path / "my").iterdir()) == [
        ".given.json",
        "03_ring.ipynb",
        "03_ring.kept",
    ]
    wrong = run(tmp_path, "reset", "04")
    assert wrong.returncode == 1
    assert "no notebook named '04'; did you mean 03_ring?" in wrong.stderr or "There are: 03_ring" in wrong.stderr
    assert run(tmp_path, "reset").returncode == 1
    assert not list(tmp_path.rglob("__pycache__"))


def test_help_names_every_command():
    done = run(ROOT, "--help")
    assert done.returncode == 0
    assert all(f"start.py {name}" in done.stdout for name in ("test", "setup", "check", "reset NOTEBOOK", "grade DIR"))


def test_lab_hands_over_to_jupyterlab(tmp_path, monkeypatch, capsys):
    tree(tmp_path)
    (tmp_path / "notebooks" / "03_ring.ipynb").rename(tmp_path / "notebooks" / "00_four_walls.ipynb")
    seen = []
    monkeypatch.setattr(os, "execve", lambda program, command, env: seen.append((program, command, env, os.getcwd())))
    monkeypatch.setattr(commands, "ensure", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    commands.main(["--no-browser", "--port", "9", "--", "--ip=::1"], tmp_path)
    program, command, env, folder = seen[0]
    assert program == command[0] == str(tmp_path / ".venv" / "bin" / "python")
    assert folder == str(tmp_path / "my")
    assert "--LabApp.default_url=/lab/tree/00_four_walls.ipynb" in command  # the first time
    assert command[-1] == "--ip=::1"
    assert [word for word in command if word in ("--no-browser", "--port", "9")] == ["--no-browser", "--port", "9"]
    assert env["VIRTUAL_ENV"] == str(tmp_path / ".venv")
    assert env["JUPYTER_CONFIG_PATH"].split(os.pathsep)[0] == str(tmp_path / "utils" / "fourwalls_start" / "jupyter")
    assert "my/: 1 new" in capsys.readouterr().out
    commands.main([], tmp_path)
    assert "--LabApp.default_url=/lab/tree/00_four_walls.ipynb" not in seen[1][1]
    assert "my/:" not in capsys.readouterr().out


def test_a_newer_notebook_behind_an_edited_copy_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    tree(tmp_path)
    monkeypatch.setattr(commands, "ensure", lambda *_, **__: None)
    commands.main(["setup"], tmp_path)
    book = '{{"cells": [{{"cell_type": "code", "source": "{}", "outputs": []}}], "metadata": {{}}}}'
    (tmp_path / "my" / "03_ring.ipynb").write_text(book.format("mine"))
    (tmp_path / "notebooks" / "03_ring.ipynb").write_text(book.format("newer"))
    (tmp_path / "notebooks" / "04_half.ipynb").write_text("{")
    capsys.readouterr()
    commands.main(["setup"], tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "03_ring" in line] == [
        "my/03_ring.ipynb: yours is kept; there is a newer one (python3 start.py reset 03 gives it, and keeps yours too)"
    ]
    assert any(line.startswith("notebooks/04_half.ipynb: left out, not a notebook") for line in said)


def test_my_that_cannot_be_made_is_said(tmp_path, monkeypatch, capsys):
    tree(tmp_path)
    (tmp_path / "my").write_text("a file in the way")
    monkeypatch.setattr(commands, "ensure", lambda *_, **__: None)
    assert commands.main(["setup"], tmp_path) == 1
    assert "my/ cannot be written" in capsys.readouterr().err
