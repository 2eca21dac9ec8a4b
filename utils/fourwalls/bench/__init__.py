"""Benchmarks of every piece on the reader's own machine: `python -m fourwalls.bench NAME`.

Each benchmark is one module with `rows(options)`, which yields records (record.py), and `describe`, a line of help. A number
never stands alone: it has a unit, a spread, a machine, the thing it is compared with, and a word whether the result was right.

    time_ratio = median over alternating pairs of (our time / the peer's time)

Reference: Georges, Buytaert, Eeckhout, "Statistically rigorous Java performance evaluation", OOPSLA 2007; nccl-tests.
"""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

__all__ = ["BENCHMARKS", "ONE_MACHINE", "load"]

# name on the command line -> module in this package; a module is loaded only when asked for
BENCHMARKS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "all-to-all": "all_to_all",
    "calibrate": "calibrate",
    "compress": "compress",
    "context-parallel": "context_parallel",
    "data-parallel": "data_parallel",
    "embedding": "embedding",
    "fusion": "fusion",
    "gathered-product": "gathered_product",
    "int8": "int8",
    "launch": "launch",
    "layouts": "layouts",
    "simulator": "simulator",
    "pipeline": "pipeline",
    "memory": "memory",
    "precision": "precision",
    "prune": "prune",
    "quantize": "quantize",
    "recompute": "recompute",
    "tensor-parallel": "tensor_parallel",
    "winograd": "winograd",
    "zero": "zero",
}
# they start ranks themselves, or need none: nothing for torchrun
ONE_MACHINE = (
    "embedding",
    "fusion",
    "gathered-product",
    "int8",
    "launch",
    "layouts",
    "memory",
    "pipeline",
    "precision",
    "prune",
    "quantize",
    "recompute",
    "simulator",
    "winograd",
)


def load(name: str) -> ModuleType:
    """The module of benchmark `name`; underscores will do. ValueError, with the nearest name, for one that does not exist."""
    known = name.replace("_", "-")
    if known not in BENCHMARKS:
        near = get_close_matches(known, BENCHMARKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}{hint}")
    return import_module(f"{__name__}.{BENCHMARKS[known]}")
