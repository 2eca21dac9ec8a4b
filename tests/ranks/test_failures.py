"""From symptoms to one error: which failure is shown, and in which words."""

import pickle
import signal

import pytest

from fourwalls.ranks import failures
from fourwalls.ranks.comm import Call, CommError, MismatchError, RankError
from fourwalls.ranks.failures import Failure, choose, frames_of, interrupted, to_error


def failed(rank, when, kind="ValueError", lost=False, line=1):
    return Failure(rank, kind, "text", (("/home/me/x.py", line, "f"),), when, lost)


def test_the_earliest_real_failure_is_shown_not_its_symptoms():
    table = {0: failed(0, 1, "PeerLost", lost=True), 1: failed(1, 5), 2: failed(2, 3, "KeyError")}
    assert choose(table, 3).rank == 2


def test_of_equal_failures_the_lowest_rank_is_shown_whichever_came_first():
    table = {3: failed(3, 1), 1: failed(1, 2), 0: failed(0, 9, line=7)}
    assert choose(table, 4).rank == 1


def test_broken_connections_are_shown_if_nothing_else_is_known():
    table = {1: failed(1, 2, "PeerLost", lost=True), 0: failed(0, 3, "PeerLost", lost=True)}
    error = to_error(choose(table, 2), table, 2)
    assert type(error) is RankError and error.rank in (0, 1) and error.kind == "PeerLost"


def test_errors_hold_all_ranks_texts_the_shown_one_first():
    table = {0: failed(0, 5, "KeyError"), 2: failed(2, 1)}
    error = to_error(choose(table, 3), table, 3)
    assert list(error.errors) == [2, 0]
    assert str(error) == "rank 2 of 3 raised ValueError: text\n  at /home/me/x.py:1 in f"


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (9, "SIGKILL", "killed by SIGKILL (out of memory?)"),
        (11, "SIGSEGV", "crash in compiled code"),
        (6, "SIGABRT", "same sizes"),
        (15, "SIGTERM", "was killed by SIGTERM"),
        (3 << 8, "exit", "exit code 3"),
        (0, "exit", "exit code 0"),
    ],
)
def test_ends_of_processes_are_decoded(status, kind, words):
    failure = Failure.ended(1, status, b"", None)
    assert failure.kind == kind
    assert words in str(to_error(failure, {1: failure}, 2))


def test_a_real_time_signal_has_no_name_and_does_no_harm():
    assert "signal 40" in Failure.ended(0, 40, b"", None).message


def test_a16_out_of_memory_is_said_only_when_the_kernel_says_so(monkeypatch):
    monkeypatch.setattr(failures, "oom_kills", lambda: 4)
    assert "has just killed" in Failure.ended(0, signal.SIGKILL, b"", 3).message
    assert "out of memory?" in Failure.ended(0, signal.SIGKILL, b"", 4).message


def test_frames_of_a_dump_are_the_learners_innermost_first():
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/usr/lib/site-packages/torch/x.py", line 5 in g\n  File "/home/me/lab.py", line 3 in inner\n'
        '  File "/home/me/lab.py", line 9 in program\n'
    )
    assert frames_of(dump) == [("/home/me/lab.py", 3, "inner"), ("/home/me/lab.py", 9, "program")]
    assert frames_of("") == []
    assert frames_of(dump + dump.replace("line 3", "line 4"))[0][1] == 4  # the latest dump counts


def test_an_error_of_the_transport_keeps_its_kind_and_its_calls():
    calls = (Call(0, "send", 1, shape=(3,), dtype="float32"), Call(1, "recv", 0, shape=(5,), dtype="float32"))
    report = {"rank": 1, "kind": "MismatchError", "message": "raw", "frames": [], "when": 0, "lost": False, "text": ""}
    failure = Failure.reported({**report, "error": ("MismatchError", {"rank": 1, "about": "differ", "calls": calls})})
    error = to_error(failure, {1: failure}, 2)
    assert type(error) is MismatchError and error.rank == 1 and "the shapes differ, (3,) and (5,)" in str(error)


def test_an_interrupt_says_where_each_rank_was():
    error = interrupted(3, {1: Call(1, "recv", 0)}, {0: failed(0, 1, "KeyboardInterrupt").frames})
    assert isinstance(error, KeyboardInterrupt)
    rows = str(error).splitlines()[1:]
    assert [row.split(":")[0] for row in rows] == ["  rank 0", "  rank 1", "  rank 2"]
    assert "/home/me/x.py:1 in f" in rows[0] and "recv(from 0), waiting" in rows[1] and "unknown" in rows[2]


def test_errors_survive_a_pickle():
    error = RankError("text", rank=2, kind="SIGKILL", errors={2: "x"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank, again.kind, again.errors) == (RankError, "text", 2, "SIGKILL", {2: "x"})
    assert pickle.loads(pickle.dumps(CommError("a", rank=1))).rank == 1
