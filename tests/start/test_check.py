"""The self-check: one line each, what falls back and what to do, an exit code that says whether the course can run."""

import io
import sys

import pytest

from fourwalls_start import check
from fourwalls_start.check import BROKEN, FALLS_BACK, OK, Line


@pytest.mark.parametrize(
    ("kernel", "page", "anywidget", "anywidget_page", "state", "says"),
    [
        ("8.1.9", "5.0.16", "0.11.0", "0.11.0", OK, "kernel and page agree"),
        ("7.8.1", "3.1.9", "0.11.0", "0.11.0", OK, "kernel and page agree"),
        ("7.8.1", "5.0.16", "0.11.0", "0.11.0", FALLS_BACK, "Upgrade ipywidgets"),
        ("8.1.9", "3.1.9", "0.11.0", "0.11.0", FALLS_BACK, "Upgrade jupyterlab_widgets"),
        ("8.1.9", None, "0.11.0", "0.11.0", FALLS_BACK, "Install jupyterlab_widgets"),
        ("9.0.0", "6.0.0", "0.11.0", "0.11.0", FALLS_BACK, "Install ipywidgets 8"),
        ("8.1.9", "5.0.16", "0.11.0", "0.10.2", FALLS_BACK, "Upgrade anywidget"),
        ("8.1.9", "5.0.16", "0.11.0", None, FALLS_BACK, "Upgrade anywidget"),
    ],
)
def test_widgets_of_kernel_and_page(kernel, page, anywidget, anywidget_page, state, says):
    line = check.widget_verdict(kernel, page, anywidget, anywidget_page)
    assert (line.state, says in line.text) == (state, True)


def show(*lines, stream=None):
    stream = stream or io.StringIO()
    code = check.report([(lambda line=line: line) for line in lines], stream=stream)
    return code, stream.getvalue()


def test_only_what_is_essential_decides():
    assert show(Line(OK, "a", "x"), Line(FALLS_BACK, "b", "y"))[0] == 0
    assert show(Line(OK, "a", "x"), [Line(OK, "c", "z"), Line(BROKEN, "b", "y")])[0] == 1


def test_symbols_and_words_and_colour_only_in_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, text = show(Line(OK, "cores", "2"), Line(FALLS_BACK, "GPUs", "none"))
    assert text.splitlines() == [
        "+ ok         cores          2",
        "~ falls back GPUs           none",
        "1 ok, 1 fall back, 0 broken.",
    ]
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True, "encoding": "utf-8"})
    _, text = show(Line(OK, "cores", "2"), stream=terminal())
    assert "\x1b[32m✓ ok" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in show(Line(OK, "cores", "2"), stream=terminal())[1]


def test_a_probe_that_fails_hides_no_other_line():
    def _fails():
        raise PermissionError("no")

    stream = io.StringIO()
    assert check.report([_fails, lambda: Line(OK, "b", "y")], stream=stream) == 0
    assert "fails          could not be found out: PermissionError: no" in stream.getvalue()
    assert "b              y" in stream.getvalue()


@pytest.mark.parametrize(
    ("program", "found", "says"),
    [
        ("print('noise'); print('PROBE [1, 2]')", [1, 2], ""),
        ("raise ValueError('why')", None, "ValueError: why"),
        ("import sys; sys.exit(7)", None, "exit code 7"),
        ("import time; time.sleep(60)", None, "no answer after"),
    ],
)
def test_probes_in_a_process_of_their_own(program, found, says):
    answer, word = check._probe(program, 0.8 if "sleep" in program else 30)
    assert answer == found
    assert says in word


def test_shared_memory_of_a_container(monkeypatch):
    monkeypatch.setattr(check.sys, "platform", "linux")
    monkeypatch.setattr(check.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(check.os, "access", lambda path, mode: True)
    for size, state in ((64 * 2**20, FALLS_BACK), (2**30, OK)):
        usage = type("usage", (), {"total": size})
        monkeypatch.setattr(check.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert check._shared_memory().state == state
    monkeypatch.setattr(check.os.path, "isdir", lambda path: False)
    assert check._shared_memory().state == FALLS_BACK


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ((["2.13.0", None, [], False], ""), [OK, FALLS_BACK]),
        ((["2.13.0", "13.0", ["H100"], True], ""), [OK, FALLS_BACK]),
        ((["2.13.0", "13.0", ["H100"] * 8, True], ""), [OK, OK]),
        ((["2.13.0", "13.0", ["H100"] * 8, False], ""), [OK, FALLS_BACK]),
        ((None, "ImportError: libx"), [BROKEN]),
    ],
)
def test_torch_and_gpus(monkeypatch, found, states):
    monkeypatch.setattr(check, "_probe", lambda program, seconds: found)
    assert [line.state for line in check._torch()] == states


@pytest.mark.skipif(sys.platform == "win32", reason="real ranks need fork or a Unix socket")
@pytest.mark.parametrize(
    ("found", "states"), [(([3.0, 0.1], ""), [OK, OK]), (([3.0, 9.0], ""), [OK, FALLS_BACK]), ((None, "x"), [BROKEN])]
)
def test_ranks(monkeypatch, found, states):
    monkeypatch.setattr(check, "_probe", lambda program, seconds: found)
    assert [line.state for line in check._ranks()] == states
