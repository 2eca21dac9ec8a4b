"""Buckets: gradients packed side by side, so that a few long messages carry what many short ones would.

Parameters are taken in reverse, since backward reaches the last ones first, and put into the open bucket of their dtype until it
is full. A parameter larger than a bucket gets one of its own. A gradient is put into its place when backward gives it, and from
then on *is* a view of its bucket, so nothing is copied back.

    buckets  >=  ceil(S / bucket_bytes),     order: as backward fills them

Reference: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

__all__ = ["BUCKET_BYTES", "Bucket", "plan_buckets"]

BUCKET_BYTES = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Some parameters of one dtype. `flat` holds their gradients side by side, `views` are its pieces in the parameters' shapes.

    addresses: where the views lie; index: place in the order in which buckets leave; waiting: names of parameters whose gradient
    has not come; placed: names of those whose gradient is in its place already; launched: it has left.
    """

    index: int
    names: list[str] = field(default_factory=list)
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    launched: bool = False

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def allocate(self) -> None:
        """Make `flat`, once; it stays for all steps."""
        if self.flat is None:
            first = self.parameters[0]
            self.flat = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
            parts = self.flat.split([p.numel() for p in self.parameters])
            self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
            self.addresses = [view.data_ptr() for view in self.views]

    def reset(self) -> None:
        """A new step: all gradients are awaited again."""
        self.waiting, self.launched = set(self.names), False
        self.placed.clear()

    @torch.no_grad()
    def place(self, i: int, divisor: int = 1) -> None:
        """Put gradient / divisor of parameter i into its place, 0 where there is none; `p.grad` is that place afterwards.

        ValueError for a sparse gradient, and for a parameter that was cast or moved, by name.
        """
        self.allocate()
        p, view = self.parameters[i], self.views[i]
        if p.dtype != self.flat.dtype or view.data_ptr() != self.addresses[i]:  # model.to() takes p.grad out of its bucket
            raise ValueError(f"{self.names[i]} was cast or moved since the first step; make a new DataParallel after model.to()")
        if p.grad is None:
            view.zero_()
        elif p.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of {self.names[i]} is sparse, and only dense ones are summed: build its Embedding with "
                "sparse=False, or let rows travel alone (parallel.embedding)"
            )
        elif divisor != 1:
            torch.div(p.grad, divisor, out=view)
        elif p.grad is not view:
            view.copy_(p.grad)
        p.grad = view
        self.placed.add(self.names[i])

    def is_placed(self, i: int) -> bool:
        """Whether the gradient of parameter i stands in its place, divided."""
        return self.names[i] in self.placed and self.parameters[i].grad is self.views[i]

    def is_full(self) -> bool:
        """Whether all gradients have come. Those that came in a step that was thrown away are waited for again."""
        if not self.waiting and not self.launched:
            self.waiting.update(name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None)
        return not self.waiting

    def replaced(self) -> list[str]:
        """Names of parameters whose gradient was put into its place, and whose `p.grad` is another tensor now."""
        three = zip(self.names, self.parameters, self.views, strict=True) if self.placed else ()
        return [name for name, p, view in three if name in self.placed and p.grad is not None and p.grad is not view]

    def pack(self, divisor: int = 1) -> None:
        """`place` for every parameter whose gradient is not in its place."""
        for i in range(len(self.names)):
            if not self.is_placed(i):
                self.place(i, divisor)

    @torch.no_grad()
    def not_finite(self) -> list[str]:
        """Names of the parameters whose packed gradient holds nan or inf."""
        if bool(torch.isfinite(self.flat.sum())):  # one pass, and nearly always the end of it
            return []
        return [name for name, view in zip(self.names, self.views, strict=True) if not bool(torch.isfinite(view).all())]


def plan_buckets(named: Iterable[tuple[str, torch.nn.Parameter]], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets for the parameters in `named` that are trained, in the order in which they leave.

    No bucket is larger than `bucket_bytes`, but for one that holds a single larger parameter. Raises ValueError for a size below
    1.
    """
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; a whole number of at least 1 (then each parameter is a bucket)")
    open_: dict[tuple, Bucket] = {}
    closed: list[Bucket] = []
    place = 0
    for place, (name, p) in enumerate(reversed([(n, p) for n, p in named if p.requires_grad])):
        kind = (p.dtype, p.device)
        bucket = open_.get(kind)
        if bucket is not None and bucket.bytes + p.numel() * p.element_size() > bucket_bytes:
            closed.append(open_.pop(kind))
            bucket = None
        if bucket is None:
            bucket = open_[kind] = Bucket(0)
        bucket.names.append(name)
        bucket.parameters.append(p)
        bucket.index = place  # for now: where its last parameter stands
    closed += open_.values()
    closed.sort(key=lambda b: b.index)  # with several dtypes, the one that is full first leaves first
    for index, bucket in enumerate(closed):
        bucket.index = index
        bucket.reset()
    return closed
