"""Actions print and parse back, errors name the cell and the nearest thing that would be read, needs are what the text says."""

import re

import pytest

from fourwalls.parallel.pipeline.actions import (
    Action,
    Joined,
    gives,
    grid,
    microbatches_of,
    needs,
    parse,
    parse_action,
    parts,
    placement,
    read,
    stages_of,
    to_text,
)
from fourwalls.parallel.pipeline.catalogue import SCHEDULES, build

TEXT = """
rank 0: 0F0 0F1  .  0B0 0B1   # the first
rank 1: .  1F0, 1F1+1B0, 1B1
"""


def test_an_action_prints_and_parses():
    assert str(Action(2, "F", 0)) == "2F0" == repr(Action(2, "F", 0))
    assert parse_action("12W345") == Action(12, "W", 345)
    joined = parse_action("0F3+1B1")
    assert joined == Joined((Action(0, "F", 3), Action(1, "B", 1))) and str(joined) == "0F3+1B1"
    assert parts(joined) == (Action(0, "F", 3), Action(1, "B", 1)) and parts(None) == ()
    assert parts(Action(0, "F", 0)) == (Action(0, "F", 0),)
    assert parse_action(".") is None and parse_action("-") is None


def test_a_grid_parses_with_names_commas_comments_and_idle_slots():
    schedule = parse(TEXT)
    assert [len(row) for row in schedule] == [5, 4] and schedule[0][2] is None
    assert schedule[1][2] == Joined((Action(1, "F", 1), Action(1, "B", 0)))
    assert parse(to_text(schedule)) == schedule
    assert (stages_of(schedule), microbatches_of(schedule), placement(schedule)) == (2, 2, {0: 0, 1: 1})


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_survives_the_way_through_text(name):
    schedule = build(name, 3, 6, chunks=2)
    assert parse(to_text(schedule)) == schedule == read([[str(cell) for cell in row] for row in schedule])
    assert parse(grid(schedule, names=True)) == schedule


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("2f0", "did you mean 2F0?"),
        ("F0", "on stage 0 it reads 0F0"),
        ("1F", "micro-batch 0 reads 1F0"),
        ("1X0", "there is no kind X; kinds are F (forward), B (backward), I (input gradient), W (weight gradient)"),
        ("forward", "as in 2F0"),
        ("0F0+", "as in 2F0"),
        ("0F0+1g1", "'1g1' in '0F0+1g1'"),
        ("-1F0", "nearest 1F0"),
    ],
)
def test_what_is_no_action_is_named_with_the_nearest_that_is(cell, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_action(cell)
    with pytest.raises(ValueError, match=r"line 2, cell 3: .*" + re.escape(cell.rsplit("+", 1)[-1])):
        parse(f"0F0 0B0\n1F0 1B0 {cell}")
    with pytest.raises(ValueError, match="rank 1, cell 1"):
        read([["0F0"], [cell]])


NO_SCHEDULES = [None, 7, [], [[3]], [[(0, "F")]], [[(0, "X", 1)]], [[(-1, "F", 1)]], [5], [Action(0, "F", 0)], "", "# a"]


@pytest.mark.parametrize("bad", NO_SCHEDULES)
def test_what_is_no_schedule_is_refused(bad):
    with pytest.raises(ValueError, match="action|empty|schedule"):
        read(bad)


def test_read_takes_plain_tuples_and_leaves_what_it_was_given_alone():
    given = [[(0, "F", 0), "0B0", None]]
    got = read(given)
    assert got == [[Action(0, "F", 0), Action(0, "B", 0), None]]
    got[0].append("more")
    assert len(given[0]) == 3
    assert read([["0F0", "0B0"]]) == read(["0F0 0B0"]) == read("0F0 0B0")


def test_needs_and_gives():
    assert needs(Action(0, "F", 3), 4) == ()
    assert needs(Action(2, "F", 3), 4) == (("F", 1, 3),)
    assert needs(Action(3, "B", 1), 4) == (("F", 3, 1),)
    assert needs(Action(2, "B", 1), 4) == (("F", 2, 1), ("G", 3, 1)) == needs(Action(2, "I", 1), 4)
    assert needs(Action(2, "W", 1), 4) == (("G", 2, 1),)
    assert gives(Action(1, "B", 0)) == (("G", 1, 0), ("W", 1, 0))
    assert [gives(Action(1, kind, 0)) for kind in "FIW"] == [(("F", 1, 0),), (("G", 1, 0),), (("W", 1, 0),)]


def test_a_stage_has_one_rank():
    with pytest.raises(ValueError, match="stage 0 is on rank 0 and on rank 1"):
        placement(read("0F0 0B0\n0F1 0B1"))


def test_a_marked_cell_stands_in_brackets_and_long_grids_are_cut():
    schedule = build("gpipe", 2, 20)
    text = grid(schedule, mark=(1, 10), names=True, around=3)
    assert "[1F10]" in text and text.splitlines()[0].startswith("rank 0: ... 0F7") and text.splitlines()[0].endswith(" ...")
    assert len(text.splitlines()[0].split()) == 2 + 7 + 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0f0 0b0", "kinds are capital letters; did you mean 0F0?"),
        ("０Ｆ０ 0B0", "signs are those of a plain keyboard; did you mean 0F0?"),
        ("0F0 0В0", "(U+0412) is no plain letter or digit"),
        ("0F٣ 0B0", "(U+0663) is no plain letter or digit"),
        ("0F-1 0B-1", "stages and micro-batches count from 0; nearest 0F1"),
        ("-1F0", "count from 0; nearest 1F0"),
        ("0F0;0B0", "is no action"),
        ("0F0 + 0B0", "is no action"),
        ("9" * 5000 + "F0", "is no action"),
        ("# nothing but a remark", "the grid is empty"),
    ],
)
def test_strange_signs_are_refused_with_what_was_meant(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text)


def test_what_a_chinese_keyboard_or_a_copied_page_adds_is_read():
    plain = parse("0F0 0F1 0B0 0B1")
    copied = "\ufeff0F0 0F1\u00a00B0 0B1", "0F0\u30000F1\t0B0 0B1\r\n", "0F0 0F1 [0B0] 0B1"
    for text in (*copied, "rank 0：0F0，0F1，0B0，0B1", "0F0、0F1｜0B0 0B1"):
        assert parse(text) == plain, text


@pytest.mark.parametrize(
    "row",
    [
        [Action(0, "F", -1)], [Action(-1, "F", 0)], [Action(0, "F", 0.5)], [Action(0, "F", True)], [Action(0, "X", 0)],
        [(0, ["F"], 0)], [("0", "F", "0")], [Joined(())], [Joined(("0F0", None))], [["0F0"]], [b"0F0"], None, 5,
    ],
)  # fmt: skip
def test_a_list_that_holds_no_actions_is_refused(row):
    with pytest.raises(ValueError, match=r"is no action|joins no actions|a list of actions is wanted"):
        read([row])


def test_ten_thousand_actions_are_read_as_they_are():
    rows = build("1f1b", 16, 320)
    assert read(rows) == rows and all(a is b for a, b in zip(read(rows)[0], rows[0], strict=True))
