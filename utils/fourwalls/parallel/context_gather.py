"""The two other ways for queries to meet all keys: gather keys and values whole, or trade tokens for heads.

Gathering is simple, and each rank holds all keys and values: fine where grouped queries make them few. Trading (Ulysses) gives
each rank all tokens of some heads, so any attention kernel will do; it sends less than the ring from c = 3 on where all heads
have keys of their own, and cannot use more ranks than there are heads.

    gather: (c-1) B each way, c B held        Ulysses: (c-1)/c (A + B) each way,   A = 2 b a (s/c) d w,   B = 2 b kv (s/c) d w

Reference: Llama team 2024 (arXiv:2407.21783), section 3.3.2, gather; Jacobs et al. 2023 (arXiv:2309.14509), Ulysses.
"""

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from ..collectives import autograd
from ..cost.context import check_heads_shared, runs
from ..ranks.comm import Comm
from .context_blocks import Blocks, RunningSoftmax, attend_block, block_gradients
from .context_cuts import natural_order
from .context_ring import check_call, grouped, working

__all__ = ["gather_attention", "ulysses_attention"]


def gather_attention(
    comm: Comm,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cut: str = "equal",
    causal: bool = True,
    rows: int = 128,
    p: float = 0.0,
    draw: Callable | None = None,
    work: Counter | None = None,
) -> torch.Tensor:
    """As `ring_attention`, with one all-gather of keys and values, and in backward one reduce-scatter of their gradients.

    Keeps the gathered keys and values, (2, b, kv, s, d), for backward.
    """
    length = check_call(comm, "gather", q, k, v, cut=cut, causal=causal, p=p, draw=draw)
    whole = autograd.all_gather(comm, torch.stack([k, v]), 3)  # in the order of the ranks
    order = natural_order(cut, length, comm.size, device=q.device)
    keys, values = whole if order is None else whole.index_select(3, order)
    blocks = Blocks(runs(cut, length, comm.size, comm.rank), causal=causal, rows=rows, p=p, draw=draw, work=work)
    return _Local.apply(q, keys, values, comm, (range(length),), blocks)


def ulysses_attention(
    comm: Comm,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cut: str = "equal",
    causal: bool = True,
    rows: int = 128,
    p: float = 0.0,
    draw: Callable | None = None,
    work: Counter | None = None,
) -> torch.Tensor:
    """As `ring_attention`, by two all-to-alls each way: rank r computes heads r a/c to (r + 1) a/c - 1 for all tokens.

    `draw` gives masks of this rank's heads. ValueError, with the legal c, where c does not divide a and kv.
    """
    c, length = comm.size, check_call(comm, "ulysses", q, k, v, cut=cut, causal=causal, p=p, draw=draw)
    check_heads_shared(q.shape[1], k.shape[1], c)
    counts = [q.shape[1] // c, k.shape[1] // c, k.shape[1] // c]
    parts = [x.unflatten(1, (c, -1)) for x in (q, k, v)]  # (b, c, heads / c, s/c, d)
    pieces = torch.cat(parts, 2).movedim(1, 0).contiguous()  # (c, b, heads of all three, s/c, d): piece r is for rank r
    came = autograd.all_to_all(comm, pieces)
    tokens = came.movedim(0, 2).flatten(2, 3)  # (b, heads, s, d), in the order of the ranks
    order = natural_order(cut, length, c, device=q.device)
    tokens = tokens if order is None else tokens.index_select(2, order)
    blocks = Blocks((range(length),), causal=causal, rows=rows, p=p, draw=draw, work=work)
    out = _Local.apply(*tokens.split(counts, 1), comm, (range(length),), blocks)
    out = out if order is None else out.index_select(2, order.argsort())
    back = out.unflatten(2, (c, -1)).movedim(2, 0).contiguous()  # (c, b, a/c, s/c, d)
    return autograd.all_to_all(comm, back).movedim(0, 1).flatten(1, 2)


class _Local(torch.autograd.Function):
    """Attention to keys and values that are all here, tile by tile; it keeps no matrix of scores."""

    @staticmethod
    def forward(ctx, q, k, v, comm, keys, blocks):
        queries = grouped(q / math.sqrt(q.shape[-1]), k.shape[1])
        state = RunningSoftmax(queries)
        with working(comm, blocks, keys, "all", "forward"):
            attend_block(blocks, state, queries, k, v, keys)
        out, log_sum = state.finish()
        out = out.to(q.dtype).flatten(1, 2)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.rest = comm, keys, blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, log_sum = ctx.saved_tensors
        comm, keys, blocks = ctx.rest
        queries, grad = grouped(q / math.sqrt(q.shape[-1]), k.shape[1]), grouped(grad, k.shape[1])
        delta = (grad * grouped(out, k.shape[1])).sum(-1, keepdim=True, dtype=log_sum.dtype)
        dq = torch.zeros_like(queries, dtype=log_sum.dtype)
        with working(comm, blocks, keys, "all", "backward"):
            dk, dv = block_gradients(blocks, queries, k, v, grad, log_sum, delta, dq, keys)
        dq = (dq / math.sqrt(q.shape[-1])).to(q.dtype).flatten(1, 2)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None
