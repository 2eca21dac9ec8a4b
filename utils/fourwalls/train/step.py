"""One training step over a mesh of data, pipeline and tensor axes: here the three strategies meet, each on its own communicator.

The tensor axis works inside every layer, the pipeline between layers, and the data axis once a step, for each stage as soon as
its last gradient is there. What belongs to the model as a whole is put together last: the two copies of a tied table, and the
norm of all gradients, in which each parameter counts once, whoever holds copies of it.

    g = (sum over replicas and micro-batches of the gradient of the summed loss) / (all tokens that count)
    |g|^2 = sum over (p, t) of |what a rank owns|^2      its slabs; on t = 0 what all of t hold; on stage 0 the tied table

Reference: Narayanan et al. 2021 (arXiv:2104.04473), sections 2 and 3; Rajbhandari et al. 2020 (arXiv:1910.02054) for `zero`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..collectives import ring
from ..nn.gpt import GPTConfig
from ..nn.init import name_seed
from ..nn.optim import Adam, check_largest, global_norm
from ..parallel.data import DataParallel
from ..parallel.mesh import Grid, Mesh, split_into
from ..parallel.pipeline.actions import microbatches_of, placement, stages_of
from ..parallel.pipeline.execute import execute
from ..parallel.pipeline.legality import check
from ..parallel.pipeline.microbatches import count_targets, split_batch
from ..parallel.pipeline.outcome import sum_tied
from ..parallel.pipeline.stages import even_cuts, tied_ranks
from ..parallel.replicas import digest
from ..parallel.tensor_gpt import check_tensor_parallel
from ..parallel.tensor_shards import cuts_of, whole_gradients, whole_state
from ..parallel.token_loss import total_tokens
from ..parallel.zero import Zero1
from ..ranks.comm import Comm
from .stages import TensorStage, build_stages

__all__ = ["Step", "check_step"]


def check_step(config: GPTConfig, grid: Grid, schedule, *, cuts: Sequence[int] | None = None, sequence: bool = False) -> list:
    """The schedule as lists of actions, if this model, mesh and schedule go together. ValueError, with what would, if not.

    Needs no rank: call it before ranks start.
    """
    if grid.c != 1:
        raise ValueError(f"c (context) is {grid.c}; allowed here: 1, since sequences are not cut over ranks")
    schedule = check(schedule)
    if len(schedule) != grid.p:
        raise ValueError(f"a schedule for {len(schedule)} ranks, p is {grid.p}; allowed: as many lines as p, nearest p={grid.p}")
    stages = stages_of(schedule)
    cuts = even_cuts(config.layers, stages) if cuts is None else list(cuts)
    if len(cuts) != stages + 1:
        raise ValueError(f"cuts {cuts} make {len(cuts) - 1} stages, the schedule has {stages}; allowed: {stages + 1} numbers")
    empty = [k for k in range(1, stages - 1) if cuts[k] == cuts[k + 1]]
    if empty:
        raise ValueError(f"stage {empty[0]} has no layer; allowed: at least one between the first stage and the last")
    check_tensor_parallel(config, grid.t, sequence=sequence)
    return schedule


class Step:
    """`step = Step(config, mesh, schedule)`, then `loss = step(inputs, targets)` on every rank, with its replica's rows.

    schedule      of mesh.p.size ranks, in any form that the pipeline reads; cuts: layers of each stage, None for even ones
    optimizer     called as optimizer(parameters, **options), an element by element one under `zero`
    clip          the largest norm of all gradients together, None for no limit
    zero          ZeRO-1: the optimiser's state is sharded over the data axis
    sequence      sequence parallelism on the tensor axis
    recompute     keep the inputs of a stage only, and run it forward once more
    all_reduce    what sums gradients over the data axis; f(comm, x), or the name of an algorithm
    seed          of dropout's masks; `exact` makes them one device's, micro-batch by micro-batch

    The loss is the mean over all tokens that count, of all replicas, micro-batches and rounds of accumulation. ValueError from
    `check_step`, for a batch that cannot be cut, for a loss that is not finite, and with checks on or a clip for such gradients;
    MismatchError (checks on) where ranks of one replica are given different rows. After an error on all ranks the next step
    starts clean.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        schedule,
        *,
        cuts: Sequence[int] | None = None,
        optimizer: Callable = Adam,
        clip: float | None = None,
        zero: bool = False,
        sequence: bool = False,
        recompute: bool = False,
        all_reduce: Callable | str = "ring",
        seed: int = 0,
        exact: bool = False,
        device=None,
        dtype=None,
        **options,
    ):
        self.schedule = check_step(config, mesh.grid, schedule, cuts=cuts, sequence=sequence)
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"clip is {clip!r}; allowed: a number above 0, or None for no limit")
        self.config, self.mesh, self.clip, self.recompute, self.seed = config, mesh, clip, recompute, seed
        where, self.microbatches = placement(self.schedule), microbatches_of(self.schedule)
        self.cuts = even_cuts(config.layers, len(where)) if cuts is None else list(cuts)
        mine = [stage for stage, rank in where.items() if rank == mesh.p.rank]
        kinds = {"sequence": sequence, "exact": exact, "device": device, "dtype": dtype}
        self.stages: dict[int, TensorStage] = build_stages(config, mesh.t, self.cuts, mine, **kinds)
        self.steps = 0
        self._replica = split_into(mesh.world, mesh.grid.groups("p", "t"))  # the ranks that hold the model together
        self._copies = split_into(mesh.world, mesh.grid.groups("d", "p"))  # those among which the parts of the loss lie
        tied = tied_ranks(where, config)
        self._tied = {name: sorted(set(ranks)) for name, ranks in tied.items() if len(set(ranks)) > 1}  # ends on two ranks
        self._last = len(where) - 1
        self._zero, self._replicas = None, []
        if zero:
            self._zero = self._sharded(optimizer, options)
        else:
            parameters = [p for _, p in self.named_parameters()]
            self._optimizer = optimizer(parameters, **options)
            wrap = {"mode": "bucketed", "average": "none", "all_reduce": all_reduce}
            self._replicas = [(unit, DataParallel(self._modules(unit), mesh.d, **wrap)) for unit in self._units(where)]

    # --- the step ---------------------------------------------------------------------------------------------------
    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, *, accumulate: int = 1) -> float:
        """One step on this replica's rows (b, s), the same on all its ranks; the mean loss of the whole batch, on every rank.

        accumulate: so many rounds of the schedule, one after the other, before the replicas meet.
        """
        self.backward(inputs, targets, accumulate=accumulate)
        if self.clip is not None:
            self.clip_(self.clip)
        self.update()
        return self.loss

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor, *, accumulate: int = 1) -> float:
        """All of the step but clipping and the optimiser: afterwards gradients are those of the whole batch (`loss` too), and of
        nothing else: what an earlier batch has left, one that was refused half-way say, is forgotten first.
        """
        if self._replica.checks:
            call = ("collective", "Step: rows of a replica"), ("inputs", digest(inputs)), ("targets", digest(targets))
            self._replica.agree(call)
        self._stepper().zero_grad()
        rounds = split_batch(inputs, targets, count=accumulate)
        rounds = [split_batch(part.inputs, part.targets, count=self.microbatches) for part in rounds]
        total = max(1, total_tokens(self.mesh.d, sum(map(count_targets, rounds))))
        # ZeRO averages over the replicas, so its sum is divided by n less
        divide_by = total / self.mesh.d.size if self._zero is not None else total
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        for k, micro in enumerate(rounds):
            sync = self._sync(k == len(rounds) - 1)
            out = execute(self.schedule, self.stages, self.mesh.p, micro, self._loss, divide_by=divide_by, seed=self._seed(k),
                          recompute=self.recompute, step=self.steps, after_stage=sync)  # fmt: skip
            if out.losses:
                loss += out.loss.double() * (divide_by / total)
        self.loss = float(ring.all_reduce(self._copies, loss))
        if not math.isfinite(self.loss):
            raise ValueError(f"step {self.steps}: the loss is {self.loss}; look for the first nan or inf in batch and weights")
        if self._tied and self._zero is None:
            held = {name: p for name, p, _ in self._everything() if name in self._tied}
            sum_tied(self.mesh.p, held, self._tied)
        return self.loss

    def norm(self) -> torch.Tensor:
        """The norm of all gradients, each counted once; the same bits on every rank. One all-reduce of one number."""
        owned = [grad for _, grad, counts in self._gradients() if counts]
        # under ZeRO the replicas hold different pieces of one gradient, else copies of it
        return global_norm(owned, comm=self._replica if self._zero is None else self.mesh.world)

    @torch.no_grad()
    def clip_(self, largest: float) -> torch.Tensor:
        """Scale all gradients together so that their norm is at most `largest`; returns the norm before. As `nn.optim.clip_`."""
        check_largest(largest)
        norm = self.norm()
        if not bool(torch.isfinite(norm)):
            raise ValueError(f"step {self.steps}: the norm of the gradients is {float(norm)}; look for the first nan or inf")
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        for _, grad, _ in self._gradients():
            grad.mul_(scale.to(grad.dtype))
        return norm

    def update(self) -> None:
        """The optimiser's step, and a clean sheet for the next one."""
        optimizer = self._stepper()
        optimizer.step()
        optimizer.zero_grad()
        self.steps += 1

    # --- for those who look -----------------------------------------------------------------------------------------
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, or slabs of them, under their names in `nn.gpt.GPT`; each once."""
        yield from ((name, p) for name, p, _ in self._everything())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters of this rank's stages as one device holds them. Every rank must call it; joins over the tensor axis."""
        return {n: x for stage in self.stages.values() for n, x in whole_state(stage, self.mesh.t).items()}

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """Likewise the gradients, between `backward` and `update`; without `zero`."""
        return {n: x for stage in self.stages.values() for n, x in whole_gradients(stage, self.mesh.t).items()}

    # --- inside -----------------------------------------------------------------------------------------------------
    def _stepper(self):
        """What steps the parameters, and forgets their gradients."""
        return self._zero if self._zero is not None else self._optimizer

    def _loss(self, logits, targets):
        return self.stages[self._last].loss(logits, targets)

    def _seed(self, k: int) -> int | None:
        """Of a round's random numbers: every replica draws its own, the ranks of one replica alike."""
        name = f"step {self.steps}, round {k}, replica {self.mesh.place.d}"
        return name_seed(self.seed, name) if self.config.dropout else None

    def _everything(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """(name, parameter, whether this rank counts it in the norm) of all of this rank's stages, each parameter once."""
        seen = set()
        for index, stage in self.stages.items():
            cuts = cuts_of(stage)
            for name, p in stage.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    second = name in self._tied and index == self._last
                    yield name, p, not second and (cuts[name] is not None or self.mesh.t.rank == 0)

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, gradient, whether it counts), of what this rank holds of them."""
        if self._zero is None:
            yield from ((name, p.grad, counts) for name, p, counts in self._everything() if p.grad is not None)
            return
        counted = {id(p): counts for _, p, counts in self._everything()}
        of_name = {name: counted[id(p)] for name, p in self._zero.model.named_parameters()}
        yield from ((name, grad, of_name[name]) for name, grad in self._zero.named_gradients())

    def _modules(self, unit: Sequence[int]) -> nn.Module:
        return nn.ModuleDict({str(stage): self.stages[stage] for stage in unit})

    def _units(self, where: dict[int, int]) -> list[list[int]]:
        """This rank's stages as they are summed over replicas: one by one, but the two that share a table together."""
        both = [0, self._last] if self.config.tied and where[0] == where[self._last] and self._last else []
        rest = [[stage] for stage in self.stages if stage not in both]
        return rest + [both] if both and 0 in self.stages else rest

    def _sync(self, last: bool) -> Callable[[int], None] | None:
        """What the pipeline calls after the last gradient of a stage: sum its unit over the replicas once all of it is there.

        last: whether this is the last round of accumulation; before it, gradients only add up.
        """
        if not last:
            return None
        missing = [(set(unit), replicas) for unit, replicas in self._replicas]

        def after_stage(stage: int) -> None:
            for region, replicas in missing:
                if stage in region:
                    region.discard(stage)
                    if not region:
                        replicas.synchronise()

        def finish(stage: int) -> None:
            self.stages[stage].region.sum_gradients(self.stages[stage])  # sequence parallelism: what all hold
            after_stage(stage)

        return finish

    def _sharded(self, optimizer: Callable, options: dict) -> Zero1:
        """ZeRO-1 on all of this rank's stages; a table that stands on two ranks is summed over them first."""
        grid, tied = self.mesh.grid, {}
        for name, holders in self._tied.items():
            groups = [[self.mesh.grid.rank(d=d, p=p, t=t) for p in holders] for d in range(grid.d) for t in range(grid.t)]
            between: Comm | None = split_into(self.mesh.world, groups)
            if between is not None:
                (stage,) = (s for s in self.stages if name in dict(self.stages[s].named_parameters()))
                tied[f"{stage}.{name}"] = between
        return Zero1(self._modules(list(self.stages)), self.mesh.d, optimizer=optimizer, tied=tied, **options)
