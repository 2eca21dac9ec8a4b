"""Fit into so many bytes at the least extra work: the best plan of recomputation for a chain, by dynamic programming.

A stretch of steps whose input is there is either begun by taping its first step, or by forgetting its first few; what is left is
a shorter stretch with less room, and each pair of (stretch, room) is solved once. No plan of this kind is better, so none of the
simple schemes is either.

    cost(l, r | m) = min( tape l:  f_l + cost(l+1, r | m - kept_l - x_l+1),
                          forget [l, k):  f_l + .. + f_k-1 + cost(k, r | m - x_k) + cost(l, k | m) )

Reference: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019 (arXiv:1911.13214), "Optimal checkpointing for heterogeneous
chains".
"""

import math
from collections.abc import Sequence

import numpy as np

from .schedule import Again, Step, Tape, forecast, keep_all

__all__ = ["best_plan", "least_bytes"]

FINENESS = 1000  # where sizes have no common measure, a limit is cut into so many parts and every size rounded up
FINER = 8000  # for equal steps, whose table is small


def best_plan(chain: Sequence[Step], limit: int, *, input: int, output_grad: int | None = None) -> tuple:
    """The plan of least cost whose forecast's peak is at most `limit` bytes.

    Exact where sizes have a common measure that is not tiny, else sizes are rounded up to a thousandth of the limit (equal steps:
    to less). ValueError with the least bytes that work, where the limit is too small.
    """
    plan = _Table(chain, limit - input, output_grad).plan(0, len(chain))
    if not plan:
        least = least_bytes(chain, input=input, output_grad=output_grad)
        raise ValueError(f"{limit:,} bytes are too few for these {len(chain)} steps; least: {least:,}")
    return plan


def least_bytes(chain: Sequence[Step], *, input: int, output_grad: int | None = None) -> int:
    """The smallest limit for which there is a plan, found by halving; the plan there may be very slow."""
    low, high = input, forecast(chain, keep_all(len(chain)), input=input, output_grad=output_grad).peak
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _Table(chain, middle - input, output_grad).plan(0, len(chain)) else (middle, high)
    return high


class _Table:
    """cost(l, r | m) for every stretch and every budget m in units, with the choice that gives it. A budget is what may be alive
    beside the stretch's input and whatever others hold; the gradient that comes in at the stretch's end is in it.
    """

    def __init__(self, chain: Sequence[Step], budget: int, output_grad: int | None):
        budget, n = max(0, budget), len(chain)
        sizes = [size for s in chain for size in (s.output, s.forward_extra, s.backward_extra, *(w.kept for w in s.ways)) if size]
        unit = math.gcd(*sizes, output_grad or 0) or 1
        self.equal = all(step == chain[0] for step in chain)  # then a stretch's cost is a matter of its length alone
        parts = FINER if self.equal else FINENESS
        self.unit = unit if budget // unit <= parts else -(-budget // parts)
        self.size = budget // self.unit + 1
        self.chain, self.output_grad = chain, chain[-1].output if output_grad is None else output_grad
        self.known: dict[tuple, tuple] = {}
        for length in range(1, n + 1):
            for first in {0, n - length} if self.equal else range(n - length + 1):
                key = self._key(first, first + length)
                if key not in self.known:
                    self.known[key] = self._solve(first, first + length)

    def _key(self, first: int, end: int) -> tuple:
        """A stretch that ends where the chain does is run once only, before any gradient is there."""
        outer = end == len(self.chain)
        return (end - first, outer) if self.equal else (first, end)

    def _costs(self, first: int, end: int) -> np.ndarray:
        return self.known[self._key(first, end)][0]

    def _units(self, *sizes: int) -> int:
        return sum(-(-n // self.unit) for n in sizes)

    def _less(self, costs: np.ndarray, by: int) -> np.ndarray:
        """costs at a budget that is smaller by `by`; infinite where nothing is left."""
        moved = np.full(self.size, np.inf)
        moved[by:] = costs[: max(0, self.size - by)]
        return moved

    def _from(self, need: int, costs) -> np.ndarray:
        """costs where the budget is at least `need`, else infinite."""
        return np.where(np.arange(self.size) >= need, costs, np.inf)

    def _solve(self, first: int, end: int) -> tuple:
        outer = end == len(self.chain)
        step, grad = self.chain[first], self.output_grad if outer else self.chain[end - 1].output
        there = 0 if outer else grad  # what stays alive while the stretch is run
        options, names = [], []
        for number, way in enumerate(step.ways):
            forward = self._units(way.kept, step.output, step.forward_extra, there)
            saved, comes = step.output if step.saves_output else 0, grad if end == first + 1 else step.output
            backward = self._units(way.kept, saved, comes, step.backward_extra)
            rest = 0.0
            if end > first + 1:
                rest = self._less(self._costs(first + 1, end), self._units(way.kept, step.output))
            options.append(self._from(max(forward, backward), step.forward + way.extra + rest))
            names.append(Tape(first, number))
        need, passing, ahead = 0, 0, 0.0
        for k in range(first + 1, end):
            ran = self.chain[k - 1]
            need = max(need, self._units(passing, ran.output, ran.forward_extra, there))
            passing, ahead = ran.output, ahead + ran.forward
            rest = self._less(self._costs(k, end), self._units(ran.output))
            options.append(self._from(need, ahead + rest + self._costs(first, k)))
            names.append(k - first)
        stacked = np.stack(options)
        choice = stacked.argmin(axis=0)
        return stacked[choice, np.arange(self.size)], choice, names

    def plan(self, first: int, end: int, budget: int | None = None) -> tuple:
        """The best plan for steps first to end - 1; empty where there is none."""
        budget = self.size - 1 if budget is None else budget
        costs, choice, names = self.known[self._key(first, end)]
        if budget < 0 or not np.isfinite(costs[budget]):
            return ()
        chosen, step = names[choice[budget]], self.chain[first]
        if isinstance(chosen, Tape):
            left = budget - self._units(step.ways[chosen.way].kept, step.output)
            return (Tape(first, chosen.way), *(self.plan(first + 1, end, left) if end > first + 1 else ()))
        k = first + chosen
        left = budget - self._units(self.chain[k - 1].output)
        return (Again(self.plan(first, k, budget)), *self.plan(k, end, left))
