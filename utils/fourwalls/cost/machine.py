"""The reader's own machine, as a Device and a Link: measured, not read from a datasheet.

The peak is what a large matrix product reaches, the bandwidth what copying a block larger than the caches reaches, and alpha
and beta are fitted to timed messages of several sizes. Such numbers differ from run to run, and runs that use them are not
deterministic.

    alpha, beta  minimise  sum ((alpha + S beta - t) / t)^2

Reference: Hockney 1994 for the straight line; relative errors, so that small messages count as much as large ones.
"""

import os
import platform
import time
from collections.abc import Iterable

from .hardware import Cluster, Device, Link

__all__ = ["allowed_cores", "fit_link", "measure_device", "this_machine"]


def allowed_cores() -> int:
    """Cores that this process may use, by affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _best(work, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first call warms up


def measure_device(*, size: int = 1024, copy_bytes: int = 2**27, repeats: int = 3) -> Device:
    """Time an n x n matrix product in float32 and float64 and a large copy, with numpy. Takes well under a second.

    The best of `repeats`: the machine's ability, not its mood. A copy reads and writes, so it moves twice its size.
    """
    import numpy as np
    import psutil

    rates = {}
    for dtype in ("float32", "float64"):
        a = np.full((size, size), 0.5, dtype)
        out = np.empty_like(a)
        rates[dtype] = 2 * size**3 / _best(lambda a=a, out=out: np.matmul(a, a, out=out), repeats)
    source, target = np.ones(copy_bytes // 8), np.zeros(copy_bytes // 8)
    bandwidth = 2 * source.nbytes / _best(lambda: np.copyto(target, source), repeats)
    memory = psutil.virtual_memory().total
    name = f"this machine ({platform.machine()}, {allowed_cores()} cores)"
    return Device(
        name,
        rates,
        memory,
        bandwidth,
        source=f"measured: numpy product of {size} x {size}, copy of {copy_bytes} B, best of {repeats}",
    )


def fit_link(points: Iterable[tuple[int, float]], *, name: str = "calibrated") -> Link:
    """Alpha and bandwidth from timed messages (bytes, seconds), by least squares of relative errors. Needs two sizes that
    differ.
    """
    points = [(float(n), float(t)) for n, t in points]
    if len({n for n, _ in points}) < 2 or any(t <= 0 or n < 0 for n, t in points):
        raise ValueError(f"{points!r}: give (bytes, seconds) of at least two different sizes, each longer than 0 s")
    # weights 1/t^2; normal equations of alpha * 1 + beta * n = t
    s0 = sum(1 / t**2 for n, t in points)
    s1 = sum(n / t**2 for n, t in points)
    s2 = sum(n * n / t**2 for n, t in points)
    r0, r1 = sum(1 / t for n, t in points), sum(n / t for n, t in points)
    det = s0 * s2 - s1 * s1
    alpha, beta = (r0 * s2 - r1 * s1) / det, (s0 * r1 - s1 * r0) / det
    if alpha < 0:  # noise: a line through the origin fits best among the allowed ones
        alpha, beta = 0.0, r1 / s2
    if beta <= 0:
        raise ValueError(f"{points!r}: larger messages are not slower, so no bandwidth can be fitted; time larger sizes")
    return Link(
        name, alpha, 1 / beta, f"fitted to {len(points)} timed messages of {int(min(points)[0])} to {int(max(points)[0])} B"
    )


def this_machine(link: Link, *, device: Device | None = None) -> Cluster:
    """A one-node cluster of this machine: `device` (measured now if None) and a link, for instance from `fit_link`."""
    return Cluster("this machine", device or measure_device(), link, link, source="measured")
