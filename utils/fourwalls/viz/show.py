"""Put words where the reader is: as HTML with a plain twin in a notebook, as plain text anywhere else.

The plain twin is what a screen reader, a terminal and a strict comparison of outputs read, so it says all that the HTML says.

    shown = HTML where it can be drawn, else text

Reference: the Jupyter messaging protocol, "display_data" (one output, several forms).
"""

__all__ = ["show"]


def show(text: str, markup: str) -> None:
    """Show `markup` (HTML) with `text` as its twin; outside IPython print `text`."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(text)
        return
    if get_ipython() is None:
        print(text)
    else:
        display({"text/plain": text, "text/html": markup}, raw=True)
