"""Buckets under the backward: what hides behind it, and what the step waits for.

Above, backward, cut where a bucket is full; below, the wire, which carries one bucket after the other; hatched, what is left when
backward has ended. A second picture plots that rest over the size of a bucket: steep where alpha is paid too often, steep where a
bucket starts late, and lowest between.

    exposed = end of the last sum - end of backward

Reference: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020, figures 6 and 7.
"""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..cost.overlap import Overlap
from ..ranks.trace import PS
from . import style, words

__all__ = ["overlap_words", "plot_buckets", "plot_exposed"]

MOST_BLOCKS = 150  # of more buckets only the outline is drawn
WORK, WIRE = (0.06, 0.36), (0.44, 0.74)  # lanes as (top, bottom) shares of a row


def overlap_words(found: Overlap) -> str:
    """One backward in words: buckets, when the first leaves, when the last sum is there, what is exposed and hidden."""
    if not found.buckets:
        return "No gradients, no buckets."
    count = words.count_text(len(found.buckets), "bucket")
    first, share = found.buckets[0].start, found.hidden / found.wire if found.wire else 1.0
    return (
        f"{count}; the first leaves at {_time(first)}, backward ends at {_time(found.backward)}, the last sum is there at "
        f"{_time(found.end)}: {_time(found.exposed)} exposed, {share:.0%} of the communication hidden."
    )


def plot_buckets(rows: Sequence[tuple[str, Overlap]], *, source: str = "modelled", ax=None, title: str = ""):
    """One row for each (name, Overlap), all on one time axis; returns the axes. source: the badge, e.g. "measured"."""
    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; give at least one (name, Overlap)")
    ax = ax or style.new_axes(8.5, 1.3 + 0.85 * len(rows))
    end = max(found.end for _, found in rows) or 1e-12
    unit, name = words.time_scale(end * PS)
    scale = PS / unit
    back, send = style.KIND_STYLE["backward"], style.KIND_STYLE["send"]
    with plt.rc_context(style.RC):
        for k, (_, found) in enumerate(rows):
            _backward(ax, found, k, scale, end)
            _wire(ax, found, k, scale, end)
            ax.vlines(found.backward * scale, k, k + 0.8, color="black", linestyle="--", linewidth=1.2, gid="fw-backward-ends")
            at, said = (found.end + end * 0.008) * scale, f"{_time(found.exposed)} exposed"
            ax.text(at, k + sum(WIRE) / 2, said, va="center", ha="left", fontsize=8, gid="fw-exposed")
        ax.set_yticks([k + 0.4 for k in range(len(rows))], [label for label, _ in rows])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows), -0.05)
        ax.set_xlim(0, end * scale * 1.16)
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(8))
        ax.set_xlabel(f"time since backward began ({name})")
        edge = {"edgecolor": "#444444", "linewidth": 0.5}
        handles = [
            Patch(facecolor=back.colour, label=f"{back.letter}  backward, cut where a bucket is full", **edge),
            Patch(facecolor=send.colour, label="the wire: one bucket after the other", **edge),
            Patch(facecolor=send.colour, hatch="////", label="exposed", **edge),
        ]
        ax.legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8,
                  handlelength=1.6, columnspacing=1.2, borderaxespad=0.2)  # fmt: skip
    style.badge(ax, source)
    if title:
        ax.set_title(title, pad=22)
    return ax


def plot_exposed(
    curves: Iterable[tuple[str, Sequence[tuple[float, float]]]],
    measured: Iterable[tuple[str, Sequence[tuple[float, float, float, float]]]] = (),
    *,
    source: str = "measured",
    ax=None,
    title: str = "",
):
    """Exposed seconds over bytes of a bucket, both on log axes; returns the axes.

    curves: [(name, [(bucket bytes, seconds)])], modelled lines. measured: [(name, [(bytes, seconds, low, high)])], dots with
    their spread; a name in both has one colour. source: what the dots are, "measured" or "paced".
    """
    curves, measured = [(n, list(p)) for n, p in curves], [(n, list(p)) for n, p in measured]
    if any(x <= 0 or y <= 0 for _, points in curves + measured for x, y, *_ in points):
        raise ValueError("bytes and seconds must be above 0 on log axes; leave such points out")
    ax = ax or style.new_axes(7.5, 3.8)
    order = list(dict.fromkeys(n for n, _ in curves + measured))
    with plt.rc_context(style.RC):
        for name, points in curves:
            look = style.series_style(order.index(name))
            x, y = zip(*sorted(points), strict=True)
            ax.plot(x, y, color=look["color"], linestyle=look["linestyle"], linewidth=1.6, label=f"{name}, modelled")
        for name, points in measured:
            look = style.series_style(order.index(name))
            points = sorted(points)
            y = [p[1] for p in points]
            spread = [[max(p[1] - p[2], 0) for p in points], [max(p[3] - p[1], 0) for p in points]]
            ax.errorbar([p[0] for p in points], y, yerr=spread, color=look["color"], marker=look["marker"], linestyle="none",
                        markersize=6, capsize=3, linewidth=1.1, label=f"{name}, {source}")  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: words.bytes_text(x))
        ax.yaxis.set_major_formatter(lambda y, _: _time(y))
        ax.yaxis.set_minor_formatter(_minor_time)
        ax.set_xlabel("bytes of a bucket")
        ax.set_ylabel("exposed communication")
        ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
        if order:
            ax.legend(frameon=False, fontsize=8, loc="best")
    style.badge(ax, [s for s, there in ((source, measured), ("modelled", curves)) if there])
    if title:
        ax.set_title(title, pad=20)
    return ax


def _minor_time(y, _):
    """On a log axis of less than two decades minor ticks speak too: of those between powers of ten, 2 and 5."""
    return _time(y) if f"{y:.0e}"[0] in "25" else ""


def _backward(ax, found, k, scale, end):
    top, bottom = WORK
    s = style.KIND_STYLE["backward"]
    few = len(found.buckets) <= MOST_BLOCKS
    cuts = [0.0, *(min(b.ready, found.backward) for b in found.buckets)] if few else [0.0, found.backward]
    spans = [(a * scale, (b - a) * scale) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    spans = spans or [(0, found.backward * scale)]
    ax.broken_barh(spans, (k + top, bottom - top), facecolor=s.colour, edgecolor="#444444", linewidth=0.5, gid=f"fw-{k}-backward")
    if few:
        _numbers(ax, spans, k + (top + bottom) / 2, end * scale, s.ink)


def _wire(ax, found, k, scale, end):
    top, bottom = WIRE
    s = style.KIND_STYLE["send"]
    line = 0.5 if len(found.buckets) <= MOST_BLOCKS else 0.0
    for part, hatch in (("hidden", ""), ("exposed", "////")):
        spans = []
        for b in found.buckets:
            a, z = (b.start, min(b.end, found.backward)) if part == "hidden" else (max(b.start, found.backward), b.end)
            if z > a:
                spans.append((a * scale, (z - a) * scale))
        ax.broken_barh(spans, (k + top, bottom - top), facecolor=s.colour, hatch=hatch, edgecolor="#444444", linewidth=line,
                       gid=f"fw-{k}-{part}")  # fmt: skip
    whole = [(b.start * scale, (b.end - b.start) * scale) for b in found.buckets]
    _numbers(ax, whole, k + (top + bottom) / 2, end * scale, s.ink, box=True)


def _numbers(ax, spans, y, width, ink, *, box=False):
    """The number of a bucket, from 1, where there is room."""
    for number, (start, length) in enumerate(spans, 1):
        if length * 36 > width:
            frame = (
                {"boxstyle": "round,pad=0.12", "facecolor": style.KIND_STYLE["send"].colour, "edgecolor": "none"} if box else None
            )
            ax.text(start + length / 2, y, str(number), ha="center", va="center", fontsize=8, color=ink, bbox=frame, clip_on=True)


def _time(seconds: float) -> str:
    return words.time_text(seconds * PS) if seconds else "0 s"
