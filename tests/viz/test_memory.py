"""The mountain stacks what the table says, marks its peak, and the bars end at their totals."""

import numpy as np
import pytest

from fourwalls.viz import plot_memory_mountain, plot_shrinking_bars

MIB = 1 << 20
ROWS = [
    (0, {"parameters": 10 * MIB}),
    (1, {"parameters": 10 * MIB, "activations": 6 * MIB}),
    (2, {"parameters": 10 * MIB, "gradients": 2 * MIB}),
]


def layers(ax):
    return {
        c.get_gid().removeprefix("fw-"): c.get_paths()[0].vertices[:, 1]
        for c in ax.collections
        if (c.get_gid() or "").startswith("fw-")
    }


def test_each_category_is_a_layer_and_the_layers_stack_up_to_the_total():
    ax = plot_memory_mountain(ROWS)
    drawn = layers(ax)
    assert list(drawn) == ["parameters", "gradients", "activations"]
    assert drawn["parameters"].max() == 10 and drawn["gradients"].max() == 12 and drawn["activations"].max() == 16
    assert ax.get_ylabel() == "MiB"


def test_the_peak_is_marked_and_said():
    ax = plot_memory_mountain(ROWS, limit=32 * MIB)
    (peak,) = [line for line in ax.lines if line.get_gid() == "fw-peak"]
    assert list(peak.get_xydata()[0]) == [1, 16]
    assert "peak 16 MiB, of which parameters 62%" in ax.get_xlabel() and "end of step 12 MiB" in ax.get_xlabel()
    (limit,) = [line for line in ax.lines if line.get_gid() == "fw-limit"]
    assert limit.get_ydata()[0] == 32


def test_phases_are_named_without_covering_each_other(overlaps):
    ax = plot_memory_mountain(ROWS, phases=[("forward", 0, 1), ("backward", 1, 2)])
    named = [t for t in ax.texts if t.get_gid() == "fw-phase"]
    assert [t.get_text() for t in named] == ["forward", "backward"]
    assert not overlaps(ax.figure, [*named, *ax.get_legend().get_texts(), *[t for t in ax.texts if t.get_gid() == "fw-badge"]])


def test_no_rows_one_row_and_rows_out_of_order():
    assert "nothing" in plot_memory_mountain([]).get_xlabel()
    plot_memory_mountain(ROWS[:1]).figure.canvas.draw()
    plot_memory_mountain([(0, {}), (1, {})]).figure.canvas.draw()
    with pytest.raises(ValueError, match="positions"):
        plot_memory_mountain(ROWS[::-1])


def test_bars_end_at_their_totals_and_say_them():
    bars = [
        ("all", {"parameters": 15e9, "gradients": 15e9, "optimizer": 90e9}),
        ("split", {"parameters": 0.25e9, "optimizer": 1.5e9}),
    ]
    ax = plot_shrinking_bars(bars, limit=32e9, limit_name="V100")
    ends = np.zeros(2)
    for patch in ax.patches:
        ends[round(patch.get_y() + patch.get_height() / 2)] += patch.get_width()
    assert ends == pytest.approx([120, 1.75])
    assert [t.get_text() for t in ax.texts if t.get_gid() == "fw-total"] == ["120 GB", "1.75 GB"]
    assert "V100, 32 GB" in ax.get_xlabel()
    with pytest.raises(ValueError, match="empty"):
        plot_shrinking_bars([])


def test_unknown_categories_get_colours_of_their_own():
    ax = plot_shrinking_bars([("x", {"parameters": 1, "kv cache": 2, "masks": 3})])
    assert len({p.get_facecolor() for p in ax.patches}) == 3
