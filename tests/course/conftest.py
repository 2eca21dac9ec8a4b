"""A project of its own for each test: start.py, notebooks/ and my/ in a temporary folder, and a process that works in my/."""

import pytest

from fourwalls.course import home


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The root of an empty project; the working folder is its my/."""
    for name in ("my", "notebooks", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "start.py").touch()
    monkeypatch.delenv("FOURWALLS_MY", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    monkeypatch.chdir(tmp_path / "my")
    home._temporary.cache_clear()
    return tmp_path
