"""Work beside the program: a second clock on simulated ranks, a second thread on real ones; waits and errors come out then."""

import time

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.ranks.beside import Beside

WIRE = uniform(1e-6, 1e9)  # 1 us and 1 ns a byte


def swap(comm, x):
    other = 1 - comm.rank
    x.copy_(comm.exchange(x.clone(), other, torch.empty_like(x), other))


def two_swaps(comm, work=3e-6, spoil=None):
    lane = comm.split(0, comm.rank)
    beside, x, y = Beside(lane), torch.full((250,), comm.rank), torch.full((250,), 10 * comm.rank)  # 2000 bytes each
    began = comm.clock()
    first = beside.start("first", lambda: swap(lane, x) if spoil is None else spoil(comm.rank))
    with comm.compute("work", seconds=work, kind="backward"):
        pass
    second = beside.start("second", lambda: swap(lane, y))
    assert beside.join() == [first, second] and beside.join() == []
    other = 1 - comm.rank
    assert bool((x == other).all()) and bool((y == 10 * other).all())
    return [t - began for job in (first, second) for t in (job.given, job.begin, job.end)], comm.clock() - began


@pytest.mark.parametrize(("work", "second"), [(3, (3, 3, 6)), (1, (1, 3, 6)), (9, (9, 9, 12))])
def test_the_second_clock_is_a_second_threads(work, second):
    """A swap of 2000 bytes takes 3 us; jobs run one at a time, from when they are given."""
    us = 10**6
    run = fw.simulate(two_swaps, work * 1e-6, ranks=2, cluster=WIRE)
    times, end = run.values[0]
    assert times == [0, 0, 3 * us, *(t * us for t in second)] and end == second[2] * us
    waits = [e for e in run.trace.where(rank=0, kind="wait") if e.name.startswith("wait for")]
    assert [(e.name, e.end - e.start) for e in waits] == [("wait for second", (second[2] - work) * us)]
    marks = [e.name for e in run.trace.where(rank=0, kind="mark")]
    assert marks == ["first begins", "first is there", "second begins", "second is there"]
    assert run.trace == fw.simulate(two_swaps, work * 1e-6, ranks=2, cluster=WIRE).trace


def test_a_real_second_thread_works_meanwhile():
    run = fw.run(two_swaps, 0.3, ranks=2, stream=False)
    (work,) = run.trace.where(rank=0, kind="backward")
    ends = {e.name: e.start for e in run.trace.where(rank=0, kind="mark")}
    assert work.start < ends["first is there"] < work.end < ends["second begins"]
    assert not [e for e in run.trace.where(rank=0, kind="wait") if work.start < e.start < work.end]


def fails(rank):
    if rank == 1:
        raise ValueError("spoilt")
    time.sleep(0.05)


@pytest.mark.parametrize("start", [fw.run, fw.simulate])
def test_an_error_comes_out_at_the_join(start):
    with pytest.raises(fw.RankError, match="rank 1 of 2 raised ValueError: spoilt"):
        start(two_swaps, 0.0, fails, ranks=2, stream=False)


def waits_for_ever(comm):
    lane = comm.split(0, comm.rank)
    beside = Beside(lane)
    if comm.rank == 0:
        beside.start("lost", lambda: lane.recv(torch.empty(3), 1))
        beside.join()


@pytest.mark.parametrize("start", [fw.run, fw.simulate])
def test_a_wait_of_the_second_thread_is_the_ranks_once_it_is_joined(start):
    """... so a deadlock is found at once, and not when the run's limit is reached."""
    with pytest.raises(fw.DeadlockError, match="waiting for rank 1, which returned without making the matching call"):
        start(waits_for_ever, ranks=2, stream=False)


def counts_bytes(comm):
    """Control traffic of one thread must not take the other's events away."""
    lane = comm.split(0, comm.rank)
    beside = Beside(lane)
    for _ in range(20):
        beside.start("swap", lambda: swap(lane, torch.zeros(10)))
    for _ in range(10):
        comm.split(0, comm.rank)
    beside.join()
    return True


def test_silent_messages_of_one_thread_leave_the_others_in_the_trace():
    run = fw.run(counts_bytes, ranks=2, stream=False)
    assert sum(e.bytes == 40 for e in run.trace.where(rank=0, kind="send")) == 20
