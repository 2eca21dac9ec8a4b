"""The same program under `torchrun`, on one node or many: this process is one rank, and torchrun is the supervisor.

Nothing is started here and nobody shares memory, so calls are matched through torchrun's own key-value store: whoever comes
second finds the first one's line there and compares. A wait longer than `timeout` makes each waiting rank tell the others
what it waits for, and the same diagnosis as on one machine names the circle or the straggler.

    torchrun --nproc-per-node 8 script.py        # script.py calls fw.run(program, ...)

Reference: the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
"""

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from .arguments import rank_arguments
from .comm import DeadlockError, RankError
from .diagnose import blamed, explain_deadlock, explain_failure, explain_straggler, stuck
from .machine import seed_everything
from .result import Run
from .ship import pack_value, unpack_value
from .trace import Trace
from .transport import PeerLost, World

__all__ = ["ClusterPool", "StoreBook", "run_cluster"]

TELL_SECONDS = 2.0  # for the others to say what they wait for


def run_cluster(
    program: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    ranks: int | None = None,
    seed: int = 0,
    timeout: float = 30.0,
    checks: bool = True,
    backend: str | None = None,
    threads: int | None = None,
) -> Run:
    """Run `program(comm, *args, **kwargs)` as this process's part; every rank gets the same Run.

    Raises ValueError where `ranks` is not WORLD_SIZE; RankError in all ranks when one fails; torchrun then ends the job.
    """
    kwargs = kwargs or {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != size:
        raise ValueError(f"ranks={ranks}, but torchrun has started {size}; leave ranks out, or start that many")
    given = rank_arguments(program, args, kwargs, size)
    began = time.perf_counter()
    if threads:
        torch.set_num_threads(threads)
    name, device = _connect(backend, timeout)
    store = torch.distributed.PrefixStore(f"fourwalls/{_next_run()}", torch.distributed.distributed_c10d._get_default_store())
    world = World(
        rank=rank,
        size=size,
        device=device,
        backends=_backends(device),
        book=StoreBook(store, rank),
        patience=timeout,
        by_order=name == "nccl",
    )
    torch.distributed.barrier()
    seed_everything(seed, rank)
    world.begin(seed=seed, checks=checks, start=time.perf_counter_ns())
    own_args, own_kwargs = given(rank)
    try:
        value = program(world.comm(), *own_args, **own_kwargs)
        world.settle()
        store.set(f"over/{rank}", "1")
        packed = pack_value(value, rank)
    except PeerLost as error:
        raise _diagnose(store, world, error, timeout) from None
    except BaseException as error:
        store.set("failure", pickle.dumps((rank, type(error).__name__, explain_failure(rank, size, error))))
        raise
    answers: list = [None] * size
    torch.distributed.all_gather_object(answers, (packed, world.events))
    trace = Trace(sorted((e for _, events in answers for e in events), key=lambda e: (e[4], e[0])), ranks=size)
    values = [unpack_value(data) for data, _ in answers]
    return Run(values, trace, [""] * size, time.perf_counter() - began, name, size)


class ClusterPool:
    """What processes.Pool is on one machine: here torchrun's ranks stay up between programs anyway. Every rank must run the same
    ones.
    """

    def __init__(self, *, ranks: int | None = None, **options):
        self.options = {"ranks": ranks} | {k: v for k, v in options.items() if k in ("timeout", "backend", "threads")}

    def __enter__(self) -> "ClusterPool":
        return self

    def __exit__(self, *_) -> None: ...

    def run(self, program: Callable, *args, seed: int = 0, checks: bool = True, stream: bool = True, **kwargs) -> Run:
        """Run one program on all ranks; torchrun shows what they print."""
        return run_cluster(program, args, kwargs, seed=seed, checks=checks, **self.options)


class StoreBook:
    """What book.Book is on one machine, through a key-value store: one question per message, none where checks are off."""

    def __init__(self, store, rank: int):
        self.store, self.rank = store, rank

    def post(self, sending: bool, peer: int, context: int, tag: int, n: int, text: bytes) -> tuple[int, bytes | None]:
        if not text:
            return -1, None
        pair = (self.rank, peer) if sending else (peer, self.rank)
        key, mine = f"message/{pair[0]}/{pair[1]}/{context}/{tag}/{n}", ("s" if sending else "r") + text.decode(errors="replace")
        found = self.store.compare_set(key, "", mine)
        if found == mine.encode():
            return -1, None
        self.store.delete_key(key)
        return -1, found[1:]

    def release(self, slot: int) -> None: ...

    def state(self, *_) -> None:
        """No memory in common: the communicator tells each rank instead."""

    def say(self, *_) -> None: ...


def _connect(backend: str | None, timeout: float) -> tuple[str, torch.device]:
    """Join the job's process group, once for this process. (backend's name, this rank's device)."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend={backend!r}; known are 'gloo', 'nccl', or None to choose")
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    if backend == "nccl" and gpus < here:
        raise ValueError(f"backend='nccl': {here} ranks on this node need {here} GPUs, it has {gpus}")
    name = "nccl" if gpus >= here else "gloo"
    device = torch.device("cuda", local) if name == "nccl" else torch.device("cpu")
    if name == "nccl":
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if name == "nccl" else "gloo", timeout=timedelta(seconds=max(timeout, 1))
        )
    return name, device


def _backends(device: torch.device) -> tuple:
    """One backend for each direction with NCCL (see worker.py), one for both with gloo."""
    group = torch.distributed.group.WORLD
    if device.type == "cuda":
        return group._get_backend(device), torch.distributed.new_group(backend="nccl")._get_backend(device)
    return (group._get_backend(device),) * 2


def _next_run(counter: list = [0]) -> int:  # noqa: B006 - the count of this process's runs, the same on every rank
    counter[0] += 1
    return counter[0]


def _diagnose(store, world: World, error: PeerLost, timeout: float) -> Exception:
    """What lies behind a broken or endless wait: another rank's failure, a deadlock, a straggler."""
    store.set(f"wait/{world.rank}", pickle.dumps((error.call, error.late, error.waited)))
    deadline, told = time.monotonic() + TELL_SECONDS, {}
    while time.monotonic() < deadline and len(told) < world.size:
        if store.check(["failure"]):
            rank, kind, text = pickle.loads(store.get("failure"))
            return RankError(text, rank=rank, kind=kind)
        new = [r for r in range(world.size) if r not in told and store.check([f"wait/{r}"])]
        told |= {r: pickle.loads(store.get(f"wait/{r}")) for r in new}
        time.sleep(0.05)
    if not any(late for _, late, _ in told.values()):
        return error
    # The first to lose patience breaks the connections of the others. Those that had been waiting for a while count as
    # waiting; one that came only now, to a broken connection, was at work.
    waits = {r: call for r, (call, late, waited) in told.items() if late or waited > timeout / 4}
    over = {r for r in range(world.size) if store.check([f"over/{r}"])}
    held = stuck(waits, over)
    if held:
        return DeadlockError(explain_deadlock(waits, over), rank=min(held), waits={r: waits[r] for r in held})
    names = sorted(blamed(waits, over))
    text = "\n".join(explain_straggler(r, timeout, len(waits)) for r in names)
    return RankError(text, rank=names[0], kind="timeout") if names else error
