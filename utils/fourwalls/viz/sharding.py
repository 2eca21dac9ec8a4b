"""Which rank holds what of each matrix: slabs in one colour, hatch and letter for each rank, in the order of a product.

A tensor is whole on every rank, cut by rows, cut by columns, or a sum of which each rank holds one part. The picture lays the
tensors of a formula out from left to right, with signs between them, so that a cut can be followed through the products: what is
cut along a summed dim comes out as parts of a sum.

    X (whole) @ A (cut by columns) = Y (cut by columns);     Y @ B (cut by rows) = Z (parts of a sum)

Reference: the notation A[I_X, J] for a dim cut over an axis is that of the JAX scaling book; the picture is our own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from . import style

__all__ = ["HOW", "Slabs", "describe_sharding", "plot_sharding"]

# how a tensor is held -> what that means, for `describe_sharding`
HOW = {
    "whole": "whole on every rank",
    "rows": "cut by rows",
    "columns": "cut by columns",
    "parts": "as parts of a sum, one on each rank",
}
COLOURS = ("sky", "orange", "green", "purple", "yellow", "blue", "vermillion")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
LARGEST, SMALLEST, GAP, SHEET = 2.2, 0.55, 0.34, 0.13  # inches: sides of a tensor, room beside it, shift of a part's sheet


class Slabs(NamedTuple):
    """One tensor of the picture: its name, how it is held (one of HOW), and its two sizes as numbers, which set its shape.

    `sizes` are the words written under it, such as ("s", "4h/t").
    """

    name: str
    how: str
    rows: float
    columns: float
    sizes: tuple[str, str] = ("", "")


def describe_sharding(line: Sequence["Slabs | str"], ranks: int) -> str:
    """The picture in words."""
    return f"{ranks} ranks. " + " ".join(
        item if isinstance(item, str) else f"{item.name} ({' x '.join(filter(None, item.sizes))}, {HOW[item.how]})"
        for item in line
    )


def plot_sharding(line: Sequence["Slabs | str"], ranks: int, *, ax=None, title: str = "", note: str = ""):
    """Draw tensors (Slabs) and signs (text) from left to right; returns the axes.

    ranks: 1 to 8. ValueError for a way of holding that does not exist. `note` is small text below.
    """
    if not 1 <= ranks <= len(HATCHES):
        raise ValueError(f"{ranks} ranks; the picture shows 1 to {len(HATCHES)}")
    for item in line:
        if not isinstance(item, str) and item.how not in HOW:
            raise ValueError(f"{item.name} is held {item.how!r}; allowed: {', '.join(HOW)}")
    largest = max((max(i.rows, i.columns) for i in line if not isinstance(i, str)), default=1)
    side = lambda n: SMALLEST + (LARGEST - SMALLEST) * (n / largest) ** 0.5  # noqa: E731  small ones stay visible
    places, x = [], 0.15
    for item in line:
        wide = 0.11 * len(item) + 0.1 if isinstance(item, str) else side(item.columns)
        places.append((item, x, wide))
        x += wide + GAP + (SHEET * (ranks - 1) if not isinstance(item, str) and item.how == "parts" else 0)
    if ax is None:
        wide = min(max(x + 0.1, 4), 11)
        ax = style.new_axes(wide, min(wide / x, 1) * (LARGEST + 1.1) + 0.5)
    for item, at, wide in places:
        if isinstance(item, str):
            ax.text(at + wide / 2, 0, item, ha="center", va="center", fontsize=12)
        else:
            _tensor(ax, item, at, wide, side(item.rows), ranks)
    ax.set_xlim(0, x)
    ax.set_ylim(-LARGEST / 2 - 0.55, LARGEST / 2 + 0.55)
    ax.set_aspect("equal")
    ax.set_axis_off()
    if title:
        ax.set_title(title)
    if note:
        ax.text(x / 2, -LARGEST / 2 - 0.5, note, ha="center", va="top", fontsize=9)
    return ax


def _tensor(ax, item: Slabs, x: float, wide: float, high: float, ranks: int) -> None:
    bottom = -high / 2
    if item.how == "whole":
        _box(ax, x, bottom, wide, high, "#E8E8E8", "", "all", f"{item.name}-all")
    for r in range(ranks if item.how != "whole" else 0):
        colour, hatch = style.OKABE_ITO[COLOURS[r % len(COLOURS)]], HATCHES[r]
        name = f"{item.name}-{r}"
        if item.how == "columns":
            _box(ax, x + wide * r / ranks, bottom, wide / ranks, high, colour, hatch, str(r), name)
        elif item.how == "rows":
            _box(ax, x, bottom + high * (1 - (r + 1) / ranks), wide, high / ranks, colour, hatch, str(r), name)
        else:  # sheets, the first in front: each a number for every place
            back = ranks - 1 - r
            colour, hatch = style.OKABE_ITO[COLOURS[back % len(COLOURS)]], HATCHES[back]
            _box(ax, x + SHEET * back, bottom + SHEET * back, wide, high, colour, hatch, "", f"{item.name}-{back}")
    if item.how == "parts":
        ax.text(x + wide / 2, 0, "+", ha="center", va="center", fontsize=16, bbox=_ground())
    shift = SHEET * (ranks - 1) if item.how == "parts" else 0
    ax.text(x + (wide + shift) / 2, high / 2 + shift + 0.1, item.name, ha="center", va="bottom", fontsize=11, fontweight="bold")
    sizes = " × ".join(filter(None, item.sizes))
    ax.text(x + wide / 2, bottom - 0.1, sizes, ha="center", va="top", fontsize=9)


def _box(ax, x, y, wide, high, colour, hatch, letter, name) -> None:
    with plt.rc_context(style.RC):
        ax.add_patch(
            Rectangle((x, y), wide, high, facecolor=colour, hatch=hatch, edgecolor="#333333", linewidth=0.8, gid=f"fw-{name}")
        )
    if letter:
        ax.text(x + wide / 2, y + high / 2, letter, ha="center", va="center", fontsize=9, bbox=_ground())


def _ground() -> dict:
    return {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
