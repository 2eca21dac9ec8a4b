"""A message and its backward, side by side: the matrix that takes what ranks hold to what they receive, and its mirror image.

All numbers that the ranks bring stand in a row, all that they receive in a column; a filled cell says "this one goes there". The
gradient goes the same ways back, so its matrix is the mirror image at the diagonal, and that is again the matrix of a message.

    y = A x    =>    dL/dx = A^T dL/dy

Reference: Griewank and Walther, "Evaluating Derivatives" (2008), chapter 3, on the adjoint of a linear map.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from . import style

__all__ = ["plot_mirrored"]

COLOURS = ("sky", "orange", "green", "purple", "yellow", "blue", "vermillion")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")


def plot_mirrored(pairs: Sequence[tuple[str, np.ndarray, str]], ranks: int):
    """One column a pair (name, matrix, name of the mirror image): the matrix above, its mirror image below; returns the axes.

    A cell's colour, hatch and number are those of the rank whose number it is, so that they can be followed into the image.
    """
    with style.look():
        figure, axes = plt.subplots(2, len(pairs), figsize=(min(2.1 * len(pairs), 11), 4.6), layout="constrained", squeeze=False)
    for k, (name, matrix, mirror) in enumerate(pairs):
        matrix = np.asarray(matrix)
        owner = [c * ranks // matrix.shape[1] if matrix.shape[1] >= ranks else 0 for c in range(matrix.shape[1])]
        side = max(matrix.shape)
        for row, (title, values) in enumerate(((name, matrix), (mirror, matrix.T))):
            _draw(axes[row, k], values, owner, columns=row == 0, side=side)
            axes[row, k].set_title(title, fontsize=10)
    axes[0, 0].set_ylabel("forward", fontsize=10)
    axes[1, 0].set_ylabel("backward", fontsize=10)
    return axes


def _draw(ax, values: np.ndarray, owner: list[int], *, columns: bool, side: int) -> None:
    high, wide = values.shape
    ax.add_patch(Rectangle((0, 0), wide, high, facecolor="#F4F4F4", edgecolor="#999999", linewidth=0.6, gid="fw-ground"))
    for i, j in zip(*np.nonzero(values), strict=True):
        r = owner[j if columns else i]
        colour = style.OKABE_ITO[COLOURS[r % len(COLOURS)]]
        with plt.rc_context(style.RC):
            ax.add_patch(
                Rectangle(
                    (j, i),
                    1,
                    1,
                    facecolor=colour,
                    hatch=HATCHES[r % len(HATCHES)],
                    edgecolor="#333333",
                    linewidth=0.6,
                    gid="fw-cell",
                )
            )
        if side <= 4:
            ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            ax.text(j + 0.5, i + 0.5, str(r), ha="center", va="center", fontsize=9, bbox=ground)
    ax.set_xlim(-0.1 + (wide - side) / 2, (wide + side) / 2 + 0.1)
    ax.set_ylim((high + side) / 2 + 0.1, -0.1 + (high - side) / 2)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
