"""The GPT on t ranks: the one-device model, name by name, with its products, heads and vocabulary shared.

Norms, residual stream and dropout stand between the shared parts; how they are held is the region's business, whole on every
rank (tensor.Region) or cut along the sequence (sequence.SequenceRegion). Parameters have the names, the start and, joined, the
shapes of `nn.gpt.GPT`, so one checkpoint fits every t.

    a layer: 2 entrances and 2 exits        with Region: 2 all-reduces forward and 2 backward, of s b h numbers each

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), figure 4.
"""

import math

import torch
from torch import nn

from ..nn.gpt import GPTConfig
from ..nn.init import initialise
from ..nn.layers import Embedding, LayerNorm
from ..ranks.comm import Comm
from .tensor import Region, TensorFeedForward
from .tensor_attention import TensorAttention, check_attention
from .tensor_dropout import Streams
from .tensor_shards import check_share
from .tensor_vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_cross_entropy, vocabulary_rows

__all__ = ["TensorBlock", "TensorGPT", "check_tensor_parallel"]


def check_tensor_parallel(config: GPTConfig, t: int, *, sequence: bool = False, length: int | None = None) -> None:
    """ValueError, with the legal sizes, unless t ranks can share this model: call it before ranks start.

    sequence: also for sequence parallelism, with sequences of `length` (None: the longest). The vocabulary is filled up.
    """
    check_attention(config.heads, config.kv_heads or config.heads, t)
    check_share("ff", config.ff, t)
    if sequence:
        check_share("length", config.length if length is None else length, t)
    if config.fused and config.dropout:
        raise ValueError("fused attention draws its dropout from torch's default stream; allowed here: fused, or dropout")


class TensorBlock(nn.Module):
    """`nn.gpt.Block` on t ranks. (b, s, h), or (b, s/t, h) with a region that cuts the sequence, to the same."""

    def __init__(
        self,
        config: GPTConfig,
        comm: Comm,
        *,
        region: Region | None = None,
        streams: Streams | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        region, streams = region or Region(comm), streams or Streams(comm)
        self.region, self.streams, self.p = region, streams, config.dropout
        norm = {"bias": config.bias, "device": device, "dtype": dtype}
        kinds = {**norm, "region": region, "out_std": 0.02 / math.sqrt(2 * config.layers)}
        options = {"kv_heads": config.kv_heads, "rotary": config.rotary, "p": config.dropout, "fused": config.fused}
        self.norm1 = LayerNorm(config.width, **norm)
        self.attention = TensorAttention(comm, config.width, config.heads, streams=streams, **options, **kinds)
        self.norm2 = LayerNorm(config.width, **norm)
        self.mlp = TensorFeedForward(comm, config.width, config.ff, **kinds)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return self.streams.drop(x, self.p, dim=self.region.split_dim, training=self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class TensorGPT(nn.Module):
    """tokens (b, s), the same on all ranks -> logits (b, s, ceil(V/t)) of this rank's rows; `loss` is what training needs.

    region: how activations are held between the shared parts. streams: where dropout draws; with Streams(comm, seed, exact=True)
    all numbers are those of one device after torch.manual_seed(seed). After backward call `model.region.sum_gradients(model)`.
    """

    def __init__(
        self,
        config: GPTConfig,
        comm: Comm,
        *,
        region: Region | None = None,
        streams: Streams | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.region, self.streams = region or Region(comm), streams or Streams(comm, config.seed)
        check_tensor_parallel(config, comm.size)
        self.config, self.comm = config, comm
        kinds = {"device": device, "dtype": dtype}
        shared = {**kinds, "region": self.region}
        self.tokens = VocabularyEmbedding(comm, config.vocabulary, config.width, **shared)
        self.positions = None if config.rotary else Embedding(config.length, config.width, **kinds)
        self.blocks = nn.ModuleList(TensorBlock(config, comm, streams=self.streams, **shared) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, bias=config.bias, **kinds)
        self.head = None if config.tied else VocabularyHead(comm, config.width, config.vocabulary, **shared)
        initialise(self, config.seed)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(b, s) -> (b, s, h) or this rank's part of it, dropped."""
        if tokens.dim() != 2 or tokens.shape[1] > self.config.length:
            raise ValueError(f"tokens {tuple(tokens.shape)}; allowed: (batch, length) with length at most {self.config.length}")
        s = tokens.shape[1]
        self.region.check_length(s)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.region.own(self.positions.weight[:s], 0)
        return self.streams.drop(x, self.config.dropout, dim=self.region.split_dim, training=self.training)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Activations between regions -> (b, s, ceil(V/t)). A tied head is the token table's own shard."""
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)
        return self.region.enter(x, [_Rows(self.tokens.weight)])[0]

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks. `memory.recompute.recompute_model(model, how, generators=streams.generators)` puts another in its place."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(self.embed(tokens)))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
        """Cross-entropy of the next token, the same on all ranks."""
        return vocabulary_cross_entropy(self.comm, self(tokens), targets, vocabulary=self.config.vocabulary, reduction=reduction)

    def rows(self) -> tuple[int, int, int]:
        """(first row, rows of tokens, rows with the filling) of the vocabulary on this rank."""
        return vocabulary_rows(self.config.vocabulary, self.comm.rank, self.comm.size)


class _Rows:
    """A weight without bias, as `Region.enter` takes it."""

    bias = None

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
