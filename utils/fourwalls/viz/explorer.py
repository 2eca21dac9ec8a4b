"""The alpha-beta explorer: turn alpha, bandwidth, ranks and bytes, and see who wins, and why.

Each all-reduce is priced by its longest chain of messages. The kernel turns a setting into plain data (curves, fields of
winners, a table at the cursor), the front end draws it. A hidden point is a setting without the answer: the curves are not even
sent before the reader has named a winner. On a measured machine, tree and star, in which few send at once, have a price of their
own.

    scene = f(setting)        right  <=>  time(named) <= 1.1 min over all

Reference: Hockney 1994 for the line; Thakur, Rabenseifner and Gropp 2005 for the choice.
"""

import math
from collections.abc import Iterable, Mapping

from ..cost.critical_path import ALL_REDUCES, all_reduce_path, all_reduce_seconds, rounds
from ..cost.hardware import PS, get_link
from . import style, words
from .winner_map import CLOSE, letters, winner_map
from .wires import POINTS, RANKS, WIRES, Wire

__all__ = ["POINTS", "RANKS", "SIZES", "WIRES", "Board", "Wire", "explorer", "measured_from_rows"]

SIZES = tuple(2.0 ** (k / 2) for k in range(12, 65))  # 64 B to 4 GiB
LIMITS = {"alpha": (1e-7, 1e-2), "bandwidth": (1e7, 1e12)}  # seconds; bytes a second


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
        alone = self.measured.get("alone", {}).get(near)
        return Wire(self._name, *(self._links[near] if near else (found.alpha, found.bandwidth)), alone=alone)

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
        """The plain twin of a saved output: the same from run to run, and readable where no kernel runs."""
        return "The alpha-beta explorer stands here while a kernel runs: run this cell to get it back."

    def curtain(self, setting: Mapping) -> dict:
        """A scene without curves: the wire, the ranks, the bytes, and the question."""
        wire, n, nbytes, alpha, bandwidth, _ = self._read(setting)
        said = f"Who wins? {n} ranks, {words.bytes_text(nbytes)}, {wire.name}: a message takes {_wire_text(alpha, bandwidth)}"
        said += f"; inside a node of {wire.node}, {_wire_text(wire.inside.alpha, wire.inside.bandwidth)}." if wire.inside else "."
        said += " The ranks of a node have one adapter together." if wire.shared else ""
        shown = {**self._frame(setting), "curtain": True, "curves": [], "fields": [], "dots": [], "table": []}
        return {**shown, "source": "modelled", "words": said}

    def scene(self, setting: Mapping) -> dict:
        """Curves, fields, dots and the table at the cursor for {wire, n, size, alpha, bandwidth, off}; what is missing is taken
        from the wire.
        """
        wire, n, nbytes, alpha, bandwidth, names = self._read(setting)
        clusters = {a: wire.cluster(alpha, bandwidth, a) for a in names}
        row = winner_map(lambda a, n, s: all_reduce_seconds(a, n, math.ceil(s), clusters[a]), [n], SIZES, names)
        table = sorted((self._at(a, n, nbytes, clusters[a]) for a in names), key=lambda line: line["seconds"])
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
            "words": _at_words(table, n, nbytes) + _wires_words(wire, n, alpha, bandwidth) + _dots_words(dots, nbytes, wire),
        }
        return {**self._frame(setting), **shown}

    def _read(self, setting):
        """(wire, n, bytes, alpha, bandwidth, names) of a setting, each inside its limits."""
        name = setting.get("wire", WIRES[0].name)
        if name not in self.wires:
            raise ValueError(f"wire {name!r}; one of {', '.join(self.wires)}")
        asked = int(setting.get("n") or 256)
        n = min(self.wires[name].ranks(), key=lambda k: abs(k - asked))
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
            "wires": list(self.wires), "ranks": list(wire.ranks()), "sizes": list(SIZES), "nodes": bool(wire.inside),
            "limits": {word: list(pair) for word, pair in LIMITS.items()},
            "looks": _looks([*ALL_REDUCES, *self._others()]), "names": _possible(wire), "all": list(ALL_REDUCES),
            "points": len(POINTS), "verdict": None, "error": "",
        }  # fmt: skip

    def _others(self) -> list[str]:
        """What was measured and has no curve."""
        return [name for name in (self.measured or {}).get("times", {}) if name not in ALL_REDUCES]

    def _at(self, algorithm, n, nbytes, cluster) -> dict:
        path = all_reduce_path(algorithm, n, nbytes, cluster)
        messages, in_a_row = rounds(path)
        _, across = rounds([part for part in path if part[1] is cluster.inter and cluster.inter is not cluster.intra])
        seconds = all_reduce_seconds(algorithm, n, nbytes, cluster)
        return {"name": algorithm, "seconds": seconds, "text": words.time_text(seconds * PS), "messages": messages,
                "share": float(in_a_row / nbytes), "across": float(across / nbytes)}  # fmt: skip

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
    places = style.series_places(names).items()
    return {a: [style.series_style(k)["color"], dashes[k % len(dashes)], letter[a]] for a, k in places}


def _at_words(table, n, nbytes) -> str:
    best, *rest = table
    said = f"{n} ranks, {words.bytes_text(nbytes)}: in the model {best['name']} wins with {best['text']}"
    others = ", ".join(f"{line['name']} {_times(line['factor'])}" for line in rest)
    said += f"; times as long: {others}." if rest else "."
    said += f" It sends {words.count_text(best['messages'], 'message')} in a row, {best['share']:.3g} S in all"
    ring = next((line for line in rest if line["name"] == "ring"), None)
    return said + (f"; the ring {ring['messages']}, {ring['share']:.3g} S." if ring else ".")


def _wires_words(wire, n, alpha, bandwidth) -> str:
    """What the sliders do not move, and whether the wire between nodes is still the slow one."""
    if not wire.inside:
        return ""
    if n <= wire.node:
        return f" All in one node: {_wire_text(wire.inside.alpha, wire.inside.bandwidth)}; alpha and 1/beta move nothing here."
    said = f" Inside a node: {_wire_text(wire.inside.alpha, wire.inside.bandwidth)}, fixed"
    said += "; its ranks share one adapter." if wire.shared else "."
    faster = ["starts sooner"] * (alpha < wire.inside.alpha) + ["carries bytes faster"] * (bandwidth > wire.inside.bandwidth)
    if faster:
        said += f" Beware: the wire between nodes now {' and '.join(faster)} than the one inside."
    return said


def _dots_words(dots, nbytes, wire) -> str:
    """Who was fastest in the measurements at the size nearest to the cursor: it need not be the model's winner."""
    if not dots:
        return ""
    near = min((p[0] for dot in dots for p in dot["points"]), key=lambda size: abs(math.log2(size / nbytes)))
    at = [(seconds, dot["name"]) for dot in dots for size, seconds, *_ in dot["points"] if size == near]
    said = f" Dots are measured; at {words.bytes_text(near)} the best is {min(at)[1]}."
    return said + (" Tree and star are priced by a message alone, the others by all at once." if wire.alone else "")


def _times(factor):
    return f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"


def explorer(measured: Mapping | None = None):
    """Widget 2. Shows itself where somebody can press buttons, else says in words who wins where; returns the widget or None."""
    from . import widgets

    board, lines = Board(measured), []
    for n, nbytes in ((256, 2**10), (256, 2**20), (256, 2**30), (192, 2**30)):
        lines.append(board.scene({"n": n, "size": nbytes})["words"])
    headings = (
        f"Alpha-beta explorer, in words (run this notebook in JupyterLab to turn it yourself): {WIRES[0].name}",
        f"The same in words, for when no kernel runs; to get the widget back, run this cell: {WIRES[0].name}",
    )
    first = board.answer({"mode": "ask", "point": 0})
    return widgets.stand(board, first, "guessed.js+explorer.js", headings=headings, lines=lines)


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
