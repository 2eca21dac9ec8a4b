"""For nbval: what a notebook writes to stderr (warnings, progress bars) is not compared, nor are the numbers of cells in error
messages, since nbval runs cells without numbering them; all other output is compared, strictly.
"""

__all__ = ["pytest_collectstart"]


def pytest_collectstart(collector):
    """nbval's collectors carry the names of what they skip, and patterns that are replaced before two outputs are compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare = (*collector.skip_compare, "stderr")
    if hasattr(collector, "sanitize_patterns"):
        collector.sanitize_patterns[r"In \[\d+\]"] = "In [n]"
