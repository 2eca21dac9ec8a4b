"""The two ways to start a rank program: on real processes, and on simulated ranks. The program is the same function.

    run = fw.run(program, x, ranks=4)
    run = fw.simulate(program, x, ranks=256, cluster="a100-selene")

Reference: DESIGN, "The rank program".
"""

from collections.abc import Callable, Mapping
from typing import Any

from .result import Run

__all__ = ["pool", "run", "simulate"]


def run(
    program: Callable[..., Any],
    *args,
    ranks: int = 4,
    seed: int = 0,
    timeout: float = 30.0,
    limit: float = 600.0,
    checks: bool = True,
    backend: str | None = None,
    threads: int | None = None,
    stream: bool = True,
    start: str | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs,
) -> Run:
    """Run `program(comm, *args, **kwargs)` on `ranks` processes of this machine and return a Run.

    seed      each rank's torch generator starts from (seed, rank)
    timeout   seconds that a rank may wait for the others before the run ends and the one they wait for is named
    limit     seconds that the whole run may take; math.inf: as long as it likes
    checks    False: no checks of shapes, dtypes and pending buffers (for benchmarks)
    backend   "gloo" or "nccl"; None: nccl where every rank can have a GPU, else gloo
    threads   torch threads in each rank; None: allowed cores / ranks, at least 1
    stream    False: ranks' output is kept in run.outputs and not shown
    start     "fork" or "spawn"; None: fork from a warm server where that is safe
    env       further environment variables of the ranks, names and texts
    An argument wrapped in fw.per_rank([...]) gives each rank its own item. Functions travel by value, torch's default dtype is
    this process's; results come back pickled, and nothing in this process is changed by the ranks. Raises ValueError before
    anything starts; RankError, DeadlockError or MismatchError after.
    """
    from .servers import prewarm

    if backend != "nccl":
        prewarm(start)  # it imports torch while this process does

    from .processes import run_processes

    return run_processes(
        program,
        args,
        kwargs,
        ranks=ranks,
        seed=seed,
        timeout=timeout,
        limit=limit,
        checks=checks,
        backend=backend,
        threads=threads,
        stream=stream,
        start=start,
        env=env,
    )


def simulate(
    program: Callable[..., Any],
    *args,
    ranks: int = 4,
    cluster=None,
    seed: int = 0,
    checks: bool = True,
    clock: str = "stated",
    stream: bool = True,
    on_message: Callable | None = None,
    **kwargs,
) -> Run:
    """Run `program(comm, *args, **kwargs)` on simulated ranks, inside this process and under a virtual clock; see
    `simulate_ranks`.
    """
    from .simulator import simulate_ranks

    return simulate_ranks(
        program,
        args,
        kwargs,
        ranks=ranks,
        cluster=cluster,
        seed=seed,
        checks=checks,
        clock=clock,
        stream=stream,
        on_message=on_message,
    )


def pool(**options):
    """Ranks that stay up between programs, for benchmarks: `with fw.pool(ranks=4) as ranks: ranks.run(program, x)`.

    Under torchrun they are the ranks that it has started.
    """
    from .machine import under_torchrun

    if under_torchrun():
        from .cluster import ClusterPool

        return ClusterPool(**options)
    from .processes import Pool

    return Pool(**options)
