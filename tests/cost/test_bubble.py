"""Closed forms of bubbles and activations equal the simulated schedule wherever they are offered, and say where they are not."""

import re

import pytest

from fourwalls.cost.bubble import NAMES, activations_held, pipeline_bubble
from fourwalls.cost.memory import interleave_factor
from fourwalls.cost.published import published
from fourwalls.parallel.pipeline.catalogue import SCHEDULES, build
from fourwalls.parallel.pipeline.simulate import Times, simulate


@pytest.mark.parametrize("name", NAMES)
def test_closed_form_equals_simulation(name):
    entry, compared = SCHEDULES[name], 0
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 4, 5, 8, 16, 24):
            for v in (1, 2, 3) if entry.chunks is None else (1,):
                for f, i, w in ((1, 1, 1), (1, 1, 0.5), (1.5, 2, 1)):
                    try:
                        form = pipeline_bubble(name, p, m, forward=f, input=i, weight=w, chunks=v)
                    except ValueError:
                        continue
                    k = entry.chunks or v
                    run = simulate(build(name, p, m, chunks=v), Times(f / k, i / k, w / k), activation=1 / k, message_bytes=1)
                    took = run.longest_span if name.startswith("zb") else run.makespan
                    assert took == pytest.approx(form.makespan, rel=1e-9), (p, m, v, f, i, w)  # thirds of a picosecond
                    assert run.peak == pytest.approx(form.held)
                    assert run.peaks == pytest.approx([activations_held(name, p, m, rank=r, chunks=v) for r in range(p)])
                    if p > 2 and name not in ("zb-v", "dualpipe-v"):
                        assert run.trace.messages_sent(1) == form.messages, (p, m, v)
                    compared += 1
    assert compared > 10


def test_the_figures_of_the_course():
    gpipe, one = (pipeline_bubble(name, 8, 32, input=0.5, weight=0.5) for name in ("gpipe", "1f1b"))
    assert gpipe.makespan == one.makespan == 78 and round(one.of_total, 4) == 0.1795
    assert (gpipe.held, one.held) == (32, 8)
    small = pipeline_bubble("1f1b", 4, 8)
    assert (small.of_ideal, round(small.of_total, 4)) == (0.375, 0.2727)
    two = pipeline_bubble("interleaved", 8, 32)
    plain = pipeline_bubble("1f1b", 8, 32)
    assert round(two.of_total, 3) == 0.099 and round(1 - two.makespan / plain.makespan, 2) == 0.09
    assert two.messages == 2 * plain.messages and two.held / plain.held == pytest.approx(1.4375) == float(interleave_factor(8, 2))
    assert round(pipeline_bubble("1f1b", 8, 8).of_total, 2) == 0.47, "m = p leaves 47%"


def test_the_formulas_are_those_of_the_papers():
    rows = {row["schedule"]: row for row in published("pipeline_formulas")}
    table = {"ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "1F1B": "1f1b", "GPipe": "gpipe"}
    for theirs, ours in table.items():
        formula = rows[theirs]["bubble_size"].replace("T_", "")
        p, f, b, w = 5, 3.0, 4.0, 1.0  # T_B of Qi et al. is I
        formula = re.sub(r"(\d)([FBW])", r"\1*\2", formula).replace(")(", ")*(")
        whole = b + w if theirs == "GPipe" else b
        value = eval(formula, {"p": p, "F": f, "B": whole, "W": w})
        assert pipeline_bubble(ours, p, 20, forward=f, input=b, weight=w).seconds == value


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("zb-q", {}, "there is one for naive"),
        ("interleaved", {"microbatches": 10}, "nearest with a closed form: 8"),
        ("zb-v", {"weight": 0.5}, "F = I = W"),
        ("zb-h1", {"microbatches": 3}, "from 4 on"),
        ("zb-h2", {"weight": 2}, "up to 1"),
        ("dualpipe-v", {"microbatches": 7}, "from 8 on"),
        ("gpipe", {"ranks": 0}, "nearest 1"),
    ],
)
def test_where_there_is_none_it_says_so(name, options, says):
    with pytest.raises(ValueError, match=says):
        pipeline_bubble(name, **{"ranks": 4, "microbatches": 12, **options})
    with pytest.raises(ValueError, match="allowed: 0 to 3"):
        activations_held("gpipe", 4, 8, rank=4)
