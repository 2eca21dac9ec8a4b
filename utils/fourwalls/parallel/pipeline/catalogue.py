"""All schedules by name, with what each of them wants: so that a bench, a widget or a test can go through the list.

    build("interleaved", 4, 8, chunks=2)  =  interleaved_one_f_one_b(4, 8, 2)

Reference: the modules that make them.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from .actions import Schedule
from .fill import fill
from .interleaved import interleaved_one_f_one_b, looped_breadth_first
from .schedules import forward_only, gpipe, naive, one_f_one_b
from .simulate import Times
from .v_shape import dualpipe_v, zb_v
from .zero_bubble import zb_h1, zb_h2

__all__ = ["SCHEDULES", "Entry", "build"]


@dataclass(frozen=True)
class Entry:
    """make: (ranks, microbatches, chunks, times, limit, after_input) -> schedule.  title: as a picture names it.

    chunks: stages on a rank, or None where any number will do.  split: whether B comes as I and W.  least: the fewest
    micro-batches for so many ranks.
    """

    title: str
    make: Callable[..., Schedule]
    chunks: int | None = 1
    split: bool = False
    least: Callable[[int], int] = lambda ranks: 1
    forward_only: bool = False

    def stages(self, ranks: int, chunks: int = 2) -> int:
        """Stages in all, of which `chunks` stand on each rank if the schedule leaves the choice."""
        return ranks * (self.chunks or chunks)


def _plain(function: Callable, **options) -> Callable:
    return lambda ranks, microbatches, *_: function(ranks, microbatches, **options)


def _looped(function: Callable) -> Callable:
    return lambda ranks, microbatches, chunks, *_: function(ranks, microbatches, chunks)


def _fill(ranks: int, microbatches: int, _, times: Times, limit: float | None, after_input: float) -> Schedule:
    return fill(ranks, microbatches, limit, times=times, after_input=after_input)


SCHEDULES: dict[str, Entry] = {
    "naive": Entry("naive", _plain(naive)),
    "gpipe": Entry("GPipe", _plain(gpipe)),
    "1f1b": Entry("1F1B", _plain(one_f_one_b)),
    "1f1b-doubled": Entry("1F1B, doubled warm-up", _plain(one_f_one_b, doubled=True)),
    "interleaved": Entry("interleaved 1F1B", _looped(interleaved_one_f_one_b), chunks=None),
    "breadth-first": Entry("looped breadth-first", _looped(looped_breadth_first), chunks=None),
    "zb-h1": Entry("ZB-H1", _plain(zb_h1), split=True),
    "zb-h2": Entry("ZB-H2", _plain(zb_h2), split=True),
    "zb-v": Entry("ZB-V", _plain(zb_v), chunks=2, split=True),
    "fill": Entry("filled by cost", _fill, split=True),
    "dualpipe-v": Entry("DualPipe-V", _plain(dualpipe_v), chunks=2, split=True, least=lambda ranks: 2 * ranks),
    "forward-only": Entry("forward only", lambda r, m, c, *_: forward_only(r, m, chunks=c), chunks=None, forward_only=True),
}


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 2,
    times: Times | None = None,
    limit: float | None = None,
    after_input: float = 1.0,
) -> Schedule:
    """The schedule of that name. chunks: only where it leaves the choice; times, limit, after_input: only "fill" looks at them.

    ValueError for a name that there is not, with close ones, and for sizes that the schedule refuses.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        close = difflib.get_close_matches(str(name), SCHEDULES, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no schedule named {name!r}{hint} Known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name].make(ranks, microbatches, chunks, times or Times(), limit, after_input)
