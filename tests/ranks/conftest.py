"""What every run must leave behind: nothing."""

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest


def rank_processes() -> list[psutil.Process]:
    """All processes under this one, but for the fork servers themselves."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "fourwalls.ranks.forkserver" not in " ".join(child.cmdline()) or child.parent().pid != os.getpid():
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails the test if a process, a shared-memory name, a temporary file or an open file of this process is left after it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = Path("/dev/shm")
    names = {p.name for p in shared.iterdir()} if shared.is_dir() else set()
    files, opened, before = set(tmp_path.iterdir()), psutil.Process().num_fds(), rank_processes()
    yield
    deadline = time.monotonic() + 2
    while (processes := [p for p in rank_processes() if p not in before]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes, f"left: {processes}"
    assert not (({p.name for p in shared.iterdir()} if shared.is_dir() else set()) - names)
    assert set(tmp_path.iterdir()) == files
    assert psutil.Process().num_fds() <= opened + 2  # a fork server, started by the first test, is one socket and one pipe


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """A shell that starts tests in the background lets them ignore SIGINT; what is tested here is that it is heard."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
