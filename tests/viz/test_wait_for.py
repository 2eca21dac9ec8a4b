"""The wait-for picture: closed circles are found, told apart from waits that can end, and named in words."""

import pytest
from matplotlib.colors import to_hex

from fourwalls.viz import plot_wait_for, style
from fourwalls.viz.wait_for import circles

RING = {r: ((r + 1) % 4, f"recv(from {(r + 1) % 4})") for r in range(4)}


def patches(ax):
    return [p for p in ax.patches if p.get_gid() == "fw-rank"]


def test_circles_are_found_and_start_at_their_smallest_rank():
    assert circles(RING) == [[0, 1, 2, 3]]
    assert circles({3: (2, ""), 2: (3, ""), 0: (2, ""), 5: (5, "")}) == [[2, 3], [5]]
    assert circles({0: (1, ""), 1: (2, "")}) == []
    assert circles({0: (None, "barrier")}) == []


def test_ranks_on_the_circle_are_red_the_others_not():
    ax = plot_wait_for({0: (1, "send(to 1)"), 1: (0, "send(to 0)"), 2: (0, "recv(from 0)")}, ranks=4)
    red = style.OKABE_ITO["vermillion"].lower()
    assert [to_hex(p.get_facecolor()) == red for p in patches(ax)] == [True, True, False, False]
    assert [p.get_hatch() or "" for p in patches(ax)] == ["", "", "////", ""]
    assert "deadlock: r0 → r1 → r0" in [t.get_text() for t in ax.texts]


def test_one_arrow_with_its_call_for_each_wait(overlaps):
    ax = plot_wait_for(RING)
    calls = [t for t in ax.texts if t.get_gid() == "fw-call"]
    assert [t.get_text() for t in calls] == [call for _, call in RING.values()]
    assert not overlaps(ax.figure, [t for t in ax.texts if t.get_text()])


def test_two_that_wait_for_each_other_have_labels_apart(overlaps):
    ax = plot_wait_for({0: (1, "send(to 1)"), 1: (0, "send(to 0)")})
    assert not overlaps(ax.figure, [t for t in ax.texts if t.get_text()])


def test_the_two_calls_of_a_pair_stand_on_the_two_sides_of_it():
    ax = plot_wait_for({0: (1, "send(to 1)"), 1: (0, "send(to 0)")}, ranks=4)
    calls = [t.get_position() for t in ax.texts if t.get_gid() == "fw-call"]
    beyond = sorted((x + y - 1) / 2**0.5 for x, y in calls)  # rank 0 stands at (0, 1), rank 1 at (1, 0)
    assert beyond[0] < -0.2 and beyond[1] > 0.2, "beside their own arrows, not on the other one"


def test_words_where_nobody_is_stuck():
    assert "nobody waits" in [t.get_text() for t in plot_wait_for({}, ranks=2).texts]
    assert "no closed circle: these waits can end" in [t.get_text() for t in plot_wait_for({0: (1, "recv(from 1)")}).texts]


def test_calls_of_a_deadlock_error_are_read():
    class Call:
        op, peer = "recv", 1

    ax = plot_wait_for({0: Call()}, ranks=2)
    assert "recv(from 1)" in [t.get_text() for t in ax.texts]


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        plot_wait_for({0: (5, "recv(from 5)")}, ranks=2)
