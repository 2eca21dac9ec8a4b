"""Each notebook as a reader meets it: opened in JupyterLab, every cell run, every guess made, every widget used."""

from pathlib import Path

import pytest

from .lab import errors_of, guess_all, widget_drivers

NOTEBOOKS = sorted(path.name for path in (Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS  # or the test below would have nothing to run, and pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_reader_runs_it_from_top_to_bottom(lab, name):
    lab.open(name)
    assert all(not outputs for _, _, outputs in lab.outputs()), "a copy shows answers before anything was run"
    guesses = lab.run_all(after=guess_all)
    asked = lab.sources().count("fw.predict(")
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
    lab.screenshot(name[:-6])
    assert errors_of(lab) == []
    assert lab.console_errors == []
    assert lab.outside == []
