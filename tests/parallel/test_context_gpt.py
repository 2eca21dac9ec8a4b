"""The GPT whose tokens c ranks share, against one device: loss, logits, every gradient, the input's, up to five Adam steps."""

import dataclasses

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.context import context_bytes
from fourwalls.cost.hardware import uniform
from fourwalls.memory.recompute import recompute_model
from fourwalls.nn.attention import attend
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.nn.layers import dropout
from fourwalls.nn.optim import Adam
from fourwalls.parallel.context import ContextGPT, check_context_parallel
from fourwalls.parallel.context_cuts import fill_up, join, part
from fourwalls.parallel.context_dropout import ContextStreams, token_mask, weight_mask
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.token_loss import IGNORE

NETWORK = uniform(1e-6, 1e9)
SMALL = GPTConfig(vocabulary=29, length=16, width=16, layers=2, heads=8, kv_heads=8, ff=24, seed=3)
SEED, STEPS, LR, ADAM_EPS = 5, 5, 1e-2, 1e-3
TERMS = 400  # sums over at most 32 numbers and 48 tokens, through 2 layers and back


def batch_of(config, step, s, b=3):
    """tokens, targets (b, s): shifted before anybody cuts; some do not count, and not as many on each rank."""
    g = torch.Generator().manual_seed(100 + step)
    text = torch.randint(config.vocabulary, (b, s + 1), generator=g)
    targets = text[:, 1:].clone()
    targets[0, : s // 3] = IGNORE
    return text[:, :-1], targets


def start_of(config, dtype=torch.float64):
    """A state off its start, so that biases and norms are not 0 and 1."""
    model = GPT(config, dtype=dtype)
    return {name: p.data + draw(name, p.shape, seed=99, std=0.1).to(dtype) for name, p in model.named_parameters()}


def train(model, config, s, finish=lambda: None, whole=lambda x: x, lengths=(), steps=STEPS):
    """(values and gradients of the first step, parameters after all)."""
    seen = {}
    embed, logits = model.embed, model.logits
    model.embed = lambda tokens: seen.setdefault("x", embed(tokens).requires_grad_())
    model.logits = lambda x: seen.setdefault("logits", logits(x))
    optimizer = Adam(model.parameters(), lr=LR, eps=ADAM_EPS)
    for step in range(steps):
        seen.clear()
        optimizer.zero_grad()
        loss = model.loss(*batch_of(config, step, lengths[step % len(lengths)] if lengths else s))
        seen["x"].retain_grad()
        loss.backward()
        finish()
        if step == 0:
            out = {"loss": loss.detach(), "logits": whole(seen["logits"].detach()), "input gradient": whole(seen["x"].grad)}
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return out | grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def one_device(config, s, lengths=(), steps=STEPS):
    """The whole model, which drops the same places: one salt a call, in the order of the calls."""
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict(start_of(config))
    g = torch.Generator().manual_seed(SEED)

    def salt():
        return int(torch.randint(2**62, (), generator=g))

    def of_tokens(x):
        n = x.shape[1]
        return dropout(x, config.dropout, generator=lambda shape, p, _: token_mask(salt(), p, shape, torch.arange(n), n))

    def core(q, k, v, p, training):
        def mask(shape, p, device):
            every = torch.arange(shape[-1])
            return weight_mask(salt(), p, shape[0], range(8), 8, shape[-1], every, every)

        return attend(q, k, v, p=p, training=training, generator=mask)

    model.drop.forward = of_tokens
    for block in model.blocks:
        block.drop1.forward = block.drop2.forward = of_tokens
        block.attention.core = core
    return train(model, config, s, lengths=lengths, steps=steps)


def on_ranks(comm, config, s, form, cut, dtype, recompute, state, lengths=(), steps=STEPS):
    model = ContextGPT(config, comm, form=form, cut=cut, rows=3, streams=ContextStreams(SEED), dtype=dtype)
    model.load_state_dict(state)
    recompute_model(model, recompute, generators=model.streams.generators)
    return train(model, config, s, model.sum_gradients, lambda x: join(comm, x, cut), lengths, steps)


def bounds(want, dtype):
    """8 eps of the tensor's size for each of TERMS roundings; where all cancels (a key's bias), of its neighbours' size."""
    eps, size = torch.finfo(dtype).eps, {name: float(w.abs().max()) for name, w in want.items()}
    return {name: 8 * eps * TERMS * max(size[name], 1e-2) for name in want}


def check(values, want, dtype, c):
    """All ranks alike to the bit; values, gradients and five steps within their bounds of float64 on one device."""
    for k in range(2):
        assert explain_ranks([row[k] for row in values]) == []
    limit = bounds(want[0], dtype)
    assert explain(values[0][0], want[0], t=c, bound=limit) == []
    # a step moves by lr m / (sqrt(v) + eps), so an error in a gradient comes back at most lr / eps times as large, each step
    worst = max(limit[name] for name in want[1])
    moved = {name: bound + STEPS * LR / ADAM_EPS * worst for name, bound in bounds(want[1], dtype).items()}
    assert explain(values[0][1], want[1], t=c, bound=moved) == []


F32, F64 = torch.float32, torch.float64
CASES = [  # (c, form, cut, change of SMALL, dtype, recomputed): every two settings meet, or nearly so
    (1, "ring", "zigzag", {"dropout": 0.2}, F64, "none"),
    (1, "ulysses", "equal", {"tied": False, "rotary": True}, F32, "none"),
    (2, "ring", "zigzag", {"dropout": 0.2, "rotary": True, "kv_heads": 2}, F64, "full"),
    (2, "ring", "equal", {"tied": False}, F32, "none"),
    (2, "gather", "striped", {"dropout": 0.2, "tied": False, "bias": False}, F64, "none"),
    (2, "ulysses", "zigzag", {"rotary": True, "dropout": 0.2}, F64, "none"),
    (3, "ring", "zigzag", {"rotary": True, "tied": False, "kv_heads": 4}, F64, "none"),
    (3, "gather", "equal", {"kv_heads": 1}, F32, "none"),
    (4, "ring", "striped", {"dropout": 0.2}, F64, "none"),
    (4, "ring", "zigzag", {"rotary": True}, F32, "none"),
    (4, "gather", "zigzag", {"kv_heads": 4, "rotary": True, "tied": False}, F64, "full"),
    (4, "ulysses", "striped", {"dropout": 0.2, "kv_heads": 4, "tied": False}, F64, "full"),
    (8, "ring", "zigzag", {"dropout": 0.2, "rotary": True, "tied": False}, F64, "none"),
    (8, "ulysses", "equal", {}, F32, "none"),
    (8, "gather", "striped", {"rotary": True}, F64, "none"),
]


@pytest.mark.parametrize("c, form, cut, change, dtype, recompute", CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_equals_one_device(c, form, cut, change, dtype, recompute):
    """Trials c22 (tied), c26 and e04 (all random streams agree, also where blocks are computed again)."""
    config, s = dataclasses.replace(SMALL, **change), 12 if c == 3 else 16
    steps = STEPS if form == "ring" and dtype is F64 and c in (2, 4) else 1
    args = (config, s, form, cut, dtype, recompute, start_of(config, dtype), (), steps)
    check(fw.simulate(on_ranks, *args, ranks=c, cluster=NETWORK).values, one_device(config, s, steps=steps), dtype, c)


def test_the_comparison_sees_one_element():
    want = one_device(SMALL, 16)
    for side in want:
        limit = bounds(side, F64)
        for name in side:
            off = {n: v.clone() for n, v in side.items()}
            off[name].view(-1)[-1] += 10 * limit[name]
            said = explain(off, side, t=4, bound=limit)
            assert len(said) == 1 and said[0].startswith(name), (name, said)


def in_groups(comm, c, *args):
    return on_ranks(comm.split(comm.rank // c), *args)


def test_real_ranks():
    """On 4 real processes, together and in pairs: the bits of the simulated ones, after five steps of Adam."""
    config = dataclasses.replace(SMALL, dropout=0.2, rotary=True)
    want = one_device(config, 16)
    with fw.pool(ranks=4) as ranks:
        for c in (2, 4):
            args = (c, config, 16, "ring", "zigzag", F64, "none", start_of(config))
            real = ranks.run(in_groups, *args, stream=False).values
            check(real, want, F64, c)
            if c == 2:
                modelled = fw.simulate(in_groups, *args, ranks=4, cluster=NETWORK).values
                assert all(torch.equal(value, modelled[0][1][name]) for name, value in real[0][1].items())


def test_lengths_may_change_from_batch_to_batch():
    """Trial d13: 8 tokens, then 16, and back; one token a rank (s = c)."""
    lengths = (8, 16, 4)
    want = one_device(SMALL, 8, lengths=lengths, steps=3)
    args = (SMALL, 8, "ring", "equal", F64, "none", start_of(SMALL), lengths, 3)
    check(fw.simulate(on_ranks, *args, ranks=4, cluster=NETWORK).values, want, F64, 4)


def filled(comm, state, cut):
    model = ContextGPT(SMALL, comm, cut=cut, dtype=F64)
    model.load_state_dict(state)
    loss = model.loss(*fill_up(*batch_of(SMALL, 0, 11), cut, comm.size))
    loss.backward()
    model.sum_gradients()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("cut", ["equal", "zigzag", "striped"])
def test_filling_changes_nothing(cut):
    """11 tokens on 4 ranks, filled up to 12 or 16: nobody looks at the filling, and its targets do not count."""
    whole = GPT(SMALL, dtype=F64)
    whole.load_state_dict(start_of(SMALL))
    loss = whole.loss(*batch_of(SMALL, 0, 11))
    loss.backward()
    want = {"loss": loss.detach()} | {name: p.grad for name, p in whole.named_parameters()}
    values = fw.simulate(filled, start_of(SMALL), cut, ranks=4, cluster=NETWORK).values
    assert explain_ranks(values) == [] and explain(values[0], want, t=4, bound=bounds(want, F64)) == []
    tokens, targets = batch_of(SMALL, 0, 16)
    assert fill_up(tokens, targets, cut, 4)[0] is tokens


def test_start_is_that_of_one_device():
    """Trial c25: bit by bit, for every c."""
    for c in (1, 4):
        for state in fw.simulate(lambda comm: ContextGPT(SMALL, comm).state_dict(), ranks=c, cluster=NETWORK).values:
            assert all(torch.equal(state[n], p) for n, p in GPT(SMALL).state_dict().items())


def one_step(comm, config, form):
    model = ContextGPT(config, comm, form=form)
    model.loss(*batch_of(config, 0, 16)).backward()
    model.sum_gradients()


@pytest.mark.parametrize("form", ["ring", "gather", "ulysses"])
def test_bytes_of_a_step(form):
    """Attention of every layer, the gradients' all-reduce, the loss and its count: not a byte more, from the Trace."""
    config, c = dataclasses.replace(SMALL, kv_heads=4), 4
    trace = fw.simulate(one_step, config, form, ranks=c, cluster=NETWORK).trace
    sizes = {"batch": 3, "length": 16, "heads": 8, "kv_heads": 4, "head_width": 2}
    parameters = sum(p.numel() for p in GPT(config).parameters())
    reduces = [
        collective_cost("all_reduce", "ring", c, elements, NETWORK.link(0, 1), itemsize=width).bytes_sent
        for elements, width in ((parameters, 4), (1, 8), (1, 4))
    ]
    for r in range(c):
        assert trace.bytes_sent(r) == 2 * sum(context_bytes(form, c, **sizes)) + sum(sent[r] for sent in reduces)


def test_work_of_a_model_is_balanced():
    """All layers, as counted in training: zigzag's busiest rank has the mean."""

    def program(comm, cut):
        model = ContextGPT(SMALL, comm, cut=cut, rows=1)
        model.loss(*batch_of(SMALL, 0, 16)).backward()
        return model.work["forward"], model.work["backward"]

    layers_heads_batch = 2 * 8 * 3
    assert fw.simulate(program, "zigzag", ranks=4, cluster=NETWORK).values == [(layers_heads_batch * 34,) * 2] * 4  # 136 / 4
    each = [f for f, _ in fw.simulate(program, "equal", ranks=4, cluster=NETWORK).values]
    assert [n // layers_heads_batch for n in each] == [10, 26, 42, 58]


def dropped(comm):
    model = ContextGPT(dataclasses.replace(SMALL, dropout=0.3), comm)
    return model.drop(torch.ones(2, 16 // comm.size, 64)), model.eval().drop(torch.ones(1))


def test_masks_belong_to_places():
    """As many fall as p says, neighbours and salts know nothing of each other, and every rank drops what one device would."""
    masks = [token_mask(salt, 0.3, (20, 50, 60), torch.arange(50), 50) for salt in (1, 2, 3 * 2**60)]
    for k, mask in enumerate(masks):
        assert abs(float(mask.float().mean()) - 0.7) < 5 * (0.21 / 60000) ** 0.5
        pairs = [(mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask[..., 1:], mask[..., :-1]), (mask, masks[k - 1])]
        for one, other in pairs:
            assert abs(float((one & other).float().mean()) - 0.49) < 6 * (0.25 / one.numel()) ** 0.5
    weights = weight_mask(5, 0.3, 2, range(4), 4, 12, torch.arange(12), torch.arange(12))
    some = weight_mask(5, 0.3, 2, range(2, 4), 4, 12, torch.tensor([1, 7]), torch.tensor([0, 3, 5]))
    assert torch.equal(some, weights[:, 2:, [1, 7]][..., [0, 3, 5]])
    whole = fw.simulate(dropped, ranks=1, cluster=NETWORK).values[0][0]
    assert 0.6 < float((whole != 0).float().mean()) < 0.8
    for r, (mine, off) in enumerate(fw.simulate(dropped, ranks=4, cluster=NETWORK).values):
        assert torch.equal(mine, part(whole, "zigzag", 4, r)) and torch.equal(off, torch.ones(1))


@pytest.mark.parametrize(
    "change, c, options, hint",
    [
        ({"length": 20}, 8, {}, "sequence of 20 cannot be shared by c 8 in two chunks each .* length: 16 or 32"),
        ({"length": 1}, 2, {"cut": "equal"}, "sequence of 1 cannot be shared by c 2; nearest legal length: 2"),
        ({}, 16, {"cut": "equal", "form": "ulysses"}, "8 heads cannot be traded among c 16; legal c: 1, 2, 4, 8"),
        ({}, 2, {"form": "star"}, "form is 'star'; allowed: ring, gather, ulysses"),
        ({"fused": True}, 2, {}, "allowed here: fused=False"),
    ],
)
def test_what_is_refused_before_ranks_start(change, c, options, hint):
    with pytest.raises(ValueError, match=hint):
        check_context_parallel(dataclasses.replace(SMALL, **change), c, **options)


def test_what_is_refused_on_a_rank():
    batch = torch.zeros(1, 32, dtype=torch.int64)
    for call, hint in (
        (lambda comm: ContextGPT(SMALL, comm).loss(batch, batch), "s at most 16"),
        (lambda comm: ContextGPT(SMALL, comm).loss(batch[:, :6], batch[:, :6]), "nearest legal length: 4 or 8"),
        (lambda comm: ContextGPT(SMALL, comm).loss(batch[:, :8], batch[:, :8], reduction="none"), "'mean' or 'sum'"),
        (lambda comm: ContextGPT(SMALL, comm, form="tree"), "allowed: ring, gather, ulysses"),
    ):
        with pytest.raises(fw.RankError, match=hint):
            fw.simulate(call, ranks=2, cluster=NETWORK)
