"""Ring attention: queries stay at home, blocks of keys and values travel round the ring until all have met.

While a rank's queries meet one block, the next is already on its way: the message is begun before the products and awaited after
them. Backward sends the blocks round once more, and with each the sum of its gradients, to which every rank adds; it comes home
one hop after the last rank has added. Nobody ever holds more than two blocks, nor any s x s matrix.

    hop j: rank r meets the block of rank r - j        sent: (c-1) B forward, (c-1) B + c B backward,   B = 2 b kv (s/c) d w

Reference: Liu, Zaharia, Abbeel 2023 (arXiv:2310.01889).
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.autograd.function import once_differentiable

from ..collectives.agree import agree
from ..cost.context import runs
from ..ranks.comm import Comm
from .context_blocks import Blocks, RunningSoftmax, attend_block, block_gradients

__all__ = ["check_call", "grouped", "ring_attention", "working"]

KEYS, GRADIENTS = 1, 2  # tags: two streams of messages go round at once


def ring_attention(
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
    """q (b, a, s/c, d), k and v (b, kv, s/c, d), the tokens of this rank by `cut` -> (b, a, s/c, d). All ranks call it.

    Sends c - 1 messages forward, 2 c - 1 backward; see cost.context.context_bytes. A block that is wholly masked is passed on
    and costs no work. rows, p, draw, work: as for `Blocks`. ValueError, MismatchError: as `check_call` says.
    """
    length = check_call(comm, "ring", q, k, v, cut=cut, causal=causal, p=p, draw=draw)
    held = [runs(cut, length, comm.size, r) for r in range(comm.size)]
    blocks = Blocks(held[comm.rank], causal=causal, rows=rows, p=p, draw=draw, work=work)
    return _Ring.apply(q, k, v, comm, held, blocks)


def check_call(comm: Comm, form: str, q, k, v, *, cut: str, causal: bool, p: float, draw: Callable | None) -> int:
    """The length of the whole sequence. ValueError unless q is (b, a, s/c, d) and k, v (b, kv, s/c, d) of its dtype, with kv a
    divisor of a, and `draw` is there where p is. With checks on MismatchError unless all ranks call alike: with another cut or
    mask on one of them messages still fit, and all numbers are wrong.
    """
    fits = q.dim() == 4 and k.shape == v.shape and k.dim() == 4
    fits = fits and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and q.shape[1] % k.shape[1] == 0
    if not fits:
        raise ValueError(
            f"rank {comm.rank}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; allowed: q (b, a, s/c, d), "
            "k and v (b, kv, s/c, d), where kv divides a"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"rank {comm.rank}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; allowed: one dtype for all three")
    if p and draw is None:
        raise ValueError(f"rank {comm.rank}: p is {p} without draw; give draw(queries, keys), which says what stays, or p=0")
    length = q.shape[2] * comm.size
    runs(cut, length, comm.size, comm.rank)
    agree(comm, f"{form} attention", q, kv_heads=k.shape[1], cut=cut, causal=causal, p=p)
    return length


def grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(b, a, s, d) -> (b, kv, a/kv, s, d): the query heads that share a head of keys and values, together."""
    return q.unflatten(1, (kv_heads, -1))


def working(comm: Comm, blocks: Blocks, keys, name: int, kind: str):
    """Records a block as work on the Trace, unless all of it is masked or the communicator says that work tells nothing."""
    return comm.compute(f"keys of {name}", kind=kind) if comm.records_work and blocks.tiles(keys) else nullcontext()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, held, blocks):
        queries = grouped(q / math.sqrt(q.shape[-1]), k.shape[1])
        block, state = torch.stack([k, v]), RunningSoftmax(queries)
        for hop in range(comm.size):
            owner = (comm.rank - hop) % comm.size
            arriving, messages = _pass_on(comm, block, hop)
            with working(comm, blocks, held[owner], owner, "forward"):
                attend_block(blocks, state, queries, *block, held[owner])
            block = _arrived(arriving, messages)
        out, log_sum = state.finish()
        out = out.to(q.dtype).flatten(1, 2)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.rest = comm, held, blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, log_sum = ctx.saved_tensors
        comm, held, blocks = ctx.rest
        queries, grad = grouped(q / math.sqrt(q.shape[-1]), k.shape[1]), grouped(grad, k.shape[1])
        delta = (grad * grouped(out, k.shape[1])).sum(-1, keepdim=True, dtype=log_sum.dtype)
        block, dq = torch.stack([k, v]), torch.zeros_like(queries, dtype=log_sum.dtype)
        summed = incoming = outgoing = None
        for hop in range(comm.size):
            owner = (comm.rank - hop) % comm.size
            arriving, messages = _pass_on(comm, block, hop)
            with working(comm, blocks, held[owner], owner, "backward"):
                mine = block_gradients(blocks, queries, *block, grad, log_sum, delta, dq, held[owner])
            if hop:  # what the ranks before have summed for this block has come in meanwhile
                incoming.wait(), outgoing.wait()
                mine = summed if mine is None else mine.add_(summed)
            if comm.size > 1:
                summed = torch.empty_like(mine)
                incoming = comm.irecv(summed, (comm.rank - 1) % comm.size, GRADIENTS)
                outgoing = comm.isend(mine, (comm.rank + 1) % comm.size, GRADIENTS)
            else:
                summed = mine
            block = _arrived(arriving, messages)
        if comm.size > 1:  # home
            incoming.wait(), outgoing.wait()
        dk, dv = summed.to(k.dtype)
        dq = (dq / math.sqrt(q.shape[-1])).to(q.dtype).flatten(1, 2)
        return dq, dk, dv, None, None, None


def _pass_on(comm, block, hop):
    """Begin to send `block` to the right and to receive the next one from the left, except on the last hop."""
    if hop == comm.size - 1:
        return block, ()
    arriving = torch.empty_like(block)
    incoming = comm.irecv(arriving, (comm.rank - 1) % comm.size, KEYS)
    return arriving, (incoming, comm.isend(block, (comm.rank + 1) % comm.size, KEYS))


def _arrived(arriving, messages):
    for message in messages:
        message.wait()
    return arriving
