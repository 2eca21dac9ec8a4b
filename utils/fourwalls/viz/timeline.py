"""The signature picture: ranks down, time across, colour = kind of work, hatching = waiting, live bytes under each rank.

It draws any Trace: a real run, a modelled one, a schedule. White on the work lane is idle time that nobody recorded as a wait.
Many events are joined per pixel column, where the kind that took most of the column is shown, and the caption says so.

    bubble_of_total = idle / (ranks * makespan)

Reference: the pipeline figures of Huang et al. 2019 (GPipe) and Narayanan et al. 2021 (Megatron-LM).
"""

from collections import defaultdict

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..ranks.trace import KINDS, PS, Trace
from . import style, words

__all__ = ["plot_timeline"]

COLUMNS = ((8, 1200), (16, 600), (10**9, 300))  # (up to so many ranks, columns): more spans than that on a lane are joined
WORK = (0.06, 0.56)  # lanes as (top, bottom) shares of a rank's row
LANES = {"send": (0.60, 0.74), "recv": (0.77, 0.91)}
ONLY_LANES = {"send": (0.08, 0.46), "recv": (0.50, 0.88)}  # where no rank computes
LIVE = (1.0, 1.42)
MAX_LETTERS = 400


def plot_timeline(trace: Trace, *, ax=None, ideal: float | None = None, title: str = "", labels: bool = True, held: str = ""):
    """Draw `trace` and return the axes.

    ideal: seconds at which a perfect run would end, drawn as a dashed line; labels=False leaves out the letters in the bars.
    held: what live events count, if not bytes ("activations").
    """
    peaks = words.peak_bytes(trace)
    row = 1.5 if peaks else 1.0
    if ax is None:
        ax = style.new_axes(8.5, 1.5 + min(9.0, max(0.8, trace.ranks * row * (0.42 if trace.ranks <= 16 else 0.13))))
    makespan = trace.makespan_ps
    span = max(makespan, int((ideal or 0) * PS))
    unit, name = words.time_scale(span)
    span = span or unit

    lanes = defaultdict(list)  # (rank, lane) -> [(start, end, kind)]
    for e in trace:
        if e.kind != "live":
            lanes[e.rank, e.lane if e.lane in LANES else "compute"].append((e.start, e.end, e.kind, e.microbatch, e.peer))
    works = any(lane == "compute" for _, lane in lanes)
    place = {"compute": WORK, **LANES} if works or not lanes else ONLY_LANES
    columns = next(c for limit, c in COLUMNS if trace.ranks <= limit)
    joined, letters = False, 0
    if "compute" in place:  # a pale ground, so that idle time is seen as time
        for rank in range(trace.ranks):
            ax.broken_barh(
                [(0, span / unit)],
                (rank * row + WORK[0], WORK[1] - WORK[0]),
                facecolor="#F1F1F1",
                edgecolor="none",
                gid=f"fw-{rank}-ground",
            )
    for (rank, lane), spans in sorted(lanes.items()):
        top, bottom = place[lane]
        if len(spans) > columns:
            spans, joined = _join(spans, span, columns, lone=lane in LANES), True
        by_kind = defaultdict(list)
        for start, end, kind, *_ in spans:
            by_kind[kind].append((start / unit, max(end - start, span * 1e-3) / unit))
        for kind in (k for k in KINDS if k in by_kind):
            s = style.KIND_STYLE[kind]
            ax.broken_barh(
                by_kind[kind],
                (rank * row + top, bottom - top),
                facecolor=s.colour,
                hatch=s.hatch if lane == "compute" else "",
                edgecolor="#444444" if len(by_kind[kind]) < 300 else "none",
                linewidth=0.4,
                gid=f"fw-{rank}-{lane}-{kind}",
            )
        if labels and trace.ranks <= 16 and (lane == "compute" or not works):
            letters += _letters(ax, spans, rank * row + (top + bottom) / 2, unit, span, MAX_LETTERS - letters)
    if peaks:
        _live_curves(ax, trace, row, unit, max(peaks.values()))

    shown = {e.kind for e in trace}
    style.legend(ax, [k for k in KINDS if k in shown], words={"live": f"live {held}"} if held else None)
    style.badge(ax, trace.sources)
    every = max(1, trace.ranks // 16)
    ax.set_yticks([r * row + 0.31 for r in range(0, trace.ranks, every)], [f"rank {r}" for r in range(0, trace.ranks, every)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(trace.ranks, 1) * row, -0.05)
    ax.set_xlim(0, span / unit * 1.004)
    ax.xaxis.set_major_locator(MaxNLocator(8))
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time ({name})")
    if ideal is not None:
        ax.axvline(ideal * PS / unit, color="black", linestyle="--", linewidth=1.2, gid="fw-ideal")
    if title:
        ax.set_title(title, pad=22 if len(shown) <= 6 else 38)  # above a legend of two rows
    said = _caption(trace, peaks, joined, held)
    style.caption(ax, said if ideal is None else f"{said}; dashed: ideal, {words.time_text(ideal * PS)}")
    return ax


def _caption(trace: Trace, peaks: dict, joined: bool, held: str) -> str:
    """Figures under the picture: the two bubbles by their two names, the peak, and whether columns were joined."""
    if not len(trace):
        return "nothing was recorded"
    said = []
    total = words.bubble_of_total(trace)
    if total is not None:
        said.append(f"bubble: {total:.1%} of total, {words.bubble_of_ideal(trace):.1%} of ideal")
    waiting = sum(sum(w.values()) for w in words.waits(trace).values())
    if waiting:
        said.append(f"waiting: {waiting / (trace.ranks * trace.makespan_ps):.1%} of all ranks' time")
    if trace.messages_sent():
        said.append(f"{words.bytes_text(trace.bytes_sent())} sent")
    if peaks:
        most = max(peaks.values())
        said.append(f"peak {most:g} {held}" if held else f"peak {words.bytes_text(most)}")
    if joined:
        said.append("many events: each column shows what filled most of it")
    return "; ".join(said)


def _join(spans: list, span: int, columns: int, *, lone: bool) -> list:
    """Spans per kind -> at most `columns` spans, each the kind that covers most of its column; white where idle time covers more.

    lone: a message lane, where any message at all colours its column.
    Exact coverage: kind k covered, before t, sum(t - start for start < t) - sum(t - end for end < t).
    """
    edges = np.linspace(0, span, columns + 1)
    width = span / columns
    kinds = sorted({s[2] for s in spans}, key=KINDS.index)
    cover = np.zeros((len(kinds), columns))
    for k, kind in enumerate(kinds):
        for sign, times in ((1, [s[0] for s in spans if s[2] == kind]), (-1, [s[1] for s in spans if s[2] == kind])):
            t = np.sort(np.asarray(times, dtype=float))
            before = np.searchsorted(t, edges)
            cover[k] += sign * np.diff(before * edges - np.concatenate([[0.0], np.cumsum(t)])[before])
    best, idle = cover.argmax(axis=0), width - cover.sum(axis=0)
    full = cover.max(axis=0) > (0 if lone else np.maximum(idle, 0) - 1e-9 * width)
    out = []
    for c in range(columns):
        if not full[c]:
            continue
        kind = kinds[best[c]]
        if out and out[-1][2] == kind and abs(out[-1][1] - edges[c]) < width / 2:
            out[-1] = (out[-1][0], edges[c + 1], kind, None, None)
        else:
            out.append((edges[c], edges[c + 1], kind, None, None))
    return out


def _letters(ax, spans, y, unit, span, room) -> int:
    """Write letter and micro-batch, or "to 3", into bars that are wide enough; at most `room` of them."""
    wide = [s for s in spans if (s[1] - s[0]) * 60 >= span and style.KIND_STYLE[s[2]].letter][: max(room, 0)]
    for start, end, kind, microbatch, peer in wide:
        s = style.KIND_STYLE[kind]
        text = s.letter if microbatch is None or (end - start) * 36 < span else f"{s.letter}{microbatch}"
        if peer is not None and kind in LANES:
            text = f"to {peer}" if kind == "send" else f"from {peer}"
            if (end - start) * 20 < span:
                continue
        ground = {"boxstyle": "round,pad=0.1", "facecolor": s.colour, "edgecolor": "none"} if s.hatch else None
        ax.text((start + end) / 2 / unit, y, text, ha="center", va="center", fontsize=8, color=s.ink, clip_on=True, bbox=ground)
    return len(wide)


def _live_curves(ax, trace: Trace, row: float, unit: int, highest: int) -> None:
    """Under each rank, its live bytes as a filled staircase; all ranks on one scale."""
    curves = defaultdict(list)
    for e in trace:
        if e.kind == "live":
            curves[e.rank].append((e.start, e.bytes))
    top, bottom = LIVE
    for rank, points in curves.items():
        points.sort(key=lambda p: p[0])
        t = [p[0] / unit for p in points] + [trace.makespan_ps / unit]
        held = [p[1] for p in points] + [points[-1][1]]
        floor = rank * row + bottom
        y = [floor - (bottom - top) * h / max(highest, 1) for h in held]
        s = style.KIND_STYLE["live"]
        ax.fill_between(t, floor, y, step="post", color=s.colour, alpha=0.45, linewidth=0, gid=f"fw-{rank}-live")
        ax.step(t, y, where="post", color="#333333", linewidth=0.9)
