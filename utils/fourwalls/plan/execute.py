"""Run a plan on ranks, forward and backward, so that it can be compared with one device and its bytes with the Trace.

One function takes a tensor from one half of a layout to another. A change of layout runs it twice: on the value going forward, on
the gradient going back, from the wanted layout's gradient to the made one's. Everything between is the ordinary operator on what
the rank holds; nothing else is needed for the gradients to be right.

    forward: value start -> end        backward: gradient end -> start

Reference: Yuan et al. 2021, OneFlow (arXiv:2110.15032), section 3.2 (boxing).
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from ..collectives import autograd, ring
from ..ranks.comm import Comm
from .cuts import Plan
from .layouts import SUM, Layout, collective_of, cut_dim
from .operators import Graph, Op

__all__ = ["change_half", "on_one_device", "own_part", "run_plan"]


def own_part(comm: Comm, whole: torch.Tensor, half: str) -> torch.Tensor:
    """What this rank holds of a tensor that everybody has: its piece, all of it, or (of a sum) all on rank 0 and zeros elsewhere.
    Sends nothing."""
    dim = cut_dim(half)
    if dim is not None:
        return whole.chunk(comm.size, dim)[comm.rank].contiguous()
    return torch.zeros_like(whole) if half == SUM and comm.rank else whole


def change_half(comm: Comm, x: torch.Tensor, start: str, end: str) -> torch.Tensor:
    """What this rank holds in half-layout `start` -> what it holds in `end`. Rings, and a pairwise all-to-all; no gradients."""
    name, dim, to = collective_of(start, end), cut_dim(start), cut_dim(end)
    if start == end or comm.size == 1:
        return x
    if name == "all_reduce":
        return ring.all_reduce(comm, x.contiguous())
    if name == "reduce_scatter":
        return autograd.reduce_scatter(comm, x, to)
    if name == "all_gather":
        return autograd.gather_from(comm, x, dim)
    if name == "all_to_all":
        pieces = torch.stack(x.chunk(comm.size, to))  # piece q goes to rank q
        return torch.cat(autograd.all_to_all(comm, pieces).unbind(), dim)
    if dim is not None:  # parts of a sum: this rank's piece, and zeros around it
        shape = list(x.shape)
        shape[dim] *= comm.size
        whole = x.new_zeros(shape)
        whole.chunk(comm.size, dim)[comm.rank].copy_(x)
        return whole
    return own_part(comm, x, end)


class _Change(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, start, end):
        ctx.rest = comm, start, end
        return change_half(comm, x, start.value, end.value).clone()

    @staticmethod
    def backward(ctx, grad):
        comm, start, end = ctx.rest
        return change_half(comm, grad.contiguous(), end.gradient, start.gradient), None, None, None


def run_plan(comm: Comm, plan: Plan, values: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """One step of the plan. values: every source, whole, by name (the same on all ranks). Returns this rank's

    {"outputs": {name: as wanted}, "gradients": {source: as stored}}; the gradient that enters at each output is all ones. Bytes
    sent: plan.bytes_by_rank. ValueError where a source is missing or the plan is for another number of ranks.
    """
    graph = plan.graph
    if plan.prices.n != comm.size:
        raise ValueError(f"a plan for {plan.prices.n} ranks cannot run on {comm.size}")
    _complete(graph, values)
    made, ready = {}, {}
    for name, source in graph.sources.items():
        mine = own_part(comm, values[name].detach(), plan.layouts[name].value).clone()
        made[name] = mine.requires_grad_(source.needs_grad)

    def take(name: str, start: Layout, end: Layout) -> torch.Tensor:
        if start == end:
            return made[name]
        if (name, end) not in ready:
            ready[name, end] = _Change.apply(made[name], comm, start, end)
        return ready[name, end]

    for op in graph.ops:
        row = plan.rows[op.name]
        held = [take(t.name, plan.made(t), layout) for t, layout in zip(op.inputs, row.inputs, strict=True)]
        first = held[1].shape[0] * comm.rank if op.kind == "embedding" and cut_dim(row.inputs[1].value) == 0 else None
        made[op.name] = _local(op, held, first)
    outputs, halves = {}, {}
    for name, layout in graph.outputs.items():
        start = plan.made(graph.tensor(name))
        outputs[name], halves[name] = take(name, start, layout or start), (layout or start).gradient
    seeds = [own_part(comm, torch.ones_like(outputs[name]), half) if cut_dim(half) is None else torch.ones_like(outputs[name])
             for name, half in halves.items()]  # fmt: skip
    live = [(out, seed) for out, seed in zip(outputs.values(), seeds, strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in live], [seed for _, seed in live])
    gradients = {name: made[name].grad for name, source in graph.sources.items() if source.needs_grad}
    return {"outputs": {name: out.detach() for name, out in outputs.items()}, "gradients": gradients}


def on_one_device(graph: Graph, values: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The oracle: the same graph on one device, with no layouts. Returns what `run_plan` does, whole."""
    _complete(graph, values)
    made = {}
    for name, source in graph.sources.items():
        made[name] = values[name].detach().clone().requires_grad_(source.needs_grad)
    for op in graph.ops:
        made[op.name] = _local(op, [made[t.name] for t in op.inputs], None)
    live = [made[name] for name in graph.outputs if made[name].requires_grad]
    torch.autograd.backward(live, [torch.ones_like(out) for out in live])
    gradients = {name: made[name].grad for name, source in graph.sources.items() if source.needs_grad}
    return {"outputs": {name: made[name].detach() for name in graph.outputs}, "gradients": gradients}


def _complete(graph: Graph, values: Mapping) -> None:
    for name, source in graph.sources.items():
        if name not in values or tuple(values[name].shape) != source.shape:
            given = tuple(values[name].shape) if name in values else "missing"
            raise ValueError(f"{name} is {given}; a tensor of shape {source.shape} is wanted")


def _embedding(held, first):
    """Rows of the table; with `first`, of a table of which this rank holds the rows from `first` on: zeros for all others."""
    ids, table = held
    if first is None:
        return F.embedding(ids, table)
    inside = (ids >= first) & (ids < first + len(table))
    return F.embedding((ids - first).clamp(0, len(table) - 1), table) * inside.unsqueeze(-1)


LOCAL: dict[str, Callable] = {
    "matmul": lambda x, w, **_: x @ w,
    "add_bias": lambda x, b, **_: x + b,
    "add": lambda x, y, **_: x + y,
    "gelu": lambda x, **_: F.gelu(x),
    "square": lambda x, **_: x * x,
    "scale": lambda x, by, **_: x * by,
    "layer_norm": lambda x, g, b, **_: F.layer_norm(x, x.shape[-1:], g, b),
    "softmax": lambda x, **_: x.softmax(-1),
    "merge_heads": lambda x, **_: x.flatten(-2),
    "permute": lambda x, dims, **_: x.permute(tuple(dims)),
}


def _local(op: Op, held: list, first: int | None) -> torch.Tensor:
    """The operator on what one rank holds. A mean divides by the whole's count: its cut parts are parts of the sum."""
    if op.kind == "embedding":
        return _embedding(held, first)
    if op.kind == "mean":
        return held[0].sum() / op.inputs[0].elements
    if op.kind == "split_heads":
        return held[0].unflatten(-1, (-1, op.inputs[0].shape[-1] // op.options["heads"]))
    return LOCAL[op.kind](*held, **op.options)
