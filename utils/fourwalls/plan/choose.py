"""Automatic cuts: the plan in which a step costs least, found by an exact search, and by looking at every one.

The layout of each source and the signature of each operator is a variable. What a tensor's changes cost turns on its maker and on
all its users together; what an operator computes, on itself. The sum of these tables is made least (eliminate.py); with a limit,
among those plans that fit.

    plan = argmin over legal layouts of cost, with memory <= limit

Reference: Yuan et al. 2021, OneFlow (arXiv:2110.15032), section 3; Jia et al. 2018 (arXiv:1802.04924), which eliminates nodes and
edges of a graph in the same way.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from .cuts import STATE_BYTES, Plan, copied_bytes, held_bytes
from .eliminate import cheapest, cheapest_within
from .layouts import Layout, Prices
from .operators import Graph, legal_signatures, passes_and_work

__all__ = ["OBJECTIVES", "brute_force", "choose_layouts"]

OBJECTIVES = ("time", "bytes")


def choose_layouts(
    graph: Graph, prices: Prices, *, objective: str = "time", limit: int | None = None, state_bytes: int = STATE_BYTES
) -> Plan:
    """The plan of least `objective` ("time": picoseconds; "bytes": sent by all ranks) that holds at most `limit` bytes a rank.

    Exact. Without a limit the least of bytes is to cut nothing. ValueError where nothing fits, where an input or output is wanted
    cut and cannot be, or where too many operators hang together (`eliminate.LARGEST`).
    """
    _check(graph, prices, objective)
    sizes, costs, weights, values = _factors(graph, prices, objective, state_bytes)
    if limit is None:
        _, chosen = cheapest(sizes, costs)
    else:
        _, _, chosen = cheapest_within(sizes, costs, weights, limit)
    return _plan(graph, prices, [values[v][k] for v, k in enumerate(chosen)], state_bytes)


def brute_force(
    graph: Graph, prices: Prices, *, objective: str = "time", limit: int | None = None, state_bytes: int = STATE_BYTES
) -> Plan | None:
    """The same by looking at every choice; None where nothing fits. For small graphs, to check the search."""
    _check(graph, prices, objective)
    values = [graph.layouts_of(source, prices.n) for source in graph.sources.values()]
    values += [legal_signatures(op, prices.n) for op in graph.ops]
    best = None
    for chosen in itertools.product(*values):
        plan = _plan(graph, prices, chosen, state_bytes)
        if limit is not None and plan.memory > limit:
            continue
        if best is None or plan.cost(objective) < best.cost(objective):
            best = plan
    return best


def _check(graph: Graph, prices: Prices, objective: str) -> None:
    graph.check_outputs(prices.n)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; allowed: {', '.join(OBJECTIVES)}")


def _plan(graph, prices, chosen, state_bytes) -> Plan:
    count = len(graph.sources)
    rows = {op.name: row for op, row in zip(graph.ops, chosen[count:], strict=True)}
    return Plan(graph, prices, dict(zip(graph.sources, chosen[:count], strict=True)), rows, state_bytes)


def _factors(graph: Graph, prices: Prices, objective: str, state_bytes: int):
    """(sizes, costs, weights, values): a variable for each source (its layout) and each operator (its signature)."""
    sources = list(graph.sources.values())
    values: list[list] = [graph.layouts_of(source, prices.n) for source in sources]
    values += [legal_signatures(op, prices.n) for op in graph.ops]
    place = {t.name: v for v, t in enumerate([*sources, *(op.output for op in graph.ops)])}
    wishes = graph.outputs
    taken: dict[str, list] = {}
    for op in graph.ops:
        for name in dict.fromkeys(t.name for t in op.inputs):
            taken.setdefault(name, []).append((place[op.name], op))
    costs, weights = [], []
    for v, tensor in enumerate([*sources, *(op.output for op in graph.ops)]):
        made = [one if tensor.source else one.output for one in values[v]]
        held = [held_bytes(tensor, layout, prices.n, state_bytes) for layout in made]
        weights.append(((v,), np.array(held, dtype=np.int64)))
        users = taken.get(tensor.name, [])
        scope = (v, *(u for u, _ in users))
        cost, weight = np.zeros((2, *(len(values[u]) for u in scope)), dtype=np.int64)
        for end, wanted in _wanted(wishes.get(tensor.name), tensor, users, values):
            both = [prices.convert(start, end, tensor) for start in made]
            if objective == "time":
                each = [a.picoseconds + b.picoseconds for a, b in both]
            else:
                each = [a.bytes + b.bytes for a, b in both]
            copies = [copied_bytes(tensor, start, end, prices.n) for start in made]
            shape = (-1, *(1,) * len(users))
            cost += np.array(each, dtype=np.int64).reshape(shape) * wanted
            weight += np.array(copies, dtype=np.int64).reshape(shape) * wanted
        if users or cost.any() or weight.any():
            costs.append((scope, cost))
            weights.append((scope, weight))
    if objective == "time":
        for op in graph.ops:
            found = [passes_and_work(op, row, prices.n) for row in values[place[op.name]]]
            work = [passes * prices.work(flops, nbytes, op.output.itemsize) for passes, flops, nbytes in found]
            costs.append(((place[op.name],), np.array(work, dtype=np.int64)))
    return [len(one) for one in values], costs, weights, values


def _wanted(always, tensor, users, values) -> Iterator[tuple[Layout, np.ndarray]]:
    """For each layout in which `tensor` may be wanted: with which signatures of its users it is (1) and is not (0). always: the
    one that is wanted outside, or None."""
    slots = [[{layout for t, layout in zip(op.inputs, row.inputs, strict=True) if t.name == tensor.name} for row in values[u]]
             for u, op in users]  # fmt: skip
    for end in dict.fromkeys([*([always] if always else []), *(layout for rows in slots for s in rows for layout in sorted(s))]):
        nobody = np.ones((1, *(len(rows) for rows in slots)), dtype=np.int64) * (end != always)
        for k, rows in enumerate(slots):
            shape = [1] * (1 + len(slots))
            shape[1 + k] = len(rows)
            nobody = nobody * np.array([end not in s for s in rows], dtype=np.int64).reshape(shape)
        yield end, 1 - nobody
