"""What simulated ranks print: told apart by thread, and shown like the output of real ranks.

Simulated ranks share one process and so one `sys.stdout`. While they run, a stream stands in its place that asks which rank's
thread writes and keeps the text for it; writing by any other thread passes through.

    what rank r prints  ->  run.outputs[r], and "[rank r] ..." in order of ranks once the run has ended

Reference: contextlib.redirect_stdout, which cannot tell threads apart.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["apart"]


class _Apart(io.TextIOBase):
    def __init__(self, stream, rank_of: Callable[[int], int | None], feed: Callable[[int, bytes], None]):
        self._stream, self._rank_of, self._feed = stream, rank_of, feed

    def write(self, text: str) -> int:
        rank = self._rank_of(threading.get_ident())
        if rank is not None:
            self._feed(rank, text.encode("utf-8", "replace"))
        elif self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def writable(self) -> bool:
        return True


@contextmanager
def apart(rank_of: Callable[[int], int | None], feed: Callable[[int, bytes], None]) -> Iterator[None]:
    """Inside the block, what a thread of rank r writes to stdout or stderr goes to `feed(r, bytes)`.

    rank_of(thread identity) -> rank, or None for a thread that is no rank.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Apart(stream, rank_of, feed) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
