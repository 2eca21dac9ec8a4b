"""Error feedback: what compression leaves out of one message is added to the next one.

A compressed sum loses a little each time. Each rank keeps what it did not send, its residual, and adds it to its next gradient:
then nothing is lost, it only comes later. Without that the losses add up, and training follows another gradient than its own.

    m = g + e,   sent = C(m),   e' = m - sent        hence   sum of all sent = sum of all g - e,   with a bounded e

Reference: Seide et al. 2014 (1-bit SGD, Interspeech); Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ...collectives import ring
from ...collectives.agree import agree
from ...cost.collectives import collective_cost
from ...cost.hardware import Link
from ...ranks.comm import Comm

__all__ = ["FLOATS", "Compressor"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WIRE = Link("any", 0.0, 1.0)  # bytes do not depend on it


class Compressor(ABC):
    """An all-reduce that sends fewer bytes: `total = scheme(comm, x)`, or `DataParallel(model, comm, all_reduce=scheme)`.

    One object on each rank, used for the whole training.
    feedback     False: forget what was left out (to see what that does)
    shapes       {bucket: shapes of the parameters in it}, for schemes that use the structure (low rank); also to be set later
    all_reduce   f(comm, tensor) -> sum over ranks; the reader's own ring will do. It must take the dtypes that the scheme sends.
    all_gather   f(comm, tensor) -> the stack (n, *shape)
    """

    name = ""

    def __init__(
        self,
        *,
        feedback: bool = True,
        shapes: Mapping[Hashable, Sequence] | None = None,
        all_reduce: Callable = ring.all_reduce,
        all_gather: Callable = ring.all_gather,
    ):
        self.feedback, self.shapes, self.all_reduce, self.all_gather = feedback, dict(shapes or {}), all_reduce, all_gather
        self._memory: dict[Hashable, dict] = {}

    def __call__(
        self,
        comm: Comm,
        x: torch.Tensor,
        *,
        bucket: Hashable = 0,
        op: str = "sum",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Every rank returns about the sum (op="avg": mean) of all ranks' `x`, in its shape and dtype, the same bits everywhere.

        bucket: which tensor this is, the same in every step; each has a residual of its own, so two tensors must not share one.
        None: no gradient (a count, a flag), and summed as it is. out: where the result goes (`x` itself will do).
        One rank, or no element: nothing is sent, and the result is exact. A result that is not finite (NaN or infinity on any
        rank) leaves every residual as it was: whoever skips that step has lost nothing.
        Raises ValueError for other dtypes and operations, or a bucket whose size changes; MismatchError (checks on) where the
        ranks' calls differ. Bytes: `bytes_sent`.
        """
        if bucket is None:
            total = self.all_reduce(comm, x)
            return total if out is None or total is out else out.copy_(total)
        shapes = self._check(x, op, bucket)
        agree(comm, f"{self.name} all_reduce", x, op=op, bucket=str(bucket), shapes=shapes, **self.settings())
        flat = x.detach().reshape(-1)
        if comm.size == 1 or flat.numel() == 0:
            total = flat.clone()
        else:
            state = self._memory.setdefault(bucket, {"numel": flat.numel()})
            message = flat.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True)
            if self.feedback and "residual" in state:
                message += state["residual"]
            total, sent = self.exchange(comm, message, state, shapes, x.dtype)
            if self.feedback and bool(torch.isfinite(total).all()):
                state["residual"] = message.sub_(sent)
            if op == "avg":
                total /= comm.size
        total = total.to(x.dtype).view(x.shape)
        return total if out is None else out.copy_(total)

    @abstractmethod
    def exchange(
        self, comm: Comm, message: torch.Tensor, state: dict, shapes: tuple, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum over ranks of what each sent, what this rank sent), both flat like `message` and in its dtype.

        `message` is not changed. `state` lasts from step to step; `dtype` is that of the gradient.
        """

    @abstractmethod
    def bytes_sent(self, n: int, shape: Sequence[int], *, dtype=torch.float32, shapes=None) -> tuple[int, ...]:
        """Bytes that each of n ranks sends for a tensor of `shape`, when the collectives are rings. Exact."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What all ranks must agree on."""

    def residual(self, bucket: Hashable = 0) -> torch.Tensor | None:
        """What this rank still owes of `bucket`, flat; None before the first message."""
        return self._memory.get(bucket, {}).get("residual")

    def state_bytes(self) -> int:
        """Bytes that this rank keeps from step to step: the price of feedback, 4 a gradient element (8 in float64)."""
        kept = [value for state in self._memory.values() for value in state.values()]
        kept += [part for value in kept if isinstance(value, list) for part in value]
        return sum(value.numel() * value.element_size() for value in kept if isinstance(value, torch.Tensor))

    def reset(self) -> None:
        """Forget everything, as at the start of a training."""
        self._memory.clear()

    def _check(self, x, op, bucket) -> tuple:
        """The shapes of the parameters in `x`, after all that can be refused was refused."""
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            what = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            names = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
            raise ValueError(f"{self.name} of {what}; gradients of {names} can be compressed, others take a plain all_reduce")
        if op not in ("sum", "avg"):
            raise ValueError(f"op is {op!r}; a compressed all_reduce does 'sum' and 'avg'")
        known = self._memory.get(bucket, {}).get("numel", x.numel())
        if known != x.numel():
            raise ValueError(f"bucket {bucket!r} had {known} elements, now {x.numel()}; give every tensor a bucket of its own")
        shapes = tuple(tuple(s) for s in self.shapes.get(bucket, (x.shape,)))
        held = sum(numel_of(s) for s in shapes)
        if held != x.numel():
            raise ValueError(f"shapes of bucket {bucket!r} hold {held} elements, the tensor {x.numel()}; list each one once")
        return shapes


def numel_of(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def ring_bytes(n: int, numel: int, itemsize: int) -> tuple[int, ...]:
    """Bytes that each rank sends in a ring all-reduce of `numel` elements."""
    return collective_cost("all_reduce", "ring", n, numel, WIRE, itemsize=itemsize).bytes_sent


def gather_bytes(n: int, numel: int, itemsize: int) -> tuple[int, ...]:
    """Bytes that each rank sends in a ring all-gather, each rank giving `numel` elements."""
    return ((n - 1) * numel * itemsize,) * n
