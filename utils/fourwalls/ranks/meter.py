"""Counts what the operations inside a block do: floating-point operations, and bytes read and written.

A dispatch mode sees every operator of this thread, also those of the backward pass and those on `meta` tensors, so a layer too
large for this machine can be priced without holding it. Products are counted by torch's own formulas, everything else as one
operation an output element; views move nothing.

    bytes = sum over operators of (bytes of the distinct tensors read) + (bytes of the distinct tensors written)

Reference: torch.utils.flop_counter; Williams, Waterman, Patterson, "Roofline", CACM 52 (2009).
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Meter"]


class Meter(TorchDispatchMode):
    """`with Meter() as m:` then m.flops, m.bytes, m.ops. `each(flops, bytes, dtype)` is called for every operator that moves
    data.
    """

    def __init__(self, each: Callable[[int, int, torch.dtype], None] | None = None):
        super().__init__()
        self.flops = self.bytes = self.ops = 0
        self._each = each

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func._overloadpacket in _FREE:
            return out
        written = {id(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if not written:
            return out
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
        elif func._overloadpacket in _COPIES:
            flops = 0
        else:
            flops = sum(t.numel() for t in written.values())
        moved = sum(t.numel() * t.element_size() for t in (*read.values(), *written.values()))
        self.flops += flops
        self.bytes += moved
        self.ops += 1
        if self._each is not None:
            self._each(flops, moved, next(iter(written.values())).dtype)
        return out


_aten = torch.ops.aten
# allocate or look at a tensor, and move nothing
_FREE = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.resize_,
    _aten._local_scalar_dense,
    _aten.detach,
}
# move data and compute nothing
_COPIES = {
    _aten.copy_,
    _aten.clone,
    _aten._to_copy,
    _aten.cat,
    _aten.stack,
    _aten.zeros,
    _aten.zeros_like,
    _aten.ones,
    _aten.ones_like,
    _aten.full,
    _aten.fill_,
    _aten.zero_,
    _aten.index_select,
    _aten.embedding,
    _aten.gather,
}
