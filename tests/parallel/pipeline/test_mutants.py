"""Planted bugs: each line of the table changes one place of the library, and the named check must fail on it and hold without."""

import importlib
import types

import pytest

from fourwalls.cost.published import published
from fourwalls.parallel.pipeline import actions
from fourwalls.parallel.pipeline import legality as right_legality
from fourwalls.parallel.pipeline.catalogue import build

from ...planting import planted
from .test_legality import judge, random_schedule
from .test_schedules import TORCH
from .test_simulate import another_walk

PACKAGE = "fourwalls.parallel.pipeline."


def check_torch_order(m, function, name):
    assert getattr(m, function)(4, 8) == TORCH[name, 4, 8]


def check_published(m, function, column):
    from fourwalls.parallel.pipeline.simulate import Times, simulate

    row = published("zerobubble_table5_6_bubbles").rows[3]
    f, b, w, link = (float(row[k]) for k in ("T_F", "T_B", "T_W", "T_comm"))
    run = simulate(getattr(m, function)(8, 24), Times(f, b, w, link=link))
    assert f"{run.span_bubble_of_total:.4f}" == f"{float(row[column]):.4f}"


def check_held(m, doubled):
    from fourwalls.parallel.pipeline.simulate import simulate

    peaks = simulate(m.one_f_one_b(4, 9, doubled=doubled)).peaks
    assert peaks == tuple(min(2 * (4 - i) - 1 if doubled else 4 - i, 9) for i in range(4))


def check_peak(m, function, peak):
    from fourwalls.parallel.pipeline.simulate import simulate

    assert simulate(getattr(m, function)(4, 9)).peaks == (peak,) * 4


def check_legal(m, function, *sizes):
    right_legality.check(getattr(m, function)(*sizes))


def check_fill(m):
    from fourwalls.parallel.pipeline.simulate import simulate

    run = simulate(m.fill(4, 8, 4))
    assert (run.makespan, run.peak) == (27, 4)
    assert simulate(m.fill(4, 8, 2)).peak <= 2
    check_published(types.SimpleNamespace(go=lambda p, n: _fill_published(m, p, n)), "go", "br_ZB_2p")


def _fill_published(m, p, n):
    row = published("zerobubble_table5_6_bubbles").rows[3]
    f, b, w, link = (float(row[k]) for k in ("T_F", "T_B", "T_W", "T_comm"))
    return m.fill(p, n, 2 * p, times=m.Times(f, b, w, link=link), after_input=0.433)


def check_judged(m):
    import random

    for seed in range(120):
        schedule, rng = random_schedule(seed), random.Random(seed)
        assert m.is_legal(schedule), seed
        row = rng.choice([row for row in schedule if len(row) > 1] or schedule)
        row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
        assert m.is_legal(schedule) is judge(schedule), seed


def check_incomplete(m):
    two = ("0F0 0B0\n1F0 1B0 0F1 0B1", "0F0 0B0\n2F0 2B0", "0F0 0B0\n0F1 0B1")
    for text in ("0F0", "0F0 0I0", "0F0 0F0 0B0", "0F0 0I0 0W0 0B0", *two):
        assert not m.is_legal(text), text


def check_limit(m):
    gpipe, split = build("gpipe", 3, 6), build("zb-h1", 4, 8)
    assert m.is_legal(gpipe, limit=6) and not m.is_legal(gpipe, limit=5)
    assert m.is_legal(split, limit=4) and not m.is_legal(split, limit=3)


def check_blame(m):
    with pytest.raises(ValueError, match="rank 1, cell 1: B3 on stage 1 needs F3"):
        m.check("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1B3 1B2 1B1 1B0 1F3 1F2 1F1 1F0")


def check_walk(m):
    for seed in range(30):
        schedule = [[cell for cell in row if cell is not None] for row in random_schedule(seed)]
        stages = actions.stages_of(schedule)
        times = m.Times(forward=2, input=1, weight=3, link=0.5, joined=0.75)
        run = m.simulate(schedule, times)
        start, end = another_walk(schedule, times, stages, 6)
        assert run.start == [[start[r, k] for k in range(len(row))] for r, row in enumerate(schedule)]
        assert run.end == [[end[r, k] for k in range(len(row))] for r, row in enumerate(schedule)]


def check_bubbles(m):
    run = m.simulate(build("1f1b", 4, 8), forward=1, backward=2)
    assert (run.bubble_of_ideal, round(run.bubble_of_total, 4), run.peak) == (0.375, 0.2727, 4)
    split = m.simulate(build("zb-h1", 4, 8), after_input=0.5)
    assert split.peaks == (4, 3.5, 3, 2.5)


def check_trace(m):
    run = m.simulate(build("1f1b", 3, 5), link=0.5, message_bytes=8)
    assert run.trace.messages_sent() == 2 * 2 * 5
    assert {e.peer for e in run.trace if e.kind == "wait" and e.rank == 0} == {1}
    assert all(run.trace.busy(r) == pytest.approx(run.work[r]) for r in range(3))


def check_hang(m):
    with pytest.raises(ValueError, match="needs"):
        m.simulate("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match="needs"):
        m.simulate("0F0 0W0 0I0")


def check_cuts(m):
    layers = [m.Layer(str(k), s, s, 1, 2) for k, s in enumerate((5, 1, 1, 1, 6, 2))]
    found = m.partition(layers, 3)
    assert found.bottleneck == 7 and m.partition(layers, 3, overlap=False).bottleneck == 8
    assert m.partition([m.Layer("a", 1, link=9), m.Layer("b", 1), m.Layer("c", 1)], 2).bottleneck == 2


# module, what is written there, what is planted, the check that sees it
MUTANTS = [
    ("schedules", "2 * left - 1 if doubled else left,", "2 * left - 1 if doubled else left + 1,", lambda m: check_held(m, False)),
    ("schedules", "2 * left - 1 if doubled", "2 * left if doubled", lambda m: check_held(m, True)),
    ("schedules", "if warm_up + m < microbatches:",
     "if warm_up + m <= microbatches:", lambda m: check_legal(m, "one_f_one_b", 3, 5)),
    ("schedules", 'for kind in "FB" for m in range(microbatches)]',
     'for kind in "BF" for m in range(microbatches)]', lambda m: check_legal(m, "gpipe", 2, 3)),
    ("interleaved", "2 * (ranks - 1 - rank), microbatches",
     "(ranks - 1 - rank), microbatches", lambda m: check_torch_order(m, "interleaved_one_f_one_b", "Interleaved1F1B")),
    ("interleaved", "for c in reversed(range(chunks)) for m in group]",
     "for c in range(chunks) for m in group]", lambda m: check_legal(m, "interleaved_one_f_one_b", 2, 4, 2)),
    ("interleaved", "for c, m in reversed(down)]",
     "for c, m in down]", lambda m: check_legal(m, "looped_breadth_first", 2, 4, 2)),
    ("zero_bubble", "late = 2 * rank if doubled else rank",
     "late = 2 * rank if doubled else rank + 1", lambda m: check_peak(m, "zb_h1", 4)),
    ("zero_bubble", "late = 2 * rank if doubled", "late = rank if doubled", lambda m: check_published(m, "zb_h2", "br_ZB_H2")),
    ("v_shape", "2 * ranks - 1 - rank", "2 * ranks - 2 - rank", lambda m: check_torch_order(m, "zb_v", "ZBVZeroBubble")),
    ("v_shape", '"B" if k < whole_ones else "I"',
     '"B" if k <= whole_ones else "I"', lambda m: check_torch_order(m, "dualpipe_v", "DualPipeV")),
    ("v_shape", "if k == 0 and behind == 0:", "if k == 0:", lambda m: check_torch_order(m, "dualpipe_v", "DualPipeV")),
    ("fill", "self.held[rank] + 1 <= self.limit", "self.held[rank] <= self.limit", check_fill),
    ("fill", 'if last == "F" else', 'if last == "I" else', check_fill),
    ("fill", "if owed and gap > 0 and", "if False and", check_fill),
    ("legality", "for product in gives(action):\n                    done.add(product)",
     'for product in (*gives(action), ("G", action.stage, action.microbatch)):\n                    done.add(product)',
     check_judged),
    ("legality", "next((n for a in parts(cell) for n in needs(a, stages) if n not in done), None)",
     "next((n for a in parts(cell)[:1] for n in needs(a, stages) if n not in done), None)", check_judged),
    ("legality", 'return sets["I"] == sets["W"] and not sets["I"] & sets["B"] and', "return", check_incomplete),
    ("legality", "if homes != stages or", "if", check_incomplete),
    ("legality", 'sets["I"] | sets["B"] == sets["F"]', "True", check_incomplete),
    ("legality", '"W": -after_input}', '"W": 0.0}', check_limit),
    ("legality", "and total > limit + 1e-9", "and total > limit + 1 + 1e-9", check_limit),
    ("legality", "circle = circle[circle.index(circle[-1]) + 1 :]", "circle = circle[:-1]", check_blame),
    ("simulate", "seconds[kind][s], into[s + 1])", "seconds[kind][s], 0)", check_walk),
    ("simulate", 's * n, seconds["F"][s], into[s])', 's * n, seconds["F"][s], 0)', check_walk),
    ("simulate", "round(total * self.times.joined)", "total", check_walk),
    ("simulate", "if clock > begin:\n                        begin = clock", "pass", check_walk),
    ("simulate", "(whole - sum(self.work)) / whole if whole",
     "(whole - sum(self.work)) / sum(self.work) if whole", check_bubbles),
    ("simulate", "(self.ranks * self.makespan - work) / work if",
     "(self.ranks * self.makespan - work) / (self.ranks * self.makespan) if", check_bubbles),
    ("simulate", '"I": self.after_input - 1.0, "W": -self.after_input', '"I": -1.0, "W": 0.0', check_bubbles),
    ("simulate", 'other = stage - 1 if kind == "F" else stage + 1 if kind in "BI" else -1',
     'other = stage + 1 if kind == "F" else stage - 1 if kind in "BI" else -1', check_trace),
    ("simulate", "shown and 0 <= other < run.stages and", "shown and 0 <= other < run.stages - 1 and", check_trace),
    ("simulate", '[(gradients + s * n, nobody, seconds["W"][s], 0)', '[(always, nobody, seconds["W"][s], 0)', check_hang),
    ("simulate", "check(self.schedule)  # says why", "pass", check_hang),
    ("partition", "worst = max(best[first], price(stage, first, end))",
     "worst = best[first] + price(stage, first, end)", check_cuts),
    ("partition", "if stage < self.stages - 1 else 0.0", "if False else 0.0", check_cuts),
]  # fmt: skip


def module_of(name, old=None, new=None):
    """The module as it is written, or with one place changed."""
    right = importlib.import_module(PACKAGE + name)
    return right if old is None else planted(right, old, new)


@pytest.mark.parametrize(("name", "old", "new", "check"), MUTANTS, ids=[f"{m[0]}-{k}" for k, m in enumerate(MUTANTS)])
def test_the_planted_bug_is_caught(name, old, new, check):
    check(module_of(name))
    wrong = module_of(name, old, new)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError, pytest.fail.Exception)):
        check(wrong)
