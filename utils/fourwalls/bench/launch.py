"""What it costs to start ranks: a fresh set of 4 that runs one training step of a small model and goes away again.

Round trip is the whole call: start the processes, connect them, forward, backward, AdamW, results back, processes gone. The first
call of a fresh interpreter also starts the fork server, so it stands apart. Memory is read by the ranks themselves while all of
them live.

    memory that ranks really cost = private dirty pages;  PSS shares a page's size among those that map it

Reference: Linux, Documentation/filesystems/proc.rst, "smaps_rollup".
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..ranks.run import run
from .record import Row
from .timer import spread

__all__ = ["describe", "rows", "training_step"]

describe = "start 4 fresh ranks, one step of a small model: round trip, the first one, memory of the ranks"


def rows(options, say: Callable[[str], None] = lambda text: None, *, repeats: int = 10) -> Iterator[Row]:
    """Rows for each number of ranks (default 4): the first round trip of a fresh interpreter, the median of ten more, memory."""
    for ranks in options.ranks or (4,):
        case = {"ranks": ranks, "model": "MLP 64-256-64", "step": "forward, backward, AdamW"}
        say(f"launch, {ranks} ranks: the first, in a fresh interpreter")
        first = _first_of_fresh(ranks)
        here = {"benchmark": "launch", "case": case}
        yield Row(metric="first_round_trip", value=first["round_trip"], unit="s", ok=first["right"], **here)
        yield Row(metric="first_process", value=first["process"], unit="s", ok=first["right"], **here)
        run(training_step, ranks=ranks, stream=False)
        times, right, dirty, shared = [], True, [], []
        for k in range(repeats):
            say(f"launch, {ranks} ranks: {k + 1} of {repeats}")
            start = time.perf_counter()
            done = run(training_step, ranks=ranks, stream=False)
            times.append(time.perf_counter() - start)
            right = right and _right(done.values)
            dirty.append([value["Private_Dirty"] for value in done.values])
            shared.append([value["Pss"] for value in done.values])
        taken = spread(times)
        yield Row(metric="round_trip", value=taken.value, unit="s", low=taken.low, high=taken.high, ok=right, **here)
        for metric, found in (("private_dirty", dirty), ("proportional_set_size", shared)):
            if any(value is None for row in found for value in row):
                yield Row(metric=metric, value=None, unit="B", ok=right, **here)
                continue
            total = spread(sum(row) for row in found)
            yield Row(metric=metric, value=total.value, unit="B", low=total.low, high=total.high, ok=right, **here)


def training_step(comm) -> dict:
    """One step on this rank's own data: loss before and after, and this process's memory in bytes while all ranks live."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64)
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    after = (model(x) - x).pow(2).mean()
    comm.barrier()
    memory = _memory()
    comm.barrier()
    return {"before": float(loss), "after": float(after), **memory}


def _right(values: list[dict]) -> bool:
    """A step down the gradient lowers the loss on the data it was computed from, and ranks draw different data."""
    return all(value["after"] < value["before"] for value in values) and len({value["before"] for value in values}) == len(values)


def _memory() -> dict:
    """Private dirty memory and proportional set size of this process in bytes; None where the system does not say (not Linux)."""
    found = {"Private_Dirty": None, "Pss": None}
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return found


def _first_of_fresh(ranks: int) -> dict:
    """Seconds of the first run in an interpreter that has run nothing, and of that whole process, imports included."""
    code = (
        "import json, time; from fourwalls.bench.launch import training_step, _right; from fourwalls.ranks.run import run\n"
        "if __name__ == '__main__':\n"
        f"    start = time.perf_counter(); done = run(training_step, ranks={ranks}, stream=False)\n"
        "    print(json.dumps({'round_trip': time.perf_counter() - start, 'right': _right(done.values)}))\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"the first launch failed: {done.stderr.strip()[-2000:]}")
    return {"process": seconds, **json.loads(done.stdout.splitlines()[-1])}
