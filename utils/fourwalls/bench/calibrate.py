"""Alpha and beta of this machine, fitted to timed messages, and the simulator's forecast beside the real time.

All ranks exchange with their neighbours at once, as in a ring, because ranks that share cores and memory are slower together than
one pair alone; a message of S bytes then takes alpha + S beta. Adding is timed in the same way. A model is worth what it
predicts: every all-reduce is timed for real and simulated on the fitted cluster, and both stand side by side, with the error, be
it large: one alpha and one beta know nothing of caches, nor of ranks that wait for a core. Shared memory sends no message, so
there is nothing to simulate.

    t(S) = alpha + S beta,  least squares of relative errors;   error = simulated / measured - 1

Reference: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import ALGORITHMS, get_algorithm, ring
from ..cost.hardware import Cluster, Device
from ..cost.machine import fit_link
from ..ranks.run import pool, simulate
from .record import Row
from .timer import Spread, repeats_for, spread, time_call

__all__ = ["calibrate", "describe", "rows"]

describe = "alpha and beta of this machine, and each all-reduce simulated beside the real one, with the error"
MESSAGES = tuple(2**k for k in range(10, 24, 2)) + (2**24,)  # 1 KiB to 16 MiB
SIZES = (4 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for each number of ranks: alpha, bandwidth, speed of additions, worst misfit; then for each size and all-reduce the
    time simulated, the time measured, and the error.
    """
    algorithms = options.algorithms or list(ALGORITHMS["all_reduce"])
    for algorithm in algorithms:
        get_algorithm("all_reduce", algorithm)  # refuse a wrong name before anything starts
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
                for algorithm in algorithms:
                    say(f"calibrate, {ranks} ranks: {algorithm} of {nbytes} B")
                    yield from _beside(open_ranks, cluster, algorithm, ranks, nbytes, options.pairs)


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
        x, buf = torch.zeros(size // 4, device=comm.device), torch.zeros(size // 4, device=comm.device)
        found.append(_times(comm, lambda x=x, buf=buf: comm.exchange(x, right, buf, left), repeats))
    count = max(2, 2**25 // ring.SEGMENT_BYTES)  # a whole tensor is added up, segment by segment: its memory is not in a cache
    mine = torch.zeros(count, ring.SEGMENT_BYTES // 4, device=comm.device)
    arrived = torch.zeros(ring.SEGMENT_BYTES // 4, device=comm.device)
    adding = _times(comm, lambda: [torch.add(piece, arrived, out=piece) for piece in mine], repeats)
    return {"exchange": found, "adding": [seconds / count for seconds in adding]}


def reduce_times(comm, algorithm: str, numel: int, repeats: int) -> dict:
    """On each rank: seconds of `repeats` all-reduces in place, and whether the last sum was exact."""
    all_reduce, x = get_algorithm("all_reduce", algorithm), torch.zeros(numel, device=comm.device)
    times = _times(comm, lambda: all_reduce(comm, x, out=x), repeats)
    x.fill_(comm.rank)
    all_reduce(comm, x, out=x)
    return {"times": times, "right": bool((x == comm.size * (comm.size - 1) // 2).all())}


def reduce_once(comm, algorithm: str, numel: int) -> bool:
    """One all-reduce of rank numbers; whether the sum is exact."""
    total = get_algorithm("all_reduce", algorithm)(comm, torch.full((numel,), float(comm.rank)))
    return bool((total == comm.size * (comm.size - 1) // 2).all())


def _beside(open_ranks, cluster, algorithm, ranks, nbytes, repeats) -> Iterator[Row]:
    case = {"ranks": ranks, "bytes": nbytes // 4 * 4, "algorithm": algorithm}
    real = open_ranks.run(reduce_times, algorithm, nbytes // 4, repeats, checks=False, stream=False)
    measured = _slowest([value["times"] for value in real.values])
    here = {"benchmark": "calibrate", "case": case, "pairs": repeats, "machine": {"backend": real.backend}}
    right = all(value["right"] for value in real.values)
    modelled, error = None, None
    if algorithm != "shared_memory":
        simulated = simulate(reduce_once, algorithm, nbytes // 4, ranks=ranks, cluster=cluster, checks=False)
        modelled, right = simulated.makespan, right and all(simulated.values)
        error = [100 * (modelled / taken - 1) for taken in (measured.value, measured.high, measured.low)]
    yield Row(
        metric="simulated_time",
        value=modelled,
        unit="s",
        peer=f"measured ({real.backend}), {measured.value:.3g} s",
        time_ratio=modelled and modelled / measured.value,
        time_ratio_low=modelled and modelled / measured.high,
        time_ratio_high=modelled and modelled / measured.low,
        source="modelled",
        ok=right,
        **here,
    )
    yield Row(metric="measured_time", value=measured.value, unit="s", low=measured.low, high=measured.high, ok=right, **here)
    if error:
        yield Row(metric="error", value=error[0], unit="%", low=error[1], high=error[2], source="modelled", ok=right, **here)


def _times(comm, work, repeats: int) -> list[float]:
    """Seconds a call, `repeats` figures, all ranks starting together."""
    device = str(comm.device)
    count = repeats_for(comm, time_call(work, device=device, warmup=1, repeats=3).rest.value)
    figures = []
    for _ in range(repeats):
        comm.barrier()
        timing = time_call(lambda: [work() for _ in range(count)], device=device, warmup=0, repeats=1)
        figures.append(timing.rest.value / count)
    return figures


def _slowest(by_rank: list[list[float]]) -> Spread:
    """The spread of the slowest rank's time, figure by figure."""
    return spread(max(times) for times in zip(*by_rank, strict=True))
