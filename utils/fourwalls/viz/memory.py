"""Where the bytes of a step are: the memory mountain over one step, and bars that shrink as states are split.

The mountain rises through the forward pass, as activations are kept, and falls through the backward pass, as they are used
up; the flat ground is parameters, gradients and optimizer state. Both pictures take plain tables, so they draw measured and
computed bytes alike.

    live(t) = sum over categories of bytes alive at t        peak = max over t

Reference: Korthikanti et al. 2022, section 4; Rajbhandari et al. 2020 (ZeRO), figure 1.
"""

import matplotlib.pyplot as plt
import numpy as np

from . import style, words

__all__ = ["CATEGORY_STYLE", "plot_memory_mountain", "plot_shrinking_bars"]

# category -> (colour, hatch, letter); others take the remaining colours in order
CATEGORY_STYLE = {
    "parameters": (style.OKABE_ITO["blue"], "", "P"),
    "gradients": (style.OKABE_ITO["orange"], "//", "G"),
    "optimizer": (style.OKABE_ITO["purple"], "xx", "O"),
    "activations": (style.OKABE_ITO["sky"], "", "A"),
    "inputs": (style.OKABE_ITO["green"], "..", "I"),
    "temporary": (style.OKABE_ITO["yellow"], "\\\\", "T"),
    "buffers": ("#B8B8B8", "++", "B"),
    "recomputed": ("#A6D4F2", "\\\\", "R"),
    "logits": (style.OKABE_ITO["vermillion"], "oo", "L"),
    "other": ("#DDDDDD", "--", "?"),
}
SPARE = (("#B8B8B8", "++"), (style.OKABE_ITO["vermillion"], "oo"), ("#DDDDDD", "--"), (style.OKABE_ITO["green"], "**"))


def _styles(categories) -> dict:
    """category -> (colour, hatch, letter), the same for the same list of categories."""
    spare, table = 0, {}
    for name in categories:
        if name in CATEGORY_STYLE:
            table[name] = CATEGORY_STYLE[name]
        else:
            table[name] = (*SPARE[spare % len(SPARE)], name[:1].upper())
            spare += 1
    return table


def _categories(tables) -> list[str]:
    """All categories, those of CATEGORY_STYLE first in its order, then the others as they came."""
    met = list(dict.fromkeys(name for table in tables for name in table))
    known = [name for name in CATEGORY_STYLE if name in met]
    return known + [name for name in met if name not in CATEGORY_STYLE]


def plot_memory_mountain(
    rows, *, phases=(), ax=None, source: str = "measured", title: str = "", xlabel: str = "operations of the step", limit=None
):
    """Stacked area of live bytes over one step; returns the axes.

    rows    [(position, {category: bytes})], positions increasing; a category that is missing holds 0 bytes
    phases  [(name, start, end)] in positions, marked above: ("forward", 0, 40)
    limit   bytes of the device, drawn as a line
    """
    rows = list(rows)
    if any(later[0] < earlier[0] for earlier, later in zip(rows, rows[1:], strict=False)):
        raise ValueError("positions must not fall from row to row; sort the rows by position")
    ax = ax or style.new_axes(8, 3.8)
    style.badge(ax, source)
    if title:
        ax.set_title(title, pad=34)
    ax.set_xlabel(xlabel)
    if not rows:
        style.caption(ax, "nothing was recorded")
        return ax
    names = _categories(table for _, table in rows)
    positions = np.array([p for p, _ in rows], dtype=float)
    values = np.array([[table.get(name, 0) for _, table in rows] for name in names], dtype=float)
    values = values.reshape(len(names), len(rows))
    totals = values.sum(axis=0)
    scale, unit = _byte_scale(max(totals.max(), limit or 0))
    looks = _styles(names)
    floor = np.zeros(len(rows))
    for name, row in zip(names, values / scale, strict=True):
        colour, hatch, letter = looks[name]
        with plt.rc_context(style.RC):
            ax.fill_between(
                positions, floor, floor + row, step="post", facecolor=colour, hatch=hatch, edgecolor="#444444", linewidth=0.3,
                label=f"{letter}  {name}", gid=f"fw-{name}",
            )  # fmt: skip
        floor = floor + row
    peak = int(totals.argmax())
    ax.plot(positions, totals / scale, drawstyle="steps-post", color="black", linewidth=1.1)
    ax.plot([positions[peak]], [totals[peak] / scale], "v", color="black", markersize=7, gid="fw-peak")
    top = max(totals.max(), limit or 0) / scale * 1.22
    ax.set_ylim(0, top or 1)
    ax.set_xlim(positions[0], positions[-1] if positions[-1] > positions[0] else positions[0] + 1)
    for name, start, end in phases:
        ax.axvline(start, color="#444444", linewidth=0.8, linestyle=":")
        ax.axvline(end, color="#444444", linewidth=0.8, linestyle=":")
        ax.text((start + end) / 2, (top or 1) * 0.985, name, ha="center", va="top", fontsize=9, gid="fw-phase")
    if limit is not None:
        ax.axhline(limit / scale, color=style.OKABE_ITO["vermillion"], linestyle="--", linewidth=1.4, gid="fw-limit")
    ax.set_ylabel(unit)
    if names:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
        ax.legend(ncols=min(5, len(names)), frameon=False, fontsize=8, **place)
    said = f"peak {words.bytes_text(totals[peak])}"
    if totals[peak]:
        said += f", of which {names[int(values[:, peak].argmax())]} {values[:, peak].max() / totals[peak]:.0%}"
    style.caption(ax, f"{said}; end of step {words.bytes_text(totals[-1])}")
    return ax


def plot_shrinking_bars(
    bars, *, ax=None, limit=None, limit_name: str = "device", source: str = "modelled", title: str = "", binary: bool = False
):
    """One stacked bar per way of splitting, with its total at the end; returns the axes.

    bars: [(label, {category: bytes})], drawn from the top.  limit: bytes of one device, drawn as a line.
    """
    bars = list(bars)
    if not bars:
        raise ValueError("bars is empty; give [(label, {category: bytes}), ...]")
    ax = ax or style.new_axes(8, 1.3 + 0.42 * len(bars))
    names = _categories(table for _, table in bars)
    looks = _styles(names)
    scale, unit = _byte_scale(max([sum(t.values()) for _, t in bars] + [limit or 0]), binary=binary)
    left = np.zeros(len(bars))
    for name in names:
        width = np.array([table.get(name, 0) for _, table in bars], dtype=float) / scale
        colour, hatch, letter = looks[name]
        with plt.rc_context(style.RC):
            ax.barh(
                range(len(bars)),
                width,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor="#444444",
                linewidth=0.5,
                height=0.66,
                label=f"{letter}  {name}",
            )
        left += width
    span = max(left.max(), (limit or 0) / scale)
    for k, total in enumerate(left):
        ax.text(
            total + span * 0.01,
            k,
            words.bytes_text(total * scale, binary=binary),
            va="center",
            ha="left",
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            gid="fw-total",
        )
    if limit is not None:
        ax.axvline(limit / scale, color=style.OKABE_ITO["vermillion"], linestyle="--", linewidth=1.4, gid="fw-limit")
        style.caption(ax, f"dashed: {limit_name}, {words.bytes_text(limit, binary=binary)}")
    ax.set_yticks(range(len(bars)), [label for label, _ in bars])
    ax.set_ylim(len(bars) - 0.5, -0.6)
    ax.set_xlim(0, span * 1.14)
    ax.set_xlabel(f"{unit} per device" + (f"\n{ax.get_xlabel()}" if ax.get_xlabel() else ""))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(5, len(names)), frameon=False, fontsize=8, borderaxespad=0.2)
    style.badge(ax, source)
    if title:
        ax.set_title(title, pad=22)
    return ax


def _byte_scale(largest: float, *, binary: bool = True) -> tuple[float, str]:
    """(bytes in the unit, unit) so that the largest value is between 1 and 1000 or 1024 of it."""
    step, names = (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")) if binary else (1000, ("B", "kB", "MB", "GB", "TB", "PB"))
    k = 0
    while largest >= step and k + 1 < len(names):
        largest, k = largest / step, k + 1
    return float(step**k), names[k]
