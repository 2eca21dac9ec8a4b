"""Four Walls: build large-model training from scratch, on real ranks.

`import fourwalls as fw`, then `fw.run(program, ranks=4)` for real processes and `fw.simulate(program, ranks=256)` for
modelled ones.
Everything here is looked up when first used, so that importing costs nothing and arithmetic needs no torch.
"""

import importlib

_WHERE = {
    "run": "ranks.run",
    "simulate": "ranks.run",
    "pool": "ranks.run",
    "per_rank": "ranks.result",
    "Run": "ranks.result",
    "Comm": "ranks.comm",
    "CommError": "ranks.comm",
    "DeadlockError": "ranks.comm",
    "MismatchError": "ranks.comm",
    "RankError": "ranks.comm",
    "Event": "ranks.trace",
    "Trace": "ranks.trace",
    "predict": "course.predict",
    "keep": "course.keep",
    "kept": "course.keep",
    "lab": "course.lab",
    "progress": "course.progress",
    "reset": "course.home",
    "theatre": "course.theatre",
    "explorer": "course.explorer",
    "bucket_explorer": "course.bucket_explorer",
    "memory_explorer": "viz.memory_explorer",
    "bubble_explorer": "course.pipeline_widgets",
    "rounding_bench": "course.rounding_bench",
    "schedule_editor": "course.pipeline_widgets",
}
_PACKAGES = (
    "bench", "collectives", "cost", "course", "kernels", "memory", "nn", "numerics", "parallel", "plan", "ranks", "train", "viz",
)  # fmt: skip

__all__ = [*_WHERE, *_PACKAGES]


def __getattr__(name: str):
    if name in _WHERE:
        found = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif name in _PACKAGES:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"fourwalls has no {name!r}; it has {', '.join(__all__)}")
    globals()[name] = found
    return found


def __dir__():
    return sorted(__all__)
