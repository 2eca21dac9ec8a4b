"""A pipeline schedule as a grid: a row for each rank, a cell for each action, in the order in which the rank runs them.

Colour, hatch and letter say the kind; a joined cell has both colours; a marked cell has a thick edge and its reason in the
caption. With times beside it the same list is drawn by `plot_timeline`, over the memory that it holds.

    row r, column k  =  the k-th action of rank r, as text: 2F0

Reference: Huang et al. 2019 and Narayanan et al. 2021, whose figures read the same way.
"""

import re

from matplotlib.patches import Rectangle

from . import style

__all__ = ["LETTERS", "grid_words", "plot_schedule_grid"]

LETTERS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def plot_schedule_grid(schedule, *, mark: tuple[int, int] | None = None, reason: str = "", ax=None, title: str = ""):
    """Draw `schedule` (for each rank the cells, which print as `2F0`, `0F3+1B1`; None: idle) and return the axes.

    mark: (rank, place) of a cell to outline; reason: why, for the caption. With one stage on each rank the stage is left out of
    the cells' text. More than 40 columns are drawn without text.
    """
    rows = [[() if cell is None else tuple(ACTION.findall(str(cell))) for cell in row] for row in schedule]
    columns = max(map(len, rows), default=1)
    if ax is None:
        ax = style.new_axes(min(13.0, 1.2 + 0.42 * columns), 1.1 + 0.34 * max(2, len(rows)))
    single = all(len({stage for cell in row for stage, _, _ in cell}) <= 1 for row in rows)
    kinds = set()
    for rank, row in enumerate(rows):
        for place, cell in enumerate(row):
            for k, (stage, letter, microbatch) in enumerate(cell):
                s = style.KIND_STYLE[LETTERS[letter]]
                kinds.add(LETTERS[letter])
                wide = 0.94 / len(cell)
                look = {"facecolor": s.colour, "hatch": s.hatch, "edgecolor": "#555555", "linewidth": 0.5}
                ax.add_patch(Rectangle((place + k * wide, rank), wide, 0.86, gid=f"fw-cell-{LETTERS[letter]}", **look))
                if columns <= 40:
                    text = f"{letter}{microbatch}" if single else f"{stage}{letter}{microbatch}"
                    size = 8 if len(cell) == 1 else 5.5
                    ground = {"boxstyle": "round,pad=0.1", "facecolor": s.colour, "edgecolor": "none"} if s.hatch else None
                    words = {"ha": "center", "va": "center", "fontsize": size, "color": s.ink, "bbox": ground}
                    ax.text(place + (k + 0.5) * wide, rank + 0.43, text, **words)
    if mark is not None:
        rank, place = mark
        edge = {"fill": False, "edgecolor": style.OKABE_ITO["vermillion"], "linewidth": 3, "zorder": 4}
        ax.add_patch(Rectangle((place - 0.03, rank - 0.05), 1.0, 0.96, gid="fw-cell-marked", **edge))
    ax.set_xlim(-0.1, columns + 0.1)
    ax.set_ylim(len(rows), -0.15)
    ax.set_xticks([])
    ax.set_yticks([r + 0.43 for r in range(len(rows))], [f"rank {r}" for r in range(len(rows))], fontsize=9)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    style.legend(ax, [kind for kind in LETTERS.values() if kind in kinds])
    if title:
        ax.set_title(title, pad=22)
    style.caption(ax, reason or "in the order in which each rank runs them; no time is said here")
    return ax


def grid_words(schedule) -> str:
    """The grid in words: how many actions of each kind a rank has, and how it begins."""
    said = [f"{len(schedule)} ranks."]
    for rank, row in enumerate(schedule):
        cells = [str(cell) for cell in row if cell is not None]
        said.append(f"Rank {rank}: {len(cells)} cells, " + " ".join(cells[:6]) + (" ..." if len(cells) > 6 else "") + ".")
    return " ".join(said)
