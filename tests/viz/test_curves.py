"""Alpha-beta and roofline: dots where they were measured, lines where they were modelled."""

import numpy as np
import pytest

from fourwalls.viz import plot_alpha_beta, plot_roofline


def test_measured_dots_carry_their_spread_and_modelled_lines_do_not():
    ax = plot_alpha_beta([("ring", [(8, 1e-5, 0.8e-5, 2e-5)])], [("ring", [(8, 1e-5), (1024, 2e-5)])], knee=100)
    (container,) = ax.containers
    segment = container.lines[2][0].get_segments()[0]
    assert segment[:, 1] == pytest.approx([0.8e-5, 2e-5])
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {"ring, measured", "ring, modelled"}
    line = next(x for x in ax.lines if x.get_label() == "ring, modelled")
    assert line.get_color() == container.lines[0].get_color(), "one name, one colour"
    assert "MEASURED + MODELLED" in [t.get_text() for t in ax.texts]
    assert "100 B" in ax.get_xlabel()


def test_points_that_a_log_axis_cannot_show_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        plot_alpha_beta([], [("ring", [(0, 1e-5)])])


def test_the_roof_bends_at_the_ridge_and_a_dot_without_a_rate_lies_on_it():
    ax = plot_roofline(100.0, 10.0, [("slow", 1, None), ("fast", 1000, 50.0)])
    roof = next(line for line in ax.lines if line.get_gid() == "fw-roof")
    assert np.asarray(roof.get_xydata())[1].tolist() == [10.0, 100.0]
    dots = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_linestyle() == "None"]
    assert dots == [[1.0, 10.0], [1000.0, 50.0]]
    assert "slow: 1 FLOPs a byte, 10% of peak" in [t.get_text() for t in ax.get_legend().get_texts()]
    with pytest.raises(ValueError, match="above 0"):
        plot_roofline(0, 1)
