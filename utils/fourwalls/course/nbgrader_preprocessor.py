"""Stands in nbgrader's autograding where Execute stands: no kernel runs; the judge's verdicts are written into the test cells.

nbgrader reads points out of a test cell's outputs (an error: none; no error: all), and its feedback shows them, so a task that
is solved gets its report as an output, and one that is not gets an error beside it.

    SaveAutoGrades(outputs written here) = points of the judge

Reference: nbgrader's preprocessors/execute.py and utils.determine_grade.
"""

import html
import re

from nbformat.v4 import new_markdown_cell, new_output
from nbgrader.preprocessors import NbGraderPreprocessor

from .grade import code_cells
from .verdicts import Verdict

__all__ = ["JudgedCells"]

CHECKED = re.compile(r"""check\((?:\w+\s*,\s*(?:task=)?["'](\w+)["']|(\w+))""")  # lab.check(f) or lab.check(f, "task")


class JudgedCells(NbGraderPreprocessor):
    """Writes a Verdict into the notebook that was judged. Raises ValueError for another notebook."""

    def __init__(self, verdict: Verdict, judged: dict):
        super().__init__()
        self.verdict, self.judged = verdict, judged

    def preprocess(self, nb, resources):
        """Every code cell is the one that was judged; each test cell gets its task's report, each broken cell its error."""
        if code_cells(nb) != code_cells(self.judged):
            raise ValueError("nbgrader changed a cell after it was judged")
        left = dict(self.verdict.tasks)
        for cell in nb.cells:
            mark = cell.metadata.get("nbgrader") or {}
            name = mark.get("grade_id") or cell.get("id")
            if cell.cell_type != "code":
                continue
            if mark.get("grade") and not mark.get("solution"):
                asked = next(word for word in CHECKED.search(cell.source).groups() if word)
                cell.outputs = self._outputs(left.pop(asked), mark["points"])
                cell.metadata["fourwalls"] = {"task": asked, "points": self.verdict.tasks[asked].points}
            elif name in self.verdict.errors:
                text = self.verdict.errors[name]
                cell.outputs = [new_output("error", ename=text.partition(":")[0], evalue=text, traceback=[text])]
        if left:
            raise ValueError(f"no test cell for {', '.join(left)}")
        if self.verdict.notes:
            notes = "\n".join(f"- {html.escape(note)}" for note in self.verdict.notes)
            nb.cells.insert(0, new_markdown_cell(f"**What was seen.**\n\n{notes}"))
        return nb, resources

    def _outputs(self, task, most):
        if task.most != most:
            raise ValueError(f"the task is worth {task.most:g} points, its test cell {most:g}")
        data = {"text/plain": "\n".join(task.lines), "text/html": task.html}
        shown = [new_output("display_data", data=data)]
        if task.picture:
            shown.append(new_output("display_data", data={"image/png": task.picture, "text/plain": "your own run"}))
        if task.points < most:
            line = task.lines[-1]
            shown.append(new_output("error", ename="not yet", evalue=line, traceback=[f"not yet: {line}"]))
        return shown
