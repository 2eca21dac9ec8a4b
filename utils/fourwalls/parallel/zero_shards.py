"""Parameters laid end to end and cut into one chunk per rank: the ground that all three stages of ZeRO stand on.

Where a parameter begins and ends does not matter to a chunk, so sizes need not divide, and a parameter with fewer elements than
there are ranks is no special case: some ranks hold none of it. The optimiser sees pieces, the parts of parameters that lie in
this rank's chunk, as ordinary tensors.

    chunk r of S elements on n ranks: floor(S / n) + (1 if r < S mod n else 0) elements, from `collectives.chunks`

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.
"""

from collections.abc import Iterable

import torch

from ..collectives.chunks import chunk_sizes, chunk_start

__all__ = ["Flat", "Piece", "cut_parameters"]


class Piece:
    """The part of one parameter that lies in this rank's chunk. `values`: a view of the shard, with `.grad` set before a step."""

    __slots__ = ("begin", "end", "index", "values")

    def __init__(self, index: int, begin: int, end: int, values: torch.Tensor):
        self.index, self.begin, self.end, self.values = index, begin, end, values  # begin, end: places in the shard


class Flat:
    """Some parameters of one dtype end to end, and this rank's chunk of them.

    numel    elements of all of them            sizes   elements of every rank's chunk
    shard    this rank's chunk of the values    grad    its chunk of the mean gradient, None before the first and after `forget`
    whole    all values; stage 3 frees its memory between uses (`shrink`) and takes it again (`grow`)
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], ranks: int, rank: int, *, keep_whole: bool):
        named = list(named)
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self.shapes = [p.shape for p in self.params]
        counts = [p.numel() for p in self.params]
        self.stops = torch.tensor(counts).cumsum(0).tolist()
        self.starts = [stop - count for stop, count in zip(self.stops, counts, strict=True)]
        self.numel, self.sizes = self.stops[-1], chunk_sizes(self.stops[-1], ranks)
        self.trained = self.params[0].requires_grad
        begin, end = (chunk_start(self.numel, ranks, r) for r in (rank, rank + 1))
        with torch.no_grad():
            self.whole = torch.cat([p.detach().reshape(-1) for p in self.params])
            self.shard = self.whole[begin:end] if keep_whole else self.whole[begin:end].clone()
        self.grad: torch.Tensor | None = None
        self.sums = 0  # begun since `forget`
        self.had: set[int] = set()  # numbers of the parameters that had a gradient on this rank
        self.pieces = []
        for k, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                self.pieces.append(Piece(k, low - begin, high - begin, self.shard[low - begin : high - begin]))
        self.begin = begin
        self.show() if keep_whole else self.shrink()

    @property
    def bytes(self) -> int:
        return self.numel * self.shard.element_size()

    # --- values ----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of `numel` elements seen as the parameters."""
        parts = zip(self.starts, self.stops, self.shapes, strict=True)
        return [flat[start:stop].view(shape) for start, stop, shape in parts]

    def show(self) -> None:
        """The parameters are views of `whole`."""
        for p, view in zip(self.params, self.views(self.whole), strict=True):
            p.data = view

    def grow(self) -> torch.Tensor:
        """Take the memory of `whole` again; what is in it is not defined."""
        self.whole.untyped_storage().resize_(self.bytes)
        return self.whole[:]  # an operation on it: a Ledger looks at the new size

    @torch.no_grad()
    def keep(self) -> None:
        """This rank's chunk of what is in `whole` now becomes its shard: somebody may have written to the parameters."""
        self.shard.copy_(self.whole[self.begin : self.begin + len(self.shard)])

    def shrink(self) -> None:
        """Give the memory of `whole` back. What autograd has saved of it stays, and is right again after the next gather.

        A parameter then has shape (0,): whoever uses it meanwhile is told of a size that does not fit, and reads no freed memory.
        """
        self.whole.untyped_storage().resize_(0)
        nothing = self.whole[:0]
        for p in self.params:
            p.data = nothing

    # --- gradients -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def take_gradients(self, *, who: str = "", check: bool = False) -> torch.Tensor:
        """All gradients end to end, (numel,), 0 where a parameter has none; `p.grad` is None afterwards, one by one.

        check: raise ValueError, which names `who` and the parameter, where one holds nan or inf.
        """
        flat = torch.empty(self.numel, dtype=self.shard.dtype, device=self.shard.device)
        for k, (p, view) in enumerate(zip(self.params, self.views(flat), strict=True)):
            if p.grad is None:
                view.zero_()
                continue
            view.copy_(p.grad)
            p.grad = None
            self.had.add(k)
        if check and not bool(torch.isfinite(flat.sum())):  # one pass, and nearly always the end of it
            bad = [name for name, view in zip(self.names, self.views(flat), strict=True) if not bool(torch.isfinite(view).all())]
            if bad:
                more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
                raise ValueError(f"{who}: nan or inf in the gradient of {bad[0]}{more}, before any sum: look at its batch")
        return flat

    @torch.no_grad()
    def add_gradient(self, chunk: torch.Tensor, ranks: int) -> None:
        """Add this rank's chunk of a sum over ranks, divided by their number."""
        if chunk.shape != self.shard.shape or chunk.dtype != self.shard.dtype:
            raise ValueError(
                f"reduce_scatter returned {chunk.dtype} {tuple(chunk.shape)}; this rank's chunk of {self.numel} elements is "
                f"{self.shard.dtype} {tuple(self.shard.shape)}: chunk r goes to rank r, the larger chunks first"
            )
        if chunk.untyped_storage().nbytes() > chunk.nbytes:
            chunk = chunk.clone()  # a view would keep the whole sum alive
        chunk.div_(ranks)
        self.grad = chunk if self.grad is None else self.grad.add_(chunk)

    def give_to_pieces(self) -> None:
        """Set `.grad` of every piece. None for a parameter that had no gradient on any rank, as on one device: it takes no step.

        Whether other ranks had one is seen from the sum itself: it is not all zero, here. (So the rows of a table that no rank
        has touched take no step, not even of decay, where the whole piece is such rows and only other ranks had used the table.)
        """
        for piece in self.pieces:
            part = None if self.grad is None else self.grad[piece.begin : piece.end]
            if part is not None and piece.index not in self.had and not bool(part.any()):
                part = None
            piece.values.grad = part

    def forget(self) -> None:
        self.grad, self.had, self.sums = None, set(), 0
        for piece in self.pieces:
            piece.values.grad = None
        for p in self.params:
            p.grad = None


def cut_parameters(
    named: Iterable[tuple[str, torch.nn.Parameter]], ranks: int, rank: int, *, most_bytes: int | None = None, keep_whole: bool
) -> list[Flat]:
    """Flats for `named`, in their order: parameters share one if dtype and requires_grad are equal and it is at most `most_bytes`
    (a larger parameter has one of its own). None: as large as it gets.
    """
    open_: dict[tuple, list] = {}
    closed = []
    for name, p in named:
        kind = (p.dtype, p.requires_grad)
        entry = open_.setdefault(kind, [])
        if entry and most_bytes is not None and sum(q.nbytes for _, q in entry) + p.nbytes > most_bytes:
            closed.append(open_.pop(kind))
            entry = open_[kind] = []
        entry.append((name, p))
    return [Flat(entry, ranks, rank, keep_whole=keep_whole) for entry in [*closed, *open_.values()]]
