"""Two ranks' views of one memory, in one process: who finds whose line, and what the supervisor reads."""

import mmap

import pytest
import torch

from fourwalls.ranks import book as lines
from fourwalls.ranks.book import SLOTS, STATEMENTS, Book, book_bytes, read_text, write_text
from fourwalls.ranks.comm import call_site


@pytest.fixture
def books():
    memory = mmap.mmap(-1, book_bytes(3))
    found = [Book(memory, 3, r) for r in range(3)] + [Book(memory, 3)]
    yield found
    for book in found:
        book._view.release()
    memory.close()


def test_the_second_finds_the_first_and_both_are_answered(books):
    a, b, _, supervisor = books
    slot, other = a.post(True, 1, 1, 0, 0, b"send line")
    assert other is None and not supervisor.answered(0, slot)
    there, other = b.post(False, 0, 1, 0, 0, b"recv line")
    assert other == b"send line"
    assert supervisor.answered(0, slot) and supervisor.answered(1, there)


@pytest.mark.parametrize(
    "different",
    [dict(peer=2), dict(context=3), dict(tag=9), dict(n=1), dict(sending=True)],
    ids=["sender", "communicator", "tag", "count", "side"],
)
def test_lines_that_differ_in_anything_do_not_meet(books, different):
    a, b, *_ = books
    a.post(True, 1, 1, 0, 0, b"")
    key = dict(sending=False, peer=0, context=1, tag=0, n=0) | different
    assert b.post(*key.values(), b"")[1] is None


def test_many_lines_meet_each_its_own_whatever_the_order(books):
    a, b, *_ = books
    for n in range(200):
        a.post(True, 1, 1, n % 7, n // 7, b"%d" % n)
    for n in reversed(range(200)):
        assert b.post(False, 0, 1, n % 7, n // 7, b"")[1] == b"%d" % n


def test_a_key_is_not_found_across_two_lines(books):
    """The end of one key and the start of the next can read like a third one."""
    a, b, *_ = books
    a.post(True, 1, 1, 0, 0, b"")
    a.post(True, 1, 258, 0, 1, b"")
    assert b.post(True, 0, 257, 0, 65536, b"")[1] is None


def test_a_released_line_is_gone_and_its_place_is_used_again(books):
    a, b, *_ = books
    slot, _ = a.post(True, 1, 1, 0, 0, b"first")
    a.release(slot)
    assert b.post(False, 0, 1, 0, 0, b"")[1] is None
    again, _ = a.post(True, 1, 1, 0, 1, b"second")
    assert again == slot
    assert b.post(False, 0, 1, 0, 1, b"")[1] == b"second"


def test_a_new_line_in_an_old_place_is_not_answered(books):
    a, b, _, supervisor = books
    slot, _ = a.post(True, 1, 1, 0, 0, b"")
    b.post(False, 0, 1, 0, 0, b"")
    a.release(slot)
    again, _ = a.post(True, 1, 1, 0, 1, b"")
    assert again == slot and not supervisor.answered(0, again)


def test_more_lines_than_there_are_go_unchecked(books):
    a = books[0]
    slots = [a.post(True, 1, 1, 0, n, b"")[0] for n in range(SLOTS + 2)]
    assert sorted(slots[:SLOTS]) == list(range(SLOTS)) and slots[SLOTS:] == [-1, -1]
    a.release(-1)
    assert a.post(True, 1, 1, 0, 0, b"")[0] == -1


def test_the_supervisor_reads_calls_and_states(books):
    a, b, _, supervisor = books
    a.post(True, 1, 1, 3, 0, b"")
    slot, _ = a.post(False, 2, 1, 4, 0, write_text("irecv", "float32 (2, 3)", call_site()))
    a.say(lines.WAITING, 77, slot)
    status = supervisor.status(0)
    assert (status.changes, status.since, status.state, status.unsure, status.slot) == (1, 77, lines.WAITING, 0, slot)
    call = supervisor.call(0, slot)
    assert (call.rank, call.op, call.peer, call.tag, call.shape, call.dtype) == (0, "irecv", 2, 4, (2, 3), "float32")
    assert call.file == __file__[-240:] and call.function == "test_the_supervisor_reads_calls_and_states"
    assert [c.tag for c in supervisor.unanswered(0)] == [3, 4]
    b.post(False, 0, 1, 3, 0, b"")
    assert [c.tag for c in supervisor.unanswered(0)] == [4]
    a.say(lines.RUNNING, 80)
    assert supervisor.status(0).changes == 2 and supervisor.status(1).changes == 0


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_signatures_come_back(shape):
    call = read_text(write_text("send", f"bfloat16 {shape}", call_site()), 0, 1, 2)
    assert call.shape == shape and call.dtype == "bfloat16"


def test_long_texts_are_cut_and_nothing_else_is_touched(books):
    a, b, *_ = books
    a.post(True, 1, 1, 0, 0, b"x" * 10_000)
    slot, _ = a.post(True, 1, 1, 0, 1, b"next")
    assert len(b.post(False, 0, 1, 0, 0, b"")[1]) == 508
    assert b.post(False, 0, 1, 0, 1, b"")[1] == b"next"


def test_statements_meet_by_communicator_and_number(books):
    a, b, c, _ = books
    assert a.state(1, 0, (0, 1, 2), b"sum") == []
    assert b.state(1, 1, (0, 1, 2), b"later") == []
    assert c.state(3, 0, (0, 2), b"other") == []
    assert b.state(1, 0, (0, 1, 2), b"max") == [(0, b"sum")]
    assert c.state(1, 0, (0, 1, 2), b"max") == [(0, b"sum"), (1, b"max")]
    assert c.state(1, 0, (2,), b"alone") == []


def test_statements_are_forgotten_in_time_and_between_programs(books):
    a, b, *_ = books
    a.state(1, 0, (0, 1), b"old")
    for k in range(1, STATEMENTS + 1):
        a.state(1, k, (0, 1), b"new")
    assert b.state(1, 0, (0, 1), b"") == []
    assert b.state(1, STATEMENTS, (0, 1), b"") == [(0, b"new")]
    a.forget_statements()
    assert b.state(1, STATEMENTS - 1, (0, 1), b"") == []


def test_texts_of_torch_dtypes():
    assert read_text(write_text("send", f"{str(torch.int8).removeprefix('torch.')} (1,)", call_site()), 0, 1, 0).dtype == "int8"
