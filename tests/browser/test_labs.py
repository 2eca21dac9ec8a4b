"""Lab 1 as a learner meets it: a first try fails with a picture and a hint, the second passes."""

import json
import re
from pathlib import Path

import pytest

from fourwalls.course.mutants import source_of
from fourwalls.course.release import student_copy

from .lab import NOTEBOOK, errors_of

ROOT = Path(__file__).resolve().parents[2]
FIRST = """def shift(comm, x):
    to, frm, got = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, torch.empty_like(x)
    if comm.size == 1:
        return x.clone()
    if comm.rank == 0:
        comm.recv(got, frm)
        comm.send(x, to)
    else:
        comm.send(x, to)
        comm.recv(got, frm)
    return got
"""
SECOND = """def shift(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, torch.empty_like(x), (comm.rank - 1) % comm.size)
"""


@pytest.fixture
def copy(server):
    path = server.folder / "ring.ipynb"
    path.write_text(json.dumps(student_copy(source_of(ROOT, "ring"))))
    yield path.name
    path.unlink()


def write(lab, index, text):
    lab.page.evaluate(f"([i, text]) => {{ {NOTEBOOK}.content.model.cells.get(i).sharedModel.source = text; }}", [index, text])


def said(lab, index):
    (outputs,) = [outputs for k, _, outputs in lab.outputs() if k == index]
    texts = ["".join(output.get("data", {}).get("text/plain", "")) for output in outputs]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.timeout(300)
def test_a_learner_fails_looks_and_passes(lab, copy):
    lab.open(copy)
    sources = lab.sources()
    asked, check = (next(i for i, s in enumerate(sources) if s.startswith(word)) for word in ("def shift", "lab.check(shift)"))
    assert "raise NotImplementedError()" in sources[asked]
    for index in range(check + 1):
        lab.run_cell(index)
    text, pictures = said(lab, check)
    assert "NotImplementedError" in text and "0 of 4 points" in text and pictures == 0
    write(lab, asked, FIRST)
    lab.run_cell(asked)
    lab.run_cell(check)
    text, pictures = said(lab, check)
    assert "ok  values" in text and "hint: " in text and pictures == 1
    taken, target = map(float, re.search(r"no  cost: 5 ranks: ([\d.]+) µs, target ([\d.]+) µs", text).groups())
    assert taken == pytest.approx(5 * target, rel=0.01)  # one after the other round the circle; the size is drawn
    lab.page.locator(".jp-RenderedImage img").last.scroll_into_view_if_needed()
    lab.screenshot("lab_ring_first_try")
    write(lab, asked, SECOND)
    lab.run_cell(asked)
    lab.run_cell(check)
    text, pictures = said(lab, check)
    assert "4 of 4 points" in text and "no  " not in text and pictures == 1
    lab.page.locator(".jp-RenderedImage img").last.scroll_into_view_if_needed()
    lab.screenshot("lab_ring_passed")
    assert errors_of(lab) == []
    assert lab.console_errors == []
