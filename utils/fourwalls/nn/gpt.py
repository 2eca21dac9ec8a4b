"""A small GPT: tokens in, logits of the next token out. The oracle that every parallel strategy must reproduce.

Token and position vectors are added (or, with `rotary`, queries and keys are turned by their place); each block adds what
attention and then an MLP see through a norm (pre-norm), so that the residual stream runs straight from bottom to top; a last
norm and the output head, which may share the token table ("tied"), give the logits.

    x = x + attention(norm(x));   x = x + mlp(norm(x));   logits = norm(x) W_head^T

Reference: Radford et al. 2019 (GPT-2); Xiong et al. 2020 (arXiv:2002.04745) for pre-norm.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..cost.shape import Shape
from .attention import Attention, check_heads
from .init import initialise
from .layers import GELU, Dropout, Embedding, LayerNorm, Linear, cross_entropy

__all__ = ["GPT", "Block", "FeedForward", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. Defaults: byte-level text, about 0.1 million parameters, a step in a few milliseconds on a laptop."""

    vocabulary: int = 256
    length: int = 64  # s, the longest sequence
    width: int = 64  # h
    layers: int = 2  # L
    heads: int = 4  # a
    dropout: float = 0.0
    tied: bool = True
    bias: bool = True
    fused: bool = False  # torch's attention kernel instead of the written-out one
    seed: int = 0
    ff: int | None = None  # width of the MLP; 4 h
    kv_heads: int | None = None  # heads of keys and values (grouped queries); as many as heads
    rotary: bool = False  # positions as rotations of queries and keys, instead of a learned table

    def __post_init__(self):
        for word in ("vocabulary", "length", "width", "layers", "heads"):
            value = getattr(self, word)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{word} is {value!r}; it is a whole number of at least 1")
        check_heads(self.width, self.heads, self.kv_heads, rotary=self.rotary)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; allowed: 0 <= dropout < 1")
        if self.ff is None:
            object.__setattr__(self, "ff", 4 * self.width)

    def shape(self) -> Shape:
        """The same sizes for the formulas of `fourwalls.cost` (a norm without shift has the parameters of an RMS norm)."""
        words = {"ff": self.ff, "bias": self.bias, "tied": self.tied, "norm": "layer" if self.bias else "rms"}
        words |= {"kv_heads": self.kv_heads, "positions": not self.rotary}
        return Shape(self.layers, self.width, self.heads, self.length, self.vocabulary, **words)


class FeedForward(nn.Module):
    """Up to `ff`, GELU, down again. (b, s, h) -> (b, s, h)."""

    def __init__(self, width: int, ff: int, *, bias=True, std=0.02, out_std=0.02, device=None, dtype=None):
        super().__init__()
        self.up = Linear(width, ff, bias=bias, std=std, device=device, dtype=dtype)
        self.activation = GELU("tanh")
        self.down = Linear(ff, width, bias=bias, std=out_std, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """One layer: attention, then MLP, each on a normed copy and added back. (b, s, h) -> (b, s, h)."""

    def __init__(self, config: GPTConfig, *, device=None, dtype=None):
        super().__init__()
        kinds = {"bias": config.bias, "device": device, "dtype": dtype}
        out_std = 0.02 / math.sqrt(2 * config.layers)  # 2L additions must not let the residual stream grow
        self.norm1 = LayerNorm(config.width, **kinds)
        options = {"kv_heads": config.kv_heads, "rotary": config.rotary, "p": config.dropout, "fused": config.fused}
        self.attention = Attention(config.width, config.heads, out_std=out_std, **options, **kinds)
        self.drop1 = Dropout(config.dropout)
        self.norm2 = LayerNorm(config.width, **kinds)
        self.mlp = FeedForward(config.width, config.ff, out_std=out_std, **kinds)
        self.drop2 = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """tokens (b, s) of int64 -> logits (b, s, V). Initial weights depend on config.seed and nothing else."""

    def __init__(self, config: GPTConfig | None = None, *, device=None, dtype=None):
        super().__init__()
        self.config = config = config or GPTConfig()
        kinds = {"device": device, "dtype": dtype}
        self.tokens = Embedding(config.vocabulary, config.width, **kinds)
        self.positions = None if config.rotary else Embedding(config.length, config.width, **kinds)
        self.drop = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, **kinds) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, bias=config.bias, **kinds)
        self.head = None if config.tied else Linear(config.width, config.vocabulary, bias=False, **kinds)
        initialise(self, config.seed)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(b, s) -> (b, s, h): token vectors, with those of the positions unless these are rotary, dropped."""
        s = tokens.shape[-1]
        if tokens.dim() != 2 or s > self.config.length:
            raise ValueError(f"tokens {tuple(tokens.shape)}; allowed: (batch, length) with length at most {self.config.length}")
        x = self.tokens(tokens)
        return self.drop(x if self.positions is None else x + self.positions.weight[:s])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) -> (b, s, h): all blocks. memory.recompute puts a schedule in its place."""
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) -> (b, s, V): last norm and output head."""
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(self.embed(tokens)))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
        """Cross-entropy of the next token, in nats; a new model is near log V."""
        return cross_entropy(self(tokens), targets, reduction=reduction)
