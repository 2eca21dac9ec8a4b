"""The page says what the table says, and a proven claim has its cell."""

import csv
import json
from pathlib import Path

import pytest

from fourwalls.course.claims import COLUMNS, claims_table, missing_cells, read_claims, render

ROOT = Path(__file__).parents[2]


def write(path, *rows):
    good = dict(id="a", claim="C", source="s", verdict="✗", corrected="D", notebook="00_x", tag="t", status="proven")
    with open(path, "w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows({**good, **row} for row in rows)
    return path


def test_the_committed_page_is_made_from_the_committed_table():
    rows = read_claims(ROOT / "data" / "claims.csv")
    assert (ROOT / "data" / "claims.md").read_text(encoding="utf-8") == render(rows), "run `python -m fourwalls.course.claims`"
    assert len(rows) >= 38


def test_every_proven_claim_has_its_cell():
    assert missing_cells(read_claims(ROOT / "data" / "claims.csv"), ROOT / "notebooks") == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (({}, {}), "line 3 repeats the id 'a'"),
        ((dict(verdict="!"),), "line 2 has verdict"),
        ((dict(status="maybe"),), "line 2 has status"),
        ((dict(corrected=""),), "line 2 lacks the corrected"),
        ((dict(tag=""),), "line 2 lacks a claim, a notebook or a tag"),
    ],
)
def test_a_row_that_is_not_well_formed_is_named(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        read_claims(write(tmp_path / "claims.csv", *rows))


def test_other_columns_and_ragged_rows_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("id,claim\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_claims(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text(",".join(COLUMNS) + "\na,b\n")
    with pytest.raises(ValueError, match="line 2 has too few"):
        read_claims(tmp_path / "b.csv")


def test_a_missing_cell_is_found(tmp_path):
    rows = read_claims(
        write(tmp_path / "claims.csv", {}, dict(id="b", tag="u"), dict(id="c", status="planned", notebook="99_none"))
    )
    assert len(missing_cells(rows, tmp_path)) == 2, "no such notebook"
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["t"]}},
        {"cell_type": "markdown", "metadata": {"tags": ["u"]}},
        {"cell_type": "code", "metadata": {}},
    ]
    (tmp_path / "00_x.ipynb").write_text(json.dumps({"cells": cells}))
    assert missing_cells(rows, tmp_path) == ["b is marked proven, but 00_x has no code cell with the tag u"]


def test_page_and_table_escape_what_they_show(project):
    write(
        project / "data" / "claims.csv",
        dict(claim="a | b <i>", corrected="c"),
        dict(id="b", notebook="01_y", status="planned", verdict="~"),
    )
    table = claims_table()
    assert "a \\| b <i>" in render(table) and "1 ✗ (is wrong), 1 ~" in render(table)
    assert "a | b &lt;i&gt;" in table._repr_html_()
    assert [row["id"] for row in claims_table("01")] == ["b"]
    assert "(planned)" in render(table) and "cell `t`" in render(table)
