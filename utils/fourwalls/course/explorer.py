"""The alpha-beta explorer with this machine's own measurements, where there are any: `fw.explorer()`, `fw.explorer(measured)`.

Joins the recorded benchmarks of `data/results/` and the widget, which does not know where its dots come from.

    rows of data/results/*.csv -> {links, times} -> dots

Reference: viz/explorer.py for the widget, bench/record.py for the rows.
"""

import csv

from ..viz import explorer as board
from .home import find_root

__all__ = ["explorer", "recorded"]


def recorded() -> dict | None:
    """What `data/results/*.csv` holds of all-reduce and calibration, in the form that the explorer takes; None without any."""
    root, rows = find_root(), []
    for path in sorted((root / "data" / "results").glob("*.csv")) if root else ():
        with open(path, encoding="utf-8", newline="") as file:
            rows += [row for row in csv.DictReader(file) if row.get("benchmark") in ("all-reduce", "calibrate")]
    found = board.measured_from_rows(rows, name="recorded machine")
    return found if found["times"] else None


def explorer(measured: dict | None = None):
    """Widget 2: turn alpha, bandwidth, ranks and bytes, and see which all-reduce wins.

    measured: {"name", "links": {n: (alpha in s, bytes/s)}, "times": {algorithm: {n: [(bytes, seconds, low, high)]}}}, shown as
    dots; "alone", as links, of messages that meet no other: the price of tree and star; None: what data/results/ holds, named as
    recorded. Returns the widget, or None where nobody can press buttons (then it says in words who wins where).
    """
    if measured is not None and not (isinstance(measured, dict) and isinstance(measured.get("times"), dict)):
        raise ValueError('measured is a dict with "times": {algorithm: {n: [(bytes, seconds, low, high)]}}, or None')
    return board.explorer(measured if measured is not None else recorded())
