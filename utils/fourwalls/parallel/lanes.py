"""Where sums are carried out: at once, beside the program, or by torch's own asynchronous all-reduce. One interface for the
three.

    start(label, x, reduce, index)  ...  join() -> jobs:      afterwards every x that was given is the sum over all ranks

Reference: `ranks.beside`; torch.distributed, `all_reduce(async_op=True)`.
"""

import inspect
import time
from collections.abc import Callable
from functools import partial

import torch

from ..ranks.beside import Beside, Job, begun, mark
from ..ranks.comm import Comm, call_site

__all__ = ["in_place", "make_lane"]


def in_place(all_reduce: Callable) -> Callable:
    """f(comm, x, index): x = the sum over ranks, by a function that returns it, in a new tensor or in x itself.

    One with a parameter `out` is given out=x and may return None; one with a parameter `bucket` is given the bucket's number
    (None for what is no bucket).
    """
    known = inspect.signature(all_reduce).parameters
    takes_out, takes_bucket = "out" in known, "bucket" in known

    def reduce(comm, x, index):
        options = {"out": x} if takes_out else {}
        if takes_bucket:
            options["bucket"] = index
        result = all_reduce(comm, x, **options)
        if result is x or (result is None and takes_out):
            return
        if result is None:
            raise ValueError("your all_reduce returned None; it returns the sum (is a `return` missing?), or fills its `out`")
        if result.shape != x.shape or result.dtype != x.dtype:
            got, wanted = f"{result.dtype} {tuple(result.shape)}", f"{x.dtype} {tuple(x.shape)}"
            raise ValueError(f"all_reduce returned {got} for {wanted}; it returns the sum, in the form of x")
        if result.data_ptr() != x.data_ptr():
            x.copy_(result)

    return reduce


def make_lane(comm: Comm, *, native: bool, beside: bool):
    """The lane for these wishes. Beside the program, messages need a communicator of their own, so every rank must call this."""
    if native:
        return _NativeLane(comm, asynchronous=beside)
    return _BesideLane(comm) if beside and comm.size > 1 else _NowLane(comm)


class _NowLane:
    """Each sum when it is asked for."""

    def __init__(self, comm: Comm):
        self.comm, self.jobs = comm, []

    def start(self, label: str, x: torch.Tensor, reduce: Callable, index: int | None) -> None:
        job = Job(label, lambda: None, self.comm.clock())
        job.begin = job.given
        if self.comm.size > 1:
            reduce(self.comm, x, index)
        job.end = self.comm.clock()
        self.jobs.append(job)

    def join(self) -> list[Job]:
        jobs, self.jobs = self.jobs, []
        return jobs


class _BesideLane:
    def __init__(self, comm: Comm):
        self.comm = comm.split(0, comm.rank)
        self.beside = Beside(self.comm)

    def start(self, label: str, x: torch.Tensor, reduce: Callable, index: int | None) -> None:
        self.beside.start(label, partial(reduce, self.comm, x, index))

    def join(self) -> list[Job]:
        return self.beside.join()


class _NativeLane:
    """torch.distributed's all-reduce. Its messages are in no Trace; where a job begins and ends is marked."""

    def __init__(self, comm: Comm, *, asynchronous: bool):
        self.comm, self.asynchronous, self.jobs = comm, asynchronous, []

    def start(self, label: str, x: torch.Tensor, reduce: Callable, index: int | None) -> None:
        job = Job(label, lambda: None, self.comm.clock(), call_site())
        job.begin = job.given
        mark(self.comm, f"{label} begins", job.begin)
        work = self.comm.native.all_reduce(x, async_op=self.asynchronous)
        if work is not None:
            begun(self.comm)[job] = None
            work.get_future().add_done_callback(partial(_stamp, job, self.comm))
        else:
            job.end = self.comm.clock()
        self.jobs.append((job, work))

    def join(self) -> list[Job]:
        jobs, self.jobs = self.jobs, []
        open_ = begun(self.comm)
        for job, work in jobs:
            open_.pop(job, None)
            if work is not None:
                work.wait()
            while job.end is None:  # the stamp comes from torch's thread, a moment later
                time.sleep(0)
            mark(self.comm, f"{job.label} is there", job.end)
        return [job for job, _ in jobs]


def _stamp(job: Job, comm: Comm, _) -> None:
    job.end = comm.clock()
