"""The Trace answers what is asked of it, and leaves in formats that others read."""

import json

import pytest

import fourwalls as fw
from fourwalls.ranks.trace import PS, Event, Trace

EVENTS = [
    Event(0, "compute", "forward", "F0", 0, 4 * PS),
    Event(0, "compute", "compute", "inner", 1 * PS, 2 * PS),
    Event(0, "compute", "wait", "wait to receive", 4 * PS, 6 * PS, peer=1),
    Event(0, "compute", "backward", "B0", 6 * PS, 7 * PS, source="paced"),
    Event(1, "send", "send", "send", 4 * PS, 6 * PS, bytes=100, peer=0),
    Event(0, "recv", "recv", "send", 4 * PS, 6 * PS, bytes=100, peer=1),
    Event(0, "memory", "live", "live", 3 * PS, 3 * PS, bytes=77),
]


def test_busy_counts_overlap_once_and_leaves_waiting_out():
    trace = Trace(EVENTS)
    assert trace.busy(0) == 5
    assert trace.waiting(0) == 2
    assert trace.busy(1, "send") == 2
    assert trace.makespan == 7


def test_bytes_are_counted_at_the_sender():
    trace = Trace(EVENTS)
    assert trace.bytes_sent() == 100
    assert trace.bytes_sent(0) == 0
    assert trace.messages_sent(1) == 1


def test_ranks_that_did_nothing_keep_their_row():
    assert Trace(EVENTS, ranks=5).ranks == 5
    assert Trace(EVENTS).ranks == 2
    assert Trace().ranks == 0
    assert Trace().makespan == 0


def test_where_filters_and_refuses_unknown_fields():
    trace = Trace(EVENTS)
    assert [e.name for e in trace.where(rank=0, kind="wait")] == ["wait to receive"]
    assert trace.where(rank=1).ranks == 2
    with pytest.raises(ValueError, match="colour"):
        trace.where(colour="red")


def test_sources_in_order():
    assert Trace(EVENTS).sources == ("modelled", "paced")


def test_plain_tuples_become_events():
    trace = Trace([tuple(e) for e in EVENTS])
    assert trace == Trace(EVENTS)
    assert trace.events[1].name == "inner"


def test_pandas_has_every_column():
    frame = Trace(EVENTS).to_pandas()
    assert list(frame.columns) == [*Event._fields, "seconds"]
    assert frame["seconds"].tolist() == [4, 1, 2, 1, 2, 2, 0]


def test_perfetto_json():
    rows = json.loads(Trace(EVENTS, ranks=2).to_chrome())["traceEvents"]
    work = [r for r in rows if r["ph"] == "X"]
    assert {
        "ph": "X",
        "name": "F0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 4e6,
        "args": {"bytes": 0, "source": "modelled"},
    } in work
    assert [r["args"] for r in rows if r["ph"] == "C"] == [{"bytes": 77}]
    assert {r["args"]["name"] for r in rows if r["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_a_simulated_run_and_a_written_example_are_the_same_kind_of_thing():
    def program(comm):
        with comm.compute("forward", seconds=1e-6, kind="forward", microbatch=3, stage=1):
            pass
        comm.mark_live(5)

    trace = fw.simulate(program, ranks=1).trace
    assert trace.events[0] == Event(0, "compute", "forward", "forward", 0, PS // 10**6, microbatch=3, stage=1)
    assert trace.events[1] == Event(0, "memory", "live", "live", PS // 10**6, PS // 10**6, bytes=5)
