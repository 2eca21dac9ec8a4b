"""Recomputation measured: bytes kept, the peak in backward, and time beside torch's own checkpoint with the same bytes kept.

64 layers of Linear(512) and Tanh on 512 rows of float32: each activation is 1 MiB. Activations alone are counted, by storage;
parameters and their gradients are left out. Each case stands beside its forecast (memory/schedule.py), and its gradients must
have the bits of the run that keeps everything.

    k segments, all wrapped:  k kept,  peak k + 64/k + 2  activations         (2: what one layer needs for a moment)

Reference: Chen et al. 2016 (arXiv:1604.06174); torch.utils.checkpoint.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as torchs

from ..memory.chain import step_of
from ..memory.ledger import Ledger
from ..memory.planner import best_plan
from ..memory.recompute import run_plan
from ..memory.schedule import Again, forecast, keep_all, runs, segments, steps_of
from .record import Row
from .timer import alternate, spread, time_call, time_ratio

__all__ = ["Case", "describe", "measured_bytes", "rows"]

describe = "recomputation of 64 x (Linear 512, Tanh): bytes kept, peak, runs, time beside torch.utils.checkpoint"
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
TIMED = (1, 8, 64)


class Case:
    """The chain, and one forward and backward of it under a plan."""

    def __init__(self, layers: int = 64, width: int = 512, rows: int = 512):
        generator = torch.Generator().manual_seed(0)
        self.layers = []
        for _ in range(layers):
            linear = torch.nn.Linear(width, width)
            with torch.no_grad():
                linear.weight.copy_(torch.randn(width, width, generator=generator).mul_(1.5 * width**-0.5))
                linear.bias.zero_()
            self.layers.append(torch.nn.Sequential(linear, torch.nn.Tanh()))
        self.model = torch.nn.ModuleList(self.layers)
        self.x = torch.randn(rows, width, generator=generator)

    def step(self, run: Callable, ledger: Ledger | None = None) -> None:
        """Forward and backward of run(x); gradients anew. With a ledger the phases are marked."""
        for p in self.model.parameters():
            p.grad = None
        h = self.x * 1  # made here, so that the chain's input counts too
        y = run(h)
        del h
        loss = y.sum()
        del y
        if ledger is not None:
            ledger.phase("backward")
        loss.backward()

    def ours(self, plan, **options) -> Callable:
        return partial(run_plan, self.layers, plan=plan, **options)

    def torchs(self, plan) -> Callable:
        """The same segments with torch's checkpoint, the variant that it recommends."""

        def run(x):
            for node in plan:
                steps = [self.layers[k] for k in steps_of((node,))]
                x = torchs(_in_a_row, steps, x, use_reentrant=False) if isinstance(node, Again) else _in_a_row(steps, x)
            return x

        return run

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters()]


def _in_a_row(steps, x):
    for step in steps:
        x = step(x)
    return x


def measured_bytes(case: Case, run: Callable) -> tuple[int, int]:
    """(bytes of activations kept after forward, the most at any moment) of one step, by storage."""
    with Ledger(case.model, inputs=[case.x], lines=False) as ledger:
        case.step(run, ledger)
    beside = [m.total - sum(m.bytes[c] for c in ("parameters", "gradients", "inputs")) for m in ledger.curve()]
    turn, _ = ledger.story().phases[0]
    return beside[turn], max(beside)


def rows(options, say: Callable[[str], None] = lambda text: None, *, layers: int = 64, width: int = 512) -> Iterator[Row]:
    """For no recomputation, each number of segments, and the best plan with the same peak: bytes, runs and, for some, time."""
    case = Case(layers, width, width)
    size = case.x.nbytes
    chain = [step_of(case.layers[0], case.x)] * layers
    case.step(case.ours(keep_all(layers)))
    right = [g.clone() for g in case.gradients()]
    told = partial(forecast, chain, input=size, output_grad=0)
    yield from _bytes_rows(case, {"plan": "keep all", "segments": 0}, keep_all(layers), told, right)
    for k in (k for k in SEGMENTS if k <= layers):
        plan, name = segments(layers, k), {"plan": "segments", "segments": k}
        say(f"recompute, {k} segments")
        yield from _bytes_rows(case, name, plan, told, right)
        if k in TIMED:
            for checks in (False, True):
                ours, theirs = case.ours(plan, checks=checks), case.torchs(plan)
                yield _time_row(case, name | {"checks": checks}, ours, theirs, options.pairs, right)
        best = best_plan(chain, told(plan=plan).peak, input=size, output_grad=0)
        say(f"recompute, the best plan with the peak of {k} segments")
        name = {"plan": "best", "segments": k}
        yield from _bytes_rows(case, name, best, told, right, beside=plan)
        if k == 8:
            ours, peer = case.ours(best, checks=False), case.ours(plan, checks=False)
            yield _time_row(case, name | {"checks": False}, ours, peer, options.pairs, right, "8 segments")


def _bytes_rows(case, name, plan, told, right, beside=None) -> Iterator[Row]:
    here = {"benchmark": "recompute", "case": name}
    expected = told(plan=plan)
    kept, peak = measured_bytes(case, case.ours(plan))
    same = all(torch.equal(a, b) for a, b in zip(case.gradients(), right, strict=True))
    for metric, value, forecasted in (("kept", kept, expected.kept), ("peak", peak, expected.peak)):
        ratio = value / forecasted
        ok = same and abs(ratio - 1) <= 0.05 and (beside is None or metric == "kept" or value <= told(plan=beside).peak + 2**14)
        yield Row(metric=metric, value=value, unit="B", peer="forecast", time_ratio=ratio, ok=ok, **here)
    number = sum(runs(plan))
    yield Row(metric="runs", value=number, unit="forwards", ok=beside is None or number <= sum(runs(beside)), **here)


def _time_row(case, name, ours, theirs, pairs, right, peer=None) -> Row:
    mine, its = (partial(case.step, run) for run in (ours, theirs))
    ok = True
    for step in (mine, its):
        time_call(step, warmup=0, repeats=1)
        ok = ok and all(torch.equal(a, b) for a, b in zip(case.gradients(), right, strict=True))
    same_bytes = abs(measured_bytes(case, ours)[0] - measured_bytes(case, theirs)[0]) <= 2**14
    ours_s, theirs_s = alternate(mine, its, pairs)
    taken, ratio = spread(ours_s), time_ratio(ours_s, theirs_s)
    return Row(
        benchmark="recompute",
        case=name,
        metric="time",
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        pairs=pairs,
        peer=peer or "torch.utils.checkpoint",
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        ok=ok and (same_bytes or peer is not None),
    )
