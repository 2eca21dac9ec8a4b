"""Pictures, each from plain data: a Trace, a table of bytes, a history of who holds what.

Every function returns matplotlib axes and takes `ax=` where one axes is enough. Widgets live in `viz.widgets`, the only file
that needs a front end.

    picture = f(data), never f(memory of what the data was)

Reference: Tufte 1983, on what a picture may leave out.
"""

from .alpha_beta import plot_alpha_beta
from .buckets import overlap_words, plot_buckets, plot_exposed
from .formats import plot_drift, plot_range, plot_spacing, plot_underflow
from .ladder import plot_ladder
from .memory import plot_memory_mountain, plot_shrinking_bars
from .mesh import describe_mesh, plot_mesh
from .mirrored import plot_mirrored
from .roofline import plot_roofline
from .schedule_grid import plot_schedule_grid
from .score_blocks import describe_scores, plot_score_blocks
from .sharding import Slabs, describe_sharding, plot_sharding
from .timeline import plot_timeline
from .wait_for import plot_wait_for
from .who_holds import plot_holdings
from .winner_map import plot_winner_map, shade_winners, winner_map
from .words import bubble_of_ideal, bubble_of_total, describe

__all__ = [
    "Slabs",
    "bubble_of_ideal",
    "bubble_of_total",
    "describe",
    "describe_mesh",
    "describe_scores",
    "describe_sharding",
    "overlap_words",
    "plot_alpha_beta",
    "plot_buckets",
    "plot_drift",
    "plot_exposed",
    "plot_holdings",
    "plot_ladder",
    "plot_memory_mountain",
    "plot_mesh",
    "plot_mirrored",
    "plot_range",
    "plot_roofline",
    "plot_schedule_grid",
    "plot_score_blocks",
    "plot_sharding",
    "plot_shrinking_bars",
    "plot_spacing",
    "plot_timeline",
    "plot_underflow",
    "plot_wait_for",
    "plot_winner_map",
    "shade_winners",
    "winner_map",
]
