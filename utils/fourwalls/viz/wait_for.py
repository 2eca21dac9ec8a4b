"""The wait-for circle: ranks on a ring, an arrow from each rank that waits to the rank it waits for, with the call on the arrow.

If the arrows close a circle and every rank on it can only wait, nobody will ever move: a deadlock. An arrow that leads to a rank
which still works is only a wait.

    deadlock  <=>  the waiting ranks contain a directed circle that nobody outside can open

Reference: Coffman, Elphick and Shoshani 1971, "System Deadlocks".
"""

import math

import matplotlib.pyplot as plt

from . import style

__all__ = ["circles", "plot_wait_for"]


def circles(waits: dict) -> list[list[int]]:
    """The closed circles in `{rank: (rank waited for, call)}`, each starting at its smallest rank, in order."""
    found, seen = [], set()
    for start in sorted(waits):
        path, here = [], start
        while here in waits and here not in seen:
            seen.add(here)
            path.append(here)
            here = waits[here][0]
        if here in path:
            ring = path[path.index(here) :]
            least = ring.index(min(ring))
            found.append(ring[least:] + ring[:least])
    return sorted(found)


def plot_wait_for(waits: dict, *, ranks: int | None = None, ax=None, title: str = ""):
    """Draw who waits for whom; returns the axes.

    waits: {rank: (rank waited for or None, text of the call)}, or {rank: Call} as in `DeadlockError.waits`.
    Ranks on a closed circle are red with a thick edge, others that wait are hatched, free ones white.
    """
    table = {
        r: w if isinstance(w, tuple) else (w.peer, f"{w.op}({'to' if 'send' in w.op else 'from'} {w.peer})")
        for r, w in waits.items()
    }
    known = [r for r in table] + [peer for peer, _ in table.values() if peer is not None]
    ranks = max(known, default=-1) + 1 if ranks is None else ranks
    if not ranks or any(not 0 <= r < ranks for r in known):
        raise ValueError(f"waits names ranks {sorted(set(known))}, but there are ranks 0 to {ranks - 1}")
    rings = circles(table)
    stuck = {r for ring in rings for r in ring}
    ax = ax or style.new_axes(5.2, 4.4)
    size = 0.26 if ranks <= 8 else 1.6 / ranks
    place = {r: (math.sin(2 * math.pi * r / ranks), math.cos(2 * math.pi * r / ranks)) for r in range(ranks)}
    if ranks == 1:
        place = {0: (0.0, 0.0)}
    for r, (x, y) in place.items():
        if r in stuck:
            face, hatch, edge, ink = style.OKABE_ITO["vermillion"], "", 2.4, "white"
        elif r in table:
            face, hatch, edge, ink = "#FFFFFF", "////", 1.2, "black"
        else:
            face, hatch, edge, ink = "#FFFFFF", "", 1.2, "black"
        with plt.rc_context(style.RC):
            ax.add_patch(
                plt.Circle((x, y), size, facecolor=face, hatch=hatch, edgecolor="black", linewidth=edge, zorder=3, gid="fw-rank")
            )
        ax.text(x, y, f"r{r}", ha="center", va="center", fontsize=11 if ranks <= 8 else 8, color=ink, fontweight="bold", zorder=4,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"} if hatch else None)  # fmt: skip
    for r, (peer, call) in table.items():
        if peer is None:
            continue
        colour = style.OKABE_ITO["vermillion"] if r in stuck else "#444444"
        _arrow(
            ax, place[r], place[peer], size, colour, call, bend=0.18 if table.get(peer, (None,))[0] == r else 0.0, small=ranks > 8
        )
    ax.set_xlim(-1.9, 1.9)
    ax.set_ylim(-1.6, 1.45)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.text(0.5, 0.0, _sentence(rings, table), transform=ax.transAxes, ha="center", va="bottom", fontsize=9, gid="fw-sentence")
    if title:
        ax.set_title(title)
    return ax


def _arrow(ax, start, end, size, colour, text, *, bend, small) -> None:
    """An arrow between two circles' edges, its text outside the ring at the middle."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    if length == 0:  # a rank that waits for itself
        ax.text(start[0], start[1] + size * 1.4, f"↺ {text}", ha="center", fontsize=8)
        return
    a = (start[0] + dx / length * size * 1.08, start[1] + dy / length * size * 1.08)
    b = (end[0] - dx / length * size * 1.15, end[1] - dy / length * size * 1.15)
    ax.annotate(
        "",
        b,
        a,
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "connectionstyle": f"arc3,rad={bend}"},
        zorder=2,
        gid="fw-arrow",
    )
    if small:
        return
    # arc3 bends to the right of the direction of travel for rad > 0 in display coordinates
    side = (dy / length, -dx / length)
    middle = ((start[0] + end[0]) / 2 + side[0] * bend * length * 0.5, (start[1] + end[1]) / 2 + side[1] * bend * length * 0.5)
    outward = middle if not bend and math.hypot(*middle) > 0.15 else side
    away = math.hypot(*outward)
    push = 0.12
    x, y = middle[0] + outward[0] / away * push, middle[1] + outward[1] / away * push
    ha = "center" if abs(outward[0] / away) < 0.35 else "left" if outward[0] > 0 else "right"
    va = "center" if ha != "center" else "bottom" if outward[1] > 0 else "top"
    ax.text(x, y, text, ha=ha, va=va, fontsize=8, zorder=5, gid="fw-call",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85})  # fmt: skip


def _sentence(rings, table) -> str:
    if rings:
        chain = " → ".join(f"r{r}" for r in rings[0] + rings[0][:1])
        return f"deadlock: {chain}" + (f" (and {len(rings) - 1} more)" if len(rings) > 1 else "")
    return "nobody waits" if not table else "no closed circle: these waits can end"
