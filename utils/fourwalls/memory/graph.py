"""The graph of operations of a step, recorded while it runs: each operation, what it reads, what it makes.

A dispatch mode sees the operations below autograd, so forward and backward are one list. Tensors are noted as views of numbered
storages ("buffers"), which is what memory is about; to run the list again needs nothing else.

    operation k:  (function, arguments with tensors replaced by (buffer, dtype, size, stride, offset))

Reference: torch.utils._python_dispatch; the idea of a recorded tape goes back to Wengert 1964.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Graph", "Op", "Ref", "record_graph", "view_of"]


class Ref(NamedTuple):
    """A tensor of the recording: a view of a buffer."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements


class Op:
    """One operation. fresh: buffers that it makes. reads: all buffers among its arguments. random: the state it drew from."""

    def __init__(self, func, leaves: list, spec, outputs: list, fresh: set[int], random: torch.Tensor | None):
        self.func, self.leaves, self.spec, self.outputs, self.fresh, self.random = func, leaves, spec, outputs, fresh, random
        self.reads = {leaf.buffer for leaf in leaves if isinstance(leaf, Ref)}

    def arguments(self, tensor: Callable[[Ref], torch.Tensor]) -> tuple[tuple, dict]:
        """(args, kwargs), each Ref replaced by tensor(ref)."""
        return tree_unflatten([tensor(leaf) if isinstance(leaf, Ref) else leaf for leaf in self.leaves], self.spec)

    def pairs(self, out) -> Iterator[tuple[Ref, torch.Tensor]]:
        """(recorded output, what came out now)."""
        for ref, made in zip(self.outputs, tree_leaves(out), strict=True):
            if ref is not None:
                yield ref, made


class Graph:
    """ops in order; bytes, born, last of each buffer by number; made: those that operations made; outside: storages that were
    there before; answers: the recorded results, as Refs, and results: their buffers.
    """

    def __init__(self):
        self.ops: list[Op] = []
        self.bytes: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.answers: list[Ref] = []

    @property
    def made(self) -> list[int]:
        return [k for k in self.bytes if k not in self.outside]

    @property
    def results(self) -> set[int]:
        return {ref.buffer for ref in self.answers}


class _Recorder(TorchDispatchMode):
    """Fills a graph. Storages are kept alive while it records, so that an address is never used twice."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.numbers, self.alive = graph, {}, []

    def ref(self, x, *, new: bool = False):
        if not isinstance(x, torch.Tensor):
            return x
        storage, graph = x.untyped_storage(), self.graph
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = self.numbers[storage._cdata] = len(self.numbers)
            self.alive.append(storage)
            graph.bytes[number], graph.born[number] = storage.nbytes(), len(graph.ops)
            if not new:
                graph.outside[number] = storage
        graph.last[number] = len(graph.ops)
        return Ref(number, x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, spec = tree_flatten((args, kwargs or {}))
        leaves = [self.ref(leaf) for leaf in leaves]
        known = len(self.numbers)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        random = torch.default_generator.get_state() if draws else None
        out = func(*args, **(kwargs or {}))
        outputs = [self.ref(x, new=True) if isinstance(x, torch.Tensor) else None for x in tree_leaves(out)]
        self.graph.ops.append(Op(func, leaves, spec, outputs, set(range(known, len(self.numbers))), random))
        return out


def record_graph(step: Callable[[], Sequence[torch.Tensor]]) -> Graph:
    """The graph of step(), whose result is the tensors that must be there at its end (a loss, gradients).

    All its storages stay alive until the recording is over, so record on a small model.
    """
    graph = Graph()
    recorder = _Recorder(graph)
    with recorder:
        answers = list(step())
    graph.answers = [recorder.ref(x) for x in answers]  # one that no operation made was there before
    return graph


def view_of(storage: torch.UntypedStorage, ref: Ref, begin: int) -> torch.Tensor:
    """The tensor `ref` in a storage whose buffer begins at byte `begin` (a multiple of the element's size)."""
    offset = begin // ref.dtype.itemsize + ref.offset
    return torch.empty(0, dtype=ref.dtype).set_(storage, offset, ref.size, ref.stride)
