"""The same program under torchrun: one launch that goes well and then ends in a deadlock, one in which a rank fails."""

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fourwalls as fw
from fourwalls.ranks import cluster
from fourwalls.ranks.cluster import StoreBook
from fourwalls.ranks.comm import Call, DeadlockError, RankError
from fourwalls.ranks.machine import seed_of, under_torchrun
from fourwalls.ranks.messages import PeerLost

SCRIPT = """
import os, sys
sys.path.insert(0, {utils!r})
import torch
import fourwalls as fw

def ring(comm, x):
    got = torch.empty_like(x)
    comm.exchange(x + comm.rank, (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
    pair = comm.split(0)
    pair.agree((("collective", "test"), ("value", 1)))
    pair.barrier()
    return got.tolist(), torch.initial_seed()

def ends(comm, how):
    if how == "deadlock":
        comm.send(torch.ones(2), 1 - comm.rank)
    elif comm.rank == 1:
        raise ValueError("rank one")
    else:
        comm.recv(torch.ones(2), 1)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def job(how):
    run = fw.run(ring, fw.per_rank([torch.zeros(2), torch.ones(2)]), timeout=2)
    say(how, "run", os.environ["RANK"], run.ranks, run.values, run.trace.bytes_sent())
    try:
        fw.run(ends, how, timeout=2)
    except BaseException as error:
        say(how, "error", os.environ["RANK"], type(error).__name__, str(error).replace(chr(10), " | "))
        os._exit(0)

for how in ("deadlock", "raise"):
    if os.fork() == 0:
        if how == "raise":  # a job of its own: it may not find what the first one has left in torchrun's store
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": sys.argv[1]}
        try:
            job(how)
        finally:
            os._exit(1)
    os.wait()
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What two jobs said, sorted: one launch, of which each rank forks twice, since importing torch takes longest by far."""
    script = tmp_path_factory.mktemp("launch") / "script.py"
    script.write_text(SCRIPT.replace("{utils!r}", repr(str(Path(fw.__file__).parents[1]))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *address, str(script), port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def lines(how):
        said = [line.partition(" ") for line in done.stdout.splitlines()]
        found = sorted(rest for word, _, rest in said if word == how and rest.startswith(("run", "error")))
        assert len(found) == 4, done.stderr
        return found

    return lines


def test_a_run_and_then_a_deadlock(launched):
    first, second, *runs = launched("deadlock")
    values = [([2.0, 2.0], seed_of(0, 0)), ([0.0, 0.0], seed_of(0, 1))]
    assert [line.split(" ", 2)[2] for line in runs] == [f"2 {values} {2 * 8 + 2 * 2 * 16 // 2}"] * 2
    for line in (first, second):
        assert "DeadlockError deadlock: 0 -> 1 -> 0" in line
        assert "rank 0: send(to 1, float32 (2,)) at" in line and "rank 1: send(to 0, float32 (2,)) at" in line


def test_a_rank_that_fails_is_named_on_the_other_rank_too(launched):
    first, second, *_ = launched("raise")
    assert "error 0 RankError rank 1 of 2 raised ValueError: rank one" in first and "script.py" in first
    assert second == "error 1 ValueError rank one"


def told(store, rank, peer, *, late=True, waited=2.0):
    call = Call(rank, "recv", peer, shape=(2,), dtype="float32")
    store.set(f"wait/{rank}", pickle.dumps((call, late, waited)))
    return PeerLost("lost", rank=peer, call=call, late=late, waited=waited)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(cluster, "TELL_SECONDS", 0.15)
    return torch.distributed.HashStore()


def diagnose(store, error, *, size=3):
    return cluster._diagnose(store, SimpleNamespace(rank=error.call.rank, size=size), error, timeout=2.0)


def test_the_one_that_is_at_work_is_named(store):
    told(store, 1, 2)
    error = diagnose(store, told(store, 0, 1))
    assert (type(error), error.rank, error.kind) == (RankError, 2, "timeout")


def test_one_that_came_only_now_to_a_broken_connection_was_at_work(store):
    """It waits for rank 0, which waited for it: that looks like a circle, and is none."""
    told(store, 1, 0, late=False, waited=0.01)
    error = diagnose(store, told(store, 0, 1), size=2)
    assert (type(error), error.rank) == (RankError, 1)


def test_one_that_had_waited_when_its_connection_broke_is_part_of_the_circle(store):
    told(store, 1, 0, late=True)
    error = diagnose(store, told(store, 0, 1, late=False, waited=1.9), size=2)
    assert type(error) is DeadlockError and set(error.waits) == {0, 1}


def test_a_finished_rank_is_no_straggler(store):
    store.set("over/2", "1")
    error = diagnose(store, told(store, 0, 2))
    assert type(error) is DeadlockError and "waiting for rank 2, which returned" in str(error)


def test_another_ranks_failure_comes_first(store):
    store.set("failure", pickle.dumps((2, "ValueError", "rank 2 of 3 raised ValueError: x")))
    error = diagnose(store, told(store, 0, 2))
    assert (error.rank, error.kind, str(error)) == (2, "ValueError", "rank 2 of 3 raised ValueError: x")


def test_a_broken_connection_with_nothing_behind_it_is_told_as_it_is(store):
    error = told(store, 0, 1, late=False)
    assert diagnose(store, error) is error


def test_calls_meet_in_the_store():
    """The first finds nothing, the second finds the first, and nothing is left."""
    store = torch.distributed.HashStore()
    send, recv = StoreBook(store, 0), StoreBook(store, 1)
    assert send.post(True, 1, 5, 7, 0, b"one") == (-1, None)
    assert send.post(True, 1, 5, 7, 1, b"two") == (-1, None)
    assert recv.post(False, 0, 5, 8, 0, b"other tag") == (-1, None)
    assert recv.post(False, 0, 5, 7, 0, b"mine") == (-1, b"one")
    assert recv.post(False, 0, 5, 7, 1, b"mine") == (-1, b"two")
    assert recv.post(False, 0, 5, 7, 2, b"") == (-1, None)
    assert store.num_keys() == 1


def test_a_plain_process_is_not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not under_torchrun()
