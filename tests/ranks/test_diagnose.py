"""Who waits for whom, from Calls alone: no process is started here."""

import pytest

from fourwalls.ranks import places
from fourwalls.ranks.comm import Call
from fourwalls.ranks.diagnose import (
    MESSAGE_CHARACTERS,
    SHOWN,
    blamed,
    circle,
    describe,
    explain_changed,
    explain_deadlock,
    explain_failure,
    explain_mismatch,
    explain_straggler,
    explain_unanswered,
    message_of,
    own_frames,
    stuck,
)


def waits(**peers):
    """waits(r0=1, r1=0): rank 0 receives from 1, rank 1 from 0."""
    return {int(name[1:]): Call(int(name[1:]), "recv", peer, shape=(4,), dtype="float32") for name, peer in peers.items()}


def test_a_circle_is_stuck_and_so_is_what_waits_for_it():
    table = waits(r0=1, r1=2, r2=0, r3=0, r4=3)
    assert stuck(table) == {0, 1, 2, 3, 4}
    assert circle(table) == [0, 1, 2]


def test_a_chain_to_a_rank_at_work_is_not_stuck():
    table = waits(r0=1, r1=2, r3=2)
    assert stuck(table) == set()
    assert circle(table) == []
    assert blamed(table) == {2}


def test_a_chain_to_a_finished_rank_is_stuck_and_blames_nobody_at_work():
    table = waits(r0=1, r1=2)
    assert stuck(table, finished={2}) == {0, 1}
    assert blamed(table, finished={2}) == set()


def test_a_circle_beside_ranks_at_work_is_found_alone():
    table = waits(r0=1, r1=0, r2=3)
    assert stuck(table) == {0, 1}
    assert blamed(table) == {3}


def test_a_circle_starts_with_its_smallest_rank_whatever_leads_to_it():
    assert circle(waits(r0=3, r3=2, r2=1, r1=3)) == [1, 3, 2]
    assert circle(waits(r5=5)) == [5]


def test_waits_without_a_peer_are_stuck():
    table = {0: Call(0, "barrier"), 1: Call(1, "recv", 0)}
    assert stuck(table) == {0, 1}
    assert "2 ranks wait" in explain_deadlock(table)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (("send", "send"), "All of them send first"),
        (("isend", "exchange send"), "All of them send first"),
        (("recv", "recv"), "All of them receive first"),
        (("recv", "exchange recv"), "All of them receive first"),
        (("barrier", "recv"), "Rank 0 is in barrier, the rest in something else"),
        (("recv", "split"), "Rank 1 is in split, the rest in something else"),
        (("barrier", "barrier"), "in which order"),
    ],
)
def test_advice_fits_the_circle(ops, words):
    text = explain_deadlock({r: Call(r, op, 1 - r) for r, op in enumerate(ops)})
    assert text.startswith("deadlock: 0 -> 1 -> 0 (each waits for the next)")
    assert words in text
    assert "tag" not in text and "communicator" not in text


def test_tags_that_differ_are_said_to_differ():
    table = {0: Call(0, "send", 1, tag=1), 1: Call(1, "recv", 0, tag=2)}
    assert "Rank 0 sends with tag 1, but rank 1 asks for tag 2" in explain_deadlock(table)
    table = {1: Call(1, "recv", 0, tag=2)}
    begun = [Call(0, "isend", 1, tag=9)]
    assert "Rank 0 sends with tag 9, but rank 1 asks for tag 2" in explain_deadlock(table, {0}, pending=begun)


def test_a_pair_that_fits_speaks_in_two_communicators():
    table = {0: Call(0, "send", 1), 1: Call(1, "recv", 0)}
    assert "different communicators" in explain_deadlock(table)


def test_waiting_for_a_finished_rank_names_it_and_its_part():
    text = explain_deadlock({r: Call(r, "barrier", 1) for r in (0, 2)}, finished={1})
    assert text.splitlines()[0] == "deadlock: waiting for rank 1, which returned without making the matching call"
    assert "skip its part of barrier" in text


def test_of_hundreds_a_few_are_listed():
    table = {r: Call(r, "send", (r + 1) % 300) for r in range(300)}
    text = explain_deadlock(table)
    assert text.count("  rank ") == SHOWN
    assert f"and {300 - SHOWN} more ranks" in text
    assert len(text) < 1500
    assert " -> ... -> 299 -> 0 " in text.splitlines()[0]


def test_a_mismatch_names_both_sides_and_what_differs():
    a, b = Call(0, "send", 1, shape=(2, 3), dtype="float32"), Call(1, "recv", 0, shape=(3, 2), dtype="int64")
    text = explain_mismatch(a, b)
    assert "the dtypes differ, float32 and int64" in text and "the shapes differ, (2, 3) and (3, 2)" in text
    assert "tags" not in text
    assert "rank 0: send(to 1, float32 (2, 3))" in text and "rank 1: recv(from 0, int64 (3, 2))" in text


def test_a_straggler_message_names_one_rank_only():
    text = explain_straggler(2, 3.0, 3, "x.py:4 in program: sleep()")
    assert text.startswith("rank 2 kept the others waiting for more than 3 s; it was at x.py:4 in program: sleep()")
    assert "3 other ranks wait" in text and text.count("rank 2") == 1
    assert "1 other rank waits" in explain_straggler(0, 1, 1)
    assert "no deadlock" in text
    assert "no deadlock" not in explain_straggler(0, 1, 1, native=True)
    stopped = explain_straggler(0, 1, 1, native=True, stopped=True)
    assert "is stopped" in stopped and "collective" not in stopped


def test_calls_without_a_tensor_differ_by_name():
    barrier, split, send = Call(0, "barrier", 1), Call(1, "split", 0), Call(1, "send", 0, shape=(2,), dtype="float32")
    assert "the calls differ, barrier and split\n  rank 0: barrier(from 1)\n" in explain_mismatch(barrier, split)
    assert "the calls differ, send and barrier" in explain_mismatch(barrier, send)


def test_whatever_an_exception_says_is_told_in_bounds():
    class Worse(Exception):
        __notes__ = 5

    noted = ValueError("a")
    noted.add_note("b")
    assert message_of(noted) == "a\nb"
    assert message_of(KeyError("k")) == "key 'k' is not there"
    assert message_of(Worse("x")) == "(its message cannot be shown)"
    assert message_of(ValueError("x" * MESSAGE_CHARACTERS)) == "x" * MESSAGE_CHARACTERS
    assert message_of(ValueError("x" * (MESSAGE_CHARACTERS + 2)))[MESSAGE_CHARACTERS:] == "\n... 2 more characters are left out"


def test_calls_are_described_with_the_learners_line():
    code = test_calls_are_described_with_the_learners_line.__code__
    site = (code, code.co_firstlineno)
    call = Call(3, "isend", 1, tag=7, shape=(2,), dtype="float32", site=site)
    assert describe(call).startswith("rank 3: isend(to 1, tag 7, float32 (2,)) at ")
    assert describe(call).endswith("learners_line: def test_calls_are_described_with_the_learners_line():")
    assert describe(call) in explain_changed(call)
    assert describe(call) in explain_unanswered([call])


def test_frames_of_the_library_of_python_and_of_packages_are_left_out_unless_nothing_else_is_there():
    import json
    import os

    import torch

    own = ("/home/me/lab.py", 3, "f")
    library = (os.path.join(os.path.dirname(places.__file__), "worker.py"), 1, "run")
    python, package = (json.__file__, 2, "loads"), (torch.__file__, 5, "g")
    assert own_frames([library, own, package, python]) == [own]
    assert own_frames([library, package, python]) == [package, python]
    assert own_frames([library]) == []


def test_a_failure_shows_the_learners_error_and_lines():
    def inner():
        raise ValueError("too small")

    with pytest.raises(ValueError) as caught:
        inner()
    text = explain_failure(1, 4, caught.value)
    assert text.startswith("rank 1 of 4 raised ValueError: too small\n  at ")
    assert text.endswith('in inner: raise ValueError("too small")')


def test_places_know_notebook_cells(monkeypatch):
    class Shell:
        class compile:
            _filename_map = {"/tmp/ipykernel_1/2.py": 7}

    class IPython:
        @staticmethod
        def get_ipython():
            return Shell

    monkeypatch.setitem(places.sys.modules, "IPython", IPython)
    entry = (3, None, ["a = 1\n", "  b = 2\n"], "/tmp/ipykernel_1/2.py")
    monkeypatch.setitem(places.linecache.cache, "/tmp/ipykernel_1/2.py", entry)
    assert places.place("/tmp/ipykernel_1/2.py", 2, "f") == "In [7] line 2 in f: b = 2"
    assert places.place("/tmp/ipykernel_1/2.py", 2, "<module>", text=False) == "In [7] line 2"
    assert places.place("/elsewhere/x.py", 5, "g") == "/elsewhere/x.py:5 in g"
    assert places.place("", 0) == "an unknown line"
