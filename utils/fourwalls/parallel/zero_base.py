"""What the three stages of ZeRO have in common: the optimiser steps this rank's shards, and needs little beyond them.

Any optimiser that works element by element can be sharded: it is given the pieces of parameters that lie in this rank's chunks,
and never learns that there is more. Adam's two moments then exist once in the whole group of ranks. Only the norm of all
gradients needs the others, one number from each.

    state of a rank = state / n         |g|^2 = sum over ranks of |its shard of g|^2         max |g| = max over ranks

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), sections 5 and 7.
"""

import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from ..collectives import ring
from ..collectives.agree import agree
from ..nn.optim import AdamW, check_largest, global_norm
from ..ranks.comm import Comm
from .replicas import check_replicas
from .wrapped import claim, release
from .zero_lane import Lane, Ticket
from .zero_shards import Flat

__all__ = ["Sharded"]


class Sharded(ABC):
    """The part of ZeRO that all stages share; use `Zero1`, `Zero2`, `Zero3` or `zero(model, comm, stage=...)`.

    optimizer       called as optimizer(groups, **options): a class of nn.optim or torch.optim that works element by element
    groups          [{"params": [...], "lr": ...}, ...]; together all trained parameters. None: one group
    reduce_scatter  f(comm, x) -> chunk `comm.rank` of the sum over ranks of the flat x, cut as `collectives.chunks` says; one
                    that takes `overwrite=` may use x's memory
    all_gather      f(comm, chunk, numel=, out=) -> the flat tensor of `numel` elements whose chunk r is rank r's; `out` may be
                    left out
    overlap         collectives travel beside the program (`ranks.beside`); False: at once
    check_start     raise ValueError, which names ranks and parameters, unless all ranks start with the same bits
    finite          raise ValueError, which names rank and parameter, before a gradient with nan or inf is summed. None: as
                    comm.checks
    options         go to the optimizer: lr, betas, weight_decay, ...

    A frozen parameter takes no part (stages 1, 2) or is sharded but not stepped (3). Parameters of several dtypes are kept apart;
    each is summed and stepped in its own. Losses are means over equally many things on each rank: gradients are averaged.
    With comm.checks a rank that has stepped, or forgotten its gradients, where another has not is named (MismatchError) before
    anything of the two is mixed. That costs no message of the program's.
    """

    stage = 0

    def __init__(
        self,
        model: torch.nn.Module,
        comm: Comm,
        *,
        optimizer: Callable = AdamW,
        groups: Iterable[dict] | None = None,
        reduce_scatter: Callable = ring.reduce_scatter,
        all_gather: Callable = ring.all_gather,
        overlap: bool = True,
        check_start: bool = True,
        finite: bool | None = None,
        **options,
    ):
        self.model, self.comm = model, comm
        self.finite = comm.checks if finite is None else finite
        self._reduce_scatter, self._all_gather = reduce_scatter, all_gather
        self._overwrites = "overwrite" in inspect.signature(reduce_scatter).parameters
        self._takes_out = "out" in inspect.signature(all_gather).parameters
        named = list(model.named_parameters())  # a tied parameter once
        self._check_parameters(named)
        claim(model, self, alone=True)
        groups = _complete_groups(named, groups)
        if check_start and comm.size > 1:
            cure = "Build the model from one seed on every rank, or broadcast rank 0's first."
            check_replicas(comm, [*named, *model.named_buffers()], when="before the first step", cure=cure)
        self.steps = 0
        self._frozen = {name for name, p in named if not p.requires_grad}
        self._flats = self._lay_out(named)
        self._trained = [flat for flat in self._flats if flat.trained]
        self._lane = Lane(comm, overlap=overlap)
        self._flying: deque = deque()  # (flat, ticket) of sums under way
        self._hooks: list = []
        self.optimizer = optimizer([self._pieces_of(group) for group in groups], **options)

    # --- what a stage says -----------------------------------------------------------------------------------------
    @abstractmethod
    def _lay_out(self, named: list) -> list[Flat]:
        """The flat tensors that the parameters in `named` become."""

    @abstractmethod
    def reduce(self) -> None:
        """Afterwards the shards hold the mean gradient of everything that backward has made. `step` and `clip_` call it."""

    def _alike(self) -> dict:
        """What all ranks must have in common when they step."""
        rates = [str(float(group["lr"])) for group in self.param_groups if "lr" in group]
        trained = sum(p.requires_grad for p in self.model.parameters())
        return {"steps taken": self.steps, "trained": trained, "lr": " ".join(rates)[:30]}  # a statement has 512 bytes

    def _publish(self) -> None:  # noqa: B027 - stage 3 has nothing to do here
        """After the optimiser's step: what the next forward needs."""

    # --- the training step -----------------------------------------------------------------------------------------
    def step(self) -> None:
        """Finish the sums, step the shards, and (stages 1, 2) gather the new parameters. Every rank must call it."""
        self._check_known()
        if self.comm.checks and self.comm.size > 1:
            agree(self.comm, f"{type(self).__name__}.step", **self._alike())
        self.reduce()
        if all(flat.grad is None for flat in self._trained):
            raise ValueError(f"rank {self.comm.rank}: step() without a backward: no parameter has a gradient")
        for flat in self._trained:
            flat.give_to_pieces()
        self.optimizer.step()
        self.steps += 1
        self._publish()

    def zero_grad(self) -> None:
        """Forget the gradients; until then, further backwards add to them. Also what comes after a backward that raised, on every
        rank: then it can be repeated.
        """
        self._give_up()
        for flat in self._flats:
            flat.forget()

    @torch.no_grad()
    def norm(self, order: float = 2.0) -> torch.Tensor:
        """The norm of all gradients as one vector, the same bits on every rank: each element is counted once. `order`: 2 or inf.

        Sends one number round the ring (`nn.optim.global_norm`). An empty shard counts as 0.
        """
        self.reduce()
        return global_norm((flat.grad for flat in self._trained if flat.grad is not None), order=order, comm=self.comm)

    @torch.no_grad()
    def clip_(self, largest: float, *, order: float = 2.0) -> torch.Tensor:
        """Scale all gradients together so that their norm is at most `largest`; returns the norm before. As `nn.optim.clip_`."""
        check_largest(largest)
        norm = self.norm(order)
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        for flat in self._trained:
            if flat.grad is not None:
                flat.grad.mul_(scale.to(flat.grad.dtype))
        return norm

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, the part of its mean gradient that this rank's chunks hold): views, to be measured or scaled before `step`."""
        self.reduce()
        for flat in self._trained:
            if flat.grad is not None:
                for piece in flat.pieces:
                    yield flat.names[piece.index], flat.grad[piece.begin : piece.end]

    # --- for those who look ----------------------------------------------------------------------------------------
    @property
    def state(self) -> dict:
        """The optimiser's state by piece, as a Ledger wants it."""
        return self.optimizer.state

    @property
    def shards(self) -> list[torch.Tensor]:
        """This rank's chunks of the parameters, as a Ledger's `inputs` (stage 3; before, they are views of the parameters)."""
        return [flat.shard for flat in self._flats]

    @property
    def param_groups(self) -> list[dict]:
        """The optimiser's groups, whose options (lr) may be changed."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """{name: the mean gradient, whole}, on every rank: to compare with one device. Gathers; every rank must call it."""
        self.reduce()
        agree(self.comm, "full_gradients", **{"steps taken": self.steps})
        found = {}
        for flat in self._trained:
            if flat.grad is not None:
                whole = ring.all_gather(self.comm, flat.grad, numel=flat.numel)
                found |= dict(zip(flat.names, flat.views(whole), strict=True))
        return found

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
        """{name: a copy of the parameter, whole}, on every rank. Gathers the shards; every rank must call it."""
        agree(self.comm, "full_parameters", **{"steps taken": self.steps})
        found = {}
        for flat in self._flats:
            whole = ring.all_gather(self.comm, flat.shard, numel=flat.numel)
            found |= dict(zip(flat.names, flat.views(whole), strict=True))
        return {name: found.get(name, p.detach()).clone() for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Take the hooks off the model; it may be wrapped anew."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        release(self.model, self)

    def _give_up(self) -> None:
        """Forget that a backward is under way: it has raised, or its gradients are not wanted."""
        while self._flying:
            self._land()

    # --- inside ----------------------------------------------------------------------------------------------------
    def _launch(self, flat: Flat) -> None:
        """Begin the sum of a flat's gradients. At most two are under way, so that a slow wire cannot pile them up."""
        while len(self._flying) >= 2:
            self._land()
        buffer = flat.take_gradients(who=f"rank {self.comm.rank}", check=self.finite)
        told = {"of": flat.names[0][:80], "steps taken": self.steps, "sums since zero_grad": flat.sums}
        flat.sums += 1
        self._flying.append((flat, self._lane.start(f"sum of {flat.names[0]} ...", self._sum_up, buffer, told)))

    def _land(self) -> None:
        flat, ticket = self._flying.popleft()
        flat.add_gradient(self._lane.wait(ticket), self.comm.size)

    def _sum_up(self, comm: Comm, buffer: torch.Tensor, told: dict) -> torch.Tensor:
        """This rank's chunk of the sum over ranks."""
        agree(comm, "ZeRO's sum of gradients", **told)
        return self._reduce_scatter(comm, buffer, **({"overwrite": True} if self._overwrites else {}))

    def _begin_to_gather(self, flat: Flat, label: str) -> Ticket:
        """Begin to fill `flat.whole` from all ranks' shards."""
        told = {"of": flat.names[0][:80], "steps taken": self.steps}
        return self._lane.start(label, self._gather_into, flat, told)

    def _gather_into(self, comm: Comm, flat: Flat, told: dict) -> None:
        agree(comm, "ZeRO's gather of parameters", **told)
        if flat.whole.untyped_storage().nbytes() < flat.bytes:  # stage 3, which may not have taken it yet
            flat.grow()
        out = {"out": flat.whole} if self._takes_out else {}
        got = self._all_gather(comm, flat.shard, numel=flat.numel, **out)
        if got.shape != flat.whole.shape or got.dtype != flat.whole.dtype:
            raise ValueError(f"all_gather returned {got.dtype} {tuple(got.shape)}; it returns {flat.whole.dtype} ({flat.numel},)")
        if got.data_ptr() != flat.whole.data_ptr():
            flat.whole.copy_(got)

    def _check_parameters(self, named):
        if not any(p.requires_grad for _, p in named):
            raise ValueError("no parameter of the model is trained (requires_grad); there is nothing to shard a state of")
        for name, p in named:
            if not p.is_floating_point():
                raise ValueError(
                    f"{name} is {p.dtype}; ZeRO shards floating-point parameters: make it a buffer, or use p.float()"
                )
            if p.device != self.comm.device:
                raise ValueError(f"{name} is on {p.device}, this rank's device is {self.comm.device}; try model.to(comm.device)")

    def _check_over(self, running):
        if running:
            raise RuntimeError(
                f"rank {self.comm.rank}: the last backward did not come to its end, so its gradients are not all there: "
                "zero_grad(), on every rank, and repeat it"
            )

    def _check_known(self):
        trained = {id(p) for flat in self._trained for p in flat.params}
        for name, p in self.model.named_parameters():
            if p.requires_grad and id(p) not in trained:
                was = "was frozen when" if name in self._frozen else "has come after"
                raise ValueError(f"{name} {was} {type(self).__name__} was made; it would never be stepped: make a new one")

    def _pieces_of(self, group: dict) -> dict:
        wanted = {id(p) for p in group["params"]}
        pieces = [piece.values for flat in self._trained for piece in flat.pieces if id(flat.params[piece.index]) in wanted]
        return {**group, "params": pieces}


def _complete_groups(named: list, groups: Iterable[dict] | None) -> list[dict]:
    """The groups with lists of parameters. ValueError unless every trained parameter is in exactly one of them."""
    if groups is None:
        return [{"params": [p for _, p in named]}]
    groups = list(groups)
    odd = [g for g in groups if not isinstance(g, dict) or "params" not in g]
    if odd:
        what = f"a group with {sorted(odd[0])}" if isinstance(odd[0], dict) else type(odd[0]).__name__
        raise ValueError(f"groups holds {what}; allowed: [{{'params': [...], 'lr': ...}}, ...], or None for one group of all")
    groups = [{**g, "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"])} for g in groups]
    often: dict[int, int] = {}
    for p in (p for group in groups for p in group["params"]):
        often[id(p)] = often.get(id(p), 0) + 1
    for name, p in named:
        if p.requires_grad and often.get(id(p), 0) != 1:
            raise ValueError(f"{name} is in {often.get(id(p), 0)} of the groups; every trained parameter is in exactly one")
    strangers = set(often) - {id(p) for _, p in named}
    if strangers:
        raise ValueError(f"{len(strangers)} of the groups' parameters are not the model's; take them from model.parameters()")
    return groups
