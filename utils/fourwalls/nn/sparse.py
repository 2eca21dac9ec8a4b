"""Optimisers that touch only the rows of a table that a batch has touched, and the merging of rows that it has touched twice.

A table of a million rows sees a few thousand of them in a step. The gradient is then a list of (id, row) instead of a table, and
an optimiser keeps its state row by row, where the row lives. Lazy Adam leaves a row that was not touched alone, although dense
Adam would still move it by its old mean; row-wise Adagrad keeps one number a row, and for it the two are the same.

    s_i = s_i + mean(g_i^2);   w_i = w_i - lr g_i / (sqrt(s_i) + eps)        for the touched rows i only

Reference: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 12 (2011); torch.optim.SparseAdam for the lazy form.
"""

from abc import ABC, abstractmethod

import torch

from .optim import adam_

__all__ = ["RowAdagrad", "RowAdam", "RowOptimizer", "merge_rows"]


@torch.no_grad()
def merge_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k,) ids with repeats and (k, w) gradients -> the different ids, rising, and the sum of the gradients of each.

    A row is added up in the order in which it comes, so the result does not depend on chance.
    """
    unique, place = torch.unique(ids, return_inverse=True)
    return unique, grads.new_zeros(len(unique), *grads.shape[1:]).index_add_(0, place, grads)


class RowOptimizer(ABC):
    """Steps rows of one table (rows, w) in place. The state has a row for each row of the table: a shard has a shard of it."""

    def __init__(self, weight: torch.Tensor, *, lr: float):
        if weight.dim() != 2:
            raise ValueError(f"a table has shape (rows, width), not {tuple(weight.shape)}")
        if not lr >= 0:
            raise ValueError(f"lr is {lr!r}; it is at least 0")
        self.weight, self.lr, self.steps = weight, lr, 0

    @torch.no_grad()
    def step(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """One step of the rows `ids` (k,), each at most once, by their gradients (k, w); k may be 0. Other rows stay as they are.

        Raises ValueError where an id is given twice: merge first, or the row would be stepped with one of its gradients. Also for
        a row that is not there (a negative one would count from the end), or gradients of another shape.
        """
        rows, width = self.weight.shape
        if tuple(grads.shape) != (ids.numel(), width):
            raise ValueError(f"gradients are {tuple(grads.shape)} for {ids.numel()} rows; they are ({ids.numel()}, {width})")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise ValueError(f"rows {int(ids.min())} to {int(ids.max())} are stepped; the table has rows 0 to {rows - 1}")
        if ids.numel() != torch.unique(ids).numel():
            twice = ids[(torch.bincount(ids)[ids] > 1)][0].item()
            raise ValueError(f"row {twice} is given twice in one step; merge_rows(ids, grads) adds up its gradients first")
        self.steps += 1
        touched = self.weight[ids]
        self._update(touched, grads.to(touched.dtype), ids)
        self.weight[ids] = touched

    @abstractmethod
    def _update(self, rows: torch.Tensor, grads: torch.Tensor, ids: torch.Tensor) -> None:
        """Step the copies `rows` in place, and the state of the rows `ids`."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of the state of the whole table."""


class RowAdam(RowOptimizer):
    """Lazy Adam: `m` and `v` of a row move only when it is touched; the step in the correction counts all steps of the table.

    Where every row is touched in every step this is `adam_`, with the same bits.
    """

    def __init__(self, weight, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(weight, lr=lr)
        self.betas, self.eps = betas, eps
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)

    def _update(self, rows, grads, ids):
        m, v = self.m[ids], self.v[ids]
        adam_(rows, grads, m, v, self.steps, lr=self.lr, betas=self.betas, eps=self.eps)
        self.m[ids], self.v[ids] = m, v

    @property
    def state_bytes(self) -> int:
        return self.m.nbytes + self.v.nbytes


class RowAdagrad(RowOptimizer):
    """One number a row: the sum over the steps of the mean square of its gradient. A gradient of zeros changes nothing."""

    def __init__(self, weight, *, lr=1e-2, eps=1e-10):
        super().__init__(weight, lr=lr)
        self.eps = eps
        self.squares = weight.new_zeros(len(weight))

    def _update(self, rows, grads, ids):
        squares = self.squares[ids] + grads.square().mean(1)
        self.squares[ids] = squares
        rows.addcdiv_(grads, (squares.sqrt() + self.eps).unsqueeze(1), value=-self.lr)

    @property
    def state_bytes(self) -> int:
        return self.squares.nbytes
