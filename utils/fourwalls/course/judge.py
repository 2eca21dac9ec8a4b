"""Runs a learner's functions where they can neither see nor touch what they are compared with.

Their code lives in a process of its own (ranks/apart.py), each rank of a run in a fork of it; messages, virtual clock and Trace
are kept here, by the simulator, whose ranks are stand-ins that carry out what the forks ask for. So bytes and calls are counted
by the one who moves them, results arrive as plain data, and a rank that hangs, dies, exits or floods costs one run.

    verdict = compare(plain result, oracle made here)   and   counts of this side's Trace

Reference: DESIGN, section 8.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from ..ranks import plain
from ..ranks.comm import CommError, DeadlockError
from ..ranks.run import simulate
from ..ranks.ship import pack_program, sources_in
from ..ranks.trace import Trace
from .stand_in import Failed, Failure, Task, own_line

__all__ = ["Apart", "Outcome", "environment"]

START_SECONDS = 120.0  # importing torch on a slow, busy machine
OUTPUT_BYTES = 64 * 1024  # of what the learner's code prints, kept
_START = "import sys; sys.path[:0] = sys.argv[2:]; from fourwalls.ranks.apart import main; main(int(sys.argv[1]))"


def environment(*, wrapped: bool) -> dict[str, str]:
    """Variables for a learner's process. wrapped: for what shuts it in, too, whose variables it could read in /proc."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FOURWALLS_", "JPY_", "PYTEST_"))}
    if wrapped:
        kept = {k: v for k, v in kept.items() if k in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")}
    return kept | {"OMP_NUM_THREADS": "1"}


@dataclass
class Outcome:
    """One run: values by rank, the Trace of this side, or the Failure."""

    values: list
    trace: Trace
    failure: Failure | None = None
    seconds: float = 0.0
    cluster: object = field(default=None, repr=False)


class Apart:
    """The learner's process. `with Apart(forbidden=[...]) as apart: apart.load(f=f); apart.run("module.driver", ["f"], ...)`.

    forbidden  modules that cannot be imported there
    drivers    "module.function" that `run` will be asked for: imported at once, so that no rank has to
    paths      put before everything else on its path (a copy of the library without answers)
    wrap       turns the command line into one that runs it without network and access; None: as it is
    """

    def __init__(self, forbidden=(), drivers=(), *, paths=(), wrap=None):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-s", "-u", "-c", _START, str(theirs.fileno()), *map(str, paths)]
        self._process = subprocess.Popen(
            wrap(command) if wrap else command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(wrapped=wrap is not None),
            start_new_session=True,
        )
        theirs.close()
        self._begin(ours)
        try:
            self._ask("forbid", list(forbidden), str(Path(__file__).resolve().parents[1]))
            self._ask("import", list(drivers))
        except BaseException:
            self.close()
            raise

    def copy(self) -> "Apart":
        """A fork of this process, in which nothing more is loaded than in this one: a start that costs milliseconds.

        For code that we wrote (mutants, tests) or a learner's own: copies have one parent, with which they could interfere.
        """
        ours, theirs = socket.socketpair()
        reads, writes = os.pipe()
        with theirs, os.fdopen(writes, "wb"):
            pid = self._ask("copy", fds=(theirs.fileno(), writes))
        made = object.__new__(Apart)
        made._process = _Copy(pid, os.fdopen(reads, "rb"))
        made._begin(ours)
        return made

    def _begin(self, control):
        self._control, self._said = control, bytearray()
        control.settimeout(START_SECONDS)
        self._drain = threading.Thread(target=self._keep_output, daemon=True)
        self._drain.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process can take another run."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What the learner's code printed so far, its first 64 KiB."""
        return self._said.decode(errors="replace")

    def load(self, **functions) -> None:
        """Send functions of this process by value, each under its name. Raises ValueError for one that does not pickle."""
        for name, function in functions.items():
            data, _ = pack_program(function, (), {}, 1)
            self._ask("pickle", name, torch.frombuffer(bytearray(data), dtype=torch.uint8), sources_in(data))

    def load_cells(self, cells, *, limit: float = 60.0, reference: dict | None = None) -> list[str | None]:
        """Run [(name, source)] of a notebook there. The error of each cell, or None. Raises Failed (hang, dead).

        reference: what `lab.reference` gives there (our own solutions need it; a student's finds None).
        """
        self._control.settimeout(limit)
        try:
            return self._ask("cells", [list(cell) for cell in cells], reference)
        except TimeoutError:
            self.kill()
            raise Failed(Failure("hang", f"the notebook's cells took more than {limit:g} s")) from None
        finally:
            self._control.settimeout(START_SECONDS)

    def run(
        self, driver, functions, args=(), *, ranks=1, per_rank=None, cluster=None, seed=0, limit=10.0, each=None, alter=None
    ) -> Outcome:
        """Run driver(comm, {name: function}, *args) on `ranks` ranks of `cluster`.

        driver     "module.function", importable on the learner's side, which calls what the learner wrote
        args       plain data, the same for all ranks; per_rank: a list of tuples, put behind `args` for each rank
        limit      seconds of the whole run
        each       each(rank, process id, verb): called before what a rank asks for is done, while its process waits
        alter      alter(tensor) is what a rank gets of each message, instead of what was sent
        Never raises for what the learner's code does: see Outcome.failure.
        """
        began = time.monotonic()
        task = Task(self, driver, list(functions), list(args), per_rank, began + limit, limit, each, alter)
        values, trace, failure = [None] * ranks, Trace([], ranks=ranks), None
        try:
            done = simulate(task, ranks=ranks, cluster=cluster, seed=seed, stream=False)
            values, trace = done.values, done.trace
        except DeadlockError as error:
            failure = Failure("DeadlockError", str(error), error.rank)
        except CommError as error:
            cause = error.__cause__
            if isinstance(cause, Failed):
                failure = cause.failure
            else:
                failure = Failure(type(error).__name__, str(error), error.rank)
        finally:
            self._ask_to_end()
        return Outcome(values, trace, failure, time.monotonic() - began, cluster)

    def start_rank(self, stream, task, rank, size, seed, records_work) -> int:
        """Fork a rank that serves `stream`; its process id."""
        more = () if task.per_rank is None else task.per_rank[rank]
        options = {"rank": rank, "size": size, "seed": seed, "records_work": records_work}
        return self._ask("rank", task.driver, task.functions, [*task.args, *more], options, fds=(stream.fileno(),))

    def where(self, child: int) -> str:
        """The innermost line of the learner's code that the process of a rank is at; "" if it does not say."""
        before = len(self._said)
        try:
            self._ask("where", child)
        except (OSError, Failed):
            return ""
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not (line := own_line(bytes(self._said[before:]).decode(errors="replace"))):
            time.sleep(0.02)
        return line

    def kill(self) -> None:
        """End the process and all of its session."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def close(self) -> None:
        """End the process, its ranks, and the thread that reads what they print."""
        self._control.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self._drain.join(1.0)
        self._process.stdout.close()

    def _ask_to_end(self):
        try:
            self._ask("end")
        except (OSError, Failed):
            self.kill()

    def _ask(self, *question, fds=()):
        try:
            socket.send_fds(self._control, [b"."], list(fds))
            plain.write(self._control, list(question))
            answer = plain.read(self._control)
        except (EOFError, ConnectionError):
            raise Failed(Failure("dead", f"the process with your code has ended {self.output[-500:]}".rstrip())) from None
        if answer[0] != "ok":
            raise Failed(Failure(answer[1], answer[2]))
        return answer[1]

    def _keep_output(self):
        while chunk := self._process.stdout.read1(65536):
            self._said += chunk[: max(0, OUTPUT_BYTES - len(self._said))]


class _Copy:
    """A process that is not our child, as far as Apart needs it: its parent reaps it."""

    def __init__(self, pid, stdout):
        self.pid, self.stdout = pid, stdout

    def poll(self):
        try:
            return None if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE else 0
        except psutil.NoSuchProcess:
            return 0

    def wait(self, timeout=5.0):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("copy", timeout)
            time.sleep(0.005)
