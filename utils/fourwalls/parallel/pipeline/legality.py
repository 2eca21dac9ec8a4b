"""Is this schedule possible? Every action must find its inputs, a rank does one thing at a time, and what is kept is freed.

The lists are walked as ranks would walk them, each on its own, without any time: an action runs once its inputs exist. If all
ranks stand still before the end, the schedule would hang; the action that is furthest ahead of its inputs is named, with the one
that is missing and why that one does not come.

    legal  <=>  the order of each rank and the needs of each action together have no circle

Reference: Lamport 1978, for happens-before; the needs are those of `actions.needs`.
"""

from collections import Counter

from .actions import Action, Schedule, actions_of, gives, grid, microbatches_of, needs, parts, read, stages_of

__all__ = ["IllegalSchedule", "check", "check_complete", "is_legal"]

AROUND = 12  # cells of the grid that a message shows on either side of the bad one


class IllegalSchedule(ValueError):
    """A schedule that cannot run: `rank` and `place` (from 0) of the first bad cell, `action` in it, `reason` in words.

    missing: the action that it waits for, or None.  place counts idle slots too, as the grid shows them.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        place: int,
        reason: str,
        *,
        action: Action | None = None,
        missing: Action | None = None,
    ):
        self.rank, self.place, self.reason, self.action, self.missing = rank, place, reason, action, missing
        inside = 0 <= place < len(schedule[rank])
        self.grid = grid(schedule, mark=(rank, place) if inside else None, names=True, around=AROUND if inside else None)
        where = f"rank {rank}, cell {place + 1}" if inside else f"rank {rank}"
        super().__init__(f"{where}: {reason}\n{self.grid}")


def is_legal(schedule, **options) -> bool:
    """Whether `check` accepts the schedule."""
    try:
        check(schedule, **options)
    except ValueError:
        return False
    return True


def check(
    schedule,
    *,
    forward_only: bool = False,
    slots: bool = False,
    stages: int | None = None,
    microbatches: int | None = None,
    limit: float | None = None,
    after_input: float = 1.0,
) -> Schedule:
    """The schedule as lists of actions, if it is legal; if not, IllegalSchedule shows the grid and the first bad cell.

    schedule: in any form that `actions.read` takes.  forward_only: no backward pass at all is wanted, instead of one for each F.
    slots: cells are slots of time, side by side, as in a figure; inputs must stand in an earlier slot.
    stages, microbatches: how many there must be (default: as many as are named).
    limit: activations that a rank may hold, in units of one stage and micro-batch; after I a W still holds `after_input` of one.
    """
    for word, value in (("limit", limit), ("after_input", after_input)):
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{word} is {value!r}; allowed: a number of at least 0")
    for word, value in (("stages", stages), ("microbatches", microbatches)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{word} is {value!r}; allowed: a whole number of at least 1, or None for as many as are named")
    schedule = read(schedule)
    stages = stages_of(schedule) if stages is None else stages
    check_complete(schedule, forward_only=forward_only, stages=stages, microbatches=microbatches)
    _check_order(schedule, stages)
    if slots:
        _check_slots(schedule, stages)
    _check_memory(schedule, forward_only, limit, after_input)
    return schedule


def _cells(schedule: Schedule):
    """(rank, place, action) of every action, rank by rank."""
    for rank, row in enumerate(schedule):
        for place, cell in enumerate(row):
            for action in parts(cell):
                yield rank, place, action


def check_complete(
    schedule: Schedule, *, forward_only: bool = False, stages: int | None = None, microbatches: int | None = None
) -> None:
    """Each stage on one rank; each action once; for each stage and micro-batch an F, and a B, or an I and a W. No order."""
    stages = stages_of(schedule) if stages is None else stages
    microbatches = microbatches_of(schedule) if microbatches is None else microbatches
    if stages == 0:
        raise IllegalSchedule(schedule, 0, 0, "there is no action at all; the least is an F and its B, such as `0F0 0B0`")
    if not _complete(schedule, stages, microbatches, forward_only):
        _raise_incomplete(schedule, stages, microbatches, forward_only)


def _complete(schedule: Schedule, stages: int, microbatches: int, forward_only: bool) -> bool:
    """The same as a quick yes or no."""
    numbers = {kind: [] for kind in "FBIW"}  # of (stage, micro-batch), as one number: quick to compare
    homes = 0
    for row in schedule:
        flat = actions_of(row)
        homes += len({stage for stage, _, _ in flat})
        if not all(0 <= stage < stages and 0 <= microbatch < microbatches for stage, _, microbatch in flat):
            return False
        for kind in {kind for _, kind, _ in flat}:
            numbers[kind] += [stage * microbatches + microbatch for stage, k, microbatch in flat if k == kind]
    sets = {kind: set(found) for kind, found in numbers.items()}
    if homes != stages or any(len(sets[kind]) != len(found) for kind, found in numbers.items()):
        return False
    if len(sets["F"]) != stages * microbatches:
        return False
    if forward_only:
        return not (sets["B"] or sets["I"] or sets["W"])
    return sets["I"] == sets["W"] and not sets["I"] & sets["B"] and sets["I"] | sets["B"] == sets["F"]


def _raise_incomplete(schedule: Schedule, stages: int, microbatches: int, forward_only: bool) -> None:
    """Find the first cell that is one too many, or the first action that is missing."""
    seen, where = {}, {}
    for rank, place, action in _cells(schedule):
        if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
            word = f"stages 0 to {stages - 1}" if not 0 <= action.stage < stages else f"micro-batches 0 to {microbatches - 1}"
            raise IllegalSchedule(schedule, rank, place, f"{action}: there are {word}", action=action)
        if where.setdefault(action.stage, rank) != rank:
            reason = f"{action}: stage {action.stage} is on rank {where[action.stage]}; a stage has one rank"
            raise IllegalSchedule(schedule, rank, place, reason, action=action)
        if action in seen:
            reason = f"{action} was there before, in cell {seen[action][1] + 1}; each action runs once"
            raise IllegalSchedule(schedule, rank, place, reason, action=action)
        if forward_only and action.kind != "F":
            raise IllegalSchedule(schedule, rank, place, f"{action} in a schedule of forward passes only", action=action)
        seen[action] = rank, place
    for action, (rank, place) in seen.items():
        if action.kind in "IW" and action._replace(kind="B") in seen:
            reason = f"{action}: micro-batch {action.microbatch} has a whole backward pass here too, {action._replace(kind='B')}"
            raise IllegalSchedule(schedule, rank, place, reason, action=action)
    for stage in range(stages):
        for microbatch in range(microbatches):
            have = {k for k in "FBIW" if Action(stage, k, microbatch) in seen}
            wanted = [("F",)] if forward_only else [("F", "B"), ("F", "I", "W")]
            if not any(have == set(kinds) for kinds in wanted):
                _raise_missing(schedule, seen, where, Action(stage, "F", microbatch), have)
    raise AssertionError("the quick look and the long one disagree")


def _raise_missing(schedule: Schedule, seen: dict, where: dict, forward: Action, have: set) -> None:
    """Point at what is there of a micro-batch that is not complete, or at the end of the rank that should have it."""
    stage = forward.stage
    whole, first, second = (forward._replace(kind=kind) for kind in "BIW")
    if not have:
        rank = where.get(stage, min(stage, len(schedule) - 1))
        what = "" if stage in where else f"; no rank has stage {stage}"
        raise IllegalSchedule(schedule, rank, len(schedule[rank]), f"{forward} is missing{what}", action=forward)
    if "F" not in have:
        shown, lacks = forward._replace(kind=next(k for k in "BIW" if k in have)), f"{forward} is missing"
    elif have == {"F"}:
        shown, lacks = forward, f"{forward} has no backward pass; {whole} is missing, or {first} and {second}"
    else:
        shown, gone = (first, second) if "I" in have else (second, first)
        lacks = f"{gone} is missing; {shown} is only half of a backward pass"
    rank, place = seen[shown]
    raise IllegalSchedule(schedule, rank, place, lacks, action=shown)


def _check_order(schedule: Schedule, stages: int) -> None:
    """Walk all ranks until everything has run; a joined cell runs once all of its parts could."""
    heads, done, waiting = [0] * len(schedule), set(), {}
    ready = list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        row = schedule[rank]
        while heads[rank] < len(row):
            cell = row[heads[rank]]
            missing = next((n for a in parts(cell) for n in needs(a, stages) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            for action in parts(cell):
                for product in gives(action):
                    done.add(product)
                    ready.extend(waiting.pop(product, ()))
            heads[rank] += 1
    if any(head < len(row) for head, row in zip(heads, schedule, strict=True)):
        _raise_stuck(schedule, heads, done, stages)


def _raise_stuck(schedule: Schedule, heads: list[int], done: set, stages: int) -> None:
    """Every rank that has not ended waits for one that waits as well, so following who waits for whom ends in a circle. Of the
    actions in it, the one that is furthest ahead of its inputs is to blame.
    """
    at = {action: (rank, place) for rank, place, action in _cells(schedule)}
    maker = {product: action for action in at for product in gives(action)}

    def waits(rank: int) -> tuple[Action, Action]:
        """The action at which a rank stands, and the one that it needs."""
        cell = schedule[rank][heads[rank]]
        action, product = next((a, n) for a in parts(cell) for n in reversed(needs(a, stages)) if n not in done)
        return action, maker[product]

    def ahead(rank: int) -> int:
        """How many actions must still run before this one can."""
        open_, found = [n for a in parts(schedule[rank][heads[rank]]) for n in needs(a, stages)], set()
        while open_:
            product = open_.pop()
            if product not in done and product not in found:
                found.add(product)
                open_ += needs(maker[product], stages)
        return len(found)

    circle = [next(rank for rank, row in enumerate(schedule) if heads[rank] < len(row))]
    while circle.count(circle[-1]) == 1:
        circle.append(at[waits(circle[-1])[1]][0])
    circle = circle[circle.index(circle[-1]) + 1 :]
    start = max(range(len(circle)), key=lambda k: (ahead(circle[k]), -heads[circle[k]], -circle[k]))
    rank, *others = circle[start:] + circle[:start]
    action, missing = waits(rank)
    reason = _needs_words(action, missing)
    if others:
        chain = [f"rank {r} stands at {schedule[r][heads[r]]}, which needs {waits(r)[1]}" for r in others]
        reason += f"; {missing} cannot run before: " + ", ".join(chain)
    elif at[missing][1] == heads[rank]:
        reason += f", but {schedule[rank][heads[rank]]} is one action"
    else:
        reason += f", which comes later on this rank, in cell {at[missing][1] + 1}"
    raise IllegalSchedule(schedule, rank, heads[rank], reason, action=action, missing=missing)


def _needs_words(action: Action, missing: Action) -> str:
    """`B3 on stage 1 needs B3 from stage 2`."""
    source = f"from stage {missing.stage}" if missing.stage != action.stage else "of its own stage"
    return f"{action.kind}{action.microbatch} on stage {action.stage} needs {missing.kind}{missing.microbatch} {source}"


def _check_slots(schedule: Schedule, stages: int) -> None:
    """In a figure, columns are time: what an action needs stands in an earlier column."""
    column = {product: place for _, place, action in _cells(schedule) for product in gives(action)}
    maker = {product: action for _, _, action in _cells(schedule) for product in gives(action)}
    for rank, place, action in sorted(_cells(schedule), key=lambda cell: (cell[1], cell[0])):
        for product in reversed(needs(action, stages)):
            if column[product] >= place:
                missing = maker[product]
                reason = f"{_needs_words(action, missing)}, which stands in slot {column[product] + 1}"
                raise IllegalSchedule(schedule, rank, place, reason, action=action, missing=missing)


def _check_memory(schedule: Schedule, forward_only: bool, limit: float | None, after_input: float) -> None:
    """What a rank holds never falls below nothing, ends at nothing, and stays within the limit."""
    if forward_only:
        return
    change = {"F": 1.0, "B": -1.0, "I": after_input - 1.0, "W": -after_input}
    for rank, row in enumerate(schedule):
        held = Counter()
        total = 0.0
        for place, cell in enumerate(row):
            for action in parts(cell):
                key = action.stage, action.microbatch
                held[key] += change[action.kind]
                total += change[action.kind]
                if held[key] < -1e-9:
                    raise IllegalSchedule(schedule, rank, place, f"{action} frees what its stage does not hold", action=action)
                if limit is not None and action.kind == "F" and total > limit + 1e-9:
                    reason = f"{action} makes rank {rank} hold {total:g} activations; the limit is {limit:g}"
                    raise IllegalSchedule(schedule, rank, place, reason, action=action)
        assert abs(total) < 1e-6, f"rank {rank} still holds {total}"  # every F has its B, so this cannot be
