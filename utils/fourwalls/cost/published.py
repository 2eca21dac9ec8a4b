"""Facts from papers, as tables that a notebook can stand beside its own numbers.

Each file under data/published is a CSV whose first lines start with '#' and say title, source, status and note. A value is
never typed into a notebook: it is read from here, so that its source travels with it.

    row = published("zero_table1").rows[0]

Reference: the `source` line of each file.
"""

import csv
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Published", "folder", "number", "published"]


@dataclass(frozen=True)
class Published:
    """One table: `rows` (a dict of strings each), and what the head of the file says."""

    name: str
    title: str
    source: str
    status: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, **fields) -> dict[str, str]:
        """The one row whose fields equal the given values; ValueError if there is none or more than one."""
        unknown = set(fields) - set(self.columns)
        if unknown:
            raise ValueError(f"{self.name}: no column {sorted(unknown)}; there are {list(self.columns)}")
        found = [r for r in self.rows if all(r[k] == str(v) for k, v in fields.items())]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} rows have {fields}; exactly one is wanted")
        return found[0]

    def column(self, name: str) -> list[str]:
        return [r[name] for r in self.rows]


def number(text: str) -> float:
    """A printed number: "95,000" -> 95000.0, "4.5e18" -> 4.5e18."""
    return float(text.replace(",", ""))


def folder() -> Path:
    """data/published of the checkout that this package belongs to, or what FOURWALLS_DATA names."""
    named = os.environ.get("FOURWALLS_DATA")
    places = [Path(named) / "published"] if named else [p / "data" / "published" for p in Path(__file__).resolve().parents]
    for place in places:
        if place.is_dir():
            return place
    looked = places[0] if named else places[3]
    raise FileNotFoundError(
        f"the published tables are not at {looked}: fourwalls runs from its checkout (pip install -e .); "
        "set FOURWALLS_DATA to the checkout's data folder if it is installed another way"
    )


def published(name: str) -> Published:
    """Read data/published/NAME.csv. ValueError with close names for a table that does not exist."""
    path = folder() / f"{name.removesuffix('.csv')}.csv"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.csv"))
        close = difflib.get_close_matches(path.stem, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no published table {name!r}{hint} Known: {', '.join(known)}")
    head, body = {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            key, _, value = line.lstrip("# ").partition(":")
            head[key.strip()] = value.strip()
        elif line.strip():
            body.append(line)
    reader = csv.DictReader(body)
    rows = tuple(reader)
    for k, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(f"{path.name}: row {k + 1} has not as many fields as the header ({len(reader.fieldnames)})")
    words = {k: head.get(k, "") for k in ("title", "source", "status", "note")}
    return Published(name=path.stem, columns=tuple(reader.fieldnames), rows=rows, **words)
