"""Legal schedules pass, every kind of corruption is refused at the right cell, and an independent judge agrees on random ones."""

import random
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from fourwalls.parallel.pipeline.actions import Action, Joined, gives, needs, parts, read, stages_of
from fourwalls.parallel.pipeline.catalogue import SCHEDULES, build
from fourwalls.parallel.pipeline.legality import IllegalSchedule, check, is_legal
from fourwalls.parallel.pipeline.simulate import simulate


def random_schedule(seed):
    """A legal schedule that nobody would write: stages anywhere, B whole or split, ready actions in any order, some joined."""
    rng = random.Random(seed)
    ranks, stages, m = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 6)
    home = [s if s < ranks else rng.randrange(ranks) for s in range(stages)]
    ranks = min(ranks, stages)
    home = [h % ranks for h in home]
    left = []
    for s in range(stages):
        for k in range(m):
            left += [Action(s, kind, k) for kind in ("FB" if rng.random() < 0.5 else "FIW")]
    made, rows = set(), [[] for _ in range(ranks)]
    while left:
        ready = [a for a in left if all(n in made for n in needs(a, stages))]
        action = rng.choice(ready)
        partner = next((a for a in ready if a != action and home[a.stage] == home[action.stage]), None)
        cell = Joined((action, partner)) if partner and rng.random() < 0.2 else action
        rows[home[action.stage]].append(cell)
        for a in parts(cell):
            left.remove(a)
            made |= {product for product in gives(a) if product[0] != "W"}
        if rng.random() < 0.1:
            rows[rng.randrange(ranks)].append(None)
    return rows


def judge(schedule):
    """Whether the order of each rank and the needs of each action are free of circles: by the standard library."""
    stages = stages_of(schedule)
    maker, graph = {}, {}
    for rank, row in enumerate(schedule):
        for place, cell in enumerate(row):
            for a in parts(cell):
                if a.kind != "W":
                    maker["F" if a.kind == "F" else "G", a.stage, a.microbatch] = rank, place
    for rank, row in enumerate(schedule):
        for place, cell in enumerate(row):
            before = {maker[n] for a in parts(cell) for n in needs(a, stages)}
            graph[rank, place] = before | ({(rank, place - 1)} if place else set())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_random_legal_schedules_are_accepted(seed):
    schedule = random_schedule(seed)
    assert check(schedule) == schedule and judge(schedule)
    run = simulate(schedule, forward=1, input=2, weight=3, link=0.5)
    assert min(held for curve in run.live for _, held in curve) > -1e-9


def test_random_orders_are_judged_as_by_the_standard_library():
    verdicts = []
    for seed in range(200):
        schedule, rng = random_schedule(seed), random.Random(seed)
        row = rng.choice([row for row in schedule if len(row) > 1] or schedule)
        for _ in range(rng.randint(1, 3)):
            row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
        verdicts.append(is_legal(schedule))
        assert verdicts[-1] is judge(schedule), schedule
        if not verdicts[-1]:
            with pytest.raises(IllegalSchedule):
                simulate(schedule)
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8, "both verdicts must occur"


CORRUPTIONS = {
    "lost": lambda row, k, rng: row.pop(k),
    "twice": lambda row, k, rng: row.insert(rng.randrange(len(row) + 1), row[k]),
    "another micro-batch": lambda row, k, rng: row.__setitem__(k, row[k]._replace(microbatch=row[k].microbatch + 1)),
    "another stage": lambda row, k, rng: row.__setitem__(k, row[k]._replace(stage=row[k].stage + 1)),
    "another kind": lambda row, k, rng: row.__setitem__(k, row[k]._replace(kind=rng.choice("FBIW".replace(row[k].kind, "")))),
}


@pytest.mark.parametrize("fault", CORRUPTIONS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "fill"])
def test_random_corruptions_are_refused(name, fault):
    for seed in range(10):
        rng = random.Random(seed)
        schedule = build(name, rng.randint(1, 4), rng.randint(1, 6), chunks=2)
        row = rng.choice(schedule)
        CORRUPTIONS[fault](row, rng.randrange(len(row)), rng)
        with pytest.raises(IllegalSchedule):
            check(schedule)
        with pytest.raises(IllegalSchedule):
            simulate(schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_backward_before_its_forward_is_refused_at_its_cell(name):
    for seed in range(10):
        rng = random.Random(seed)
        schedule = build(name, rng.randint(1, 4), rng.randint(1, 6), chunks=2)
        row = rng.choice(schedule)
        backward = rng.choice([a for a in row if a.kind in "BI"])
        row.remove(backward)
        place = row.index(backward._replace(kind="F"))
        row.insert(place, backward)
        with pytest.raises(IllegalSchedule) as caught:
            check(schedule)
        assert (caught.value.action, caught.value.place) == (backward, place) and f"[{backward}]" in str(caught.value)


def test_trial_d07_backward_before_its_forward_has_passed_all_stages():
    schedule = build("1f1b", 4, 8)
    row = schedule[0]
    row.remove(Action(0, "B", 4))
    row.insert(row.index(Action(0, "F", 4)) + 1, Action(0, "B", 4))
    with pytest.raises(IllegalSchedule) as caught:
        check(schedule)
    error = caught.value
    assert (error.rank, error.place, str(error.action), str(error.missing)) == (0, 6, "0B4", "1B4")
    assert str(error).startswith("rank 0, cell 7: B4 on stage 0 needs B4 from stage 1; 1B4 cannot run before: rank 1 stands at")
    assert "[0B4]" in error.grid and error.grid.count("rank ") == 4
    with pytest.raises(IllegalSchedule):
        simulate(schedule)


def test_the_message_of_the_schedule_editor():
    schedule = build("1f1b", 4, 4)
    schedule[1].remove(Action(1, "B", 3))
    schedule[1].insert(4, Action(1, "B", 3))
    with pytest.raises(IllegalSchedule, match="rank 1, cell 5: B3 on stage 1 needs B3 from stage 2; 2B3 cannot run"):
        check(schedule)
    schedule = build("gpipe", 4, 4)
    schedule[2] = [*schedule[2][:4], *reversed(schedule[2][4:])]
    schedule[3].insert(4, schedule[3].pop())
    assert is_legal(schedule)
    schedule[1].insert(1, schedule[1].pop())
    with pytest.raises(IllegalSchedule, match="rank 1, cell 2: B3 on stage 1 needs B3 from stage 2"):
        check(schedule)


def test_input_gradients_are_named_as_they_are_written():
    schedule = build("zb-h1", 2, 2)
    schedule[0] = read("0F0 0I0 0F1 0I1 0W0 0W1")[0]
    schedule[1] = read("1F0 1F1 1I0 1I1 1W0 1W1")[0]
    with pytest.raises(IllegalSchedule, match="I0 on stage 0 needs I0 from stage 1; 1I0 cannot run before: rank 1 stands"):
        check(schedule)


@pytest.mark.parametrize(
    ("text", "says", "place"),
    [
        ("0F0 0F1 0B0", "0F1 has no backward pass; 0B1 is missing, or 0I1 and 0W1", (0, 1)),
        ("0F0 0I0", "0W0 is missing; 0I0 is only half of a backward pass", (0, 1)),
        ("0F0 0W0", "0I0 is missing; 0W0 is only half of a backward pass", (0, 1)),
        ("0F0 0I0 0W0 0B0", "a whole backward pass here too, 0B0", (0, 1)),
        ("0B0", "0F0 is missing", (0, 0)),
        ("0F0 0F0 0B0", "0F0 was there before, in cell 1; each action runs once", (0, 1)),
        ("0F0 0F0+0B0", "each action runs once", (0, 1)),
        ("0F0+0B0", "B0 on stage 0 needs F0 of its own stage, but 0F0+0B0 is one action", (0, 0)),
        ("0F0 0W0 0I0", "W0 on stage 0 needs I0 of its own stage, which comes later on this rank, in cell 3", (0, 1)),
        ("0F0 0B0\n2F0 2B0", "1F0 is missing; no rank has stage 1", (1, 2)),
        ("0F0 0B0\n1F0 1B0 0F1 0B1", "stage 0 is on rank 0; a stage has one rank", (1, 2)),
        ("0F0 0F1 0B0 0B1\n1F0 1B0", "1F1 is missing", (1, 2)),
        ("0F0 0F1 0B0 0B1\n1B1 1B0 1F0 1F1", "B1 on stage 1 needs F1 of its own stage", (1, 0)),
    ],
)
def test_each_fault_has_its_words_and_its_cell(text, says, place):
    with pytest.raises(IllegalSchedule, match=re.escape(says)) as caught:
        check(text)
    assert (caught.value.rank, caught.value.place) == place
    assert not is_legal(text)


def test_counts_that_are_asked_for_are_checked():
    schedule = build("gpipe", 2, 3)
    check(schedule, stages=2, microbatches=3)
    with pytest.raises(IllegalSchedule, match="0F3 is missing"):
        check(schedule, microbatches=4)
    with pytest.raises(IllegalSchedule, match="there are micro-batches 0 to 1"):
        check(schedule, microbatches=2)
    with pytest.raises(IllegalSchedule, match="no rank has stage 2"):
        check(schedule, stages=3)
    with pytest.raises(IllegalSchedule, match="there are stages 0 to 0"):
        check(schedule, stages=1)


def test_forward_only_must_be_asked_for():
    schedule = build("forward-only", 2, 3, chunks=2)
    check(schedule, forward_only=True)
    with pytest.raises(IllegalSchedule, match="has no backward pass"):
        check(schedule)
    with pytest.raises(IllegalSchedule, match="forward passes only"):
        check(build("gpipe", 2, 2), forward_only=True)


def test_slots_are_columns_of_time():
    check("0F0 . . 0B0\n. 1F0 1B0", slots=True)
    with pytest.raises(IllegalSchedule, match=re.escape("F0 on stage 1 needs F0 from stage 0, which stands in slot 1")):
        check("0F0 0B0\n1F0 1B0", slots=True)
    with pytest.raises(IllegalSchedule, match="B0 on stage 0 needs B0 from stage 1, which stands in slot 3"):
        check("0F0 . 0B0\n. 1F0 1B0", slots=True)


def test_memory_limit():
    for p, m in ((2, 4), (4, 8), (4, 3)):
        check(build("1f1b", p, m), limit=min(p, m))
        with pytest.raises(IllegalSchedule, match="the limit is"):
            check(build("1f1b", p, m), limit=min(p, m) - 1)
    with pytest.raises(IllegalSchedule, match=re.escape("0F4 makes rank 0 hold 5 activations; the limit is 4")) as caught:
        check(build("gpipe", 2, 8), limit=4)
    assert (caught.value.rank, caught.value.place) == (0, 4)
    split = build("zb-h1", 4, 8)
    check(split, limit=4)
    for kept in (0.0, 0.4, 1.0):
        peak = simulate(split, after_input=kept).peak
        check(split, limit=peak, after_input=kept)
        assert not is_legal(split, limit=peak - 0.01, after_input=kept)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_checked_is_returned_and_not_changed(name):
    schedule = build(name, 2, 4)
    copy = [list(row) for row in schedule]
    assert check(schedule, forward_only=name == "forward-only") == copy == schedule


def test_a_schedule_without_any_action_is_refused():
    for empty in ([[]], [[None], []], ". .\n."):
        for look in (check, simulate):
            with pytest.raises(IllegalSchedule, match="there is no action at all"):
                look(empty)


@pytest.mark.parametrize(
    ("word", "value"), [("limit", -1), ("limit", float("nan")), ("after_input", -1), ("stages", 0), ("microbatches", 1.5)]
)
def test_limits_that_are_none_are_refused(word, value):
    with pytest.raises(ValueError, match=f"{word} is {value}; allowed: a (whole )?number of at least"):
        check(build("gpipe", 2, 2), **{word: value})
