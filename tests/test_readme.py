"""The README is true: its program runs, its links lead somewhere, its commands are known."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourwalls.bench import BENCHMARKS
from fourwalls.bench.__main__ import main
from fourwalls_start import commands

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
LINKS = sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT)))
COMMANDS = sorted({words.split("#")[0].strip() for words in re.findall(r"python3 start\.py([^`\n]*)", TEXT)} - {"--help"})


@pytest.mark.parametrize("link", LINKS)
def test_link_leads_somewhere(link):
    assert (ROOT / link).is_file()


@pytest.mark.parametrize("words", COMMANDS)
def test_command_is_known(words):
    options = commands.parse(words.replace("cpu|cuda|existing", "cpu").split())
    assert options.command in commands.COMMANDS
    assert not (options.only and set(options.only.split(",")) - set(commands.parts.PARTS))


def test_the_program_runs(tmp_path):
    program = re.search(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[1]
    program += "\nprint([value.tolist() for value in run.values][:2], run.ranks, run.timeline() is not None)\n"
    (tmp_path / "readme.py").write_text(program)
    env = dict(os.environ, MPLBACKEND="agg")
    done = subprocess.run([sys.executable, "readme.py"], cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]] 256 True"


def untested(text, system="", python=""):
    """Systems in the table that claim a test with no command behind it, or that are not the `system` and `python` that it has."""
    table = text[text.index("## Where it is tested") :].split("\n\n")[1]
    said = []
    for where, versions, what in ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]):
        if re.search("not tested|do not run|no longer", what, flags=re.IGNORECASE):
            continue
        commands = re.findall(r"`([^`]+)`", what)
        elsewhere = system and not (where.startswith(system) and versions == python)
        if elsewhere or not commands or not all((ROOT / name).is_file() for name in commands):
            said.append(where)
    return said


def test_a07_no_system_is_said_to_be_tested_that_is_not():
    """What is claimed names the command that tests it; where that command runs, it is this system and this Python."""
    here = (platform.system(), f"{sys.version_info.major}.{sys.version_info.minor}") if "CI" in os.environ else ("", "")
    assert untested(TEXT, *here) == []
    spoilt = TEXT.replace("written for, not tested", "everything"), TEXT.replace("(`.ci/run`)", "(`.ci/none`)")
    assert [len(untested(text, *here)) for text in spoilt] == [1, 1]
    assert untested(TEXT, "Darwin", "3.11") and untested(TEXT, "Linux", "3.9")


@pytest.mark.parametrize("words", sorted({words.strip() for words in re.findall(r"fourwalls\.bench (\S[^`\n#]*)", TEXT)}))
def test_benchmark_and_its_options_exist(words, capsys):
    """The whole line, in this process: one for each would import torch each time. tests/bench runs it as a program."""
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--help"])  # asked for last, so that all before it is read
    assert end.value.code == 0, capsys.readouterr().err
    assert "usage: python -m fourwalls.bench" in capsys.readouterr().out


def test_every_benchmark_is_named():
    assert [name for name in BENCHMARKS if not re.search(rf"\b{name}\b", TEXT[TEXT.index("## Benchmarks") :])] == []


@pytest.mark.parametrize("words", ["all-reduces", "all-reduce --rank", "all-reduce --sizes 4XB"])
def test_a_benchmark_or_option_that_is_not_there_would_be_seen(words):
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--help"])
    assert end.value.code == 2
