"""Cells say who is in them, in colour, hatch and words, and the picture shows the steps that it was asked for."""

from types import SimpleNamespace

import pytest

from fourwalls.viz import plot_holdings
from fourwalls.viz.who_holds import STATES, cell_state, cell_text


def history(last=2, n=3):
    """A canned history: each step finishes one more cell of rank 0."""
    full = {r: 1 for r in range(n)}
    steps = []
    for k in range(last + 1):
        rows = [tuple(full if r == 0 and c < k else {r: 1} for c in range(n)) for r in range(n)]
        changed = frozenset({(0, k - 1)} if 0 < k <= n else ())
        messages = (SimpleNamespace(src=1, dst=0, bytes=8, carried=()),) if k else ()
        steps.append(SimpleNamespace(end=k * 10**6, messages=messages, changed=changed, after=tuple(rows)))
    return SimpleNamespace(ranks=n, cells=n, name="canned", source="modelled", steps=tuple(steps))


@pytest.mark.parametrize(
    ("cell", "state"),
    [
        ({1: 1}, "own"),
        ({0: 1}, "partial"),
        ({0: 1, 1: 1}, "partial"),
        ({0: 1, 1: 1, 2: 1}, "finished"),
        ({1: 2}, "wrong"),
        ({0: 1, 1: 2, 2: 1}, "wrong"),
        ({0: 1, -1: 1}, "wrong"),
        ({}, "partial"),
        (None, "empty"),
    ],
)
def test_states(cell, state):
    assert cell_state(cell, 1, 3) == state


def test_texts():
    assert cell_text({0: 1, 2: 1}, 3) == "r0+r2"
    assert cell_text({0: 1, 1: 2}, 3) == "r0+2·r1"
    assert cell_text({r: 1 for r in range(8)}, 8, short=True) == "all"
    assert cell_text({r: 1 for r in range(8)}, 8) == "r0+r1+r2+r3+r4+r5+r6+r7"
    assert cell_text({6: 1, 7: 1, 0: 1, 3: 1}, 8, short=True) == "r3+r6–0"
    assert cell_text({1: 2, 2: 1}, 8, short=True) == "2·r1+r2"
    assert cell_text({1: 2, 2: 2, 0: 1}, 8, short=True) == "r0+2·r1–2"
    assert cell_text({r: 2 for r in range(8)}, 8, short=True) == "2·r0–7"
    assert cell_text(None, 3) == "·" and cell_text({-1: 1, 0: 1}, 3) == "?" and cell_text({}, 3) == "0"


def test_one_grid_for_each_step_with_changed_cells_framed_and_arrows_for_messages():
    axes = plot_holdings(history())
    assert [ax.get_title() for ax in axes] == ["at the start", "step 1: 1 µs, 1 × 8 B", "step 2: 2 µs, 1 × 8 B"]
    cells = [p for p in axes[1].patches if (p.get_gid() or "").startswith("fw-cell-")]
    assert len(cells) == 9
    assert [(p.get_x(), p.get_y()) for p in cells if p.get_linewidth() == 2.0] == [(0, 0)]
    assert [p.get_gid() for p in cells].count("fw-cell-finished") == 1
    assert [t.get_gid() for ax in axes for t in ax.texts].count("fw-arrow") == 2


def test_long_histories_are_thinned_and_keep_both_ends():
    axes = plot_holdings(history(last=40))
    assert len(axes) == 9 and axes[0].get_title() == "at the start" and axes[-1].get_title().startswith("step 40")
    assert len(plot_holdings(history(last=40), steps=[3, 4])) == 2
    with pytest.raises(ValueError, match="steps 0 to 2"):
        plot_holdings(history(), steps=[7])


LONG = {2: {0: 2, 1: 2}, 4: {0: 1, 1: 2, 2: 1, 3: 1}, 8: {0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("long", [False, True])
def test_texts_fit_into_their_cells(n, long, boxes):
    h = history(last=3, n=n)
    if long:
        h.steps[0].after = ((LONG[n],) * n,) * n
    ax = plot_holdings(h)[0]
    texts = [t for t in ax.texts if "r" in t.get_text()]
    assert len(texts) == n * n
    for text, box in zip(texts, boxes(ax.figure, texts), strict=True):
        (left, _), (right, _) = ax.transData.transform([(0, 0), (0.94, 0)])
        assert box.x1 - box.x0 <= right - left, text.get_text()


def test_states_differ_in_colour_and_not_only_in_colour():
    assert len({s[0] for s in STATES.values()}) == len(STATES)
    assert len({s[1] for s in STATES.values()}) == len(STATES) - 1, "own and partial are told apart by their texts"
