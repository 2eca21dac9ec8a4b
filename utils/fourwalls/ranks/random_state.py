"""torch's random state, kept and put back hundreds of thousands of times: every simulated rank has one, torch has one place.

torch's own way there and back goes over a tensor of 5 KB, twice what the generator holds; those of hundreds of threads do not fit
into a core's cache. So where this process finds the generator's numbers in memory, and sees that copying them there and back is
all there is to it, they are copied; else torch's way is taken.

    mt19937: seed (8 bytes), left (4), seeded (4), next (4), 624 words;  then what the normal distribution has left over

Reference: M. Matsumoto and T. Nishimura, Mersenne Twister, ACM TOMACS 1998; torch's documentation of torch.Generator.
"""

import ctypes
import struct
import threading
from collections.abc import Callable

import torch

from .buffers import take_bytes

__all__ = ["keep_and_put_back"]

_WORDS, _HEAD = 624, 20
_SEARCHED, _TAIL = 4 * 28 + _HEAD, 28  # bytes before the words, at most; bytes behind them
_LEFT_AND_NEXT = struct.Struct("=i4xI").unpack_from
_known: list = []  # what was found out in this process


def keep_and_put_back() -> tuple[Callable, Callable]:
    """keep() -> the state of torch's default CPU generator, put_back(state). A state is for this process only.

    What another thread draws from that generator at the same time is garbage.
    """
    if not _known:
        looking = threading.Thread(target=_look)  # torch's modes, a default device and the like hold for one thread
        looking.start()
        looking.join()
    return _known[0]


def _look() -> None:
    found = _torch_way()
    try:
        place = _place()
        if place and _is_all(*_copies(*place)):
            found = _copies(*place)
    except Exception:  # another torch, in which something is not as it was: then its own way it is
        pass
    _known.append(found)


def _torch_way() -> tuple[Callable, Callable]:
    return torch.default_generator.get_state, torch.default_generator.set_state


def _copies(start: int, nbytes: int) -> tuple[Callable, Callable]:
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(start)).cast("B")
    torch_keep, torch_put_back = _torch_way()

    def keep():
        state = memory.tobytes()
        left, following = _LEFT_AND_NEXT(state, 8)
        if left + following == _WORDS + 1 or (left == 1 and following == 0):
            return state
        return torch_keep()  # another thread draws at this moment; torch's way waits for it

    def put_back(state):
        if state.__class__ is bytes:
            memory[:] = state
        else:
            torch_put_back(state)

    return keep, put_back


def _place() -> tuple[int, int] | None:
    """Where the generator's numbers lie, and how many bytes they are; None if they are not where they used to be."""
    generator = torch.default_generator
    address = getattr(generator, "_cdata", 0)
    words = generator.get_state().view(torch.int64)[3 : 3 + _WORDS].to(torch.int32)
    if not address or len(words) != _WORDS:
        return None
    wanted = take_bytes(words.data_ptr(), words.nbytes)
    at = take_bytes(address, _SEARCHED + len(wanted)).find(wanted)
    return (address + at - _HEAD, _HEAD + len(wanted) + _TAIL) if at >= _HEAD else None


def _is_all(keep: Callable, put_back: Callable) -> bool:
    """Whether a state that was kept brings back the same numbers: of all kinds, in the middle of a block of words, with a normal
    number left over. Torch's generator is as before afterwards.
    """

    def draw():
        kinds = (
            torch.randn(1),
            torch.rand(3),
            torch.randn(1, dtype=torch.float64),
            torch.randperm(7),
            torch.randn(40),
            torch.rand(700),
        )
        return torch.cat([x.double() for x in kinds]), torch.default_generator.get_state()

    before = torch.default_generator.get_state()
    try:
        for few in range(3):  # an odd number of normal ones leaves one over
            torch.default_generator.manual_seed(few)
            torch.randn(few), torch.randn(few, dtype=torch.float64)
            kept, first = keep(), draw()
            torch.default_generator.manual_seed(99)
            torch.randn(1)
            put_back(kept)
            same = all(torch.equal(a, b) for a, b in zip(first, draw(), strict=True))
            if not same or kept.__class__ is not bytes:
                return False
        return True
    finally:
        torch.default_generator.set_state(before)
