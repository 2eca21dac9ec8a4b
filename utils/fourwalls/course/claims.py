"""Every claim on trial, with its verdict and the cell that proves it: one table, one page, both from `data/claims.csv`.

The claims are statements of two widely read articles on large-model training. A claim is "planned" until a notebook holds a
cell with its tag; then it is "proven", and a test sees to it that the cell is there.

    page = render(csv)        proven  =>  the notebook has a cell with the tag

Reference: the articles are named in the csv; the verdicts are this project's own.
"""

import csv
import html
import json
from pathlib import Path

from .home import find_root

__all__ = ["COLUMNS", "VERDICTS", "ClaimsTable", "claims_table", "main", "missing_cells", "read_claims", "render"]

COLUMNS = ("id", "claim", "source", "verdict", "corrected", "notebook", "tag", "status")
VERDICTS = {"✓": "holds", "✗": "is wrong", "~": "holds with a condition"}
STATES = ("proven", "planned")


def read_claims(path) -> list[dict]:
    """The rows of claims.csv as dictionaries. Raises ValueError that names the row where one is not well formed."""
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"claims.csv has columns {reader.fieldnames}; it needs {list(COLUMNS)}")
        rows = list(reader)
    seen = set()
    for number, row in enumerate(rows, 2):
        fault = (
            "has too few or too many cells" if None in row or None in row.values()
            else f"repeats the id {row['id']!r}" if row["id"] in seen
            else f"has verdict {row['verdict']!r}; one of {', '.join(VERDICTS)}" if row["verdict"] not in VERDICTS
            else f"has status {row['status']!r}; one of {', '.join(STATES)}" if row["status"] not in STATES
            else "lacks the corrected statement" if row["verdict"] != "✓" and not row["corrected"]
            else "lacks a claim, a notebook or a tag" if not (row["claim"] and row["notebook"] and row["tag"])
            else ""
        )  # fmt: skip
        if fault:
            raise ValueError(f"claims.csv, line {number} {fault}")
        seen.add(row["id"])
    return rows


def render(rows: list[dict]) -> str:
    """The page in Markdown: how many of each verdict, then a table."""
    count = {v: sum(row["verdict"] == v for row in rows) for v in VERDICTS}
    proven = sum(row["status"] == "proven" for row in rows)
    lines = [
        "# Claims on trial",
        "",
        "Made from `data/claims.csv` by `python -m fourwalls.course.claims`; do not edit this page.",
        "",
        f"{len(rows)} claims: "
        + ", ".join(f"{count[v]} {v} ({word})" for v, word in VERDICTS.items())
        + f". {proven} are proven by a cell so far.",
        "",
        "| | claim | what is true | where |",
        "|---|---|---|---|",
    ]
    for row in rows:
        where = f"`{row['notebook']}`, cell `{row['tag']}`" if row["status"] == "proven" else f"`{row['notebook']}` (planned)"
        lines.append(f"| {row['verdict']} | {_cell(row['claim'])} | {_cell(row['corrected']) or 'as stated'} | {where} |")
    return "\n".join(lines) + "\n"


def missing_cells(rows: list[dict], notebooks) -> list[str]:
    """The proven claims whose notebook in folder `notebooks` has no cell with the tag, a sentence each."""
    faults, tags = [], {}
    for row in rows:
        if row["status"] != "proven":
            continue
        name = row["notebook"]
        if name not in tags:
            path = Path(notebooks) / f"{name}.ipynb"
            book = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": []}
            tags[name] = {
                tag
                for cell in book["cells"]
                for tag in cell.get("metadata", {}).get("tags", [])
                if cell.get("cell_type") == "code"
            }
        if row["tag"] not in tags[name]:
            faults.append(f"{row['id']} is marked proven, but {name} has no code cell with the tag {row['tag']}")
    return faults


class ClaimsTable(list):
    """Rows that show themselves as a table in a notebook."""

    def _repr_html_(self) -> str:
        head = "<tr><th></th><th>claim</th><th>what is true</th><th>where</th></tr>"
        body = "".join(
            f"<tr><td>{row['verdict']}</td><td>{html.escape(row['claim'])}</td>"
            f"<td>{html.escape(row['corrected'] or 'as stated')}</td>"
            f"<td>{html.escape(row['notebook'])}{'' if row['status'] == 'proven' else ' (planned)'}</td></tr>"
            for row in self
        )
        return f'<table class="fw-claims">{head}{body}</table>'

    def __repr__(self) -> str:
        return "\n".join(f"{row['verdict']} {row['claim']}  [{row['corrected'] or 'as stated'}]" for row in self)


def claims_table(notebook: str = "") -> ClaimsTable:
    """All claims, or those of one notebook ("03" or "03_ring_all_reduce"). Raises ValueError outside the project."""
    root = find_root()
    if root is None:
        raise ValueError("claims_table works inside the project: no folder at or above this one holds start.py")
    return ClaimsTable(row for row in read_claims(root / "data" / "claims.csv") if row["notebook"].startswith(notebook))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Write data/claims.md beside data/claims.csv."""
    root = find_root()
    if root is None:
        raise SystemExit("run this inside the project: no folder at or above this one holds start.py")
    rows = read_claims(root / "data" / "claims.csv")
    (root / "data" / "claims.md").write_text(render(rows), encoding="utf-8")
    print(f"data/claims.md: {len(rows)} claims")


if __name__ == "__main__":
    main()
