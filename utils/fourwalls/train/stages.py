"""A stage of the GPT whose layers t ranks share: the pipeline's cut and the tensor axis' cut of one model, in one module.

A stage holds some layers, and of each of them this rank's slab. Parameters have the names of `nn.gpt.GPT`, and start as its parts
do, whatever the mesh. Where a tied model's two ends stand on one rank (a V-shaped schedule), they are one table; where they stand
apart, each end has a copy, and `step.py` sums their gradients.

    rank (p, t):  layers cuts[p] .. cuts[p+1] - 1,  slab t of each

Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 2; Shoeybi et al. 2019 (arXiv:1909.08053) for tied ends.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..nn.gpt import GPTConfig
from ..nn.init import name_seed
from ..parallel.pipeline.stages import check_cuts
from ..parallel.sequence import SequenceRegion
from ..parallel.tensor import Region
from ..parallel.tensor_dropout import Streams
from ..parallel.tensor_gpt import TensorGPT
from ..parallel.tensor_vocabulary import vocabulary_cross_entropy
from ..ranks.comm import Comm

__all__ = ["TensorStage", "build_stages"]


class TensorStage(nn.Module):
    """Stage `index` of the GPT of `config`, cut at `cuts`, shared by the ranks of `comm`.

    (b, s) tokens on the first stage, else activations as `region` holds them: (b, s, h), or (b, s/t, h) under sequence
    parallelism. Out the same, or (b, s, ceil(V/t)) logits on the last.
    streams: where dropout draws; each forward pass seeds them from torch's default generator, which the pipeline seeds for every
    micro-batch.  first: the first stage, if it stands on this rank too and the model is tied: its table is used.
    """

    def __init__(
        self,
        config: GPTConfig,
        comm: Comm,
        cuts: Sequence[int],
        index: int,
        *,
        region: Region | SequenceRegion | None = None,
        streams: Streams | None = None,
        first: "TensorStage | None" = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_cuts(cuts, config.layers)
        stages = len(cuts) - 1
        if not 0 <= index < stages:
            raise ValueError(f"stage {index} of {stages}; allowed: 0 to {stages - 1}")
        self.region, self.streams = region or Region(comm), streams or Streams(comm, config.seed)
        # names and shapes of everything, no memory
        whole = TensorGPT(config, comm, region=self.region, streams=self.streams, device="meta", dtype=dtype)
        self.config, self.comm, self.index, self.cuts = config, comm, index, list(cuts)
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.tokens, self.positions = whole.tokens, whole.positions
        self.blocks = nn.ModuleDict({str(k): whole.blocks[k] for k in range(cuts[index], cuts[index + 1])})
        if self.last:
            self.norm, self.head = whole.norm, whole.head
            if config.tied and not self.first and first is None:
                self.tokens = whole.tokens
        self.to_empty(device=device or "cpu")
        for name, module in self.named_modules():
            begin = getattr(module, "init_parameters", None)
            if begin is not None:
                begin(name, config.seed)
        if self.last and config.tied and first is not None:
            self.tokens = first.tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.dropout and self.training:
            seed = torch.initial_seed()  # of this micro-batch: the same on all ranks of `comm`, and again when it is recomputed
            self.streams.shared.manual_seed(seed)
            self.streams.own.manual_seed(name_seed(seed, f"tensor rank {self.comm.rank}"))
        if self.first:
            x = TensorGPT.embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        return TensorGPT.logits(self, x) if self.last else x

    def output_shape(self, shape, dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """What comes out for an input of this shape, without asking other ranks; not for the last stage."""
        if not self.first:
            return tuple(shape), dtype
        rows, length = shape
        share = length // self.comm.size if self.region.split_dim == 1 else length
        return (rows, share, self.config.width), self.tokens.weight.dtype

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies of a micro-batch, the same on all ranks of `comm`."""
        return vocabulary_cross_entropy(self.comm, logits, targets, vocabulary=self.config.vocabulary, reduction="sum")


def build_stages(
    config: GPTConfig,
    comm: Comm,
    cuts: Sequence[int],
    mine: Sequence[int],
    *,
    sequence: bool = False,
    exact: bool = False,
    **kinds,
) -> dict[int, TensorStage]:
    """The stages `mine` of a rank, by number. comm: the ranks of its tensor axis.  sequence: sequence parallelism between the
    shared parts.  exact: dropout masks are one device's.  kinds: device, dtype.
    """
    region, streams = SequenceRegion(comm) if sequence else Region(comm), Streams(comm, config.seed, exact=exact)
    made: dict[int, TensorStage] = {}
    for stage in sorted(mine):
        first = made.get(0) if config.tied else None
        made[stage] = TensorStage(config, comm, cuts, stage, region=region, streams=streams, first=first, **kinds)
    return made
