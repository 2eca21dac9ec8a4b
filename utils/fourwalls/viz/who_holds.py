"""Who holds what after each step of a collective: one row of cells per rank, one cell per chunk, each naming its contributors.

`r0+r2` in a cell means: the sum of what ranks 0 and 2 put in. A cell that names every rank once is finished; one that names a
rank twice is wrong for good. Cells that the step changed have a thick edge.

    all-reduce is done when every cell of every rank reads r0+r1+...+r(n-1)

Reference: Thakur, Rabenseifner and Gropp 2005, figures of ring and recursive algorithms.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from . import style, words

__all__ = ["cell_state", "cell_text", "plot_holdings"]

# state of a cell -> (colour, hatch, word for the legend)
STATES = {
    "own": ("#FFFFFF", "", "its own part"),
    "partial": (style.OKABE_ITO["sky"], "", "a partial sum"),
    "finished": (style.OKABE_ITO["green"], "..", "✓ finished"),
    "wrong": (style.OKABE_ITO["vermillion"], "xx", "✗ wrong: a rank twice, or out of place"),
    "empty": ("#EEEEEE", "--", "unknown"),
}

HATCH_COLOUR = {"finished": "#2BC29A", "wrong": "#FF9A57"}


def cell_state(cell: dict | None, rank: int, ranks: int) -> str:
    """One of STATES. `cell` maps contributor -> how often; None: not known; the key -1: from another place."""
    if cell is None:
        return "empty"
    if -1 in cell or any(count != 1 for count in cell.values()):
        return "wrong"
    if len(cell) == ranks:
        return "finished"
    return "own" if set(cell) == {rank} else "partial"


def cell_text(cell: dict | None, ranks: int, *, short: bool = False) -> str:
    """`{0: 1, 2: 2}` -> "r0+2·r2"; where `short`, every rank once is "all", and of many ranks a run is "r1–4"."""
    if cell is None:
        return "·"
    if -1 in cell:
        return "?"
    if short and len(cell) == ranks > 3 and set(cell.values()) == {1}:
        return "all"
    if not short or ranks <= 4:
        return "+".join(f"r{r}" if n == 1 else f"{n}·r{r}" for r, n in sorted(cell.items())) or "0"
    return "+".join(_runs(cell, ranks)) or "0"


def _runs(cell: dict, ranks: int) -> list[str]:
    """Contributors around the ring, neighbours joined: {6: 1, 7: 1, 0: 1} of 8 -> ["r6–0"], {1: 2, 2: 1} -> ["2·r1", "r2"]."""
    starts = [r for r in sorted(cell) if cell.get((r - 1) % ranks) != cell[r]] or [0]
    parts = []
    for first in starts:
        length = 1
        while length < ranks and cell.get((first + length) % ranks) == cell[first]:
            length += 1
        times = "" if cell[first] == 1 else f"{cell[first]}·"
        parts.append(f"{times}r{first}" + ("" if length == 1 else f"–{(first + length - 1) % ranks}"))
    return parts


def plot_holdings(history, *, steps=None, columns: int = 3, title: str = ""):
    """One small grid per step of `history` (see collectives.history); returns the array of axes used, in order.

    history: has `ranks`, `cells`, `name`, `source` and `steps`, each step with `after[rank][cell] -> {contributor: times}`,
    `changed`, `messages` and `end` (picoseconds).
    steps: which steps to draw (default all; more than 9 are thinned, first and last kept).
    """
    last = len(history.steps) - 1
    if steps is None:
        steps = sorted({round(k * last / 8) for k in range(9)}) if last > 8 else range(last + 1)
    steps = list(steps)
    if not steps or any(not 0 <= k <= last for k in steps):
        raise ValueError(f"steps {steps}; this history has steps 0 to {last}")
    columns = min(columns, len(steps))
    rows = -(-len(steps) // columns)
    size = 3.0 * columns, 0.5 + rows * (0.4 + 0.28 * history.ranks)
    with style.look():
        figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for ax, k in zip(axes, steps, strict=False):
        _draw_step(ax, history, k)
    for ax in axes[len(steps) :]:
        ax.set_axis_off()
    met = [
        s
        for s in STATES
        if any(cell_state(c, r, history.ranks) == s for k in steps for r, row in enumerate(history.steps[k].after) for c in row)
    ]
    handles = [
        Rectangle(
            (0, 0),
            1,
            1,
            facecolor=STATES[s][0],
            hatch=STATES[s][1],
            edgecolor="#444444",
            linewidth=0.5,
            hatchcolor=HATCH_COLOUR.get(s, "#888888"),
            label=STATES[s][2],
        )
        for s in met
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(f"{title or history.name}  ({history.source.upper()})", fontsize=11)
    return axes[: len(steps)]


def _draw_step(ax, history, k: int) -> None:
    step, n = history.steps[k], history.ranks
    for r, row in enumerate(step.after):
        for c, cell in enumerate(row):
            state = cell_state(cell, r, n)
            colour, hatch, _ = STATES[state]
            changed = (r, c) in step.changed
            look = {"facecolor": colour, "hatch": hatch, "hatchcolor": HATCH_COLOUR.get(state, "#888888")}
            edge = {"edgecolor": "#888888", "linewidth": 0.6}
            if changed:
                edge = {"edgecolor": "black", "linewidth": 2.0, "zorder": 2}
            ax.add_patch(Rectangle((c, r), 0.94, 0.88, gid=f"fw-cell-{state}", **look, **edge))
            text = cell_text(cell, n, short=True)
            room = 29 / len(row)  # letters of 8 points that fit, about
            if len(text) > room and "+" in text:  # two lines, broken at the plus nearest to the middle
                cut = min((k for k, letter in enumerate(text) if letter == "+"), key=lambda k: abs(k - len(text) / 2))
                text = f"{text[:cut]}\n{text[cut:]}"
            size = max(5.5, min(8.0, 8.0 * room / max(len(line) for line in text.split("\n"))))
            size = min(size, 6.5) if "\n" in text else size
            ground = {"boxstyle": "round,pad=0.12", "facecolor": colour, "edgecolor": "none"} if hatch else None
            ax.text(c + 0.47, r + 0.44, text, ha="center", va="center", fontsize=size, zorder=3, bbox=ground)
    right = history.cells + 0.02
    for m in step.messages:
        bend = (0.5 if abs(m.dst - m.src) == 1 else 0.25) * (-1 if m.src < m.dst else 1)
        look = {"arrowstyle": "-|>", "color": style.OKABE_ITO["vermillion"], "linewidth": 1.1, "mutation_scale": 7, "shrinkA": 0}
        arrow = {**look, "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
        ax.annotate("", (right, m.dst + 0.38), (right, m.src + 0.5), gid="fw-arrow", annotation_clip=False, arrowprops=arrow)
    ax.set_xlim(-0.1, right + (0.13 * n * history.cells / 4 if any(s.messages for s in history.steps) else 0.05))
    ax.set_ylim(n, -0.15)
    ax.set_xticks([])
    ax.set_yticks([r + 0.44 for r in range(n)], [f"r{r}" for r in range(n)], fontsize=8)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(_step_title(k, step), fontsize=9)


def _step_title(k: int, step) -> str:
    """`step 3: 6 µs, 4 × 8 B`."""
    if k == 0:
        return "at the start"
    sizes = sorted({m.bytes for m in step.messages})
    carried = (
        f"{len(step.messages)} × {words.bytes_text(sizes[0])}"
        if len(sizes) == 1
        else words.count_text(len(step.messages), "message")
    )
    return f"step {k}: {words.time_text(step.end)}, {carried}"
