"""Who will receive what shape: agreed before a step begins, since a receive needs a buffer of the right size.

Only the first stage knows its inputs, so shapes travel down the pipeline once a step, one small table for each crossing between
ranks: for each micro-batch its rows, dtype and shape. A stage that has not seen a shape before asks its module on the device
`meta`, where nothing is computed. So batches may end unevenly and sequences may change their length from step to step.

    table: (m + 1) x (2 + MOST_DIMS) whole numbers        sizes of a message = sizes of what its stage makes of the table's

Reference: none; torch.distributed.pipelining asks for fixed shapes, or infers them once.
"""

import torch
from torch.func import functional_call

from ...ranks.comm import Comm
from .routes import Routes

__all__ = ["MOST_DIMS", "agree_on_shapes", "output_shape", "table_bytes"]

MOST_DIMS = 6
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64)
_TAG = 0  # no product has this tag


def table_bytes(microbatches: int) -> int:
    """Bytes of one table, which crosses each boundary between two ranks once a step."""
    return 8 * (microbatches + 1) * (2 + MOST_DIMS)


def agree_on_shapes(comm: Comm, routes: Routes, running, microbatches, step: int) -> dict:
    """(stage, micro-batch) -> (shape, dtype) of what that stage makes, for the stages of this rank and those before them.

    Raises ValueError where ranks are in different steps, or the last stage's targets belong to other inputs.
    """
    shapes = {}
    for stage in range(routes.stages - 1):
        here, there = routes.rank_of[stage], routes.rank_of[stage + 1]
        if here == comm.rank:
            before = _inputs(stage, shapes, microbatches)
            made = [_of_stage(running[stage], *looks) for looks in before]
            shapes.update({(stage, k): looks for k, looks in enumerate(made)})
            if there != here:
                rows = shapes.get("rows") or [m.rows for m in microbatches]
                comm.send(_table(made, rows, step), there, _TAG)
        elif there == comm.rank:
            table = comm.recv(torch.empty(len(microbatches) + 1, 2 + MOST_DIMS, dtype=torch.int64), here, _TAG)
            _check_step(comm, int(table[-1, 0]), step, here)
            shapes["rows"] = table[:-1, 0].tolist()
            shapes.update({(stage, k): _looks(row) for k, row in enumerate(table[:-1].tolist())})
    if routes.rank_of[routes.stages - 1] == comm.rank and "rows" in shapes:
        _check_rows(comm, shapes["rows"], microbatches)
    shapes.pop("rows", None)
    return shapes


def output_shape(module: torch.nn.Module, shape, dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of module(x) for an x of that shape, without computing it.

    A module whose forward talks to other ranks says so itself, in a method `output_shape(shape, dtype)`.
    """
    if hasattr(module, "output_shape"):
        return module.output_shape(shape, dtype)
    on_meta = {name: torch.empty_like(t, device="meta") for name, t in (*module.named_parameters(), *module.named_buffers())}
    x = torch.empty(shape, dtype=dtype, device="meta")
    with torch.no_grad():
        try:
            y = functional_call(module, on_meta, (x,))
        except (NotImplementedError, RuntimeError):  # an operation that meta does not know: compute it once, on zeros
            device = next((p.device for p in module.parameters()), "cpu")
            with torch.random.fork_rng(devices=[]):
                y = module(torch.zeros(shape, dtype=dtype, device=device))
    if not isinstance(y, torch.Tensor):
        raise ValueError(f"a stage returned a {type(y).__name__}; a stage takes one tensor and returns one tensor")
    if y.dim() > MOST_DIMS or y.dtype not in _DTYPES:
        raise ValueError(f"a stage returned {y.dtype} {tuple(y.shape)}; allowed: up to {MOST_DIMS} dims of {_DTYPES}")
    return tuple(y.shape), y.dtype


def _of_stage(running, shape, dtype):
    known = running.module.__dict__.setdefault("_output_shapes", {})
    key = shape, dtype, running.module.training
    if key not in known:
        known[key] = output_shape(running.module, shape, dtype)
    return known[key]


def _inputs(stage, shapes, microbatches):
    if stage == 0:
        return [(tuple(m.inputs.shape), m.inputs.dtype) for m in microbatches]
    return [shapes[stage - 1, k] for k in range(len(microbatches))]


def _table(made, rows, step) -> torch.Tensor:
    table = torch.zeros(len(made) + 1, 2 + MOST_DIMS, dtype=torch.int64)
    for k, ((shape, dtype), count) in enumerate(zip(made, rows, strict=True)):
        table[k] = torch.tensor([count, _DTYPES.index(dtype) * 16 + len(shape), *shape, *[0] * (MOST_DIMS - len(shape))])
    table[-1, 0] = step
    return table


def _looks(row: list[int]):
    kind, dims = divmod(row[1], 16)
    return tuple(row[2 : 2 + dims]), _DTYPES[kind]


def _check_step(comm, theirs: int, mine: int, rank: int) -> None:
    if theirs != mine:
        raise ValueError(f"rank {comm.rank} is in step {mine}, rank {rank} in step {theirs}: some rank left a step out")


def _check_rows(comm, rows, microbatches) -> None:
    for k, (count, micro) in enumerate(zip(rows, microbatches, strict=True)):
        if micro.targets is not None and len(micro.targets) != count:
            raise ValueError(
                f"micro-batch {k}: stage 0 has {count} rows of inputs, rank {comm.rank} {len(micro.targets)} of targets: the "
                "targets are of another batch"
            )
