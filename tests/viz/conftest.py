"""Pictures without a screen; every figure is closed after its test. `boxes` and `overlaps` measure what a reader would see."""

import itertools

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def boxes():
    """boxes(figure, texts): the drawn rectangle of each text, in pixels."""

    def measure(figure, texts):
        figure.canvas.draw()
        return [t.get_window_extent() for t in texts]

    return measure


@pytest.fixture
def overlaps(boxes):
    """overlaps(figure, texts): the pairs of words whose rectangles overlap by more than a pixel."""

    def find(figure, texts):
        rectangles = boxes(figure, texts)
        found = []
        for (a, ra), (b, rb) in itertools.combinations(zip(texts, rectangles, strict=True), 2):
            wide = min(ra.x1, rb.x1) - max(ra.x0, rb.x0)
            high = min(ra.y1, rb.y1) - max(ra.y0, rb.y0)
            if wide > 1 and high > 1:
                found.append((a.get_text(), b.get_text()))
        return found

    return find
