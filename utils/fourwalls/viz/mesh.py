"""The mesh laid over the network: which groups of ranks stay inside a node, and which cross the wire between nodes.

Each node is a row of ranks, each rank says its coordinates, and neighbours of a group are joined by a line: colour, dashes and a
letter for the axis, thick where the line leaves its node. What is thick pays the slow wire.

    a line of axis x joins ranks whose coordinates differ in x alone, by one

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 3.2, for what should stay inside a node.
"""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from . import style

__all__ = ["crossing_lines", "describe_mesh", "plot_mesh"]

LINES = (("blue", "-"), ("vermillion", "--"), ("green", ":"), ("purple", "-."))  # of the axes, in their order
FILLS = ("#FFFFFF", "#DDDDDD")


def _lines(places: Sequence[Mapping[str, int]], axes: Sequence[str]):
    """(axis, rank, rank) of neighbours in a group."""
    number = {tuple(place[x] for x in axes): rank for rank, place in enumerate(places)}
    for at, rank in number.items():
        for k, axis in enumerate(axes):
            other = number.get((*at[:k], at[k] + 1, *at[k + 1 :]))
            if other is not None:
                yield axis, rank, other


def crossing_lines(places: Sequence[Mapping[str, int]], node: int, axes: Sequence[str] = "dpt") -> dict[str, tuple[int, int]]:
    """axis -> (lines inside a node, lines between nodes)."""
    found = {axis: [0, 0] for axis in axes}
    for axis, a, b in _lines(places, axes):
        found[axis][a // node != b // node] += 1
    return {axis: tuple(counts) for axis, counts in found.items()}


def describe_mesh(places: Sequence[Mapping[str, int]], *, node: int, axes: Sequence[str] = "dpt") -> str:
    """The picture in words."""
    nodes = -(-len(places) // node)
    said = [f"{axis}: {inside} lines inside, {between} between" for axis, (inside, between) in
            crossing_lines(places, node, axes).items()]  # fmt: skip
    return f"{len(places)} ranks on {nodes} nodes of {node}. " + "; ".join(said) + "."


def plot_mesh(
    places: Sequence[Mapping[str, int]],
    *,
    node: int,
    axes: Sequence[str] = "dpt",
    words: Mapping[str, str] | None = None,
    ax=None,
    title: str = "",
    note: str = "",
):
    """Draw ranks (places[rank] = its coordinates) on nodes of `node` ranks, with a line for each pair of neighbours of a group.

    words: axis -> what the legend calls it.  Returns the axes. ValueError for a rank that misses a coordinate, for two at one
    place, or for more axes than there are kinds of line.
    """
    missing = [rank for rank, place in enumerate(places) if any(axis not in place for axis in axes)]
    if missing or len(axes) > len(LINES):
        raise ValueError(f"rank {missing[0]} has no place on {axes}" if missing else f"{len(axes)} axes; at most {len(LINES)}")
    if len({tuple(place[x] for x in axes) for place in places}) < len(places):
        raise ValueError("two ranks stand at one place")
    nodes = -(-len(places) // node)
    ax = ax or style.new_axes(1.25 * node + 0.6, 1.75 * nodes + 0.7)
    spot = {rank: (rank % node, -2.0 * (rank // node)) for rank in range(len(places))}
    for k in range(nodes):
        ax.add_patch(
            Rectangle((-0.55, -2.0 * k - 0.48), node + 0.1, 1.22, facecolor="#F4F4F4", edgecolor="#999999", gid="fw-node")
        )
        ax.text(-0.5, -2.0 * k + 0.69, f"node {k}", ha="left", va="top", fontsize=8)
    for axis, a, b in _lines(places, axes):
        _line(ax, list(axes).index(axis), spot[a], spot[b], crosses=a // node != b // node, name=f"fw-{axis}-{a}-{b}")
    for rank, (x, y) in spot.items():
        text = f"r{rank}\n" + " ".join(f"{axis}{places[rank][axis]}" for axis in axes)
        fill = FILLS[places[rank][axes[0]] % 2]
        ax.add_patch(Rectangle((x - 0.38, y - 0.3), 0.76, 0.6, facecolor=fill, edgecolor="#333333", zorder=3))
        ax.text(x, y, text, ha="center", va="center", fontsize=8, zorder=4)
    handles = [
        Line2D(
            [], [], color=style.OKABE_ITO[LINES[k][0]], linestyle=LINES[k][1], linewidth=2, label=(words or {}).get(axis, axis)
        )
        for k, axis in enumerate(axes)
    ]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(axes), frameon=False, fontsize=8)
    ax.set_xlim(-0.7, node - 0.3)
    ax.set_ylim(-2.0 * (nodes - 1) - 0.6, 0.85)
    ax.set_axis_off()
    if title:
        ax.set_title(title)
    if note:
        ax.text(0.5, -0.17, note, transform=ax.transAxes, ha="center", va="top", fontsize=8)
    return ax


def _line(ax, kind: int, a, b, *, crosses: bool, name: str) -> None:
    """An arc above the row for ranks of one node, a straight line from row to row otherwise."""
    colour, dashes = LINES[kind]
    shift = 0.16 * (kind - 1)
    if crosses:
        ax.plot([a[0] + shift, b[0] + shift], [a[1] - 0.3, b[1] + 0.3], color=style.OKABE_ITO[colour], linestyle=dashes,
                linewidth=3.2, gid=name, zorder=2)  # fmt: skip
        return
    bend = -0.35 if abs(a[0] - b[0]) <= 1 else -0.28
    arc = FancyArrowPatch((a[0] + shift, a[1] + 0.3), (b[0] + shift, b[1] + 0.3), arrowstyle="-", linestyle=dashes, gid=name,
                          connectionstyle=f"arc3,rad={bend}", color=style.OKABE_ITO[colour], linewidth=1.6, zorder=2)  # fmt: skip
    ax.add_patch(arc)
