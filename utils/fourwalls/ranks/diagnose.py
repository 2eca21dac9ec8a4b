"""Who waits for whom: from what ranks report that they wait for, to one message that a learner can act on.

A rank that waits names one peer. Draw an arrow from each waiting rank to its peer: a rank whose arrows lead only to waiting
or finished ranks can never go on (a deadlock), a rank whose arrows lead to one that computes merely waits for a straggler.
Pure functions over `Call`s: the supervisor of real processes and the simulator both speak through them.

    stuck = the largest set of waiting ranks whose peers are all in the set or have finished

Reference: Holt, "Some deadlock properties of computer systems", 1972 (the wait-for graph).
"""

import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Mapping

from .comm import Call
from .places import place

__all__ = [
    "MISMATCHES",
    "blamed",
    "circle",
    "describe",
    "explain_changed",
    "explain_deadlock",
    "explain_failure",
    "explain_forgotten",
    "explain_mismatch",
    "explain_shared",
    "explain_straggler",
    "explain_unanswered",
    "explain_unwaited",
    "message_of",
    "outside",
    "own_frames",
    "render_failure",
    "shorten",
    "stuck",
]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = ("/site-packages/", "/dist-packages/")
SHOWN = 8  # calls that a message lists
MESSAGE_CHARACTERS = 64 * 1024  # of an exception's message that are kept


def stuck(waits: Mapping[int, Call], finished: Collection[int] = ()) -> set[int]:
    """The ranks that can never go on. `waits`: rank -> its Call, only waits that nobody has answered yet.

    A rank that is neither in `waits` nor in `finished` is at work, and may still answer.
    """
    remaining = set(waits)
    while True:
        free = {r for r in remaining if (p := waits[r].peer) is not None and p not in remaining and p not in finished}
        if not free:
            return remaining
        remaining -= free


def circle(waits: Mapping[int, Call], among: Collection[int] | None = None) -> list[int]:
    """Ranks that wait for each other in a ring, the smallest first: [0, 1] means 0 -> 1 -> 0. [] if there is none."""
    among = set(waits) if among is None else set(among)
    for start in sorted(among):
        path, rank = [], start
        while rank in among and rank not in path:
            path.append(rank)
            rank = waits[rank].peer
        if rank in path:
            ring = path[path.index(rank) :]
            first = ring.index(min(ring))
            return ring[first:] + ring[:first]
    return []


def blamed(waits: Mapping[int, Call], finished: Collection[int] = ()) -> set[int]:
    """The ranks at the ends of the arrows: at work, while everybody in `waits` waits for them, directly or through others."""
    ends = set()
    for start in waits:
        seen, rank = set(), start
        while rank in waits and rank not in seen:
            seen.add(rank)
            rank = waits[rank].peer
        if rank is not None and rank not in waits and rank not in finished:
            ends.add(rank)
    return ends


def describe(call: Call) -> str:
    """One call in words: `rank 2: recv(from 1, float32 (4,)) at In [7] line 3 in program: comm.recv(buf, left)`."""
    bare = Call(call.rank, call.op, call.peer, call.tag, call.shape, call.dtype)
    where = f" at {place(call.file, call.line, call.function)}" if call.file else ""
    return f"rank {call.rank}: {bare}{where}"


def explain_deadlock(waits: Mapping[int, Call], finished: Collection[int] = (), pending: Iterable[Call] = ()) -> str:
    """The whole message: the circle, each stuck rank's call and line, and what would help; of hundreds, the first few.

    `pending`: other calls that were begun (isend, irecv) and that nobody has answered; they show a tag that differs.
    """
    held = stuck(waits, finished) or set(waits)
    ring = circle(waits, held)
    waiting = {r: waits[r] for r in sorted(held)}
    shown = list(dict.fromkeys([*ring[:SHOWN], *waiting]))[:SHOWN]
    lines = [_headline(waiting, ring, finished)]
    lines += [f"  {describe(waiting[r])}" for r in sorted(shown)]
    if len(waiting) > len(shown):
        lines.append(f"  and {len(waiting) - len(shown)} more ranks")
    lines += _advice(waiting, ring, set(finished), list(pending))
    return "\n".join(lines)


def explain_straggler(
    rank: int, seconds: float, others: int, where: str = "", *, native: bool = False, stopped: bool = False
) -> str:
    """For a run that ended because everybody waited for one rank, which was neither finished nor seen to wait.

    native: it was inside torch.distributed. stopped: a signal has stopped its process.
    """
    line = f"rank {rank} kept the others waiting for more than {seconds:g} s"
    line += f"; it was at {where}" if where else ""
    many = "1 other rank waits" if others == 1 else f"{others} other ranks wait"
    advice = "This is no deadlock: it was still at work. If it needs that long, call fw.run(..., timeout=SECONDS)."
    if native:
        advice = "It was inside torch's own collective, whose waits cannot be seen here: has every rank called the same one?"
    if stopped:
        advice = "Its process is stopped: a signal (SIGSTOP, SIGTSTP) or a debugger holds it; SIGCONT lets it go on."
    return f"{line}\n  {many} for it. {advice}"


def explain_failure(rank: int, ranks: int, error: BaseException) -> str:
    """The learner's own error, led by the rank, with the learner's own lines; frames of this library and of torch are left
    out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = own_frames([(f.filename, f.lineno, f.name) for f in frames])
    return render_failure(rank, ranks, type(error).__name__, message_of(error), lines)


def message_of(error: BaseException) -> str:
    """What an exception says, its notes included; nothing that its class does can stop us, and a long text is cut."""
    try:
        text = str(error)
        if isinstance(error, KeyError):
            text = f"key {text} is not there"
        text = "\n".join([text, *map(str, getattr(error, "__notes__", None) or [])])
    except BaseException:
        text = "(its message cannot be shown)"
    return shorten(text)


def shorten(text: str) -> str:
    """The text, or its beginning and a note of how much is left out."""
    more = len(text) - MESSAGE_CHARACTERS
    return text if more <= 0 else f"{text[:MESSAGE_CHARACTERS]}\n... {more:,} more characters are left out"


def render_failure(rank: int, ranks: int, kind: str, message: str, frames: Iterable[tuple[str, int, str]]) -> str:
    """`rank 2 of 4 raised ValueError: ...` and one line per frame, the outermost first."""
    head = f"rank {rank} of {ranks} raised {kind}" + (f": {message}" if message else "")
    return "\n".join([head, *(f"  at {place(*frame)}" for frame in frames)])


def own_frames(frames: Iterable[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The learner's frames of a traceback: this library's left out, Python's and installed packages' too unless nothing else is
    there.
    """
    frames = [f for f in frames if not _absolute(f[0]).startswith(_HERE + os.sep) and not f[0].startswith("<frozen")]
    own = [
        f for f in frames if not f[0].startswith(_PYTHON) and not any(part in f[0].replace(os.sep, "/") for part in _INSTALLED)
    ]
    return own or frames


def _absolute(file: str) -> str:
    try:
        return os.path.abspath(file)
    except OSError:  # the working folder is gone
        return file


def explain_mismatch(first: Call, second: Call) -> str:
    """Two calls that met and do not fit, both sides named; the sender first, whoever of the two came second and noticed."""
    first, second = sorted((first, second), key=lambda call: "send" not in call.op)
    differ = []
    if first.op != second.op and (first.shape is None or second.shape is None):  # not two messages: a barrier, a split
        text = f"the calls differ, {first.op} and {second.op}"
        advice = "Every rank of a communicator must make the same calls in the same order."
        return f"two calls meet and do not fit: {text}\n  {describe(first)}\n  {describe(second)}\n{advice}"
    if first.tag != second.tag:
        differ.append(f"the tags differ, {first.tag} and {second.tag}")
    if first.dtype != second.dtype:
        differ.append(f"the dtypes differ, {first.dtype} and {second.dtype}")
    if first.shape != second.shape:
        differ.append(f"the shapes differ, {first.shape} and {second.shape}")
    what = "; ".join(differ) or "they do not fit"
    return f"two calls meet and do not fit: {what}\n  {describe(first)}\n  {describe(second)}"


def explain_changed(call: Call) -> str:
    """A buffer that was written to between its isend and its wait."""
    return (
        f"a buffer was changed while it was being sent: call wait() before you write to it, or send a clone\n  {describe(call)}"
    )


def explain_shared(first: Call, second: Call) -> str:
    """Two messages of one rank that touch the same memory at the same time."""
    text = (
        "two messages touch the same memory at the same time, so what arrives depends on which is first: wait for one, or clone"
    )
    return f"{text}\n  {describe(first)}\n  {describe(second)}"


def explain_unwaited(calls: Iterable[Call]) -> str:
    """Messages that were begun, and arrived, but whose `wait()` was never called."""
    rows = [f"  {describe(call)}" for call in calls]
    what = (
        "a message was begun but never waited for" if len(rows) == 1 else f"{len(rows)} messages were begun but never waited for"
    )
    return "\n".join(
        [
            f"{what}:",
            *rows[:8],
            *(["  ..."] if len(rows) > 8 else []),
            "Only after wait() is a buffer filled, or free to be changed.",
        ]
    )


def explain_forgotten(*calls: Call) -> str:
    """Jobs that a rank had begun beside its program (`beside.Beside`) and never waited for when the program returned."""
    rank, first = calls[0].rank, calls[0].op.partition(" (")[0]
    many = "a job" if len(calls) == 1 else f"{len(calls)} jobs, the first of them"
    rows = [f"  {c.op}, begun at {place(c.file, c.line, c.function)}" for c in calls[:3]]
    return "\n".join(
        [
            f"rank {rank} has returned, but never waited for what it had begun beside its program: {many} {first}",
            *rows,
            *([f"  and {len(calls) - 3} more"] if len(calls) > 3 else []),
            "Before the program returns (a training step: after backward) wait for them all: dp.synchronise() of DataParallel,",
            "step() of a sharded optimiser, join() of Beside, or what your own function gives back for it.",
        ]
    )


def explain_unanswered(calls: Iterable[Call]) -> str:
    """Messages that were begun and never answered, though every program has returned."""
    rows = [f"  {describe(call)}" for call in calls]
    begun = "a message was begun and never answered" if len(rows) == 1 else f"{len(rows)} messages were begun and never answered"
    return "\n".join(
        [f"all programs have returned, but {begun}:", *rows, "Each isend needs a receive on the other side, each irecv a send."]
    )


def outside() -> int:
    """How many frames above its caller the learner's code stands: the `stacklevel` of a warning that points at their line."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fourwalls"):
        depth, frame = depth + 1, frame.f_back
    return depth


MISMATCHES = {  # by name, as ranks report them
    "differ": explain_mismatch,
    "changed": explain_changed,
    "shared": explain_shared,
    "forgotten": explain_forgotten,
}


_COLLECTIVE = {"barrier", "split"}  # calls of all ranks that name themselves


def _headline(waits: Mapping[int, Call], ring: list[int], finished: Collection[int]) -> str:
    if ring:
        arrows = [*map(str, ring), str(ring[0])]
        if len(ring) > SHOWN:
            arrows = [*arrows[: SHOWN - 1], "...", *arrows[-2:]]
        return f"deadlock: {' -> '.join(arrows)} (each waits for the next), and no wait can end"
    gone = sorted({c.peer for c in waits.values() if c.peer in finished})
    if not gone:
        return f"deadlock: {len(waits)} {'rank waits' if len(waits) == 1 else 'ranks wait'}, and no wait can end"
    who = "rank" if len(gone) == 1 else "ranks"
    return f"deadlock: waiting for {who} {', '.join(map(str, gone))}, which returned without making the matching call"


def _advice(waits: Mapping[int, Call], ring: list[int], finished: set[int], pending: list[Call]) -> list[str]:
    tags = _tags_that_differ([*waits.values(), *pending])
    if tags:
        return tags
    if ring:
        ops = {waits[r].op for r in ring}
        if all("send" in op for op in ops):
            return [
                "All of them send first, and a send waits for its receive. Let even ranks send and odd ranks receive first,",
                "or begin with comm.isend(...) and wait for it after the receive, or use comm.exchange(...) for both.",
            ]
        if all("recv" in op for op in ops):
            return ["All of them receive first, so nobody sends. Somebody must send first: parity order, isend, or exchange."]
        if _answers(waits[ring[0]], waits[ring[-1]]) and len(ring) == 2:
            return ["Their tags agree, so they speak in different communicators: both sides must use the same result of split."]
        if ops & _COLLECTIVE and ops - _COLLECTIVE:
            there, name = ", ".join(str(r) for r in ring if waits[r].op in _COLLECTIVE), " / ".join(sorted(ops & _COLLECTIVE))
            return [
                f"Rank {there} is in {name}, the rest in something else that needs its answer. If that is a",
                "call for all ranks (a sum, a broadcast, forward of a model spread over ranks), every rank must make it.",
            ]
        return [
            "Follow the lines above: in which order must these calls stand so that each send meets its receive?",
            "If one stands in a call for all ranks (a sum, forward of a model spread over ranks), every rank must make that.",
        ]
    gone = sorted({c.peer for c in waits.values() if c.peer in finished})
    calls = sorted({c.op for c in waits.values() if c.peer in finished})
    if not gone:
        return ["Every rank of the communicator must make the same call."]
    who = ", ".join(map(str, gone))
    return [f"Did a branch let rank {who} skip its part of {' / '.join(calls)}? Every rank must make the matching call."]


def _answers(a: Call, b: Call) -> bool:
    """Whether a is a send to b's rank and b a receive from a's rank, or the other way round (tags apart)."""
    return a.peer == b.rank and b.peer == a.rank and ("send" in a.op) == ("recv" in b.op) and ("send" in a.op) != ("send" in b.op)


def _tags_that_differ(calls: list[Call]) -> list[str]:
    for k, a in enumerate(calls):
        for b in calls[k + 1 :]:
            if _answers(a, b) and a.tag != b.tag:
                send, recv = (a, b) if "send" in a.op else (b, a)
                return [
                    f"Rank {send.rank} sends with tag {send.tag}, but rank {recv.rank} asks for tag {recv.tag}: tags must agree."
                ]
    return []
