"""Several stages on each rank: a micro-batch goes round the ranks v times, and the pipeline fills v times as fast.

Rank r has the stages r, p + r, 2 p + r, ... (its chunks). Interleaved 1F1B works depth first: a round of p micro-batches goes
through all chunks before the next round starts. Looped breadth-first takes all micro-batches through a chunk before the next
chunk; it holds them all, but sends each gradient sum of a chunk only once where data parallelism waits for it.

    bubble of ideal:  (p - 1) / (v m)        messages: v times those of 1F1B        warm-up of rank r: (v - 1) g + 2 (p - 1 - r)

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Lamy-Poirier 2022 (arXiv:2211.05953) for breadth-first.
"""

from .actions import Action, Schedule
from .schedules import whole

__all__ = ["interleaved_one_f_one_b", "looped_breadth_first", "rounds_of", "warm_up_by_formula", "warm_up_by_walking"]


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages a rank, any number of them; one chunk: 1F1B with a doubled warm-up.

    Micro-batches that are no multiple of the ranks go in rounds of nearly equal size (see `rounds_of`).
    """
    whole(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = rounds_of(ranks, microbatches)
    down = [(c, m) for group in rounds for c in range(chunks) for m in group]
    up = [(c, m) for group in rounds for c in reversed(range(chunks)) for m in group]
    rows = []
    for rank in range(ranks):
        warm_up = warm_up_by_formula(ranks, microbatches, chunks, rank)
        row = [Action(c * ranks + rank, "F", m) for c, m in down[:warm_up]]
        for k, (c, m) in enumerate(up):
            if warm_up + k < len(down):
                chunk, forward = down[warm_up + k]
                row.append(Action(chunk * ranks + rank, "F", forward))
            row.append(Action(c * ranks + rank, "B", m))
        rows.append(row)
    return rows


def rounds_of(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches in rounds: as many as ranks go into them, at least one; sizes differ by one at most, larger ones first.

    10 over 4 ranks: 2 rounds of 5. 11: one of 6 and one of 5. 3: one of 3.
    """
    count = max(1, microbatches // ranks)
    ends = [0]
    for k in range(count):
        ends.append(ends[-1] + microbatches // count + (k < microbatches % count))
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def warm_up_by_formula(ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """Forward passes of `rank` before it alternates: (v - 1) rounds, and two for each rank that is still behind it."""
    first = len(rounds_of(ranks, microbatches)[0])
    return min((chunks - 1) * first + 2 * (ranks - 1 - rank), microbatches * chunks)


def warm_up_by_walking(ranks: int, microbatches: int, chunks: int) -> list[int]:
    """The same numbers, found and not derived: all passes take a slot, each rank runs forward passes until its first backward
    pass can run, and the last of these already belongs to the pair that alternates.
    """
    whole(ranks=ranks, microbatches=microbatches, chunks=chunks)
    order = [(c, m) for group in rounds_of(ranks, microbatches) for c in range(chunks) for m in group]
    end, clock = {}, [0] * ranks
    heads = [0] * ranks
    while any(head < len(order) for head in heads):
        for rank in range(ranks):
            while heads[rank] < len(order):
                chunk, m = order[heads[rank]]
                stage = chunk * ranks + rank
                if stage and (stage - 1, m) not in end:
                    break
                clock[rank] = max(clock[rank], end.get((stage - 1, m), 0)) + 1
                end[stage, m] = clock[rank]
                heads[rank] += 1
    counts = []
    for rank in range(ranks):
        first_backward = end[chunks * ranks - 1, 0] + (ranks - 1 - rank)  # micro-batch 0 turns on the last stage and comes up
        ends = [when for (stage, _), when in end.items() if stage % ranks == rank]
        counts.append(sum(when < first_backward for when in ends))
    return counts


def looped_breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through a chunk, then through the next; backward passes mirrored, the last micro-batch first."""
    whole(ranks=ranks, microbatches=microbatches, chunks=chunks)
    down = [(c, m) for c in range(chunks) for m in range(microbatches)]
    return [
        [Action(c * ranks + r, "F", m) for c, m in down] + [Action(c * ranks + r, "B", m) for c, m in reversed(down)]
        for r in range(ranks)
    ]
