"""A tensor-parallel MLP block beside torch's own: DTensor's ColwiseParallel and RowwiseParallel, in alternating pairs.

Linear 1024 to 4096, GELU, Linear 4096 to 1024, cut over the ranks; a step is forget the gradients, forward, backward, the
input's gradient included. "native" is our layer over torch's all-reduce, so that only the layers differ; our own collectives are
rows of their own. Both sides' collectives are counted, theirs by torch's debug mode, ours at the call.

    time_ratio = median over pairs of (our step / torch's step)        collectives of a step: 1 all-reduce forward, 1 backward

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; torch.distributed.tensor.parallel.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch

from ..collectives import get_algorithm
from ..nn.gpt import FeedForward
from ..nn.init import draw
from ..parallel.tensor import Region, TensorFeedForward
from ..parallel.tensor_shards import join, load_whole
from ..ranks.run import pool
from .beside import Work, measure, time_row
from .record import Row

__all__ = ["describe", "job", "native_all_reduce", "rows"]

describe = "tensor-parallel MLP block beside torch DTensor, by tokens (--sizes 128,512) and all-reduce: time, collectives"
PEER = "torch DTensor ColwiseParallel, RowwiseParallel"
TOKENS = (128, 512)
ALL_REDUCES = ("native", "ring", "shared_memory")
WIDTH, FF = 1024, 4096


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Rows for all ranks x tokens (`options.sizes`) x all-reduces (`options.algorithms`; "native" is torch's own)."""
    algorithms = options.algorithms or ALL_REDUCES
    for algorithm in algorithms:
        if algorithm != "native":
            get_algorithm("all_reduce", algorithm)  # refuse a wrong name before anything starts
    for ranks in options.ranks or (2,):
        with pool(ranks=ranks) as open_ranks:
            for tokens in options.sizes or TOKENS:
                for algorithm in algorithms:
                    say(f"tensor-parallel {algorithm}, {ranks} ranks, {tokens} tokens")
                    run = open_ranks.run(measure, job, algorithm, tokens, options.pairs, checks=False, stream=False)
                    seen = open_ranks.run(counted, algorithm, tokens, checks=False, stream=False)
                    sizes = {"tokens": tokens, "width": WIDTH, "ff": FF}
                    yield from _rows_of({"ranks": ranks, **sizes, "algorithm": algorithm, "dtype": "float32"}, run, seen)


def native_all_reduce(comm, x: torch.Tensor) -> torch.Tensor:
    """torch's own, in place: the partial sums and gradients that come here were made for it alone."""
    x = x.contiguous()
    comm.native.all_reduce(x)
    return x


def all_reduce_of(algorithm: str) -> Callable:
    """all_reduce(comm, x) by that name; ours work in place as well."""
    if algorithm == "native":
        return native_all_reduce
    chosen = get_algorithm("all_reduce", algorithm)

    def in_place(comm, x):
        x = x.contiguous()
        return chosen(comm, x, out=x)

    return in_place


def models(comm, algorithm: str, tokens: int, width: int, ff: int):
    """(ours, theirs, x, the whole model on one rank): equal weights, the same input on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = FeedForward(width, ff)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            p.copy_(draw(name, p.shape, std=0.02))
    ours = TensorFeedForward(comm, width, ff, region=Region(comm, all_reduce=all_reduce_of(algorithm)), device=comm.device)
    load_whole(ours, {name: p.detach().to(comm.device) for name, p in whole.named_parameters()}, comm)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    linear, gelu = torch.nn.Linear, torch.nn.GELU("tanh")  # DTensor's styles take torch's own modules
    parts = OrderedDict(up=linear(width, ff), activation=gelu, down=linear(ff, width))
    theirs = torch.nn.Sequential(parts).to(comm.device)
    theirs.load_state_dict(whole.state_dict())
    theirs = parallelize_module(theirs, init_device_mesh(comm.device.type, (comm.size,)), plan)
    x = draw("x", (tokens, width), std=1.0).float().to(comm.device)
    return ours, theirs, x, whole


def step_of(model, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step; returns the output. x.grad is its own each time."""

    def step():
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.sum().backward()
        return y

    return step


def job(comm, algorithm: str, tokens: int, width: int = WIDTH, ff: int = FF) -> Work:
    """A step of ours and a step of torch's, on models with equal weights and the same input."""
    mine, its, x, whole = models(comm, algorithm, tokens, width, ff)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = step_of(mine, x1), step_of(its, x2)
    oracle, x3 = whole.double(), x.double().cpu().requires_grad_()

    def off(step, model, x, gather) -> int:
        y = step()
        want = step_of(oracle, x3)()
        pairs = [(y, want), (x.grad, x3.grad)]
        pairs += [
            (gather(name, p.grad), q.grad) for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True)
        ]
        return sum(_apart(a.detach().cpu(), b.detach(), max(ff, tokens)) for a, b in pairs)

    cuts = {"up": mine.up.cuts, "down": mine.down.cuts}

    def joined(name, grad):
        layer, _, last = name.rpartition(".")
        return join(comm, grad, cuts[layer].get(last))

    return Work(
        ours, theirs, lambda: off(ours, mine, x1, joined), lambda: off(theirs, its, x2, lambda name, grad: grad.full_tensor())
    )


def _apart(got: torch.Tensor, want: torch.Tensor, terms: int) -> int:
    """Elements of a float32 result further from float64's than rounding allows: `terms` is the longest sum, and its rounding at
    most terms eps of its size.
    """
    bound = torch.finfo(torch.float32).eps * terms * float(want.abs().max())
    return int((~((got.double() - want).abs() <= bound)).sum())


def counted(comm, algorithm: str, tokens: int, width: int = WIDTH, ff: int = FF) -> dict:
    """All-reduces of one step: ours, counted at the call; theirs, by CommDebugMode."""
    from torch.distributed.tensor.debug import CommDebugMode

    mine, its, x, _ = models(comm, algorithm, tokens, width, ff)
    usual, calls = mine.up.region.all_reduce, []

    def counting(comm, x):
        calls.append(x.numel())
        return usual(comm, x)

    mine.up.region.all_reduce = counting
    step_of(mine, x.clone().requires_grad_())()
    with CommDebugMode() as mode:
        step_of(its, x.clone().requires_grad_())()
    return {"ours": len(calls), "numbers": sum(calls), "theirs": mode.get_total_counts()}


def _rows_of(case: dict, run, seen) -> Iterator[Row]:
    first = time_row("tensor-parallel", case, run, peer=PEER)
    yield first
    here = {"benchmark": first.benchmark, "case": case, "machine": first.machine}
    same = all(of_rank["ours"] == of_rank["theirs"] for of_rank in seen.values)
    numbers = 2 * case["tokens"] * case["width"]
    formula = all(of_rank["numbers"] == numbers for of_rank in seen.values)
    yield Row(metric="collectives", value=seen.values[0]["ours"], unit="", peer=PEER, ok=same, **here)
    yield Row(metric="all_reduced", value=4 * seen.values[0]["numbers"], unit="B", peer="formula: 2 s b h", ok=formula, **here)
