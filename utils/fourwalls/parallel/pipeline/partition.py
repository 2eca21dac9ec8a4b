"""Where to cut a model into stages: layers are not equal, and a pipeline is as fast as its slowest stage.

The embedding of a GPT is a table look-up and its head a large product, so equal numbers of layers are not equal work. All cuts
are tried, cheaply: the best way to put the first j layers on k stages follows from the best ways to put fewer layers on k - 1.

    best(k, j) = min over i < j of  max(best(k - 1, i), stage(i, j))        p L^2 steps, exact

Reference: Harlap et al. 2018 (PipeDream, arXiv:1806.03377), section 3.1, for the recurrence; a stage holds as in 1F1B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...cost.flops import forward_flops, logits_op
from ...cost.memory import layer_activations
from ...cost.shape import Shape

__all__ = ["Layer", "Partition", "equal_cuts", "gpt_layers", "partition"]


@dataclass(frozen=True)
class Layer:
    """One layer that cannot be cut. seconds: forward and backward of a micro-batch (any unit of work will do).

    states: bytes of parameters, gradients and optimizer.  activation: bytes kept for one micro-batch.  link: seconds until what
    it puts out is on the next rank, and the gradient of that back here.
    """

    name: str
    seconds: float
    states: float = 0.0
    activation: float = 0.0
    link: float = 0.0


@dataclass(frozen=True)
class Partition:
    """stages[i]: the layers of stage i, as a range; seconds[i], memory[i]: of it.  bottleneck: the slowest, links included."""

    stages: tuple[range, ...]
    seconds: tuple[float, ...]
    memory: tuple[float, ...]
    bottleneck: float

    @property
    def balance(self) -> float:
        """Mean over slowest stage: 1 where all are equal."""
        return sum(self.seconds) / len(self.seconds) / max(self.seconds)


def gpt_layers(shape: Shape, batch: int = 1, *, state_bytes: float = 16.0, flops_per_second: float = 1.0) -> list[Layer]:
    """The layers of a GPT: embedding, blocks, head (with the last norm). Seconds: 3 x forward FLOPs / flops_per_second.

    state_bytes: of a parameter with its gradient and optimizer. Tied: the head holds a copy of the table, as two ranks must.
    """
    head = logits_op(shape, batch).forward
    block = (forward_flops(shape, batch) - head) / shape.layers
    parameters, ends = shape.layer_parameters().total, {term.name: term.total for term in shape.end_parameters()}
    table = shape.vocabulary * shape.width
    rows = batch * shape.length
    inside = 2 * rows * shape.width
    first = Layer("embedding", 0.0, state_bytes * (table + ends.get("positions", 0)), inside)
    last = Layer("head", 3 * head / flops_per_second, state_bytes * (table + ends["last norm"]), 4 * rows * shape.vocabulary)
    kept = float(layer_activations(shape, batch).total)
    blocks = [Layer(f"block {k}", 3 * block / flops_per_second, state_bytes * parameters, kept) for k in range(shape.layers)]
    return [first, *blocks, last]


def equal_cuts(layers: Sequence[Layer], stages: int, **options) -> Partition:
    """As many layers on each stage, the first ones take one more; what everybody does before looking. Options of `partition`."""
    _check(layers, stages)
    count, more = divmod(len(layers), stages)
    ends = [0]
    for k in range(stages):
        ends.append(ends[-1] + count + (k < more))
    return _Cuts(layers, stages, **options).result(ends)


def partition(
    layers: Sequence[Layer],
    stages: int,
    *,
    microbatches: int | None = None,
    limit: float | None = None,
    overlap: bool = True,
) -> Partition:
    """The cuts with the least bottleneck. ValueError with fewer layers than stages, or if no cut fits into the memory.

    limit: bytes of each rank; stage i holds activations of min(p - i, m) micro-batches, as in 1F1B (microbatches None: p - i).
    overlap: links run beside the work, so the slower of both counts; else a stage also waits for its link to the next one.
    """
    _check(layers, stages)
    cuts = _Cuts(layers, stages, microbatches=microbatches, overlap=overlap)
    ends = cuts.best(limit)
    if ends is None:
        least = cuts.least_memory()
        raise ValueError(f"no cut into {stages} stages fits into {limit:g} bytes; the least that one needs is {least:g} bytes")
    return cuts.result(ends)


def _check(layers: Sequence[Layer], stages: int) -> None:
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= len(layers):
        most = len(layers)
        raise ValueError(f"{stages!r} stages for {most} layers: a stage has at least one layer; allowed: 1 to {most}")


class _Cuts:
    """Stages as pairs (first layer, end), priced from running sums."""

    def __init__(self, layers: Sequence[Layer], stages: int, *, microbatches: int | None = None, overlap: bool = True):
        self.layers, self.stages, self.overlap = list(layers), stages, overlap
        self.held = [min(stages - k, microbatches or stages) for k in range(stages)]
        self.sums = {}
        for word in ("seconds", "states", "activation"):
            row = [0]
            for layer in self.layers:
                row.append(row[-1] + getattr(layer, word))
            self.sums[word] = row

    def work(self, first: int, end: int) -> float:
        return self.sums["seconds"][end] - self.sums["seconds"][first]

    def memory(self, stage: int, first: int, end: int) -> float:
        states, kept = self.sums["states"], self.sums["activation"]
        return states[end] - states[first] + self.held[stage] * (kept[end] - kept[first])

    def price(self, stage: int, first: int, end: int) -> float:
        """Seconds of a stage per micro-batch, with its link to the next one."""
        link = self.layers[end - 1].link if stage < self.stages - 1 else 0.0
        work = self.work(first, end)
        return max(work, link) if self.overlap else work + link

    def best(self, limit: float | None) -> list[int] | None:
        """Ends of the stages with the least bottleneck, 0 first; None if none fits."""

        def price(stage: int, first: int, end: int) -> float:
            fits = limit is None or self.memory(stage, first, end) <= limit
            return self.price(stage, first, end) if fits else float("inf")

        found, ends = self._least(price)
        return None if found == float("inf") else ends

    def least_memory(self) -> float:
        return self._least(self.memory)[0]

    def _least(self, price) -> tuple[float, list[int]]:
        """The least possible largest price of a stage, and the ends that reach it."""
        count, inf = len(self.layers), float("inf")
        best = [0.0] + [inf] * count
        chosen = []
        for stage in range(self.stages):
            row, cut = [inf] * (count + 1), [0] * (count + 1)
            for end in range(stage + 1, count - (self.stages - 1 - stage) + 1):
                for first in range(end - 1, stage - 1, -1):
                    worst = max(best[first], price(stage, first, end))
                    if worst < row[end]:
                        row[end], cut[end] = worst, first
            best = row
            chosen.append(cut)
        ends = [count]
        for cut in reversed(chosen):
            ends.append(cut[ends[-1]])
        return best[count], ends[::-1]

    def result(self, ends: list[int]) -> Partition:
        pairs = list(zip(ends, ends[1:], strict=False))
        return Partition(
            tuple(range(a, b) for a, b in pairs),
            tuple(self.work(a, b) for a, b in pairs),
            tuple(self.memory(k, a, b) for k, (a, b) in enumerate(pairs)),
            max(self.price(k, a, b) for k, (a, b) in enumerate(pairs)),
        )
