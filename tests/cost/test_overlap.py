"""The arithmetic of exposed communication: by hand, against the simulator, and at its limits."""

import math

import pytest

import fourwalls as fw
from fourwalls.cost.hardware import PS, uniform
from fourwalls.cost.overlap import Overlap, best_bucket, cut_buckets, exposed_seconds, overlap, smallest_that_keeps_pace

WIRE = {"backward": 1.0, "n": 4, "alpha": 0.01, "bandwidth": 300.0}  # a bucket of b bytes: 0.06 + 1.5 b / 300 = 0.06 + b / 200


def test_three_buckets_by_hand():
    found = overlap(120, 50, **WIRE)
    assert [b.bytes for b in found.buckets] == [50, 50, 20]
    assert [b.ready for b in found.buckets] == pytest.approx([50 / 120, 100 / 120, 1.0])
    starts = [50 / 120, 100 / 120, 100 / 120 + 0.31]  # the third waits for the wire
    assert [b.start for b in found.buckets] == pytest.approx(starts)
    assert found.end == pytest.approx(starts[2] + 0.16) and found.exposed == pytest.approx(100 / 120 + 0.47 - 1)
    assert found.wire == pytest.approx(3 * 0.06 + 120 / 200) and found.hidden == pytest.approx(found.wire - found.exposed)
    assert found.bytes == 120


def test_one_big_bucket_hides_nothing_and_neither_does_waiting():
    wire = 0.06 + 120 / 200
    for size, overlapped in ((120, True), (10**9, True), (120, False)):
        found = overlap(120, size, overlapped=overlapped, **WIRE)
        assert found.exposed == pytest.approx(wire) and found.hidden == pytest.approx(0)
    late = overlap(120, 50, overlapped=False, **WIRE)
    assert late.exposed == pytest.approx(late.wire) and all(b.ready == 1.0 for b in late.buckets)


def test_the_last_bucket_cannot_hide_and_nothing_ends_before_its_bytes_have_gone():
    for size in (1, 3, 7, 20, 60, 120):
        for bandwidth in (50.0, 300.0, 1e4):
            found = overlap(120, size, **WIRE | {"bandwidth": bandwidth})
            last = found.buckets[-1]
            assert found.exposed >= last.end - last.start - 1e-12
            assert found.end >= found.buckets[0].ready + found.wire - 1e-12 or found.hidden <= found.wire
            assert all(
                a.end <= b.start + 1e-12 and b.ready <= b.start for a, b in zip(found.buckets, found.buckets[1:], strict=False)
            )


def test_too_small_and_too_large_lose_and_the_smallest_that_keeps_pace_wins():
    fast = {"backward": 1.0, "n": 4, "alpha": 1e-4, "bandwidth": 1200.0}
    pace = smallest_that_keeps_pace(120, **fast)
    assert pace == pytest.approx(6e-4 / (1 / 120 - 1.5 / 1200))
    sizes = [120 * 0.95**k for k in range(160)]
    best, found = best_bucket(120, sizes, **fast)
    assert pace <= best < 1.5 * pace and found.exposed < overlap(120, best / 3, **fast).exposed
    assert found.exposed < overlap(120, 3 * best, **fast).exposed < overlap(120, 120, **fast).exposed
    assert smallest_that_keeps_pace(120, **fast | {"bandwidth": 100.0}) == math.inf
    assert smallest_that_keeps_pace(120, **fast | {"n": 1}) == 0 == smallest_that_keeps_pace(0, **fast)


def test_a_wire_that_is_too_slow_shows_at_least_the_difference():
    slow = WIRE | {"bandwidth": 100.0}
    for size in (5, 12, 40, 120):
        found = overlap(120, size, **slow)
        assert found.exposed >= found.wire - found.backward


@pytest.mark.parametrize("bandwidth", [20.0, 150.0, 300.0, 5e3])
def test_the_short_formula_is_the_same(bandwidth):
    for size in (1.0, 3.3, 7, 40, 60, 119, 120, 500):
        for n in (1, 2, 9):
            wire = WIRE | {"bandwidth": bandwidth, "n": n}
            assert exposed_seconds(120, size, **wire) == pytest.approx(overlap(120, size, **wire).exposed, abs=1e-9)
    assert exposed_seconds(0, 5, **WIRE) == 0


def test_cutting():
    assert (
        cut_buckets(10, 4) == [4, 4, 2] and cut_buckets(8, 4) == [4, 4] and cut_buckets(3, 4) == [3] and cut_buckets(0, 4) == []
    )
    assert cut_buckets([3, 3, 9, 1, 1, 1], 6) == [6, 9, 3] and cut_buckets([], 5) == []
    assert sum(cut_buckets(1e9, 3e7)) == pytest.approx(1e9)


def test_the_same_buckets_as_data_parallel():
    import torch

    from fourwalls.parallel.buckets import plan_buckets

    sizes = [3, 40, 7, 7, 90, 1, 1, 12, 30]
    named = [(f"p{k}", torch.nn.Parameter(torch.zeros(s))) for k, s in enumerate(sizes)]
    for limit in (4, 100, 160, 4000):
        planned = [b.bytes for b in plan_buckets(named, limit)]
        assert planned == cut_buckets([4 * s for s in reversed(sizes)], limit)


def backward_in_pieces(comm, sizes, backward, cluster):
    """The same by hand on simulated ranks: a rank computes, then sums, bucket by bucket; only starts and ends are taken."""
    whole, ends = sum(sizes), []
    for nbytes in sizes:
        with comm.compute("backward", seconds=backward * nbytes / whole):
            pass
        ends.append(comm.clock())
    return ends


def test_against_simulated_ranks():
    """Each bucket's time is that of the simulated ring, where n divides it."""
    import torch

    sizes, n, wire = cut_buckets(9600 * 4, 12800), 4, uniform(1e-5, 1e9)
    model = overlap(9600 * 4, 12800, backward=1e-4, n=n, alpha=1e-5, bandwidth=1e9)

    def ring(comm, nbytes):
        fw.collectives.all_reduce(comm, torch.zeros(nbytes // 4))

    free = 0
    for k, nbytes in enumerate(sizes):
        ready = fw.simulate(backward_in_pieces, sizes, 1e-4, None, ranks=n, cluster=wire).values[0][k]
        free = max(ready, free) + fw.simulate(ring, int(nbytes), ranks=n, cluster=wire).trace.makespan_ps
        assert model.buckets[k].end == pytest.approx(free / PS, rel=1e-9)


def test_edges():
    assert overlap(0, 5, **WIRE) == Overlap(1.0, ()) and overlap(0, 5, **WIRE).exposed == 0
    alone = overlap(120, 50, **WIRE | {"n": 1})
    assert alone.exposed == 0 and alone.wire == 0
    no_work = overlap(120, 50, **WIRE | {"backward": 0.0})
    assert no_work.exposed == pytest.approx(no_work.wire)
    assert overlap(120, 50, **WIRE, algorithm="tree").wire > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"bucket_bytes": math.nan}, "bucket_bytes is nan"),
        ({"gradients": -1}, "gradients is -1"),
        ({"gradients": [1, -2]}, "a gradient of -2 bytes"),
        ({"backward": -1.0}, "backward -1.0 s"),
        ({"bandwidth": 0}, "bandwidth 0 bytes/s"),
        ({"alpha": math.nan}, "alpha nan"),
        ({"n": 0}, "n is 0"),
        ({"n": 2.0}, "n is 2.0"),
        ({"algorithm": "butterfly"}, "known: ring, star"),
    ],
)
def test_what_is_out_of_range(change, words):
    given = {"gradients": 120, "bucket_bytes": 50, **WIRE} | change
    with pytest.raises(ValueError, match=words):
        overlap(given.pop("gradients"), given.pop("bucket_bytes"), **given)
    with pytest.raises(ValueError, match="sizes is empty"):
        best_bucket(120, [], **WIRE)


def test_a_planted_fault_is_seen():
    """If the wire could carry two buckets at once, or the last one left before backward ended, the checks above would fail."""
    found = overlap(120, 50, **WIRE)
    both = [b.ready + (b.end - b.start) for b in found.buckets]
    assert max(both) < found.end, "the third bucket really waits for the second"
    assert found.buckets[-1].ready == found.backward
