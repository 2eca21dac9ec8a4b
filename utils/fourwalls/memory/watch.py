"""The ledger's two eyes: a dispatch mode that sees every operation, and hooks that see every tensor put aside for backward.

An operation shows which storages are new and which are written; who called it tells whether a storage is a buffer of a message.
What autograd gets in place of a saved tensor is an object of ours, whose end is the moment from which backward no longer needs
the tensor.

    operation -> storages born, read, written        saved tensor -> held from pack until the node is done

Reference: torch.utils._python_dispatch; torch.autograd.graph.saved_tensors_hooks.
"""

import os
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .story import Storage

__all__ = ["Kept", "Watch", "line", "new_storage"]

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_MODELS_MESSAGES = tuple(f"fourwalls.ranks.{name}" for name in ("posts", "simulated", "simulator", "scheduler"))


def line() -> tuple[str, int, str]:
    """(file, line, function) of the nearest frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""


def _caller() -> str:
    """The module that called the operation; torch and dispatch modes between it and us are passed over."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def new_storage(number: int, storage, size: int, moment: int, category: str, where, free) -> Storage:
    """The record of a storage that is alive from `moment` on; free(record) is called at its end."""
    entry = Storage(number, size, moment, category, where, sizes=[(moment, size)])
    entry.guard = weakref.ref(storage, lambda _: free(entry))
    return entry


class Kept:
    """What autograd holds in place of a saved tensor. Its end is the moment from which backward no longer needs it."""

    __slots__ = ("ledger", "storage", "tensor", "version")

    def __init__(self, ledger, tensor: torch.Tensor):
        self.ledger, self.tensor, self.storage = ledger, tensor, ledger._save(tensor)
        self.version = self._versions()

    def _versions(self) -> tuple[int, int]:
        # autograd hands over its own copy of an output, whose counter stands still: there the storage's writes are counted
        own = self.tensor.requires_grad or self.storage is None
        return self.tensor._version, 0 if own else self.storage.writes

    def unpack(self) -> torch.Tensor:
        # with hooks, torch no longer checks this itself
        if self._versions() != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {tuple(self.tensor.shape)}, changed after it was saved for backward"
            )
        return self.tensor

    def __del__(self):
        self.ledger._release(self.storage)


class Watch(TorchDispatchMode):
    """Shows the ledger what each operation reads and makes.

    New storages are temporary until somebody claims or saves them; buffers, where a collective or a transport makes them or
    receives into them. The copies that the simulator makes to model a message belong to no rank and are not counted.
    """

    def __init__(self, ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ledger, caller = self.ledger, _caller()
        message = caller.startswith(("fourwalls.ranks.", "fourwalls.collectives.")) or func.namespace == "c10d"
        models = caller.startswith(_MODELS_MESSAGES)
        if not models:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor):
                    ledger._note(leaf, "inputs", 0)  # not seen before: it was made before the block
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.namespace == "c10d":
            named = kwargs or {}
            for place, argument in enumerate(func._schema.arguments):
                if argument.is_write or func._schema.name == "c10d::recv_":  # by place, or by name: `out=`
                    for x in tree_leaves(args[place] if place < len(args) else named.get(argument.name)):
                        self._written(x, message)
        if not models:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    ledger._note(leaf, "buffers" if message else "temporary", ledger._clock + 1)
            ledger._look_again()
            ledger._tick(func.name().removeprefix("aten::"))
        return out

    def _written(self, x, message: bool) -> None:
        if isinstance(x, torch.Tensor):
            entry = self.ledger._note(x, "inputs", 0)
            if entry is not None:
                entry.writes += 1
                if message and entry.category == "temporary":
                    entry.category = "buffers"
