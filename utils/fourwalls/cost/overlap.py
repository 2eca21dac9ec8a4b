"""How much communication hides behind backward: buckets of gradients leave one after the other while backward still computes.

Backward makes gradients at a steady pace. A bucket leaves when it is full and the wire is free; the last one is full exactly when
backward ends, so it can never hide. Small buckets pay alpha too often, large ones start late, and the best lies between.

    ready_k = B (bytes up to and with bucket k) / G,   start_k = max(ready_k, end_(k-1)),   end_k = start_k + T(b_k)
    exposed = end_last - B,      T(b) = rounds alpha + factor b / bandwidth      (ring: rounds 2 (n-1), factor 2 (n-1)/n)

Reference: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .collectives import MODELS

__all__ = ["BucketTimes", "Overlap", "best_bucket", "cut_buckets", "exposed_seconds", "overlap", "smallest_that_keeps_pace"]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket: bytes, and in seconds since backward began: full, on the wire from `start` to `end`."""

    bytes: float
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Overlap:
    """One backward (seconds) and its buckets, in the order in which they leave."""

    backward: float
    buckets: tuple[BucketTimes, ...]

    @property
    def end(self) -> float:
        """When gradients and sums are all there."""
        return max([self.backward, *(b.end for b in self.buckets)])

    @property
    def exposed(self) -> float:
        """Seconds of communication after backward has ended: what the step waits for."""
        return self.end - self.backward

    @property
    def wire(self) -> float:
        """Seconds in which the wire is busy."""
        return sum(b.end - b.start for b in self.buckets)

    @property
    def hidden(self) -> float:
        """Seconds of communication during backward."""
        return self.wire - self.exposed

    @property
    def bytes(self) -> float:
        return sum(b.bytes for b in self.buckets)


def cut_buckets(gradients: float | Sequence[float], bucket_bytes: float) -> list[float]:
    """Bytes of each bucket, first to leave first. ValueError for a size that is not above 0.

    gradients: their bytes in all, cut wherever a bucket is full, the last one holding the rest; or the bytes of each, in the
    order in which backward makes them: then none is cut, and one larger than a bucket gets its own.
    """
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; a number of bytes above 0")
    if isinstance(gradients, (int, float)):
        if not 0 <= gradients < math.inf:
            raise ValueError(f"gradients is {gradients!r}; their bytes, at least 0, or a list of the bytes of each")
        count = max(1, math.ceil(gradients / bucket_bytes))
        return [bucket_bytes] * (count - 1) + [gradients - (count - 1) * bucket_bytes] if gradients else []
    found: list[float] = []
    for nbytes in gradients:
        if not 0 <= nbytes < math.inf:
            raise ValueError(f"a gradient of {nbytes!r} bytes; at least 0")
        if found and found[-1] + nbytes <= bucket_bytes:
            found[-1] += nbytes
        else:
            found.append(nbytes)
    return found


def overlap(
    gradients: float | Sequence[float],
    bucket_bytes: float,
    *,
    backward: float,
    n: int,
    alpha: float,
    bandwidth: float,
    algorithm: str = "ring",
    overlapped: bool = True,
) -> Overlap:
    """When each bucket is full, leaves and is there, on n ranks that all compute alike.

    gradients: as in `cut_buckets`; backward: seconds; alpha: seconds; bandwidth: bytes a second. overlapped False: all buckets
    wait for the end of backward. Raises ValueError for what is out of range, or an all-reduce without a model.
    """
    if not (0 <= backward < math.inf and 0 <= alpha < math.inf and bandwidth > 0):
        raise ValueError(
            f"backward {backward!r} s, alpha {alpha!r} s, bandwidth {bandwidth!r} bytes/s; at least 0, 0 and above 0"
        )
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n is {n!r}; a whole number of ranks from 1 on")
    if ("all_reduce", algorithm) not in MODELS:
        known = ", ".join(a for c, a in MODELS if c == "all_reduce")
        raise ValueError(f"no model of an all-reduce by {algorithm!r}; known: {known}")
    sizes = cut_buckets(gradients, bucket_bytes)
    rounds, factor, _ = MODELS["all_reduce", algorithm](n) if n > 1 else (0, 0.0, 0.0)
    whole, made, free, found = sum(sizes) or 1.0, 0.0, 0.0, []
    for k, nbytes in enumerate(sizes):
        made += nbytes
        ready = backward if k == len(sizes) - 1 or not overlapped else backward * made / whole
        start = max(ready, free)
        free = start + rounds * alpha + factor * nbytes / bandwidth
        found.append(BucketTimes(nbytes, ready, start, free))
    return Overlap(backward, tuple(found))


def exposed_seconds(gradients: float, bucket_bytes: float, *, backward: float, n: int, alpha: float, bandwidth: float) -> float:
    """`overlap(...).exposed` of a ring in one formula, for curves: full buckets all keep pace, or all queue behind the first."""
    if n < 2 or not gradients:
        return 0.0
    rounds, factor, _ = MODELS["all_reduce", "ring"](n)
    full = max(1, math.ceil(gradients / bucket_bytes)) - 1  # buckets before the last one
    each = rounds * alpha + factor * bucket_bytes / bandwidth
    fill = backward * bucket_bytes / gradients
    free = max(fill + full * each, full * fill + each) if full else 0.0
    rest = gradients - full * bucket_bytes
    return max(backward, free) + rounds * alpha + factor * rest / bandwidth - backward


def best_bucket(gradients: float | Sequence[float], sizes: Iterable[float], **wire) -> tuple[float, Overlap]:
    """(the size of least exposed time among `sizes`, its Overlap); of equal ones the smallest. `wire`: as in `overlap`."""
    found = [(size, overlap(gradients, size, **wire)) for size in sorted(sizes)]
    if not found:
        raise ValueError("sizes is empty; give at least one size of a bucket")
    return min(found, key=lambda pair: pair[1].exposed)


def smallest_that_keeps_pace(gradients: float, *, backward: float, n: int, alpha: float, bandwidth: float) -> float:
    """The smallest bucket (bytes) that the ring sends no slower than backward fills it; inf where the wire is too slow for any.

    rounds alpha + factor b / bandwidth <= b B / G. From there on only what is full last is exposed, and smaller is better.
    """
    if n < 2 or not gradients:
        return 0.0
    rounds, factor, _ = MODELS["all_reduce", "ring"](n)
    gain = backward / gradients - factor / bandwidth  # seconds a byte that backward is slower than the wire
    return rounds * alpha / gain if gain > 0 else math.inf
