"""A small graph of operators, and for each operator the layouts that it may have: its signatures.

A signature is one row: the layouts of the inputs, and what then comes out, on every rank by the same local operator. What is not
in the table is illegal: a nonlinear operator on parts of a sum, a norm over a dim that is cut, a cut that does not divide.

    matmul (s, k) (k, n):   split(0) copied -> split(0)      copied split(1) -> split(1)      split(1) split(0) -> partial

Reference: Yuan et al. 2021, OneFlow (arXiv:2110.15032), Table 1 (the signatures of a product).
"""

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .layouts import ALIKE, COPIED, PARTIAL, Layout, divides, is_cut, local_shape, split

__all__ = ["KINDS", "Graph", "Op", "Signature", "Tensor", "legal_signatures", "passes_and_work"]


class Signature(NamedTuple):
    """Layouts in which an operator takes its inputs, and in which its output comes out."""

    inputs: tuple[Layout, ...]
    output: Layout

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {self.output}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph. source: "input", "weight", or "" for what an operator makes. layout: the only one it may have."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    needs_grad: bool
    source: str = ""
    layout: Layout | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def local_bytes(self, layout: Layout, n: int) -> int:
        """Bytes on one of n ranks."""
        return math.prod(local_shape(layout, self.shape, n)) * self.itemsize


@dataclass(frozen=True)
class Op:
    """One operator: what it takes, what it makes."""

    name: str
    kind: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    options: dict = field(default_factory=dict, hash=False, compare=False)


class Graph:
    """Operators in the order in which they run. itemsize: bytes of a number (token ids take 8).

    x = graph.input("x", (s, h)); w = graph.weight("up", (h, f)); y = graph.op("matmul", x, w). What nobody takes is an output
    and must come out whole on every rank, unless `graph.output(y, layout)` says otherwise.
    """

    def __init__(self, *, itemsize: int = 2):
        self.itemsize = itemsize
        self.sources: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self._outputs: dict[str, Layout | None] = {}

    def input(
        self, name: str, shape: Sequence[int], *, needs_grad: bool = False, layout: Layout | None = None, ids: bool = False
    ) -> Tensor:
        """What comes from outside: every rank can be handed its part, or all of it, at no cost. layout: the one it has."""
        return self._source(Tensor(name, tuple(shape), 8 if ids else self.itemsize, needs_grad, "input", layout))

    def weight(self, name: str, shape: Sequence[int], *, layout: Layout | None = None) -> Tensor:
        """A parameter: stored cut or whole on every rank, its gradient likewise. layout: the only one it may have."""
        return self._source(Tensor(name, tuple(shape), self.itemsize, True, "weight", layout))

    def op(self, kind: str, *inputs: Tensor, name: str = "", **options) -> Tensor:
        """Add an operator of KINDS; returns its output. ValueError for an unknown kind or for shapes that do not fit."""
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no operator {kind!r}; there are {', '.join(KINDS)}{hint}")
        for tensor in inputs:
            if self.tensor(tensor.name) != tensor:
                raise ValueError(f"{tensor.name!r} is a tensor of another graph")
        name = self._free(name or f"{kind}{len(self.ops) + 1}")
        made = Tensor(name, (), self.itemsize, any(t.needs_grad for t in inputs))
        shape = KINDS[kind].shape([t.shape for t in inputs], options)
        if shape is None:
            sizes = " and ".join(str(t.shape) for t in inputs)
            raise ValueError(f"{name}: {kind} cannot take {sizes or 'nothing'}{f' with {options}' if options else ''}")
        op = Op(name, kind, tuple(inputs), replace(made, shape=tuple(shape)), options)
        self.ops.append(op)
        return op.output

    def output(self, tensor: Tensor, layout: Layout | None = ALIKE) -> None:
        """`tensor` is wanted outside in this layout; None: as it is made."""
        self._outputs[self.tensor(tensor.name).name] = layout

    @property
    def outputs(self) -> dict[str, Layout | None]:
        """name -> layout of what is wanted outside."""
        taken = {t.name for op in self.ops for t in op.inputs}
        free = {op.output.name: ALIKE for op in self.ops if op.output.name not in taken}
        return {**free, **self._outputs}

    def check_outputs(self, n: int) -> None:
        """ValueError unless n ranks can hold every output in the layout in which it is wanted."""
        for name, layout in self.outputs.items():
            shape = self.tensor(name).shape
            if layout is not None and not divides(layout, shape, n):
                cuts = [split(d) for d in range(len(shape)) if divides(split(d), shape, n)]
                legal = ", ".join(map(str, [ALIKE, PARTIAL, *cuts]))
                raise ValueError(f"output {name} {shape} cannot be {layout} on {n} ranks; it can be {legal}")

    def tensor(self, name: str) -> Tensor:
        found = self.sources.get(name) or next((op.output for op in self.ops if op.name == name), None)
        if found is None:
            known = [*self.sources, *(op.name for op in self.ops)]
            raise ValueError(f"no tensor {name!r} in this graph; there are {', '.join(known)}")
        return found

    def layouts_of(self, source: Tensor, n: int) -> list[Layout]:
        """Where a source may lie on n ranks: as stated, or whole on every rank, or cut along any dim that n divides."""
        if source.layout is not None:
            if not divides(source.layout, source.shape, n):
                raise ValueError(f"{source.name} {source.shape} cannot be {source.layout} on {n} ranks: {n} does not divide it")
            return [source.layout]
        cuts = [split(d) for d in range(len(source.shape)) if divides(split(d), source.shape, n)]
        return [ALIKE, *(cuts if n > 1 else [])]

    def _source(self, tensor: Tensor) -> Tensor:
        self._free(tensor.name)
        self.sources[tensor.name] = tensor
        return tensor

    def _free(self, name: str) -> str:
        if name in self.sources or any(op.name == name for op in self.ops):
            raise ValueError(f"there is a tensor {name!r} already")
        return name


class Kind(NamedTuple):
    """shape(shapes, options) -> the output's, or None if they do not fit.  rows(shapes, output) -> signatures, before any is
    refused for its sizes.  flops: of the forward pass, for each number of the output (None: a product)."""

    shape: Callable
    rows: Callable
    flops: int | None = 1


def _same(count: int) -> list[Signature]:
    """All ranks do all of it: alike, or with gradients that are parts of a sum (backward is linear in the gradient)."""
    return [Signature((layout,) * count, layout) for layout in (ALIKE, COPIED)]


def _along(dims: Sequence[int], count: int = 1, others: int = 0) -> list[Signature]:
    """Cut along each of `dims`, the same in all `count` inputs; `others`: inputs behind them that every rank needs whole."""
    return [Signature((split(d),) * count + (COPIED,) * others, split(d)) for d in dims]


def _matmul_shape(shapes, _):
    if len(shapes) != 2 or len(shapes[0]) < 2 or len(shapes[1]) < 2 or shapes[0][-1] != shapes[1][-2]:
        return None
    x, w = shapes
    return (*x[:-1], w[-1]) if len(w) == 2 or x[:-2] == w[:-2] else None


def _matmul_rows(shapes, output):
    x, w = map(len, shapes)
    batch = range(x - 2) if w > 2 else ()  # dims along which both are cut
    alone = [d for d in range(x - 1) if d not in batch]
    rows = [Signature((COPIED, split(w - 1)), split(x - 1)), Signature((split(x - 1), split(w - 2)), PARTIAL)]
    rows += _along(alone, 1, 1) + _along(list(batch), 2)
    return _same(2) + rows + [Signature((PARTIAL, COPIED), PARTIAL), Signature((COPIED, PARTIAL), PARTIAL)]


def _bias_rows(shapes, output):
    last = len(output) - 1
    cut = Signature((split(last), split(0)), split(last))
    return [*_same(2), *_along(range(last), 1, 1), cut, Signature((PARTIAL, PARTIAL), PARTIAL)]


def _add_rows(shapes, output):
    return [*_same(2), *_along(range(len(output)), 2), Signature((PARTIAL, PARTIAL), PARTIAL)]


def _pointwise_rows(shapes, output):
    return [*_same(1), *_along(range(len(output)))]


def _linear_rows(shapes, output):
    return [*_pointwise_rows(shapes, output), Signature((PARTIAL,), PARTIAL)]


def _norm_rows(shapes, output):
    return [*_same(3), *_along(range(len(output) - 1), 1, 2)]


def _softmax_rows(shapes, output):
    return [*_same(1), *_along(range(len(output) - 1))]


def _embedding_rows(shapes, output):
    last = len(output) - 1
    columns, rows = Signature((COPIED, split(1)), split(last)), Signature((COPIED, split(0)), PARTIAL)
    return [*_same(2), *_along(range(last), 1, 1), columns, rows]


def _mean_rows(shapes, output):
    dims = range(len(shapes[0]))
    return [*_same(1), *(Signature((split(d),), PARTIAL) for d in dims), Signature((PARTIAL,), PARTIAL)]


def _heads_rows(shapes, output):
    """(.., h) -> (.., a, h/a): a cut of the width becomes one of the heads."""
    last = len(shapes[0]) - 1
    return [*_same(1), *_along(range(last)), Signature((split(last),), split(last)), Signature((PARTIAL,), PARTIAL)]


def _merge_rows(shapes, output):
    """(.., a, d) -> (.., a d): a cut of the heads becomes one of the width; within a head it cannot be cut."""
    last = len(output) - 1
    return [*_same(1), *_along(range(last)), Signature((split(last),), split(last)), Signature((PARTIAL,), PARTIAL)]


def _heads_shape(shapes, options):
    heads, width = options.get("heads", 0), shapes[0][-1]
    return (*shapes[0][:-1], heads, width // heads) if heads and width % heads == 0 else None


def _merge_shape(shapes, _):
    return (*shapes[0][:-2], shapes[0][-2] * shapes[0][-1]) if len(shapes) == 1 and len(shapes[0]) > 2 else None


def _permute_shape(shapes, options):
    dims = options.get("dims", ())
    good = len(shapes) == 1 and sorted(dims) == list(range(len(shapes[0])))
    return tuple(shapes[0][d] for d in dims) if good else None


def _one(shapes, _):
    return shapes[0] if len(shapes) == 1 else None


KINDS: dict[str, Kind] = {
    "matmul": Kind(_matmul_shape, _matmul_rows, None),
    "add_bias": Kind(lambda s, _: s[0] if len(s) == 2 and s[1] == s[0][-1:] else None, _bias_rows),
    "add": Kind(lambda s, _: s[0] if len(s) == 2 and s[0] == s[1] else None, _add_rows),
    "gelu": Kind(_one, _pointwise_rows, 8),
    "square": Kind(_one, _pointwise_rows),
    "scale": Kind(lambda s, o: s[0] if len(s) == 1 and "by" in o else None, _linear_rows),
    "layer_norm": Kind(lambda s, _: s[0] if len(s) == 3 and s[1] == s[2] == s[0][-1:] else None, _norm_rows, 8),
    "softmax": Kind(_one, _softmax_rows, 5),
    "embedding": Kind(lambda s, _: (*s[0], s[1][1]) if len(s) == 2 and len(s[1]) == 2 else None, _embedding_rows, 0),
    "split_heads": Kind(lambda s, o: _heads_shape(s, o) if len(s) == 1 else None, _heads_rows, 0),
    "merge_heads": Kind(_merge_shape, _merge_rows, 0),
    "permute": Kind(_permute_shape, lambda shapes, output: [], 0),  # its rows turn on the dims: see legal_signatures
    "mean": Kind(lambda s, _: () if len(s) == 1 else None, _mean_rows),
}
VIEWS = ("split_heads", "merge_heads")  # the same bytes under another shape: nothing is moved


def legal_signatures(op: Op, n: int) -> list[Signature]:
    """The rows of `op` whose cuts n divides, in every tensor that they cut. On one rank there is one way."""
    shapes = [t.shape for t in op.inputs]
    if op.kind == "permute":
        dims = op.options["dims"]
        moved = [Signature((split(d),), split(k)) for k, d in enumerate(dims)]
        rows = [*_same(1), *moved, Signature((PARTIAL,), PARTIAL)]
    else:
        rows = KINDS[op.kind].rows(shapes, op.output.shape)
    if n == 1:
        return rows[:1]

    def fits(row: Signature) -> bool:
        held = [*zip(row.inputs, shapes, strict=True), (row.output, op.output.shape)]
        return all(divides(layout, shape, n) for layout, shape in held)

    return [row for row in rows if fits(row)]


def passes_and_work(op: Op, row: Signature, n: int) -> tuple[int, int, int]:
    """(passes, FLOPs, bytes) on one rank: how often the forward's work is done in a step, and what that is.

    A cut anywhere divides the arithmetic by n. Backward does a product once more for each input that has a gradient, and
    everything else once. Bytes are those of all inputs and the output, as this rank holds them (of a table, the rows read).
    """
    flops = KINDS[op.kind].flops
    total = 2 * op.output.elements * op.inputs[0].shape[-1] if flops is None else flops * op.output.elements
    if op.kind == "mean":
        total = op.inputs[0].elements
    share = n if any(map(is_cut, (*row.inputs, row.output))) else 1
    held = [*zip(op.inputs, row.inputs, strict=True), (op.output, row.output)]
    gradients = sum(t.needs_grad for t in op.inputs)
    passes = 1 + (gradients if flops is None else min(1, gradients))
    if op.kind in VIEWS:
        return passes, 0, 0
    if op.kind == "embedding":
        held = [held[0], held[2], held[2]]
    return passes, total // share, sum(t.local_bytes(layout, n) for t, layout in held)
