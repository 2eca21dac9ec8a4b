"""The bucket explorer: turn the size of a bucket, the bandwidth and the length of backward, and see what stays exposed, and why.

The kernel turns a setting into plain data: the buckets under the backward, the curve of exposed time over all sizes, measured
points where there are any. The front end draws it. A hidden point is a setting without the answer: no curve is sent before the
reader has named the best of five sizes.

    scene = f(setting)        right  <=>  exposed(named) <= 1.1 min over the five

Reference: cost/overlap.py for the arithmetic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..cost.hardware import PS, get_link
from ..cost.overlap import Overlap, exposed_seconds, overlap, smallest_that_keeps_pace
from . import words
from .buckets import overlap_words

__all__ = ["CASES", "CHOICES", "SIZES", "BucketBoard", "Case", "bucket_explorer"]

SIZES = tuple(2.0 ** (k / 2) for k in range(32, 63))  # 64 KiB to 1.4 GiB
CHOICES = {"256 KiB": 2**18, "4 MiB": 2**22, "25 MiB": 25 * 2**20, "256 MiB": 2**28, "one bucket": math.inf}
CLOSE = 1.1
LIMITS = {"bandwidth": (1e7, 1e12), "backward": (1e-3, 10.0)}  # bytes a second; seconds
MOST_BLOCKS = 120


@dataclass(frozen=True)
class Case:
    """Where a setting starts: bytes of gradients, ranks, seconds of backward, and the wire (alpha in s, bytes/s)."""

    name: str
    gradients: float
    n: int
    backward: float
    alpha: float
    bandwidth: float


def _case(name: str, gradients: float, n: int, backward: float, link: str) -> Case:
    found = get_link(link)
    return Case(name, gradients, n, backward, found.alpha, found.bandwidth)


# the hidden points, in this order: at each the best of the five sizes is another one than before, and clearly ahead
CASES = (
    _case("1.4 GB, 64 ranks, InfiniBand HDR", 1.4e9, 64, 0.3, "infiniband-hdr"),
    _case("100 MB, 4 ranks, Ethernet 10 Gbit/s", 1e8, 4, 0.25, "ethernet-10g"),
    _case("1.4 GB, 512 ranks, InfiniBand HDR", 1.4e9, 512, 0.3, "infiniband-hdr"),
    _case("350 MB, 8 ranks, NVLink 3", 3.5e8, 8, 0.05, "nvlink3"),
    _case("100 MB, 1024 ranks, InfiniBand HDR", 1e8, 1024, 0.02, "infiniband-hdr"),
    _case("100 MB, 16 ranks, Ethernet 10 Gbit/s", 1e8, 16, 0.25, "ethernet-10g"),
)


class BucketBoard:
    """The kernel's side: from a setting to a scene. measured: {"name", "gradients", "n", "backward", "alpha", "bandwidth",
    "points": [(bucket bytes, exposed seconds, low, high)], "source"}, or None.
    """

    def __init__(self, measured: Mapping | None = None):
        self.cases = {case.name: case for case in CASES}
        self.measured = dict(measured) if measured else None
        if self.measured:
            known = {word: self.measured[word] for word in ("gradients", "n", "backward", "alpha", "bandwidth")}
            name = self.measured.setdefault("name", "my machine")
            self.cases[name] = Case(name, **known)

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "explore", setting}, {mode: "ask", point} or {mode: "answer", point, name}.

        A request that makes no sense gives a scene whose `error` says so.
        """
        number = ask.get("id", 0)
        try:
            if ask.get("mode") in ("ask", "answer"):
                setting = {"case": CASES[int(ask["point"]) % len(CASES)].name}
                if ask["mode"] == "ask":
                    return {**self.curtain(setting), "id": number}
                return {**self._verdict(setting, str(ask["name"])), "id": number}
            return {**self.scene(ask.get("setting", {})), "id": number}
        except (KeyError, TypeError, ValueError) as error:
            return {**self.scene({}), "id": number, "error": f"{type(error).__name__}: {error}"}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output: the same from run to run."""
        return f"BucketExplorer({scene['setting']['case']})"

    def curtain(self, setting: Mapping) -> dict:
        """A scene without buckets: what computes, what connects, and the question."""
        case, _, bandwidth, backward = self._read(setting)
        wire = (
            f"a message takes {words.time_text(case.alpha * PS)} and its bytes at {words.bytes_text(bandwidth, binary=False)}/s"
        )
        said = f"Which bucket exposes least? {case.name}: backward takes {words.time_text(backward * PS)}; {wire}."
        bars = {"backward": backward, "end": backward, "buckets": [], "joined": 0}
        shown = {"curtain": True, "curve": [], "floor": 0.0, "dots": [], "bars": bars, "table": []}
        return {**self._frame(setting), **shown, "source": "modelled", "words": said}

    def scene(self, setting: Mapping) -> dict:
        """Buckets, curve, dots and table for {case, bucket, bandwidth, backward}; what is missing is taken from the case."""
        case, bucket, bandwidth, backward = self._read(setting)
        wire = {"backward": backward, "n": case.n, "alpha": case.alpha, "bandwidth": bandwidth}
        found = overlap(case.gradients, bucket, **wire)
        whole = overlap(case.gradients, case.gradients, **wire | {"alpha": 0.0})
        mine = self.measured and case.name == self.measured["name"]
        dots = [list(map(float, p)) for p in self.measured["points"]] if mine else []
        curve = [exposed_seconds(case.gradients, size, **wire) for size in SIZES]
        pace = smallest_that_keeps_pace(case.gradients, **wire)
        shown = {
            "curtain": False,
            "curve": curve,
            "best": SIZES[min(range(len(SIZES)), key=curve.__getitem__)],
            "floor": max(0.0, whole.wire - backward),
            "bars": _bars(found),
            "dots": dots,
            "table": _table(found, bucket, pace),
            "source": f"{self.measured.get('source', 'measured')} + modelled" if dots else "modelled",
            "words": f"{overlap_words(found)} {_why(found, whole, bucket, pace, min(curve))}"
            + (" Dots are measured." if dots else ""),
        }
        return {**self._frame(setting), **shown}

    def _read(self, setting):
        """(case, bucket, bandwidth, backward) of a setting, each inside its limits."""
        name = setting.get("case", CASES[0].name)
        if name not in self.cases:
            raise ValueError(f"case {name!r}; one of {', '.join(self.cases)}")
        case = self.cases[name]
        bucket = min(max(float(setting.get("bucket") or CHOICES["25 MiB"]), SIZES[0]), SIZES[-1])
        bandwidth, backward = (
            min(max(float(setting.get(word) or getattr(case, word)), low), high) for word, (low, high) in LIMITS.items()
        )
        return case, bucket, bandwidth, backward

    def _frame(self, setting) -> dict:
        case, bucket, bandwidth, backward = self._read(setting)
        return {
            "setting": {"case": case.name, "bucket": bucket, "bandwidth": bandwidth, "backward": backward},
            "texts": {"bucket": words.bytes_text(bucket), "bandwidth": f"{words.bytes_text(bandwidth, binary=False)}/s",
                      "backward": words.time_text(backward * PS)},
            "cases": list(self.cases), "sizes": list(SIZES), "choices": list(CHOICES),
            "limits": {word: list(pair) for word, pair in LIMITS.items()},
            "points": len(CASES), "verdict": None, "error": "", "best": None,
        }  # fmt: skip

    def _verdict(self, setting, name) -> dict:
        if name not in CHOICES:
            raise ValueError(f"{name!r} is none of {', '.join(CHOICES)}")
        case, _, bandwidth, backward = self._read(setting)
        wire = {"backward": backward, "n": case.n, "alpha": case.alpha, "bandwidth": bandwidth}
        exposed = {c: exposed_seconds(case.gradients, min(b, case.gradients), **wire) for c, b in CHOICES.items()}
        best = min(exposed, key=exposed.get)
        factor, right = exposed[name] / exposed[best], exposed[name] <= CLOSE * exposed[best]
        said = f"Right, {name}." if right else f"No: {name} exposes {_times(factor)} times as much as {best}."
        scene = self.scene({**setting, "bucket": min(CHOICES[name], SIZES[-1])})
        return {**scene, "verdict": right, "words": f"{said} {name}: {scene['words']}"}


def _bars(found: Overlap) -> dict:
    """What the front end draws: blocks on the wire, neighbours joined where there are too many to see."""
    blocks = [[b.ready, b.start, b.end] for b in found.buckets]
    joined = 0
    if len(blocks) > MOST_BLOCKS:
        joined, gap, runs = len(blocks), found.end / 600, []
        for block in blocks:
            if runs and block[1] - runs[-1][2] <= gap:
                runs[-1] = [block[0], runs[-1][1], block[2]]
            else:
                runs.append(block)
        blocks = runs
    return {"backward": found.backward, "end": found.end, "buckets": blocks, "joined": joined}


def _table(found: Overlap, bucket: float, pace: float) -> list[list[str]]:
    last = found.buckets[-1]
    share = found.hidden / found.wire if found.wire else 1.0
    return [
        ["buckets", f"{len(found.buckets):,}"],
        ["the first leaves at", words.time_text(found.buckets[0].start * PS)],
        ["backward ends at", words.time_text(found.backward * PS)],
        ["the last sum is there at", words.time_text(found.end * PS)],
        ["the wire is busy for", words.time_text(found.wire * PS)],
        ["of which the last bucket", words.time_text((last.end - last.start) * PS)],
        ["exposed", words.time_text(found.exposed * PS)],
        ["hidden", f"{share:.1%}"],
        ["keeps pace from", words.bytes_text(pace) if pace < math.inf else "no size"],
    ]


def _why(found: Overlap, whole: Overlap, bucket: float, pace: float, least: float) -> str:
    """What rules here. `whole`: the bytes alone, without alpha; `pace`: the smallest bucket that the wire keeps pace with;
    `least`: seconds that the best size exposes.
    """
    if len(found.buckets) == 1:
        return "One bucket is full when backward is over: nothing can hide."
    if bucket >= pace:
        if found.exposed <= CLOSE * least:
            return "The wire keeps pace, and what shows is what was full last: no size exposes much less."
        down = f"down to {words.bytes_text(pace)} " if pace > SIZES[0] else ""
        return f"The wire keeps pace; what shows was full last: {down}a smaller bucket exposes less, give or take the teeth."
    if found.wire - whole.wire > whole.wire:
        return "Alpha rules: most of the wire's time is the fixed cost of so many messages; larger buckets pay it less often."
    if whole.wire > found.backward:
        return "The bytes alone need longer than backward: whatever the bucket, the difference shows."
    return "The wire does not keep pace, and buckets queue; larger ones pay alpha less often."


def _times(factor):
    return f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"


def bucket_explorer(measured: Mapping | None = None):
    """Widget 7. Shows itself where somebody can press buttons, else says five sizes in words; returns the widget or None."""
    from . import widgets

    board = BucketBoard(measured)
    lines = [
        f"{name}: {board.scene({'case': CASES[0].name, 'bucket': min(size, CASES[0].gradients)})['words']}"
        for name, size in CHOICES.items()
    ]
    headings = (
        f"Bucket explorer, in words (run this notebook in JupyterLab to turn it yourself): {CASES[0].name}",
        f"The same in words, for when no kernel runs; to get the widget back, run this cell: {CASES[0].name}",
    )
    first = board.answer({"mode": "ask", "point": 0})
    return widgets.stand(board, first, "guessed.js+buckets.js", headings=headings, lines=lines)
