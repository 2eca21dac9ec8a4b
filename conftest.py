"""For nbval: what a notebook writes to stderr (warnings, progress bars) is not compared, nor are the numbers of cells in error
messages, since nbval runs cells without numbering them; all other output is compared, strictly. A kernel that dies before it
is up is started again: two that start at once can be given the same port.
"""

import functools

from nbval import kernel

__all__ = ["patient", "pytest_collectstart"]

STARTS = 3


def pytest_collectstart(collector):
    """nbval's collectors carry the names of what they skip, and patterns that are replaced before two outputs are compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare = (*collector.skip_compare, "stderr")
    if hasattr(collector, "sanitize_patterns"):
        collector.sanitize_patterns[r"In \[\d+\]"] = "In [n]"


def patient(start):
    """`start` with a few more tries where the kernel never came up. No cell has run by then, so no result can be hidden."""

    @functools.wraps(start)
    def start_again(*args, **kwargs):
        for _ in range(STARTS - 1):
            try:
                return start(*args, **kwargs)
            except RuntimeError:
                continue
        return start(*args, **kwargs)

    return start_again


kernel.start_new_kernel = patient(kernel.start_new_kernel)
