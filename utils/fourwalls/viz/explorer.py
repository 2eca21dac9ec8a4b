"""The alpha-beta explorer: turn alpha, bandwidth, ranks and bytes, and see who wins, and why.

Each all-reduce is priced by its longest chain of messages. The kernel turns a setting into plain data (curves, fields of
winners, a table at the cursor), the front end draws it. A hidden point is a setting without the answer: the curves are not even
sent before the reader has named a winner.

    scene = f(setting)        right  <=>  time(named) <= 1.1 min over all

Reference: Hockney 1994 for the line; Thakur, Rabenseifner and Gropp 2005 for the choice.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..cost.critical_path import ALL_REDUCES, all_reduce_path, all_reduce_seconds, rounds
from ..cost.hardware import PS, Cluster, Link, get_link
from . import style, words
from .winner_map import CLOSE, letters, winner_map

__all__ = ["POINTS", "RANKS", "SIZES", "WIRES", "Board", "Wire", "explorer", "measured_from_rows"]

RANKS = tuple(2**k for k in range(1, 11))
SIZES = tuple(2.0 ** (k / 2) for k in range(12, 65))  # 64 B to 4 GiB
LIMITS = {"alpha": (1e-7, 1e-3), "bandwidth": (1e7, 1e12)}  # seconds; bytes a second


@dataclass(frozen=True)
class Wire:
    """Where a setting starts: alpha (s) and bandwidth (bytes/s) of the wire that the sliders change; inside nodes of `node` ranks
    there may be another, which they do not.
    """

    name: str
    alpha: float
    bandwidth: float
    node: int | None = None
    inside: Link | None = None

    def cluster(self, alpha: float, bandwidth: float) -> Cluster:
        link = Link(self.name, alpha, bandwidth)
        return Cluster(self.name, None, self.inside or link, link, self.node)


def _preset(name: str, link: str, node: int | None = None, inside: str | None = None) -> Wire:
    found = get_link(link)
    return Wire(name, found.alpha, found.bandwidth, node, get_link(inside) if inside else None)


WIRES = (
    _preset("A100 nodes of 8", "infiniband-hdr", 8, "nvlink3"),
    _preset("InfiniBand HDR", "infiniband-hdr"),
    _preset("Ethernet 10 Gbit/s", "ethernet-10g"),
    _preset("one machine, loopback", "loopback"),
)
# hidden points: wire, ranks, bytes; at each, somebody is clearly ahead
POINTS = (
    ("A100 nodes of 8", 256, 2**10),
    ("Ethernet 10 Gbit/s", 64, 2**20),
    ("A100 nodes of 8", 256, 2**30),
    ("InfiniBand HDR", 1024, 2**22),
    ("A100 nodes of 8", 32, 2**26),
    ("one machine, loopback", 8, 2**8),
)


class Board:
    """The kernel's side: from a setting to a scene. measured: as `measured_from_rows` gives it, or None."""

    def __init__(self, measured: Mapping | None = None):
        self.measured = dict(measured) if measured and measured.get("times") else None
        self.wires = {wire.name: wire for wire in WIRES}
        if self.measured:
            self.wires[self._name] = self._wire(max(self._links, default=2))

    @property
    def _name(self) -> str:
        return self.measured.get("name", "my machine")

    @property
    def _links(self) -> dict:
        return self.measured.get("links", {})

    def _wire(self, n: int) -> Wire:
        """The calibrated line for n ranks, or for the nearest number that was calibrated; the loopback preset without any."""
        near = min(self._links, key=lambda k: abs(math.log2(k / n)), default=None)
        found = get_link("loopback")
        return Wire(self._name, *(self._links[near] if near else (found.alpha, found.bandwidth)))

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "explore", setting}, {mode: "ask", point} or {mode: "answer", point, name}.

        A request that makes no sense gives a scene whose `error` says so.
        """
        number = ask.get("id", 0)
        try:
            if ask.get("mode") in ("ask", "answer"):
                wire, n, nbytes = POINTS[int(ask["point"]) % len(POINTS)]
                setting = {"wire": wire, "n": n, "size": nbytes}
                if ask["mode"] == "ask":
                    return {**self.curtain(setting), "id": number}
                scene = self.scene(setting)
                return {**scene, **self._verdict(scene, str(ask["name"])), "id": number}
            return {**self.scene(ask.get("setting", {})), "id": number}
        except (KeyError, TypeError, ValueError) as error:
            return {**self.scene({}), "id": number, "error": f"{type(error).__name__}: {error}"}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output: the same from run to run."""
        return f"Explorer({scene['setting']['wire']})"

    def curtain(self, setting: Mapping) -> dict:
        """A scene without curves: the wire, the ranks, the bytes, and the question."""
        wire, n, nbytes, alpha, bandwidth, _ = self._read(setting)
        said = f"Who wins? {n} ranks, {words.bytes_text(nbytes)}, {wire.name}: a message takes {_wire_text(alpha, bandwidth)}"
        said += f"; inside a node of {wire.node}, {_wire_text(wire.inside.alpha, wire.inside.bandwidth)}." if wire.inside else "."
        shown = {**self._frame(setting), "curtain": True, "curves": [], "fields": [], "dots": [], "table": []}
        return {**shown, "source": "modelled", "words": said}

    def scene(self, setting: Mapping) -> dict:
        """Curves, fields, dots and the table at the cursor for {wire, n, size, alpha, bandwidth, off}; what is missing is taken
        from the wire.
        """
        wire, n, nbytes, alpha, bandwidth, names = self._read(setting)
        cluster = wire.cluster(alpha, bandwidth)
        row = winner_map(lambda a, n, s: all_reduce_seconds(a, n, math.ceil(s), cluster), [n], SIZES, names)
        table = sorted((self._at(a, n, nbytes, cluster) for a in names), key=lambda line: line["seconds"])
        for line in table:
            line["factor"] = line["seconds"] / table[0]["seconds"]
        dots = self._dots(n) if self.measured and wire.name == self._name else []
        shown = {
            "curtain": False,
            "curves": [{"name": a, "seconds": list(row.seconds[a][n])} for a in names],
            "fields": [[f.start, f.end, f.winner, f.beside] for f in row.fields(n)],
            "table": table,
            "dots": dots,
            "source": "measured + modelled" if dots else "modelled",
            "words": _at_words(table, n, nbytes) + (" Dots are measured." if dots else ""),
        }
        return {**self._frame(setting), **shown}

    def _read(self, setting):
        """(wire, n, bytes, alpha, bandwidth, names) of a setting, each inside its limits."""
        name = setting.get("wire", WIRES[0].name)
        if name not in self.wires:
            raise ValueError(f"wire {name!r}; one of {', '.join(self.wires)}")
        n = min(RANKS, key=lambda k: abs(k - int(setting.get("n") or 256)))
        wire = self._wire(n) if self.measured and name == self._name else self.wires[name]
        nbytes = min(max(int(setting.get("size") or 2**20), int(SIZES[0])), int(SIZES[-1]))
        alpha, bandwidth = (
            min(max(float(setting.get(word) or getattr(wire, word)), low), high) for word, (low, high) in LIMITS.items()
        )
        names = [a for a in _possible(wire) if a not in (setting.get("off") or ())]
        if not names:
            raise ValueError("all algorithms are off; leave at least one")
        return wire, n, nbytes, alpha, bandwidth, names

    def _frame(self, setting) -> dict:
        wire, n, nbytes, alpha, bandwidth, names = self._read(setting)
        return {
            "setting": {"wire": wire.name, "n": n, "size": nbytes, "alpha": alpha, "bandwidth": bandwidth,
                        "off": [a for a in _possible(wire) if a not in names]},
            "texts": {"size": words.bytes_text(nbytes), "alpha": words.time_text(alpha * PS),
                      "bandwidth": f"{words.bytes_text(bandwidth, binary=False)}/s"},
            "wires": list(self.wires), "ranks": list(RANKS), "sizes": list(SIZES),
            "limits": {word: list(pair) for word, pair in LIMITS.items()},
            "looks": _looks([*ALL_REDUCES, *self._others()]), "names": _possible(wire), "all": list(ALL_REDUCES),
            "points": len(POINTS), "verdict": None, "error": "",
        }  # fmt: skip

    def _others(self) -> list[str]:
        """What was measured and has no curve."""
        return [name for name in (self.measured or {}).get("times", {}) if name not in ALL_REDUCES]

    def _at(self, algorithm, n, nbytes, cluster) -> dict:
        messages, in_a_row = rounds(all_reduce_path(algorithm, n, nbytes, cluster))
        seconds = all_reduce_seconds(algorithm, n, nbytes, cluster)
        return {"name": algorithm, "seconds": seconds, "text": words.time_text(seconds * PS), "messages": messages,
                "share": float(in_a_row / nbytes)}  # fmt: skip

    def _dots(self, n) -> list[dict]:
        found = [(name, by_rank[n]) for name, by_rank in self.measured["times"].items() if n in by_rank]
        return [{"name": name, "points": [list(map(float, p)) for p in points]} for name, points in found]

    def _verdict(self, scene, name) -> dict:
        line = next((line for line in scene["table"] if line["name"] == name), None)
        if line is None:
            raise ValueError(f"{name!r} is none of {', '.join(scene['names'])}")
        right, best = line["factor"] <= CLOSE, scene["table"][0]
        if right and line is best:
            said = f"Right, {name}."
        elif right:
            said = f"Right: {name}, within 10% of {best['name']}."
        else:
            said = f"No: {name} takes {_times(line['factor'])} times as long as {best['name']}."
        return {"verdict": right, "words": f"{said} {scene['words']}"}


def _possible(wire) -> list[str]:
    """On one kind of wire hierarchical is the ring, and is left out."""
    return [a for a in ALL_REDUCES if wire.inside or a != "hierarchical"]


def _wire_text(alpha, bandwidth):
    return f"{words.time_text(alpha * PS)} and its bytes at {words.bytes_text(bandwidth, binary=False)}/s"


def _looks(names) -> dict:
    """name -> colour, dashes (SVG), letter."""
    letter, dashes = letters(names), ("", "7 3", "8 3 2 3", "2 3", "10 2", "6 2 2 2 2 2", "1 3")
    return {a: [style.series_style(k)["color"], dashes[k % len(dashes)], letter[a]] for k, a in enumerate(names)}


def _at_words(table, n, nbytes) -> str:
    best, *rest = table
    said = f"{n} ranks, {words.bytes_text(nbytes)}: {best['name']} wins with {best['text']}"
    others = ", ".join(f"{line['name']} {_times(line['factor'])}" for line in rest)
    said += f"; times as long: {others}." if rest else "."
    said += f" It sends {best['messages']} messages in a row, {best['share']:.3g} S in all"
    ring = next((line for line in rest if line["name"] == "ring"), None)
    return said + (f"; the ring {ring['messages']}, {ring['share']:.3g} S." if ring else ".")


def _times(factor):
    return f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"


def explorer(measured: Mapping | None = None):
    """Widget 2. Shows itself where somebody can press buttons, else says in words who wins where; returns the widget or None."""
    from . import widgets

    board, lines = Board(measured), []
    for nbytes in (2**10, 2**20, 2**30):
        lines.append(board.scene({"size": nbytes})["words"])
    headings = (
        f"Alpha-beta explorer, in words (run this notebook in JupyterLab to turn it yourself): {WIRES[0].name}",
        f"The same in words, for when no kernel runs; to get the widget back, run this cell: {WIRES[0].name}",
    )
    return widgets.stand(board, board.answer({"mode": "ask", "point": 0}), "explorer.js", headings=headings, lines=lines)


def measured_from_rows(rows: Iterable[Mapping], *, name: str = "my machine") -> dict:
    """Benchmark rows (`bench` "all-reduce" and "calibrate"; nested or flat, as in its CSV) as
    {"name", "links": {n: (alpha, bandwidth)}, "times": {algorithm: {n: [(bytes, seconds, low, high)]}}}. Rows with checks on are
    left out.
    """
    links, times = {}, {}
    for row in rows:
        case = (
            row["case"] if "case" in row else {k[5:]: v for k, v in row.items() if k.startswith("case.") and v not in ("", None)}
        )
        if "ranks" not in case or row.get("value") in ("", None):
            continue
        n, value = int(case["ranks"]), float(row["value"])
        if row["benchmark"] == "calibrate" and row["metric"] in ("alpha", "bandwidth"):
            links.setdefault(n, {})[row["metric"]] = value * (1e9 if row["metric"] == "bandwidth" else 1)
        if row["benchmark"] == "all-reduce" and row["metric"] == "time" and str(case.get("checks")) not in ("True", "true"):
            low, high = (float(row[end]) if row.get(end) not in ("", None) else value for end in ("low", "high"))
            times.setdefault(str(case["algorithm"]), {}).setdefault(n, []).append((int(float(case["bytes"])), value, low, high))
    whole = {n: (line["alpha"], line["bandwidth"]) for n, line in links.items() if len(line) == 2}
    return {"name": name, "links": whole, "times": {a: {n: sorted(p) for n, p in by.items()} for a, by in times.items()}}
