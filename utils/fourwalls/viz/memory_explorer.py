"""The memory explorer: turn model, ranks and switches; see which stage is tallest, which colour fills it, and what saving costs.

One bar for each pipeline stage: states, activations in flight, logits. Beside it what the saving costs: bytes that a rank sends
in a step, and FLOPs that are done twice. Which switch helps depends on which colour dominates.

    fits  <=>  max over stages of (states / ZeRO + activations in flight + ends)  <=  memory of the device

Reference: cost/stage_memory.py for the arithmetic, and the papers named there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..cost.stage_memory import PARTS, extra_flops, stage_memory, wire_bytes
from . import words
from .memory import CATEGORY_STYLE
from .memory_settings import CARDS, OPTIONS, PRESETS, START, SWITCHES, read, tallest, training_of

__all__ = ["LOOKS", "QUESTIONS", "TARGETS", "MemoryBoard", "memory_explorer"]

CLOSE, CHEAP, FULL = 0.95, 0.05, 0.9  # FULL: the rest is for buffers and what an allocator cannot use
LETTERS = "abcd"


# part -> (colour, letter), as in the static pictures
LOOKS = {part: (CATEGORY_STYLE[part][0], CATEGORY_STYLE[part][2]) for part in PARTS}


@dataclass(frozen=True)
class Question:
    """From the setting `before`: which of the changes brings the tallest bar down most?"""

    text: str
    before: Mapping
    changes: Mapping[str, Mapping]


_SOME = ("sequence parallelism, gathered again", "selective recomputation", "ZeRO 1", "two chunks a rank, interleaved")
QUESTIONS = (
    Question("GPT-3, t = 8 and p = 8 on 64 A100s", PRESETS["GPT-3 on 64 A100s"], {name: SWITCHES[name] for name in _SOME}),
    Question(
        "A model of 7.5B parameters, whole on each of 64 ranks",
        PRESETS["ZeRO's 7.5B on 64 ranks"],
        {
            "selective recomputation": {"recompute": "selective"},
            "full recomputation": {"recompute": "full"},
            "ZeRO 1": {"zero": 1},
            "attention in tiles": {"attention": "tiled"},
        },
    ),
    Question(
        "LLaMA 3 8B, 8192 tokens, ZeRO 3, attention in tiles, layers computed again; micro-batch 4",
        PRESETS["LLaMA 3 8B, long"] | {"b": 4, "batch": 256},
        {
            "one key head in place of 8": {"kv": 1},
            "ZeRO over 256 ranks in place of 64": {"d": 256, "batch": 1024},
            "micro-batch 2 in place of 4": {"b": 2},
            "tensor parallelism over 2 ranks": {"t": 2, "d": 32},
        },
    ),
)


def _gpt3_fits(setting: Mapping, found: Mapping) -> bool:
    same = (setting["model"], setting["s"], setting["batch"], setting["card"]) == ("175B", 2048, 64, "A100")
    return same and found["ranks"] == 64 and found["spare"] and found["extra"] < CHEAP and setting["precision"] != "half"


def _one_switch(setting: Mapping, found: Mapping) -> bool:
    turned = {word: value for word, value in setting.items() if value != START[word]}
    if turned not in SWITCHES.values():
        return False
    saved = {name: tallest(START) - tallest({**START, **change}) for name, change in SWITCHES.items()}
    mine = next(name for name, change in SWITCHES.items() if change == turned)
    return saved[mine] >= CLOSE * max(saved.values())


def _bert_fits(setting: Mapping, found: Mapping) -> bool:
    same = (setting["model"], setting["s"], setting["card"], found["ranks"]) == ("bert-large", 512, "16 GB", 1)
    return same and setting["b"] >= 16 and found["spare"] and found["extra"] < CHEAP and setting["precision"] != "half"


def _zero_fits(setting: Mapping, found: Mapping) -> bool:
    same = setting["model"] == "7.5B" and setting["card"] == "V100" and setting["t"] == setting["p"] == 1 and setting["s"] >= 2048
    return same and found["ranks"] <= 64 and found["spare"] and found["extra"] < CHEAP and setting["precision"] != "half"


TARGETS = (
    (
        "GPT-3 (s = 2048, a batch of 64) on 64 A100s: every stage fits with a tenth to spare, at less than 5% extra FLOPs.",
        _gpt3_fits,
    ),
    ("from the preset “GPT-3 on 64 A100s” turn one switch only: the one that brings the tallest bar down most.", _one_switch),
    (
        "BERT-Large (s = 512) on one card of 16 GB: a micro-batch of at least 16, a tenth to spare, at less than 5% extra FLOPs.",
        _bert_fits,
    ),
    (
        "7.5B on at most 64 cards of 32 GB, no tensor or pipeline parallelism, a tenth to spare, at less than 5% extra FLOPs.",
        _zero_fits,
    ),
)


class MemoryBoard:
    """The kernel's side: from a setting to a scene."""

    def answer(self, ask: Mapping) -> dict:
        """The scene for {mode: "explore", setting}, {mode: "preset", name}, {mode: "ask", point}, {mode: "answer", point, name}.

        What cannot be is a scene whose `error` says so, with the nearest legal value.
        """
        number, mode = ask.get("id", 0), ask.get("mode")
        setting = dict(START)
        try:
            if mode in ("ask", "answer"):
                point = int(ask["point"]) % len(QUESTIONS)
                shown = self.curtain(point) if mode == "ask" else self.judged(point, str(ask["name"]))
                return {**shown, "id": number}
            if mode == "preset":
                if ask["name"] not in PRESETS:
                    raise ValueError(f"preset {ask['name']!r}; one of {', '.join(PRESETS)}")
                return {**self.scene(PRESETS[ask["name"]]), "id": number}
            setting = read(ask.get("setting") or {})
            return {**self.scene(setting), "id": number}
        except (KeyError, TypeError, ValueError) as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            blank = {"stages": [], "table": [], "total": 0.0, "error": said}
            return {**self._frame(setting), **blank, "words": f"This cannot be: {said}", "brief": "nothing", "id": number}

    def title(self, scene: Mapping) -> str:
        """The plain twin of a saved output."""
        return f"The memory explorer ({scene['setting']['model']}): run this cell to get it back."

    def curtain(self, point: int) -> dict:
        """A question and the bars that it starts from; what the switches do is not sent."""
        question = QUESTIONS[point]
        scene = self.scene(question.before)
        choices = [[letter, name] for letter, name in zip(LETTERS, question.changes, strict=True)]
        text = f"{question.text}. Which one switch brings the tallest bar down most?"
        asked = {"text": text, "choices": choices}
        return {
            **scene,
            "question": asked,
            "curtain": True,
            "reached": [False] * len(TARGETS),
            "words": f"{text} {scene['words']}",
        }

    def judged(self, point: int, letter: str) -> dict:
        """The setting after the named switch, the one before as `before`, and whether another would have saved more."""
        question = QUESTIONS[point]
        names = dict(zip(LETTERS, question.changes, strict=True))
        if letter not in names:
            raise ValueError(f"an answer is one of {', '.join(names)}; got {letter!r}")
        old = self.scene(question.before)
        scenes = {name: self.scene({**question.before, **change}) for name, change in question.changes.items()}
        saved = {name: old["total"] - scene["total"] for name, scene in scenes.items()}
        best, mine = max(saved, key=saved.get), names[letter]
        right = saved[mine] >= CLOSE * saved[best]
        said = f"Right: {mine}." if right else f"No: {mine} {_saves(saved[mine])}, {best} {_saves(saved[best])}."
        rest = "; ".join(f"{name} {_saves(value)}" for name, value in sorted(saved.items(), key=lambda pair: -pair[1]))
        said += f" Before, {old['brief']} {rest[0].upper()}{rest[1:]}."
        return {**scenes[mine], "verdict": right, "before": old, "words": said, "reached": [False] * len(TARGETS)}

    def scene(self, setting: Mapping) -> dict:
        """What the front end draws. What the setting lacks is taken from START."""
        now = read(setting)
        training = training_of(now)
        bars = [stage_memory(training, k) for k in range(training.pp)]
        stages = [{part: float(bar[part].total) if part in bar else 0.0 for part in PARTS} for bar in bars]
        totals, limit = [sum(stage.values()) for stage in stages], CARDS[now["card"]]
        tall = max(range(len(totals)), key=lambda k: (totals[k], -k))
        over = sum(total > limit for total in totals)
        found = {"ranks": training.ranks, "extra": extra_flops(training), "fits": not over, "spare": totals[tall] <= FULL * limit}
        fullest = max(stages[tall], key=stages[tall].get)
        brief = (
            f"stage {tall} is tallest with {_gb(totals[tall])}, of which {fullest} {stages[tall][fullest] / totals[tall]:.0%}."
        )
        wires = {
            axis: float(max(wire_bytes(training, k)[axis] for k in range(training.pp))) for axis in ("tensor", "pipeline", "data")
        }
        return {
            **self._frame(now), **found, "stages": stages, "total": totals[tall], "tall": tall, "limit": limit, "brief": brief,
            "table": self._table(training, stages[tall], wires, found["extra"]),
            "words": self._words(training, brief, stages, wires, over, now["card"], found["extra"]),
            "reached": [bool(test(now, found)) for _, test in TARGETS],
        }  # fmt: skip

    def _words(self, training, brief, stages, wires, over, card, extra) -> str:
        ranks = f"{words.count_text(training.ranks, 'rank')} (t {training.tp}, p {training.pp}, d {training.dp})"
        m = training.microbatches
        said = f"{training.shape.name} on {ranks}, {m} micro-batch{'es' * (m > 1)} a step: {brief}"
        room = f"{_gb(CARDS[card])} ({card})" if "GB" not in card else card
        if not over:
            said += f" Everything fits into {room}."
        else:
            said += (
                f" {over} of {len(stages)} stages do not fit into {room}."
                if len(stages) > 1
                else f" It does not fit into {room}."
            )
        sent = [f"{axis} {_gb(nbytes)}" for axis, nbytes in wires.items() if nbytes]
        said += f" A rank sends {', '.join(sent)} in a step." if sent else " Nothing is sent."
        return said + f" Extra FLOPs: {extra:.1%}."

    def _table(self, training, stage, wires, extra) -> list[list[str]]:
        states = stage["parameters"] + stage["gradients"] + stage["optimizer"]
        lines = [[f"{LOOKS[part][1]} {part}", _gb(stage[part])] for part in PARTS]
        lines.insert(3, ["states together", _gb(states)])
        lines += [
            ["bar", _gb(sum(stage.values()))],
            ["sent: tensor", _gb(wires["tensor"])],
            ["sent: pipeline", _gb(wires["pipeline"])],
        ]
        return [*lines, ["sent: data", _gb(wires["data"])], ["extra FLOPs", f"{extra:.1%}"]]

    def _frame(self, setting: Mapping) -> dict:
        return {
            "setting": dict(setting), "options": OPTIONS, "presets": list(PRESETS), "looks": LOOKS, "parts": list(PARTS),
            "targets": [text for text, _ in TARGETS], "points": len(QUESTIONS), "source": "modelled", "curtain": False,
            "question": None, "verdict": None, "before": None, "error": "", "reached": [False] * len(TARGETS),
            "limit": CARDS.get(setting.get("card"), 0), "tall": 0, "extra": 0.0, "ranks": 0, "fits": False, "spare": False,
        }  # fmt: skip


def _saves(nbytes: float) -> str:
    return f"saves {_gb(nbytes)}" if nbytes >= 0 else f"adds {_gb(-nbytes)}"


def _gb(nbytes: float) -> str:
    return words.bytes_text(nbytes, binary=False)


def memory_explorer():
    """Widget 3. Shows itself where somebody can press buttons, else says presets and questions in words; the widget or None."""
    from . import widgets

    board = MemoryBoard()
    lines = [f"{name}: {board.scene(setting)['words']}" for name, setting in PRESETS.items()]
    for question in QUESTIONS:
        before = board.scene(question.before)
        saved = []
        for name, change in question.changes.items():
            saved.append(f"{name} {_saves(before['total'] - board.scene({**question.before, **change})['total'])}")
        lines.append(f"{question.text}: which one switch saves most on the tallest bar? {', '.join(saved)}.")
    headings = (
        "Memory explorer, in words (run this notebook in JupyterLab to turn it yourself)",
        "The same in words, for when no kernel runs; to get the widget back, run this cell",
    )
    first = board.answer({"mode": "ask", "point": 0})
    return widgets.stand(board, first, "guessed.js+memory.js", headings=headings, lines=lines)
