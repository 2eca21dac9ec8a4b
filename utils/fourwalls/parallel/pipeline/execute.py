"""A schedule run for real: the list of actions, a module for each stage, a communicator; out come the loss and all gradients.

The same list that was checked, simulated and drawn is walked action by action. Messages are not in the list: before an action a
rank waits for the inputs that other ranks make, after it it sends what they need, and the receives of the next action are posted
before the present one computes, so messages travel while ranks work. Nothing that a legal schedule can say makes this hang, since
sends are never waited for before they must be over.

    bytes a step  =  2 (crossings between ranks) x (m micro-batches) x (bytes of the activation)  +  a table of shapes a crossing

Reference: Narayanan et al. 2021 (arXiv:2104.04473); torch.distributed.pipelining runs lists of actions in the same way.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ...ranks.comm import Comm
from .actions import Schedule, parts
from .legality import check
from .microbatches import MicroBatch, check_numbers
from .outcome import Outcome
from .routes import Routes
from .running import RunningStage
from .shapes import agree_on_shapes
from .simulate import KIND_OF, Times

__all__ = ["execute"]


def execute(
    schedule,
    stages: Mapping[int, torch.nn.Module],
    comm: Comm,
    microbatches: Sequence[MicroBatch],
    loss: Callable | None = None,
    *,
    divide_by: float = 1.0,
    seed: int | None = None,
    recompute: bool = False,
    forward_only: bool = False,
    after_stage: Callable[[int], object] | None = None,
    watch: Callable | None = None,
    seconds: Times | None = None,
    step: int = 0,
) -> Outcome:
    """Run one step of `schedule` (any form that `actions.read` takes) on the ranks of `comm`; gradients are added to `.grad`.

    stages: this rank's stages, stage -> module: one tensor in (rows first), one out.  microbatches: all of them, on every rank
    the same numbers; inputs are read on the rank of stage 0, targets on that of the last stage.  loss: (output, target) -> the
    *sum* over the micro-batch, a scalar; divide_by: what it is divided by, for a mean the count of the whole batch, over all
    accumulated steps and replicas.  seed: gives every (stage, micro-batch) random numbers of its own, so that dropout is the same
    for every schedule; None leaves the generator alone.  recompute: keep a stage's inputs only and run it forward once more.
    after_stage: called once the last gradient of a stage is there, for instance to begin its data-parallel sum.  watch: called
    with (action, its RunningStage) after every action.  seconds: pace every action (to measure a schedule apart from the
    machine).  step: any number that all ranks share, to notice one that is behind.

    Raises IllegalSchedule, ValueError for stages, micro-batches or ranks that do not fit; an error of a stage is passed on.
    """
    schedule = check(schedule, forward_only=forward_only)
    routes = Routes(schedule, comm.rank)
    _check(schedule, routes, stages, comm, microbatches, loss, divide_by)
    split = any(action.kind == "W" for cell in routes.cells for action in parts(cell))
    options = {"divide_by": divide_by, "split": split, "recompute": recompute, "seed": seed, "train": not forward_only}
    running = {s: RunningStage(stages[s], s, routes.stages, loss=loss, **options) for s in routes.mine}
    shapes = agree_on_shapes(comm, routes, running, microbatches, step)
    walk = _Walk(comm, routes, running, microbatches, shapes, seconds, not forward_only)
    walk.all(after_stage, watch)
    return Outcome(walk.losses, routes.rank_of[routes.stages - 1], comm)


class _Walk:
    """One rank on its way through its cells. `ready`: products that are here; `leaving`: sends that may still be read."""

    def __init__(self, comm, routes: Routes, running, microbatches, shapes, seconds, train):
        self.comm, self.routes, self.running, self.microbatches = comm, routes, running, microbatches
        self.shapes, self.train, self.last = shapes, train, routes.stages - 1
        self.ready: dict[tuple, torch.Tensor] = {}
        self.posted: dict[tuple, tuple] = {}
        self.leaving: dict[tuple, object] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.paces = None if seconds is None else seconds.picoseconds(routes.stages)

    def all(self, after_stage, watch) -> None:
        """Every cell in turn."""
        cells, left = self.routes.cells, self._actions_left()
        for place in range(len(cells)):
            self._post(place)
            for need in self.routes.needs[place]:
                self._take(need)
            for action in parts(cells[place]):
                self._run(action, place)
                if watch is not None:
                    watch(action, self.running[action.stage])
                left[action.stage] -= action.kind in "BW" or not self.train
                if left[action.stage] == 0 and after_stage is not None and self.train:
                    after_stage(action.stage)
        for request in self.leaving.values():
            request.wait()
        self.leaving.clear()

    def _actions_left(self) -> dict[int, int]:
        """Stage -> actions that finish a micro-batch's gradients and have not run."""
        return {s: self.routes.microbatches for s in self.routes.mine}

    def _post(self, place: int) -> None:
        """Begin to receive what cell `place` needs from other ranks."""
        if place >= len(self.routes.cells):
            return
        for product, rank in self.routes.needs[place]:
            if product not in self.posted and product not in self.ready:
                kind, stage, microbatch = product
                # a gradient has the shape of the output that it belongs to
                shape, dtype = self.shapes[(stage if kind == "F" else stage - 1), microbatch]
                buffer = torch.empty(shape, dtype=dtype, device=self._device())
                self.posted[product] = buffer, self.comm.irecv(buffer, rank, self.routes.tag(product))

    def _take(self, need) -> None:
        """Wait for an input; what its sender had received before it made this has left us for good."""
        buffer, request = self.posted.pop(need.product)
        request.wait()
        self.ready[need.product] = buffer
        for product in [p for p in self.leaving if self.routes.goes_to(p) == need.rank and self.routes.is_over(p, need.product)]:
            self.leaving.pop(product).wait()

    def _run(self, action, place: int) -> None:
        stage, kind, microbatch = action
        pace = {} if self.paces is None else {"seconds": self.paces[kind][stage] / 1e12}
        with self.comm.compute(str(action), kind=KIND_OF[kind], microbatch=microbatch, stage=stage, **pace):
            self._post(place + 1)  # on its way while this cell computes
            made = self._compute(action)
        if made is None:
            return
        product = ("F" if kind == "F" else "G", stage, microbatch)
        if kind == "F" and stage == self.last:
            self._check_loss(made, microbatch)
            self.losses[microbatch] = made
            return
        rank = self.routes.goes_to(product)
        if rank is None:
            self.ready[product] = made
        else:
            self._check_shape(product, made)
            self.leaving[product] = self.comm.isend(made, rank, self.routes.tag(product))

    def _compute(self, action):
        stage, kind, microbatch = action
        running, micro = self.running[stage], self.microbatches[microbatch]
        if kind == "F":
            x = self.ready.pop(("F", stage - 1, microbatch)) if stage else micro.inputs
            return running.forward(microbatch, x, micro.targets if stage == self.last else None)
        if kind == "W":
            return running.backward(microbatch, "W", None)
        grad = self.ready.pop(("G", stage + 1, microbatch), None) if stage < self.last else None
        return running.backward(microbatch, kind, grad)

    def _check_loss(self, made, microbatch: int) -> None:
        """With checks on, a loss that is no number stops the run here, before its gradients are everywhere."""
        if self.comm.checks and self.train and not made.dim() and not made.is_meta and not bool(torch.isfinite(made)):
            raise ValueError(
                f"micro-batch {microbatch}: the loss is {float(made)}; look at its rows and targets, and at the weights"
            )

    def _check_shape(self, product, made) -> None:
        kind, stage, microbatch = product
        wanted = self.shapes[(stage if kind == "F" else stage - 1), microbatch]
        assert (tuple(made.shape), made.dtype) == wanted, f"{product}: {made.dtype} {tuple(made.shape)}, announced {wanted}"

    def _device(self):
        first = next((p for s in self.running.values() for p in s.module.parameters()), None)
        return first.device if first is not None else self.comm.device


def _check(schedule: Schedule, routes: Routes, stages, comm, microbatches, loss, divide_by) -> None:
    ranks = len(schedule)
    if ranks != comm.size:
        raise ValueError(f"a schedule for {ranks} ranks on {comm.size}; allowed: as many ranks as lines, nearest ranks={ranks}")
    check_numbers(microbatches, routes.microbatches)
    if not isinstance(stages, Mapping):
        raise ValueError(f"stages is a {type(stages).__name__}; allowed: a dict, stage -> its module, such as {{0: module}}")
    if set(stages) != set(routes.mine):
        raise ValueError(
            f"rank {comm.rank} was given stages {sorted(stages)}; by the schedule it runs {routes.mine}: one module for each, "
            "a stage with no layer is nn.Identity()"
        )
    if isinstance(divide_by, bool) or not 0 < divide_by < float("inf"):
        raise ValueError(f"divide_by is {divide_by!r}; allowed: a number above 0 (the count of targets for a mean, 1 for a sum)")
    if 0 in stages and any(m.inputs is None for m in microbatches):
        raise ValueError(f"rank {comm.rank} runs stage 0, which needs the inputs of every micro-batch")
    if routes.stages - 1 in stages and loss is not None and any(m.targets is None for m in microbatches):
        raise ValueError(f"rank {comm.rank} runs the last stage, which needs the targets of every micro-batch")
