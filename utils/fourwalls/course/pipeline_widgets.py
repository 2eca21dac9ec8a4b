"""The bubble explorer and the schedule editor, joined with the schedules of `parallel.pipeline`: `fw.bubble_explorer()`,
`fw.schedule_editor()`.

The widgets draw plain data; here the schedules are built, checked and simulated for them.

    setting -> schedule -> Simulated -> rows, live, bubbles        text -> cells, or the first bad cell

Reference: viz/bubble_explorer.py and viz/schedule_editor.py for the widgets.
"""

from collections.abc import Callable, Mapping

from ..ranks.trace import PS
from ..viz import bubble_explorer as bubble
from ..viz import schedule_editor as editor

__all__ = ["bubble_explorer", "model", "read", "schedule_editor"]


def bubble_explorer():
    """Widget 4: turn schedule, p, m, v, times, link, one slow stage and memory. Returns the widget, or None with no front end."""
    from ..parallel.pipeline.catalogue import SCHEDULES

    names = {n: (e.title, e.chunks is None) for n, e in SCHEDULES.items() if not e.forward_only}
    return bubble.bubble_explorer(model, names)


def schedule_editor(run: Callable | None = None, *, start: str = "gpipe"):
    """Widget 5: write a schedule as text, have it checked, timed and drawn.

    run: a function of the text that runs it on real ranks and returns a sentence about it.  start: the schedule to begin with.
    Returns the widget, or None with no front end.
    """
    from ..parallel.pipeline.catalogue import SCHEDULES

    names = {name: SCHEDULES[name].title for name in ("naive", "gpipe", "1f1b", "zb-v", "interleaved")}
    if start not in names:
        raise ValueError(f"start is {start!r}; allowed: {', '.join(names)}")
    if run is not None and not callable(run):
        raise ValueError(f"run is a function of the schedule's text that returns a sentence, not {run!r}")
    return editor.schedule_editor(read, _load, names, run, start=start)


def model(setting: Mapping) -> dict:
    """What `viz.bubble_explorer` draws for a setting.

    What is lost is told apart by simulating the same order without the link, and without the slow stage.
    """
    from ..parallel.pipeline.catalogue import SCHEDULES, build
    from ..parallel.pipeline.fill import fill
    from ..parallel.pipeline.simulate import Times, simulate

    entry, p, m = SCHEDULES[setting["schedule"]], setting["p"], setting["m"]
    chunks = entry.chunks or setting["v"]
    stages = p * chunks
    even = Times(setting["F"] / chunks, setting["I"] / chunks, setting["W"] / chunks)
    slow = even
    if setting["slow"] >= 0:  # all that this rank does
        slow = _slower(entry, setting, even, stages)
    real = Times(slow.forward, slow.input, slow.weight, link=setting["link"])
    limit = setting["cap"] or None
    if setting["schedule"] == "fill":  # one walk of three: a reader who drags a slider waits for this
        schedule = fill(p, m, limit, times=real, ways=1)
    else:
        schedule = build(setting["schedule"], p, m, chunks=setting["v"])
    found = simulate(schedule, real, activation=1 / chunks, checked=False)
    without_link = found if not setting["link"] else simulate(schedule, slow, checked=False)
    level = without_link if slow is even else simulate(schedule, even, checked=False)
    work = m * (setting["F"] + setting["I"] + setting["W"])
    parts = {
        "work": work,
        "warm-up": level.makespan - work,
        "imbalance": without_link.makespan - level.makespan,
        "link": found.makespan - without_link.makespan,
    }
    return {**_drawn(found), "parts": parts}


def _slower(entry, setting: Mapping, times, stages: int):
    p, last = setting["p"], stages - 1
    loops = [s % p for s in range(stages)]
    v_shape = [s if s < p else last - s for s in range(stages)]
    for stage, rank in enumerate(v_shape if entry.chunks == 2 else loops):
        if rank == setting["slow"]:
            times = times.slower(stage, setting["factor"], stages)
    return times


def _drawn(run) -> dict:
    """A Simulated as plain data: times as numbers of the unit that F, I and W have."""
    from ..parallel.pipeline.actions import Action, parts

    rows = []
    for row, starts, ends in zip(run.schedule, run.start, run.end, strict=True):
        drawn = []
        for cell, begin, end in zip(row, starts, ends, strict=True):
            if type(cell) is Action:
                drawn.append((cell[1], begin / PS, end / PS, cell[0], cell[2]))
                continue
            actions = parts(cell)
            for k, (stage, kind, microbatch) in enumerate(actions):
                a, b = (begin + (end - begin) * j / len(actions) for j in (k, k + 1))
                drawn.append((kind, a / PS, b / PS, stage, microbatch))
        rows.append(drawn)
    live = [[(t / PS, held) for t, held in curve] for curve in run.live]
    waits = [run.waiting(rank) for rank in range(run.ranks)]
    shares = {"of_total": run.bubble_of_total, "of_ideal": run.bubble_of_ideal}
    return {"rows": rows, "live": live, "makespan": run.makespan, "peaks": list(run.peaks), "waits": waits, **shares}


def read(text: str, times: Mapping) -> dict:
    """What `viz.schedule_editor` draws for a text; ValueError where it is no grid of actions."""
    from ..parallel.pipeline.actions import parse
    from ..parallel.pipeline.legality import IllegalSchedule
    from ..parallel.pipeline.simulate import Times, simulate

    schedule = parse(text)
    cells = [["." if cell is None else str(cell) for cell in row] for row in schedule]
    try:
        run = simulate(schedule, Times(times["F"], times["I"], times["W"]))
    except IllegalSchedule as error:
        return {"cells": cells, "bad": (error.rank, error.place), "reason": error.reason}
    sizes = {"stages": run.stages, "microbatches": run.microbatches}
    return {**_drawn(run), **sizes, "cells": cells, "times_equal": all(times[word] == 1 for word in "FIW")}


def _load(name: str) -> str:
    """The grid of a known schedule for 4 ranks (a V or a loop: 2) and 8 micro-batches, one line a rank."""
    from ..parallel.pipeline.actions import grid
    from ..parallel.pipeline.catalogue import SCHEDULES, build

    return grid(build(name, 4 if SCHEDULES[name].chunks == 1 else 2, 8))
