"""A guess comes before the answer, is judged once, and a run without a reader always prints the same."""

import numpy as np
import pytest
import torch

from fourwalls.course import home, progress
from fourwalls.course.predict import predict
from fourwalls.viz import widgets


def test_without_a_reader_the_output_is_fixed(project, capsys):
    def run():
        predict("03-bytes", "How much?", unit="MiB").reveal(112, because="2(n-1)/n of S")
        predict("03-who", "Who?", choices=["rank 0", "all alike"]).reveal("all alike")
        return capsys.readouterr().out

    first = run()
    assert first == (
        "Predict: How much?\n  [ a number, in MiB ]\nThe answer: 112 MiB.\n2(n-1)/n of S\n"
        "Predict: Who?\n  ( ) rank 0\n  ( ) all alike\nThe answer: all alike.\n"
    )
    progress.remember_guess("03-bytes", 100)
    assert run() == first, "an earlier guess of this reader must not change a committed notebook"


@pytest.mark.parametrize(
    ("guess", "answer", "within", "right", "said"),
    [
        (110, 112, 0.1, True, "Right: you said 110 GB; it is 112 GB."),
        (100, 112, 0.1, False, "You said 100 GB; it is 112 GB (1.12 times too low)."),
        (1000, 100, 0.1, False, "You said 1,000 GB; it is 100 GB (10 times too high)."),
        (100, 112, 0.2, True, "Right: you said 100 GB; it is 112 GB."),
        (0, 0, 0.0, True, "Right: you said 0 GB; it is 0 GB."),
        (-5, 5, 0.1, False, "You said -5 GB; it is 5 GB."),
        (4.5e18, 4.5e18, 0.0, True, "Right: you said 4.5e+18 GB; it is 4.5e+18 GB."),
    ],
)
def test_a_number_is_judged_by_its_relative_error(project, capsys, guess, answer, within, right, said):
    asked = predict("q", "How much?", unit="GB")
    asked.commit(guess)
    asked.reveal(answer, within=within)
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert progress.load()["guesses"]["q"] == {"guess": guess, "right": right}


def test_a_choice_is_right_or_not(project, capsys):
    asked = predict("q", "Who?", choices=["a", "b"])
    asked.commit("a")
    asked.reveal("b")
    assert "You said a; it is b." in capsys.readouterr().out
    assert progress.progress().judged == 1 and progress.progress().right == 0


def test_scalars_of_numpy_and_torch_are_numbers(project, capsys):
    asked = predict("q", "How much?")
    asked.commit(np.int64(3))
    asked.reveal(torch.tensor(3.0))
    assert "Right: you said 3; it is 3." in capsys.readouterr().out


@pytest.mark.parametrize("value", ["many", None, True, float("nan"), float("inf"), 1j])
def test_what_is_no_number_is_refused(project, value):
    asked = predict("q", "How much?")
    with pytest.raises(ValueError, match="number"):
        asked.commit(value)
    assert progress.load()["guesses"] == {}
    with pytest.raises(ValueError, match="number"):
        asked.reveal(value)


def test_bad_questions_are_refused(project):
    with pytest.raises(ValueError, match="at least two"):
        predict("q", "Who?", choices=["a"])
    with pytest.raises(ValueError, match="all different"):
        predict("q", "Who?", choices=["a", "a"])
    with pytest.raises(ValueError, match="id"):
        predict("", "Who?")
    asked = predict("q", "Who?", choices=["a", "b"])
    with pytest.raises(ValueError, match="none of the choices"):
        asked.reveal("c")
    with pytest.raises(ValueError, match="within"):
        asked.reveal("a", within=-1)


@pytest.fixture
def reader(project, monkeypatch):
    """A reader with buttons: the question's controls are made, though nothing draws them."""
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("FOURWALLS_WIDGETS", "1")
    assert widgets.live()


def press(asked):
    asked._widget.commit.click()


def test_commit_opens_with_a_guess_and_shuts_after_it(reader):
    asked = predict("q", "How much?", unit="MiB")
    controls = asked._widget
    assert controls.commit.disabled
    controls.options.value = "lots"
    assert controls.commit.disabled and "not a number" in controls.line.value
    controls.options.value = "1.5e3"
    assert not controls.commit.disabled
    press(asked)
    assert asked.guess == 1500 and controls.options.disabled and "1,500 MiB" in controls.line.value
    controls.options.value = "7"
    press(asked)
    assert asked.guess == 1500, "a guess cannot be taken back"


def test_a_saved_notebook_says_what_stood_there(reader):
    asked = predict("q", "How much?", unit="MiB")
    plain = asked._widget.box._repr_mimebundle_()["text/plain"]
    assert plain == "Run this cell to get the buttons back."
    asked._widget.options.value = "3"
    press(asked)
    again = predict("q", "How much?", unit="MiB")
    assert again._widget.box._repr_mimebundle_()["text/plain"] == "Your guess: 3 MiB. Run this cell to get the buttons back."


def test_a_fresh_copy_of_the_notebook_opens_its_questions(reader, project):
    (project / "notebooks" / "07_topic.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    first = predict("07-who", "Who?", choices=["a", "b"])
    first._widget.options.value = "b"
    press(first)
    assert predict("07-who", "Who?", choices=["a", "b"]).guess == "b"
    home.reset("07")
    again = predict("07-who", "Who?", choices=["a", "b"])
    assert again.guess is None and not again._widget.options.disabled


def test_no_guess_can_follow_the_answer(reader):
    asked = predict("q", "Who?", choices=["a", "b"])
    asked.reveal("a")
    assert asked._widget.options.disabled and "No guess" in asked._widget.line.value
    assert progress.load()["guesses"] == {}


def test_a_guess_survives_a_restart_of_the_kernel(reader, capsys):
    first = predict("q", "Who?", choices=["a", "b"])
    first._widget.options.value = "b"
    press(first)
    again = predict("q", "Who?", choices=["a", "b"])
    assert again.guess == "b" and again._widget.options.disabled
    again.reveal("b")
    assert "Right: you said b" in capsys.readouterr().out
    changed = predict("q", "Who?", choices=["c", "d"])
    assert changed.guess is None, "the question was rewritten: the old guess fits no more"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,200", 1200),
        ("1.2e3", 1200),
        ("3/4", 0.75),
        ("35%", 0.35),
        (" 7 ", 7),
        ("1/0", None),
        ("", None),
        ("nan", None),
        ("1e999", None),
    ],
)
def test_numbers_as_people_write_them(text, value):
    from fourwalls.course.predict_widget import _number

    assert _number(text) == value


def test_text_of_a_question_is_text_and_not_markup(reader):
    asked = predict("q", "Who?", choices=["<b>a</b>", "b"])
    asked._widget.options.value = "<b>a</b>"
    press(asked)
    assert "&lt;b&gt;" in asked._widget.line.value and "<b>" not in asked._widget.line.value
