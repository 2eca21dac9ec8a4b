"""The roofline: how fast a piece of work can run, from how many FLOPs it does for each byte it moves.

Left of the ridge the memory sets the pace and fewer FLOPs help nothing; right of it the arithmetic does. A piece of work is a
dot: its place across is what it asks, its height what it got.

    attainable = min(peak FLOP/s, intensity * bytes/s)        ridge = peak / bandwidth

Reference: Williams, Waterman and Patterson 2009.
"""

import matplotlib.pyplot as plt

from . import style

__all__ = ["plot_roofline"]


def plot_roofline(peak: float, bandwidth: float, dots=(), *, ax=None, title: str = "", source: str = "modelled"):
    """Draw the roof of a device (FLOP/s, bytes/s) and dots [(name, FLOPs per byte, FLOP/s or None: on the roof)]."""
    if peak <= 0 or bandwidth <= 0:
        raise ValueError(f"peak {peak} and bandwidth {bandwidth} must be above 0 (FLOP/s and bytes/s)")
    ridge = peak / bandwidth
    dots = [(name, x, min(peak, x * bandwidth) if y is None else y) for name, x, y in dots]
    ax = ax or style.new_axes(7, 4.2)
    low = min([ridge / 100] + [x / 3 for _, x, _ in dots])
    high = max([ridge * 100] + [x * 3 for _, x, _ in dots])
    ax.loglog([low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=2, gid="fw-roof")
    ax.axvline(ridge, color="#888888", linestyle=":", linewidth=1)
    with plt.rc_context(style.RC):
        for k, (name, x, y) in enumerate(dots):
            look = style.series_style(k)
            ax.loglog([x], [y], color=look["color"], marker=look["marker"], markersize=9, markeredgecolor="black",
                      linestyle="none", label=f"{name}: {_short(x)} FLOPs a byte, {y / peak:.0%} of peak")  # fmt: skip
    ax.set_xlabel("FLOPs for each byte moved")
    ax.set_ylabel("FLOP/s")
    if dots:
        ax.legend(frameon=False, fontsize=8, loc="lower right")
    style.caption(ax, f"ridge at {_short(ridge)} FLOPs a byte: memory sets the pace on its left, arithmetic on its right")
    style.badge(ax, source)
    if title:
        ax.set_title(title, pad=20)
    return ax


def _short(x: float) -> str:
    """Three digits, never with an exponent above 1."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
