"""The signature picture draws every lane of every rank where it happened, in its colour, and stays quick for long traces."""

import time

import pytest
from matplotlib.colors import to_hex

from fourwalls.ranks.trace import KINDS, Event, Trace
from fourwalls.viz import plot_timeline, style

MS = 10**9


def collections(ax, start="fw-"):
    return {c.get_gid(): c for c in ax.collections if (c.get_gid() or "").startswith(start)}


def spans(collection):
    """[(left, right)] of each bar in data coordinates."""
    return sorted((p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in collection.get_paths())


def small():
    return Trace(
        [
            Event(0, "compute", "forward", "f", 0, 4 * MS, microbatch=0),
            Event(0, "send", "send", "s", 4 * MS, 5 * MS, 1024, 1),
            Event(1, "recv", "recv", "r", 4 * MS, 5 * MS, 1024, 0),
            Event(1, "compute", "wait", "w", 0, 5 * MS, peer=0),
            Event(1, "compute", "backward", "b", 5 * MS, 10 * MS, microbatch=0),
            Event(0, "memory", "live", "live", 0, 0, 4 << 20),
            Event(0, "memory", "live", "live", 4 * MS, 4 * MS, 1 << 20),
        ]
    )


def test_one_collection_for_each_rank_lane_and_kind_at_its_place():
    ax = plot_timeline(small())
    drawn = collections(ax)
    kinds = {
        "fw-0-compute-forward",
        "fw-0-send-send",
        "fw-1-recv-recv",
        "fw-1-compute-wait",
        "fw-1-compute-backward",
        "fw-0-live",
    }
    assert set(drawn) == kinds | {"fw-0-ground", "fw-1-ground"}
    assert spans(drawn["fw-1-compute-backward"]) == [(5.0, 10.0)]
    assert to_hex(drawn["fw-1-compute-backward"].get_facecolor()[0]).upper() == style.OKABE_ITO["orange"]
    assert drawn["fw-1-compute-wait"].get_hatch() == "////"
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 is on top"
    assert ax.get_xlabel().startswith("time (ms)")


def test_caption_badge_and_letters():
    ax = plot_timeline(small(), ideal=0.008)
    caption = ax.get_xlabel()
    assert "bubble: 55.0% of total, 122.2% of ideal" in caption
    assert "peak 4 MiB" in caption and "1 KiB sent" in caption and "dashed: ideal, 8 ms" in caption
    assert {t.get_text() for t in ax.texts} >= {"F0", "B0", "MODELLED"}
    assert {t.get_text() for t in ax.get_legend().get_texts()} >= {"F  forward", "B  backward", "waits"}


def test_the_live_curve_is_a_staircase_on_the_common_scale():
    ax = plot_timeline(small())
    top, low, *_ = sorted({round(y, 6) for y in collections(ax)["fw-0-live"].get_paths()[0].vertices[:, 1]})
    assert (1.42 - top) / (1.42 - low) == pytest.approx(4), "4 MiB stands four times as high as 1 MiB"


def test_messages_alone_get_wide_lanes_that_name_the_other_rank():
    ax = plot_timeline(Trace([Event(0, "send", "send", "s", 0, 5, 8, 1), Event(1, "recv", "recv", "r", 0, 5, 8, 0)]))
    assert {"to 1", "from 0"} <= {t.get_text() for t in ax.texts}
    assert "bubble" not in ax.get_xlabel()


@pytest.mark.parametrize("trace", [Trace([], ranks=0), Trace([], ranks=3), Trace([Event(0, "compute", "compute", "c", 0, 0)])])
def test_empty_and_instant_traces_draw_without_a_warning(trace):
    ax = plot_timeline(trace)
    ax.figure.canvas.draw()
    assert ax.get_xlim()[1] > 0


def test_an_instant_event_can_be_seen():
    ax = plot_timeline(Trace([Event(0, "compute", "compute", "c", 3, 3), Event(0, "compute", "forward", "f", 0, 10)]))
    ((left, right),) = spans(collections(ax)["fw-0-compute-compute"])
    assert right > left


def test_many_events_join_into_columns_and_the_kind_that_fills_a_column_wins():
    events, t = [], 0
    for k in range(6000):
        long = "forward" if k < 3000 else "backward"
        events += [Event(0, "compute", long, "x", t, t + 90), Event(0, "compute", "reduce", "y", t + 90, t + 100)]
        t += 100
    ax = plot_timeline(Trace(events))
    drawn = collections(ax)
    assert "fw-0-compute-reduce" not in drawn
    unit = 10**3
    assert spans(drawn["fw-0-compute-forward"])[0] == pytest.approx((0, 300_000 / unit), rel=2e-3)
    assert spans(drawn["fw-0-compute-backward"])[-1] == pytest.approx((300_000 / unit, 600_000 / unit), rel=2e-3)
    assert "many events" in ax.get_xlabel()


def test_a_lane_that_is_mostly_idle_stays_mostly_empty_but_messages_are_never_lost():
    events = [Event(0, "compute", "forward", "f", 1000 * k, 1000 * k + 10) for k in range(5000)]
    events += [Event(0, "send", "send", "s", 1000 * k, 1000 * k + 10, 8, 1) for k in range(5000)]
    drawn = collections(plot_timeline(Trace(events)))
    assert "fw-0-compute-forward" not in drawn
    assert sum(right - left for left, right in spans(drawn["fw-0-send-send"])) > 4.9


@pytest.mark.timeout(60)
def test_sixty_four_ranks_and_a_hundred_thousand_events():
    events = [Event(r, "compute", KINDS[1 + k % 2], "x", 100 * k, 100 * k + 95) for r in range(64) for k in range(1600)]
    began = time.process_time()
    ax = plot_timeline(Trace(events))
    ax.figure.canvas.draw()
    assert time.process_time() - began < 20
    assert sum(len(c.get_paths()) for c in ax.collections) < 64 * 700
    assert len(ax.get_yticklabels()) <= 17


@pytest.mark.parametrize("ranks", [1, 4, 16, 40])
def test_no_text_covers_another(ranks, overlaps):
    ax = plot_timeline(
        Trace([Event(r, "compute", k, k, 10 * j, 10 * j + 8, peer=0) for r in range(ranks) for j, k in enumerate(KINDS[:8])])
    )
    texts = [t for t in (*ax.texts, *ax.get_legend().get_texts(), *ax.get_yticklabels(), ax.xaxis.label) if t.get_text()]
    assert not overlaps(ax.figure, texts)


def test_every_kind_has_a_colour_and_work_has_its_own_letter():
    assert set(style.KIND_STYLE) == set(KINDS)
    work = [k for k in KINDS if k not in ("wait", "live", "mark")]
    assert len({style.KIND_STYLE[k].letter for k in work}) == len(work)
    assert len({style.KIND_STYLE[k].colour for k in KINDS}) == len(KINDS)


def test_a_badge_refuses_an_unknown_source():
    with pytest.raises(ValueError, match="measured, modelled, paced"):
        style.badge(style.new_axes(), "guessed")
