"""Bubbles and activations of pipeline schedules in closed form, for equal stages and links that take no time.

The bubble is idle time of a rank. Two shares of it are in use, and papers mix them up: over the ideal time (Narayanan et al.), or
over the total (Qi et al.). F, I and W are the seconds of all that a rank computes for one micro-batch, whatever the number of
stages that it is cut into; B = I + W.

    ideal = m (F + I + W)        bubble of ideal = bubble / ideal        bubble of total = bubble / (ideal + bubble)

Reference: data/published/pipeline_formulas.csv, each row with its source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2;
Qi et al. 2023 (arXiv:2401.10241), table 2; DeepSeek-AI 2024 (arXiv:2412.19437), table 2.
"""

from dataclasses import dataclass

__all__ = ["Bubble", "activations_held", "pipeline_bubble"]

NAMES = ("naive", "gpipe", "1f1b", "1f1b-doubled", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Bubble:
    """seconds: idle time of a rank; ideal: its working time.  held: activations at the peak, in units of a whole rank's share of
    one micro-batch, on the rank that holds most.  messages: that a rank in the middle sends.  formula: of the idle time.
    """

    seconds: float
    ideal: float
    held: float
    messages: int
    formula: str

    @property
    def makespan(self) -> float:
        return self.ideal + self.seconds

    @property
    def of_ideal(self) -> float:
        """Idle over working time."""
        return self.seconds / self.ideal

    @property
    def of_total(self) -> float:
        """Idle over all time."""
        return self.seconds / self.makespan


def pipeline_bubble(
    schedule: str,
    ranks: int,
    microbatches: int,
    *,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    chunks: int = 2,
) -> Bubble:
    """The closed form of a schedule (one of NAMES). ValueError where there is none: see the conditions in the text of each.

    zb-h1, zb-h2: W no longer than I or F, and m >= p (H2: 2 p - 1), idle time between a rank's first and last action.
    zb-v: F = I = W and m >= 2 p - 1, idle time likewise.  dualpipe-v: nothing gained by joining, F = I = W, m >= 2 p.
    interleaved: m a multiple of p.  breadth-first: m >= p.
    """
    if schedule not in NAMES:
        raise ValueError(f"no closed form for {schedule!r}; there is one for {', '.join(NAMES)}")
    for word, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{word} is {value!r}; allowed: a whole number of at least 1, nearest 1")
    p, m, v, f, i, w = ranks, microbatches, chunks, forward, input, weight
    b, looped = i + w, schedule in ("interleaved", "breadth-first")
    if schedule == "interleaved" and m % p:
        raise ValueError(f"interleaved: {m} micro-batches on {p} ranks; nearest with a closed form: {max(1, round(m / p)) * p}")
    least = {"breadth-first": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p - 1, "dualpipe-v": 2 * p}.get(schedule, 1)
    if m < least:
        raise ValueError(f"{schedule}: {m} micro-batches on {p} ranks; the closed form holds from {least} on")
    if schedule in ("zb-v", "dualpipe-v") and not f == i == w:
        raise ValueError(f"{schedule}: F = {f}, I = {i}, W = {w}; the closed form is for F = I = W")
    if schedule in ("zb-h1", "zb-h2") and w > min(f, i):
        raise ValueError(f"{schedule}: W = {w} is longer than F = {f} or I = {i}; the closed form holds up to {min(f, i)}")
    seconds, formula = {
        "naive": ((p - 1) * m * (f + b), "(p - 1) m (F + B)"),
        "interleaved": ((p - 1) * (f + b) / v, "(p - 1)(F + B) / v"),
        "breadth-first": ((p - 1) * (f + b) / v, "(p - 1)(F + B) / v"),
        "zb-h1": ((p - 1) * (f + i - w), "(p - 1)(F + I - W)"),
        "zb-h2": ((p - 1) * (f + i - 2 * w), "(p - 1)(F + I - 2 W)"),
        "zb-v": (0.0, "0"),
        "dualpipe-v": ((p - 1) * (f + 2 * b - 3 * w) / 2, "(p - 1)((F + B) + B - 3 W) / 2"),
    }.get(schedule, ((p - 1) * (f + b), "(p - 1)(F + B)"))
    hops = 2 * v if looped else 4 if schedule in ("zb-v", "dualpipe-v") else 2
    return Bubble(seconds, m * (f + b), activations_held(schedule, p, m, chunks=v), m * hops, formula)


def activations_held(schedule: str, ranks: int, microbatches: int, *, rank: int | None = None, chunks: int = 2) -> float:
    """Activations that a rank holds at its peak, in units of its whole share of one micro-batch; `rank` None: the one with most.

    Interleaved: p (1 + (p - 1) / (p v)) on rank 0, which Korthikanti et al. 2022 use.
    """
    p, m, v = ranks, microbatches, chunks
    if rank is not None and not 0 <= rank < p:
        raise ValueError(f"rank {rank} of {p}; allowed: 0 to {p - 1}")
    r = 0 if rank is None else rank
    table = {
        "naive": 1,
        "gpipe": m,
        "breadth-first": m,
        "1f1b": min(p - r, m),
        "1f1b-doubled": min(2 * (p - r) - 1, m),
        "interleaved": min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) / v,
        "zb-h1": min(p, m),
        "zb-h2": min(2 * p - 1, m),
        "zb-v": min(p, m),
        "dualpipe-v": p + 0.5,
    }
    if schedule not in table:
        raise ValueError(f"no closed form for {schedule!r}; there is one for {', '.join(table)}")
    return table[schedule]
