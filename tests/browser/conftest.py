"""A JupyterLab of its own, over cleared copies of the notebooks, and a headless Chromium; both end with the tests.

Two processes take one test after the other, so those that are long begin first: none is left to run alone at the end.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from fourwalls.course import place
from fourwalls_start.machine import find_chromium

from .lab import Lab

ROOT = Path(__file__).resolve().parents[2]
# All cells stay in the page, so that what is scrolled away can be looked at too.
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}


LONG = ("test_notebooks", "test_labs", "test_learner", "test_harness")  # files by the time that one test of them takes


def pytest_collection_modifyitems(items):
    """The long tests first; the others, and those of other folders, stay as they are."""
    length = {f"{stem}.py": len(LONG) - k for k, stem in enumerate(LONG)}
    items.sort(key=lambda item: -length.get(item.path.name, 0) if item.path.parent == Path(__file__).parent else 0)


@dataclass
class Server:
    url: str
    token: str
    folder: Path


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """JupyterLab on a free port, in a place of its own: nothing of the user's is read or written."""
    base = tmp_path_factory.mktemp("lab")
    (base / "start.py").write_text("# the learner's folder is found beside this\n")
    shutil.copytree(ROOT / "notebooks", base / "notebooks", ignore=shutil.ignore_patterns(".*"))
    place.prepare(base)
    env = dict(os.environ, FOURWALLS_MY=str(base / "my"), JUPYTER_PREFER_ENV_PATH="1", JUPYTER_PLATFORM_DIRS="0")
    env["JUPYTER_CONFIG_PATH"] = str(ROOT / "utils" / "fourwalls_start" / "jupyter")  # no teachers' extensions
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        env[name] = str(base / name.lower())
    for plugin, settings in SETTINGS.items():
        package, _, stem = plugin.partition(":")
        path = base / "jupyter_config_dir" / "lab" / "user-settings" / package / f"{stem}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += [
        f"--ServerApp.root_dir={base / 'my'}",
        "--IdentityProvider.token=four",
        "--ServerApp.answer_yes=True",
        "--allow-root",
    ]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly", "--log-level=WARN"]
    with open(base / "server.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/"
        end = time.monotonic() + 60
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"JupyterLab did not start:\n{(base / 'server.log').read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{url}api/status?token=four", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield Server(url, "four", base / "my")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium. If there is none the tests fail: what was not looked at has not passed."""
    path = find_chromium()
    if path is None:
        pytest.fail("there is no Chromium: install one, or set FOURWALLS_CHROMIUM to its path")
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root in a container, and with 64 MB of shared memory
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def lab(server, browser):
    """A tab; its kernel and it are gone after the test."""
    tab = Lab(browser, server)
    yield tab
    tab.close()
