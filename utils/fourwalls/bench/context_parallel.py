"""Ring attention beside torch's own ring, in alternating pairs: the same cut, the same messages, forward and backward.

torch's ring attention is written for GPUs; its public entrance has no kernel for a CPU. So there its own loops, forward and
backward, are called with torch's fused CPU kernel put in, on GPUs with the fused kernel for these. Both sides hold zigzag
chunks and pass keys and values round the ring. Bytes and work are counted and stand beside their formulas.

    time_ratio = median over pairs of (our step / torch's step)        share = busiest rank's scores / mean of all

Reference: Liu et al. 2023 (arXiv:2310.01889); torch.distributed.tensor.experimental, context parallel.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..cost.context import CUTS, context_bytes, largest_share
from ..nn.init import draw
from ..parallel.context import FORMS
from ..parallel.context_cuts import part
from ..ranks.run import pool
from .beside import Work, measure, time_row
from .record import Row

__all__ = ["describe", "job", "rows"]

describe = "ring attention beside torch's own ring, by tokens (--sizes 512,2048) and form: time, bytes, share of the busiest rank"
PEER = "torch ring attention"
TOKENS = (512, 2048)
HEADS, HEAD_WIDTH = 8, 64


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x tokens (`options.sizes`) x forms (`options.algorithms`: ring, gather, ulysses)."""
    forms = options.algorithms or tuple(FORMS)
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"algorithm is {form!r}; allowed: {', '.join(FORMS)}")
    for ranks in options.ranks or (2,):
        with pool(ranks=ranks) as open_ranks:
            for tokens in options.sizes or TOKENS:
                tokens = max(1, tokens // (2 * ranks)) * 2 * ranks
                for form in forms:
                    say(f"context-parallel {form}, {ranks} ranks, {tokens} tokens")
                    run = open_ranks.run(measure, job, form, tokens, options.pairs, checks=False, stream=False)
                    case = {"ranks": ranks, "tokens": tokens, "heads": HEADS, "head_width": HEAD_WIDTH}
                    case |= {"form": form, "cut": "zigzag", "causal": True, "dtype": "float32"}
                    timed = time_row("context-parallel", case, run, peer=PEER)
                    yield timed
                    seen = open_ranks.run(counted, form, tokens, stream=False)
                    yield from _counts(case, seen, timed.machine)


def inputs(comm, tokens: int, device=None) -> list[torch.Tensor]:
    """This rank's q, k, v and gradient of the output, (1, a, s/c, d), by zigzag."""
    whole = [draw(name, (1, HEADS, tokens, HEAD_WIDTH), std=1.0).float() for name in ("q", "k", "v", "up")]
    return [part(x, "zigzag", comm.size, comm.rank, dim=2).to(device or comm.device) for x in whole]


def our_step(comm, form: str, q, k, v, up, work: Counter | None = None) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of this rank's tokens."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = FORMS[form](comm, q, k, v, cut="zigzag", work=work)
    out.backward(up)
    return [out.detach(), q.grad, k.grad, v.grad]


def torch_step(comm, q, k, v, up) -> list[torch.Tensor]:
    """The same by torch's ring, whose loops ask for a kernel that gives the output and the logarithm of the sums."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = comm.size > 1
    group = comm.native.group.WORLD
    if q.is_cuda:  # float32, so the memory-efficient kernel; never ran: written by its signatures
        mesh = group_mesh(comm)
        out, log_sum, *rest = ring._scaled_dot_product_ring_efficient_attention(mesh, q, k, v, is_causal=True)
        saved, asked = (up, q, k, v, None, out, log_sum, *rest[:2]), (True, True, True, False)
        grads = ring._scaled_dot_product_ring_efficient_attention_backward(mesh, *saved, 0.0, asked, True)
        return [out, *grads[:3]]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(q, k, v, is_causal=False):
        return kernel(q, k, v, is_causal=is_causal)

    def backward(grad_out, query, key, value, out, logsumexp, is_causal=False):
        return kernel_back(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    out, log_sum = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)[:2]
    saved = {"query": q, "key": k, "value": v, "out": out, "logsumexp": log_sum}
    grads = ring._templated_ring_attention_backward(group, 2, backward, up, "grad_out", **saved, is_causal=True)
    return [out, *grads[:3]]


def group_mesh(comm):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(comm.device.type, (comm.size,))


def job(comm, form: str, tokens: int) -> Work:
    """A step of ours and a step of torch's on the same tokens; both against float64 on one device."""
    mine = inputs(comm, tokens)
    want = oracle(comm, tokens)

    def off(step) -> int:
        return sum(_apart(got.cpu(), right, tokens) for got, right in zip(step(), want, strict=True))

    def ours():
        return our_step(comm, form, *mine)

    def theirs():
        return torch_step(comm, *mine)

    return Work(ours, theirs, lambda: off(ours), lambda: off(theirs))


def oracle(comm, tokens: int) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of this rank's tokens, from the whole sequence on one device, in float64."""
    q, k, v, up = (draw(name, (1, HEADS, tokens, HEAD_WIDTH), std=1.0).float().double() for name in ("q", "k", "v", "up"))
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(up)
    return [part(x, "zigzag", comm.size, comm.rank, dim=2) for x in (out.detach(), q.grad, k.grad, v.grad)]


def _apart(got: torch.Tensor, want: torch.Tensor, terms: int) -> int:
    """Elements of a float32 result further from float64's than rounding allows: sums of at most `terms` numbers."""
    bound = torch.finfo(torch.float32).eps * terms * float(want.abs().max())
    return int((~((got.double() - want).abs() <= bound)).sum())


def counted(comm, form: str, tokens: int) -> int:
    """Scores that this rank computes in one forward; the run's Trace has the bytes."""
    work = Counter()
    our_step(comm, form, *inputs(comm, tokens), work=work)
    return work["forward"]


def _counts(case: dict, seen, machine: dict) -> Iterator[Row]:
    """Bytes a rank sends and the busiest rank's share, each beside its formula."""
    c, tokens = case["ranks"], case["tokens"]
    here = {"benchmark": "context-parallel", "case": case, "machine": machine}
    formula = sum(context_bytes(case["form"], c, batch=1, length=tokens, heads=HEADS, head_width=HEAD_WIDTH))
    sent = [seen.trace.bytes_sent(r) for r in range(c)]
    yield Row(metric="bytes", value=max(sent), unit="B", peer="formula", ok=sent == [formula] * c, **here)
    share = max(seen.values) * c / sum(seen.values)
    yield Row(metric="share", value=share, unit="of the mean", ok=share <= 1.05, **here)
    if case["form"] == "ring":
        for cut in CUTS:
            value = largest_share(cut, tokens, c)
            case_of = {"ranks": c, "tokens": tokens, "cut": cut, "causal": True}
            yield Row(**(here | {"case": case_of}), metric="share", value=value, unit="of the mean", source="modelled", ok=True)
