"""One training step by data parallelism beside torch's DistributedDataParallel: same model, same bucket size, alternating pairs.

Six MLPs of 512-2048-512 in a row, about 50 MB of gradients, batch 64: a step is forget the gradients, forward, backward, sum. A
second run, not timed against anybody, says from the Trace when the first all-reduce began, and how long the step stood still for
communication after backward: the exposed part.

    time_ratio = median over pairs of (our step / torch's step),       exposed = time in synchronise(), the slowest rank's

Reference: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from ..cost.collectives import collective_cost
from ..cost.hardware import Link
from ..nn.mlp import MLP
from ..parallel.buckets import plan_buckets
from ..parallel.data import DataParallel
from ..ranks.run import pool
from ..ranks.trace import PS, Trace
from .beside import Work, measure, time_row
from .record import Row
from .timer import spread

__all__ = ["describe", "job", "overlapping", "rows", "traced"]

describe = "data-parallel step beside torch DDP, by bucket size and all-reduce: time, exposed communication, overlap"
PEER = "torch.nn.parallel.DistributedDataParallel"
BUCKETS = (2**20, 25 * 2**20, 1000 * 2**20)
ALL_REDUCES = ("native", "ring")
BLOCKS, SIZES, BATCH = 6, (512, 2048, 512), 64
STEPS = 5  # of the run that is traced


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x bucket sizes (`options.sizes`) x all-reduces (`options.algorithms`; "native" is torch's own)."""
    algorithms = options.algorithms or ALL_REDUCES
    for algorithm in algorithms:
        if algorithm != "native":
            get_algorithm("all_reduce", algorithm)  # refuse a wrong name before anything starts
    for ranks in options.ranks or (2,):
        with pool(ranks=ranks) as open_ranks:
            for bucket in options.sizes or BUCKETS:
                for algorithm in algorithms:
                    say(f"data-parallel {algorithm}, {ranks} ranks, buckets of {bucket} B")
                    run = open_ranks.run(measure, job, algorithm, bucket, options.pairs, checks=False, stream=False)
                    seen = open_ranks.run(traced, algorithm, bucket, checks=False, stream=False)
                    case = {"ranks": ranks, "bucket_bytes": bucket, "algorithm": algorithm, "batch": BATCH, "dtype": "float32"}
                    yield from _rows_of(case, run, seen)


def model_of(device) -> torch.nn.Sequential:
    """The six MLPs; the same weights on every rank."""
    return torch.nn.Sequential(*(MLP(SIZES, seed=k, device=device) for k in range(BLOCKS)))


def job(comm, algorithm: str, bucket_bytes: int) -> Work:
    """A step of ours and a step of torch's, each on a model of its own with equal weights and on this rank's batch."""
    from torch.nn.parallel import DistributedDataParallel

    mine, its = model_of(comm.device), model_of(comm.device)
    x = torch.randn(BATCH, SIZES[0], generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
    dp = DataParallel(mine, comm, bucket_bytes=bucket_bytes, all_reduce=algorithm)
    ddp = DistributedDataParallel(its, bucket_cap_mb=bucket_bytes / 2**20)

    def ours():
        mine.zero_grad()
        dp(x).square().mean().backward()
        dp.synchronise()

    def theirs():
        its.zero_grad()
        ddp(x).square().mean().backward()

    def wrong():
        ours()
        theirs()
        return sum(_apart(p.grad, q.grad) for p, q in zip(mine.parameters(), its.parameters(), strict=True))

    return Work(ours, theirs, wrong)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Elements in which two float32 means of the same gradients differ by more than rounding: another order, another division."""
    allowed = 8 * torch.finfo(ours.dtype).eps * torch.maximum(ours.abs(), theirs.abs()).max()
    return int((~((ours - theirs).abs() <= allowed)).sum())


def traced(comm, algorithm: str, bucket_bytes: int) -> list[dict]:
    """STEPS steps with the Trace's words around them: seconds exposed, of the whole step, and of all sums, by step."""
    model, found = model_of(comm.device), []
    x = torch.randn(BATCH, SIZES[0], generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
    dp = DataParallel(model, comm, bucket_bytes=bucket_bytes, all_reduce=algorithm)
    for step in range(STEPS + 1):
        model.zero_grad()
        comm.native.barrier()
        began = comm.clock()
        with comm.compute("forward", kind="forward", microbatch=step):
            loss = dp(x).square().mean()
        with comm.compute("backward", kind="backward", microbatch=step):
            loss.backward()
        dp.synchronise()
        summing = sum(job.end - job.begin for job in dp.jobs) / PS
        found.append({"step": (comm.clock() - began) / PS, "exposed": dp.exposed, "summing": summing})
    return found[1:]  # the first holds start-up


def overlapping(trace: Trace, rank: int) -> list[bool]:
    """For each backward of `rank` in the Trace: did the first bucket begin before it ended?"""
    begins = [e.start for e in trace if e.rank == rank and e.kind == "mark" and e.name == "bucket 0 begins"]
    backwards = sorted((e.start, e.end) for e in trace if e.rank == rank and e.kind == "backward")
    return [any(start < begin < end for begin in begins) for start, end in backwards]


def _rows_of(case: dict, run, seen) -> Iterator[Row]:
    first = time_row("data-parallel", case, run, peer=PEER)
    yield first
    right, here = first.ok, {"benchmark": first.benchmark, "case": case, "machine": first.machine}
    for metric in ("exposed", "summing"):
        figure = spread(max(of_rank[k][metric] for of_rank in seen.values) for k in range(STEPS))
        yield Row(metric=metric, value=figure.value, unit="s", low=figure.low, high=figure.high, ok=right, **here)
    share = spread(max(of_rank[k]["exposed"] / of_rank[k]["step"] for of_rank in seen.values) for k in range(STEPS))
    yield Row(metric="exposed_share", value=share.value, unit="", low=share.low, high=share.high, ok=right, **here)
    early = all(all(overlapping(seen.trace, rank)) for rank in range(case["ranks"]))
    several = case["bucket_bytes"] < _gradient_bytes() // 2  # with a single bucket there is nothing to begin early
    yield Row(metric="first_sum_before_backward_ends", value=int(early), unit="", ok=early or not several, **here)
    if case["algorithm"] == "ring":
        sent, formula = _bytes_of_a_step(case, seen.trace)
        yield Row(metric="bytes_sent", value=sent, unit="B", peer="formula: 2 (n-1)/n of each bucket", ok=sent == formula, **here)


def _gradient_bytes() -> int:
    return 4 * BLOCKS * sum(a * b + b for a, b in zip(SIZES[:-1], SIZES[1:], strict=True))


def _bytes_of_a_step(case: dict, trace: Trace) -> tuple[int, int]:
    """What rank 0 sent a step after the model was wrapped, and what the formula says."""
    buckets = plan_buckets(model_of("meta").named_parameters(), case["bucket_bytes"])
    link, n = Link("any", 0.0, 1.0), case["ranks"]
    formula = sum(collective_cost("all_reduce", "ring", n, b.numel, link).bytes_sent[0] for b in buckets)
    first = min(e.start for e in trace if e.rank == 0 and e.kind == "forward")
    sent = sum(e.bytes for e in trace if e.rank == 0 and e.kind == "send" and e.start >= first)
    return sent // (STEPS + 1), formula
