"""Rungs stand at their logarithms, and no label covers another however close the values are."""

import math

import pytest

from fourwalls.viz import plot_ladder
from fourwalls.viz.ladder import spread

CROWD = [(f"thing {k}", 1e9 * (1 + k / 100), "right") for k in range(12)] + [
    ("one", 1.0, "left"),
    ("model", 2.8e12, "left"),
    ("copy", 2.8e12, "left"),
]


def test_labels_of_equal_values_do_not_overlap(overlaps, boxes):
    ax = plot_ladder(CROWD, unit="bytes")
    labels = [t for t in ax.texts if t.get_gid() == "fw-rung"]
    assert len(labels) == len(CROWD)
    assert not overlaps(ax.figure, labels)
    width, height = ax.figure.get_size_inches() * ax.figure.dpi
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes(ax.figure, labels))


def test_dots_stand_at_the_logarithm():
    ax = plot_ladder([("a", 1e3, "left"), ("b", 2e6, "right")], unit="FLOPs")
    heights = [line.get_ydata()[0] for line in ax.lines if line.get_marker() in ("s", "o")]
    assert heights == [3, math.log10(2e6)]
    assert ax.get_ylabel() == "FLOPs"


def test_spread_keeps_order_distance_and_places_that_are_free():
    out = spread([0.0, 0.1, 5.0], 1.0)
    assert out == pytest.approx([-0.45, 0.55, 5.0])
    assert spread([3.0, 1.0], 1.0) == [3.0, 1.0]
    assert spread([], 1.0) == []


@pytest.mark.parametrize("rungs", [[], [("a", 0, "left")], [("a", 1, "up")]])
def test_bad_rungs_are_refused(rungs):
    with pytest.raises(ValueError, match="rungs"):
        plot_ladder(rungs, unit="bytes")
