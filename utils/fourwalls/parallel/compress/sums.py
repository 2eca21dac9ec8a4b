"""Narrower numbers on the wire: bfloat16 and int8, summed by any all-reduce that can add them.

bfloat16 keeps the range of float32 and 8 of its 24 bits, so a sum cannot overflow that would not overflow anyway. An int8 holds
-127 to 127 and so must the *sum of n of them*, partial sums included: either every rank keeps to 127 // n levels (1 byte an
element), or the sums travel in int16 and every rank has all 127 levels up to 258 ranks (2 bytes). Levels mean something only if
all ranks use the same scale, so that is agreed on first.

    s = max over ranks of max |m|,   q = round(m / s * L),   L = min(127, largest // n),   sum = (q_0 + ... + q_(n-1)) / L * s

Reference: Alistarh et al. 2017 (QSGD, arXiv:1610.02132) for quantised gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .feedback import Compressor, gather_bytes, numel_of, ring_bytes

__all__ = ["Bfloat16", "Int8"]


class Bfloat16(Compressor):
    """Half the bytes of float32. Each addition on the way rounds to 8 bits; feedback returns a rank's own rounding, not those."""

    name = "bfloat16"

    def exchange(self, comm, message, state, shapes, dtype):
        sent = message.to(torch.bfloat16)
        return self.all_reduce(comm, sent).to(message.dtype), sent.to(message.dtype)

    def bytes_sent(self, n, shape, *, dtype=torch.float32, shapes=None):
        """A ring all-reduce of 2-byte elements: about 2 (n-1)/n 2 N."""
        return ring_bytes(n, numel_of(shape), 2)

    def settings(self) -> dict[str, Any]:
        return {}


class Int8(Compressor):
    """A quarter of the bytes of float32 (wide: half).

    block   elements that share a scale; None: one scale for the tensor. One large element ruins the others of its block only.
    wide    sums in int16: 127 levels instead of 127 // n
    """

    name = "int8"

    def __init__(self, *, block: int | None = None, wide: bool = False, **options):
        if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 1):
            raise ValueError(f"block is {block!r}; a whole number of elements from 1 on, or None for one scale for the tensor")
        super().__init__(**options)
        self.block, self.wide = block, wide
        self.dtype = torch.int16 if wide else torch.int8

    def levels(self, n: int) -> int:
        """Levels on each side of zero, so that a sum of n fits. Raises ValueError where not even one does."""
        largest = torch.iinfo(self.dtype).max
        if n > largest:
            more = f"; use wide=True, good for {torch.iinfo(torch.int16).max} ranks" if not self.wide else ""
            raise ValueError(f"{n} ranks: a sum of {n} numbers of one level does not fit {self.dtype}; {largest} do{more}")
        return min(127, largest // n)

    def exchange(self, comm, message, state, shapes, dtype):
        top, numel = self.levels(comm.size), message.numel()
        width = self.block or numel
        blocks = F.pad(message, (0, -numel % width)).view(-1, width)
        low, high = blocks.aminmax(dim=1)
        scale = self.all_gather(comm, torch.maximum(high, -low)).amax(0).unsqueeze(1)  # (blocks, 1), agreed; NaN wins
        usable = scale.isfinite() & (scale > 0)
        share = (blocks / torch.where(usable, scale, 1.0)).mul_(top).round_()  # within -top to top
        if not bool(usable.all()):
            share[~usable.squeeze(1)] = 0.0
        q = share.to(self.dtype)
        total = F.pad(self.all_reduce(comm, q.view(-1)[:numel]), (0, -numel % width)).view_as(q)
        scale = torch.where(scale.isfinite(), scale, torch.nan)  # a NaN or infinity in a block makes that block's sum NaN
        return ((each.to(message.dtype) / top * scale).view(-1)[:numel] for each in (total, q))

    def bytes_sent(self, n, shape, *, dtype=torch.float32, shapes=None):
        """An all-gather of the scales, then a ring all-reduce of 1-byte (wide: 2-byte) elements."""
        numel = numel_of(shape)
        scales = -(-numel // (self.block or max(numel, 1)))
        wide = 8 if dtype == torch.float64 else 4
        both = zip(gather_bytes(n, scales, wide), ring_bytes(n, numel, self.dtype.itemsize), strict=True)
        return tuple(a + b for a, b in both)

    def settings(self) -> dict[str, Any]:
        return {"block": self.block, "wide": self.wide}
