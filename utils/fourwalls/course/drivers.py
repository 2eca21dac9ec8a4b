"""What runs on the learner's side of a check: it calls what the learner wrote, and gives back plain data. It knows no answer.

    driver(comm, {name: function}, *inputs) -> plain data

Reference: course/judge.py, which names these functions.
"""

import contextlib
import ctypes

import torch

__all__ = ["call", "give_back_pages", "inputs_after", "pure", "rehearse", "run_stage"]


def call(comm, functions, *inputs):
    """The last of `functions`, as a rank program: function(comm, *inputs)."""
    return list(functions.values())[-1](comm, *inputs)


def give_back_pages():
    """What is weighed from outside must be what is in use: large tensors give their pages back when they die, no page is huge."""
    mmap_threshold, thp_disable = -3, 41  # of mallopt in glibc's malloc.h, of prctl in Linux's prctl.h
    for function, *arguments in (("mallopt", mmap_threshold, 64 * 1024), ("prctl", thp_disable, 1, 0, 0, 0)):
        with contextlib.suppress(AttributeError, OSError):
            getattr(ctypes.CDLL(None), function)(*arguments)


def pure(comm, functions, *inputs):
    """The last of `functions`, which needs no ranks: function(*inputs)."""
    return list(functions.values())[-1](*inputs)


def rehearse(comm, functions):
    """One message round a ring: what a first run imports, on both sides, is there before the first check."""
    x = torch.zeros(1)
    comm.exchange(x, (comm.rank + 1) % comm.size, torch.empty_like(x), (comm.rank - 1) % comm.size)


def inputs_after(comm, functions, *inputs):
    """[what the last of `functions` returned, the inputs as it left them]."""
    return [list(functions.values())[-1](comm, *inputs), list(inputs)]


def run_stage(comm, functions, actions, weight, inputs, index, stages):
    """The last of `functions` as execute(actions, stage, comm) on one stage tanh(x W); the gradient of W. F takes 1 s, B 2 s."""
    stage = _Stage(comm, weight, inputs, index, stages)
    list(functions.values())[-1](list(actions), stage, comm)
    return stage.gradient


class _Stage:
    """y = tanh(x W), and the sum of squares behind the last one. Each call is recorded as the action that it is."""

    def __init__(self, comm, weight, inputs, index, stages):
        self._comm, self._weight, self._inputs, self._index, self._stages = comm, weight, inputs, index, stages
        self._kept, self.gradient = {}, weight * 0

    def forward(self, microbatch, x):
        """y of one micro-batch; x None on the first stage."""
        if (x is None) != (self._index == 0):
            raise ValueError(f"stage {self._index} of {self._stages}: x is {'None' if x is None else 'given'}")
        with self._comm.compute(f"{self._index}F{microbatch}", seconds=1.0, kind="forward", microbatch=microbatch):
            x = self._inputs[microbatch] if x is None else x.clone()
            y = (x @ self._weight).tanh()
        self._kept[microbatch] = x, y
        return y.clone()

    def backward(self, microbatch, dy):
        """dx of one micro-batch; dy None on the last stage."""
        if (dy is None) != (self._index == self._stages - 1):
            raise ValueError(f"stage {self._index} of {self._stages}: dy is {'None' if dy is None else 'given'}")
        if microbatch not in self._kept:
            raise ValueError(f"stage {self._index}: B{microbatch} before F{microbatch}, or twice")
        with self._comm.compute(f"{self._index}B{microbatch}", seconds=2.0, kind="backward", microbatch=microbatch):
            x, y = self._kept.pop(microbatch)
            inner = (2 * y if dy is None else dy) * (1 - y * y)
            self.gradient = self.gradient + x.T @ inner
            return inner @ self._weight.T
