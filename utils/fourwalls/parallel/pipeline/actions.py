"""The words that a pipeline schedule is written in: `2F0` is stage 2, forward, micro-batch 0.

A schedule is one list of actions for each rank, in the order in which the rank runs them; nothing else is said about time. The
checker, the simulator, the pictures and the executor all read these lists, and a person may type them. A backward pass is one
action B, or two: I makes the gradient of the stage's input, which the stage before waits for, W that of its weights, which
nobody waits for.

    F(s, m) needs F(s-1, m)        B or I (s, m) needs F(s, m) and B or I (s+1, m)        W(s, m) needs I(s, m)

Reference: Qi et al. 2023 (arXiv:2401.10241) for the split of B; torch.distributed.pipelining writes its actions the same way.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = [
    "KINDS",
    "Action",
    "Cell",
    "Joined",
    "Schedule",
    "actions_of",
    "gives",
    "grid",
    "microbatches_of",
    "needs",
    "parse",
    "parse_action",
    "parts",
    "placement",
    "read",
    "stages_of",
    "to_text",
]

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
IDLE = (".", "-", "·")
CELL = re.compile(r"([0-9]{1,9})([A-Z])([0-9]{1,9})")
# what a Chinese keyboard or a copied page puts in the place of plain signs
PLAIN = str.maketrans({"：": ":", "，": ",", "｜": "|", "、": ",", "\u200b": "", "\ufeff": "", "[": " ", "]": " "})


class Action(NamedTuple):
    """One piece of work: `kind` (F, B, I, W) of micro-batch `microbatch` on stage `stage`. Prints as `2F0`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__


class Joined(NamedTuple):
    """Actions that a rank runs as one, so that one's messages hide behind the other's work. Prints as `0F3+1B1`."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))

    __repr__ = __str__


Cell: TypeAlias = Action | Joined | None  # None: an idle slot, which pictures keep and everybody else skips
Schedule: TypeAlias = list[list[Cell]]


def parts(cell: Cell) -> tuple[Action, ...]:
    """The actions of a cell: one, several where they are joined, none where it is idle."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Joined) else (cell,)


def actions_of(row: list[Cell]) -> list[Action]:
    """The actions of a rank in order, joined ones apart, idle slots left out."""
    if all(type(cell) is Action for cell in row):
        return row
    return [action for cell in row for action in parts(cell)]


def needs(action: Action, stages: int) -> tuple[tuple[str, int, int], ...]:
    """What must be there before `action` may run, as (product, stage, micro-batch): "F" an output, "G" the gradient of an input.

    Of several the one that arrives from another stage stands last.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("G", stage, microbatch),)
    own = (("F", stage, microbatch),)
    return own + ((("G", stage + 1, microbatch),) if stage < stages - 1 else ())


def gives(action: Action) -> tuple[tuple[str, int, int], ...]:
    """What `action` makes, in the words of `needs`; "W" is a weight gradient. B makes at once what I and W make apart."""
    stage, kind, microbatch = action
    return tuple((product, stage, microbatch) for product in {"F": "F", "B": "GW", "I": "G", "W": "W"}[kind])


def stages_of(schedule: Schedule) -> int:
    """Stages in all: one more than the highest that is named."""
    return 1 + max((max([stage for stage, _, _ in actions_of(row)], default=-1) for row in schedule), default=-1)


def microbatches_of(schedule: Schedule) -> int:
    """Micro-batches in all: one more than the highest that is named."""
    return 1 + max((max([number for _, _, number in actions_of(row)], default=-1) for row in schedule), default=-1)


def placement(schedule: Schedule) -> dict[int, int]:
    """Stage -> the rank that runs it. ValueError if two ranks run the same stage."""
    where = {}
    for rank, row in enumerate(schedule):
        for stage in sorted({stage for stage, _, _ in actions_of(row)}):
            if where.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on rank {where[stage]} and on rank {rank}; a stage has one rank")
    return where


def parse_action(text: str) -> Cell:
    """`2F0` -> Action, `0F3+1B1` -> Joined, `.` -> None. ValueError with what a cell looks like."""
    text = text.strip()
    if text in IDLE:
        return None
    found = tuple(_one(piece, text) for piece in text.split("+"))
    return found[0] if len(found) == 1 else Joined(found)


def parse(text: str) -> Schedule:
    """A schedule from its grid: a line for each rank, cells apart by blanks or commas, `.` for an idle slot.

    A line may begin with a name and a colon (`rank 0:`); `#` begins a comment; brackets, as `grid` marks a cell, are left out.
    ValueError names line and cell.
    """
    rows = []
    text = text.translate(PLAIN)
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        line = line.partition(":")[2] if ":" in line else line
        cells = line.replace(",", " ").replace("|", " ").split()
        row = []
        for place, cell in enumerate(cells):
            try:
                row.append(parse_action(cell))
            except ValueError as error:
                raise ValueError(f"line {number}, cell {place + 1}: {error}") from None
        if row:
            rows.append(row)
    if not rows:
        raise ValueError("the grid is empty; write a line for each rank, such as `0F0 0F1 0B0 0B1`")
    return rows


def read(schedule: "str | Sequence[Iterable]") -> Schedule:
    """A schedule in whatever form it was written: a grid as text, or for each rank a list of actions or of their texts.

    What is returned is a fresh list of lists; idle slots are kept. ValueError names rank and cell.
    """
    if isinstance(schedule, str):
        return parse(schedule)
    if not isinstance(schedule, Sequence) or not schedule:
        raise ValueError(f"a schedule is a list of actions for each rank, or a grid as text; got {schedule!r:.80}")
    rows = []
    for rank, row in enumerate(schedule):
        if isinstance(row, str):
            row = row.replace(",", " ").split()
        if not isinstance(row, Iterable) or isinstance(row, Action):
            raise ValueError(f"rank {rank}: a list of actions is wanted, got {row!r:.80}")
        row = list(row)
        if _are_plain(row):  # as the schedules of this package give it
            rows.append(row)
            continue
        cells = []
        for place, cell in enumerate(row):
            try:
                cells.append(_cell(cell))
            except ValueError as error:
                raise ValueError(f"rank {rank}, cell {place + 1}: {error}") from None
        rows.append(cells)
    return rows


def to_text(schedule: Schedule) -> str:
    """The grid that `parse` reads back: a line for each rank, cells in columns, `.` for idle slots."""
    return grid(schedule)


def grid(schedule: Schedule, *, mark: tuple[int, int] | None = None, names: bool = False, around: int | None = None) -> str:
    """The schedule as text. mark: (rank, place) of a cell to put in [brackets]; names: begin each line with `rank 0:`;
    around: show only so many cells on either side of the mark.
    """
    first = max(0, mark[1] - around) if mark and around is not None else 0
    last = mark[1] + around + 1 if mark and around is not None else None
    texts = [["." if cell is None else str(cell) for cell in row] for row in schedule]
    if mark is not None:
        rank, place = mark
        texts[rank][place] = f"[{texts[rank][place]}]"
    shown = [row[first:last] for row in texts]
    width = max((len(text) for row in shown for text in row), default=1)
    lines = []
    for rank, row in enumerate(shown):
        cells = " ".join(text.ljust(width) for text in row) or "."
        cells = ("... " if first else "") + cells.rstrip() + (" ..." if last is not None and len(texts[rank]) > last else "")
        lines.append(f"rank {rank}: {cells}" if names else cells)
    return "\n".join(lines)


def _one(piece: str, whole: str) -> Action:
    """One action of a cell, or ValueError with the nearest thing that would be read."""
    found = CELL.fullmatch(piece)
    if found and found[2] in KINDS:
        return Action(int(found[1]), found[2], int(found[3]))
    kinds = ", ".join(f"{k} ({word})" for k, word in KINDS.items())
    where = f"{piece!r:.40} in {whole!r:.40}" if piece != whole else f"{piece!r:.40}"
    if found:
        raise ValueError(f"{where}: there is no kind {found[2]}; kinds are {kinds}")
    plain = unicodedata.normalize("NFKC", piece).upper()
    upper = CELL.fullmatch(plain)
    if upper and upper[2] in KINDS:
        what = "kinds are capital letters" if piece.isascii() else "signs are those of a plain keyboard"
        raise ValueError(f"{where}: {what}; did you mean {plain}?")
    strange = next((sign for sign in piece if not sign.isascii()), None)
    if strange is not None:
        raise ValueError(f"{where}: {strange!r} (U+{ord(strange):04X}) is no plain letter or digit; a cell looks like 2F0")
    if "-" in piece and re.fullmatch(r"-?[0-9]+[A-Z]-?[0-9]+", piece):
        raise ValueError(f"{where}: stages and micro-batches count from 0; nearest {piece.replace('-', '')}")
    if re.fullmatch(r"[FBIW]\d+", piece):
        raise ValueError(f"{where} names no stage; on stage 0 it reads 0{piece}")
    if re.fullmatch(r"\d+[FBIW]", piece):
        raise ValueError(f"{where} names no micro-batch; micro-batch 0 reads {piece}0")
    raise ValueError(f"{where} is no action; an action is stage, kind, micro-batch, as in 2F0; kinds are {kinds}; `.` is idle")


def _is_plain(stage, kind, microbatch) -> bool:
    """Whether these are whole numbers from 0 on, and a kind that there is."""
    return type(stage) is type(microbatch) is int and stage >= 0 <= microbatch and type(kind) is str and kind in KINDS


def _are_plain(row: list) -> bool:
    """The same of a whole row of Actions, quickly."""
    if set(map(type, row)) != {Action}:
        return False
    stages, kinds, numbers = zip(*row, strict=True)
    right = set(map(type, stages)) == set(map(type, numbers)) == {int} and set(map(type, kinds)) == {str}
    return right and min(stages) >= 0 <= min(numbers) and set(kinds) <= KINDS.keys()


def _cell(cell) -> Cell:
    """A cell from a text, an Action, a Joined, a plain (stage, kind, micro-batch), or None."""
    if cell is None:
        return cell
    if isinstance(cell, Joined):
        inside = [_cell(part) for part in cell.actions]
        if not inside or not all(isinstance(part, Action) for part in inside):
            raise ValueError(f"{cell!r} joins no actions; a joined cell holds one or more, as in 0F3+1B1")
        return Joined(tuple(inside))
    if isinstance(cell, str):
        return parse_action(cell)
    if isinstance(cell, tuple) and len(cell) == 3:
        stage, kind, microbatch = cell
        if _is_plain(stage, kind, microbatch):
            return cell if type(cell) is Action else Action(stage, kind, microbatch)
    raise ValueError(f"{cell!r} is no action; an action is stage, kind, micro-batch, as in 2F0")
