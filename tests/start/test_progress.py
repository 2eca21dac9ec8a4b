"""pip, made readable: a few lines, and when it fails one sentence with one fix."""

import io
import subprocess
import sys

import pytest

from fourwalls_start import progress

PIP = """Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-none.whl.metadata (29 kB)
  Downloading torch-2.13.0-cp311-none.whl (190.1 MB)
Progress 95000000 of 190100000
Collecting six
  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)
  Downloading https://host/long/path/scipy-1.17.1-cp311-none.whl (35.1 MB)
Installing collected packages: six, scipy, torch
Successfully installed six scipy torch"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_name_only_what_is_large():
    stream = io.StringIO()
    shown = progress.Progress(stream)
    for line in PIP.splitlines():
        shown.pip(line)
    shown.close()
    assert stream.getvalue().splitlines() == [
        "  downloading torch (190.1 MB)",
        "  downloading scipy (35.1 MB)",
        "  unpacking 3 packages",
    ]


def test_a_terminal_has_one_line_that_moves_and_is_empty_at_the_end():
    stream = Terminal()
    shown = progress.Progress(stream)
    seen = []
    for line in PIP.splitlines():
        shown.pip(line)
        seen.append(shown.text)
    shown.close()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert seen[3] == "downloading torch (190.1 MB), 49%"
    assert seen[4] == "looking up six"


def test_a_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    shown = progress.Progress(stream)
    shown.say("x" * 200)
    shown.close()
    assert max(len(part) for part in stream.getvalue().replace("\x1b[K", "").split("\r")) <= 29


@pytest.mark.parametrize(
    ("said", "wrong", "fix"),
    [
        ("connection broken by 'NewConnectionError(...)'\nERROR: No matching distribution found for numpy==2.4.6",
         "The package index cannot be reached.", "connect to the network"),
        ("Temporary failure in name resolution", "cannot be reached", "connect to the network"),
        ("ERROR: [Errno 28] No space left on device", "The disk is full", "free 3 GB"),
        ("OSError: [Errno 122] Disk quota exceeded", "The disk is full", "free 3 GB"),
        ("Max retries exceeded ... SSLError(SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED)", "certificate", "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no torch==2.13.0 for Python 3.", "use Python 3.13 on"),
        ("error: something odd\nhint: look", "hint: look", "setup.log"),
    ],
)  # fmt: skip
def test_trouble_in_one_sentence_and_one_fix(tmp_path, said, wrong, fix):
    stop = progress.explain(said, tmp_path / "setup.log")
    assert wrong in str(stop)
    assert fix in stop.fix


def test_a_child_is_gone_when_its_block_is_left():
    sleeper = [sys.executable, "-IS", "-c", "import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt), progress.running(sleeper) as child:
        raise KeyboardInterrupt
    assert child.returncode not in (None, 0)


def test_a_child_that_ignores_the_end_is_killed(monkeypatch):
    monkeypatch.setattr(subprocess.Popen, "wait", _short(subprocess.Popen.wait))
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with progress.running([sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
    assert child.returncode == -9


def _short(wait):
    return lambda self, timeout=None: wait(self, None if timeout is None else 0.2)
