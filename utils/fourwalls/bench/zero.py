"""One training step of ZeRO's stage 3 beside torch's FSDP2 (`fully_shard`): same model, same wrap units, alternating pairs.

Six MLPs of 512-2048-512 in a row, each a unit, about 50 MB of parameters, batch 64: a step is forward, backward, AdamW (torch's
own on both sides), forget the gradients; and once more without AdamW. Both gather a unit before its forward and again before its
backward (reshard_after_forward), and sum its gradients once. A second run counts collectives and what they carry, with one eye
for both.

    time_ratio = median over pairs of (our step / torch's step),     payload = 2 x parameters gathered + 1 x gradients summed

Reference: Zhao et al. 2023 (arXiv:2304.11277); torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..collectives import get_algorithm
from ..collectives.chunks import chunk_sizes, cut
from ..nn.mlp import MLP
from ..parallel.zero import Zero3, bytes_sent
from ..ranks.run import pool
from .beside import Work, measure, time_row
from .record import Row

__all__ = ["counted", "describe", "fsdp2", "job", "native_all_gather", "native_reduce_scatter", "ours_on", "rows", "traced"]

describe = "ZeRO stage 3 step beside torch FSDP2, same units: time, collectives, payload, bytes sent"
PEER = "torch.distributed.fsdp.fully_shard"
COLLECTIVES = ("ring", "native")
FORM, BATCH = (6, (512, 2048, 512)), 64  # how many MLPs of which sizes


def rows(options, say: Callable[[str], None] = lambda text: None, *, form: tuple = FORM) -> Iterator[Row]:
    """Rows for all ranks (default 2) x collectives (`options.algorithms`: "ring", "native" or another that can both)."""
    algorithms = options.algorithms or COLLECTIVES
    for algorithm in algorithms:
        _collectives(algorithm)  # refuse a wrong name before anything starts
    for ranks in options.ranks or (2,):
        with pool(ranks=ranks) as open_ranks:
            for algorithm in algorithms:
                say(f"zero {algorithm}, {ranks} ranks")
                case = {"ranks": ranks, "stage": 3, "algorithm": algorithm, "units": form[0], "batch": BATCH, "dtype": "float32"}
                for metric, work in (
                    ("time", partial(job, form=form)),
                    ("time_without_optimizer", partial(job, form=form, step=False)),
                ):
                    run = open_ranks.run(measure, work, algorithm, 0, options.pairs, checks=False, stream=False)
                    yield time_row("zero", case, run, peer=PEER, metric=metric)
                if algorithm == "native":
                    yield from _count_rows(case, open_ranks.run(counted, form, checks=False, stream=False))
                else:
                    yield _sent_row(case, open_ranks.run(traced, algorithm, form, checks=False, stream=False))


# --- what runs on the ranks ---------------------------------------------------------------------------------------------
def model_of(device, form: tuple = FORM) -> torch.nn.Sequential:
    """The MLPs; the same weights on every rank."""
    return torch.nn.Sequential(*(MLP(form[1], seed=k, device=device) for k in range(form[0])))


def batch_of(comm, form: tuple = FORM) -> torch.Tensor:
    return torch.randn(BATCH, form[1][0], generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)


def ours_on(comm, model: torch.nn.Module, algorithm: str, **options) -> Zero3:
    """Stage 3 with torch's AdamW and the collectives called `algorithm`."""
    reduce_scatter, all_gather = _collectives(algorithm)
    return Zero3(
        model, comm, reduce_scatter=reduce_scatter, all_gather=all_gather, optimizer=torch.optim.AdamW, foreach=True, **options
    )


def fsdp2(comm, model: torch.nn.Sequential) -> torch.optim.Optimizer:
    """Wrap each member of `model`, and the whole, with fully_shard; returns its AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(comm.device.type, (comm.size,))
    for unit in model:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return torch.optim.AdamW(model.parameters(), foreach=True)


def job(comm, algorithm: str, _numel: int = 0, *, form: tuple = FORM, step: bool = True) -> Work:
    """A step of ours and a step of torch's, each on a model of its own with equal weights and on this rank's batch. step False:
    the weights stay.
    """
    mine, its, x = model_of(comm.device, form), model_of(comm.device, form), batch_of(comm, form)
    sharded, optimizer = ours_on(comm, mine, algorithm), fsdp2(comm, its)

    def ours():
        mine(x).square().mean().backward()
        if step:
            sharded.step()
        sharded.zero_grad()

    def theirs():
        its(x).square().mean().backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()

    def wrong() -> int:
        """From equal weights: elements of the gradients that differ by more than rounding."""
        whole = {name: p.full_tensor() for name, p in its.named_parameters()}
        with torch.no_grad():
            for flat in sharded._flats:
                joined = torch.cat([whole[name].reshape(-1) for name in flat.names])
                flat.shard.copy_(joined.split(flat.sizes)[comm.rank])
        mine(x).square().mean().backward()
        its(x).square().mean().backward()
        own = sharded.full_gradients()
        off = sum(_apart(own[name], p.grad.full_tensor()) for name, p in its.named_parameters())
        sharded.zero_grad()
        optimizer.zero_grad()
        return off

    return Work(ours, theirs, wrong)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Elements in which two float32 means of the same gradients differ by more than rounding: another order, another division."""
    allowed = 8 * torch.finfo(ours.dtype).eps * torch.maximum(ours.abs(), theirs.abs()).max()
    return int((~((ours - theirs).abs() <= allowed)).sum())


class _Eye(TorchDispatchMode):
    """Sees torch's collectives and the bytes that they carry: of the whole tensor, be it scattered or gathered."""

    def __init__(self):
        super().__init__()
        self.seen: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = (
                "all_gather" if "gather" in func._schema.name else "reduce_scatter" if "scatter" in func._schema.name else "other"
            )
            largest = max(x.nbytes for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            self.seen.setdefault(name, []).append(largest)
        return func(*args, **(kwargs or {}))


def counted(comm, form: tuple = FORM) -> dict:
    """{"ours", "theirs": {collective: bytes of each call of one step}}, both with torch's collectives, ours at once so that the
    eye sees them.
    """
    mine, its, x, found = model_of(comm.device, form), model_of(comm.device, form), batch_of(comm, form), {}
    sharded, optimizer = ours_on(comm, mine, "native", overlap=False), fsdp2(comm, its)
    for who, model, stepper in (("ours", mine, sharded), ("theirs", its, optimizer)):
        for _ in range(2):  # the first step of FSDP2 sets things up
            with _Eye() as eye:
                model(x).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
        found[who] = eye.seen
    return found


def traced(comm, algorithm: str, form: tuple = FORM) -> dict:
    """When the second step began and ended (picoseconds), and the bytes that this rank should have sent in it."""
    model, x, begin = model_of(comm.device, form), batch_of(comm, form), 0
    sharded = ours_on(comm, model, algorithm)
    for _ in range(2):
        comm.native.barrier()
        begin = comm.clock()
        model(x).square().mean().backward()
        sharded.step()
        sharded.zero_grad()
    return {"begin": begin, "formula": bytes_sent(sharded._flats, comm.size, comm.rank, stage=3)}


# --- torch's collectives, in the form that ZeRO takes ---------------------------------------------------------------------
def native_reduce_scatter(comm, x: torch.Tensor) -> torch.Tensor:
    """Chunk `comm.rank` of the sum. torch's wants equal chunks, so what does not divide is padded."""
    sizes, n = chunk_sizes(x.numel(), comm.size), comm.size
    if sizes[0] != sizes[-1]:
        padded = x.new_zeros(n, sizes[0])
        for row, chunk in zip(padded, cut(x, n), strict=True):
            row[: chunk.numel()] = chunk
        x = padded.view(-1)
    out = x.new_empty(sizes[0])
    _single(comm, "reduce_scatter")(out, x)
    return out[: sizes[comm.rank]]


def native_all_gather(comm, x: torch.Tensor, *, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The flat tensor of `numel` elements whose chunk r is rank r's `x`."""
    sizes = chunk_sizes(numel, comm.size)
    out = x.new_empty(numel) if out is None else out
    if sizes[0] == sizes[-1]:
        _single(comm, "all_gather")(out, x)
        return out
    padded, own = x.new_empty(comm.size, sizes[0]), x.new_zeros(sizes[0])
    own[: x.numel()] = x
    _single(comm, "all_gather")(padded.view(-1), own)
    for chunk, row in zip(out.split(sizes), padded, strict=True):
        chunk.copy_(row[: chunk.numel()])
    return out


def _single(comm, word: str) -> Callable:
    """torch's collective on one tensor, under its new name or its old."""
    old = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[word]
    return getattr(comm.native, f"{word}_single", None) or getattr(comm.native, old)


def _collectives(algorithm: str) -> tuple[Callable, Callable]:
    if algorithm == "native":
        return native_reduce_scatter, native_all_gather
    return get_algorithm("reduce_scatter", algorithm), get_algorithm("all_gather", algorithm)


# --- rows -----------------------------------------------------------------------------------------------------------------
def _count_rows(case: dict, run) -> Iterator[Row]:
    """How many collectives a step has and what they carry: ok where FSDP2 has as many, and they carry as much, on every rank."""
    ours, theirs = run.values[0]["ours"], run.values[0]["theirs"]
    alike = all(value == run.values[0] for value in run.values)
    here = {"benchmark": "zero", "case": case, "peer": PEER, "machine": {"backend": run.backend}}
    for name in ("all_gather", "reduce_scatter"):
        mine, its = ours.get(name, []), theirs.get(name, [])
        yield Row(metric=f"{name}s", value=len(mine), unit="calls", ok=alike and len(mine) == len(its), **here)
        yield Row(metric=f"{name}_payload", value=sum(mine), unit="B", ok=alike and sorted(mine) == sorted(its), **here)


def _sent_row(case: dict, run) -> Row:
    sends = [e for e in run.trace.where(kind="send").events if e.start >= run.values[e.rank]["begin"]]
    sent = [sum(e.bytes for e in sends if e.rank == rank) for rank in range(case["ranks"])]
    formula = [value["formula"] for value in run.values]
    here = {"benchmark": "zero", "case": case, "machine": {"backend": run.backend}}
    return Row(
        metric="bytes_sent", value=max(sent), unit="B", peer="formula: 3 (n-1)/n of the parameters", ok=sent == formula, **here
    )
