"""Formats in pictures: what range each spans, how far its ticks are apart, and what of a real tensor falls below the last one.

Everything stands on an axis of powers of two, because a format has the same number of ticks between each two of them. Plain data
goes in; where the numbers come from is somebody else's affair.

    relative spacing = quantum / x:  between 2^-mantissa-1 and 2^-mantissa, and growing below the smallest normal number

Reference: IEEE 754-2019, chapter 3.
"""

import math
from collections.abc import Mapping, Sequence

from . import style

__all__ = ["plot_drift", "plot_range", "plot_spacing", "plot_underflow"]


def plot_range(formats: Sequence[tuple], *, ax=None, title: str = "What each format can hold"):
    """One bar a format: from its smallest normal number to its largest, subnormals hatched; the axis counts powers of two.

    formats: [(name, smallest subnormal, smallest normal, largest, bits of the mantissa)]. Returns the axes.
    """
    ax = ax or style.new_axes(8, 0.45 * len(formats) + 1.2)
    low = min(math.log2(row[1]) for row in formats)
    high = max(math.log2(row[3]) for row in formats)
    for k, (_, least, normal, largest, mantissa) in enumerate(formats):
        a, b, c = (math.log2(v) for v in (least, normal, largest))
        ax.broken_barh([(b, c - b)], (k - 0.32, 0.64), facecolor=style.OKABE_ITO["sky"], edgecolor="#444444")
        if b > a:
            ax.broken_barh([(a, b - a)], (k - 0.32, 0.64), facecolor="white", edgecolor="#444444", hatch="////")
        middle = max(min((b + c) / 2, 60), -60)
        ax.text(middle, k, f"{mantissa} bits", ha="center", va="center", fontsize=9)
    ax.set_yticks(range(len(formats)), [row[0] for row in formats])
    ax.invert_yaxis()
    ax.set(xlim=(low - 4, high + 4), xlabel="power of two", title=title)
    style.caption(ax, "blue: normal numbers, each with so many bits behind the point; hatched: subnormal, with fewer and fewer")
    return ax


def plot_spacing(curves: Mapping[str, Sequence[tuple[float, float]]], *, ax=None, title: str = "How far the ticks are apart"):
    """Relative distance of neighbours over the size of a number. curves: {format: [(x, quantum / x)]}. Returns the axes."""
    ax = ax or style.new_axes(8, 3.4)
    for k, (name, points) in enumerate(curves.items()):
        look = style.series_style(k) | {"marker": ""}
        ax.plot([math.log2(x) for x, _ in points], [r for _, r in points], label=name, **look)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="size of the number, as a power of two", ylabel="spacing / size", title=title)
    ax.legend(frameon=False, ncols=min(4, len(curves)), fontsize=9)
    return ax


def plot_underflow(
    bins: Sequence[tuple[int, float]],
    limits: Sequence[tuple],
    *,
    zero_below: float,
    ax=None,
    title: str = "",
    source: str = "measured",
):
    """How many of a tensor's numbers have which size, with the part that a format loses in orange, hatched.

    bins: [(power of two, share of all numbers between it and the next)]; zero_below: what rounds to zero, a size; limits:
    [(name, size)] for dashed lines. Returns the axes.
    """
    ax = ax or style.new_axes(8, 3.4)
    edge = math.log2(zero_below)
    for power, share in bins:
        gone = power + 1 <= edge
        colour = style.OKABE_ITO["vermillion"] if gone else style.OKABE_ITO["sky"]
        ax.bar(power + 0.5, 100 * share, width=1, color=colour, hatch="////" if gone else "", edgecolor="#444444", linewidth=0.5)
    top = 100 * max(share for _, share in bins)
    for k, (name, size) in enumerate(limits):
        x = math.log2(size)
        ax.axvline(x, color="black", linestyle="--", linewidth=1)
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # another limit's line may run behind the words
        place = (x, top * (1.26 - 0.1 * (k % 3)))
        ax.annotate(name, place, xytext=(3, 0), textcoords="offset points", fontsize=9, va="center", bbox=clear)
    seen = [power for power, share in bins if 100 * share > top / 500]  # a thinner bar is not to be seen
    marks = [math.log2(size) for _, size in limits]
    left, right = min([*seen, *marks]), max([power + 1 for power in seen] + marks)
    ax.set_xlim(left - 1.5, right + (right - left) / 8)  # room for the last limit's words
    ax.set(ylim=(0, top * 1.34), xlabel="size of the number, as a power of two", ylabel="% of all numbers", title=title)
    style.caption(ax, f"orange, hatched: {sum(s for p, s in bins if p + 1 <= edge):.1%} of them round to zero")
    style.badge(ax, source)
    return ax


def plot_drift(curves: Mapping[str, Sequence[float]], *, ax=None, title: str = "", source: str = "measured"):
    """A number after 0, 1, 2, ... small updates, one line for each way to keep it. Returns the axes."""
    ax = ax or style.new_axes(7.5, 3.2)
    for k, (name, values) in enumerate(curves.items()):
        ax.plot(values, label=name, **(style.series_style(k) | {"marker": ""}))
    ax.set(xlabel="updates", ylabel="the number", title=title)
    ax.legend(frameon=False, fontsize=9)
    style.badge(ax, source)
    return ax
