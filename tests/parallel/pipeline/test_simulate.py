"""Times, bubbles and live activations of simulated schedules: by hand, by another walk, and as the trials want them."""

import random
import sys

import matplotlib.pyplot as plt
import pytest

from fourwalls import viz
from fourwalls.parallel.pipeline.actions import Joined, needs, parts, placement, read
from fourwalls.parallel.pipeline.catalogue import SCHEDULES, build
from fourwalls.parallel.pipeline.legality import IllegalSchedule
from fourwalls.parallel.pipeline.simulate import Times, simulate
from fourwalls.ranks.trace import PS

from .test_legality import random_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_trial_d05_1f1b_saves_memory_and_no_time(name):
    """A teaching game reports a bubble of 0.0986 for 1F1B against 0.1795 for GPipe, as measured; both are 0.1795."""
    run = simulate(build(name, 8, 32), forward=1, backward=1)
    assert run.makespan == 78
    assert round(run.bubble_of_total, 4) == 0.1795 and run.bubble_of_total == pytest.approx(7 / 39)
    assert run.peak == {"gpipe": 32, "1f1b": 8}[name]
    assert run.peaks == tuple({"gpipe": 32, "1f1b": 8 - i}[name] for i in range(8))


def test_two_bubbles_have_two_names():
    run = simulate(build("1f1b", 4, 8), forward=1, backward=2)
    assert (run.makespan, run.bubble_of_ideal, round(run.bubble_of_total, 4)) == (33, 0.375, 0.2727)
    assert repr(run) == "Simulated(4 ranks, 8 micro-batches, 33 s, bubble 0.2727 of total, 0.3750 of ideal, peak 4)"
    assert viz.bubble_of_total(run.trace) == pytest.approx(run.bubble_of_total)
    assert viz.bubble_of_ideal(run.trace) == pytest.approx(run.bubble_of_ideal)


def test_split_backward_finds_the_27_slots():
    for p, m, slots in ((4, 8, 27), (8, 32, 103)):
        for name in ("fill", "zb-h1"):
            run = simulate(build(name, p, m, limit=p))
            assert (run.makespan, run.peak) == (slots, p)
        assert simulate(build("1f1b", p, m)).makespan > slots


def test_a_slow_link_turns_the_order_of_1f1b_and_gpipe():
    found = {n: simulate(build(n, 4, 8), forward=1, backward=2, link=0.25) for n in ("gpipe", "1f1b", "1f1b-doubled")}
    assert {n: run.makespan for n, run in found.items()} == {"gpipe": 34.5, "1f1b": 37, "1f1b-doubled": 34.5}
    assert {n: run.peak for n, run in found.items()} == {"gpipe": 8, "1f1b": 4, "1f1b-doubled": 7}
    assert found["gpipe"].makespan == (8 + 3) * 3 + 2 * 3 * 0.25


def test_trial_d17_a_slow_stage_is_seen_as_waiting_for_it():
    """p = 4, m = 8, stage 1 twice as slow: waiting for a message and plain idle time are two things, ideal stands beside."""
    times = Times(forward=1, input=1, weight=1).slower(1, 2.0, 4)
    run = simulate(build("1f1b", 4, 8), times)
    even = simulate(build("1f1b", 4, 8))
    waits = [e for e in run.trace if e.kind == "wait"]
    assert run.makespan > even.makespan and all(e.end > e.start for e in waits)
    assert all({e.peer for e in waits if e.rank == r} == {p} for r, p in ((0, 1), (3, 2)))
    assert sum(e.seconds for e in waits if e.rank == 0) == run.waiting(0) == pytest.approx(run.makespan - 24)
    assert run.waiting(1) < run.waiting(0) and run.waiting(1) < run.waiting(2), "the slow stage waits least"
    idle_at_the_end = [run.makespan - row[-1] / PS for row in run.end]
    for rank in range(4):  # work, waits and the idle tail fill the time, and nothing counts twice
        assert run.work[rank] + run.waiting(rank) + idle_at_the_end[rank] == pytest.approx(run.makespan)
        assert run.trace.busy(rank) == pytest.approx(run.work[rank])
    ax = viz.plot_timeline(run.trace, ideal=24.0)
    assert any(line.get_gid() == "fw-ideal" for line in ax.lines)
    assert any("wait" in str(c.get_gid()) for c in ax.collections)
    plt.close(ax.figure)


def another_walk(schedule, times, stages, m):
    """Start and end by repeated relaxation, written without a look at the simulator: quadratic, and plain."""
    seconds, where = times.picoseconds(stages), placement(schedule)
    start = {(r, k): 0 for r, row in enumerate(schedule) for k in range(len(row))}
    end, made = {}, {}
    for r, row in enumerate(schedule):
        for k, cell in enumerate(row):
            for a in parts(cell):
                if a.kind != "W":
                    made["F" if a.kind == "F" else "G", a.stage, a.microbatch] = r, k
    moved = True
    while moved:
        moved = False
        for (r, k), begin in list(start.items()):
            cell = schedule[r][k]
            took = sum(seconds[a.kind][a.stage] for a in parts(cell))
            end[r, k] = begin + (took if not isinstance(cell, Joined) else round(took * times.joined))
            earliest = [end.get((r, k - 1), 0)]
            for a in parts(cell):
                for product, stage, microbatch in needs(a, stages):
                    other = made[product, stage, microbatch]
                    hop = round(times.link * PS) if where[stage] != r else 0
                    earliest.append(end.get(other, 0) + hop)
            if max(earliest) > begin:
                start[r, k], moved = max(earliest), True
    return start, end


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules_against_another_walk(seed):
    rng = random.Random(seed)
    schedule = [[cell for cell in row if cell is not None] for row in random_schedule(seed)]
    stages, m = 1 + max(a.stage for row in schedule for c in row for a in parts(c)), 6
    times = Times(
        forward=[rng.choice((1.0, 2.0, 0.5)) for _ in range(stages)],
        input=rng.choice((1.0, 0.3)),
        weight=[rng.choice((1.0, 0.7)) for _ in range(stages)],
        backward=rng.choice((None, 2.2)),
        link=rng.choice((0.0, 0.25, 3.0)),
        joined=rng.choice((1.0, 0.8)),
    )
    run = simulate(schedule, times)
    start, end = another_walk(schedule, times, stages, m)
    for r, row in enumerate(schedule):
        assert run.start[r] == [start[r, k] for k in range(len(row))]
        assert run.end[r] == [end[r, k] for k in range(len(row))]


def test_live_activations_step_by_step():
    run = simulate("0F0 0F1 0I0 0W0 0B1\n1F0 1F1 1I0 1W0 1B1", after_input=0.25, activation=[4, 8])
    assert [held for _, held in run.live[0]] == [0 + 4, 8, 5, 4, 0]
    assert [(t // PS, held) for t, held in run.live[1]] == [(0, 0.0), (1, 8), (2, 16), (4, 10), (5, 8), (7, 0)]
    assert run.peaks == (8, 16) and run.peak == 16
    events = [(e.start, e.bytes) for e in run.trace if e.kind == "live" and e.rank == 1]
    assert events == run.live[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_taken_is_freed(name):
    run = simulate(build(name, 3, 7), link=0.1, after_input=0.6, forward_only=name == "forward-only")
    for curve in run.live:
        assert [t for t, _ in curve] == sorted({t for t, _ in curve}), "one value at a time"
        if name != "forward-only":
            assert abs(curve[-1][1]) < 1e-9 and min(held for _, held in curve) > -1e-9


def test_the_trace_holds_every_message_once():
    p, m = 4, 6
    run = simulate(build("1f1b", p, m), link=0.5, message_bytes=100)
    assert run.trace.messages_sent() == 2 * (p - 1) * m and run.trace.bytes_sent(0) == 100 * m
    assert all(run.trace.bytes_sent(r) == 200 * m for r in (1, 2))
    sends = sorted((e.name, e.start, e.end, e.peer) for e in run.trace if e.kind == "send")
    recvs = sorted((e.name, e.start, e.end, e.rank) for e in run.trace if e.kind == "recv")
    assert sends == recvs and all(end - start == PS // 2 for _, start, end, _ in sends)
    for schedule in (build("zb-v", p, 8), build("dualpipe-v", p, 8)):  # the turn of the V sends nothing
        assert simulate(schedule, message_bytes=1).trace.messages_sent() == 2 * (2 * p - 2) * 8
        assert simulate(schedule).trace.messages_sent() == 0, "neither bytes nor time: not shown"
    assert run.trace.sources == ("modelled",) and run.trace.makespan == run.makespan
    kinds = {e.name[1]: e.kind for e in simulate(build("zb-h1", 2, 2)).trace if e.lane == "compute" and e.kind != "wait"}
    assert kinds == {"F": "forward", "I": "input", "W": "weight"}


def test_joined_cells_take_their_share():
    text = "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
    joined = "0F0 1F0 0F1+1B0 1F1+0B0 1B1 0B1"
    assert simulate(text).makespan == simulate(joined).makespan == 12
    assert simulate(joined, Times(joined=2 / 3)).makespan == 10
    events = [(e.name, e.start / PS, e.end / PS) for e in simulate(joined).trace if e.name in ("0F1", "1B0")]
    assert events == [("0F1", 2.0, 3.5), ("1B0", 3.5, 5.0)], "one thing at a time in a lane"


def test_spans_and_makespan_differ_where_ranks_start_late():
    run = simulate(build("zb-h2", 4, 16))
    assert run.makespan == 51 and run.longest_span == 48 and run.span_bubble_of_total == 0
    assert run.spans[3] == 48 and run.bubble_of_total == pytest.approx(3 / 51)


def test_idle_slots_are_skipped_and_text_is_taken():
    assert simulate("0F0 . . 0B0\n. 1F0 1B0", forward=1, backward=1).makespan == 4
    assert simulate([["0F0", "0B0"]], {"forward": 1, "backward": 2}).makespan == 3


def test_forward_only():
    run = simulate(build("forward-only", 4, 8, chunks=2), forward_only=True)
    assert run.makespan == 2 * 8 + 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"forward": -1}, "forward is -1"),
        ({"link": float("inf")}, "link is inf"),
        ({"forward": [1, 2, 3]}, "3 numbers for 2 stages"),
        ({"weight": "x"}, "weight is 'x'"),
        ({"activation": [1]}, "1 numbers for 2 stages"),
        ({"times": Times(), "link": 1}, "not both"),
    ],
)
def test_bad_times_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        simulate(build("gpipe", 2, 2), **options)


def test_an_illegal_schedule_is_refused_by_name():
    with pytest.raises(IllegalSchedule, match="0B0 is missing"):
        simulate("0F0")
    with pytest.raises(IllegalSchedule, match="needs B0 from stage 1"):
        simulate("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match="stage 7 of 4"):
        Times().slower(7, 2, 4)


def test_slower_changes_one_stage():
    times = Times(forward=1, input=[1, 2], weight=0.5, link=0.25).slower(1, 1.2, 2)
    assert times.picoseconds(2)["F"] == [PS, 12 * PS // 10] and times.link == 0.25
    assert times.picoseconds(2)["B"] == [15 * PS // 10, 3 * PS]


def test_work_grows_linearly(monkeypatch):
    """Counted, not timed: how often a cell is taken in hand, whatever the number of micro-batches."""
    looked = []

    class Counted(list):
        def __iter__(self):
            for cell in super().__iter__():
                looked.append(cell)
                yield cell

    counts = []
    for m in (8, 16, 32):
        schedule = build("1f1b", 8, m)
        run = simulate(schedule, checked=False)
        run.schedule = [Counted(row) for row in run.schedule]
        looked.clear()
        run._place()
        counts.append(len(looked) / (2 * 8 * m))
    assert max(counts) <= 4 and max(counts) == min(counts), counts


@pytest.mark.measured
def test_64_stages_and_512_micro_batches_in_0_3_seconds():
    import time

    schedule = read(build("1f1b", 64, 512))
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        simulate(schedule, forward=1, backward=2)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.3


def lines_run(work):
    """How many lines of the simulator's own file `work()` runs: a count of steps that no clock and no neighbour changes."""
    count, file = 0, simulate.__code__.co_filename

    def look(frame, event, _):
        nonlocal count
        count += event == "line"
        return look if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_steps_grow_linearly_with_the_actions():
    """Four times the actions take four times the steps, either way; searching back through the list would take sixteen."""
    for name in ("1f1b", "zb-h1", "interleaved"):
        per_action = []
        for p, m in ((4, 8), (4, 32), (16, 32), (16, 128)):
            schedule = build(name, p, m, chunks=2)
            actions = sum(len(row) for row in schedule)
            per_action.append(lines_run(lambda s=schedule: simulate(s, checked=False)) / actions)
        assert max(per_action) < 1.5 * min(per_action), (name, per_action)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": None}, "weight is None"),
        ({"link": [1, 2]}, "link is .1, 2.; allowed: one number"),
        ({"forward": float("nan")}, "forward is nan"),
        ({"forward": []}, "0 numbers for 2 stages"),
        ({"activation": -1}, "activation is -1; allowed: a number of at least 0"),
        ({"activation": float("nan")}, "activation is nan"),
        ({"after_input": -1}, "after_input is -1"),
        ({"message_bytes": -8}, "message_bytes is -8"),
    ],
)
def test_times_and_weights_that_are_none_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        simulate(build("zb-h1", 2, 2), **options)
