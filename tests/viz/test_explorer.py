"""The explorer's scenes are the prices, a hidden point gives nothing away, a guess is judged, and the words say it all."""

import json

import pytest

from fourwalls.cost.critical_path import all_reduce_seconds
from fourwalls.cost.hardware import uniform
from fourwalls.viz import explorer as module
from fourwalls.viz import widgets
from fourwalls.viz.explorer import POINTS, SIZES, WIRES, Board, explorer, measured_from_rows

MEASURED = {
    "name": "my machine",
    "links": {2: (1e-5, 1e9), 4: (4e-5, 5e8)},
    "times": {"ring": {4: [(4096, 5e-4, 4e-4, 6e-4)]}, "shared_memory": {4: [(4096, 5e-5, 4e-5, 6e-5)]}},
}


def test_a_scene_is_plain_data_and_its_curves_are_the_prices():
    scene = Board().answer({"mode": "explore", "setting": {"wire": "Ethernet 10 Gbit/s", "n": 16, "size": 2**20}, "id": 3})
    assert json.loads(json.dumps(scene)) == scene and scene["id"] == 3 and not scene["curtain"]
    wire = next(w for w in WIRES if w.name == "Ethernet 10 Gbit/s")
    cluster = wire.cluster(wire.alpha, wire.bandwidth)
    k = SIZES.index(2.0**20)
    for curve in scene["curves"]:
        assert curve["seconds"][k] == all_reduce_seconds(curve["name"], 16, 2**20, cluster)
    assert scene["table"][0]["name"] == "halving" and scene["table"][0]["messages"] == 8
    assert [row["seconds"] for row in scene["table"]] == sorted(c["seconds"][k] for c in scene["curves"])
    assert scene["fields"][0][0] == SIZES[0] and scene["fields"][-1][1] == SIZES[-1]
    assert "hierarchical" not in scene["names"], "with one kind of wire it is the ring"


def test_the_sliders_change_the_wire_between_nodes_and_not_the_one_inside():
    slow = {"wire": "A100 nodes of 8", "n": 8, "size": 2**20, "alpha": 1e-3}
    board = Board()
    inside, across = board.scene(slow), board.scene({**slow, "n": 16})
    assert inside["curves"] == board.scene({**slow, "alpha": None})["curves"]
    assert across["curves"] != board.scene({**slow, "n": 16, "alpha": None})["curves"]
    assert across["texts"]["alpha"] == "1 ms"


def test_a_hidden_point_holds_no_answer():
    scene = Board().answer({"mode": "ask", "point": 0})
    assert scene["curtain"] and not scene["curves"] and not scene["fields"] and not scene["table"]
    text = scene["words"].removeprefix("Who wins?")
    assert not any(name in text for name in scene["names"]) and "14 µs" in text and "3.4 µs" in text
    assert "one adapter together" in Board().answer({"mode": "ask", "point": 2})["words"]


@pytest.mark.parametrize("point", range(len(POINTS)))
def test_every_hidden_point_has_clear_winners_and_a_guess_is_judged(point):
    board = Board()
    factors = {row["name"]: row["factor"] for row in board.answer({"mode": "answer", "point": point, "name": "ring"})["table"]}
    assert all(f <= 1.1 or f > 1.3 for f in factors.values()), factors
    assert any(f > 1.3 for f in factors.values())
    for name, factor in factors.items():
        scene = board.answer({"mode": "answer", "point": point, "name": name})
        assert scene["verdict"] is (factor <= 1.1)
        assert scene["words"].startswith("Right" if factor <= 1.1 else f"No: {name} takes")
        assert not scene["curtain"] and scene["curves"]


def test_the_points_have_different_winners():
    board = Board()
    winners = [board.answer({"mode": "answer", "point": k, "name": "ring"})["table"][0]["name"] for k in range(len(POINTS))]
    assert winners[:4] == ["halving", "ring", "tree", "hierarchical"] and max(map(winners.count, winners)) <= 2


def test_words_at_the_cursor():
    said = Board().scene({"n": 256, "size": 2**10})["words"]
    assert said.startswith("256 ranks, 1 KiB: in the model halving wins with 160 µs;") and "ring 45." in said
    assert "16 messages in a row" in said and "the ring 510, 1.99 S" in said
    assert said.endswith("Inside a node: 3.4 µs and its bytes at 300 GB/s, fixed.")


def test_what_the_sliders_move_is_said():
    def said(**setting):
        scene = Board().scene({"wire": "A100 nodes of 8", "n": 32, **setting})
        assert scene["nodes"]
        return scene["words"]

    assert "move nothing here" in said(n=8) and "move nothing" not in said()
    assert "Beware" not in said() and "fixed" in said()
    assert said(alpha=1e-6).endswith("the wire between nodes now starts sooner than the one inside.")
    assert said(bandwidth=1e12).endswith("now carries bytes faster than the one inside.")
    assert said(alpha=1e-6, bandwidth=1e12).endswith("now starts sooner and carries bytes faster than the one inside.")
    flat = Board().scene({"wire": "InfiniBand HDR", "bandwidth": 1e12})
    assert "node" not in flat["words"] and not flat["nodes"]


def test_the_table_says_how_much_goes_between_nodes():
    across = {row["name"]: row["across"] for row in Board().scene({"n": 256, "size": 2**20})["table"]}
    assert across == {"ring": 510 / 256, "tree": 10, "halving": 2 * 31 / 256, "hierarchical": 2 * 31 / 256, "star": 496}
    assert {row["across"] for row in Board().scene({"n": 8})["table"]} == {0}


def test_a_shared_adapter_takes_numbers_of_ranks_that_it_can_price():
    name = "V100 nodes of 8, one adapter"
    scene = Board().scene({"wire": name, "n": 192, "size": 2**20})
    assert scene["setting"]["n"] in (128, 256) and all(n & (n - 1) == 0 for n in scene["ranks"])
    assert "share one adapter" in scene["words"] and set(Board().scene({"n": 192})["ranks"]) == set(module.RANKS)
    for wire in WIRES:
        for n in wire.ranks():
            assert len(Board().scene({"wire": wire.name, "n": n})["table"]) == 4 + bool(wire.inside)


def test_switched_off_algorithms_are_gone():
    scene = Board().scene({"off": ["halving", "star"]})
    assert {c["name"] for c in scene["curves"]} == {"ring", "tree", "hierarchical"} == {row["name"] for row in scene["table"]}
    assert scene["setting"]["off"] == ["halving", "star"]


def test_measured_points_stand_on_their_own_wire_with_their_spread():
    board = Board(MEASURED)
    assert board.scene({"n": 4})["dots"] == [], "not on another wire"
    scene = board.scene({"wire": "my machine", "n": 4})
    assert scene["source"] == "measured + modelled" and scene["words"].endswith("at 4 KiB the best is shared_memory.")
    assert scene["dots"][0] == {"name": "ring", "points": [[4096.0, 5e-4, 4e-4, 6e-4]]}
    assert [d["name"] for d in scene["dots"]] == ["ring", "shared_memory"] and "shared_memory" in scene["looks"]
    assert (scene["setting"]["alpha"], scene["setting"]["bandwidth"]) == (4e-5, 5e8)
    assert board.scene({"wire": "my machine", "n": 2})["setting"]["alpha"] == 1e-5
    alone = board.scene({"wire": "my machine", "n": 16})
    assert alone["dots"] == [] and alone["source"] == "modelled" and alone["setting"]["alpha"] == 4e-5
    assert "my machine" not in Board({"times": {}}).wires


def test_tree_and_star_have_the_price_of_a_message_alone():
    board = Board({**MEASURED, "alone": {4: (1e-5, 2e9), 2: (5e-6, 2e9)}})
    k, setting = SIZES.index(2.0**20), {"wire": "my machine", "n": 4, "size": 2**20}
    for scale in (1, 2):  # the sliders move both prices alike
        scene = board.scene({**setting, "alpha": 4e-5 * scale, "bandwidth": 5e8 * scale})
        for curve in scene["curves"]:
            alone = curve["name"] in ("tree", "star")
            price = uniform(1e-5 * scale, 2e9 * scale) if alone else uniform(4e-5 * scale, 5e8 * scale)
            assert curve["seconds"][k] == pytest.approx(all_reduce_seconds(curve["name"], 4, 2**20, price), rel=1e-9)
        assert {row["name"]: row["seconds"] for row in scene["table"]}["tree"] == pytest.approx(
            4 * scale * 1e-5 + 4 * 2**20 / 2e9 / scale
        )
    assert "Tree and star are priced by a message alone" in scene["words"]
    assert "priced" not in Board(MEASURED).scene(setting)["words"]


@pytest.mark.parametrize(
    "ask",
    [
        {"mode": "answer", "point": 0, "name": "butterfly"},
        {"mode": "answer", "point": "x", "name": "ring"},
        {"setting": {"wire": "string"}},
        {"setting": {"off": ["ring", "tree", "halving", "star", "hierarchical"]}},
        {"setting": {"n": "many"}},
    ],
)
def test_a_request_that_makes_no_sense_is_a_scene_with_its_message(ask):
    scene = Board().answer({**ask, "id": 9})
    assert scene["error"] and scene["id"] == 9 and json.dumps(scene)


def test_what_is_out_of_reach_is_brought_to_its_limit():
    scene = Board().scene({"n": 10**6, "size": 10**12, "alpha": 5.0, "bandwidth": 1.0})
    assert scene["setting"] | {"off": 0} == {
        "wire": WIRES[0].name,
        "n": 1024,
        "size": 2**32,
        "alpha": 1e-2,
        "bandwidth": 1e7,
        "off": 0,
    }


def rows():
    case = {"ranks": 4, "bytes": 4096, "algorithm": "ring", "checks": False}
    time = {"benchmark": "all-reduce", "metric": "time", "value": 5e-4, "low": 4e-4, "high": 6e-4}
    yield {**time, "case": case}
    yield {**time, "case": {**case, "bytes": 64}, "value": 1e-4, "low": None, "high": None}
    yield {**time, "case": {**case, "checks": True}}
    yield {**time, "metric": "busbw", "case": case}
    yield {"benchmark": "calibrate", "case": {"ranks": 4}, "metric": "alpha", "value": 4e-5}
    yield {"benchmark": "calibrate", "case": {"ranks": 4}, "metric": "bandwidth", "value": 0.5}
    yield {"benchmark": "calibrate", "case": {"ranks": 2}, "metric": "alpha", "value": 4e-5}


@pytest.mark.parametrize("flat", [False, True])
def test_benchmark_rows_become_points(flat):
    given = list(rows())
    if flat:  # as csv.DictReader gives them
        given = [
            {k: v for k, v in row.items() if k != "case"} | {f"case.{k}": v for k, v in row["case"].items()} for row in given
        ]
        given = [{k: "" if v is None else str(v) for k, v in row.items()} for row in given]
    found = measured_from_rows(given, name="here")
    assert found == {
        "name": "here",
        "links": {4: (4e-5, 5e8)},
        "times": {"ring": {4: [(64, 1e-4, 1e-4, 1e-4), (4096, 5e-4, 4e-4, 6e-4)]}},
    }


def test_without_a_front_end_three_sizes_are_said_in_words(capsys, monkeypatch):
    monkeypatch.setenv("FOURWALLS_WIDGETS", "0")
    assert explorer(MEASURED) is None
    first, *lines = capsys.readouterr().out.splitlines()
    assert "in words" in first and "A100 nodes of 8" in first
    sizes = ["256 ranks, 1 KiB", "256 ranks, 1 MiB", "256 ranks, 1 GiB", "192 ranks, 1 GiB"]
    assert [line.split(": ")[0] for line in lines] == sizes
    assert "halving wins" in lines[2] and "hierarchical wins" in lines[3]


def test_the_kernel_answers_and_the_saved_output_does_not_change():
    pytest.importorskip("anywidget")
    board = Board()
    widget = widgets.widget_class("Explorer", "explorer.js")(board, scene=board.answer({"mode": "ask", "point": 0}))
    before = repr(widget)
    widget.request = {"mode": "answer", "point": 2, "name": "tree", "id": 5}
    assert widget.scene["id"] == 5 and widget.scene["verdict"] is True
    assert repr(widget) == before and "run this cell" in before
    text = (widgets.FRONT / "explorer.js").read_text(encoding="utf-8")
    assert "http" not in text and "import " not in text
    assert module.RANKS[0] == 2
