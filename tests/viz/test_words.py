"""Words and figures come from the trace and from nothing else."""

import pytest

from fourwalls.ranks.trace import Event, Trace
from fourwalls.viz import words

MS = 10**9


def trace():
    """Rank 0 works 6 ms of 10; rank 1 waits 4.1 ms, for rank 0 mostly, and works 5.9 ms."""
    return Trace(
        [
            Event(0, "compute", "forward", "f", 0, 6 * MS, source="measured"),
            Event(0, "memory", "live", "live", 0, 0, 3 << 20, source="measured"),
            Event(1, "compute", "wait", "w", 0, 3 * MS, peer=0, source="measured"),
            Event(1, "compute", "wait", "w", 3 * MS, 4 * MS + MS // 10, peer=None, source="measured"),
            Event(1, "compute", "backward", "b", 4 * MS + MS // 10, 10 * MS, source="measured"),
            Event(0, "send", "send", "s", 0, MS, 1536, 1, source="measured"),
        ]
    )


def test_describe_names_who_waits_how_long_and_for_whom():
    text = words.describe(trace())
    assert text.startswith("2 ranks, 10 ms, measured.")
    assert "Rank 1 waits 41% of the time, mostly for rank 0." in text
    assert "1 rank never waits." in text
    assert "1 message carry 1.5 KiB." not in text and "1 message carries 1.5 KiB." in text
    assert "Peak memory: 3 MiB, on rank 0." in text


def test_describe_of_nothing_and_of_a_trace_that_takes_no_time():
    assert words.describe(Trace([], ranks=3)) == "An empty trace of 3 ranks: nothing was recorded."
    instant = words.describe(Trace([Event(0, "compute", "compute", "c", 0, 0)]))
    assert "1 rank, 0 µs" in instant and "%" not in instant


def test_the_two_bubbles_have_two_values():
    work, whole = 11.9, 20.0
    assert words.bubble_of_total(trace()) == pytest.approx((whole - work) / whole)
    assert words.bubble_of_ideal(trace()) == pytest.approx((whole - work) / work)
    assert words.bubble_of_total(Trace([])) is None and words.bubble_of_ideal(Trace([])) is None


def test_overlapping_work_counts_once():
    double = Trace([Event(0, "compute", "forward", "f", 0, 10), Event(0, "compute", "reduce", "r", 5, 10)])
    assert words.bubble_of_total(double) == 0


@pytest.mark.parametrize(
    ("ps", "text"), [(0, "0 µs"), (999, "999 ps"), (1500, "1.5 ns"), (2_500_000, "2.5 µs"), (10**12 * 1234, "1,234 s")]
)
def test_time_text_chooses_the_unit(ps, text):
    assert words.time_text(ps) == text


@pytest.mark.parametrize(
    ("n", "binary", "text"),
    [
        (0, True, "0 B"),
        (1023, True, "1,023 B"),
        (1024, True, "1 KiB"),
        (1536, True, "1.5 KiB"),
        (2.8e12, False, "2.8 TB"),
        (1e21, False, "1,000 EB"),
    ],
)
def test_bytes_text(n, binary, text):
    assert words.bytes_text(n, binary=binary) == text
