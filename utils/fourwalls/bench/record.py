"""One record for every benchmark, and three ways to write a list of them.

A row says what was measured, in which case, how much, in which unit, how sure, beside what, on which machine, and whether the
result was right. JSON is a list of rows; CSV flattens `case` to case.name columns; a table is for reading.

    row = (benchmark, case, metric, value, unit, low, high, pairs, peer, time_ratio, low, high, source, ok, machine)

Reference: DESIGN, "One record".
"""

import csv
import io
import json
import os
import platform
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..cost.units import format_bytes, format_seconds
from ..ranks.machine import allowed_cores
from ..ranks.trace import SOURCES

__all__ = ["FORMATS", "Row", "hosts", "machine", "write_rows"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `value` in `unit`; `low` to `high` its spread (95% interval of the median) or None; `case`: inputs by name.

    time_ratio is our time / the peer's, median over `pairs` alternating pairs, with its own interval. source: one of SOURCES.
    ok: the result was right. machine: what it ran on.
    """

    benchmark: str
    case: dict
    metric: str
    value: float | int | None
    unit: str
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    peer: str | None = None
    time_ratio: float | None = None
    time_ratio_low: float | None = None
    time_ratio_high: float | None = None
    source: str = "measured"
    ok: bool = True
    machine: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}; it is one of {', '.join(SOURCES)}")
        if self.low is not None and self.value is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"{self.metric}: {self.value} lies outside its own spread, {self.low} to {self.high}")


def machine() -> dict:
    """What a figure depends on: processor, cores that may be used, memory, system, versions, and who else was working (load)."""
    import psutil
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": allowed_cores(),
        "load": round(psutil.getloadavg()[0], 2),  # processes that wanted a core in the last minute, before this benchmark
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo" if torch.distributed.is_available() and torch.distributed.is_gloo_available() else "simulator",
    }


def hosts() -> dict:
    """Under torchrun, called by every rank: {"hosts": the name of each node of the job, in order of its ranks}."""
    from ..ranks.run import run

    nodes = run(_node, stream=False).values
    return {"hosts": [name for _, name in dict.fromkeys(nodes)]}


def _node(comm) -> tuple[str, str]:
    return os.environ.get("GROUP_RANK", ""), socket.gethostname()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def to_json(rows: list[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False) + "\n"


def to_csv(rows: list[Row]) -> str:
    """A header and one line a row; `case` and `machine` become columns case.x and machine.x; None is empty."""
    flat = [_flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flatten(row: Row) -> dict:
    flat = {}
    for spec in fields(row):
        value = getattr(row, spec.name)
        if isinstance(value, dict):
            flat |= {f"{spec.name}.{name}": inner for name, inner in value.items()}
        else:
            flat[spec.name] = "" if value is None else value
    return flat


def to_table(rows: list[Row]) -> str:
    """One line a case, one column a metric: value, [its spread], and the ratio to the peer. The machine stands above."""
    if not rows:
        return "nothing was measured\n"
    lines = ["  ".join(f"{name} {format_bytes(v) if name == 'memory_bytes' else v}" for name, v in rows[0].machine.items())]
    for names in dict.fromkeys(tuple(row.case) for row in rows):
        group = [row for row in rows if tuple(row.case) == names]
        metrics = list(dict.fromkeys((row.metric, row.unit) for row in group))
        header = [*names, *(f"{metric} ({unit})" if unit not in ("s", "B", "") else metric for metric, unit in metrics)]
        by_case: dict = {}
        for row in group:
            by_case.setdefault(tuple(row.case.values()), {})[row.metric] = row
        with_peer = any(row.peer for row in group)
        body = []
        for case, found in by_case.items():
            cells = [_case_cell(name, value) for name, value in zip(names, case, strict=True)]
            cells += [_value_cell(found.get(metric)) for metric, _ in metrics]
            if with_peer:
                beside = next((row for row in found.values() if row.time_ratio is not None), None)
                cells.append(_ratio_cell(beside))
                cells.append(beside.peer if beside else "")
            body.append([*cells, "ok" if all(row.ok for row in found.values()) else "WRONG"])
        grid = [[*header, *(["time / peer's", "peer"] if with_peer else []), "result"], *body]
        widths = [max(len(row[c]) for row in grid) for c in range(len(grid[0]))]
        lines += ["", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in grid)]
    return "\n".join(lines) + "\n"


def _case_cell(name: str, value) -> str:
    return format_bytes(value, digits=0) if name.endswith("bytes") and isinstance(value, int) else str(value)


def _value_cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return "-"
    show = format_seconds if row.unit == "s" else format_bytes if row.unit == "B" else lambda v: f"{v:.4g}"
    spread = f" [{show(row.low)}, {show(row.high)}]" if row.unit == "s" and row.low is not None and row.low != row.high else ""
    return show(row.value) + spread


def _ratio_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = f" [{row.time_ratio_low:.2f}, {row.time_ratio_high:.2f}]" if row.time_ratio_low is not None else ""
    return f"{row.time_ratio:.3f}{spread}"


FORMATS = {"table": to_table, "json": to_json, "csv": to_csv}


def write_rows(rows: Iterable[Row], *, format: str = "table", out: str | None = None) -> None:
    """Write rows as `format` to the file `out`, or to standard output (nothing else may be printed there)."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it is one of {', '.join(FORMATS)}")
    text = FORMATS[format](list(rows))
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(out).write_text(text)
