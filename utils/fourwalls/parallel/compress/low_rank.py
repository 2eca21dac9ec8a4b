"""A gradient matrix as a thin product: two narrow factors travel, and both can be summed on the way.

One step of the power method, started from the last step's answer: every rank multiplies its matrix by the same Q, the products
are summed and made orthonormal (P), every rank multiplies back, and those are summed too. Vectors and small matrices, for which
the factors would be no smaller, are summed as they are, in the message of the first factor.

    P = orthonormal(sum M_r Q),   Q' = sum M_r^T P,   sum of M_r  is about  P Q'^T,   e_r = M_r - P P^T M_r

Reference: Vogels, Karimireddy and Jaggi 2019 (PowerSGD, arXiv:1905.13727).
"""

import math
from typing import Any

import torch

from .feedback import Compressor, numel_of, ring_bytes

__all__ = ["LowRank", "matrix_shape", "orthonormal"]


class LowRank(Compressor):
    """Rank-`rank` factors of each matrix.

    A flat tensor without `shapes` is taken as one nearly square matrix; give the parameters' shapes, whose structure it is.
    What all ranks together still owe stays bounded. One rank's residual need not: a part that cancels in the sum is never sent.
    (torch's hook keeps M_r minus the *mean* instead, so all in which a rank differs from the mean piles up there.)
    """

    name = "low rank"

    def __init__(self, *, rank: int = 2, seed: int = 0, **options):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"rank is {rank!r}; a whole number from 1 on")
        super().__init__(**options)
        self.rank, self.seed = rank, seed

    def exchange(self, comm, message, state, shapes, dtype):
        plan = self._plan(shapes)
        pieces = message.split([numel_of(shape) for shape, _ in plan])
        thin = [r for _, r in plan]
        matrices = [_as_matrix(piece, shape) for piece, (shape, r) in zip(pieces, plan, strict=True) if r]
        before = state.get("factors", [None] * len(matrices))
        starts = [self._start(q, m, k, r) for k, (q, m, r) in enumerate(zip(before, matrices, filter(None, thin), strict=True))]
        rest = [piece for piece, r in zip(pieces, thin, strict=True) if not r]
        summed = _together(comm, self.all_reduce, [m @ q for m, q in zip(matrices, starts, strict=True)] + rest)
        left = [orthonormal(p) for p in summed[: len(matrices)]]
        own = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        right = _together(comm, self.all_reduce, own)
        state["factors"] = right
        factors, plain = iter(zip(left, own, right, strict=True)), iter(summed[len(matrices) :])
        total, sent = [], []
        for piece, r in zip(pieces, thin, strict=True):
            if r:
                p, mine, q = next(factors)
                total.append((p @ q.T).reshape(-1)[: piece.numel()])
                sent.append((p @ mine.T).reshape(-1)[: piece.numel()])
            else:
                total.append(next(plain))
                sent.append(piece)
        return torch.cat(total), torch.cat(sent)

    def bytes_sent(self, n, shape, *, dtype=torch.float32, shapes=None):
        """Two ring all-reduces: rows r of every matrix and the rest as it is, then columns r of every matrix."""
        plan = self._plan(shapes or (tuple(shape),))
        size = 8 if dtype == torch.float64 else 4
        first = sum(matrix_shape(s)[0] * r if r else numel_of(s) for s, r in plan)
        second = sum(matrix_shape(s)[1] * r for s, r in plan)
        if second == 0:
            return ring_bytes(n, first, size)
        return tuple(a + b for a, b in zip(ring_bytes(n, first, size), ring_bytes(n, second, size), strict=True))

    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank, "seed": self.seed}

    def _plan(self, shapes) -> list[tuple[tuple, int]]:
        """(shape, rank) of each parameter; rank 0: sent as it is."""
        alone = len(shapes) == 1
        found = []
        for shape in shapes:
            rows, columns = matrix_shape(shape)
            r = min(self.rank, rows, columns)
            worth = (alone or len(shape) > 1) and r * (rows + columns) < numel_of(shape)
            found.append((tuple(shape), r if worth else 0))
        return found

    def _start(self, q: torch.Tensor | None, m: torch.Tensor, k: int, r: int) -> torch.Tensor:
        """The last step's factor; columns that are zero or not finite are drawn anew, the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + k)
        fresh = torch.randn(m.shape[1], r, generator=generator, dtype=torch.float64).to(m)
        if q is None:
            return fresh
        norm = q.norm(dim=0)
        return torch.where((norm > 0) & norm.isfinite(), q, fresh)


def matrix_shape(shape) -> tuple[int, int]:
    """(rows, columns) in which a parameter is seen: its first dimension against the others; a vector as square as can be."""
    if len(shape) > 1:
        return shape[0], numel_of(shape[1:])
    numel = numel_of(shape)
    rows = max(1, math.isqrt(max(numel - 1, 0)) + 1)
    return rows, -(-numel // rows)


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Columns made orthonormal one after the other (Gram-Schmidt, twice); one that depends on those before it becomes zero."""
    p = p.clone()
    small = 100 * torch.finfo(p.dtype).eps
    for k in range(p.shape[1]):
        column, size = p[:, k], p[:, k].norm()
        for _ in range(2):  # once loses digits where columns are nearly parallel
            column -= p[:, :k] @ (p[:, :k].T @ column)
        norm = column.norm()
        if bool(norm <= small * size):
            column.zero_()
        else:
            column /= norm
    return p


def _as_matrix(piece: torch.Tensor, shape) -> torch.Tensor:
    rows, columns = matrix_shape(shape)
    return torch.nn.functional.pad(piece, (0, rows * columns - piece.numel())).view(rows, columns)


def _together(comm, all_reduce, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of all `tensors`, in one message."""
    if not tensors:
        return []
    flat = all_reduce(comm, torch.cat([t.reshape(-1) for t in tensors]))
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
