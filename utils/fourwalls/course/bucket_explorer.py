"""The bucket explorer with what the reader has measured: `fw.bucket_explorer()`, `fw.bucket_explorer(measured)`.

    {gradients, n, backward, alpha, bandwidth, points} -> dots on the curve of one's own machine

Reference: viz/bucket_explorer.py for the widget, cost/overlap.py for its arithmetic.
"""

import math
import numbers

from ..viz import bucket_explorer as board

__all__ = ["bucket_explorer"]

NUMBERS = ("gradients", "n", "backward", "alpha", "bandwidth")


def bucket_explorer(measured: dict | None = None):
    """Widget 7: turn bucket size, bandwidth and backward time, and see how much communication stays exposed.

    measured: {"gradients": bytes, "n": ranks, "backward": s, "alpha": s, "bandwidth": bytes/s, "points": [(bucket bytes, exposed
    s, low, high)], "name": ..., "source": "measured" or "paced"}, shown as dots on a curve of their own. Returns the widget, or
    None where nobody can press buttons (then it says five sizes in words). Raises ValueError for anything else.
    """
    if measured is not None:
        lacking = [word for word in (*NUMBERS, "points") if not isinstance(measured, dict) or word not in measured]
        if lacking:
            raise ValueError(f"measured lacks {', '.join(lacking)}; it is a dict with {', '.join(NUMBERS)} and points")
        for word in NUMBERS:
            value = measured[word]
            if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
                raise ValueError(f"measured[{word!r}] is {value!r}; a number of at least 0")
        if any(len(point) != 4 or not all(x > 0 for x in point) for point in measured["points"]):
            raise ValueError("points are (bucket bytes, exposed seconds, low, high), each above 0, as the axes are logarithmic")
    return board.bucket_explorer(measured)
