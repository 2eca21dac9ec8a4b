"""What the supervisor concludes from the book: written by hand here, with a clock of its own."""

import mmap

import pytest

from fourwalls.ranks import book as lines
from fourwalls.ranks import watch
from fourwalls.ranks.book import Book, book_bytes, write_text
from fourwalls.ranks.comm import call_site
from fourwalls.ranks.watch import LOOK_SECONDS, TELL_SECONDS, Watch


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def perf_counter_ns(self):
        return round(self.now * 1e9)


class Scene:
    """Three ranks, a clock that moves when told, and what was said to the reader."""

    def __init__(self, monkeypatch, ranks=3, timeout=30.0, limit=600.0):
        self.clock, self.said = Clock(), []
        monkeypatch.setattr(watch, "time", self.clock)
        self.memory = mmap.mmap(-1, book_bytes(ranks))
        self.books = [Book(self.memory, ranks, r) for r in range(ranks)]
        self.supervisor = Book(self.memory, ranks)
        self.watch = Watch(self.supervisor, timeout, limit)
        for book in self.books:
            book.say(lines.RUNNING, self.clock.perf_counter_ns())

    def waits(self, rank, peer, *, sending=False, tag=0, state=lines.WAITING, unsure=False):
        book = self.books[rank]
        text = write_text("send" if sending else "recv", "float32 (4,)", call_site())
        slot, _ = book.post(sending, peer, 1, tag, 0, text)
        book.say(state, self.clock.perf_counter_ns(), slot, unsure)

    def look(self, seconds=LOOK_SECONDS, step=0.5):
        """What the watch concludes in so many seconds, looking every `step`."""
        found, until = None, self.clock.now + seconds
        while found is None and self.clock.now < until:
            self.clock.now = min(until, self.clock.now + step)
            found = self.watch.look(set(range(len(self.books))), self.said.append)
        return found


@pytest.fixture
def scene(monkeypatch):
    made = Scene(monkeypatch)
    yield made
    for book in [*made.books, made.supervisor]:
        book._view.release()
    made.memory.close()


def test_a_circle_is_a_deadlock_at_the_second_look_not_before(scene):
    scene.waits(0, 1)
    scene.waits(1, 0)
    assert scene.look() is None
    found = scene.look()
    assert found.kind == "deadlock" and set(found.waits) == {0, 1} and found.rank == 0


def test_looks_come_four_times_a_second(scene):
    scene.waits(0, 1)
    scene.waits(1, 0)
    assert [scene.look(0.05) for _ in range(9)] == [None] * 9


def test_a_rank_that_moves_between_looks_is_not_stuck(scene):
    scene.waits(0, 1)
    scene.waits(1, 0)
    assert scene.look() is None
    for _ in range(4):
        scene.books[0].say(lines.WAITING, scene.clock.perf_counter_ns(), 0)
        assert scene.look() is None


def test_an_answered_wait_is_no_part_of_a_deadlock(scene):
    scene.waits(0, 1, sending=True)
    scene.waits(1, 0)
    assert [scene.look() for _ in range(5)] == [None] * 5


def test_a_wait_for_a_rank_at_work_is_no_deadlock(scene):
    scene.waits(0, 1)
    scene.waits(1, 2)
    assert [scene.look() for _ in range(8)] == [None] * 8


def test_a_rank_that_may_do_more_than_it_says_is_left_alone(scene):
    scene.waits(0, 1, unsure=True)
    scene.waits(1, 0)
    assert [scene.look() for _ in range(8)] == [None] * 8


def test_a_wait_for_a_finished_rank_is_a_deadlock(scene):
    scene.books[1].say(lines.DONE, 0)
    scene.waits(0, 1)
    scene.look()
    found = scene.look()
    assert found.kind == "deadlock" and "waiting for rank 1, which returned" in found.message


def test_a_pending_call_shows_the_tag(scene):
    scene.books[0].post(True, 1, 1, 5, 0, write_text("isend", "float32 (4,)", call_site()))
    scene.waits(0, 1)
    scene.waits(1, 0, tag=6)
    scene.look()
    assert "tag 5" in scene.look().message


def test_settling_ranks_whose_messages_nobody_answers(scene):
    scene.waits(0, 1, sending=True, state=lines.SETTLING)
    scene.books[1].say(lines.DONE, 0)
    assert [scene.look() for _ in range(3)] == [None] * 3  # rank 2 is still at work
    scene.books[2].say(lines.DONE, 0)
    assert scene.look().kind == "unanswered"


def test_a_straggler_ends_the_run_only_after_the_timeout(scene):
    scene.waits(0, 1)
    scene.waits(1, 2)
    while scene.clock.now < 1000 + 29.5:
        assert scene.look(1.0) is None
    found = scene.look(2.0)
    assert (found.kind, found.asks, found.others) == ("timeout", (2,), 2)
    assert len(scene.said) == 5 and "waiting for rank 2 since" in scene.said[0]


def test_the_reader_is_told_from_the_fifth_second_on(scene):
    scene.waits(0, 1)
    scene.look(TELL_SECONDS - 0.1)
    assert scene.said == []
    scene.look(1.0)
    assert len(scene.said) == 1 and scene.said[0].startswith("waiting for rank 1 since 5 s")


def test_a_message_that_does_not_arrive_though_both_have_called(scene):
    scene.waits(0, 1, sending=True)
    scene.waits(1, 0)
    assert scene.look(20) is None
    assert scene.look(11).kind == "stalled"


@pytest.mark.parametrize("what", ["straggler", "message", "limit"])
def test_time_in_which_nobody_ran_is_nobodys_fault(monkeypatch, what):
    """The machine was suspended for a minute, or so busy that even the supervisor did not run: that time does not count."""
    scene = Scene(monkeypatch, limit=45)
    scene.waits(0, 1, sending=True)
    if what == "message":
        scene.waits(1, 0)
    if what == "limit":
        scene.books[0].say(lines.RUNNING, 0)
    kind, seconds = {"straggler": ("timeout", 30), "message": ("stalled", 30), "limit": ("limit", 45)}[what]
    assert scene.look(10) is None
    assert scene.look(60, step=60) is None  # suspended
    assert scene.look(seconds - 11) is None
    assert scene.look(2).kind == kind


def test_the_limit_counts_from_the_start_and_names_who_is_not_done(monkeypatch):
    scene = Scene(monkeypatch, limit=3)
    scene.books[1].say(lines.DONE, 0)
    assert scene.look(2.9) is None
    found = scene.look(0.3)
    assert (found.kind, found.asks) == ("limit", (0, 2))


def test_the_timeout_holds_for_a_rank_that_has_returned_and_sees_its_messages_through(scene):
    scene.books[2].say(lines.DONE, 0)
    scene.waits(0, 1, sending=True, state=lines.SETTLING)
    assert scene.look(29) is None
    found = scene.look(5)
    assert found.kind == "timeout" and found.asks == (1,)


def test_a_message_that_does_not_arrive_after_both_programs_have_returned(scene):
    scene.waits(0, 1, sending=True, state=lines.SETTLING)
    scene.waits(1, 0, state=lines.SETTLING)
    scene.books[2].say(lines.DONE, 0)
    assert scene.look(29) is None
    assert scene.look(5).kind == "stalled"
