"""The classic faults of context parallelism, planted one by one in the library's own text: each is caught, by name.

Most of them leave something right: the output, the queries' gradients, the loss. So a row names what its fault leaves right, too.
"""

import inspect

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import autograd
from fourwalls.cost.hardware import uniform
from fourwalls.kernels import tile
from fourwalls.nn.attention import attend
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.parallel import context, context_blocks, context_gather, context_ring
from fourwalls.parallel.context_cuts import join, part, positions
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.token_loss import IGNORE, summed_loss

from ..planting import planted

NETWORK, S = uniform(1e-6, 1e9), 16
NAMES = ("output", "dq", "dk", "dv")


def in_blocks(old, new):
    """The ring and the others, on blocks with a fault."""
    if old in inspect.getsource(tile):
        changed = planted(tile, old, new)
        blocks = planted(context_blocks, "__all__", "__all__", **{name: getattr(changed, name) for name in tile.__all__})
    else:
        blocks = planted(context_blocks, old, new)
    names = {name: getattr(blocks, name) for name in ("Blocks", "RunningSoftmax", "attend_block", "block_gradients")}
    return planted(context_ring, "__all__", "__all__", **names).ring_attention


def in_ring(old, new):
    return planted(context_ring, old, new).ring_attention


def in_gather(old, new):
    return planted(context_gather, old, new)


# --- attention alone ----------------------------------------------------------------------------------------------------
def outcome(attention, c=4, cut="zigzag"):
    """Everything that the checks say of output, dq, dk, dv on c ranks, against one device."""
    whole = [draw(name, (2, 4 if name in ("q", "up") else 2, S, 3), std=2.0) for name in ("q", "k", "v", "up")]
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out = attend(q, k, v)
    (out * whole[3]).sum().backward()
    want = dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad), strict=True))

    def program(comm):
        q, k, v, up = (part(x, cut, comm.size, comm.rank, dim=2) for x in whole)
        out = attention(comm, *(x.requires_grad_() for x in (q, k, v)), cut=cut, rows=3)
        (out * up).sum().backward()
        return dict(zip(NAMES, (join(comm, x, cut, dim=2) for x in (out, q.grad, k.grad, v.grad)), strict=True))

    got = fw.simulate(program, ranks=c, cluster=NETWORK).values[0]
    return explain(got, want, t=c, bound=8 * 2.2e-16 * 100 * max(float(w.abs().max()) for w in want.values()))


KEEP_OUT = "self.out[..., rows, :] = self.out[..., rows, :] * shrink"
KEEP_TOTAL = "self.total[..., rows, :] * shrink"
FORWARD = """            owner = (comm.rank - hop) % comm.size
            arriving, messages = _pass_on(comm, block, hop)
            with working(comm, blocks, held[owner], owner, "forward"):"""
LOOP = "        for hop in range(comm.size):\n" + FORWARD
ADD = "mine = summed if mine is None else mine.add_(summed)"
HOLD = "held = [runs(cut, length, comm.size, r) for r in range(comm.size)]"
FAULTS = {  # name: (what makes it, what is wrong, what stays right)
    "output not rescaled by the running maximum": (lambda: in_blocks(KEEP_OUT, KEEP_OUT[:-9]), "output", ()),
    "sum not rescaled by the running maximum": (lambda: in_blocks(KEEP_TOTAL, KEEP_TOTAL[:-9]), "output", ()),
    "causal mask by local positions": (lambda: in_ring(HOLD, HOLD.replace("size, r)", "size, 0)")), "output", ()),
    "mask off by one": (lambda: in_blocks("tile.open : columns] > mine", "tile.open : columns] >= mine"), "output", ()),
    "gradients of keys stay where they were computed": (lambda: in_ring(ADD, "mine = mine * 1"), "dk", ("output", "dq")),
    "gradients of keys one hop from home": (lambda: in_ring("dk, dv = summed.to", "dk, dv = mine.to"), "dk", ("output", "dq")),
    "only the last adds": (lambda: in_ring(ADD, "mine = summed"), "dv", ("output", "dq")),
    "last block never received": (lambda: in_ring(LOOP, LOOP.replace("comm.size)", "comm.size - 1)", 1)), "output", ()),
    "wrong direction": (lambda: in_ring(FORWARD, FORWARD.replace("rank - hop", "rank + hop")), "output", ()),
    "delta forgotten": (lambda: in_blocks("dweights.sub_(delta)", "dweights"), "dq", ("output", "dv")),
    "scale forgotten in backward": (
        lambda: in_ring("dq = (dq / math.sqrt(q.shape[-1])).to(q.dtype)", "dq = dq.to(q.dtype)"),
        "dq", ("output", "dk", "dv")),
    "gathered keys in the order of the ranks": (
        lambda: in_gather("whole if order is None else whole.index_select(3, order)", "whole").gather_attention,
        "output", ()),
    "outputs of Ulysses not put back in order": (
        lambda: in_gather("out if order is None else out.index_select(2, order.argsort())", "out").ulysses_attention,
        "output", ()),
}  # fmt: skip


@pytest.mark.parametrize("form", context.FORMS)
def test_the_right_ones_pass(form):
    assert outcome(context.FORMS[form], c=2 if form == "ulysses" else 4) == []  # two heads of keys


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_attention_is_caught(name):
    make, wrong, right = FAULTS[name]
    said = outcome(make(), c=2 if "Ulysses" in name else 4)
    assert any(word.startswith(f"{wrong} ") for word in said), said
    for kept in right:
        assert not any(word.startswith(f"{kept} ") for word in said), (kept, said)


def test_a_missing_wait_is_named():
    """The block would be computed with, and sent on, while it is still arriving."""
    with pytest.raises(fw.CommError, match="irecv|isend"):
        outcome(in_ring("        message.wait()\n", "        pass\n"))


# --- the whole model ----------------------------------------------------------------------------------------------------
CONFIG = GPTConfig(vocabulary=11, length=S, width=16, layers=2, heads=4, ff=16, seed=3)


def text():
    g = torch.Generator().manual_seed(0)
    numbers = torch.randint(CONFIG.vocabulary, (2, S + 1), generator=g)
    targets = numbers[:, 1:].clone()
    targets[:, :5] = IGNORE  # the first ranks have fewer tokens that count
    return numbers[:, :-1], targets


def whole_model(config):
    model = GPT(config, dtype=torch.float64)
    return {n: p.data + draw(n, p.shape, seed=9, std=0.3) for n, p in model.named_parameters()}


def model_outcome(rotary=False):
    config = GPTConfig(**(vars(CONFIG) | {"rotary": rotary}))
    state, model = whole_model(config), GPT(config, dtype=torch.float64)
    model.load_state_dict(state)
    loss = model.loss(*text())
    loss.backward()
    want = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    def program(comm):
        model = context.ContextGPT(config, comm, dtype=torch.float64)
        model.load_state_dict(state)
        loss = model.loss(*text())
        loss.backward()
        model.sum_gradients()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    values = fw.simulate(program, ranks=4, cluster=NETWORK).values
    bound = {n: 8 * 2.2e-16 * 400 * max(float(w.abs().max()), 1e-2) for n, w in want.items()}
    return explain_ranks(values) + explain(values[0], want, t=4, bound=bound)


def mean_of_means(model, tokens, targets, reduction="mean"):
    summed, count = summed_loss(model(model.part(tokens)), model.part(targets))
    return autograd.reduce_from(model.comm, summed / max(count, 1) / model.comm.size)


def shifted_after_the_cut(model, tokens, targets, reduction="mean"):
    """Each rank makes its targets from its own tokens: what follows a chunk is on another rank."""
    mine = model.part(tokens)
    own = torch.cat([mine[:, 1:], mine[:, :1]], 1).masked_fill(model.part(targets) == IGNORE, IGNORE)
    summed, count = summed_loss(model(mine), own)
    return autograd.reduce_from(model.comm, summed / context.total_tokens(model.comm, count))


def in_slices(cut, length, c, rank, **kinds):
    return positions("equal", length, c, rank, **kinds)


def from_zero(cut, length, c, rank, **kinds):
    return torch.arange(length // c)


def counted_on_every_rank(comm, x, usual=autograd.reduce_from):
    return autograd.copy_to(comm, usual(comm, x))


GPT_FAULTS = {  # name: (what to replace, with what, what is said, what is right)
    "positions not permuted with zigzag": ("context.positions", in_slices, "loss differs", ()),
    "every rank counts from 0": ("context.positions", from_zero, "loss differs", ()),
    "mean of the ranks' means": ("ContextGPT.loss", mean_of_means, "loss differs", ()),
    "targets shifted after the cut": ("ContextGPT.loss", shifted_after_the_cut, "loss differs", ()),
    "gradients not summed": (
        "context.sum_gradients", lambda *args, **kinds: None, "tokens.weight differs between ranks", ("loss",)),
    "loss counted on every rank": (
        "autograd.reduce_from", counted_on_every_rank, "norm.weight is 4 times too large, and t is 4", ("loss",)),
}  # fmt: skip


@pytest.mark.parametrize("rotary", [False, True])
def test_the_right_model_passes(rotary):
    assert model_outcome(rotary) == []


@pytest.mark.parametrize("name, rotary", [(name, False) for name in GPT_FAULTS] + [(name, True) for name in list(GPT_FAULTS)[:2]])
def test_a_fault_in_the_model_is_caught(name, rotary, monkeypatch):
    place, fault, says, right = GPT_FAULTS[name]
    owner, _, word = place.rpartition(".")
    monkeypatch.setattr({"context": context, "ContextGPT": context.ContextGPT, "autograd": autograd}[owner], word, fault)
    said = model_outcome(rotary)
    assert any(sentence.startswith(says) for sentence in said), said
    for kept in right:
        assert not any(sentence.startswith(f"{kept} ") for sentence in said), (kept, said)
