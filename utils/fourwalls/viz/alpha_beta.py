"""Measured message times beside the straight law that should explain them: time = alpha + bytes / bandwidth.

On log-log axes the law is flat while alpha rules and rises with slope one while bandwidth rules; the knee is at alpha *
bandwidth bytes. Measured dots carry their spread; modelled lines are lines, so the two are never taken for each other.

    T(bytes) = alpha + bytes / bandwidth        knee = alpha * bandwidth

Reference: Hockney 1994; Thakur, Rabenseifner and Gropp 2005.
"""

import matplotlib.pyplot as plt

from . import style, words

__all__ = ["plot_alpha_beta"]


def plot_alpha_beta(measured=(), modelled=(), *, knee: float | None = None, ax=None, title: str = "", ylabel: str = "time (s)"):
    """Log-log plot of time over bytes; returns the axes.

    measured  [(name, [(bytes, seconds, low, high), ...])]: dots with spread
    modelled  [(name, [(bytes, seconds), ...])]: lines; a name in both lists gets the same colour, an algorithm its own
    knee      bytes at which alpha and bandwidth cost the same, marked
    """
    measured, modelled = [(n, list(p)) for n, p in measured], [(n, list(p)) for n, p in modelled]
    if any(x <= 0 or y <= 0 for _, points in measured + modelled for x, y, *_ in points):
        raise ValueError("bytes and seconds must be above 0 on log axes; leave such points out")
    ax = ax or style.new_axes(7.5, 4.2)
    place = style.series_places([n for n, _ in measured] + [n for n, _ in modelled])
    with plt.rc_context(style.RC):
        for name, points in modelled:
            look = style.series_style(place[name])
            points = sorted(points)
            ax.plot(
                [p[0] for p in points],
                [p[1] for p in points],
                color=look["color"],
                linestyle=look["linestyle"],
                linewidth=1.6,
                label=f"{name}, modelled",
            )
        for name, points in measured:
            look = style.series_style(place[name])
            points = sorted(points)
            y = [p[1] for p in points]
            spread = [[max(p[1] - p[2], 0) for p in points], [max(p[3] - p[1], 0) for p in points]]
            ax.errorbar([p[0] for p in points], y, yerr=spread, color=look["color"], marker=look["marker"], linestyle="none",
                        markersize=5, capsize=3, linewidth=1.1, label=f"{name}, measured")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: words.bytes_text(x))
    ax.set_xlabel("bytes in the message")
    ax.set_ylabel(ylabel)
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    if knee is not None:
        ax.axvline(knee, color="#444444", linestyle=":", linewidth=1.2, gid="fw-knee")
        style.caption(ax, f"dotted: alpha × bandwidth = {words.bytes_text(knee)}, where latency and bandwidth cost the same")
    if place:
        ax.legend(frameon=False, fontsize=8, loc="upper left")
    style.badge(ax, [s for s, there in (("measured", measured), ("modelled", modelled)) if there])
    if title:
        ax.set_title(title, pad=20)
    return ax
