"""Faults by world sizes: each ends within 5 s, in one error that names the right rank and line, and leaves nothing."""

import ctypes
import os
import signal
import threading
import time

import psutil
import pytest
import torch

import fourwalls as fw
from fourwalls.ranks import servers
from fourwalls.ranks.comm import CommError, DeadlockError, MismatchError, RankError
from fourwalls.ranks.watch import LOOK_SECONDS

pytestmark = pytest.mark.usefixtures("nothing_left")
SIZES = (2, 4, 8)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The fork server's start belongs to no fault."""
    fw.run(lambda comm: None, ranks=1)


def failing(kind, program, *args, ranks, seconds=5.0, **options):
    """The error of a run, which must come in time."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        fw.run(program, *args, ranks=ranks, **options)
    assert time.monotonic() - began < seconds
    return caught.value


@pytest.mark.parametrize("ranks", SIZES)
def test_raise(ranks):
    def third(x):
        return 1 / x  # the line

    def second(x):
        return third(x)

    def program(comm, bad):
        if comm.rank == bad:
            second(0)
        comm.barrier()

    error = failing(RankError, program, ranks - 1, ranks=ranks, seconds=2)
    assert (error.rank, error.kind) == (ranks - 1, "ZeroDivisionError")
    text = str(error)
    assert text.startswith(f"rank {ranks - 1} of {ranks} raised ZeroDivisionError: division by zero")
    assert "return 1 / x  # the line" in text.splitlines()[-1]
    assert text.count("  at ") == 3
    assert "worker.py" not in text
    assert list(error.errors)[0] == ranks - 1


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("leave", "kind", "words"),
    [
        (lambda: exec("raise SystemExit(0)"), "SystemExit", "raised SystemExit: 0"),
        (lambda: exec("raise KeyboardInterrupt"), "KeyboardInterrupt", "raised KeyboardInterrupt"),
        (lambda: os._exit(0), "exit", "exit code 0"),
        (lambda: os._exit(7), "exit", "exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", "killed by SIGKILL (out of memory?)"),
        (lambda: ctypes.string_at(0), "SIGSEGV", "killed by SIGSEGV"),
        (lambda: os.abort(), "SIGABRT", "killed by SIGABRT"),
    ],
    ids=["SystemExit", "KeyboardInterrupt", "exit0", "exit7", "SIGKILL", "SIGSEGV", "SIGABRT"],
)
def test_a11_a_rank_that_returned_no_value_is_named(ranks, leave, kind, words):
    def program(comm):
        if comm.rank == 1:
            leave()
        comm.barrier()

    error = failing(RankError, program, ranks=ranks)
    assert (error.rank, error.kind) == (1, kind)
    assert words in str(error)
    if kind in ("SIGSEGV", "SIGABRT"):
        assert "test_faults.py" in str(error)


@pytest.mark.parametrize("ranks", SIZES)
def test_endless_loop_then_interrupt(ranks):
    def program(comm):
        if comm.rank == 0:
            while True:
                pass
        comm.recv(torch.zeros(1), 0)

    threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
    error = failing(KeyboardInterrupt, program, ranks=ranks)
    rows = str(error).splitlines()
    assert "rank 0: at" in rows[1] and ("while True" in rows[1] or "pass" in rows[1])
    assert len(rows) == ranks + 1
    assert all(f"rank {r}: recv(from 0, float32 (1,))" in rows[r + 1] for r in range(1, ranks))


@pytest.mark.parametrize("ranks", SIZES)
def test_deadlock_of_a_ring_is_named_within_two_seconds(ranks):
    def program(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.send(torch.ones(4), right)
        comm.recv(torch.ones(4), left)

    error = failing(DeadlockError, program, ranks=ranks, seconds=2)
    assert " -> ".join(map(str, [*range(ranks), 0])) in str(error)
    assert all(f"rank {r}: send(to {(r + 1) % ranks}, float32 (4,)) at " in str(error) for r in range(ranks))
    assert "comm.send(torch.ones(4), right)" in str(error)
    assert "exchange" in str(error) and "isend" in str(error)
    assert {r: c.peer for r, c in error.waits.items()} == {r: (r + 1) % ranks for r in range(ranks)}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_mismatch(ranks, kind):
    def program(comm, kind):
        if comm.rank == comm.size - 1:
            comm.send(torch.ones(3), 0)
        if comm.rank == 0:
            comm.recv(torch.ones(5) if kind == "shape" else torch.ones(3, dtype=torch.int32), comm.size - 1)
        comm.barrier()

    error = failing(MismatchError, program, kind, ranks=ranks, seconds=2)
    text = str(error)
    assert f"rank {ranks - 1}: send(to 0, float32 (3,)) at" in text
    assert f"rank 0: recv(from {ranks - 1}, {'float32 (5,)' if kind == 'shape' else 'int32 (3,)'}) at" in text
    assert f"the {kind}s differ" in text
    assert error.rank in (0, ranks - 1)


@pytest.mark.parametrize("ranks", SIZES)
def test_mismatch_of_tags(ranks):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(3), 1, tag=1)
        if comm.rank == 1:
            comm.recv(torch.ones(3), 0, tag=2)

    text = str(failing(DeadlockError, program, ranks=ranks, seconds=2))
    assert "Rank 0 sends with tag 1, but rank 1 asks for tag 2" in text
    assert "send(to 1, tag 1, float32 (3,))" in text and "recv(from 0, tag 2, float32 (3,))" in text


@pytest.mark.parametrize("ranks", SIZES)
def test_missing_call(ranks):
    def program(comm):
        if comm.rank != 1:
            comm.barrier()

    error = failing(DeadlockError, program, ranks=ranks, seconds=2.5)
    assert "waiting for rank 1, which returned without making the matching call" in str(error)
    assert "rank 0: barrier(from " in str(error) and "comm.barrier()" in str(error)
    assert 1 not in error.waits


@pytest.mark.parametrize("ranks", SIZES)
def test_a10_sigterm_ignored(ranks):
    def program(comm):
        if comm.rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: [None for _ in iter(int, 1)])
            while True:
                pass
        if comm.rank == 1:
            time.sleep(0.2)
            raise ValueError("rank one has failed")

    error = failing(RankError, program, ranks=ranks, seconds=3)
    assert error.rank == 1
    assert "rank one has failed" in str(error)


def test_a13_a_failure_before_the_barrier_ends_the_run_within_two_seconds():
    def program(comm):
        if comm.rank == 2:
            raise ValueError("before the barrier")
        comm.barrier()

    assert failing(RankError, program, ranks=4, seconds=2).rank == 2


def test_a14_interrupt_twice_quickly():
    def program(comm):
        while True:
            try:
                while True:
                    pass
            except KeyboardInterrupt:
                pass  # a rank that does not want to go

    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    failing(KeyboardInterrupt, program, ranks=2)
    assert time.monotonic() - began < 1.5


def test_a14_interrupt_once_of_a_rank_that_does_not_want_to_go():
    def program(comm):
        while True:
            try:
                while True:
                    pass
            except KeyboardInterrupt:
                pass

    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert isinstance(failing(KeyboardInterrupt, program, ranks=2, seconds=3), KeyboardInterrupt)


@pytest.mark.parametrize("numel", [1, 2_000_000])
def test_b07_both_send_first(numel):
    def program(comm, numel):
        x = torch.ones(numel)
        comm.send(x, 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)

    assert "0 -> 1 -> 0" in str(failing(DeadlockError, program, numel, ranks=2, seconds=2))


@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3)])
def test_b23_a_receive_longer_or_shorter_than_the_message(sent, expected):
    def program(comm, sent, expected):
        if comm.rank == 0:
            comm.send(torch.arange(sent), 1)
        else:
            comm.recv(torch.full((expected,), -1), 0)

    text = str(failing(MismatchError, program, sent, expected, ranks=2, seconds=2))
    assert f"({sent},)" in text and f"({expected},)" in text


def test_b02_same_number_of_elements_but_another_shape():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(2, 3), 1)
        else:
            comm.recv(torch.ones(3, 2), 0)

    assert "(2, 3) and (3, 2)" in str(failing(MismatchError, program, ranks=2))


def test_b05_everybody_waits_for_one_and_only_that_one_is_named():
    def program(comm):
        if comm.rank == 2:
            time.sleep(20)
        comm.barrier()

    error = failing(RankError, program, ranks=4, timeout=0.8)
    assert (error.rank, error.kind) == (2, "timeout")
    assert "rank 2" in str(error) and "time.sleep(20)" in str(error)
    assert not any(f"rank {r}" in str(error) for r in (0, 1, 3))


def test_b05_of_torchs_own_barrier_too_names_only_the_late_one():
    def program(comm):
        if comm.rank == 1:
            time.sleep(20)
        comm.native.barrier()

    error = failing(RankError, program, ranks=3, timeout=0.5)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "time.sleep(20)" in str(error)
    assert not any(f"rank {r}" in str(error) for r in (0, 2))


def test_b13_one_rank_in_a_collective_and_the_others_in_a_barrier():
    def program(comm):
        if comm.rank == 0:
            comm.native.all_reduce(torch.ones(2))
        comm.barrier()

    error = failing(RankError, program, ranks=3, timeout=0.8)
    assert error.rank == 0 and "comm.native.all_reduce(torch.ones(2))" in str(error)


def test_a_straggler_is_no_deadlock():
    def program(comm):
        if comm.rank == 0:
            end = time.monotonic() + 6 * LOOK_SECONDS  # a deadlock is named at the second look
            while time.monotonic() < end:
                pass
        comm.barrier()
        return comm.rank

    assert fw.run(program, ranks=2, stream=False).values == [0, 1]


def test_two_of_three_deadlock_while_the_third_works():
    def program(comm):
        if comm.rank == 2:
            time.sleep(20)
        comm.recv(torch.zeros(1), 1 - comm.rank)

    error = failing(DeadlockError, program, ranks=3, seconds=2)
    assert set(error.waits) == {0, 1}
    assert "receive first" in str(error)


def test_b16_a_rank_killed_in_the_middle_of_a_ring_releases_the_others():
    def program(comm):
        x, y = torch.ones(1000), torch.empty(1000)
        for step in range(10**6):
            if comm.rank == 1 and step == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.exchange(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)

    error = failing(RankError, program, ranks=4)
    assert (error.rank, error.kind) == (1, "SIGKILL")


def test_limit_ends_the_whole_run():
    def program(comm):
        while True:
            time.sleep(0.05)  # at work for ever

    error = failing(RankError, program, ranks=2, limit=0.5)
    assert error.kind == "limit"
    assert "rank 0 was at" in str(error) and "rank 1 was at" in str(error) and "at work for ever" in str(error)


def test_a_buffer_changed_before_its_wait_is_named():
    def program(comm, way):
        x = torch.arange(6.0)
        if comm.rank == 0:
            request = comm.isend(x, 1)
            if way == "torch":
                x[2] = 7
            elif way == "data":
                x.data.add_(1)
            else:
                x.numpy()[0] = 5
            request.wait()
        else:
            time.sleep(0.1)
            comm.recv(x, 0)

    for way in ("torch", "data", "numpy"):
        error = failing(MismatchError, program, way, ranks=2)
        assert error.rank == 0
        assert "isend(to 1, float32 (6,))" in str(error) and "comm.isend(x, 1)" in str(error)


def test_a_write_to_a_neighbouring_view_is_no_change():
    def program(comm):
        x = torch.arange(6.0)
        if comm.rank == 0:
            request = comm.isend(x[:3], 1)
            x[3:] = 0
            request.wait()
        else:
            comm.recv(x[:3], 0)
        return x

    assert fw.run(program, ranks=2).values[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_two_messages_in_the_same_memory_are_refused():
    """A ring with one buffer: what is sent on depends on whether the receive came first."""

    def program(comm, first):
        x, right, left = torch.full((4,), float(comm.rank)), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if first == "irecv":
            request = comm.irecv(x[1:], left)
            comm.send(x[:3], right)
        else:
            request = comm.isend(x, right)
            comm.recv(x, left)
        request.wait()

    for first in ("irecv", "isend"):
        error = failing(MismatchError, program, first, ranks=2)
        assert "the same memory at the same time" in str(error)
        assert f"{first}(" in str(error) and "request = comm." in str(error)


def test_an_exchange_in_place_sends_what_was_there_before():
    def program(comm):
        x = torch.full((300_000,), float(comm.rank))
        comm.exchange(x, (comm.rank + 1) % comm.size, x, (comm.rank - 1) % comm.size)
        return x.unique().tolist()

    assert fw.run(program, ranks=3).values == [[2], [0], [1]]


def test_a_message_that_nobody_receives():
    def program(comm):
        if comm.rank == 0:
            comm.isend(torch.ones(2), 1)

    error = failing(CommError, program, ranks=2, seconds=2)
    assert "never answered" in str(error) and "rank 0: isend(to 1, float32 (2,))" in str(error)


def test_a_request_that_is_never_waited_for_warns_and_arrives():
    def program(comm):
        x = torch.full((2,), float(comm.rank))
        if comm.rank == 0:
            comm.isend(x, 1)
        else:
            comm.recv(x, 0)
        return x

    with pytest.warns(RuntimeWarning, match=r"never waited for:\n  rank 0: isend\(to 1, float32 \(2,\)\)"):
        run = fw.run(program, ranks=2)
    assert run.values[1].tolist() == [0, 0]


def test_what_a_rank_leaves_behind_is_ended():
    """A child in its own session, whose parent has gone, is ended with the run."""

    words = f"import time; time.sleep(60.{os.getpid()})"  # of this test alone

    def program(comm):
        import subprocess
        import sys

        sleeper = f"[sys.executable, '-c', {words!r}]"
        code = f"import subprocess, sys; subprocess.Popen({sleeper}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], check=True)
        return os.getpid()

    with fw.pool(ranks=2) as other:  # also while other ranks of this process live on
        other.run(lambda comm: None)
        fw.run(program, ranks=2)
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and words in p.info["cmdline"]]


def test_input_is_refused_at_once():
    for read in (lambda comm: input(), lambda comm: __import__("sys").stdin.read()):
        assert "keyboard" in str(failing(RankError, read, ranks=2))


def test_a_result_that_does_not_pickle():
    def program(comm):
        return {"fine": 1, "bad": [0, (x for x in ())]} if comm.rank == 1 else None

    error = failing(RankError, program, ranks=2)
    assert error.rank == 1
    assert "['bad'][1] (generator)" in str(error)


def test_the_same_error_on_all_ranks_is_told_once():
    def program(comm):
        raise ValueError("all of them")

    error = failing(RankError, program, ranks=4)
    assert error.rank == 0
    assert "(and the same on ranks 1, 2, 3)" in str(error)


def test_a_fork_server_that_is_gone_is_replaced():
    """The one that imports nothing, since it starts at once; the next test does so with the one that has imported torch."""
    gone = servers.Server.current(warm=False)
    gone.wait_ready()
    assert servers.Server.current(warm=False) is gone
    (process,) = [p for p in psutil.Process().children() if p.pid == gone.process.pid]
    process.kill()
    process.wait()
    fresh = servers.Server.current(warm=False)
    fresh.wait_ready()
    assert fresh is not gone and fresh.usable() and fresh.process.pid != process.pid


def test_a_fork_server_that_dies_during_a_run_ends_it_and_is_replaced():
    def program(comm):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(20)

    error = failing(RankError, program, ranks=2)
    assert "fork server" in str(error)
    assert error.outputs == ["", ""]
    assert fw.run(lambda comm: comm.rank, ranks=2).values == [0, 1]


def test_an_end_of_file_of_the_program_is_its_own():
    def program(comm):
        if comm.rank == 1:
            raise EOFError("my file")
        comm.barrier()

    error = failing(RankError, program, ranks=3)
    assert (error.rank, error.kind) == (1, "EOFError") and "raised EOFError: my file" in str(error)


@pytest.mark.parametrize("first", ["barrier", "split"])
def test_a_barrier_that_meets_a_split_is_a_mismatch_of_calls(first):
    def program(comm, first):
        if (comm.rank == 0) == (first == "barrier"):
            comm.barrier()  # line A
        else:
            comm.split(0)  # line B

    text = str(failing(MismatchError, program, first, ranks=2))
    assert "the calls differ, " in text
    assert f"rank 0: {first}(" in text and f"rank 1: {'split' if first == 'barrier' else 'barrier'}(" in text
    assert "comm.barrier()  # line A" in text and "comm.split(0)  # line B" in text


def test_splits_and_barriers_in_one_order_meet():
    def program(comm):
        comm.barrier()
        pair = comm.split(comm.rank % 2)
        pair.barrier()
        comm.barrier()
        return pair.split(0).size

    assert fw.run(program, ranks=5).values == [3, 2, 3, 2, 3]


def test_a_rank_inside_torchs_own_collective_is_not_said_to_be_at_work():
    def program(comm):
        if comm.rank == 1:
            comm.native.barrier()
        else:
            comm.recv(torch.zeros(1), 1)

    error = failing(RankError, program, ranks=2, timeout=1)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "inside torch's own collective" in str(error) and "comm.native.barrier()" in str(error)
    assert "no deadlock" not in str(error)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system does not tell")
@pytest.mark.parametrize(("options", "kind"), [({"timeout": 0.5}, "timeout"), ({"limit": 0.5}, "limit")])
def test_a_stopped_process_is_said_to_be_stopped(options, kind):
    def program(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier()

    error = failing(RankError, program, ranks=2, **options)
    assert error.kind == kind and "rank 1" in str(error) and "process is stopped" in str(error)
    assert "no deadlock" not in str(error) and str(error).count("stopped") == 1


class _Silent(Exception):
    def __str__(self):
        raise SystemExit(3)


@pytest.mark.parametrize("run", [fw.run, fw.simulate])
def test_an_exception_that_cannot_say_what_it_is(run):
    def program(comm):
        if comm.rank == 1:
            raise _Silent
        comm.barrier()

    with pytest.raises(RankError) as caught:
        run(program, ranks=2)
    assert "rank 1 of 2 raised _Silent: (its message cannot be shown)" in str(caught.value)


def test_a_long_message_is_cut():
    def program(comm):
        raise ValueError("x" * 10**6)

    text = str(failing(RankError, program, ranks=1))
    assert 64 * 1024 < len(text) < 66 * 1024 and "934,464 more characters are left out" in text
