"""The GPT on t ranks against one device: outputs, every gradient, the input's gradient, five steps of Adam; on all settings, in
pairs.
"""

import dataclasses

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.memory.recompute import recompute_model
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.nn.optim import Adam
from fourwalls.nn.optim import clip_ as clip_one_device
from fourwalls.parallel.mesh import Mesh
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor import Region
from fourwalls.parallel.tensor_dropout import Streams
from fourwalls.parallel.tensor_gpt import TensorGPT
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.tensor_shards import Cut, clip_, join, load_whole, whole_gradients, whole_state
from fourwalls.parallel.tensor_vocabulary import vocabulary_cross_entropy, vocabulary_rows

NETWORK = uniform(1e-6, 1e9)
SMALL = GPTConfig(vocabulary=29, length=8, width=32, layers=2, heads=8, ff=48, seed=3)
REGIONS = {
    "whole": Region,
    "again": SequenceRegion,
    "keep": lambda comm: SequenceRegion(comm, keep=True),
}
SEED, STEPS, LR, ADAM_EPS = 5, 5, 1e-2, 1e-3
TERMS = 400  # sums over at most 96 numbers and 24 tokens, through 2 layers and back


def tokens_of(config, step, b=3):
    g = torch.Generator().manual_seed(100 + step)
    return torch.randint(config.vocabulary, (2, b, config.length), generator=g).unbind()


def start_of(config, dtype):
    """A state off its start, so that biases and norms are not 0 and 1."""
    model = GPT(config, dtype=dtype)
    return {name: p.data + draw(name, p.shape, seed=99, std=0.1).to(dtype) for name, p in model.named_parameters()}


def one_device(config, dtype):
    model = GPT(config, dtype=dtype)
    model.load_state_dict(start_of(config, dtype))
    optimizer = Adam(model.parameters(), lr=LR, eps=ADAM_EPS)
    torch.manual_seed(SEED)
    for step in range(STEPS):
        tokens, targets = tokens_of(config, step)
        optimizer.zero_grad()
        x = model.embed(tokens)
        x.retain_grad()
        logits = model.logits(model.hidden(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if step == 0:
            out = {"logits": logits.detach(), "loss": loss.detach(), "input gradient": x.grad.clone()}
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = clip_one_device(model.parameters(), 0.5)
        if step == 0:
            out["norm"] = norm
        optimizer.step()
    return out, grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def on_ranks(comm, config, dtype, kind, state, recompute="none"):
    """The same on t ranks; what is cut comes back joined."""
    model = TensorGPT(config, comm, region=REGIONS[kind](comm), streams=Streams(comm, SEED, exact=True), dtype=dtype)
    load_whole(model, state, comm)
    recompute_model(model, recompute, generators=model.streams.generators)
    optimizer = Adam(model.parameters(), lr=LR, eps=ADAM_EPS)
    for step in range(STEPS):
        tokens, targets = tokens_of(config, step)
        optimizer.zero_grad()
        x = model.embed(tokens)
        x.retain_grad()
        logits = model.logits(model.hidden(x))
        loss = vocabulary_cross_entropy(comm, logits, targets, vocabulary=config.vocabulary)
        loss.backward()
        model.region.sum_gradients(model)
        if step == 0:
            out = {
                "logits": join(comm, logits, Cut(2, config.vocabulary)),
                "loss": loss.detach(),
                "input gradient": model.region.gather(x.grad.clone()),
            }
            grads = whole_gradients(model, comm)
            _, real, _ = model.rows()
            filling = 0 if model.tokens.weight.grad is None else float(model.tokens.weight.grad[real:].abs().sum())
        norm = clip_(model, comm, 0.5)
        if step == 0:
            out["norm"] = norm
        optimizer.step()
    filling += float(model.tokens.weight.detach()[real:].abs().sum())
    return out, grads, whole_state(model, comm), filling


def bounds(want, dtype, factor=1.0):
    eps = torch.finfo(dtype).eps
    return {name: factor * 8 * eps * TERMS * max(float(w.abs().max()), 1e-2) for name, w in want.items()}


def check(run, config, dtype, t):
    """All ranks alike; values, gradients and five steps within their bounds of float64 on one device."""
    out, grads, state = one_device(config, torch.float64)
    rows = run.values
    for part in range(3):
        assert explain_ranks([row[part] for row in rows]) == []
    biases = {name: p for name, p in start_of(config, torch.float64).items() if name.endswith(("output.bias", "down.bias"))}
    said = explain(rows[0][0], out, t=t, bound=bounds(out, dtype), biases=biases)
    said += explain(rows[0][1], grads, t=t, bound=bounds(grads, dtype))
    # a step moves by lr m / (sqrt(v) + eps), so an error in a gradient comes back at most lr / eps times as large, each step
    worst = max(bounds(grads, dtype).values())
    moved = {name: bound + STEPS * LR / ADAM_EPS * worst for name, bound in bounds(state, dtype).items()}
    said += explain(rows[0][2], state, t=t, bound=moved)
    assert said == []
    assert all(row[3] == 0 for row in rows)  # the filling never moves


CASES = [  # (t, region, change of SMALL, dtype, recomputed): every two settings meet, or nearly so
    (1, "whole", {"dropout": 0.2}, torch.float64, "none"),
    (1, "again", {"tied": False, "vocabulary": 10}, torch.float32, "selective"),
    (1, "keep", {"rotary": True, "kv_heads": 4}, torch.float64, "full"),
    (2, "whole", {"tied": False, "vocabulary": 10, "dropout": 0.2}, torch.float64, "selective"),
    (2, "again", {"dropout": 0.2, "rotary": True}, torch.float64, "full"),
    (2, "keep", {"tied": False, "bias": False}, torch.float32, "none"),
    (4, "whole", {"vocabulary": 10, "kv_heads": 4, "rotary": True}, torch.float64, "full"),
    (4, "again", {"tied": False, "dropout": 0.2, "kv_heads": 4, "vocabulary": 10}, torch.float64, "selective"),
    (4, "keep", {"dropout": 0.2, "vocabulary": 10}, torch.float64, "none"),
    (8, "whole", {"tied": False, "dropout": 0.2}, torch.float32, "none"),
    (8, "again", {"vocabulary": 10}, torch.float64, "selective"),
    (8, "keep", {"tied": False, "dropout": 0.2, "rotary": True}, torch.float64, "full"),
]


@pytest.mark.parametrize("t, kind, change, dtype, recompute", CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_equals_one_device(t, kind, change, dtype, recompute):
    config = dataclasses.replace(SMALL, **change)
    run = fw.simulate(on_ranks, config, dtype, kind, start_of(config, dtype), recompute, ranks=t, cluster=NETWORK)
    check(run, config, dtype, t)


@pytest.mark.parametrize("t, kind, tied", [(4, "again", True), (2, "whole", False)])
def test_vocabulary_of_gpt2(t, kind, tied):
    """50257 is prime to 2 and 4: the last rank has filling, which never counts."""
    config = dataclasses.replace(SMALL, vocabulary=50257, width=8, heads=4, ff=8, layers=1, length=4, tied=tied, dropout=0.2)
    run = fw.simulate(on_ranks, config, torch.float64, kind, start_of(config, torch.float64), ranks=t, cluster=NETWORK)
    check(run, config, torch.float64, t)
    assert vocabulary_rows(50257, t - 1, t)[1] < vocabulary_rows(50257, t - 1, t)[2]


@pytest.mark.parametrize("t, kind", [(2, "again"), (4, "whole")])
def test_real_ranks(t, kind):
    config = dataclasses.replace(SMALL, dropout=0.2, vocabulary=10)
    state = start_of(config, torch.float64)
    run = fw.run(on_ranks, config, torch.float64, kind, state, ranks=t, stream=False)
    check(run, config, torch.float64, t)
    modelled = fw.simulate(on_ranks, config, torch.float64, kind, state, ranks=t, cluster=NETWORK)
    for name, value in run.values[0][2].items():
        assert torch.equal(value, modelled.values[0][2][name]), name  # the same bits


def copies_and_shards(comm, config, state):
    """Trial c22 as far as this axis goes: 2 copies of 2 shards, tied; each copy has its own part of the batch."""
    mesh = Mesh(comm, d=2, t=2)
    model = TensorGPT(config, mesh.t, region=SequenceRegion(mesh.t), dtype=torch.float64)
    load_whole(model, state, mesh.t)
    tokens, targets = (x.chunk(2)[mesh.d.rank] for x in tokens_of(config, 0, b=4))
    model.loss(tokens, targets).backward()
    model.region.sum_gradients(model)  # over the shards first: then every gradient is this copy's whole one
    for p in model.parameters():
        p.grad = ring.all_reduce(mesh.d, p.grad) / mesh.d.size
    return whole_gradients(model, mesh.t)


def test_copies_and_shards_of_a_tied_model():
    state = start_of(SMALL, torch.float64)
    model = GPT(SMALL, dtype=torch.float64)
    model.load_state_dict(state)
    model.loss(*tokens_of(SMALL, 0, b=4)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    run = fw.simulate(copies_and_shards, SMALL, state, ranks=4, cluster=NETWORK)
    assert explain_ranks(run.values) == []
    assert explain(run.values[0], want, t=2, bound=bounds(want, torch.float64)) == []


def test_the_comparison_sees_one_element():
    """Each kind of comparison fails when one element is off by ten times its bound."""
    out, grads, state = one_device(SMALL, torch.float64)
    for want in (out, grads, state):
        limit = bounds(want, torch.float64)
        for name in want:
            off = {n: v.clone() for n, v in want.items()}
            off[name].view(-1)[-1] += 10 * limit[name]
            said = explain(off, want, t=4, bound=limit)
            assert len(said) == 1 and said[0].startswith(name), (name, said)
        assert explain(want, want, t=4, bound=limit) == []
