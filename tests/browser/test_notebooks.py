"""Notebooks as a reader meets them: opened in JupyterLab, cells run, every guess made, every widget used.

A browser is slow, and nbval runs every cell of every notebook anyway; so only those that have a widget are opened here, and of
these only the cells that the guesses and widgets need are run. The first notebook is run from top to bottom.
"""

import re
from pathlib import Path

import pytest

from .lab import errors_of, guess_all, widget_drivers
from .needed import needed_cells

ALL = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
WIDGET = re.compile(r"fw\.(theatre|\w*explorer|\w+_editor|\w+_bench)\(")
NOTEBOOKS = [path.name for path in ALL if path == ALL[0] or WIDGET.search(path.read_text(encoding="utf-8"))]


def test_there_are_notebooks():
    assert NOTEBOOKS  # or the test below would have nothing to run, and pass
    assert {"03_ring_all_reduce.ipynb", "04_which_all_reduce.ipynb"} <= set(NOTEBOOKS)


def test_every_widget_has_a_driver_and_a_notebook():
    source = "".join(path.read_text(encoding="utf-8") for path in ALL)
    assert len(set(WIDGET.findall(source))) == len(widget_drivers), sorted(widget_drivers)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_reader_guesses_and_uses_every_widget(lab, name):
    lab.open(name)
    assert all(not outputs for _, _, outputs in lab.outputs()), "a copy shows answers before anything was run"
    sources = lab.sources()
    targets = [i for i, source in enumerate(sources) if "fw.predict(" in source or WIDGET.search(source)]
    run = range(len(sources)) if name == ALL[0].name else needed_cells(sources, targets)
    guesses = lab.run_all(after=guess_all, only=set(run))
    asked = sum(source.count("fw.predict(") for source in sources)
    assert guesses == lab.page.locator("button.fw-commit").count() == asked
    assert errors_of(lab) == []
    widgets = lab.page.locator(".fw-widget")
    for i in range(widgets.count()):
        widget = widgets.nth(i)
        kind = widget.get_attribute("data-testid")
        assert kind in widget_drivers, f"no driver for the widget {kind}: add one to tests/browser/lab.py"
        widget.scroll_into_view_if_needed()
        widget_drivers[kind](lab, widget)
        lab.screenshot(f"{name[:-6]}_{kind}_{i}")
        lab.page.set_viewport_size({"width": 640, "height": 1000})  # what a screen of 1280 shows at 200%
        assert widget.locator(".fw-stage").is_visible() and widget.locator(".fw-words").is_visible()
        lab.screenshot(f"{name[:-6]}_{kind}_{i}_200")
        lab.page.set_viewport_size({"width": 1280, "height": 1000})
    lab.screenshot(name[:-6])
    assert errors_of(lab) == []
    assert lab.console_errors == []
    assert lab.outside == []
