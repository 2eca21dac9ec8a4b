"""The bubble explorer: turn schedule, sizes, times and memory, and see which of three troubles costs the time.

What is lost has three parts, and each needs another cure: the warm-up (more micro-batches, chunks, W as filler), the link (more
micro-batches under way), imbalance (another cut). They are told apart by running the same order without the others.

    makespan  =  work  +  warm-up  +  imbalance  +  link        bubble of total = lost / makespan,  of ideal = lost / work

Reference: Narayanan et al. 2021 (arXiv:2104.04473); Qi et al. 2023 (arXiv:2401.10241).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import words

__all__ = ["LIMITS", "QUESTIONS", "START", "TARGETS", "BubbleBoard", "bubble_explorer", "number_text"]

START = {"schedule": "gpipe", "p": 4, "m": 8, "v": 2, "F": 1.0, "I": 1.0, "W": 1.0}
START |= {"link": 0.0, "slow": -1, "factor": 1.2, "cap": 0}  # slow: the rank, -1 for none; cap: 0 for none
LIMITS = {"p": (1, 16), "m": (1, 64), "v": (1, 4), "F": (0.25, 4), "I": (0.25, 4), "W": (0.25, 4), "link": (0, 2)}
LIMITS |= {"slow": (-1, 15), "factor": (1, 3), "cap": (0, 64)}
SAME = 1e-9
CHANGES = {
    "a": "shorter, and holds as much",
    "b": "shorter, and holds less",
    "c": "as long, and holds less",
    "d": "longer, and holds less",
}
STAYS = {"a": "nearly all of it goes", "b": "about half of it stays", "c": "all of it stays"}


@dataclass(frozen=True)
class Question:
    """From the setting `before`, with `change` made to it: what happens? choices: key -> what may be answered."""

    text: str
    before: Mapping
    change: Mapping
    choices: Mapping[str, str]


QUESTIONS = (
    Question(
        "8 stages, 32 micro-batches, F = B, no link time. From GPipe to 1F1B the step becomes",
        {"p": 8, "m": 32, "I": 0.5, "W": 0.5},
        {"schedule": "1f1b"},
        CHANGES,
    ),
    Question(
        "4 stages, 8 micro-batches, B = 2 F, and a link that takes 0.25 F. From GPipe to 1F1B the step becomes",
        {"link": 0.25},
        {"schedule": "1f1b"},
        CHANGES,
    ),
    Question(
        "1F1B, 4 stages, stage 2 slower by 20%. From 8 micro-batches to 64, of what that costs for each micro-batch,",
        {"schedule": "1f1b", "slow": 2},
        {"m": 64},
        STAYS,
    ),
)


def _link_is_hidden(setting: Mapping, found: Mapping) -> bool:
    return _is(setting, 4, 8, 0.25) and found["makespan"] <= 34.5 + SAME and max(found["peaks"]) <= 7 + SAME


def _gaps_are_filled(setting: Mapping, found: Mapping) -> bool:
    even = _is(setting, 4, 8, 0) and setting["slow"] < 0
    return even and found["makespan"] <= 27 + SAME and max(found["peaks"]) <= 4 + SAME


def _imbalance_is_left(setting: Mapping, found: Mapping) -> bool:
    parts = found["parts"]
    most = parts["imbalance"] > max(parts["warm-up"], parts["link"])
    return setting["slow"] >= 0 and most and parts["warm-up"] < 0.1 * found["makespan"]


TARGETS = (
    ("p = 4, m = 8, F = I = W = 1 (so B = 2 F), link 0.25: at most 34.5 long, holding at most 7.", _link_is_hidden),
    ("p = 4, m = 8, F = I = W = 1, no link: at most 27 long, holding at most 4.", _gaps_are_filled),
    ("a slow stage: let imbalance be most of what is lost, and the warm-up below 10% of the time.", _imbalance_is_left),
)


def _is(setting: Mapping, p: int, m: int, link: float) -> bool:
    plain = setting["F"] == setting["I"] == setting["W"] == 1
    return plain and (setting["p"], setting["m"]) == (p, m) and abs(setting["link"] - link) < SAME


def number_text(value: float) -> str:
    """33 -> "33", 34.5 -> "34.5", 1/3 -> "0.333"."""
    return f"{value:.4g}"


class BubbleBoard:
    """The kernel's side: from a setting to a scene.

    model(setting) -> {"rows": for each rank [(kind, start, end, stage, micro-batch)], "live": for each rank [(time, held)],
    "makespan", "of_total", "of_ideal", "peaks", "waits": for each rank, "parts": {"work", "warm-up", "imbalance", "link"}}; a
    ValueError of it becomes the scene's `error`.  names: {schedule: (title, whether v counts)}.
    """

    def __init__(self, model: Callable[[Mapping], Mapping], names: Mapping[str, tuple[str, bool]]):
        self.model, self.names = model, dict(names)

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "explore", setting}, {mode: "ask", point} or {mode: "answer", point, name}."""
        number = ask.get("id", 0)
        try:
            if ask.get("mode") in ("ask", "answer"):
                point = int(ask["point"]) % len(QUESTIONS)
                if ask["mode"] == "ask":
                    return {**self.curtain(point), "id": number}
                return {**self.judged(point, str(ask["name"])), "id": number}
            return {**self.scene(ask.get("setting") or {}), "id": number}
        except (KeyError, TypeError, ValueError) as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return {**self._frame(START), "rows": [], "error": said, "words": "This setting cannot be run.", "id": number}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output."""
        return f"The bubble explorer ({scene['setting']['schedule']}): run this cell to get it back."

    def curtain(self, point: int) -> dict:
        """A question, and the setting that it starts from, drawn; what comes after is not sent."""
        question = QUESTIONS[point]
        scene = self.scene(question.before)
        asked = {"text": question.text, "choices": [[key, said] for key, said in question.choices.items()]}
        return {**scene, "question": asked, "curtain": True, "words": f"{question.text} ... what? {scene['words']}"}

    def judged(self, point: int, name: str) -> dict:
        """The setting after the change, the one before as `before`, and whether the guess was right."""
        question = QUESTIONS[point]
        if name not in question.choices:
            raise ValueError(f"an answer is one of {', '.join(question.choices)}; got {name!r}")
        old, new = self.scene(question.before), self.scene({**question.before, **question.change})
        more = ""
        if question.choices is STAYS:
            each = [{part: scene["parts"][part] / scene["setting"]["m"] for part in scene["parts"]} for scene in (old, new)]
            stays = each[1]["imbalance"] / each[0]["imbalance"]
            right = "a" if stays < 0.3 else "b" if stays < 0.75 else "c"
            more = "".join(
                f" For each micro-batch the {part} costs {number_text(each[0][part])}, then {number_text(each[1][part])}."
                for part in ("imbalance", "warm-up")
            )
        else:
            longer, less = new["makespan"] - old["makespan"], max(new["peaks"]) < max(old["peaks"])
            right = "d" if longer > SAME else "c" if longer > -SAME else "b" if less else "a"
        said = "Right" if name == right else f"No, not “{question.choices[name]}”"
        said += f": {question.choices[right]}. Before: {old['brief']}. Now: {new['brief']}.{more}"
        return {**new, "verdict": name == right, "before": old, "words": said}

    def scene(self, setting: Mapping) -> dict:
        """What the front end draws. What the setting lacks is taken from START, what is out of reach is brought near."""
        now = self._read(setting)
        found = self.model(now)
        peaks, cap = found["peaks"], now["cap"]
        most = max(range(len(peaks)), key=lambda r: (peaks[r], -r))
        brief = f"{number_text(found['makespan'])} long, holds {number_text(peaks[most])}"
        said = f"{self.names[now['schedule']][0]}: {brief} (most on rank {most})."
        said += f" Bubble: {found['of_total']:.1%} of total, {found['of_ideal']:.1%} of ideal."
        lost = [f"{word} {number_text(value)}" for word, value in found["parts"].items() if word != "work" and abs(value) > SAME]
        said += f" Lost: {', '.join(lost)}." if lost else ""
        if cap:
            over = sum(peak > cap + SAME for peak in peaks)
            said += f" Over the cap of {cap}: {words.count_text(over, 'rank')}." if over else f" All within the cap of {cap}."
        reached = [bool(test(now, found)) for _, test in TARGETS]
        return {**self._frame(now), **found, "words": said, "brief": brief, "reached": reached}

    def _frame(self, setting: Mapping) -> dict:
        names = [[name, title, looped] for name, (title, looped) in self.names.items()]
        return {
            "setting": dict(setting), "names": names, "limits": {word: list(pair) for word, pair in LIMITS.items()},
            "targets": [text for text, _ in TARGETS],
            "points": len(QUESTIONS), "source": "modelled", "curtain": False, "question": None, "verdict": None, "before": None,
            "error": "", "reached": [False] * len(TARGETS),
        }  # fmt: skip

    def _read(self, setting: Mapping) -> dict:
        unknown = sorted(set(setting) - set(START))
        if unknown:
            raise ValueError(f"a setting has {', '.join(START)}; not {', '.join(unknown)}")
        now = {**START, **setting}
        if now["schedule"] not in self.names:
            raise ValueError(f"schedule {now['schedule']!r}; one of {', '.join(self.names)}")
        for word, (low, high) in LIMITS.items():
            kind = type(START[word])
            now[word] = min(max(kind(now[word]), low), high)
        now["slow"] = min(now["slow"], now["p"] - 1)
        return now


def bubble_explorer(model: Callable, names: Mapping):
    """Widget 4. Shows itself where somebody can press buttons, else says the questions' answers in words; the widget or None."""
    from . import widgets

    board = BubbleBoard(model, names)
    lines = []
    for question in QUESTIONS:
        old, new = board.scene(question.before), board.scene({**question.before, **question.change})
        lines.append(f"{question.text} ... Before: {old['words']} After: {new['words']}")
    headings = (
        "Bubble explorer, in words (run this notebook in JupyterLab to turn it yourself)",
        "The same in words, for when no kernel runs; to get the widget back, run this cell",
    )
    first = board.answer({"mode": "ask", "point": 0})
    return widgets.stand(board, first, "pipeline.js+bubble.js", headings=headings, lines=lines)
