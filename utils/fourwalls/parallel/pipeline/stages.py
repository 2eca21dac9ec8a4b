"""A model cut into stages: each rank builds only its own layers, with the weights that one device would have given them.

A stage is a module that takes one tensor and gives one: tokens or hidden states in, hidden states or logits out. The embedding
opens the first stage, the last norm and the head close the last one; where the head shares the embedding's table ("tied") and the
two stand apart, both keep a copy, and their gradients must be summed (outcome.sum_tied).

    stage k = layers cuts[k] .. cuts[k+1] - 1        cuts[0] = 0, cuts[-1] = L

Reference: Shoeybi et al. 2019 (arXiv:1909.08053) for tied embeddings at both ends.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ...nn.gpt import GPT, GPTConfig

__all__ = ["GPTStage", "check_cuts", "even_cuts", "tied_ranks"]


class GPTStage(nn.Module):
    """Stage `index` of the GPT that `config` describes, cut at `cuts`. Parameters have the names of `nn.gpt.GPT` and its weights.

    (b, s) tokens on the first stage, else (b, s, h); out (b, s, h), or (b, s, V) on the last.
    """

    def __init__(self, config: GPTConfig, cuts: Sequence[int], index: int, *, device=None, dtype=None):
        super().__init__()
        check_cuts(cuts, config.layers)
        stages = len(cuts) - 1
        if not 0 <= index < stages:
            raise ValueError(f"stage {index} of {stages}; allowed: 0 to {stages - 1}")
        whole = GPT(config, device="meta")  # names and shapes of everything, no memory
        self.config, self.first, self.last = config, index == 0, index == stages - 1
        self.tied = config.tied and stages > 1 and (self.first or self.last)
        if self.first:
            self.tokens = whole.tokens
            if hasattr(whole, "positions"):
                self.positions = whole.positions
            self.drop = whole.drop
        self.blocks = nn.ModuleDict({str(k): whole.blocks[k] for k in range(cuts[index], cuts[index + 1])})
        if self.last:
            self.norm, self.head = whole.norm, whole.head
            if config.tied and not self.first:
                self.tokens = whole.tokens
        self.to_empty(device=device or "cpu")
        if dtype is not None:
            self.to(dtype)
        for name, module in self.named_modules():
            begin = getattr(module, "init_parameters", None)
            if begin is not None:
                begin(name, config.seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = GPT.embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        return GPT.logits(self, x) if self.last else x

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that another stage holds too: name -> parameter."""
        return {"tokens.weight": self.tokens.weight} if self.tied else {}


def even_cuts(layers: int, stages: int) -> list[int]:
    """Cuts whose stages differ by at most one layer, the earlier ones larger. ValueError where a stage would have none."""
    if stages > layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages; allowed: 1 to {layers} stages, nearest {layers}")
    return [k * (layers // stages) + min(k, layers % stages) for k in range(stages + 1)]


def check_cuts(cuts: Sequence[int], layers: int) -> None:
    """ValueError unless `cuts` goes from 0 to `layers`, never down. A stage may have no block (a head alone)."""
    cuts = list(cuts)
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != layers or cuts != sorted(cuts):
        raise ValueError(f"cuts are {cuts}; allowed: numbers that rise from 0 to {layers}, such as {even_cuts(layers, 1)}")


def tied_ranks(schedule_ranks: dict[int, int], config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """name -> the ranks that hold it, for `sum_tied`; empty for an untied model or one stage. schedule_ranks: stage -> rank."""
    last = max(schedule_ranks)
    return {"tokens.weight": (schedule_ranks[0], schedule_ranks[last])} if config.tied and last else {}
