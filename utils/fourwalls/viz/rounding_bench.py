"""The rounding bench: drag a scale, and see which numbers fall between a format's ticks, below the last, beyond the end.

The numbers stay where they are and the ticks move, because that is what a scale does: it places them. Three counters say what is
lost (becomes zero, is clipped, root mean square); on release the trained model says what it makes of it, which is not the same.

    x -> round(x s) / s        s = 2^scale, for all; or each channel or group first brought to the size of the largest

Reference: Micikevicius et al. 2018 (arXiv:1710.03740), figure 3; Dettmers et al. 2022 (arXiv:2208.07339) for the channel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["LIMITS", "NAMES", "QUESTIONS", "SPLITS", "START", "STEP", "TARGETS", "RoundingBoard", "rounding_bench", "share_text"]

NAMES = ("gradient", "weights", "outlier channel")
SPLITS = ("tensor", "channel", "group")
START = {"tensor": "gradient", "format": "fp8_e5m2", "scale": 0.0, "split": "tensor"}
LIMITS = {"scale": (-20.0, 40.0)}
STEP = 0.25  # of the scale, in powers of two


@dataclass(frozen=True)
class Question:
    """At the setting `before`, or when `change` is made to it: what happens? best: each at its scale of least error."""

    text: str
    before: Mapping
    change: Mapping
    choices: Mapping[str, str]
    judge: Callable[[Mapping, Mapping], str]
    best: bool = False


def _how_much_is_lost(_, now):
    share = now["underflowed"]
    return "a" if share == 0 else "b" if share < 0.01 else "c" if share < 0.2 else "d"


def _smaller_or_larger(before, now):
    ratio = now["rms"] / before["rms"]
    return "a" if ratio < 0.8 else "b" if ratio <= 1.25 else "c"


def _factor(before, now):
    ratio = before["rms"] / now["rms"]
    return "a" if ratio < 2 else "b" if ratio < 10 else "c"


QUESTIONS = (
    Question(
        "This gradient, rounded to fp8 (E5M2) with no scale. How much of it becomes zero?",
        {"tensor": "gradient", "format": "fp8_e5m2", "scale": 0.0},
        {},
        {"a": "nothing", "b": "less than 1%", "c": "1% to 20%", "d": "more than 20%"},
        _how_much_is_lost,
    ),
    Question(
        "The weights, no scale. From fp16 to bf16, which has as many bits and far more range, their error becomes",
        {"tensor": "weights", "format": "fp16", "scale": 0.0},
        {"format": "bf16"},
        {"a": "smaller", "b": "about the same", "c": "larger"},
        _smaller_or_larger,
    ),
    Question(
        "One channel is far larger than the rest. int8, each time at the best scale: from one scale to one for each channel, the "
        "error falls",
        {"tensor": "outlier channel", "format": "int8"},
        {"split": "channel"},
        {"a": "by less than 2", "b": "2 to 10 times", "c": "more than 10 times"},
        _factor,
        best=True,
    ),
)


def _at(setting: Mapping, tensor: str, format: str, split: str | None = None) -> bool:
    return (setting["tensor"], setting["format"]) == (tensor, format) and split in (None, setting["split"])


# (what, whose tensor it needs, the test: setting, what the model found, what it finds over all scales)
TARGETS = (
    (
        "the gradient in fp8_e5m2, one scale: nothing clipped, and of 1000 numbers less than one becomes zero.",
        "gradient",
        lambda s, found, best: _at(s, "gradient", "fp8_e5m2", "tensor") and found["clipped"] == 0 and found["underflowed"] < 1e-3,
    ),
    (
        "the weights in int4, one scale: the least RMS error (within 2%).",
        "weights",
        lambda s, found, best: _at(s, "weights", "int4", "tensor") and found["rms"] <= 1.02 * best(s)["rms"],
    ),
    (
        "the weights in int4, one scale: now the least loss of the model, which may lie at another clip. Release to ask it.",
        "weights",
        lambda s, found, best: (
            _at(s, "weights", "int4", "tensor")
            and found.get("loss") is not None
            and found["loss"] <= best(s)["loss"] + 0.05 * abs(best(s)["loss"] - found["base"])
        ),
    ),
    (
        "the outlier channel in int8: a tenth of the least error that one scale can have.",
        "outlier channel",
        lambda s, found, best: _at(s, "outlier channel", "int8") and found["rms"] <= 0.1 * best({**s, "split": "tensor"})["rms"],
    ),
)


def share_text(share: float) -> str:
    """0 -> "none", 0.00004 -> "0.004%", 0.123 -> "12.3%"."""
    return "none" if share == 0 else f"{100 * share:.3g}%"


class RoundingBoard:
    """The kernel's side: from a setting to a scene.

    model(setting, loss) -> {"bins": [(left edge as a power of two, width, share, share of it in the largest channel)], "span":
    (low, high), "ticks": [powers of two], "zero", "top": powers of two below which all becomes zero, above which it is clipped;
    "underflowed", "clipped": shares; "rms": relative to the tensor's own; "loss", "base": the model's, rounded and not, or None};
    loss: whether to ask the model.  best(setting) -> {"scale", "rms", "loss"} over all scales.  tensors: which of NAMES there
    are.
    """

    def __init__(self, model: Callable, best: Callable, tensors, formats):
        self.model, self.best, self.tensors, self.formats = model, best, list(tensors), list(formats)
        self.questions = [q for q in QUESTIONS if q.before["tensor"] in self.tensors]
        self.targets = [row for row in TARGETS if row[1] in self.tensors]

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "explore", setting, loss}, {mode: "ask", point} or {mode: "answer", point, name}."""
        number = ask.get("id", 0)
        try:
            if ask.get("mode") in ("ask", "answer"):
                point = int(ask["point"]) % len(self.questions)
                shown = self.curtain(point) if ask["mode"] == "ask" else self.judged(point, str(ask["name"]))
                return {**shown, "id": number}
            return {**self.scene(ask.get("setting") or {}, loss=bool(ask.get("loss"))), "id": number}
        except (KeyError, TypeError, ValueError) as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            start = {**START, "tensor": self.tensors[0]}
            return {**self._frame(start), "error": said, "words": "This setting cannot be.", "id": number}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output."""
        return f"The rounding bench ({scene['setting']['tensor']}): run this cell to get it back."

    def curtain(self, point: int) -> dict:
        """A question over the histogram alone: no ticks, no counters."""
        question = self.questions[point]
        now = self._read(question.before)
        found = self.model(now, False)
        hidden = {"ticks": [], "zero": None, "top": None, "underflowed": None, "clipped": None, "rms": None, "loss": None}
        asked = {"text": question.text, "choices": [[key, said] for key, said in question.choices.items()]}
        return {**self._frame(now), **found, **hidden, "question": asked, "curtain": True, "words": question.text}

    def judged(self, point: int, name: str) -> dict:
        """The setting after the change, with the one before as `before`, and whether the guess was right."""
        question = self.questions[point]
        if name not in question.choices:
            raise ValueError(f"an answer is one of {', '.join(question.choices)}; got {name!r}")
        settings = [self._read(question.before), self._read({**question.before, **question.change})]
        if question.best:
            settings = [{**s, "scale": self.best(s)["scale"]} for s in settings]
        old, new = (self.scene(s, loss=True) for s in settings)
        right = question.judge(old, new)
        said = "Right" if name == right else f"No, not “{question.choices[name]}”"
        said += f": {question.choices[right]}. " + (f"Before: {old['words']} Now: " if question.change else "") + new["words"]
        return {**new, "verdict": name == right, "before": old if question.change else None, "words": said}

    def scene(self, setting: Mapping, *, loss: bool = False) -> dict:
        """What the front end draws. What the setting lacks is taken from START, what is out of reach is brought near."""
        now = self._read(setting)
        found = self.model(now, loss)
        split = "" if now["split"] == "tensor" else f", a scale for each {now['split']}"
        said = f"{now['tensor']} in {now['format']}, scale 2^{now['scale']:g}{split}: {share_text(found['underflowed'])} becomes "
        said += f"zero, {share_text(found['clipped'])} is clipped, RMS error {share_text(found['rms'])} of its RMS."
        if found["loss"] is not None:
            said += f" Loss of the model {found['loss']:.4f}, unrounded {found['base']:.4f}."
        reached = [bool(test(now, found, self.best)) for _, _, test in self.targets]
        return {**self._frame(now), **found, "words": said[0].upper() + said[1:], "reached": reached}

    def _frame(self, setting: Mapping) -> dict:
        return {
            "setting": dict(setting), "tensors": self.tensors, "formats": self.formats, "splits": list(SPLITS),
            "limits": [*LIMITS["scale"], STEP], "targets": [text for text, _, _ in self.targets], "points": len(self.questions),
            "source": "measured", "curtain": False, "question": None, "verdict": None, "before": None, "error": "",
            "reached": [False] * len(self.targets),
        }  # fmt: skip

    def _read(self, setting: Mapping) -> dict:
        unknown = sorted(set(setting) - set(START))
        if unknown:
            raise ValueError(f"a setting has {', '.join(START)}; not {', '.join(unknown)}")
        now = {**START, "tensor": self.tensors[0], **setting}
        for word, allowed in (("tensor", self.tensors), ("format", self.formats), ("split", SPLITS)):
            if now[word] not in allowed:
                raise ValueError(f"{word} {now[word]!r}; one of {', '.join(allowed)}")
        low, high = LIMITS["scale"]
        now["scale"] = min(max(round(float(now["scale"]) / STEP) * STEP, low), high)
        return now


def rounding_bench(model: Callable, best: Callable, tensors, formats):
    """Widget 6. Shows itself where somebody can press buttons, else says the questions' answers in words; the widget or None."""
    from . import widgets

    board = RoundingBoard(model, best, tensors, formats)
    lines = []
    for point, question in enumerate(board.questions):
        shown = next(s for s in (board.judged(point, key) for key in question.choices) if s["verdict"])
        lines.append(f"{question.text} ... {shown['words'].removeprefix('Right: ')}")
    headings = (
        "Rounding bench, in words (run this notebook in JupyterLab to turn it yourself)",
        "The same in words, for when no kernel runs; to get the widget back, run this cell",
    )
    first = board.answer({"mode": "ask", "point": 0})
    return widgets.stand(board, first, "guessed.js+rounding.js", headings=headings, lines=lines)
