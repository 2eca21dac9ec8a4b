"""Alpha and beta of this machine, fitted to timed messages, and the simulator's forecast beside the real time.

All ranks exchange with their neighbours at once, as in a ring, because ranks that share cores and memory are slower together than
one pair alone; a message of S bytes then takes alpha + S beta. Adding is timed in the same way. A model is worth what it
predicts: the same ring is timed for real and simulated on the fitted cluster, and both stand side by side.

    t(S) = alpha + S beta,  least squares of relative errors;   error = simulated / measured - 1

Reference: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import ring
from ..cost.hardware import Cluster, Device
from ..cost.machine import fit_link
from ..ranks.run import pool, simulate
from .record import Row
from .timer import Spread, repeats_for, spread, time_call

__all__ = ["calibrate", "describe", "rows"]

describe = "alpha and beta of this machine, and a simulated ring beside the real one"
MESSAGES = tuple(2**k for k in range(10, 24, 2)) + (2**24,)  # 1 KiB to 16 MiB
SIZES = (4 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for each number of ranks: alpha, bandwidth, speed of additions, worst misfit, and ring times simulated / measured."""
    for ranks in options.ranks or (2, 4):
        with pool(ranks=ranks) as open_ranks:
            say(f"calibrate, {ranks} ranks: messages")
            cluster, points = calibrate(open_ranks, repeats=options.pairs)
            link, case = cluster.intra, {"ranks": ranks}
            worst = max(abs(link.seconds(size) / taken.value - 1) for size, taken in points)
            for metric, value, unit in (
                ("alpha", link.alpha, "s"),
                ("bandwidth", link.bandwidth / 1e9, "GB/s"),
                ("addition_traffic", cluster.device.memory_bandwidth / 1e9, "GB/s"),
                ("worst_misfit", 100 * worst, "%"),
            ):
                yield Row(benchmark="calibrate", case=case, metric=metric, value=value, unit=unit)
            for nbytes in options.sizes or SIZES:
                say(f"calibrate, {ranks} ranks: ring of {nbytes} B")
                yield _beside(open_ranks, cluster, ranks, nbytes, options.pairs)


def calibrate(open_ranks, *, repeats: int = 15) -> tuple[Cluster, list[tuple[int, Spread]]]:
    """(cluster fitted to what the ranks of an open pool measure, [(bytes, seconds a message)]). Checks are off while timing."""
    run = open_ranks.run(exchange_times, list(MESSAGES), repeats, checks=False, stream=False)
    points = [(size, _slowest([value["exchange"][k] for value in run.values])) for k, size in enumerate(MESSAGES)]
    adding = _slowest([value["adding"] for value in run.values])
    link = fit_link([(size, taken.value) for size, taken in points], name=f"this machine, {len(run.values)} ranks at once")
    traffic = 3 * ring.SEGMENT_BYTES / adding.value  # two reads and a write
    device = Device("adding here", {"float32": 1e18}, 2**34, traffic, source="timed additions of one segment")
    return Cluster("this machine", device, link, link, source="calibrated"), points


def exchange_times(comm, sizes: list[int], repeats: int) -> dict:
    """On each rank: seconds of `repeats` exchanges with both neighbours for each size, and of adding one ring segment."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found = []
    for size in sizes:
        x, buf = torch.zeros(size // 4), torch.zeros(size // 4)
        found.append(_times(comm, lambda x=x, buf=buf: comm.exchange(x, right, buf, left), repeats))
    count = max(2, 2**25 // ring.SEGMENT_BYTES)  # a whole tensor is added up, segment by segment: its memory is not in a cache
    mine = torch.zeros(count, ring.SEGMENT_BYTES // 4)
    arrived = torch.zeros(ring.SEGMENT_BYTES // 4)
    adding = _times(comm, lambda: [torch.add(piece, arrived, out=piece) for piece in mine], repeats)
    return {"exchange": found, "adding": [seconds / count for seconds in adding]}


def ring_times(comm, numel: int, repeats: int) -> dict:
    """On each rank: seconds of `repeats` ring all-reduces in place, and whether the last sum was exact."""
    x = torch.zeros(numel)
    times = _times(comm, lambda: ring.all_reduce(comm, x, out=x), repeats)
    x.fill_(comm.rank)
    ring.all_reduce(comm, x, out=x)
    return {"times": times, "right": bool((x == comm.size * (comm.size - 1) // 2).all())}


def _beside(open_ranks, cluster, ranks, nbytes, repeats) -> Row:
    real = open_ranks.run(ring_times, nbytes // 4, repeats, checks=False, stream=False)
    modelled = simulate(ring_once, nbytes // 4, ranks=ranks, cluster=cluster, checks=False)
    measured, makespan = _slowest([value["times"] for value in real.values]), modelled.makespan
    return Row(
        benchmark="calibrate",
        case={"ranks": ranks, "bytes": nbytes // 4 * 4, "algorithm": "ring"},
        metric="simulated_time",
        value=makespan,
        unit="s",
        pairs=repeats,
        peer=f"measured ({real.backend}), {measured.value:.3g} s",
        time_ratio=makespan / measured.value,
        time_ratio_low=makespan / measured.high,
        time_ratio_high=makespan / measured.low,
        source="modelled",
        ok=all(value["right"] for value in real.values) and all(modelled.values),
    )


def ring_once(comm, numel: int) -> bool:
    """One ring all-reduce of rank numbers; whether the sum is exact."""
    return bool((ring.all_reduce(comm, torch.full((numel,), float(comm.rank))) == comm.size * (comm.size - 1) // 2).all())


def _times(comm, work, repeats: int) -> list[float]:
    """Seconds a call, `repeats` figures, all ranks starting together."""
    count = repeats_for(comm, time_call(work, warmup=1, repeats=3).rest.value)
    figures = []
    for _ in range(repeats):
        comm.barrier()
        timing = time_call(lambda: [work() for _ in range(count)], warmup=0, repeats=1)
        figures.append(timing.rest.value / count)
    return figures


def _slowest(by_rank: list[list[float]]) -> Spread:
    """The spread of the slowest rank's time, figure by figure."""
    return spread(max(times) for times in zip(*by_rank, strict=True))
