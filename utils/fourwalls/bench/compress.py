"""Compressed all-reduces on this machine: bytes, time beside a plain float32 ring, error, and the wire on which each would pay.

Fewer bytes are not less time: rounding, picking and factoring cost passes over the gradient. Each scheme is timed in alternating
pairs with the float32 ring of `collectives`, and once more without any wire (messages replaced by copies), which is what it
computes. A scheme gains on wires slower than its break-even bandwidth, where seconds saved on the wire are seconds of computing.

    break-even bandwidth = (bytes of float32 - bytes of the scheme) / seconds that the scheme computes

Reference: Agarwal et al., "On the utility of gradient compression in distributed training systems", MLSys 2022.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from ..parallel.compress import SCHEMES
from ..parallel.compress.feedback import ring_bytes
from ..ranks.run import pool
from .record import Row
from .timer import alternate, repeats_for, spread, time_call, time_ratio

__all__ = ["describe", "measure", "rows"]

describe = "compressed all-reduces beside float32: bytes, time, error, and on which wire each pays"
SIZES = (2**20, 16 * 2**20)
PEER = "all_reduce of float32 (ring)"


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x sizes x schemes: time, bytes (counted; ok only if the formula's), error, computing, break-even.

    `options.algorithms` chooses among SCHEMES. Raises ValueError for a name that is none, before anything starts.
    """
    wanted = options.algorithms or list(SCHEMES)
    unknown = [name for name in wanted if name not in SCHEMES]
    if unknown:
        raise ValueError(f"no scheme {unknown[0]!r}; there are {', '.join(SCHEMES)}")
    for ranks in options.ranks or (2, 4):
        with pool(ranks=ranks) as open_ranks:
            for nbytes in options.sizes or SIZES:
                side = max(1, round((nbytes // 4) ** 0.5))
                for name in wanted:
                    say(f"compress {name}, {ranks} ranks, {nbytes} B")
                    counted = open_ranks.run(once, name, side, stream=False)
                    run = open_ranks.run(measure, name, side, options.pairs, checks=False, stream=False)
                    yield from _rows_of(name, ranks, side, counted, run)


def gradient(comm, side: int) -> torch.Tensor:
    """Two strong directions that all ranks share, and noise of each rank's own; equal from run to run."""
    common, own = torch.Generator().manual_seed(17), torch.Generator().manual_seed(18 + comm.rank)
    signal = torch.randn(side, 2, generator=common) @ torch.randn(2, side, generator=common)
    return (signal + 0.3 * torch.randn(side, side, generator=own)).to(comm.device)


def once(comm, name: str, side: int) -> dict:
    """One compressed sum whose bytes the Trace counts; the formula; the error against the float64 sum; equal bits or not."""
    scheme, x = SCHEMES[name](), gradient(comm, side)
    before = comm.clock()
    total = scheme(comm, x)
    after = comm.clock()
    exact = get_algorithm("all_reduce", "ring")(comm, x.double())
    every = get_algorithm("all_gather", "ring")(comm, total)
    return {
        "span": (before, after),
        "formula": scheme.bytes_sent(comm.size, x.shape)[comm.rank],
        "error": float((total.double() - exact).norm() / exact.norm()),
        "same": bool(torch.equal(every, every[:1].expand_as(every))),
    }


def measure(comm, name: str, side: int, pairs: int) -> dict:
    """On each rank, seconds: of the scheme and of the plain ring, in pairs, and of the scheme without a wire."""
    x, plain = gradient(comm, side), gradient(comm, side)
    scheme, ring = SCHEMES[name](), get_algorithm("all_reduce", "ring")
    local = SCHEMES[name](
        all_reduce=lambda comm, x: x.clone(), all_gather=lambda comm, x: x.expand(comm.size, *x.shape).contiguous()
    )

    def compressed():
        scheme(comm, x)

    def float32():
        ring(comm, plain)

    device = str(comm.device)
    repeats = repeats_for(comm, time_call(float32, device=device, warmup=1, repeats=3).rest.value)
    time_call(compressed, device=device, warmup=1, repeats=2)
    ours, theirs = alternate(compressed, float32, pairs, before=comm.native.barrier, device=device, repeats=repeats)
    comm.barrier()
    computing = time_call(lambda: local(comm, x), device=device, warmup=1, repeats=max(5, pairs))
    return {"ours": ours, "theirs": theirs, "computing": computing.rest.value}


def _rows_of(name, ranks, side, counted, run) -> Iterator[Row]:
    slowest = [[max(times) for times in zip(*(v[who] for v in run.values), strict=True)] for who in ("ours", "theirs")]
    taken, ratio = spread(slowest[0]), time_ratio(*slowest)
    sent = [
        sum(
            e.bytes
            for e in counted.trace
            if e.kind == "send" and e.rank == r and v["span"][0] <= e.start and e.end <= v["span"][1]
        )
        for r, v in enumerate(counted.values)
    ]
    right = sent == [v["formula"] for v in counted.values] and all(v["same"] for v in counted.values)
    plain, computing = ring_bytes(ranks, side * side, 4)[0], max(v["computing"] for v in run.values)
    saved = plain - sent[0]
    case = {"ranks": ranks, "bytes": side * side * 4, "scheme": name, "dtype": "float32"}
    here = {"benchmark": "compress", "case": case, "ok": right, "machine": {"backend": run.backend}}
    yield Row(
        metric="time",
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        pairs=len(slowest[0]),
        peer=f"{PEER} ({run.backend})",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        **here,
    )
    yield Row(metric="bytes_sent", value=sent[0], unit="B", **here)
    yield Row(metric="bytes_ratio", value=sent[0] / plain, unit="", **here)
    yield Row(metric="error", value=counted.values[0]["error"], unit="", **here)
    yield Row(metric="computing", value=computing, unit="s", **here)
    yield Row(metric="break_even", value=saved / computing / 1e9 if saved > 0 else None, unit="GB/s", source="modelled", **here)
