"""A log ladder: things of very different size on one axis, each rung ten times the one below, from a laptop to a cluster.

On such an axis a model's state and a machine's memory can be compared by eye, and a distance is a factor: so many rungs, so
many tens. Machines stand on the right of the pole, models on the left.

    height = log10(value)

Reference: the idea is that of Charles and Ray Eames, "Powers of Ten", 1977.
"""

import math

import matplotlib.pyplot as plt

from . import style

__all__ = ["plot_ladder", "spread"]


def spread(places, gap: float) -> list[float]:
    """Move labels apart: the nearest places in the same order that keep `gap` between neighbours (least squares, by pooling)."""
    order = sorted(range(len(places)), key=lambda k: places[k])
    pools: list[list] = []  # [members, sum of (place - offset)]
    for k in order:
        pools.append([[k], places[k]])
        while len(pools) > 1:
            lower, upper = pools[-2], pools[-1]
            end = lower[1] / len(lower[0]) + gap * (len(lower[0]) - 1) / 2
            start = upper[1] / len(upper[0]) - gap * (len(upper[0]) - 1) / 2
            if start - end >= gap - 1e-12:
                break
            pools[-2:] = [[lower[0] + upper[0], lower[1] + upper[1]]]
    out = [0.0] * len(places)
    for members, total in pools:
        middle = total / len(members)
        for j, k in enumerate(members):
            out[k] = middle + gap * (j - (len(members) - 1) / 2)
    return out


def plot_ladder(rungs, *, unit: str, ax=None, title: str = "", height: float = 5.0):
    """Named values on one vertical log axis; returns the axes.

    rungs: [(name, value, side)], side "left" (what is needed) or "right" (what there is); values above 0, in `unit`.
    """
    rungs = list(rungs)
    if not rungs or any(value <= 0 or side not in ("left", "right") for _, value, side in rungs):
        raise ValueError("rungs is [(name, value above 0, 'left' or 'right'), ...], with at least one row")
    ax = ax or style.new_axes(8, height)
    inches = ax.figure.get_size_inches()[1] * ax.get_position().height
    heights = [math.log10(value) for _, value, _ in rungs]
    bottom, top = math.floor(min(heights) - 0.2), math.ceil(max(heights) + 0.2)
    gap = 0.19 / inches * (top - bottom)  # a line of 9-point text, in decades
    ax.plot([0, 0], [bottom, top], color="#444444", linewidth=5, solid_capstyle="butt", zorder=1)
    for decade in range(bottom, top + 1):
        ax.plot([-0.06, 0.06], [decade, decade], color="#444444", linewidth=1.5, zorder=1)
    for side, sign, colour, marker in (
        ("left", -1, style.OKABE_ITO["vermillion"], "s"),
        ("right", 1, style.OKABE_ITO["blue"], "o"),
    ):
        mine = [k for k, rung in enumerate(rungs) if rung[2] == side]
        for k, place in zip(mine, spread([heights[k] for k in mine], gap), strict=True):
            ax.plot([0, sign * 0.25, sign * 0.42], [heights[k], place, place], color=colour, linewidth=0.9, zorder=2)
            ax.plot(
                [0],
                [heights[k]],
                marker=marker,
                color=colour,
                markeredgecolor="black",
                markeredgewidth=0.5,
                markersize=7,
                zorder=3,
            )
            with plt.rc_context(style.RC):
                ax.text(
                    sign * 0.46, place, f"{rungs[k][0]}  ({_power(rungs[k][1])})", ha="left" if sign > 0 else "right",
                    va="center", fontsize=9, gid="fw-rung",
                )  # fmt: skip
    ticks = range(bottom, top + 1, max(1, (top - bottom) // 12))
    ax.set_yticks(list(ticks), [f"$10^{{{d}}}$" for d in ticks])
    ax.set_ylim(bottom - gap, top + gap)
    ax.set_xlim(-3.2, 3.2)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.set_ylabel(unit)
    ax.text(
        -0.46,
        1.005,
        "needed  ■",
        transform=ax.get_xaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=9,
        color=style.OKABE_ITO["vermillion"],
    )
    ax.text(
        0.46,
        1.005,
        "●  there is",
        transform=ax.get_xaxis_transform(),
        ha="left",
        va="bottom",
        fontsize=9,
        color=style.OKABE_ITO["blue"],
    )
    if title:
        ax.set_title(title, pad=20)
    return ax


def _power(value: float) -> str:
    """`2.8e12` -> "2.8e12": short, the same everywhere."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
