"""Running pip so that a person can follow it: one moving line in a terminal, plain lines elsewhere, one sentence if it fails.

pip's own lines go to `.venv/setup.log`, whole. A child process is gone when its block is left, however it is left, so that an
interrupt leaves nothing running behind.

    shown = latest(collecting, downloading + size, unpacking + count)

Reference: pip documentation, "pip install", options --progress-bar and --no-input.
"""

import contextlib
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .needs import NEWEST, Stop

__all__ = ["Progress", "explain", "pip_install", "running"]

NO_NETWORK = re.compile(
    "NewConnectionError|Temporary failure in name resolution|Name or service not known|nodename nor servname|getaddrinfo failed"
    "|Failed to establish a new connection|Network is unreachable|Max retries exceeded|ReadTimeoutError|ConnectTimeoutError"
    "|Connection refused|ConnectionResetError|ProxyError"
)


class Progress:
    """What is going on, on one line that moves (a terminal) or as plain lines (anything else)."""

    def __init__(self, stream=None):
        self.stream = stream or sys.stdout
        self.moving = self.stream.isatty()
        self.text, self.start, self.closed = "", time.monotonic(), threading.Event()
        if self.moving:
            threading.Thread(target=self._tick, daemon=True).start()

    def say(self, text: str, *, plain: bool = True) -> None:
        """Show `text` from now on; outside a terminal only if `plain`."""
        self.text = text
        if self.moving:
            self._draw()
        elif plain:
            print(f"  {text}", file=self.stream, flush=True)

    def close(self) -> None:
        """Stop moving and leave the line empty."""
        self.closed.set()
        if self.moving:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def pip(self, line: str) -> None:
        """Take in one line of pip's output."""
        collecting = re.match(r"Collecting (\S+)", line)
        loading = re.match(r"\s*Downloading (\S+?\.(?:whl|tar\.gz|zip)) \(([\d.]+) ([kMG]?B)\)", line)
        moved = re.match(r"Progress (\d+) of (\d+)", line)
        if collecting:
            self.say(f"looking up {collecting[1]}", plain=False)
        elif loading:
            name, size, unit = loading[1].rpartition("/")[2].split("-")[0], loading[2], loading[3]
            self.say(f"downloading {name} ({size} {unit})", plain=unit == "GB" or (unit == "MB" and float(size) >= 10))
        elif moved and self.text.startswith("downloading") and int(moved[2]):
            self.text = f"{self.text.partition(',')[0]}, {100 * int(moved[1]) // int(moved[2])}%"
        elif line.startswith("Installing collected packages"):
            count = line.count(",") + 1
            self.say(f"unpacking {count} package{'s' if count > 1 else ''}")

    def _tick(self):
        while not self.closed.wait(0.5):
            self._draw()

    def _draw(self):
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        line = f"  {minutes}:{seconds:02d}  {self.text}"
        self.stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self.stream.flush()


@contextlib.contextmanager
def running(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A child process (options as for Popen) that has ended when the block is left."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    child.kill()


def pip_install(python: Path, arguments: list[str], progress: Progress, env: dict[str, str], log: Path) -> None:
    """`pip install` with the pip of `python`. Raises Stop with pip's trouble in one sentence; all of its words go to `log`."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-compile"]  # set-up does that for all packages together, on all cores
    command += ["--progress-bar", "raw" if _pip_major(python, env) >= 25 else "off", *arguments]
    said = []
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        with running(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
            for raw in child.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                progress.pip(line)
                if not line.startswith("Progress "):
                    said.append(line)
                    file.write(line + "\n")
            code = child.wait()
    if code:
        raise explain("\n".join(said), log)


def explain(said: str, log: Path) -> Stop:
    """pip's last words as one sentence and one fix."""
    again = "run the same command again"
    missing = re.search(r"No matching distribution found for (\S+)", said)
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return Stop("The disk is full, or your quota used up.", f"free 3 GB, then {again}")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return Stop(
            "The package index cannot be trusted: its certificate does not check.",
            "set PIP_CERT to your network's certificate file",
        )
    if NO_NETWORK.search(said):
        return Stop("The package index cannot be reached.", f"connect to the network, then {again}")
    if missing:
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.system()} {platform.machine()}"
        fix = f"use Python 3.{NEWEST[1] - 1} on 64-bit Linux, macOS on Apple silicon, or WSL"
        return Stop(f"The package index has no {missing[1]} for {here}.", fix)
    last = "\n    ".join(said.strip().splitlines()[-12:])
    return Stop(f"pip failed, with these last words:\n    {last}", f"read {log}, mend it, then {again}")


def _pip_major(python: Path, env: dict[str, str]) -> int:
    done = subprocess.run(
        [str(python), "-m", "pip", "--version"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    found = re.match(rb"pip (\d+)\.", done.stdout)
    if not found:
        words = done.stdout.decode("utf-8", "replace").strip().splitlines() or ["no word"]
        raise Stop(f"pip does not start in .venv: {words[-1]}", "delete .venv, then run the same command again")
    return int(found[1])
