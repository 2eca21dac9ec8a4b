"""Who is fastest where: sizes across, ranks upward, and in each field the name of the winner.

A curve for each algorithm shows one number of ranks; the map shows them all, and leaves out everything but who is below. Where
the runner-up is nearly as fast the field is pale and names both, since there the choice does not matter.

    winner(n, S) = argmin over the algorithms of time(algorithm, n, S)

Reference: Thakur, Rabenseifner and Gropp 2005, section 4.5, which cuts the sizes at such borders.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from . import style, words

__all__ = ["Field", "WinnerMap", "letters", "plot_winner_map", "shade_winners", "winner_map"]

CLOSE = 1.1


@dataclass(frozen=True)
class Field:
    """Sizes `start` to `end` (bytes) in which `winner` is fastest; `beside`: who is within 10% of it there, or ""."""

    start: float
    end: float
    winner: str
    beside: str = ""


@dataclass(frozen=True)
class WinnerMap:
    """seconds[name][n][k] for the k-th of `sizes`; None where that algorithm cannot run. Names in the order that breaks ties."""

    ranks: tuple[int, ...]
    sizes: tuple[float, ...]
    algorithms: tuple[str, ...]
    seconds: dict[str, dict[int, tuple[float | None, ...]]]

    def order(self, n: int, k: int) -> list[tuple[float, str]]:
        """(seconds, name) at size number k, fastest first."""
        found = [(self.seconds[name][n][k], name) for name in self.algorithms]
        return sorted(((t, name) for t, name in found if t is not None), key=lambda pair: pair[0])  # stable: ties keep order

    def winner(self, n: int, nbytes: float) -> str:
        """Who is fastest at the size of the map that is nearest to `nbytes` (by ratio)."""
        k = min(range(len(self.sizes)), key=lambda k: max(self.sizes[k] / nbytes, nbytes / self.sizes[k]))
        return self.order(n, k)[0][1]

    def fields(self, n: int, *, close: float = CLOSE) -> list[Field]:
        """The row of n ranks as fields, from the smallest size to the largest; borders half way between sizes (by ratio)."""
        found, sizes = [], self.sizes
        for k in range(len(sizes)):
            (best, name), *rest = self.order(n, k)
            beside = rest[0][1] if rest and rest[0][0] <= best * close else ""
            start = sizes[0] if k == 0 else (sizes[k - 1] * sizes[k]) ** 0.5
            end = sizes[-1] if k + 1 == len(sizes) else (sizes[k] * sizes[k + 1]) ** 0.5
            if found and (found[-1].winner, found[-1].beside) == (name, beside):
                found[-1] = Field(found[-1].start, end, name, beside)
            else:
                found.append(Field(start, end, name, beside))
        return found

    def describe(self, n: int) -> str:
        """The row of n ranks in words."""
        parts, fields = [], self.fields(n)
        for k, f in enumerate(fields):
            upto = f" up to {words.bytes_text(f.end)}" if k + 1 < len(fields) else ""
            parts.append(f"{f.winner}{f' (or {f.beside})' * bool(f.beside)}{upto}")
        return f"{words.count_text(n, 'rank')}: {', then '.join(parts)}."


def winner_map(
    price: Callable[[str, int, float], float | None], ranks: Sequence[int], sizes: Sequence[float], algorithms: Sequence[str]
) -> WinnerMap:
    """Ask price(algorithm, n, nbytes) -> seconds, or None where it cannot run, for every field. Raises ValueError where nobody
    can run, or sizes do not rise.
    """
    ranks, sizes, algorithms = tuple(ranks), tuple(sizes), tuple(algorithms)
    if not ranks or not sizes or sizes[0] <= 0 or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
        raise ValueError(
            f"ranks {list(ranks)} and sizes {list(sizes)[:5]}...: give at least one of each, sizes above 0 and rising"
        )
    seconds = {a: {n: tuple(price(a, n, size) for size in sizes) for n in ranks} for a in algorithms}
    for n in ranks:
        if any(all(seconds[a][n][k] is None for a in algorithms) for k in range(len(sizes))):
            raise ValueError(f"no algorithm of {list(algorithms)} can run on {n} ranks at every size")
    return WinnerMap(ranks, sizes, algorithms, seconds)


def letters(names: Sequence[str]) -> dict[str, str]:
    """A letter for each name: its first one that no name before it has taken (then digits)."""
    taken: dict[str, str] = {}
    for name in names:
        wanted = [c.upper() for c in name if c.isalnum()] + [str(k) for k in range(1, 10)]
        taken[name] = next((c for c in wanted if c not in taken.values()), "?")
    return taken


def plot_winner_map(data: WinnerMap, *, marks=(), ax=None, title: str = "", source: str = "modelled"):
    """Draw the map; returns the axes. marks: [(n, nbytes)], small triangles at the lower edge of the row."""
    ax = ax or style.new_axes(8, 0.34 * len(data.ranks) + 1.7)
    letter, inch = letters(data.algorithms), _inches_per_octave(ax, data.sizes)
    with style.look():
        for row, n in enumerate(data.ranks):
            for f in data.fields(n):
                _paint(ax, data, f, row - 0.5, 1.0)
                width = inch * _octaves(f.start, f.end)
                long, short = (f.winner, letter[f.winner])
                if f.beside:
                    long, short = f"{f.winner} ≈ {f.beside}", f"{letter[f.winner]}≈{letter[f.beside]}"
                text = next((t for t in (long, short) if 0.075 * len(t) + 0.1 < width), "")
                look = {
                    "fontsize": 8,
                    "bbox": {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
                }
                if not text:  # a sliver: its letters stand upright
                    text, look = short, {"fontsize": 6.5, "rotation": 90}
                ax.text((f.start * f.end) ** 0.5, row, text, ha="center", va="center", gid="fw-winner", **look)
        for n, nbytes in marks:
            ax.plot([nbytes], [data.ranks.index(n) - 0.36], marker="^", color="black", markersize=6, zorder=5, gid="fw-mark")
    _size_axis(ax, data.sizes)
    ax.set_yticks(range(len(data.ranks)), [str(n) for n in data.ranks])
    ax.set_ylim(-0.5, len(data.ranks) - 0.5)
    ax.set_ylabel("ranks")
    _name(ax, data, title, source)
    said = "▲ " + ", ".join(words.bytes_text(nbytes) for _, nbytes in marks) + ". " if marks else ""
    style.caption(ax, said + "Pale, with two names: the runner-up is within 10%.")
    return ax


def shade_winners(ax, data: WinnerMap, n: int) -> None:
    """Paint the row of n ranks of the map behind curves over the same sizes, the letter of each winner at the bottom."""
    letter, inch = letters(data.algorithms), _inches_per_octave(ax, data.sizes)
    low, high = ax.get_ylim()
    ax.set_ylim(low * (low / high) ** 0.12, high)  # room for the letters, under the curves
    for f in data.fields(n):
        _paint(ax, data, f, 0, 1, transform=ax.get_xaxis_transform(), alpha=0.5)
        text = letter[f.winner] + (f"≈{letter[f.beside]}" if f.beside else "")
        fits = 0.085 * len(text) + 0.05 < inch * _octaves(f.start, f.end)
        look = {"fontsize": 10} if fits else {"fontsize": 7, "rotation": 90}
        ax.text((f.start * f.end) ** 0.5, 0.02, text, transform=ax.get_xaxis_transform(), ha="center", va="bottom",
                fontweight="bold", gid="fw-winner", **look)  # fmt: skip
    ax.set_xlim(data.sizes[0], data.sizes[-1])


def _paint(ax, data, f, bottom, height, *, transform=None, alpha=1.0):
    colour = style.series_style(style.series_places(data.algorithms)[f.winner])["color"]
    where = ((f.start, bottom), f.end - f.start, height)
    more = {} if transform is None else {"transform": transform}
    ax.add_patch(plt.Rectangle(*where, facecolor=colour, alpha=(0.16 if f.beside else 0.5) * alpha, zorder=0, **more))
    edge = {"edgecolor": "black" if transform is None else "#888888", "linewidth": 0.8, "gid": f"fw-field {f.winner}"}
    ax.add_patch(plt.Rectangle(*where, facecolor="none", zorder=1, **edge, **more))


def _name(ax, data, title, source):
    place, fields = style.series_places(data.algorithms), [f for n in data.ranks for f in data.fields(n)]
    winners, beside = {f.winner for f in fields}, {f.beside for f in fields}
    handles = [
        Patch(
            facecolor=style.series_style(place[name])["color"] if name in winners else "none",
            alpha=0.5,
            label=f"{letter}  {name}" + (" (as a second only)" if name not in winners else ""),
        )
        for name, letter in letters(data.algorithms).items()
        if name in winners | beside
    ]
    ax.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8,
              handlelength=1.4, columnspacing=1.2, borderaxespad=0.2)  # fmt: skip
    style.badge(ax, source)
    if title:
        ax.set_title(title, pad=22)


def _size_axis(ax, sizes):
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0], sizes[-1])
    ax.xaxis.set_major_formatter(lambda x, _: words.bytes_text(x))
    ax.set_xlabel("bytes of the tensor")


def _octaves(start, end):
    return math.log2(end / start)


def _inches_per_octave(ax, sizes):
    return ax.figure.get_size_inches()[0] * 0.85 / max(_octaves(sizes[0], sizes[-1]), 1e-9)
