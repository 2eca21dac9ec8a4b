"""Will they click? A model with embedding tables, and clicks whose law is known, so that learning can be verified.

A sample has one id in each of a few fields (who, what, where), drawn by Zipf's law: a few are everywhere, most hardly ever. The
law gives each id an effect of its own and adds them up; the model must find these effects from clicks alone. Since the law is
known, so is the best that any model can reach.

    P(id = k) ~ (k + 1)^(-s);      P(click) = sigmoid(b + sum over fields of effect[field][id] + a . x)

Reference: Zipf, "Human Behavior and the Principle of Least Effort" (1949); Cheng et al. 2016 (arXiv:1606.07792), wide and deep.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .init import draw, initialise, name_seed
from .layers import Embedding
from .mlp import MLP

__all__ = ["ClickConfig", "ClickModel", "Clicks", "auc", "clicks", "law_logits", "uniform", "zipf_ids"]


@dataclass(frozen=True)
class ClickConfig:
    """fields: rows of each field's table; `width` of a row; `inputs` further numbers a sample; `hidden` units of the dense net.

    zipf: the exponent s. noise-free law: `bias`, effects of standard deviation `effect`, and weights of the inputs likewise.
    """

    fields: tuple[int, ...] = (1000, 1000, 100)
    width: int = 8
    inputs: int = 4
    hidden: int = 16
    zipf: float = 1.1
    bias: float = -1.0
    effect: float = 1.0
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "fields", tuple(self.fields))
        for word, value, least in (("width", self.width, 1), ("inputs", self.inputs, 0), ("hidden", self.hidden, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{word} is {value!r}; it is a whole number of at least {least}")
        if not self.fields or any(not isinstance(r, int) or isinstance(r, bool) or r < 1 for r in self.fields):
            raise ValueError(f"fields are {self.fields}; at least one, each a whole number of rows of at least 1")
        if not self.zipf >= 0:
            raise ValueError(f"zipf is {self.zipf!r}; the exponent is at least 0 (0: all ids are equally likely)")

    @property
    def rows(self) -> int:
        """Rows of all tables together, which lie one after the other in one table."""
        return sum(self.fields)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each field's rows begin in the one table."""
        return tuple(sum(self.fields[:k]) for k in range(len(self.fields)))


@dataclass(frozen=True)
class Clicks:
    """A batch. ids (b, fields) of int64, counted within each field; inputs (b, inputs); clicked (b,) of 0 and 1."""

    ids: torch.Tensor
    inputs: torch.Tensor
    clicked: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int) -> "Clicks":
        """Samples `start` to `stop`."""
        return Clicks(self.ids[start:stop], self.inputs[start:stop], self.clicked[start:stop])

    def to(self, dtype=None, *, ids=None) -> "Clicks":
        """The same batch with inputs and clicks in `dtype`, and ids in the integer dtype `ids`."""
        as_is = self.ids if ids is None else self.ids.to(ids)
        return Clicks(as_is, self.inputs.to(dtype), self.clicked.to(dtype))


class ClickModel(nn.Module):
    """(ids, inputs) -> the log-odds of a click, (b,). The vectors of a sample's ids stand side by side before a small dense net.

    embedding: a module from ids (b, fields), counted through all tables, to (b, fields, width). None: one Embedding on this
    device. Strategies put their own in its place; the weights at the start depend on config.seed alone.
    """

    def __init__(self, config: ClickConfig | None = None, *, embedding: nn.Module | None = None, dtype=None):
        super().__init__()
        self.config = config = config or ClickConfig()
        self.embedding = embedding if embedding is not None else Embedding(config.rows, config.width, std=0.1, dtype=dtype)
        width = len(config.fields) * config.width + config.inputs
        self.net = MLP((width, config.hidden, 1), dtype=dtype)
        self.register_buffer("offsets", torch.tensor(config.offsets), persistent=False)
        initialise(self, config.seed)

    def forward(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        self._check(ids)
        vectors = self.embedding(ids + self.offsets.to(ids.dtype))  # (b, fields, width)
        return self.net(torch.cat([vectors.flatten(1), inputs], 1)).squeeze(1)

    def loss(self, batch: Clicks, *, samples: int | None = None) -> torch.Tensor:
        """Cross-entropy in nats, summed and divided by `samples` (None: those of the batch; 0 for an empty batch)."""
        logits = self(batch.ids, batch.inputs)
        total = F.binary_cross_entropy_with_logits(logits, batch.clicked, reduction="sum")
        return total / max(1, len(batch) if samples is None else samples)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters of the dense net, those that every sample touches."""
        return list(self.net.parameters())

    def _check(self, ids):
        fields = self.config.fields
        if ids.dim() != 2 or ids.shape[1] != len(fields) or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids {tuple(ids.shape)} of {ids.dtype}; allowed: (batch, {len(fields)}) of int32 or int64")
        bad = (ids < 0) | (ids >= torch.tensor(fields))
        if bad.any():
            sample, field = bad.nonzero()[0].tolist()
            raise ValueError(
                f"sample {sample}, field {field}: id {ids[sample, field].item()} is out of range; "
                f"this field has ids 0 to {fields[field] - 1}"
            )


def clicks(config: ClickConfig, step: int, rank: int = 0, *, batch: int, seed: int | None = None, dtype=None) -> Clicks:
    """The batch of one step and rank: samples rank * batch to (rank + 1) * batch of the one large batch of that step.

    A sample is a function of (seed, step, its number), so n ranks see what one device with n times the batch sees.
    """
    for word, value in (("step", step), ("rank", rank), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{word} is {value!r}; it is a whole number of at least 0")
    seed = config.seed if seed is None else seed
    numbers = uniform(name_seed(seed, f"clicks:{step}"), range(rank * batch, (rank + 1) * batch), _columns(config))
    fields = len(config.fields)
    ids = torch.stack([zipf_ids(numbers[:, k], rows, config.zipf) for k, rows in enumerate(config.fields)], 1)
    inputs = (numbers[:, fields:-1] - 0.5) * 12**0.5  # mean 0, standard deviation 1
    clicked = numbers[:, -1] < torch.sigmoid(law_logits(config, ids, inputs))
    dtype = dtype or torch.get_default_dtype()
    return Clicks(ids, inputs.to(dtype), clicked.to(dtype))


def law_logits(config: ClickConfig, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The true log-odds of each sample, (b,) of float64: what no model can beat."""
    logits = torch.full((len(ids),), config.bias, dtype=torch.float64)
    for k, effects in enumerate(_effects(config)):
        logits += effects[ids[:, k].long()]
    return logits + inputs.double() @ draw("law.inputs", (config.inputs,), seed=config.seed, std=config.effect)


def zipf_ids(numbers: torch.Tensor, rows: int, exponent: float) -> torch.Tensor:
    """Ids 0 to rows - 1, P(k) ~ (k + 1)^(-exponent), from numbers spread evenly over [0, 1). Id 0 is the most frequent."""
    return torch.searchsorted(_zipf_table(rows, exponent), numbers.contiguous(), right=True).clamp_(max=rows - 1)


def uniform(seed: int, rows: Sequence[int], columns: int) -> torch.Tensor:
    """(rows, columns) of float64 in [0, 1): each a hash (splitmix64) of (seed, row's number, column), the same everywhere."""
    with np.errstate(over="ignore"):
        row = np.arange(rows.start, rows.stop, dtype=np.uint64)[:, None]
        x = row * np.uint64(columns) + np.arange(columns, dtype=np.uint64) + np.uint64(1)
        x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def auc(scores: torch.Tensor, clicked: torch.Tensor) -> float:
    """The chance that a sample with a click has a higher score than one without (equal scores count half). 0.5: no better than
    a guess. Raises ValueError where one of the two kinds is missing, and for a score that is nan: it has no rank.
    """
    clicked = clicked.bool()
    if lost := int(scores.isnan().sum()):
        raise ValueError(f"{lost} of {scores.numel()} scores are nan, the first at {int(scores.isnan().nonzero()[0])}")
    with_click, without = int(clicked.sum()), int((~clicked).sum())
    if not with_click or not without:
        raise ValueError(f"{with_click} samples with a click and {without} without; both kinds are needed")
    _, place, count = torch.unique(scores.detach().double(), return_inverse=True, return_counts=True)
    upto = count.cumsum(0).double()
    middle = upto - (count.double() - 1) / 2  # the mean rank of equal scores, from 1
    total = middle[place][clicked].sum().item()
    return (total - with_click * (with_click + 1) / 2) / (with_click * without)


def _columns(config: ClickConfig) -> int:
    return len(config.fields) + config.inputs + 1


@functools.lru_cache(maxsize=16)
def _effects(config: ClickConfig) -> tuple[torch.Tensor, ...]:
    return tuple(draw(f"law.{k}", (rows,), seed=config.seed, std=config.effect) for k, rows in enumerate(config.fields))


@functools.lru_cache(maxsize=16)
def _zipf_table(rows: int, exponent: float) -> torch.Tensor:
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    return weights.cumsum(0) / weights.sum()
