"""The buttons of a prediction: choose, or type a number, and commit. Only a live notebook loads this file.

A committed guess cannot be taken back; the row then says what was chosen.

    options -> commit -> (run the next cell) -> reveal

Reference: ipywidgets' core controls, which every notebook front end draws without the network.
"""

import html

__all__ = ["show_question"]


def _box(children, text: str):
    """A VBox whose plain twin, which a saved notebook shows where no kernel runs, is `text`."""
    import ipywidgets as w

    class Controls(w.VBox):
        def __repr__(self):
            return text

    return Controls(children)


class Question:
    """The controls on screen; the question itself stands above them as text, which stays when no kernel runs."""

    def __init__(self, prediction):
        import ipywidgets as w

        self.prediction = prediction
        self.line = w.HTML()
        self.commit = w.Button(description="Commit", tooltip="Write this guess down; it cannot be changed later", disabled=True)
        self.commit.add_class("fw-commit")
        if prediction.choices:
            self.options = w.RadioButtons(
                options=[(str(choice), choice) for choice in prediction.choices],
                index=None,
                layout=w.Layout(width="auto"),
                description="",
            )
            self.options.observe(self._ready, "value")
            self.answer = w.VBox([self.options])
        else:
            self.options = w.Text(placeholder="a number, e.g. 3.5e9", layout=w.Layout(width="14em"), continuous_update=True)
            self.options.observe(self._ready, "value")
            self.answer = w.HBox([self.options, w.Label(prediction.unit)])
        self.options.add_class("fw-guess")
        self.commit.on_click(self._commit)
        said = "" if prediction.guess is None else f"Your guess: {prediction.shown(prediction.guess)}. "
        self.box = _box([self.answer, w.HBox([self.commit, self.line])], f"{said}Run this cell to get the buttons back.")
        self.box.add_class("fw-predict-controls")
        if prediction.guess is not None:
            self.options.value = prediction.guess if prediction.choices else str(prediction.guess)
            self._shut(f"Your guess: {self._text(prediction.guess)}. Run on.")
        else:
            self._say("Choose, then commit. The next cells run without it, but then nothing is counted.")

    def _text(self, guess) -> str:
        return html.escape(self.prediction.shown(guess))

    def _value(self):
        """The guess in the control, or None where it is none yet."""
        value = self.options.value
        if self.prediction.choices:
            return value
        return _number(value)

    def _ready(self, _):
        self.commit.disabled = self._value() is None
        if not self.prediction.choices and self.options.value.strip() and self._value() is None:
            self._say(f"“{html.escape(self.options.value)}” is not a number; try 1200, 1.2e3 or 3/4.")
        else:
            self._say("")

    def _commit(self, _):
        value = self._value()
        if value is None or self.prediction.guess is not None:
            return
        self.prediction.commit(value)
        self._shut(f"Your guess: {self._text(value)}. Run on.")

    def _shut(self, line: str):
        self._say(line)
        self.options.disabled = self.commit.disabled = True

    def _say(self, line: str):
        self.line.value = f'<span role="status" class="fw-predict-line">{line}</span>'

    def close(self):
        """The answer is out: no guess can follow it."""
        guess = self.prediction.guess
        self._shut("No guess was committed." if guess is None else f"Your guess: {self._text(guess)}.")


def _number(text: str):
    """`1,200`, `1.2e3`, `3/4`, `35%` as a number; None for anything else."""
    text = text.strip().replace(",", "").replace("_", "").replace(" ", "")
    scale = 1
    if text.endswith("%"):
        text, scale = text[:-1], 100
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / (float(bottom) if slash else 1) / scale
    except (ValueError, ZeroDivisionError):
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def show_question(prediction) -> Question:
    """Display the question's controls and return them."""
    from IPython.display import display

    question = Question(prediction)
    display(question.box)
    return question
