"""One stage at work: what forward keeps, what backward takes, and what is let go in between.

Forward keeps the stage's input and the graph above it; the output itself is let go once it has been sent, since backward needs
only the graph's edge. Backward runs whole (B), or in two halves (I, then W), or after a second forward pass (recompute), which
sees the same random numbers because every micro-batch has its own.

    F: y = f(x)        B: dx, dW from dy        I: dx from dy        W: dW        random numbers: of (stage, micro-batch)

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2, and Megatron-LM for letting the output go.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.graph import get_gradient_edge

from ...nn.init import name_seed
from .split_backward import Later, splitting

__all__ = ["RunningStage"]


class _Kept:
    """What one micro-batch leaves on a stage between its forward and its backward pass."""

    __slots__ = ("edge", "later", "target", "x")

    def __init__(self, x, target):
        self.x, self.target, self.edge, self.later = x, target, None, None


class RunningStage:
    """Stage `index` of `stages`, run action by action. module: what it computes; loss: on the last stage (output, target) -> a
    scalar, the sum over the micro-batch.

    divide_by: what the loss is divided by; split: kinds I and W will come; recompute: keep inputs alone; seed: None leaves the
    generator of torch alone.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        stages: int,
        *,
        loss: Callable | None = None,
        divide_by: float = 1.0,
        split: bool = False,
        recompute: bool = False,
        seed: int | None = None,
        train: bool = True,
    ):
        self.module, self.index, self.last = module, index, index == stages - 1
        self.loss, self.divide_by, self.split, self.recompute, self.seed = loss, divide_by, split, recompute, seed
        self.train = train
        self._kept: dict[int, _Kept] = {}

    @property
    def holds(self) -> int:
        """Micro-batches that wait here for their backward pass, or for its second half."""
        return len(self._kept)

    def forward(self, microbatch: int, x: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """The output to be sent on, or the last stage's loss; outside any graph."""
        if not self.train:
            with torch.no_grad():
                return self._compute(microbatch, x, target)
        x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) if self.index else x
        kept = self._kept[microbatch] = _Kept(x, target)
        if self.recompute:
            with torch.no_grad():
                return self._compute(microbatch, x, target)
        return self._build(microbatch, kept).detach()

    def backward(self, microbatch: int, kind: str, grad: torch.Tensor | None) -> torch.Tensor | None:
        """B or I: the gradient of the stage's input, or None (the first stage, or an input that has none). W: nothing."""
        kept = self._kept[microbatch]
        if kind == "W":
            kept.later.run()
            del self._kept[microbatch]
            return None
        if self.recompute:
            self._build(microbatch, kept)
        if kept.later is not None:
            kept.later.apart = kind == "I"
        if kept.edge is not None:
            torch.autograd.backward([kept.edge], [grad])
        came = kept.x.grad if kept.x.requires_grad else None
        if self.index and came is None and kept.x.requires_grad:
            came = torch.zeros_like(kept.x)  # the stage does not look at its input
        kept.x = kept.edge = kept.target = None
        if kind == "B":
            del self._kept[microbatch]
        return came if self.index else None

    def _build(self, microbatch: int, kept: _Kept) -> torch.Tensor:
        """Run forward with a graph, and keep the edge from which backward will start."""
        kept.later = Later() if self.split else None
        with torch.enable_grad(), splitting(kept.later) if self.split else nullcontext():
            y = self._compute(microbatch, kept.x, kept.target)
        kept.edge = get_gradient_edge(y) if y.requires_grad else None
        return y

    def _compute(self, microbatch: int, x, target):
        with self._own_random_numbers(microbatch):
            y = self.module(x)
            if not isinstance(y, torch.Tensor):
                raise ValueError(f"stage {self.index} returned a {type(y).__name__}; it takes one tensor and returns one tensor")
            if not self.last or self.loss is None:
                return y
            if target is not None and len(target) != len(y):
                raise ValueError(
                    f"micro-batch {microbatch} on stage {self.index}: {len(y)} rows of outputs meet {len(target)} of targets: "
                    "they are of different micro-batches"
                )
            loss = self.loss(y, target)
            if not isinstance(loss, torch.Tensor):
                raise ValueError(f"the loss is a {type(loss).__name__}; allowed: a tensor, the sum over the micro-batch")
            if loss.dim():
                raise ValueError(f"the loss has shape {tuple(loss.shape)}; allowed: a scalar, the sum over the micro-batch")
            return loss / self.divide_by

    @contextmanager
    def _own_random_numbers(self, microbatch: int):
        """Dropout must not depend on the order in which a schedule runs things, nor on how many ranks there are."""
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(name_seed(self.seed, f"stage {self.index}, micro-batch {microbatch}"))
            yield
