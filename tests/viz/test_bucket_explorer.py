"""The bucket explorer's scenes are the arithmetic, a hidden point gives nothing away, and pictures say what figures say."""

import json

import pytest

from fourwalls.cost.overlap import overlap
from fourwalls.course.bucket_explorer import bucket_explorer
from fourwalls.viz import overlap_words, plot_buckets, plot_exposed, widgets
from fourwalls.viz.bucket_explorer import CASES, CHOICES, CLOSE, SIZES, BucketBoard

WIRE = {"backward": 0.3, "n": 64, "alpha": 14e-6, "bandwidth": 25e9}
MEASURED = {"gradients": 5e7, "n": 2, "backward": 0.1, "alpha": 1e-4, "bandwidth": 1e9, "points": [(2**20, 0.03, 0.02, 0.05)]}


def test_a_scene_is_plain_data_and_its_curve_is_the_arithmetic():
    setting = {"case": CASES[0].name, "bucket": 2.0**24, "bandwidth": 1e10, "backward": 0.2}
    scene = BucketBoard().answer({"mode": "explore", "setting": setting, "id": 3})
    assert json.loads(json.dumps(scene)) == scene and scene["id"] == 3 and not scene["curtain"] and scene["setting"] == setting
    wire = WIRE | {"bandwidth": 1e10, "backward": 0.2}
    assert scene["curve"][8:] == pytest.approx([overlap(1.4e9, size, **wire).exposed for size in SIZES[8:]], rel=1e-6)
    assert scene["best"] == SIZES[scene["curve"].index(min(scene["curve"]))]
    found = overlap(1.4e9, 2.0**24, **wire)
    assert scene["bars"]["end"] == found.end and scene["bars"]["buckets"] == [[b.ready, b.start, b.end] for b in found.buckets]
    assert dict(map(tuple, scene["table"]))["buckets"] == str(len(found.buckets))


def test_many_buckets_are_joined_and_none_of_the_wire_is_lost():
    scene = BucketBoard().scene({"bucket": 2**16})
    assert f"{scene['bars']['joined']:,}" == dict(map(tuple, scene["table"]))["buckets"] == "21,363"
    assert len(scene["bars"]["buckets"]) < 150
    found = overlap(1.4e9, 2**16, **WIRE)
    drawn = sum(stop - start for _, start, stop in scene["bars"]["buckets"])
    assert drawn == pytest.approx(found.wire, rel=1e-2) and scene["bars"]["buckets"][-1][2] == found.end


def test_a_hidden_point_holds_no_answer():
    scene = BucketBoard().answer({"mode": "ask", "point": 1})
    assert (
        scene["curtain"] and not scene["curve"] and not scene["table"] and not scene["bars"]["buckets"] and scene["best"] is None
    )
    assert "backward takes 250 ms" in scene["words"] and not any(choice in scene["words"] for choice in CHOICES)


@pytest.mark.parametrize("point", range(len(CASES)))
def test_every_hidden_point_has_a_clear_answer_and_a_guess_is_judged(point):
    board, case = BucketBoard(), CASES[point]
    wire = {"backward": case.backward, "n": case.n, "alpha": case.alpha, "bandwidth": case.bandwidth}
    exposed = {name: overlap(case.gradients, min(size, case.gradients), **wire).exposed for name, size in CHOICES.items()}
    factors = {name: seconds / min(exposed.values()) for name, seconds in exposed.items()}
    assert all(f <= CLOSE or f > 1.3 for f in factors.values()), factors
    for name, factor in factors.items():
        scene = board.answer({"mode": "answer", "point": point, "name": name})
        assert scene["verdict"] is (factor <= CLOSE) and scene["curve"] and not scene["curtain"]
        assert scene["words"].startswith(f"Right, {name}." if factor <= CLOSE else f"No: {name} exposes")


def test_three_points_in_a_row_have_three_answers():
    board = BucketBoard()
    right = [next(c for c in CHOICES if board.answer({"mode": "answer", "point": k, "name": c})["verdict"]) for k in range(4)]
    assert right == ["25 MiB", "256 KiB", "256 MiB", "4 MiB"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"bucket": 1.4e9}, "nothing can hide"),
        ({"bucket": 2**28}, "a smaller bucket exposes less, give or take the teeth"),
        ({"bucket": 2**25}, "no size exposes much less"),
        ({"bucket": 2**18}, "Alpha rules"),
        ({"bucket": 2**25, "backward": 0.01}, "The bytes alone need longer"),
        ({"case": CASES[5].name, "bucket": 2**20, "bandwidth": 9e8}, "does not keep pace"),
    ],
)
def test_the_words_say_why(setting, words):
    scene = BucketBoard().scene(setting)
    assert words in scene["words"] and "exposed" in scene["words"] and "hidden" in scene["words"]


def test_measured_points_stand_on_their_own_case():
    board = BucketBoard(MEASURED)
    assert board.scene({})["dots"] == [] and board.scene({})["source"] == "modelled"
    scene = board.scene({"case": "my machine"})
    assert scene["dots"] == [[2.0**20, 0.03, 0.02, 0.05]] and scene["source"] == "measured + modelled"
    assert BucketBoard(MEASURED | {"name": "here", "source": "paced"}).scene({"case": "here"})["source"] == "paced + modelled"


@pytest.mark.parametrize(
    "ask",
    [
        {"mode": "answer", "point": 0, "name": "7 MiB"},
        {"mode": "answer", "point": "x", "name": "4 MiB"},
        {"setting": {"case": "string"}},
        {"setting": {"bucket": "many"}},
        {"setting": {"bandwidth": []}, "mode": "explore"} | {"setting": {"bandwidth": [1]}},
    ],
)
def test_a_request_that_makes_no_sense_is_a_scene_with_its_message(ask):
    scene = BucketBoard().answer({**ask, "id": 9})
    assert scene["error"] and scene["id"] == 9 and json.dumps(scene)


def test_what_is_out_of_reach_is_brought_to_its_limit():
    scene = BucketBoard().scene({"bucket": 10**12, "bandwidth": 1.0, "backward": 1e9})
    assert scene["setting"] | {"case": 0} == {"case": 0, "bucket": SIZES[-1], "bandwidth": 1e7, "backward": 10.0}


def test_without_a_front_end_five_sizes_are_said_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert bucket_explorer(MEASURED) is None
    first, *lines = capsys.readouterr().out.splitlines()
    assert "in words" in first and [line.split(":")[0] for line in lines] == list(CHOICES)
    assert "0% of the communication hidden" in lines[-1]


@pytest.mark.parametrize("change", [{"n": None}, {"alpha": -1}, {"points": [(1, 2, 3)]}, {"points": [(1, 0, 0, 0)]}])
def test_measurements_that_are_none(change):
    with pytest.raises(ValueError):
        bucket_explorer(MEASURED | change)
    with pytest.raises(ValueError, match="lacks gradients"):
        bucket_explorer({"points": []})


def test_the_kernel_answers_and_the_saved_output_does_not_change():
    pytest.importorskip("anywidget")
    board = BucketBoard()
    widget = widgets.widget_class("Buckets", "buckets.js")(board, scene=board.answer({"mode": "ask", "point": 0}))
    before = repr(widget)
    widget.request = {"mode": "answer", "point": 0, "name": "25 MiB", "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["verdict"] is True
    assert repr(widget) == before == f"BucketExplorer({CASES[0].name})"
    text = (widgets.FRONT / "buckets.js").read_text(encoding="utf-8")
    assert "http" not in text and "import " not in text


# --- static pictures -----------------------------------------------------------------------------------------------


def rows():
    return [(name, overlap(1e8, size, backward=0.25, n=16, alpha=3e-5, bandwidth=1.25e9))
            for name, size in (("1 MB", 1e6), ("25 MB", 25e6), ("1000 MB", 1e9))]  # fmt: skip


def test_buckets_under_the_backward(overlaps):
    ax = plot_buckets(rows())
    texts = [t.get_text() for t in ax.texts]
    assert sum("exposed" in t for t in texts) == 3 and "MODELLED" in texts
    found = rows()[1][1]
    hidden = next(c for c in ax.collections if c.get_gid() == "fw-1-hidden")
    shown = next(c for c in ax.collections if c.get_gid() == "fw-1-exposed")
    width = sum(path.vertices[:, 0].max() - path.vertices[:, 0].min() for c in (hidden, shown) for path in c.get_paths())
    assert width == pytest.approx(found.wire * 1e3, rel=1e-9), "the wire's whole time is drawn, in ms"
    assert sum(p.vertices[:, 0].max() - p.vertices[:, 0].min() for p in shown.get_paths()) == pytest.approx(found.exposed * 1e3)
    assert not overlaps(ax.figure, [t for t in ax.texts if t.get_gid() == "fw-exposed"])
    nothing = next(c for c in ax.collections if c.get_gid() == "fw-2-hidden")
    assert not nothing.get_paths(), "one bucket hides nothing"
    assert ax.get_xlim()[1] > max(o.end for _, o in rows()) * 1e3
    with pytest.raises(ValueError, match="rows is empty"):
        plot_buckets([])


def test_no_gradients_and_many_buckets_can_be_drawn():
    ax = plot_buckets([("none", overlap(0, 1, backward=0.1, n=2, alpha=0, bandwidth=1))])
    assert not any((c.get_gid() or "").endswith("-hidden") and c.get_paths() for c in ax.collections), "no gradients, no bars"
    many = overlap(1e8, 1e5, backward=0.1, n=2, alpha=1e-6, bandwidth=1e9)
    ax = plot_buckets([("many", many)], source="measured")
    drawn = [c for c in ax.collections if (c.get_gid() or "").endswith(("-hidden", "-shown", "-exposed"))]
    assert any(c.get_paths() for c in drawn) and ax.get_xlim()[1] >= many.end * 1e3


def test_words_of_an_overlap():
    said = overlap_words(rows()[1][1])
    assert said.startswith("4 buckets; the first leaves at 62.5 ms, backward ends at 250 ms") and said.count("ms") == 4
    assert overlap_words(overlap(0, 1, backward=1.0, n=2, alpha=0, bandwidth=1)) == "No gradients, no buckets."


def test_exposed_time_over_the_size_of_a_bucket():
    ax = plot_exposed([("a", [(1, 0.1), (8, 0.2)])], [("a", [(2, 0.15, 0.1, 0.3)])], source="paced")
    (container,) = ax.containers
    assert container.lines[2][0].get_segments()[0][:, 1] == pytest.approx([0.1, 0.3])
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {"a, modelled", "a, paced"}
    assert "PACED + MODELLED" in [t.get_text() for t in ax.texts]
    with pytest.raises(ValueError, match="above 0"):
        plot_exposed([("a", [(0, 1.0)])])
