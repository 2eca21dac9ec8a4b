"""How a run went wrong, from many symptoms to one error.

When one rank fails, the others soon fail too, because a connection to it is gone. The first real failure is the one to show;
broken connections are shown only if nothing else is known. What is raised names the rank, what happened to it, and the
learner's own line.

    shown = the earliest failure that is not a broken connection

Reference: signal(7) for what ends a process.
"""

import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from .comm import Call, CommError, DeadlockError, MismatchError, RankError
from .diagnose import (
    MISMATCHES,
    describe,
    explain_deadlock,
    explain_straggler,
    explain_unanswered,
    own_frames,
    render_failure,
)
from .machine import oom_kills
from .places import place

__all__ = ["Failure", "RunInterrupted", "choose", "interrupted", "to_error"]

NAMED = 16  # ranks that an interrupt lists


class RunInterrupted(KeyboardInterrupt):
    """The reader interrupted a run; the text says where each rank was."""

    def _render_traceback_(self):
        return [f"KeyboardInterrupt: {self}"]


@dataclass(frozen=True)
class Failure:
    """One way in which a run failed. `lost`: only a broken connection. `asks`: ranks that should first say where they are."""

    rank: int | None
    kind: str
    message: str
    frames: tuple = ()
    when: int = 0
    lost: bool = False
    asks: tuple = ()
    error: tuple | None = None
    waits: Mapping = field(default_factory=dict)
    others: int = 0
    text: str = ""

    @classmethod
    def reported(cls, report: dict) -> "Failure":
        """What a rank said of itself."""
        keys = ("rank", "kind", "message", "when", "lost", "error", "text")
        return cls(**{k: report[k] for k in keys}, frames=tuple(map(tuple, report["frames"])))

    @classmethod
    def ended(cls, rank: int, status: int, where: bytes, oom_before: int | None) -> "Failure":
        """A process that ended without an answer. `where`: what faulthandler printed, if it could."""
        frames = tuple(frames_of(where.decode(errors="replace")))
        now = time.perf_counter_ns()
        if os.WIFSIGNALED(status):
            name = (
                signal.Signals(os.WTERMSIG(status)).name
                if os.WTERMSIG(status) in list(signal.Signals)
                else f"signal {os.WTERMSIG(status)}"
            )
            why = _MEANING.get(name, "")
            if name == "SIGKILL":
                after = oom_kills()
                if oom_before is not None and after is not None and after > oom_before:
                    why = "out of memory: the kernel has just killed a process of this group for it"
            return cls(rank, name, f"was killed by {name}" + (f" ({why})" if why else ""), frames, now)
        code = os.WEXITSTATUS(status)
        return cls(
            rank,
            "exit",
            f"ended its process (exit code {code}) before its program returned; a program ends with return",
            frames,
            now,
        )

    @classmethod
    def refused(cls, rank: int, number: int) -> "Failure":
        words = f"could not be started: {os.strerror(number)}; are there too many processes, or too little memory?"
        return cls(rank, "lost", words, when=time.perf_counter_ns())

    @classmethod
    def left(cls, rank: int) -> "Failure":
        return cls(rank, "exit", "ended its process after an earlier program had returned", when=time.perf_counter_ns())

    @classmethod
    def vanished(cls, rank: int) -> "Failure":
        return cls(
            rank,
            "lost",
            "was lost: the fork server that had started it has ended; is this machine out of memory?",
            when=time.perf_counter_ns(),
        )

    @classmethod
    def deadlock(cls, waits: Mapping[int, Call], finished: Collection[int], pending: list[Call]) -> "Failure":
        return cls(min(waits), "deadlock", explain_deadlock(waits, finished, pending), waits=dict(waits))

    @classmethod
    def unanswered(cls, calls: list[Call]) -> "Failure":
        return cls(calls[0].rank if calls else None, "unanswered", explain_unanswered(calls))

    @classmethod
    def straggler(cls, ranks: list[int], seconds: float, others: int) -> "Failure":
        return cls(ranks[0], "timeout", f"{seconds:g}", asks=tuple(ranks), others=others)

    @classmethod
    def stalled(cls, call: Call, seconds: float) -> "Failure":
        text = f"a message has been on its way for more than {seconds:g} s, though both sides have called (timeout=)"
        return cls(call.rank, "stalled", f"{text}\n  {describe(call)}")

    @classmethod
    def limit(cls, ranks: list[int], seconds: float) -> "Failure":
        return cls(ranks[0] if ranks else None, "limit", f"{seconds:g}", asks=tuple(ranks))

    def at(self, where: Mapping[int, str], stopped: Collection[int] = ()) -> "Failure":
        """The verdict with the places at which the blamed ranks are; `stopped`: those whose processes a signal holds."""
        places = {r: place(*frames[0]) if (frames := frames_of(text)) else "" for r, text in where.items()}
        if self.kind == "timeout":
            text = "\n".join(
                explain_straggler(
                    r, float(self.message), self.others, places[r], native=_in_torchs_own(where[r]), stopped=r in stopped
                )
                for r in self.asks
            )
        else:
            held = " (its process is stopped: SIGSTOP, or a debugger)"
            rows = [f"  rank {r} was at {places[r] or 'an unknown line'}{held if r in stopped else ''}" for r in self.asks]
            text = "\n".join([f"the run was not over after {self.message} s (limit=); still at work:", *rows])
        return replace(self, message=text, asks=())


_MEANING = {
    "SIGKILL": "out of memory?",
    "SIGSEGV": "a crash in compiled code",
    "SIGBUS": "a crash in compiled code, or no room in shared memory",
    "SIGABRT": "compiled code gave up; with torch's own collectives: do all ranks pass the same sizes? Else run with checks=True",
    "SIGFPE": "a crash in compiled code",
    "SIGILL": "an instruction this processor lacks",
}


def frames_of(dump: str) -> list[tuple[str, int, str]]:
    """The learner's frames, innermost first, of what faulthandler printed."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', dump.rpartition("most recent call first")[2])
    return [(f, n, name) for f, n, name in own_frames([(f, int(n), name) for f, n, name in found])]


def _in_torchs_own(dump: str) -> bool:
    """Whether faulthandler found the rank inside torch.distributed."""
    return "/torch/distributed/" in dump.rpartition("most recent call first")[2].replace(os.sep, "/")


def choose(failures: Mapping[int, Failure], ranks: int) -> Failure:
    """The failure to show: the earliest real one; of several that are alike, the lowest rank's."""
    real = [f for f in failures.values() if not f.lost]
    first = min(real or failures.values(), key=lambda f: f.when)
    alike = [f for f in real or failures.values() if (f.kind, f.frames[-1:]) == (first.kind, first.frames[-1:])]
    return min(alike, key=lambda f: f.rank)


def to_error(failure: Failure, failures: Mapping[int, Failure], ranks: int) -> CommError:
    """The exception for the reader."""
    if failure.kind == "deadlock" and failure.waits:
        return DeadlockError(failure.message, rank=failure.rank, waits=dict(failure.waits))
    if failure.kind in ("timeout", "limit", "stalled"):
        return RankError(failure.message, rank=failure.rank, kind=failure.kind)
    if failure.kind == "unanswered":
        return CommError(failure.message, rank=failure.rank)
    if failure.error is not None:
        return _own_error(failure)
    if failure.kind.startswith("SIG") or failure.kind in ("exit", "lost"):
        frame = [f"  at {place(*failure.frames[0])}"] if failure.frames else []
        text = "\n".join([f"rank {failure.rank} {failure.message}", *frame])
    else:
        text = render_failure(failure.rank, ranks, failure.kind, failure.message, failure.frames)
    alike = sorted(
        f.rank
        for f in failures.values()
        if f.rank != failure.rank and f.kind == failure.kind and f.frames[-1:] == failure.frames[-1:]
    )
    if alike and not failure.lost:
        text += f"\n  (and the same on rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))})"
    first = {failure.rank: failure.text or failure.message}
    rest = {r: f.text or f.message for r, f in sorted(failures.items()) if r != failure.rank}
    return RankError(text, rank=failure.rank, kind=failure.kind, errors={**first, **rest})


def interrupted(ranks: int, waits: Mapping[int, Call], frames: Mapping[int, list]) -> RunInterrupted:
    """The KeyboardInterrupt that says where each rank was: what it waited for, or its frames (file, line, function)."""
    rows = []
    for rank in range(min(ranks, NAMED)):
        if rank in waits:
            rows.append(f"  {describe(waits[rank])}, waiting")
        elif frames.get(rank):
            rows.append(f"  rank {rank}: at {place(*frames[rank][-1])}")
        else:
            rows.append(f"  rank {rank}: at an unknown line")
    if ranks > NAMED:
        rows.append(f"  ... and {ranks - NAMED} more")
    return RunInterrupted("\n".join(["the run was interrupted; the ranks were", *rows]))


def _own_error(failure: Failure) -> CommError:
    """A CommError that was raised in a rank: the same kind, its calls named as they read here."""
    name, state = failure.error
    calls = state.get("calls", ())
    text = MISMATCHES[state["about"]](*calls) if calls else failure.message
    kind = {"MismatchError": MismatchError, "DeadlockError": DeadlockError, "RankError": RankError}.get(name, CommError)
    rows = [] if calls else [f"  at {place(*frame)}" for frame in failure.frames]
    return kind("\n".join([text, *rows]), rank=state.get("rank", failure.rank))
