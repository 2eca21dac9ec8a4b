"""Room for what arrives before it is added, kept from one call to the next.

Fresh memory costs a page fault for each 4 KiB, at its first touch: for a ring that is a tenth of the whole time. So a real rank's
communicator keeps the last few buffers it used, and the next call finds them warm. Small buffers come from the allocator's own
store and need no such care; simulated ranks, of which there may be hundreds, keep nothing.

    kept  <=  MOST_KEPT * (bytes of the largest segment)   a communicator

Reference: Tezuka et al. 1998, "Pin-down cache": buffers of communication are worth keeping.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["scratch"]

LEAST_BYTES = 128 * 2**10  # below this malloc has warm memory at hand
MOST_KEPT = 8


@contextmanager
def scratch(comm, like: torch.Tensor, count: int) -> Iterator[list[torch.Tensor]]:
    """`count` buffers of the shape and dtype of `like` (flat), with undefined contents. They go back at the end of the block.

    After an exception they do not: a message may still be on its way into them.
    """
    if comm.simulated or like.device.type != "cpu" or like.nbytes < LEAST_BYTES:
        yield [torch.empty_like(like) for _ in range(count)]
        return
    spare = vars(comm).setdefault("_spare", [])
    rooms = [_room(spare, like.nbytes) for _ in range(count)]
    yield [room[: like.nbytes].view(like.dtype) for room in rooms]
    spare.extend(rooms[: max(0, MOST_KEPT - len(spare))])


def _room(spare: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    """A kept buffer that is large enough and not far too large, else a fresh one. Two threads may ask at once."""
    while spare:
        try:
            room = spare.pop()
        except IndexError:
            break
        if nbytes <= room.numel() <= 2 * nbytes:
            return room
    with torch.inference_mode(False):  # one made in inference mode could not be used outside
        return torch.empty(nbytes, dtype=torch.uint8)
