"""The parts of the tests: which commands, what is counted, and that nothing that failed or did not run looks passed."""

import sys
from pathlib import Path

import pytest

from fourwalls_start import needs, parts
from fourwalls_start.parts import Result

ROOT = Path(__file__).resolve().parents[2]

REPORT = """<testsuites><testsuite name="a" tests="10" failures="2" errors="1" skipped="3"/>
<testsuite name="b" tests="4" failures="0" errors="0" skipped="0"/></testsuites>"""


def after(words, option):
    return words[words.index(option) + 1]


def test_each_part_runs_what_it_says():
    command = {part: parts.command_of(part, ROOT, 2, []) for part in parts.PARTS}
    assert command["lint"][1:] == ["-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    assert command["imports"][-1] == "tests/test_imports.py"
    assert "--ignore=tests/browser" in command["unit"]
    assert after(command["unit"], "tests") == "--ignore=tests/browser"
    assert "not measured" in command["unit"]
    assert {"--nbval", "--nbval-current-env"} <= set(command["notebooks"])
    assert command["notebooks"][-1] == "notebooks"
    assert command["browser"][-1] == "tests/browser"
    assert all(words[0] == str(ROOT / ".venv" / "bin" / "python") for words in command.values())


def test_two_processes_only_where_there_are_two_cores():
    for part in ("unit", "notebooks", "browser"):
        assert after(parts.command_of(part, ROOT, 2, []), "-n") == "2"
        assert "-n" not in parts.command_of(part, ROOT, 1, [])


def test_each_of_two_processes_gets_half_of_the_cores():
    assert [parts.threads_of("unit", cores, {}) for cores in (1, 2, 3, 8)] == [
        {}, *({"OMP_NUM_THREADS": str(threads)} for threads in (1, 1, 4)),
    ]  # fmt: skip
    assert {part: len(parts.threads_of(part, 2, {})) for part in parts.PARTS} == {
        "lint": 0, "imports": 0, "unit": 1, "notebooks": 1, "browser": 1,
    }  # fmt: skip
    assert parts.threads_of("unit", 2, {"OMP_NUM_THREADS": "3"}) == {}


def test_the_threads_reach_the_part(monkeypatch, tmp_path):
    says = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS'] != '2'))"
    monkeypatch.setattr(parts, "command_of", lambda *_: [sys.executable, "-IS", "-c", says])
    assert parts._run("unit", tmp_path, 4, [], {}).state == "passed"


def test_arguments_and_paths():
    plain = parts.command_of("unit", ROOT, 1, ["-k", "ring"])
    assert "tests" in plain
    assert plain[-2:] == ["-k", "ring"]
    chosen = parts.command_of("unit", ROOT, 1, ["tests/start/test_parts.py::test_each_part_runs_what_it_says"])
    assert "tests" not in chosen


def test_counting(tmp_path):
    report = tmp_path / "report.xml"
    assert parts.count(report) == (0, 0, 0)
    report.write_text("<half")
    assert parts.count(report) == (0, 0, 0)
    report.write_text(REPORT)
    assert parts.count(report) == (8, 3, 3)


@pytest.fixture
def results(monkeypatch):
    """What each part comes to, by name; the default is one passed test."""
    table = {}
    monkeypatch.setattr(parts, "_run", lambda part, *_: table.get(part, Result(part, "passed", 1, 0, 0, 2.0)))
    return table


def test_one_failing_part_hides_no_other_and_decides(results, capsys):
    results["unit"] = Result("unit", "failed", 5, 2, 1, 10.0)
    assert parts.run_parts(ROOT, [], []) == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "9 passed, 2 failed, 1 skipped"
    assert [row.split()[0] for row in rows[-7:-2]] == list(parts.PARTS)
    assert rows[-2].split() == ["together", "18.0", "s"]


def test_all_passed(results, capsys):
    assert parts.run_parts(ROOT, [], []) == 0
    assert capsys.readouterr().out.endswith("5 passed, 0 failed, 0 skipped\n")


def test_what_did_not_run_is_not_passed(results, capsys):
    results["browser"] = Result("browser", "not run")
    assert parts.run_parts(ROOT, [], []) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "4 passed, 0 failed, 0 skipped"
    assert rows[-3].split()[:4] == ["browser", "not", "run", "0"]


def test_arguments_alone_mean_the_unit_part(results, capsys):
    parts.run_parts(ROOT, [], ["-k", "x"])
    parts.run_parts(ROOT, ["lint", "browser"], [])
    said = [row.split()[0] for row in capsys.readouterr().out.splitlines() if " passed " in row]
    assert said == ["unit", "lint", "browser"]


def test_a_part_that_does_not_exist():
    with pytest.raises(needs.Stop, match="There is no part units") as stop:
        parts.run_parts(ROOT, ["units"], [])
    assert "unit" in stop.value.fix


@pytest.mark.parametrize(("ci", "state", "failed"), [("", "not run", 0), ("true", "failed", 1)])
def test_no_chromium(monkeypatch, capsys, ci, state, failed):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(parts, "find_chromium", lambda: None)
    result = parts._run("browser", ROOT, 1, [], {})
    assert (result.state, result.passed, result.failed) == (state, 0, failed)
    assert "not run: there is no Chromium. Fix:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "state", "counts"),
    [
        ("pass", "passed", (0, 0, 0)),
        ("import sys; sys.exit(4)", "failed", (0, 1, 0)),  # it broke before a test could: never "0 failed"
        (f"import sys; open(sys.argv[-1], 'w').write('''{REPORT}'''); sys.exit(1)", "failed", (8, 3, 3)),
    ],
)
def test_what_a_part_comes_to(monkeypatch, tmp_path, program, state, counts):
    monkeypatch.setattr(parts, "command_of", lambda *_: [sys.executable, "-IS", "-c", program])
    result = parts._run("unit", tmp_path, 1, [], {})
    assert (result.state, (result.passed, result.failed, result.skipped)) == (state, counts)
