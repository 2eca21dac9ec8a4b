"""Real ranks: `run_processes` starts them, runs one program and ends them; a `Pool` keeps them for several.

What can be refused is refused here, before anything starts. The processes come from the fork server (launch.py), the loop
that carries their messages and ends a run that went wrong is in supervise.py, and what happens inside a rank in worker.py.

    values, output, trace  <-  program(comm, *args, **kwargs) on each of n processes

Reference: DESIGN, "The rank program".
"""

import math
import numbers
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping

import torch

from .arguments import rank_arguments, whole_seed
from .cluster import run_cluster
from .comm import RankError
from .diagnose import explain_unwaited, outside
from .forkserver import existing_folder
from .launch import open_session, start_method
from .machine import gpu_count, loopback_interface, threads_per_rank, under_torchrun
from .output import Output
from .result import Run
from .servers import quiet, scratch_folder
from .ship import pack_program, sources_in, unpack_value
from .supervise import Group
from .trace import Trace

__all__ = ["MAX_RANKS", "Pool", "run_processes"]

MAX_RANKS = 64
BACKENDS = ("gloo", "nccl")
LONGEST = 10**6  # seconds that a wait can be allowed: eleven days


def run_processes(
    program: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    ranks: int = 4,
    seed: int = 0,
    timeout: float = 30.0,
    limit: float = 600.0,
    checks: bool = True,
    backend: str | None = None,
    threads: int | None = None,
    stream: bool = True,
    env: dict | None = None,
    start: str | None = None,
) -> Run:
    """Run `program(comm, *args, **kwargs)` on `ranks` fresh processes.

    timeout: seconds the ranks may wait for one that computes. limit: seconds for the whole run, or math.inf.
    backend: "gloo", "nccl", or None: nccl where each rank can have a GPU of its own. threads: per rank (default: allowed
    cores / ranks). env: further environment variables. Arguments and results travel as copies, tensors to and from the CPU.
    start: "fork" or "spawn" (default: fork where it is safe). Under torchrun this process is one of the ranks it has started.
    Raises ValueError for bad arguments, before anything starts; DeadlockError, MismatchError, RankError; KeyboardInterrupt.
    """
    kwargs, seed = kwargs or {}, whole_seed(seed)
    if under_torchrun():  # the same script on many nodes: torchrun has started the ranks, and says how many
        return run_cluster(program, args, kwargs, seed=seed, timeout=timeout, checks=checks, backend=backend, threads=threads)
    check_count(ranks)
    rank_arguments(program, args, kwargs, ranks)
    with Pool(ranks=ranks, timeout=timeout, limit=limit, backend=backend, threads=threads, env=env, start=start) as pool:
        return pool._run(program, args, kwargs, seed=seed, checks=checks, stream=stream, last=True)


def check_count(ranks: int) -> None:
    """ValueError unless `ranks` is a number of real ranks."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: a whole number from 1 to {MAX_RANKS}")
    if ranks > MAX_RANKS:
        raise ValueError(
            f"ranks={ranks}: at most {MAX_RANKS} real processes; fw.simulate(program, ..., ranks={ranks}) runs that many in one"
        )
    if sys.platform == "win32":
        raise ValueError("real ranks need Linux or macOS; here, use fw.simulate(...), or run this notebook under WSL")


def choose_backend(backend: str | None, ranks: int, gpus: Callable[[], int] = gpu_count) -> str:
    """ "gloo" or "nccl" for what was asked. ValueError for an unknown name, and for NCCL with fewer GPUs than ranks."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r}; known are {', '.join(map(repr, BACKENDS))}, or None to choose")
    if backend == "gloo":
        return "gloo"
    have = gpus()
    if backend == "nccl" and have < ranks:
        raise ValueError(
            f"backend='nccl': {ranks} ranks need {ranks} GPUs, this machine has {have}; use 'gloo', or ranks={max(have, 1)}"
        )
    return "nccl" if have >= ranks else "gloo"


class Pool:
    """Ranks that stay open for several programs, for benchmarks: `with fw.pool(ranks=4) as pool: pool.run(program, ...)`.

    A program that fails closes the pool. Arguments as `run_processes`.
    """

    def __init__(self, *, ranks=4, timeout=30.0, limit=600.0, backend=None, threads=None, env=None, start=None):
        check_count(ranks)
        for name, value, most in (("timeout", timeout, LONGEST), ("limit", limit, math.inf)):
            if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < value <= most:
                upto = f", at most {most}" if most < math.inf else "; math.inf for no limit"
                raise ValueError(f"{name}={value!r}: a number of seconds above 0{upto}")
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ValueError(f"threads={threads!r}: a whole number of at least 1, or None for allowed cores / ranks")
        check_environment(env)
        self.ranks, self.timeout, self.limit = ranks, float(timeout), float(limit)
        self.backend = choose_backend(backend, ranks)
        self.threads = threads or threads_per_rank(ranks)
        self.method = start_method(start, self.backend)
        self.env = _environment(self.threads, env)
        self._group: Group | None = None
        self._closed = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, program: Callable, *args, seed: int = 0, checks: bool = True, stream: bool = True, **kwargs) -> Run:
        """Run one program on the pool's ranks."""
        return self._run(program, args, kwargs, seed=seed, checks=checks, stream=stream)

    def _run(self, program, args, kwargs, *, seed: int, checks: bool, stream: bool, last: bool = False) -> Run:
        """`last`: the ranks end with this program, by themselves."""
        if self._closed:
            raise ValueError("this pool is closed (a program failed in it, or its `with` block has ended); open a new one")
        began, seed = time.perf_counter(), whole_seed(seed)
        rank_arguments(program, args, kwargs, self.ranks)
        common, own = pack_program(program, args, kwargs, self.ranks)
        output = Output(self.ranks, stream=stream, scratch=scratch_folder)
        try:
            if self._group is None:
                session = open_session(self.ranks, method=self.method, env=self.env, modules=_worth_sharing())
                self._group = Group(session, self.timeout, self.limit)
                self._group.greet(self._hello())
            answers = self._group.run(common, own, sources_in(common), output, seed=seed, checks=checks, last=last)
        except BaseException:
            self.close()
            raise
        if last:
            self.close()
        values = [_unpack(rank, answer[0]) for rank, answer in enumerate(answers)]
        trace = Trace(sorted((e for a in answers for e in a[1]), key=lambda e: (e[4], e[0])), ranks=self.ranks)
        unwaited = [call for answer in answers for call in answer[2]]
        if unwaited:
            warnings.warn(explain_unwaited(unwaited), RuntimeWarning, stacklevel=outside())
        seconds = time.perf_counter() - began
        return Run(values, trace, output.texts, seconds, self.backend, self.ranks, output.files)

    def _hello(self) -> dict:
        """What ranks take on (worker.py)."""
        path = [p for p in sys.path if isinstance(p, str)]
        own = {"env": self.env, "threads": self.threads, "backend": self.backend, "timeout": self.timeout}
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        return {**own, "path": path, "folder": _folder(), "dtype": dtype}

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        self._closed = True
        if self._group is not None:
            self._group.close()
            self._group = None


def _worth_sharing() -> list[str]:
    """Modules this process has imported, which the fork server may as well: all later ranks then have them for nothing."""
    own = ("fourwalls.", "torch.nn.", "torch.optim.", "torch.distributed.", "torch.utils.")
    return [name for name in list(sys.modules) if name.startswith(own)]


def _unpack(rank: int, data: bytes):
    try:
        return unpack_value(data)
    except Exception as error:
        text = f"the result of rank {rank} cannot be rebuilt in this process: {type(error).__name__}: {error}"
        raise RankError(text, rank=rank, kind=type(error).__name__) from None


def check_environment(env) -> None:
    """ValueError unless `env` could be an environment: names without "=", texts (or numbers) as values, no zero byte."""
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise ValueError(f"env={env!r}: a dict of names and values, such as {{'OMP_NUM_THREADS': '1'}}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"env: the name {name!r}; a name is a text without '=' and without a zero byte")
        if not isinstance(value, (str, numbers.Real)) or "\0" in str(value):
            raise ValueError(f"env: {name}={value!r}; a value is a text without a zero byte")


def _environment(threads: int, extra: dict | None) -> dict:
    """The ranks' environment: the caller's, with threads and the loopback interface set, then `extra`."""
    env = dict(os.environ) | quiet()
    env |= {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    loopback = loopback_interface()
    if loopback and "GLOO_SOCKET_IFNAME" not in env:
        env["GLOO_SOCKET_IFNAME"] = loopback  # never look up the machine's own name
    if existing_folder() == os.sep:  # nowhere to write: torch's optimizers would make a folder for compiled code when imported
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)
    env |= {k: str(v) for k, v in (extra or {}).items()}
    return env


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"
