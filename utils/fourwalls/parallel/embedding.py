"""Sparse embeddings: the dense net on every rank, each row of the tables on one.

A click model has millions of rows, of which a step touches thousands, and a small net that every sample touches. So the net is
copied and its gradients are all-reduced, while the rows are dealt out, and what travels is only what a batch asks for: its
different ids go to their owners, the rows come back, and later their gradients take the same way home. The owner adds up what
all ranks send for a row, and steps it; the optimiser's state lives there too, and never travels.

    bytes a rank sends  =  ids to others  +  rows asked by others  +  gradients to others,       each row once a batch

Reference: Zhang et al. 2022 (arXiv:2204.04903), PICASSO, the arrangement of HybridBackend; Mudigere et al. 2022
(arXiv:2104.05158). The exact formula is `fourwalls.cost.sparse.sparse_exchange`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..collectives import all_gather
from ..collectives import all_reduce as ring_all_reduce
from ..collectives.agree import agree
from ..collectives.all_to_all import all_to_all_unequal
from ..collectives.autograd import all_to_all
from ..nn.init import draw
from ..nn.sparse import RowOptimizer, merge_rows
from ..ranks.comm import Comm
from .rows import Request, RowOwners, make_request

__all__ = ["ShardedEmbedding", "all_reduce_gradients", "hybrid_step", "replicated_step"]


class ShardedEmbedding(nn.Module):
    """A table of `rows` rows, dealt out to the ranks of `comm`. In place of nn.layers.Embedding: ids (...) -> (..., width).

    Each rank gives its own ids. `shard` (rows of this rank, width) starts as the rows of the one table `name`.weight, as one
    device would draw it, so all ranks give the same numbers here (else MismatchError with checks on). Forward and backward are
    collective: every rank calls them, if need be with an empty batch. After backward, `touched()` gives this rank's rows that
    somebody used, with the sum of their gradients over all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        rows: int,
        width: int,
        *,
        rule: str = "modulo",
        std: float = 0.1,
        name: str = "embedding",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.comm, self.rows, self.width = comm, rows, width
        agree(comm, "ShardedEmbedding", rows=rows, width=width, rule=rule, std=std, name=name[:80], seed=seed)
        self.owners = RowOwners(rows, comm.size, rule)
        whole = draw(f"{name}.weight", (rows, width), seed=seed, std=std)
        mine = whole[self.owners.ids_of(comm.rank)].to(dtype or torch.get_default_dtype())
        self.register_buffer("shard", mine.to(comm.device))  # not a parameter: nobody may all-reduce it
        self._used: list[_Used] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) of int32 or int64 -> rows (..., width). Sends ids, receives rows; backward sends their gradients.

        Raises ValueError, before anything is sent, for an id that is out of range.
        """
        request = make_request(ids, self.owners)
        rows = self._fetch(request)
        return rows[request.place].view(*request.shape, self.width)

    def _fetch(self, request: Request) -> torch.Tensor:
        """(different ids, width), in order of `request.wanted`; gradients flow back to the owners."""
        asked, came = all_to_all_unequal(self.comm, request.wanted, request.counts)
        places = self.owners.place(asked)
        given = self.shard[places].requires_grad_()  # what the others ask of this rank: a leaf, whose gradient comes home
        rows, _ = all_to_all(self.comm, given, came, expect=request.counts)
        if torch.is_grad_enabled():
            self._used.append(_Used(places, given))
        return rows

    def touched(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(places in the shard, rising, each once; the sum of their gradients), of all batches since the last call.

        RuntimeError where a forward has had no backward: its rows would be stepped as if nobody had used them.
        """
        used, self._used = self._used, []
        if any(u.given.grad is None for u in used):
            raise RuntimeError(f"rank {self.comm.rank}: rows were fetched, but backward has not brought their gradients home")
        if not used:
            return torch.empty(0, dtype=torch.int64), self.shard[:0]
        return self._merge(torch.cat([u.places for u in used]), torch.cat([u.given.grad for u in used]))

    def _merge(self, places, grads):
        return merge_rows(places, grads)  # two ranks that used a row have sent a gradient each

    def whole(self) -> torch.Tensor:
        """The table (rows, width) on every rank: for tests and checkpoints, since it is what one would not want to hold."""
        n, largest = self.comm.size, -(-self.rows // self.comm.size)
        padded = self.shard.new_zeros(largest, self.width)
        padded[: len(self.shard)] = self.shard
        parts, table = all_gather(self.comm, padded), self.shard.new_empty(self.rows, self.width)
        for part in range(n):
            ids = self.owners.ids_of(part)
            table[ids] = parts[part, : len(ids)]
        return table


@dataclass
class _Used:
    """What this rank gave in one forward: from which places of its shard, and the leaf whose gradient comes home."""

    places: torch.Tensor
    given: torch.Tensor


def all_reduce_gradients(comm: Comm, parameters, *, all_reduce: Callable = ring_all_reduce) -> None:
    """Add up the gradients of `parameters` over all ranks, in one flat tensor; a gradient that is missing counts as zeros.

    S bytes of gradients: 2 (n-1)/n S sent by each rank with the ring. `all_reduce(comm, x)` returns the sum.
    """
    parameters = list(parameters)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if comm.size == 1 or not parameters:
        return
    flat = all_reduce(comm, torch.cat([g.reshape(-1) for g in grads]))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).clone()


def hybrid_step(
    comm: Comm,
    model: nn.Module,
    batch,
    optimizer,
    rows: RowOptimizer,
    *,
    all_reduce: Callable = ring_all_reduce,
) -> float:
    """One step of a ClickModel over a ShardedEmbedding: `optimizer` steps the dense net, `rows` this rank's shard.

    The loss is the mean over the samples of all ranks, so batches may differ in size and one may be empty. Returns it, the same
    on every rank. Sends the sparse exchange, the all-reduce of the dense gradients, and two of 8 bytes (samples, loss).
    """
    samples, loss = _backward(comm, model, batch, all_reduce)
    all_reduce_gradients(comm, model.dense_parameters(), all_reduce=all_reduce)
    optimizer.step()
    rows.step(*model.embedding.touched())
    optimizer.zero_grad()
    return _mean(comm, samples, loss, all_reduce)


def replicated_step(
    comm: Comm,
    model: nn.Module,
    batch,
    optimizer,
    rows: RowOptimizer,
    *,
    all_reduce: Callable = ring_all_reduce,
) -> float:
    """The same step with the whole table on every rank, all of whose gradient is all-reduced, zeros included.

    `rows` steps the rows whose gradient is not zero, on every rank alike.
    """
    samples, loss = _backward(comm, model, batch, all_reduce)
    table = model.embedding.weight
    all_reduce_gradients(comm, [*model.dense_parameters(), table], all_reduce=all_reduce)
    optimizer.step()
    touched = table.grad.any(1).nonzero().squeeze(1)
    rows.step(touched, table.grad[touched])
    optimizer.zero_grad()
    table.grad = None
    return _mean(comm, samples, loss, all_reduce)


def _backward(comm, model, batch, all_reduce) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of all ranks, and this rank's share of the mean loss, after its backward. ValueError (comm.checks) for a loss that
    is nan or inf, which names the rank, before its gradients travel.
    """
    samples = _sum(comm, torch.tensor(float(len(batch)), dtype=torch.float64), all_reduce)
    loss = model.loss(batch, samples=int(samples))
    if comm.checks and not bool(torch.isfinite(loss)):
        raise ValueError(f"rank {comm.rank}: the loss is {loss.item()}, before any gradient is sent: look at this rank's batch")
    loss.backward()
    return samples, loss.detach().double()


def _mean(comm, samples, loss, all_reduce) -> float:
    return float(_sum(comm, loss, all_reduce))


def _sum(comm, x, all_reduce):
    return all_reduce(comm, x.to(comm.device)) if comm.size > 1 else x
