"""Who wins where: the fields are those of the prices, the picture shows the fields, and no word covers another."""

import math

import pytest
from matplotlib.colors import to_rgb

from fourwalls.viz import plot_alpha_beta, plot_winner_map, shade_winners, winner_map
from fourwalls.viz.winner_map import Field, letters

SIZES = [2.0**k for k in range(21)]
# crossing at 100 bytes on 4 ranks and at 1000 on 8; "far" is never first; "big" cannot run on 4
LINES = {"few": (10.0, 1.0), "many": (100.0, 0.1), "far": (1e6, 1e6), "big": (1e7, 0.01)}


def price(name, n, nbytes):
    alpha, beta = LINES[name]
    if name == "many":
        alpha *= 1 if n == 4 else 9.01
    return None if name == "big" and n == 4 else alpha + beta * nbytes


@pytest.fixture
def data():
    return winner_map(price, [4, 8], SIZES, LINES)


def test_the_winner_is_the_fastest(data):
    for n in data.ranks:
        for k, size in enumerate(SIZES):
            times = {a: price(a, n, size) for a in LINES if price(a, n, size) is not None}
            assert data.winner(n, size) == min(times, key=times.get)
            assert [name for _, name in data.order(n, k)] == sorted(times, key=times.get)
    assert data.winner(4, 3) == data.winner(4, 4) == "few", "sizes between two go to the nearer"


def test_fields_cover_the_row_and_their_borders_lie_at_the_crossing(data):
    for n, crossing in ((4, 100), (8, 990)):
        fields = data.fields(n, close=1.0)
        assert fields[0].start == SIZES[0] and fields[-1].end == SIZES[-1]
        assert all(a.end == b.start for a, b in zip(fields, fields[1:], strict=False))
        assert [f.winner for f in fields][:2] == ["few", "many"]
        assert abs(math.log2(fields[0].end / crossing)) <= 1
    assert data.fields(8, close=1.0)[-1].winner == "many"


def test_who_is_nearly_as_fast_is_named():
    near = winner_map(lambda a, n, s: {"a": 1.0, "b": 1.09, "c": 1.2}[a], [2], [1, 2], "abc")
    assert near.fields(2) == [Field(1, 2, "a", "b")]
    assert near.fields(2, close=1.05) == [Field(1, 2, "a", "")]
    tie = winner_map(lambda a, n, s: 1.0, [2], [1], "ba")
    assert tie.winner(2, 1) == "b", "the first of the list wins a tie"


def test_words(data):
    assert data.describe(4).startswith("4 ranks: few up to ") and data.describe(4).endswith("then many.")


def test_the_picture_has_a_box_for_each_field_and_readable_names(data, overlaps, boxes):
    ax = plot_winner_map(data, marks=[(4, 16.0)], title="who wins")
    drawn = [(p.get_gid(), p.get_x(), p.get_x() + p.get_width(), p.get_y() + 0.5) for p in ax.patches if p.get_gid()]
    wanted = [(f"fw-field {f.winner}", f.start, f.end, row) for row, n in enumerate(data.ranks) for f in data.fields(n)]
    assert [d[0] for d in drawn] == [w[0] for w in wanted]
    assert [d[1:] for d in drawn] == [pytest.approx(w[1:]) for w in wanted]
    labels = [t for t in ax.texts if t.get_gid() == "fw-winner" and t.get_text()]
    assert {"few", "many"} <= {t.get_text() for t in labels}
    assert not overlaps(ax.figure, labels)
    for text, box in zip(labels, boxes(ax.figure, labels), strict=True):
        assert box.x0 > 0 and box.x1 < ax.figure.bbox.width, text
    assert [t.get_text() for t in ax.get_yticklabels()] == ["4", "8"]
    assert {t.get_text()[3:] for t in ax.get_legend().get_texts()} >= {"few", "many"}
    assert "far" not in str([t.get_text() for t in ax.get_legend().get_texts()]), "who never wins is not in the legend"
    (mark,) = [line for line in ax.lines if line.get_gid() == "fw-mark"]
    assert mark.get_xdata()[0] == 16 and 0 > mark.get_ydata()[0] > -0.5
    assert "16 B" in ax.get_xlabel() and "MODELLED" in [t.get_text() for t in ax.texts]


def test_a_close_field_is_paler(data):
    near = winner_map(lambda a, n, s: {"a": 1.0, "b": 1.05 if s < 4 else 2.0}[a], [2], [1, 2, 4, 8], "ab")
    ax = plot_winner_map(near)
    pale, full = [p.get_alpha() for p in ax.patches if p.get_gid() is None][:2]
    assert pale < full / 2


def test_a_sliver_has_its_letters_upright_and_a_second_has_no_colour(overlaps):
    sizes = [2.0 ** (k / 2) for k in range(50)]
    narrow = winner_map(
        lambda a, n, s: {"one": 1.0, "two": 0.5 if s == 2**12 else 1.5, "six": 1.05}[a], [2, 4], sizes, ("one", "two", "six")
    )
    ax = plot_winner_map(narrow)
    labels = [t for t in ax.texts if t.get_gid() == "fw-winner"]
    assert [t.get_text() for t in labels][:3] == ["one ≈ six", "T", "one ≈ six"] and not overlaps(ax.figure, labels)
    assert all(t.get_text() for t in labels) and {t.get_rotation() for t in labels} == {0.0, 90.0}
    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["O  one", "T  two", "S  six (as a second only)"]
    assert legend.get_patches()[2].get_facecolor()[3] == 0


def test_an_algorithm_looks_alike_in_every_picture():
    def colours(names):
        ax = plot_alpha_beta([], [(a, [(1, 1), (2, 2)]) for a in names])
        return {line.get_label().split(",")[0]: line.get_color() for line in ax.lines}

    few, many = colours(["star", "mine", "halving"]), colours(["ring", "tree", "halving", "star", "hierarchical", "yours"])
    assert few["star"] == many["star"] and few["halving"] == many["halving"]
    assert len(set(few.values())) == 3 and len(set(many.values())) == 6, "two names of one picture never share a colour"


def test_the_winner_behind_curves(data):
    ax = plot_alpha_beta([], [(a, [(s, price(a, 8, s)) for s in SIZES]) for a in LINES])
    before = ax.get_ylim()
    shade_winners(ax, data, 8)
    assert ax.get_xlim() == (SIZES[0], SIZES[-1])
    letter = next(t for t in ax.texts if t.get_gid() == "fw-winner")
    ax.figure.canvas.draw()
    top = ax.transData.inverted().transform((0, letter.get_window_extent().y1))[1]
    assert top < before[0], "letters stand below everything that was drawn"
    drawn = [(p.get_gid(), p.get_x()) for p in ax.patches if p.get_gid()]
    assert drawn == [(f"fw-field {f.winner}", f.start) for f in data.fields(8)]
    curve = next(line for line in ax.lines if line.get_label() == "few, modelled")
    shade = next(p for p in ax.patches if p.get_gid() is None)
    assert shade.get_facecolor()[:3] == pytest.approx(to_rgb(curve.get_color())), "one colour"


def test_letters_are_different():
    assert letters(["ring", "tree", "halving", "hierarchical", "star"]) == {
        "ring": "R", "tree": "T", "halving": "H", "hierarchical": "I", "star": "S",
    }  # fmt: skip
    assert list(letters(["a", "aa", "aaa"]).values()) == ["A", "1", "2"]


@pytest.mark.parametrize(
    ("ranks", "sizes", "names", "words"),
    [([], [1], "a", "at least one"), ([2], [2, 1], "a", "rising"), ([2], [0, 1], "a", "above 0"), ([4], [1], ["big"], "can run")],
)
def test_maps_that_make_no_sense_are_refused(ranks, sizes, names, words):
    with pytest.raises(ValueError, match=words):
        winner_map(price if names == ["big"] else lambda *_: 1.0, ranks, sizes, names)
