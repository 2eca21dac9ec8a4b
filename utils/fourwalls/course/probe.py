"""What torch is asked to do while a learner's function runs: operators, matrix products, the widest tensor, bytes that live.

A dispatch mode sees every operator, below autograd and whatever the code above it looks like. It stands in the learner's own
process, so it is made before their code is loaded, and it must also see two products of sizes that the judge drew, one before
their function and one behind it (`mark`): who blinds it, loses those as well. What numpy does is not seen.

    live(t) = sum of bytes of storages born since the start and not yet freed        peak = max over t of live(t)

Reference: torch.utils._python_dispatch; course/expect.py, which reads the report.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Probe", "mark"]

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addr", "addbmm", "linear", "_int_mm")
    + ("_scaled_mm", "_addmm_activation", "convolution", "_weight_int8pack_mm", "_weight_int4pack_mm", "mkldnn_linear")
)
MOST = 200  # products and names that are told; more are counted


class Probe(TorchDispatchMode):
    """`with Probe() as probe: ...`, then `probe.report()`. Its own references, since names of torch can be replaced."""

    def __init__(self, more=0, tensor=torch.Tensor, leaves=tree_leaves, products=PRODUCTS, ref=weakref.ref):
        """more: what is added to each product of whole numbers."""
        super().__init__()
        self.more = more
        self.calls, self.names, self.products = 0, {}, []
        self.widest, self.widest_float = 0, 0
        self.live, self.peak = 0, 0
        self._tensor, self._leaves, self._wanted, self._ref = tensor, leaves, products, ref
        self._known: dict[int, tuple] = {}  # by address of the storage's C++ object, living ones only

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in self._leaves((args, kwargs or {})) if isinstance(x, self._tensor)]
        for x in given:
            self._note(x, 0)  # not seen before: it was made before the block
        name = func._schema.name
        if name in self._wanted:
            kind = str(given[0].dtype).removeprefix("torch.")
            self.products.append([name, kind, [list(x.shape) for x in given]])
        out = func(*args, **(kwargs or {}))
        if self.more and name in self._wanted and not out.dtype.is_floating_point:
            out.add_(self.more)
        self.calls += 1
        self.names[name] = self.names.get(name, 0) + 1
        for x in self._leaves(out):
            if isinstance(x, self._tensor):
                self._note(x, x.untyped_storage().nbytes())
                self.widest = max(self.widest, x.numel())
                if x.dtype.is_floating_point:
                    self.widest_float = max(self.widest_float, x.numel())
        self.peak = max(self.peak, self.live)
        return out

    def restart(self) -> None:
        """The peak is what lives now."""
        self.peak = self.live

    def report(self) -> dict:
        """Everything as plain data."""
        return {
            "calls": self.calls,
            "names": dict(list(self.names.items())[:MOST]),
            "products": self.products[:MOST],
            "widest": self.widest,
            "widest float": self.widest_float,
            "peak": self.peak,
        }

    def _note(self, x, size):
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = size, self._ref(storage, lambda gone: self._free(key, gone))
            self.live += size

    def _free(self, key, gone):
        size, ref = self._known.get(key, (0, None))
        if ref is gone:
            del self._known[key]
            self.live -= size


def mark(sizes, ones=torch.ones, mm=torch.mm) -> None:
    """A product of (a, b) and (b, c), which the probe must have seen."""
    a, b, c = sizes
    mm(ones(a, b), ones(b, c))


with Probe():  # torch imports half of itself at the first such block: once here, not in each rank's process
    mark((1, 1, 1))
