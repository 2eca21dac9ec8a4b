"""A guess before the answer: the reader commits to a number or a choice, and only then meets what the ranks say.

In a live notebook `predict` shows buttons or a box; the guess is written down, once. Where nobody can press anything (a test,
a build, a script) the question is printed and the cell goes on, with the same output every time.

    right  <=>  |guess - answer| <= within * |answer|        (a choice: guess == answer)

Reference: Crouch, Fagen, Callan and Mazur 2004: demonstrations teach when their outcome is predicted first.
"""

import html
import math
from numbers import Number

from ..viz.show import show
from ..viz.widgets import live
from . import progress

__all__ = ["Prediction", "predict"]


class Prediction:
    """An open question. `guess` is what the reader committed to, or None. `reveal(answer)` closes it."""

    def __init__(self, question: str, text: str, choices: tuple, unit: str):
        self.question, self.text, self.choices, self.unit = question, text, choices, unit
        self.guess = None
        self._widget = None

    def __repr__(self) -> str:
        return f"Prediction({self.question!r})"

    def shown(self, value) -> str:
        """A choice or a number with the unit, as the reader sees it."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = f"{value:,}" if isinstance(value, int) and abs(value) < 10**12 else f"{value:.4g}"
        return f"{value} {self.unit}".rstrip()

    def commit(self, guess) -> None:
        """Write the guess down: one of the choices, or a number. Raises ValueError for anything else."""
        self.guess = _legal(guess, self.choices)
        progress.remember_guess(self.question, self.guess)

    def reveal(self, answer, *, because: str = "", within: float = 0.1) -> None:
        """Show the answer, and whether the guess was right.

        answer: one of the choices, or a number (a numpy or torch scalar will do).
        within: relative error that still counts as right.
        """
        answer = _legal(answer, self.choices)
        if within < 0:
            raise ValueError(f"within is {within}; a share of the answer of at least 0")
        shown, lines = self.shown(answer), []
        if self.guess is None:
            lines.append(f"The answer: {shown}.")
        else:
            right = self.guess == answer if self.choices else abs(self.guess - answer) <= within * abs(answer)
            progress.remember_guess(self.question, self.guess, right)
            verdict = "You said" if not right else "Right: you said"
            factor = (
                "" if self.choices or right or not answer or self.guess / answer <= 0 else f" ({_factor(self.guess / answer)})"
            )
            lines.append(f"{verdict} {self.shown(self.guess)}; it is {shown}{factor}.")
        if because:
            lines.append(because)
        if self._widget is not None:
            self._widget.close()
        _show(lines, "fw-reveal")


def predict(question: str, text: str, *, choices=None, unit: str = "") -> Prediction:
    """Ask before showing: returns a Prediction whose `reveal(answer)` belongs into a later cell.

    question: an id that stays the same, e.g. "03-bytes".  choices: two or more answers, or None for a number (in `unit`).
    Raises ValueError for fewer than two or repeated choices.
    """
    if choices is not None:
        choices = tuple(choices)
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise ValueError(
                f"choices are {list(choices)}; give at least two, all different, or leave choices out to ask for a number"
            )
    if not isinstance(question, str) or not question:
        raise ValueError(f"question is {question!r}; give an id of your own such as '03-bytes'")
    asked = Prediction(question, text, choices or (), unit)
    if not live():
        options = [f"  ( ) {choice}" for choice in asked.choices] or [f"  [ a number{f', in {unit}' if unit else ''} ]"]
        _show([f"Predict: {text}", *options], "fw-predict")
        return asked
    before = progress.load()["guesses"].get(question, {})
    try:
        asked.guess = _legal(before["guess"], asked.choices) if before else None
    except ValueError:  # the question was rewritten since
        asked.guess = None
    from .predict_widget import show_question

    _show([f"Predict: {text}"], "fw-predict")
    asked._widget = show_question(asked)
    return asked


def _legal(value, choices: tuple):
    """`value` as one of the choices, or as a finite int or float."""
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if choices:
        if value in choices:
            return value
        raise ValueError(f"{value!r} is none of the choices {list(choices)}")
    if isinstance(value, Number) and not isinstance(value, (bool, complex)) and math.isfinite(value):
        return value if isinstance(value, int) else float(value)
    raise ValueError(f"{value!r} is not a number; this question has no choices, so it takes a finite number")


def _factor(ratio: float) -> str:
    if ratio >= 1:
        return f"{ratio:.3g} times too high"
    return f"{1 / ratio:.3g} times too low"


def _show(lines: list[str], name: str) -> None:
    """Lines as text and as HTML, the first one bold."""
    first, *rest = (html.escape(line) for line in lines)
    show("\n".join(lines), f'<div class="{name}"><strong>{first}</strong>{"".join(f"<br>{line}" for line in rest)}</div>')
