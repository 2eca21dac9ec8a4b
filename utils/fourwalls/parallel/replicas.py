"""Are the replicas still one model? A digest of every tensor, compared across ranks, names what differs and where.

Data parallelism averages gradients and trusts that all ranks step from the same weights. If they do not, every number still looks
right and the model is none. A few bytes tell: each rank digests its tensors, and only digests travel.

    equal  <=>  all ranks' digests are equal           bytes a rank sends = 24 (n - 1), and 8 P (n - 1) more where something
    differs

Reference: torch's DistributedDataParallel checks shapes only, then broadcasts rank 0's weights.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..collectives import all_gather
from ..ranks import buffers
from ..ranks.comm import Comm

__all__ = ["check_replicas", "checksum", "differing", "digest"]


def digest(x: torch.Tensor) -> int:
    """63 bits that depend on shape, dtype and every bit of `x`."""
    head = f"{tuple(x.shape)} {x.dtype}".encode()
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _number(hashlib.blake2b(data.numpy(), key=head[:64], digest_size=8))


@torch.no_grad()
def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number that nearly always is another if any bit of `tensors` is: quicker than `digest`, to be compared in every step.

    What watches operators (a Ledger, a Meter) does not see it.
    """
    with _disable_current_modes():
        return sum((2 * place + 1) * buffers.checksum(x) for place, x in enumerate(tensors)) % 2**64


def differing(comm: Comm, named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[str]]:
    """{rank: names of its tensors that are not rank 0's}, the same on every rank; {} where all are equal.

    A rank with other names or another number of them has the single entry "(other names)". Every rank must call it.
    """
    named = list(named)
    names = _number(hashlib.blake2b("\0".join(name for name, _ in named).encode(), digest_size=8))
    own = [digest(x) for _, x in named]
    whole = _number(hashlib.blake2b(repr(own).encode(), digest_size=8))
    heads = all_gather(comm, torch.tensor([len(named), names, whole], device=comm.device)).tolist()
    strangers = {r: ["(other names)"] for r, head in enumerate(heads) if head[:2] != heads[0][:2]}
    if strangers or all(head == heads[0] for head in heads):
        return strangers
    every = all_gather(comm, torch.tensor(own, device=comm.device)).tolist()
    found = {r: [named[k][0] for k, d in enumerate(row) if d != every[0][k]] for r, row in enumerate(every)}
    return {r: names for r, names in found.items() if names}


def check_replicas(comm: Comm, named: Iterable[tuple[str, torch.Tensor]], *, when: str = "", cure: str = "") -> None:
    """Raise ValueError on every rank, naming ranks and tensors, unless all ranks hold the same bits."""
    found = differing(comm, named)
    if not found:
        return
    parts = []
    for rank, names in list(found.items())[:3]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"rank {rank}: {', '.join(names[:3])}{more}")
    rest = f"; and {len(found) - 3} more ranks" if len(found) > 3 else ""
    when = f" {when}" if when else ""
    raise ValueError(f"the replicas differ{when}. Not what rank 0 holds: {'; '.join(parts)}{rest}. {cure}".strip())


def _number(hash_) -> int:
    return int.from_bytes(hash_.digest(), "little") >> 1
