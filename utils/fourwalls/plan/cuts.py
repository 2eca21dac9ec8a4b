"""A plan: a layout for each source of a graph, a signature for each operator; and what follows: changes, bytes, time, memory.

Computing is divided where a tensor is cut; changing a layout sends bytes, forward and back. A tensor that several operators want
in the same layout is changed once, and its gradients are added before they go back. Time is the sum of both, nothing hidden.

    cost = sum over operators of work(signature)  +  sum over tensors, over layouts wanted, of change(made -> wanted)

Reference: Yuan et al. 2021, OneFlow (arXiv:2110.15032), section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..cost.units import format_bytes, format_seconds
from .layouts import Layout, Move, Prices
from .operators import Graph, Op, Signature, Tensor, legal_signatures, passes_and_work

__all__ = ["STATE_BYTES", "Change", "Plan", "copied_bytes", "explain", "held_bytes", "plan_of"]

STATE_BYTES = 16  # of a parameter: mixed precision with Adam (cost/memory.py)
PS = 10**12


class Change(NamedTuple):
    """One tensor that is wanted in another layout than it is made in: before which operators, and both moves."""

    tensor: Tensor
    start: Layout
    end: Layout
    users: tuple[str, ...]
    forward: Move
    backward: Move

    @property
    def bytes(self) -> int:
        """Sent by all ranks, forward and backward."""
        return self.forward.bytes + self.backward.bytes


@dataclass(frozen=True)
class Plan:
    """A layout for each source and a signature for each operator, and all that follows from them."""

    graph: Graph
    prices: Prices
    layouts: Mapping[str, Layout]  # of the sources
    rows: Mapping[str, Signature]  # of the operators
    state_bytes: int = STATE_BYTES

    def made(self, tensor: Tensor) -> Layout:
        """The layout in which a tensor comes to be."""
        return self.layouts[tensor.name] if tensor.source else self.rows[tensor.name].output

    @cached_property
    def changes(self) -> list[Change]:
        """Every change of a layout, in the order in which the tensors are made."""
        wanted: dict[str, dict[Layout, list[str]]] = {}
        for op in self.graph.ops:
            for tensor, layout in zip(op.inputs, self.rows[op.name].inputs, strict=True):
                users = wanted.setdefault(tensor.name, {}).setdefault(layout, [])
                users += [] if op.name in users else [op.name]
        for name, layout in self.graph.outputs.items():
            if layout is not None:
                wanted.setdefault(name, {}).setdefault(layout, []).append("output")
        found = []
        for tensor in [*self.graph.sources.values(), *(op.output for op in self.graph.ops)]:
            start = self.made(tensor)
            for end, users in wanted.get(tensor.name, {}).items():
                if end != start:
                    found.append(Change(tensor, start, end, tuple(users), *self.prices.convert(start, end, tensor)))
        return found

    def work(self, op: Op) -> int:
        """Picoseconds that one rank computes for `op` in a step, forward and backward."""
        passes, flops, nbytes = passes_and_work(op, self.rows[op.name], self.prices.n)
        return passes * self.prices.work(flops, nbytes, op.output.itemsize)

    @property
    def compute_picoseconds(self) -> int:
        return sum(map(self.work, self.graph.ops))

    @property
    def communication_picoseconds(self) -> int:
        return sum(c.forward.picoseconds + c.backward.picoseconds for c in self.changes)

    @property
    def picoseconds(self) -> int:
        return self.compute_picoseconds + self.communication_picoseconds

    @property
    def seconds(self) -> float:
        return self.picoseconds / PS

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Sent by each rank in a step."""
        moves = [m.bytes_sent for c in self.changes for m in (c.forward, c.backward)]
        return tuple(map(sum, zip(*moves, strict=True))) if moves else (0,) * self.prices.n

    @property
    def bytes(self) -> int:
        """Sent by all ranks together in a step."""
        return sum(c.bytes for c in self.changes)

    @property
    def memory(self) -> int:
        """Bytes on a rank: `state_bytes` for each number of a weight, inputs, every operator's output, every copy in another
        layout."""
        n, held = self.prices.n, 0
        for tensor in [*self.graph.sources.values(), *(op.output for op in self.graph.ops)]:
            held += held_bytes(tensor, self.made(tensor), n, self.state_bytes)
        return held + sum(copied_bytes(c.tensor, c.start, c.end, n) for c in self.changes)

    def collectives(self) -> dict[str, int]:
        """How many of each collective a step has: {"forward all_reduce": 1, "backward all_reduce": 1}."""
        found: dict[str, int] = {}
        for change in self.changes:
            for way, move in (("forward", change.forward), ("backward", change.backward)):
                if move.collective:
                    found[f"{way} {move.collective}"] = found.get(f"{way} {move.collective}", 0) + 1
        return found

    def cost(self, objective: str) -> int:
        return self.picoseconds if objective == "time" else self.bytes

    def __str__(self) -> str:
        return "\n".join(explain(self))


def plan_of(
    graph: Graph,
    prices: Prices,
    layouts: Mapping[str, Layout],
    rows: Mapping[str, Signature],
    *,
    state_bytes: int = STATE_BYTES,
) -> Plan:
    """A plan of your own. ValueError, with what is legal, for a layout or a signature that is not."""
    graph.check_outputs(prices.n)
    for name, source in graph.sources.items():
        legal = graph.layouts_of(source, prices.n)
        if layouts.get(name) not in legal:
            raise ValueError(f"{name} is {layouts.get(name)}; on {prices.n} ranks it can be {', '.join(map(str, legal))}")
    for op in graph.ops:
        legal = legal_signatures(op, prices.n)
        if rows.get(op.name) not in legal:
            raise ValueError(
                f"{op.name} ({op.kind}) is {rows.get(op.name)}; on {prices.n} ranks it can be {'; '.join(map(str, legal))}"
            )
    return Plan(graph, prices, dict(layouts), dict(rows), state_bytes)


def explain(plan: Plan) -> list[str]:
    """The plan in lines: each source and operator with its layouts and time, each change with its collectives and bytes."""
    n, lines, wide = plan.prices.n, [], max(map(len, [*plan.graph.sources, *(op.name for op in plan.graph.ops)]), default=1)
    pending: dict[str, list[Change]] = {}
    for change in plan.changes:
        pending.setdefault(change.users[0], []).append(change)
    for name, layout in plan.layouts.items():
        source = plan.graph.sources[name]
        lines.append(f"{name:<{wide}}  {source.source:<12}{layout}  {format_bytes(source.local_bytes(layout, n))} a rank")
    for op in plan.graph.ops:
        lines += map(_say, pending.get(op.name, ()))
        lines.append(f"{op.name:<{wide}}  {op.kind:<12}{plan.rows[op.name]}  {format_seconds(plan.work(op) / PS)}")
    lines += map(_say, pending.get("output", ()))
    total = f"{n} ranks: {format_seconds(plan.seconds)}, of which {format_seconds(plan.communication_picoseconds / PS)} sending"
    return [*lines, f"{total} {format_bytes(plan.bytes)} in all; {format_bytes(plan.memory)} held by a rank"]


def _say(change: Change) -> str:
    ways = [
        f"{way} {move.collective.replace('_', '-')} {format_bytes(move.bytes)}"
        for way, move in (("forward", change.forward), ("backward", change.backward))
        if move.collective
    ]
    return f"    {change.tensor.name}: {change.start} -> {change.end}: {', '.join(ways) or 'nothing to send'}"


def held_bytes(tensor: Tensor, layout: Layout, n: int, state_bytes: int) -> int:
    mine = tensor.local_bytes(layout, n)
    return mine // tensor.itemsize * state_bytes if tensor.source == "weight" else mine


def copied_bytes(tensor: Tensor, start: Layout, end: Layout, n: int) -> int:
    return tensor.local_bytes(end, n) if start.value != end.value else 0
