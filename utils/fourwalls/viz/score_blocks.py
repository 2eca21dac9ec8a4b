"""Who computes which scores: the square of queries by keys, cut as the ranks hold their tokens, and the work of each rank.

A row of blocks has the colour and hatch of the rank that holds these queries; the number in a block is the hop at which
its keys come by. Blocks above the diagonal are masked and stay white; on the diagonal half a block is computed. The bars beside
it add up each rank's scores, hop by hop.

    a rank's bar = sum over hops of the scores that the mask leaves it

Reference: Brandon et al. 2023 (arXiv:2311.09431), figure of the workload of causal ring attention.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Polygon, Rectangle

from ..cost.context import runs, work
from . import style

__all__ = ["describe_scores", "plot_score_blocks"]

COLOURS = ("sky", "orange", "green", "purple", "yellow", "vermillion", "blue")
HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++")


def plot_score_blocks(cut: str, c: int, *, length: int = 4096, axes=None):
    """Draw `cut` ("equal" or "zigzag") on c ranks (at most 7) and return the two axes: the square, and the bars of work.

    length: tokens that the bars are counted for. axes: a pair to draw into.
    """
    if cut not in ("equal", "zigzag") or not 1 <= c <= len(COLOURS):
        raise ValueError(f"cut is {cut!r}, c is {c!r}; drawn are 'equal' and 'zigzag', for 1 to {len(COLOURS)} ranks")
    if axes is None:
        with style.look():
            _, axes = plt.subplots(1, 2, figsize=(8.5, 4), width_ratios=(1, 1.1), layout="constrained")
    square, bars = axes
    chunks = c if cut == "equal" or c == 1 else 2 * c
    holder = {p: r for r in range(c) for run in runs(cut, chunks, c, r) for p in run}  # of each chunk
    with plt.rc_context(style.RC):
        for i in range(chunks):
            for j in range(chunks):
                _block(square, i, j, holder[i], (holder[i] - holder[j]) % c)
            square.text(-0.15, i + 0.5, f"r{holder[i]}", ha="right", va="center", fontsize=8)
            square.text(i + 0.5, -0.15, f"r{holder[i]}", ha="center", va="bottom", fontsize=8)
        square.set(xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xticks=[], yticks=[], ylabel="queries", xlabel="keys")
        square.yaxis.labelpad = square.xaxis.labelpad = 14
        square.set_title(f"{cut}: number = hop", pad=20)
        _bars(bars, work(cut, length, c), c)
    return axes


def _block(ax, i: int, j: int, rank: int, hop: int) -> None:
    look = {"facecolor": style.OKABE_ITO[COLOURS[rank]], "hatch": HATCHES[rank], "edgecolor": "#555555", "linewidth": 0.6}
    ax.add_patch(Rectangle((j, i), 1, 1, facecolor="white", edgecolor="#CCCCCC", linewidth=0.6))
    if j < i:
        ax.add_patch(Rectangle((j, i), 1, 1, **look))
    elif j == i:
        ax.add_patch(Polygon([(j, i), (j, i + 1), (j + 1, i + 1)], **look))
    if j <= i:
        x, y = (j + 0.5, i + 0.5) if j < i else (j + 0.32, i + 0.7)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        ax.text(x, y, str(hop), ha="center", va="center", fontsize=8, bbox=box)


def _bars(ax, found: list[list[int]], c: int) -> None:
    mean = sum(map(sum, found)) / c
    for r, row in enumerate(found):
        left = 0.0
        for hop in range(c):
            part = row[(r - hop) % c] / mean
            look = {"facecolor": style.OKABE_ITO[COLOURS[r]], "hatch": HATCHES[r], "edgecolor": "#555555", "linewidth": 0.6}
            if part:
                ax.barh(r, part, left=left, height=0.6, **look)
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                ax.text(left + part / 2, r, str(hop), ha="center", va="center", fontsize=8, bbox=box)
            left += part
        ax.text(left + 0.03, r, f"{left:.2f}", va="center", fontsize=9)
    most = max(map(sum, found)) / mean
    ax.axvline(1, color="#333333", linestyle="--", linewidth=1)
    ax.set(yticks=range(c), yticklabels=[f"rank {r}" for r in range(c)], ylim=(c - 0.5, -0.5), xlim=(0, 1.25 * most))
    ax.set_xlabel("scores computed; 1 = mean of the ranks")
    style.badge(ax, "modelled")


def describe_scores(cut: str, c: int, *, length: int = 4096) -> str:
    """The picture in words."""
    each = [sum(row) for row in work(cut, length, c)]
    mean = sum(each) / c
    shares = ", ".join(f"rank {r} {n / mean:.2f}" for r, n in enumerate(each))
    return f"{cut}, {c} ranks, {length} tokens: scores over the mean: {shares}; last over first {each[-1] / each[0]:.2f}"
