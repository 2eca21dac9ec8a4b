"""The random state of a block: taken before it runs, put back when it runs again, kept only if the block drew.

A dropout that draws another mask the second time gives gradients of a function that was never evaluated, and no error. So the
states of all generators that a block may draw from belong to its inputs.

    second run == first run   <=>   same inputs and same random state

Reference: torch.Generator.get_state; a CPU's generator (mt19937) has a state of 5,056 bytes, a CUDA device's 16.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["RandomState"]


def default_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """The CPU's generator and those of the CUDA devices on which `tensors` lie (that path was never run here)."""
    devices = sorted({x.device.index for x in tensors if x.device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[k] for k in devices)]


class RandomState:
    """States of the default generators and of `generators`, as they are now."""

    def __init__(self, tensors: Iterable[torch.Tensor], generators: Iterable[torch.Generator] = ()):
        own = list(generators)
        for g in own:
            if not isinstance(g, torch.Generator):
                raise ValueError(f"generators holds a {type(g).__name__}; each is a torch.Generator")
        self.generators = list({g._cdata: g for g in default_generators(tensors) + own}.values())  # each once
        self._taken = [_copy(g.get_state()) for g in self.generators]

    def forget_if_unused(self) -> None:
        """After the block: let go of the states of generators that nobody drew from."""
        used = [k for k, g in enumerate(self.generators) if _bytes(self._taken[k]) != _bytes(g.get_state())]
        self._taken = [self._taken[k] for k in used]
        self.generators = [self.generators[k] for k in used]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the generators are as they were when the block ran; after, as they are now."""
        now = [g.get_state() for g in self.generators]
        for g, state in zip(self.generators, self._taken, strict=True):
            g.set_state(state)
        try:
            yield
        finally:
            for g, state in zip(self.generators, now, strict=True):
                g.set_state(state)


def _copy(state: torch.Tensor) -> torch.Tensor:
    """The same bytes in a tensor made by an operation, so that a ledger sees it being born."""
    made = torch.empty(state.shape, dtype=state.dtype)
    np.copyto(np.from_dlpack(made), np.from_dlpack(state))
    return made


def _bytes(state: torch.Tensor) -> bytes:
    return np.from_dlpack(state).tobytes()  # no operation, so nobody who counts operations sees it
