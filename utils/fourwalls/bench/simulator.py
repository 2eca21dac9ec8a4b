"""How fast hundreds of ranks run in one process: a ring all-reduce on 256 simulated ranks, checks and Trace on.

A message is counted once, when its send meets its receive. The blocking ring waits for each message before it begins the next;
with receives posted ahead a rank goes on as long as it can, and the simulator changes ranks less often. Both must take exactly
the virtual time that the formula gives, twice the same. Messages are small, as in any benchmark of a message rate: what counts is
what the simulator does for one, not what memory takes to copy it.

    virtual time = 2 (n - 1) (alpha + S/n beta),   to the picosecond

Reference: Patarasuk and Yuan 2009; cost/collectives.py.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch

from ..collectives import ring
from ..cost.collectives import collective_cost
from ..cost.hardware import uniform
from ..ranks.run import simulate
from .record import Row
from .timer import spread

__all__ = ["describe", "rows"]

describe = "ring all-reduce on 256 simulated ranks: messages a second, exact virtual time, peak memory"
RINGS = {"blocking": ring.all_reduce_blocking, "posted ahead": ring.all_reduce}
MESSAGE_BYTES = 64
ALPHA, BANDWIDTH = 2e-6, 25e9  # a link of about today's InfiniBand: any would do


def rows(options, say: Callable[[str], None] = lambda text: None, *, repeats: int = 5) -> Iterator[Row]:
    """Rows for each number of ranks (default 256) and size (default 64 bytes a chunk): rate, virtual time, repeatability,
    memory.
    """
    for ranks in options.ranks or (256,):
        for nbytes in options.sizes or (ranks * MESSAGE_BYTES,):
            numel = max(1, nbytes // 4 // ranks) * ranks  # n divides S
            for name, function in RINGS.items():
                say(f"simulator, {ranks} ranks, {name}")
                yield from _measure(name, function, ranks, numel, repeats)
    yield Row(benchmark="simulator", case={}, metric="peak_memory", value=_peak_bytes(), unit="B")


def program(comm, function, numel):
    """One all-reduce of rank numbers; gives back whether every element is exact."""
    x = torch.full((numel,), float(comm.rank))
    return bool((function(comm, x) == comm.size * (comm.size - 1) / 2).all())


def _measure(name, function, ranks, numel, repeats) -> Iterator[Row]:
    cluster = uniform(ALPHA, BANDWIDTH)
    expected = collective_cost("all_reduce", "ring", ranks, numel, cluster)
    case = {"ranks": ranks, "bytes": numel * 4, "ring": name, "checks": True}
    rates, cpu, digests, right = [], [], set(), True
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        run = simulate(program, function, numel, ranks=ranks, cluster=cluster)
        seconds, seconds_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        messages = sum(e.kind == "recv" for e in run.trace)  # one for each send that met its receive
        right = right and all(run.values) and messages == sum(expected.messages_sent)
        rates.append(messages / seconds)
        cpu.append(messages / seconds_cpu)
        digests.add(hash(tuple(run.trace)))  # 650 thousand events are too many to keep
        virtual = run.trace.makespan_ps
        del run
    same = len(digests) == 1
    here = {"benchmark": "simulator", "case": case}
    rate, of_cpu = spread(rates), spread(cpu)
    yield Row(metric="rate", value=rate.value, unit="messages/s", low=rate.low, high=rate.high, ok=right, **here)
    yield Row(metric="rate_cpu", value=of_cpu.value, unit="messages/CPU s", low=of_cpu.low, high=of_cpu.high, ok=right, **here)
    exact = virtual == expected.picoseconds
    yield Row(
        metric="virtual_time",
        value=virtual / 1e12,
        unit="s",
        peer=f"formula: {expected.formula}",
        time_ratio=virtual / expected.picoseconds if expected.picoseconds else 1.0,
        source="modelled",
        ok=exact,
        **here,
    )
    yield Row(metric="virtual_time_error", value=virtual - expected.picoseconds, unit="ps", source="modelled", ok=exact, **here)
    yield Row(metric="twice_the_same", value=int(same), unit="", source="modelled", ok=same, **here)


def _peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
