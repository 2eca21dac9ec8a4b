"""What a recomputed block must not do, watched while it runs the first time: each breach gives wrong gradients and no error.

Autograd notices a saved tensor that was changed by comparing version counters, but not of tensors that go through hooks, and a
recomputed block saves all its tensors through hooks. So a dispatch mode looks at each operation instead: what it writes, and
which generator it draws from.

    allowed:  an operation writes to a storage  =>  nothing of it was saved before, and it is no input

Reference: torch.utils._python_dispatch; PyTorch's notes on in-place correctness checks.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Rules", "inputs_unchanged"]


def inputs_unchanged(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """RuntimeError where the block has written to one of its inputs: run again, it would start from something else."""
    for x, version in zip(tensors, versions, strict=True):
        if x._version != version:
            raise RuntimeError(
                f"the block changes its input in place ({str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}), so it cannot be "
                "run again from it; let it work on a copy: x = x.clone()"
            )


class Rules(TorchDispatchMode):
    """`with Rules(inputs, generators): block()`; `saved(x)` for each tensor that is saved. generators None: draw from any."""

    def __init__(self, tensors: list[torch.Tensor], generators: list[torch.Generator] | None):
        super().__init__()
        self._generators = generators
        self._saved: dict[int, weakref.ref] = {}  # living storages of saved tensors, by address

    def saved(self, x: torch.Tensor) -> None:
        if x.layout == torch.strided:
            storage = x.untyped_storage()
            key = storage._cdata
            self._saved[key] = weakref.ref(storage, lambda ref: self._saved.get(key) is ref and self._saved.pop(key))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.is_write:  # out= comes by name
                    for x in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                        self._may_write(func, x)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._may_draw(func, value)
        return func(*args, **kwargs)

    def _may_write(self, func, x) -> None:
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.untyped_storage()._cdata in self._saved:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{_name(func)} writes to {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, which an operation before it "
                "in the block has saved for backward; use the form that makes a new tensor"
            )

    def _may_draw(self, func, generator) -> None:
        if self._generators is not None and all(g._cdata != generator._cdata for g in self._generators):
            raise RuntimeError(
                f"{_name(func)} draws from a generator that checkpoint does not know, so the second run would draw "
                "other numbers; name it: checkpoint(function, ..., generators=[generator])"
            )


def _name(func) -> str:
    return func.name().removeprefix("aten::").partition(".")[0]
