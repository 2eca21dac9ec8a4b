"""The bubble explorer and the schedule editor in a real JupyterLab, in a notebook of their own."""

import json

import pytest

from .lab import errors_of, widget_drivers

CELLS = [
    "import fourwalls as fw\nwidget = fw.bubble_explorer()",
    "def run(text):\n    return f'Ran {len(text.split())} actions on ranks.'\n\nwidget = fw.schedule_editor(run)",
]


@pytest.fixture
def notebook(server):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for i, source in enumerate(CELLS)
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = server.folder / "pipeline_widgets.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    yield path.name
    path.unlink()


@pytest.mark.timeout(600)
def test_the_pipeline_widgets(lab, notebook):
    lab.open(notebook)
    lab.run_all()
    assert errors_of(lab) == []
    for kind in ("fw-bubble", "fw-editor"):
        widget = lab.page.get_by_test_id(kind)
        widget.scroll_into_view_if_needed()
        lab.screenshot(f"{kind}_question")
        widget_drivers[kind](lab, widget)
        lab.screenshot(f"{kind}_end")
    assert errors_of(lab) == []
    assert lab.console_errors == []
    assert lab.outside == []
