"""One look for every picture: a kind of work has a colour, a hatch and a letter, so that no reader depends on colour alone.

Colours are those of Okabe and Ito, which stay apart for every common form of colour blindness; letters and hatches repeat what
they say. Fonts are those that matplotlib carries (DejaVu), so a picture looks the same with no network.

    a kind of work  ->  (colour, hatch, letter, word)

Reference: Okabe and Ito, "Color Universal Design", 2008.
"""

from contextlib import contextmanager
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

__all__ = [
    "BADGES",
    "KIND_STYLE",
    "LANE_COLOUR",
    "OKABE_ITO",
    "RC",
    "KindStyle",
    "badge",
    "caption",
    "legend",
    "look",
    "new_axes",
    "series_places",
    "series_style",
]

OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}


class KindStyle(NamedTuple):
    """How one kind of work is drawn: fill colour, hatch ("" for none), letter, word for the legend, colour of text on it."""

    colour: str
    hatch: str
    letter: str
    word: str
    ink: str = "#000000"


KIND_STYLE = {
    "compute": KindStyle("#B8B8B8", "", "C", "compute"),
    "forward": KindStyle(OKABE_ITO["sky"], "", "F", "forward"),
    "backward": KindStyle(OKABE_ITO["orange"], "", "B", "backward"),
    "input": KindStyle("#FFD27F", "", "I", "input gradient"),
    "weight": KindStyle(OKABE_ITO["green"], "..", "W", "weight gradient"),
    "optimizer": KindStyle(OKABE_ITO["purple"], "xx", "O", "optimizer"),
    "reduce": KindStyle(OKABE_ITO["yellow"], "++", "+", "add up"),
    "recompute": KindStyle("#A6D4F2", "\\\\", "F'", "forward again"),
    "wait": KindStyle("#FFFFFF", "////", "", "waits"),
    "send": KindStyle(OKABE_ITO["vermillion"], "", "S", "sends"),
    "recv": KindStyle(OKABE_ITO["blue"], "", "R", "receives", "#FFFFFF"),
    "live": KindStyle("#777777", "", "", "live bytes"),
    "mark": KindStyle(OKABE_ITO["black"], "", "", "mark", "#FFFFFF"),
}
LANE_COLOUR = {"send": KIND_STYLE["send"].colour, "recv": KIND_STYLE["recv"].colour}
BADGES = {"measured": OKABE_ITO["green"], "modelled": OKABE_ITO["blue"], "paced": OKABE_ITO["purple"]}
# read by `matplotlib.rc_context`: nothing global is changed
RC = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "hatch.color": "#444444",
}
SERIES = ("blue", "vermillion", "green", "orange", "purple", "sky", "black")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)))
# who appears in many pictures looks the same in all of them
PLACES = {"ring": 0, "tree": 1, "halving": 2, "hierarchical": 3, "star": 4, "shared_memory": 5, "gloo": 6}


@contextmanager
def look():
    """This suite's fonts and sizes for the figures made inside.

    The backend is loaded first: it turns on that a notebook shows figures by itself, and loaded inside, that would be undone.
    """
    plt.draw_if_interactive()
    with plt.rc_context(RC):
        yield


def new_axes(width: float = 7.5, height: float = 3.5):
    """A fresh figure's axes (inches), dpi 100, with this suite's fonts."""
    with look():
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def series_style(k: int) -> dict:
    """Colour, marker and dashes of the k-th line in a plot: three signs that agree."""
    return {
        "color": OKABE_ITO[SERIES[k % len(SERIES)]],
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": DASHES[k % len(DASHES)],
    }


def series_places(names) -> dict[str, int]:
    """name -> k for `series_style(k)`: an algorithm has its own k in every picture, other names take the free ones in order."""
    fixed = {name: PLACES[name] for name in names if name in PLACES}
    free = [k for k in range(len(SERIES)) if k not in fixed.values()] or list(range(len(SERIES)))
    others = [name for name in dict.fromkeys(names) if name not in PLACES]
    return {**fixed, **{name: free[i % len(free)] for i, name in enumerate(others)}}


def badge(ax, sources) -> None:
    """Put MEASURED, MODELLED or PACED into the top right corner above the axes; `sources` is one word or several."""
    words = [sources] if isinstance(sources, str) else list(sources)
    unknown = [w for w in words if w not in BADGES]
    if unknown:
        raise ValueError(f"a badge says {', '.join(BADGES)}; got {unknown}")
    if not words:
        return
    ax.annotate(
        " + ".join(w.upper() for w in words),
        (1, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        fontweight="bold",
        color="white",
        bbox={"boxstyle": "round,pad=0.25", "facecolor": BADGES[words[0]] if len(words) == 1 else "#444444", "edgecolor": "none"},
        gid="fw-badge",
    )


def caption(ax, text: str) -> None:
    """Small text under the x axis: what to notice, as figures. Takes the place of the axis label and keeps its unit."""
    unit = ax.get_xlabel()
    with plt.rc_context(RC):
        ax.set_xlabel(f"{unit}\n{text}" if unit else text, fontsize=9, linespacing=1.6)


def legend(ax, kinds, *, columns: int = 6, words: dict | None = None) -> None:
    """One entry per kind, above the axes on the left: a patch with colour and hatch, and `letter word`.

    words: kind -> another word than its own.
    """
    handles = []
    for kind in kinds:
        s = KIND_STYLE[kind]
        word = (words or {}).get(kind, s.word)
        label = f"{s.letter}  {word}" if s.letter else word
        handles.append(Patch(facecolor=s.colour, hatch=s.hatch, edgecolor="#444444", linewidth=0.5, label=label))
    if handles:
        ax.legend(
            handles=handles,
            ncols=min(columns, len(handles)),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            frameon=False,
            fontsize=8,
            handlelength=1.6,
            columnspacing=1.2,
            borderaxespad=0.2,
        )
