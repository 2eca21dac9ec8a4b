"""Rows on a parameter server: what embeddings cost where the owners of rows are ranks of their own.

The same request as with rows dealt out to the workers: each different id once, the row back, its gradient out. But no row is ever
at home, every byte passes a server's link, and the sum over the workers is made there. The dense net lies on the same servers, as
in `parameter_server`; all in step.

    bytes through servers' links = sum over workers of u (id + row + row) + headers,       u different ids a batch

Reference: Li et al., OSDI 2014; Cheng et al. 2016 (arXiv:1606.07792). The exact formula:
`fourwalls.cost.sparse.row_server_bytes`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..nn.clicks import ClickConfig, ClickModel
from ..nn.init import draw
from ..nn.sparse import RowOptimizer, merge_rows
from ..ranks.comm import Comm
from .parameter_server import Server, Worker, check_roles
from .rows import Request, RowOwners, make_request
from .server_keys import place_keys

__all__ = ["RowServer", "ServedEmbedding", "train_clicks_with_servers"]

HEAD, IDS, ROWS, GRADS = 3, 4, 5, 6  # tags


class RowServer:
    """One server's rows. shard (rows of it, width); `optimizer` steps them; `workers`: their ranks."""

    def __init__(self, comm: Comm, owners: RowOwners, optimizer: RowOptimizer, workers: Sequence[int]):
        self.comm, self.owners, self.optimizer, self.workers = comm, owners, optimizer, list(workers)
        self._asked: list[tuple[torch.Tensor, int]] = []  # (places in the shard, samples) of each worker

    def give(self) -> None:
        """Hear from every worker which rows it wants, and send them."""
        comm, shard = self.comm, self.optimizer.weight
        heads = [comm.irecv(torch.empty(4, dtype=torch.int64), w, HEAD) for w in self.workers]
        heads = [head.wait().tolist() for head in heads]  # [ids, samples, bytes of an id, 0]
        kinds = {4: torch.int32, 8: torch.int64}
        wanted = [comm.irecv(torch.empty(h[0], dtype=kinds[h[2]]), w, IDS) for h, w in zip(heads, self.workers, strict=True)]
        self._asked = [(self.owners.place(ids.wait()), h[1]) for ids, h in zip(wanted, heads, strict=True)]
        sending = [comm.isend(shard[places], w, ROWS) for (places, _), w in zip(self._asked, self.workers, strict=True)]
        for request in sending:
            request.wait()

    def take(self) -> None:
        """Receive the gradients of these rows from every worker, average over all samples, and step each row once."""
        width = self.optimizer.weight.shape[1]
        total = max(1, sum(samples for _, samples in self._asked))
        coming = [
            (self.comm.irecv(self.optimizer.weight.new_empty(len(places), width), w, GRADS), samples / total)
            for (places, samples), w in zip(self._asked, self.workers, strict=True)
        ]
        grads = [request.wait() * share for request, share in coming]
        self.optimizer.step(*merge_rows(torch.cat([places for places, _ in self._asked]), torch.cat(grads)))


class ServedEmbedding(nn.Module):
    """A worker's side, in place of nn.layers.Embedding: ids (b, ...) -> (b, ..., width). Forward fetches, backward gives back."""

    def __init__(self, comm: Comm, owners: RowOwners, width: int, servers: Sequence[int], dtype: torch.dtype | None = None):
        super().__init__()
        self.comm, self.owners, self.width, self.servers = comm, owners, width, list(servers)
        self.dtype = dtype or torch.get_default_dtype()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ValueError, before anything is sent, for an id that no server owns."""
        request = make_request(ids, self.owners)
        start = torch.zeros((), dtype=self.dtype, requires_grad=True)  # so that backward comes by
        return _Fetch.apply(start, self, request)[request.place].view(*request.shape, self.width)

    def fetch(self, request: Request) -> torch.Tensor:
        """Ask every server for its part of the request; (different ids, width)."""
        comm, sending, parts, samples = self.comm, [], [], request.shape[0]
        for server, ids in zip(self.servers, request.wanted.split(request.counts), strict=True):
            head = torch.tensor([len(ids), samples, ids.element_size(), 0])
            sending += [comm.isend(head, server, HEAD), comm.isend(ids, server, IDS)]
            parts.append(comm.irecv(torch.empty(len(ids), self.width, dtype=self.dtype), server, ROWS))
        for message in sending:
            message.wait()
        return torch.cat([part.wait() for part in parts])

    def give_back(self, request: Request, grads: torch.Tensor) -> None:
        """Send each server the gradients of its rows. ValueError (comm.checks), naming the rank, for a nan or inf in them."""
        if self.comm.checks and not bool(torch.isfinite(grads).all()):
            raise ValueError(f"rank {self.comm.rank}: nan or inf in the gradients of rows, of which none is sent: see its batch")
        pieces = zip(self.servers, grads.contiguous().split(request.counts), strict=True)
        for message in [self.comm.isend(piece, server, GRADS) for server, piece in pieces]:
            message.wait()


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, start, embedding, request):
        ctx.rest = embedding, request
        return embedding.fetch(request)

    @staticmethod
    def backward(ctx, grads):
        embedding, request = ctx.rest
        embedding.give_back(request, grads)
        return grads.new_zeros(()), None, None


def train_clicks_with_servers(
    comm: Comm,
    config: ClickConfig,
    batch_of: Callable,
    optimizer: Callable,
    row_optimizer: Callable[[torch.Tensor], RowOptimizer],
    *,
    steps: int,
    servers: int = 1,
    rule: str = "modulo",
    dtype: torch.dtype | None = None,
) -> dict:
    """Train a ClickModel in step: tables and net on ranks 0 to servers - 1, the others work. batch_of(step, worker) -> Clicks.

    Returns on a worker {"losses": its own, "samples", "weights": name -> tensor of the net}, on a server {"ids", "rows"}.
    """
    workers = check_roles(comm.size, servers)
    owners = RowOwners(config.rows, servers, rule)
    net = ClickModel(config, embedding=ServedEmbedding(comm, owners, config.width, range(servers), dtype), dtype=dtype)
    trained = dict(net.named_parameters())
    keys = place_keys({name: p.numel() for name, p in trained.items()}, servers)
    if comm.rank < servers:
        whole = draw("embedding.weight", (config.rows, config.width), seed=config.seed, std=0.1)
        ids = owners.ids_of(comm.rank)
        rows = RowServer(comm, owners, row_optimizer(whole[ids].to(dtype or torch.get_default_dtype())), workers)
        dense = Server(comm, keys.pack(comm.rank, trained), optimizer, workers=workers)
        dense.round()  # everybody pulls
        for _ in range(steps):
            rows.give()
            rows.take()
            dense.round()
        dense.round()  # everybody says goodbye
        return {"ids": ids, "rows": rows.optimizer.weight, "log": dense.log}
    worker, losses, samples = Worker(comm, trained, keys, range(servers)), [], []
    worker.pull()
    for step in range(steps):
        batch = batch_of(step, comm.rank - servers)
        loss = net.loss(batch)
        loss.backward()
        losses.append(loss.item())
        samples.append(len(batch))
        worker.push(len(batch))
        for p in trained.values():
            p.grad = None
    worker.done()
    return {"losses": losses, "samples": samples, "weights": {name: p.detach() for name, p in trained.items()}}
