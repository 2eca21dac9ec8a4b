"""What a step of a pipeline leaves: its loss, which lives on one rank, and what belongs to the model as a whole.

Gradients stay with the stages. Three things need all ranks: the loss, where another rank wants to see it; a parameter that two
stages share, whose gradient is the sum of both; and the norm of all gradients, in which a shared parameter counts once.

    grad(tied)  =  sum over the stages that hold it        norm = sqrt(sum over all parameters of |grad|^2)

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section on tied embeddings, as Megatron-LM sums them.
"""

from collections.abc import Iterable, Mapping

import torch

from ...collectives import ring
from ...nn.optim import check_largest, global_norm
from ...ranks.comm import Comm

__all__ = ["Outcome", "clip_pipeline_", "sum_tied"]


class Outcome:
    """`loss`: the sum over micro-batches, on the rank that runs the last stage; `fetch()` brings it to every rank.

    losses: micro-batch -> its part, detached; empty on other ranks.  home: the rank that has the loss.
    """

    def __init__(self, losses: dict[int, torch.Tensor], home: int, comm: Comm):
        self.losses, self.home, self._comm = losses, home, comm

    @property
    def loss(self) -> torch.Tensor:
        """The loss (or, without a loss function, the outputs joined). RuntimeError on a rank that has none."""
        if not self.losses:
            raise RuntimeError(
                f"rank {self._comm.rank} has no loss: the last stage is on rank {self.home}; read it there, or call fetch() on "
                "every rank"
            )
        parts = [self.losses[k] for k in sorted(self.losses)]
        return torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()

    def fetch(self) -> torch.Tensor:
        """The loss on every rank, in float64. Every rank must call it. n - 1 messages of 8 bytes."""
        value = torch.zeros((), dtype=torch.float64)
        if self.losses:
            value.copy_(self.loss)
        return ring.broadcast(self._comm, value, root=self.home)


@torch.no_grad()
def sum_tied(comm: Comm, tied: Mapping[str, torch.nn.Parameter], where: Mapping[str, Iterable[int]]) -> None:
    """Give every holder of a tied parameter the same gradient: the sum over its holders. Every rank must call it, after a step.

    tied: name -> the parameter on this rank (ranks without one leave it out); where: name -> the ranks that hold it, the same on
    all ranks. A holder whose part got no gradient counts as zeros. Each holder sends the gradient once to the others (two as a
    rule), and adds in the order of ranks, so all have the same bits.
    """
    for name in sorted(where):
        holders = sorted(set(where[name]))
        if (comm.rank in holders) != (name in tied):
            has = "has one" if name in tied else "has none"
            raise ValueError(f"{name!r} is held by ranks {holders} by `where`, but rank {comm.rank} {has}")
        if name not in tied or len(holders) == 1:
            continue
        parameter = tied[name]
        mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        others = [r for r in holders if r != comm.rank]
        came = {r: torch.empty_like(mine) for r in others}
        waits = [comm.irecv(came[r], r) for r in others] + [comm.isend(mine, r) for r in others]
        for request in waits:
            request.wait()
        came[comm.rank] = mine
        total = came[holders[0]].clone()
        for r in holders[1:]:
            total += came[r]
        parameter.grad = total


@torch.no_grad()
def clip_pipeline_(
    comm: Comm, parameters: Iterable[torch.nn.Parameter], largest: float, *, also: Iterable[torch.nn.Parameter] = ()
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is at most `largest`; returns the norm before (on all ranks).

    parameters: this rank's; also: those that are scaled but not counted, the second copy of a tied one. Every rank must call it.
    ValueError unless `largest` is at least 0, as `nn.optim.clip_`, and for a norm that is not finite.
    """
    check_largest(largest)
    parameters, also = list(parameters), list(also)
    norm = global_norm([p.grad for p in parameters if p.grad is not None], comm=comm)
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"rank {comm.rank}: the norm of the gradients is {float(norm)}; look for the first nan or inf")
    factor = min(1.0, largest / (float(norm) + 1e-6))
    for p in (*parameters, *also):
        if p.grad is not None:
            p.grad.mul_(factor)
    return norm
