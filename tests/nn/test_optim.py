"""Optimisers: the same bits as torch's, explicit state, shards, and refusals."""

import pytest
import torch

from fourwalls.nn.init import draw
from fourwalls.nn.optim import SGD, Adam, AdamW, adam_, clip_, global_norm


def parameters(dtype):
    return [
        torch.nn.Parameter(draw(f"p{k}", shape, std=1.0).to(dtype)) for k, shape in enumerate([(3, 4), (5,), (), (0,), (2, 3, 2)])
    ]


def run(optimizer, params, steps=5):
    for step in range(steps):
        for k, p in enumerate(params):
            p.grad = None if (k == 1 and step == 0) else draw(f"g{k}.{step}", p.shape, std=1.0).to(p.dtype)  # one arrives late
        optimizer.step()
    return [p.detach().clone() for p in params]


CASES = {
    "adam": (lambda p: Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01, foreach=False)),
    "adam, decay": (
        lambda p: Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False),
    ),
    "adamw": (
        lambda p: AdamW(p, lr=0.01, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=False),
    ),
    "sgd": (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    "momentum, decay": (
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, foreach=False),
    ),
    "groups": (
        lambda p: AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.0}], lr=0.01),
        lambda p: torch.optim.AdamW(
            [{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.0}], lr=0.01, foreach=False
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_torch(name, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    a, b = run(CASES[name][0](ours), ours), run(CASES[name][1](theirs), theirs)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], parameters(dtype)[0])


def test_adam_by_hand():
    p, g = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    adam_(p, g, m, v, 1, lr=0.1, betas=(0.9, 0.99), eps=0.0)
    assert m.item() == pytest.approx(0.05) and v.item() == pytest.approx(0.0025)
    assert p.item() == pytest.approx(0.9)  # the first step is lr times the sign of the gradient


def test_a_shard_steps_like_the_whole():
    """What ZeRO stands on: Adam acts on each element alone."""
    p, g = draw("p", (7,), std=1.0), draw("g", (7,), std=1.0)
    whole, m, v = p.clone(), torch.zeros(7).double(), torch.zeros(7).double()
    adam_(whole, g, m, v, 1)
    parts = []
    for a, b in zip(p.tensor_split(3), g.tensor_split(3), strict=True):
        part = a.clone()
        adam_(part, b, torch.zeros_like(a), torch.zeros_like(a), 1)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)


def test_state_is_explicit_and_can_be_saved():
    params = parameters(torch.float32)
    adam = Adam(params, lr=0.01)
    run(adam, params, 3)
    state = adam.state[params[0]]
    assert set(state) == {"step", "m", "v"} and state["step"] == 3 and state["m"].shape == (3, 4)
    assert adam.state[params[1]]["step"] == 2  # it had no gradient once
    saved, copy = adam.state_dict(), [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = Adam(copy, lr=1.0)
    other.load_state_dict(saved)
    for k, p in enumerate(params):
        p.grad = copy[k].grad = draw(f"next{k}", p.shape).float()
    adam.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, copy, strict=True))
    adam.zero_grad()
    assert all(p.grad is None for p in params)
    with pytest.raises(ValueError, match="groups"):
        Adam(params[:2]).load_state_dict(saved)
    with pytest.raises(ValueError, match="shape"):
        Adam(params[::-1]).load_state_dict(saved)
    assert saved["state"][0]["step"] == 3 and adam.state[params[0]]["step"] == 4  # what was saved stays what it was
    assert not torch.equal(saved["state"][0]["m"], adam.state[params[0]]["m"])
    theirs = torch.optim.AdamW(params).state_dict()
    for other, state in ((SGD(params, momentum=0.9), saved), (Adam(params), theirs)):  # it would go on without what it needs
        with pytest.raises(ValueError, match="another optimiser's: its options are .*'betas'"):
            other.load_state_dict(state)
    for others, words in ((params + parameters(torch.float32), "for 5 parameters, and this group has 10"), (None, "lacks state")):
        with pytest.raises(ValueError, match=words):
            Adam(others or params).load_state_dict(saved if others else {})
    wide = [torch.nn.Parameter(p.detach().double()) for p in params]
    with pytest.raises(ValueError, match="in torch.float32, the parameter .* in torch.float64"):
        Adam(wide).load_state_dict(saved)


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clip_same_as_torch(largest):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        p.grad = draw(f"g{k}", p.shape, std=1.0).float()
        q.grad = p.grad.clone()
    ours[1].grad = theirs[1].grad = None
    a, b = clip_(ours, largest), torch.nn.utils.clip_grad_norm_(theirs, largest)
    eps = torch.finfo(torch.float32).eps
    assert abs(a - b) <= 8 * eps * b
    for p, q in zip(ours, theirs, strict=True):
        if p.grad is not None and p.numel():
            assert (p.grad - q.grad).abs().max() <= 16 * eps * q.grad.abs().max()
    after = global_norm(p.grad for p in ours if p.grad is not None)
    assert after <= largest * (1 + 1e-5)
    assert global_norm([]) == 0 and global_norm([torch.ones(4).bfloat16()]).dtype == torch.float32


@pytest.mark.parametrize(
    "make, hint",
    [
        (lambda p: Adam([]), "no parameters"),
        (lambda p: Adam([p[0], p[0]]), "twice"),
        (lambda p: Adam([{"params": p[:1]}, {"params": p[:2]}]), "twice"),
        (lambda p: Adam([{"params": p, "momentum": 1}]), "allowed"),
        (lambda p: Adam(p, lr=-1), "at least 0"),
        (lambda p: Adam(p, betas=(0.9, 1.0)), "below 1"),
        (lambda p: Adam(p, betas=(0.9,)), "they are two"),
        (lambda p: Adam(p, eps=-1e-8), "eps is -1e-08; it is at least 0"),
        (lambda p: SGD(p, momentum=-0.9), "momentum is -0.9"),
        (lambda p: Adam(p[0]), "params is one tensor"),
        (lambda p: Adam([1.0]), "a parameter is float"),
        (lambda p: Adam([2 * p[0]]), "is_leaf=False; allowed: real tensors that are leaves"),
        (lambda p: Adam([p[0].to(torch.complex64).detach()]), "complex64"),
    ],
)
def test_refusals(make, hint):
    with pytest.raises(ValueError, match=hint):
        make(parameters(torch.float32))
