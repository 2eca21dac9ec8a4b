"""What was begun beside the program and never waited for: an error in seconds, on real ranks and in the simulator, by name."""

import threading
import time

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.lanes import in_place
from fourwalls.parallel.zero import zero
from fourwalls.ranks.beside import Beside

SECONDS = 20.0  # far below the run's own limit, far above what a loaded machine needs for two ranks
STARTS = [
    pytest.param(lambda *args: fw.run(*args, ranks=2, timeout=5, limit=SECONDS, stream=False), id="run"),
    pytest.param(lambda *args: fw.simulate(*args, ranks=2, cluster=uniform(1e-6, 1e9), stream=False), id="simulate"),
]


def expect_forgotten(start, *args, match="", rank=0):
    """The run ends soon, with an error that says who forgot what, and where it was begun."""
    began = time.monotonic()
    with pytest.raises(fw.CommError, match="never waited for what it had begun beside its program") as caught:
        start(*args)
    assert time.monotonic() - began < SECONDS
    assert type(caught.value) is fw.CommError and caught.value.rank in ((0, 1) if rank is None else (rank,))
    text = str(caught.value)
    assert f"rank {caught.value.rank} has returned" in text and match in text and "test_forgotten.py:" in text
    return text


def step(comm, forgets=(0, 1), options=None):
    """One step of data parallelism; the ranks in `forgets` leave synchronise() out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    dp = DataParallel(model, comm, bucket_bytes=20_000, **(options or {}))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(comm.rank))
    dp(x).square().mean().backward()
    if comm.rank not in forgets:
        dp.synchronise()
    return model[0].weight.grad.clone()


@pytest.mark.parametrize("start", STARTS)
def test_a_step_without_synchronise_names_the_rank_the_buckets_and_backward(start):
    text = expect_forgotten(start, step, match="6 jobs, the first of them bucket 0", rank=None)
    assert ".backward()" in text and "dp.synchronise()" in text and "and 3 more" in text


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_that_forgets_is_the_one_named(start, who):
    expect_forgotten(start, step, (who,), match="bucket 0", rank=who)


def test_torchs_own_asynchronous_sums_are_begun_too():
    expect_forgotten(STARTS[0].values[0], step, (0, 1), {"all_reduce": "native"}, match="6 jobs", rank=None)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("mode", ["naive", "bucketed"])
def test_modes_that_begin_nothing_early_have_nothing_to_forget(start, mode):
    run = start(step, (0, 1), {"mode": mode})
    assert not torch.equal(*run.values)  # each rank's own gradient


def own_overlap(comm, steps, dropped):
    """A learner's overlap: what it returns must be called in every step."""
    lane = comm.split(0, comm.rank)
    for k in range(steps):
        beside, x = Beside(lane), torch.full((50_000,), float(comm.rank))
        beside.start(f"sum {k}", lambda x=x: ring.all_reduce(lane, x, out=x))
        if k not in dropped:
            beside.join()
    return float(x[0])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dropped", [(2,), (0,)], ids=["last", "first"])
def test_a_lane_that_was_let_go_unjoined_is_found_whichever_step_it_was(start, dropped):
    expect_forgotten(start, own_overlap, 3, dropped, match=f"a job sum {dropped[0]}", rank=None)
    assert start(own_overlap, 3, ()).values == [1.0, 1.0]


def nobody_answers(comm):
    """The second thread waits for ever, and nobody waits for it."""
    lane = comm.split(0, comm.rank)
    if comm.rank == 0:
        Beside(lane).start("lost", lambda: lane.recv(torch.empty(3), 1))


@pytest.mark.parametrize("start", STARTS)
def test_a_forgotten_job_that_can_never_end_is_named_at_once(start):
    expect_forgotten(start, nobody_answers, match="a job lost")


def begins_a_message(comm, answered):
    """The job is waited for, the message that it began is not."""
    lane = comm.split(0, comm.rank)
    beside = Beside(lane)
    if comm.rank == 0:
        beside.start("isend", lambda: lane.isend(torch.ones(30_000), 1))
    elif answered:
        beside.start("recv", lambda: lane.recv(torch.empty(30_000), 0))
    beside.join()


@pytest.mark.parametrize("start", STARTS)
def test_a_message_begun_by_a_joined_job_is_seen_through_or_refused(start):
    with pytest.warns(RuntimeWarning, match="never waited for"):
        start(begins_a_message, True)
    with pytest.raises(fw.CommError, match="begun and never answered"):
        start(begins_a_message, False)


def a_thread_of_its_own(comm, seconds):
    """The program returns while a thread that it made itself still waits for rank 1, which answers after `seconds` or never."""
    lane = comm.split(0, comm.rank)
    if comm.rank == 0:
        threading.Thread(target=lane.recv, args=(torch.empty(4), 1), daemon=True).start()
        time.sleep(0.1)
    elif seconds is not None:
        time.sleep(seconds)
        lane.send(torch.ones(4), 0)
    return comm.rank


def test_returning_while_another_thread_waits_ends_with_the_message_or_by_name():
    run = STARTS[0].values[0]
    with pytest.warns(RuntimeWarning, match="never waited for"):
        assert run(a_thread_of_its_own, 0.5).values == [0, 1]
    began = time.monotonic()
    with pytest.raises(fw.CommError, match="begun and never answered"):
        run(a_thread_of_its_own, None)
    assert time.monotonic() - began < SECONDS


def begins_and_returns(comm):
    if comm.rank == 0:
        comm.isend(torch.ones(4), 1)
    else:
        time.sleep(30)


def test_timeout_holds_while_a_returned_rank_sees_its_messages_through():
    began = time.monotonic()
    with pytest.raises(fw.RankError, match="rank 1 kept the others waiting for more than 1 s"):
        fw.run(begins_and_returns, ranks=2, timeout=1, limit=25, stream=False)
    assert time.monotonic() - began < SECONDS


def sharded(comm, stage):
    """Backward without step(), and at stage 3 a forward that nothing follows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    sharded = zero(model, comm, stage=stage)
    model(torch.randn(4, 16)).square().mean().backward()
    with torch.no_grad():
        model(torch.randn(4, 16))
    return sharded.stage


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_training_waits_for_its_own_jobs_so_there_is_no_false_alarm(start, stage):
    assert start(sharded, stage).values == [stage, stage]


def no_return(comm, x):
    ring.all_reduce(comm, x)


def fills(comm, x, *, out):
    ring.all_reduce(comm, x, out=out)


@pytest.mark.parametrize("mode", ["naive", "bucketed", "overlapped"])
def test_an_all_reduce_without_its_return_is_refused(mode):
    with pytest.raises(fw.RankError, match="your all_reduce returned None; it returns the sum .is a `return` missing"):
        fw.simulate(step, (), {"mode": mode, "all_reduce": no_return}, ranks=2, stream=False)
    first, second = fw.simulate(step, (), {"mode": mode, "all_reduce": fills}, ranks=2, stream=False).values
    assert torch.equal(first, second)


def adds_one(comm, x, *, out):
    out.add_(1)


def test_in_place_takes_the_sum_from_wherever_it_was_put():
    x = torch.ones(3)
    in_place(lambda comm, x: x + 1)(None, x, None)
    in_place(lambda comm, x: x.add_(1))(None, x, None)
    in_place(adds_one)(None, x, None)
    assert x.tolist() == [4.0, 4.0, 4.0]
