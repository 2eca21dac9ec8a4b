"""ZeRO: data parallelism that holds no byte of state twice. Stage 1 shards the optimiser, 2 gradients too, 3 parameters too.

An all-reduce is a reduce-scatter and an all-gather. Between the two every rank holds the finished sum of one chunk: stages 1
and 2 put the optimiser's step there, and gather new parameters in place of gradients, so they send what data parallelism sends.
Stage 3 (zero_stage3.py) keeps parameters sharded and gathers them twice, before forward and before backward: half as much again.

    elements a rank sends in a step:   stages 0, 1, 2:  2 Psi (n-1)/n        stage 3:  3 Psi (n-1)/n

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), sections 5 and 7.
"""

from collections.abc import Mapping

import torch

from ..collectives import ring
from ..collectives.chunks import chunk_sizes
from ..ranks.comm import Comm
from .replicas import checksum
from .zero_base import Sharded
from .zero_shards import Flat, cut_parameters
from .zero_stage3 import Zero3

__all__ = ["BUCKET_BYTES", "STAGES", "Zero1", "Zero2", "Zero3", "bytes_sent", "zero"]

BUCKET_BYTES = 25 * 2**20


def zero(model: torch.nn.Module, comm: Comm, *, stage: int, **options) -> Sharded:
    """`Zero1`, `Zero2` or `Zero3` on `model`; options as there. In a step: model(x), loss.backward(), step(), zero_grad()."""
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; allowed: 1, 2, 3 (stage 0 is data parallelism: parallel.data)")
    return STAGES[stage](model, comm, **options)


def bytes_sent(flats: list[Flat], n: int, rank: int, *, stage: int, backwards: int = 1) -> int:
    """Payload bytes that `rank` sends in one step with the ring: 2 and 3 Psi (n-1)/n, exact for sizes that do not divide.

    A reduce-scatter of S elements sends all but the rank's own chunk, an all-gather all but its right neighbour's. backwards:
    micro-batches of the step. Stage 1 sums once a step, stages 2 and 3 in each backward; stage 3 gathers twice for each.
    """
    total = 0
    for flat in flats:
        sizes, width = chunk_sizes(flat.numel, n), flat.shard.element_size()
        scatter = (flat.numel - sizes[rank]) * flat.trained
        gather = flat.numel - sizes[(rank + 1) % n]
        scatters, gathers = {1: (1, 1), 2: (backwards, 1), 3: (backwards, 2 * backwards)}[stage]
        total += (scatters * scatter + gathers * gather) * width
    return total if n > 1 else 0


class Zero1(Sharded):
    """Stage 1: the optimiser's state is sharded; parameters and gradients are whole on every rank.

    Gradients add up in `p.grad` over the micro-batches of a step, and `step()` sums them over the ranks, once.
    bucket_bytes: how much is summed at a time (a larger parameter alone).
    tied: {name: comm} of parameters that ranks of `comm` hold too, such as the two ends of a pipeline: their gradients are summed
    over it first, so that every shard is cut from the same sum (trial c22).
    """

    stage = 1

    def __init__(self, model, comm, *, bucket_bytes: int = BUCKET_BYTES, tied: Mapping[str, Comm] | None = None, **options):
        if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes is {bucket_bytes!r}; a whole number, at least 1 (then each parameter is summed alone)"
            )
        self.bucket_bytes, self.tied = bucket_bytes, dict(tied or {})
        self._new = False  # backward has made gradients that are in no shard yet
        self._cleared = 0  # calls of zero_grad since the last step
        super().__init__(model, comm, **options)
        unknown = set(self.tied) - {name for flat in self._trained for name in flat.names}
        if unknown:
            raise ValueError(f"tied: {sorted(unknown)[0]!r} is no trained parameter of the model")
        self._watch()

    def _lay_out(self, named):
        trained = [(name, p) for name, p in reversed(named) if p.requires_grad]  # reversed: as backward makes them
        return cut_parameters(trained, self.comm.size, self.comm.rank, most_bytes=self.bucket_bytes, keep_whole=True)

    def _watch(self):
        for p in (p for flat in self._flats for p in flat.params):
            self._hooks.append(p.register_post_accumulate_grad_hook(self._note))

    def _note(self, _):
        self._new = True

    def _give_up(self):
        self._new = False
        super()._give_up()

    def reduce(self):
        if not self._new:
            return
        self._new = False
        for name, others in self.tied.items():
            p = next(p for flat in self._trained for n, p in zip(flat.names, flat.params, strict=True) if n == name)
            p.grad = ring.all_reduce(others, torch.zeros_like(p) if p.grad is None else p.grad)
        for flat in self._flats:
            self._launch(flat)
        while self._flying:
            self._land()

    def zero_grad(self):
        self._cleared += 1
        super().zero_grad()

    def _alike(self):
        alike = super()._alike() | {"checksum of the weights": checksum(self.model.parameters())}
        if self.stage == 1:  # what is forgotten between micro-batches has been in no sum that could tell
            alike["calls of zero_grad"] = self._cleared
        self._cleared = 0
        return alike

    def _publish(self):
        tickets = [self._begin_to_gather(flat, f"new {flat.names[0]} ...") for flat in self._flats]
        for ticket in tickets:
            self._lane.wait(ticket)
        for flat in self._flats:  # backward may have saved a parameter: it must notice that it was written
            for p in flat.params:
                torch.autograd.graph.increment_version(p)


class Zero2(Zero1):
    """Stage 2: gradients are sharded too. Backward hands over a bucket as soon as it is full, and keeps one chunk of its sum.

    Every micro-batch is summed into the shards, so nothing whole is left between them (and m micro-batches send m times).
    Buckets leave in one order on all ranks; what backward did not reach leaves at its end.
    """

    stage = 2

    def __init__(self, model, comm, **options):
        if options.get("tied"):
            raise ValueError("tied: stage 2 sums during backward, before the other stage of a pipeline has its part; use stage 1")
        super().__init__(model, comm, **options)
        self._running = False  # a backward is under way

    def _watch(self):
        for flat in self._flats:
            for k, p in enumerate(flat.params):
                self._hooks.append(p.register_post_accumulate_grad_hook(lambda _, flat=flat, k=k: self._arrived(flat, k)))

    def _arrived(self, flat, k):
        if not self._running:
            self._running, self._next = True, 0
            self._waiting = [set(range(len(f.params))) for f in self._flats]
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._waiting[self._flats.index(flat)].discard(k)
        while self._next < len(self._flats) and not self._waiting[self._next]:
            self._launch(self._flats[self._next])
            self._next += 1

    def _finish(self):
        """Backward is over."""
        self._running = False
        for flat in self._flats[self._next :]:
            self._launch(flat)
        while self._flying:
            self._land()

    def _give_up(self):
        self._running = False
        super()._give_up()

    def reduce(self):
        """Nothing is left to do: backward has done it."""
        self._check_over(self._running)


STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
