"""Context parallelism: the ranks share the tokens of each sequence through the whole model, and meet only in attention.

All parameters are whole on every rank, all activations cut along the sequence: embedding, norms, MLP and loss work token by token
and need nobody. In attention each query must meet all keys (ring, gather or Ulysses). Positions are the true ones, the loss is a
sum over all ranks' tokens divided once by their number, and gradients are summed over the ranks.

    loss = sum over ranks of summed losses / sum of counts        gradient = sum over ranks, one all-reduce of P numbers a step

Reference: Liu et al. 2023 (arXiv:2310.01889); Jacobs et al. 2023 (arXiv:2309.14509); Llama team 2024 (arXiv:2407.21783).
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..collectives import autograd, ring
from ..collectives.agree import agree
from ..cost.context import check_cut, check_heads_shared
from ..nn.attention import Attention, merge_heads, split_heads
from ..nn.gpt import GPT, GPTConfig
from ..nn.init import initialise
from ..nn.rotary import rotate
from ..ranks.comm import Comm
from .context_cuts import part, positions
from .context_dropout import ContextStreams, TokenDropout, weight_mask
from .context_gather import gather_attention, ulysses_attention
from .context_ring import ring_attention
from .replicas import digest
from .token_loss import scaled_loss, summed_loss, total_tokens

__all__ = ["FORMS", "ContextAttention", "ContextGPT", "check_context_parallel"]

FORMS: dict[str, Callable] = {"ring": ring_attention, "gather": gather_attention, "ulysses": ulysses_attention}


def check_context_parallel(
    config: GPTConfig, c: int, *, cut: str = "zigzag", form: str = "ring", length: int | None = None
) -> None:
    """ValueError, with the legal sizes, unless c ranks can share sequences of `length` (None: the longest): call it before ranks
    start.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; allowed: {', '.join(FORMS)}")
    check_cut(cut, config.length if length is None else length, c)
    if form == "ulysses":
        check_heads_shared(config.heads, config.kv_heads or config.heads, c)
    if config.fused:
        raise ValueError("fused is torch's kernel, which knows no blocks of other ranks; allowed here: fused=False")


class ContextAttention(Attention):
    """`nn.attention.Attention` of this rank's tokens (b, s/c, h) to all tokens. Same parameters, whole on every rank.

    cut, form, rows: as for `ring_attention` and FORMS. work: a Counter of the scores computed. With p, masks of weights
    belong to places (context_dropout), and `streams` gives their salts. No form
    keeps scores, so there is nothing for `core` (selective recomputation) to do: it is not called.
    """

    def __init__(
        self,
        comm: Comm,
        width: int,
        heads: int,
        *,
        cut: str = "zigzag",
        form: str = "ring",
        rows: int = 128,
        streams: ContextStreams | None = None,
        work: Counter | None = None,
        **options,
    ):
        super().__init__(width, heads, **options)
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; allowed: {', '.join(FORMS)}")
        self.comm, self.cut, self.form, self.rows = comm, cut, form, rows
        self.streams, self.work = streams or ContextStreams(), Counter() if work is None else work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = split_heads(self.query(x), self.heads)  # (b, a, s/c, d)
        k, v = (split_heads(layer(x), self.kv_heads) for layer in (self.key, self.value))
        if self.rotary:
            c, rank = self.comm.size, self.comm.rank
            places = positions(self.cut, x.shape[1] * c, c, rank, device=x.device)
            q, k = rotate(q, places), rotate(k, places)
        options = {"cut": self.cut, "rows": self.rows, "work": self.work}
        if self.p and self.training:
            options |= {"p": self.p, "draw": partial(self._mask, self.streams.salt(), x.shape)}
        return self.output(merge_heads(FORMS[self.form](self.comm, q, k, v, **options)))

    def _mask(self, salt, shape, queries, keys):
        """What stays of the weights that this rank computes."""
        c, rank, a = self.comm.size, self.comm.rank, self.heads
        heads = range(rank * a // c, (rank + 1) * a // c) if self.form == "ulysses" else range(a)
        return weight_mask(salt, self.p, shape[0], heads, a, shape[1] * c, queries, keys)


class ContextGPT(GPT):
    """`nn.gpt.GPT`, name by name, each rank with s/c tokens: tokens (b, s/c) -> logits (b, s/c, V).

    `part(x)` cuts a whole (b, s, ...); `loss` takes whole tokens and targets, the same on all ranks, and after its backward
    `sum_gradients()` is due. Starts as the GPT of the same seed. work: scores computed so far, of all layers.
    """

    def __init__(
        self,
        config: GPTConfig,
        comm: Comm,
        *,
        cut: str = "zigzag",
        form: str = "ring",
        rows: int = 128,
        streams: ContextStreams | None = None,
        device=None,
        dtype=None,
    ):
        check_context_parallel(config, comm.size, cut=cut, form=form, length=comm.size * 2)  # other lengths: when they come
        super().__init__(config, device=device, dtype=dtype)
        self.comm, self.cut, self.work = comm, cut, Counter()
        self.streams = streams = streams or ContextStreams(config.seed)
        here = {"cut": cut, "form": form, "rows": rows, "streams": streams, "work": self.work, "device": device, "dtype": dtype}
        heads = {"kv_heads": config.kv_heads, "rotary": config.rotary, "bias": config.bias, "p": config.dropout}
        for block in self.blocks:
            std = block.attention.output.std
            block.attention = ContextAttention(comm, config.width, config.heads, out_std=std, **heads, **here)
            block.drop1 = block.drop2 = TokenDropout(config.dropout, comm, cut, streams.salt)
        self.drop = TokenDropout(config.dropout, comm, cut, streams.salt)
        initialise(self, config.seed)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, ...), whole -> (b, s/c, ...), this rank's tokens. ValueError, with the nearest legal s, where s does not fit."""
        return part(x, self.cut, self.comm.size, self.comm.rank)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's (b, s/c) -> (b, s/c, h), with the vectors of their true positions, dropped."""
        c = self.comm.size
        if tokens.dim() != 2 or tokens.shape[1] * c > self.config.length:
            raise ValueError(
                f"rank {self.comm.rank} has tokens {tuple(tokens.shape)} of {c} times as many; allowed: (batch, s/c) with s at "
                f"most {self.config.length}"
            )
        x = self.tokens(tokens)
        if self.positions is not None:
            places = positions(self.cut, tokens.shape[1] * c, c, self.comm.rank, device=tokens.device)
            x = x + self.positions.weight[places]
        return self.drop(x)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
        """Cross-entropy of the next token over all ranks' tokens, the same on all ranks; targets (b, s) are shifted already, and
        those that are IGNORE do not count. Two all-reduces of one number. MismatchError (checks on) where ranks are given
        different ones: each rank takes its part of the same sequences.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; allowed: 'mean' or 'sum'")
        if self.comm.checks and self.comm.size > 1:
            agree(self.comm, "ContextGPT.loss", tokens=digest(tokens), targets=digest(targets), reduction=reduction)
        summed, count = summed_loss(self(self.part(tokens)), self.part(targets))
        total = total_tokens(self.comm, count) if reduction == "mean" else 1
        return autograd.reduce_from(self.comm, scaled_loss(summed, total))

    @torch.no_grad()
    def sum_gradients(self, *, all_reduce: Callable = ring.all_reduce) -> None:
        """Once a step, after its last backward: sum all gradients over the context ranks, each of which has seen its own tokens.
        One all-reduce of all of them together for each dtype.
        """
        sum_gradients(self.comm, self, all_reduce=all_reduce)


def sum_gradients(comm: Comm, model: nn.Module, *, all_reduce: Callable = ring.all_reduce) -> None:
    """Replace each gradient by its sum over the ranks, in one all-reduce for each dtype.

    RuntimeError where a gradient was summed before: what came before would count once for each rank. MismatchError (checks on)
    where ranks have gradients of different parameters.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    without = [name for name, p in model.named_parameters() if p.grad is None]
    agree(comm, "sum of gradients", without_gradient=", ".join(without) or "none")
    again = next((name for name, g in named if getattr(g, "summed", False)), None)
    if again is not None and comm.size > 1:
        raise RuntimeError(
            f"rank {comm.rank}: {again} still has the sum over all ranks of an earlier backward; summed again it would count "
            f"{comm.size} times. Sum once a step, after the last micro-batch's backward, and set gradients to None (zero_grad)"
        )
    grads = [g for _, g in named]
    for dtype in dict.fromkeys(g.dtype for g in grads):
        alike = [g for g in grads if g.dtype == dtype]
        flat = all_reduce(comm, torch.cat([g.reshape(-1) for g in alike]))
        for g, summed in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            g.copy_(summed.view_as(g))
            g.summed = True  # goes with the tensor, so zero_grad() forgets it
