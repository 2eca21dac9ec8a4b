"""What ranks print: each line with its label while it runs, ordered by rank at the end, and never more than a reader can use.

Everything a rank writes to standard output and error, from Python or from C, comes here as bytes through one pipe. In a
terminal or a test, lines appear as they come; in a notebook a live part shows the latest lines and gives way to the ordered
text at the end, so that two runs leave the same cell behind.

    shown = the first 200 lines, at most 64 kB, of each rank; the rest goes to a file of at most 8 MB

Reference: the Jupyter messaging protocol, `display_data` and `update_display_data`.
"""

import codecs
import contextlib
import sys
import time
from collections import deque
from pathlib import Path

__all__ = ["FILE_BYTES", "SHOWN_BYTES", "SHOWN_LINES", "Output"]

SHOWN_LINES, SHOWN_BYTES = 200, 64 * 1024
FILE_BYTES = 8 * 2**20
LIVE_LINES, LIVE_SECONDS = 20, 0.1


class Output:
    """Collects the output of all ranks of one run, and shows it if `stream`. `scratch()` gives the folder for what is too
    much.
    """

    def __init__(self, ranks: int, *, stream: bool, scratch):
        self.ranks = [_RankOutput(r, scratch) for r in range(ranks)]
        self.view = _view() if stream else _Silent()
        self.failed = self.finished = False

    def feed(self, rank: int, data: bytes) -> None:
        """Bytes that a rank has written."""
        for line in self.ranks[rank].feed(data):
            self.view.line(f"[rank {rank}] {line}")

    def say(self, text: str) -> None:
        """A passing word to the reader, such as how long a rank has been waited for."""
        self.view.say(text)

    def tick(self) -> None:
        self.view.tick()

    def finish(self) -> None:
        """All ranks have ended: show unfinished lines, the notes on what was left out, and (in a notebook) the ordered text."""
        if self.finished:
            return
        self.finished = True
        for rank in self.ranks:
            for line in rank.finish(self.failed):
                self.view.line(f"[rank {rank.rank}] {line}")
        self.view.finish(self.labelled)

    def show(self) -> None:
        """Show what was collected silently, ordered by rank."""
        self.view = _view()
        for line in () if isinstance(self.view, _Notebook) else self.labelled:
            self.view.line(line)
        self.view.finish(self.labelled)

    @property
    def labelled(self) -> list[str]:
        return [f"[rank {r.rank}] {line}" for r in self.ranks for line in r.lines]

    @property
    def texts(self) -> list[str]:
        """What each rank printed, as far as it is shown."""
        return ["".join(f"{line}\n" for line in r.lines) for r in self.ranks]

    @property
    def files(self) -> list[str | None]:
        """Where the rest of each rank's output lies, until this process ends."""
        return [str(r.path) if r.path else None for r in self.ranks]


class _RankOutput:
    """One rank's text: lines that are shown, and how much more there was."""

    def __init__(self, rank: int, scratch):
        self.rank, self.scratch = rank, scratch
        self.lines: list[str] = []
        self.shown_bytes = self.more_lines = self.more_bytes = self.kept_bytes = 0
        self.path: Path | None = None
        self.file, self.full = None, False
        self.partial = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now and are to be shown."""
        if self.more_lines:  # beyond what is shown: count it and keep it, nothing else
            self.spill(data)
            return []
        *complete, self.partial = (self.partial + self.decoder.decode(data)).split("\n")
        if len(self.partial) > SHOWN_BYTES:
            complete.append(self.partial)
            self.partial = ""
        fresh = []
        for k, line in enumerate(complete):
            line = line.rstrip("\r")
            line = line[line.rfind("\r") + 1 :]  # a progress bar overwrites itself: its last state counts
            size = len(line.encode("utf-8", "replace")) + 1
            if len(self.lines) >= SHOWN_LINES or self.shown_bytes + size > SHOWN_BYTES:
                rest = "\n".join([*complete[k:], self.partial])
                self.partial = ""
                self.spill(rest.encode("utf-8", "replace"))
                self.more_lines = max(self.more_lines, 1)
                break
            self.lines.append(line)
            self.shown_bytes += size
            fresh.append(line)
        return fresh

    def spill(self, data: bytes) -> None:
        self.more_lines += data.count(b"\n")
        self.more_bytes += len(data)
        room = FILE_BYTES - self.kept_bytes
        if room <= 0 or not data or self.full:
            return
        try:
            if self.file is None:
                folder = self.scratch()
                number = sum(1 for _ in folder.iterdir())
                self.path = folder / f"output-{number}-rank-{self.rank}.txt"
                self.file = self.path.open("wb")
            self.file.write(data[:room])
            self.kept_bytes += min(room, len(data))
        except OSError:  # no disk, or no folder for temporary files: the text is lost, the run is not
            self.full = True
            if self.file is None:
                self.path = None

    def finish(self, failed: bool) -> list[str]:
        """The lines that come at the end. A run that failed has no `run.files`, so its note says the path."""
        fresh = []
        if self.partial and not self.more_lines:
            fresh = self.feed(b"\n")
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None
        if self.more_lines:
            note = f"... {self.more_lines:,} more lines ({self.more_bytes:,} bytes)"
            if self.path and self.more_bytes > self.kept_bytes:
                note += f", of which the first {self.kept_bytes:,} bytes are"
            place = self.path if failed else f"run.files[{self.rank}]"
            note += f" in the file {place}, until this notebook or script ends" if self.path else " were not kept"
            self.lines.append(note)
            fresh = [*fresh, note]
        return fresh


def _view():
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook(shell)
    return _Plain()


class _Silent:
    """Shows nothing."""

    def line(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def finish(self, lines: list[str]) -> None: ...


class _Plain(_Silent):
    """Lines as they come, to whatever `sys.stdout` is (it need not be a file, and may be closed)."""

    def line(self, text: str) -> None:
        with contextlib.suppress(Exception):
            stream = sys.stdout
            try:
                stream.write(text + "\n")
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode() + "\n")
            stream.flush()

    def say(self, text: str) -> None:
        self.line(text)


class _Notebook(_Silent):
    """A live part with the latest lines, which is empty again at the end; then the ordered text as one stream.

    An empty display is what a strict comparison of outputs sees at the start and at the end, however the lines came.
    """

    def __init__(self, shell):
        self.publisher, self.latest, self.word, self.id = shell.display_pub, deque(maxlen=LIVE_LINES), "", None
        self.shown_at, self.stale = 0.0, False

    def line(self, text: str) -> None:
        self.latest.append(text)
        self.stale = True
        self.tick()

    def say(self, text: str) -> None:
        self.word, self.stale = text, True
        self.tick()

    def tick(self) -> None:
        if self.stale and time.monotonic() - self.shown_at >= LIVE_SECONDS:
            self.publish("\n".join([*self.latest, self.word] if self.word else self.latest))

    def publish(self, text: str) -> None:
        if self.id is None:
            self.id = f"fourwalls-{id(self):x}-{time.monotonic_ns():x}"
            self.publisher.publish(data={}, metadata={}, transient={"display_id": self.id})
        self.publisher.publish(
            data={"text/plain": text} if text else {}, metadata={}, transient={"display_id": self.id}, update=True
        )
        self.shown_at, self.stale = time.monotonic(), False

    def finish(self, lines: list[str]) -> None:
        if self.id is not None:
            self.publish("")
        if lines:
            with contextlib.suppress(Exception):
                print("\n".join(lines))
