"""Parameter servers: the weights have owners, and workers send them gradients and fetch weights.

The first ranks of a run are servers, each with a part of the weights and of the optimiser's state; the others are workers, who
hold a copy to compute with. In step, a server waits for every worker's gradient, averages and steps once: that is data
parallelism. Out of step, it takes each gradient as it comes, and nobody waits for the slow one; gradients are then those of older
weights, and a bound says how far the fast may run ahead: a worker waits while it is more than `bound` steps ahead of the slowest.

    in step:  w = w - lr f(sum over workers of samples_i g_i / samples)         out of step:  clock(reader) - slowest <= bound

Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013. Bytes: `fourwalls.cost.sparse.server_bytes`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..ranks.comm import Comm
from .server_keys import KeyMap, place_keys, sizes_of

__all__ = ["MODES", "Entry", "Server", "Worker", "check_roles", "train_with_servers"]

MODES = ("in step", "out of step")
PULL, PUSH, DONE = range(3)  # what a worker wants
HEAD, BODY = 1, 2  # tags
_NAP = 2e-4  # seconds between looks for whoever comes first, on real ranks


class Entry(NamedTuple):
    """A line of a server's log, in the order in which it acted. kind: "read", "push" or "done". clock: pushes that this worker
    had made before. version: steps of the weights it was given (read), or those after it was applied (push). time: picoseconds.
    """

    kind: str
    worker: int
    clock: int
    version: int
    time: int


class Server:
    """One server's part. weights: flat, what it owns. optimizer: a function from [parameter] to an optimiser, which acts
    element by element (SGD, Adam, AdamW). workers: their ranks. bound: None for none. publish(version, weights) is called after
    each step.
    """

    def __init__(
        self,
        comm: Comm,
        weights: torch.Tensor,
        optimizer: Callable,
        *,
        workers: Sequence[int],
        mode: str = "in step",
        bound: int | None = None,
        publish: Callable[[int, torch.Tensor], object] | None = None,
    ):
        check_mode(mode, bound)
        self.comm, self.workers, self.mode, self.bound, self.publish = comm, list(workers), mode, bound, publish
        self.weights = torch.nn.Parameter(weights.detach().clone())
        self.optimizer = optimizer([self.weights])
        self.version, self.clocks, self.log = 0, dict.fromkeys(self.workers, 0), []
        self.active = list(self.workers)

    def serve(self) -> list[Entry]:
        """Answer until every worker has said goodbye; returns the log."""
        if self.mode == "in step":
            while self.active:
                self.round()
        else:
            self._as_they_come()
        return self.log

    def round(self) -> None:
        """Hear every worker once, step once with what they push, answer all of them."""
        heads = [(w, self._listen(w)) for w in self.active]
        kinds = {w: request.wait().tolist() for w, request in heads}
        bodies = {w: self._begin_body(w) for w, (kind, *_) in kinds.items() if kind == PUSH}
        pushes = [(w, kinds[w], body.wait()) for w, body in bodies.items()]
        if pushes:
            self._apply(pushes)
        self._leave(w for w, (kind, *_) in kinds.items() if kind == DONE)
        for request in [r for w in self.active for r in self._answer(w)]:
            request.wait()

    def _as_they_come(self) -> None:
        heads = {w: self._listen(w) for w in self.active}
        held: list[int] = []
        while self.active:
            w = self._first(heads)
            head = heads.pop(w).wait().tolist()
            if head[0] == PUSH:
                self._apply([(w, head, self._begin_body(w).wait())])
            if head[0] == DONE:
                self._leave([w])
            else:
                held.append(w)
            for ready in [w for w in held if self._may_read(w)]:
                held.remove(ready)
                for request in self._answer(ready):
                    request.wait()
                heads[ready] = self._listen(ready)
            assert heads or not self.active, f"workers {held} are all held back, and nobody is left to let them go"

    def _may_read(self, worker: int) -> bool:
        """Whether `worker` is at most `bound` steps ahead of the slowest that still works."""
        return self.bound is None or self.clocks[worker] - min(self.clocks[w] for w in self.active) <= self.bound

    def _first(self, heads: Mapping) -> int:
        """The worker whose message is here first. Who was served longest ago is asked first, so that nobody starves."""
        while True:
            for w, request in heads.items():
                if request.done:
                    return w
            if not self.comm.simulated:
                time.sleep(_NAP)

    def _apply(self, pushes: list) -> None:
        """One step with the pushes (worker, head, flat gradient), given in order of the workers."""
        self.weights.grad = self._average([(head[3], grad) for _, head, grad in pushes])
        self.optimizer.step()
        self.version += 1
        for w, *_ in pushes:
            self._note("push", w)
            self.clocks[w] += 1
        if self.publish is not None:
            self.publish(self.version, self.weights.detach())

    def _average(self, pushes: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The mean over samples from each worker's mean: who has more samples counts for more, an empty batch for nothing."""
        total = max(1, sum(samples for samples, _ in pushes))
        average = torch.zeros_like(self.weights)
        for samples, grad in pushes:
            average.add_(grad, alpha=samples / total)
        return average

    def _listen(self, worker: int):
        return self.comm.irecv(torch.empty(4, dtype=torch.int64, device=self.comm.device), worker, HEAD)

    def _begin_body(self, worker: int):
        return self.comm.irecv(torch.empty_like(self.weights.detach()), worker, BODY)

    def _answer(self, worker: int) -> list:
        self._note("read", worker)
        head = torch.tensor([PUSH, self.clocks[worker], self.version, 0], device=self.comm.device)
        return [self.comm.isend(head, worker, HEAD), self.comm.isend(self.weights.detach(), worker, BODY)]

    def _note(self, kind: str, worker: int) -> None:
        self.log.append(Entry(kind, worker, self.clocks[worker], self.version, self.comm.clock()))

    def _leave(self, workers) -> None:
        for w in list(workers):
            self.active.remove(w)
            self._note("done", w)


class Worker:
    """A worker's part. tensors: name -> parameter; keys: who owns what; servers: their ranks. Each call waits for all servers."""

    def __init__(self, comm: Comm, tensors: Mapping[str, torch.nn.Parameter], keys: KeyMap, servers: Sequence[int]):
        if len(servers) != keys.servers:
            raise ValueError(f"{len(servers)} servers are given, and the keys lie on {keys.servers}")
        self.comm, self.tensors, self.keys, self.servers = comm, dict(tensors), keys, list(servers)
        self.clock, self.versions = 0, [0] * len(self.servers)
        self.data = {name: p.data for name, p in self.tensors.items()}
        self.parts = [keys.pack(j, self.data) for j in range(keys.servers)]  # buffers of the right size

    def pull(self) -> None:
        """Fetch all weights. Sends a header to each server, receives S bytes in all and a header from each."""
        self._ask(PULL, [])

    def push(self, samples: int = 1) -> None:
        """Send the gradients, the mean over `samples`, and wait for the next weights. S bytes and headers each way.

        A parameter without a gradient sends zeros. Raises ValueError before anything is sent for samples that are no number of
        samples, and (comm.checks) for a gradient with nan or inf: it names the worker's rank and the key.
        """
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise ValueError(f"rank {self.comm.rank}: samples is {samples!r}; a whole number of at least 0")
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.tensors.items()}
        bad = [name for name, g in grads.items() if not bool(torch.isfinite(g).all())] if self.comm.checks else []
        if bad:
            more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
            where = f"rank {self.comm.rank}, push {self.clock}: nan or inf in the gradient of {bad[0]}{more}"
            raise ValueError(f"{where}; no server has seen it: look at this worker's batch and loss")
        self._ask(PUSH, [self.keys.pack(j, grads) for j in range(self.keys.servers)], samples)
        self.clock += 1

    def done(self) -> None:
        """Say goodbye: the servers wait no longer for this worker."""
        for request in self._heads(DONE, 0):
            request.wait()

    def _ask(self, kind, bodies, samples=0):
        sending = self._heads(kind, samples)
        sending += [self.comm.isend(body, server, BODY) for body, server in zip(bodies, self.servers, strict=bool(bodies))]
        heads = [self.comm.irecv(torch.empty(4, dtype=torch.int64, device=self.comm.device), s, HEAD) for s in self.servers]
        parts = [self.comm.irecv(part, s, BODY) for part, s in zip(self.parts, self.servers, strict=True)]
        for request in sending:
            request.wait()
        self.versions = [int(head.wait()[2]) for head in heads]
        for j, part in enumerate(parts):
            self.keys.unpack(j, part.wait(), self.data)

    def _heads(self, kind, samples):
        heads = [torch.tensor([kind, self.clock, v, samples], device=self.comm.device) for v in self.versions]
        return [self.comm.isend(head, server, HEAD) for head, server in zip(heads, self.servers, strict=True)]


def train_with_servers(
    comm: Comm,
    make_model: Callable[[], torch.nn.Module],
    optimizer: Callable,
    loss_of: Callable,
    *,
    steps: int,
    servers: int = 1,
    mode: str = "in step",
    bound: int | None = None,
    rule: str = "cut",
    assign: Mapping[str, int] | None = None,
    seconds: Callable[[int, int], float] | None = None,
    publish: Callable[[int, torch.Tensor], object] | None = None,
) -> dict:
    """A whole training run: ranks 0 to servers - 1 serve, the others work, each `steps` steps.

    loss_of(model, step, worker) gives (mean loss, samples), worker counted from 0; seconds(worker, step), if given, states what
    forward and backward take. Returns on a worker {"losses", "weights": name -> tensor}, on a server {"log", "weights": flat}.
    Raises ValueError for roles, mode, bound or keys that do not exist.
    """
    ranks = check_roles(comm.size, servers)
    check_mode(mode, bound)
    model = make_model()
    keys = place_keys(sizes_of(model), servers, rule=rule, assign=assign)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if comm.rank < servers:
        mine = keys.pack(comm.rank, trained)
        server = Server(comm, mine, optimizer, workers=ranks, mode=mode, bound=bound, publish=publish)
        return {"log": server.serve(), "weights": server.weights.detach()}
    worker, number, losses = Worker(comm, trained, keys, range(servers)), comm.rank - servers, []
    worker.pull()
    for step in range(steps):
        with comm.compute("forward and backward", seconds=seconds and seconds(number, step), kind="backward"):
            loss, samples = loss_of(model, step, number)
            loss.backward()
        losses.append(loss.item())
        worker.push(samples)
        for p in trained.values():
            p.grad = None
    worker.done()
    return {"losses": losses, "weights": {name: p.detach() for name, p in trained.items()}}


def check_roles(size: int, servers: int) -> range:
    """The workers' ranks, those after the servers'. ValueError unless there is at least one of each."""
    if not isinstance(servers, int) or isinstance(servers, bool) or not 1 <= servers < size:
        raise ValueError(
            f"servers is {servers!r} of {size} ranks; there is at least 1, and at least 1 worker: 1 to {size - 1}"
            if size > 1
            else f"servers is {servers!r} of 1 rank; a server and a worker need 2 ranks"
        )
    return range(servers, size)


def check_mode(mode: str, bound: int | None) -> None:
    """ValueError for a mode or bound that does not exist, or a bound where nobody can run ahead."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(map(repr, MODES))}")
    if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
        raise ValueError(f"bound is {bound!r}; a whole number of steps of at least 0, or None for no bound")
    if mode == "in step" and bound is not None:
        raise ValueError(f"bound is {bound} in step, where nobody can run ahead; leave it out, or take mode='out of step'")
