"""How messages name a line: `In [7] line 3 in program: y = 1 / 0`.

A rank runs code that was written in a notebook cell, a script or a test, and only the process that holds the notebook knows
the cell's number and text. So ranks send (file, line, function) and this module, on the reader's side, turns them into words.

    place = where + line + function + the text of the line

Reference: Python's `linecache`, and IPython's table of compiled cells.
"""

import linecache
import os
import sys

__all__ = ["cell_number", "place", "source_line"]


def place(file: str, line: int, function: str = "", *, text: bool = True) -> str:
    """The words for one line of code; with its text, unless `text` is False or the text is not to be had."""
    if not file:
        return "an unknown line"
    number = cell_number(file)
    words = f"In [{number}] line {line}" if number is not None else f"{_short(file)}:{line}"
    if function and function != "<module>":
        words += f" in {function}"
    code = source_line(file, line) if text else ""
    return f"{words}: {code}" if code else words


def cell_number(file: str) -> int | str | None:
    """The number of the notebook cell that was compiled under the name `file`; None if it is no cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    known = getattr(shell.compile, "_filename_map", {})
    if file in known:
        return known[file]
    return None


def source_line(file: str, line: int) -> str:
    """The text of the line without its indentation, or "" if it is not known here."""
    return linecache.getline(file, line).strip()


def _short(file: str) -> str:
    """The path from the working folder where that is shorter, else as it is."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # another drive; a working folder that was removed
        return file
    return relative if len(relative) < len(file) and not relative.startswith(os.pardir) else file
