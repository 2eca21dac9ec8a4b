"""The message theatre with this library's algorithms and the reader's own: `fw.theatre()`, `fw.theatre(my_ring)`.

Joins three parts that do not know each other: the algorithms, the recorder that watches them on simulated ranks, and the widget.

    choice -> function -> History -> scene

Reference: viz/widgets.py for the stage, collectives/history.py for the recording.
"""

from ..collectives import history
from ..viz import widgets

__all__ = ["algorithms", "theatre"]


def algorithms(*own) -> dict:
    """Name -> all-reduce for the theatre; functions given come first, under their own names."""
    from ..collectives import ring, star, tree

    table = {getattr(f, "__name__", "your function"): f for f in own}
    return {
        **table,
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "star": star.all_reduce,
        "broken ring": history.broken_ring,
    }


def theatre(*own, algorithm: str | None = None, ranks: int = 4):
    """Widget 1: step through an all-reduce and see who holds what. `own`: functions f(comm, x) of yours, which come first.

    Returns the widget, or None where nobody can press buttons (then every step is said in words).
    """
    table = algorithms(*own)
    for function in own:
        if not callable(function):
            raise ValueError(f"theatre takes functions f(comm, x), not {function!r}")
    if algorithm is not None and algorithm not in table:
        raise ValueError(f"algorithm {algorithm!r}; one of {', '.join(table)}")

    def record(name, n, slow_link):
        return history.record(table[name], n, slow_link=slow_link, name=name)

    return widgets.theatre(record, list(table), algorithm=algorithm, ranks=ranks)
