"""A container's limits are the machine's: quota, affinity and memory, in both versions of control groups."""

import math
import os

import pytest

from fourwalls_start import machine


def groups(tmp_path, row, files):
    """(cgroup folder, /proc/self/cgroup) with `row` as this process's entry and `files` below the folder."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "self").write_text(row + "\n")
    return str(tmp_path / "cgroup"), str(tmp_path / "self")


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("row", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "20000 100000"}, 1),  # a fifth of a core is still a core to run on
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),  # a limit further up binds too
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
        ("4:memory:/x", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores(tmp_path, eight, row, files, cores):
    assert machine.allowed_cores(*groups(tmp_path, row, files))[0] == cores


def test_no_control_groups_at_all(tmp_path, eight):
    assert machine.allowed_cores(str(tmp_path), str(tmp_path / "none")) == (8, "affinity")


@pytest.mark.parametrize(
    ("row", "files", "limit"),
    [
        ("0::/", {"memory.max": "max"}, 10**10),
        ("0::/a", {"a/memory.max": "max", "memory.max": "2000"}, 2000),
        ("0::/a", {"a/memory.max": str(10**12)}, 10**10),
        ("7:memory:/x", {"memory/x/memory.limit_in_bytes": "3000"}, 3000),
    ],
)
def test_memory(tmp_path, row, files, limit):
    assert machine.memory_limit(*groups(tmp_path, row, files), total=10**10) == limit


def test_this_machine_has_some_of_each():
    assert 1 <= machine.allowed_cores()[0] <= (os.cpu_count() or math.inf)
    assert machine.memory_limit() > 10**8


def test_chromium_by_name_by_path_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.delenv("FOURWALLS_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.setattr(
        machine.os, "access", lambda path, mode, real=os.access: not path.startswith("/Applications") and real(path, mode)
    )
    assert machine.find_chromium() is None
    own = tmp_path / "browsers" / "chromium-1200" / "chrome-linux64" / "chrome"
    for path in (own, tmp_path / "chromium"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
    assert machine.find_chromium() == str(tmp_path / "chromium")
    (tmp_path / "chromium").unlink()
    assert machine.find_chromium() == str(own)
    monkeypatch.setenv("FOURWALLS_CHROMIUM", str(tmp_path / "nothing"))
    assert machine.find_chromium() is None
