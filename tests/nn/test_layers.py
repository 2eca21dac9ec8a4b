"""Layers against torch.nn, gradients by hand against finite differences, dropout's statistics and mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from fourwalls.nn.by_hand import CrossEntropyByHand, GELUByHand, LayerNormByHand, LinearByHand, SoftmaxByHand
from fourwalls.nn.layers import GELU, Dropout, Embedding, LayerNorm, Linear, cross_entropy, dropout

EPS = torch.finfo(torch.float64).eps


def rand(*shape, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(grad)


def close(actual, expected, terms):
    """|error| <= 4 eps terms max|expected|: a sum of `terms` products in another order."""
    return bool((actual - expected).abs().max() <= 4 * EPS * terms * expected.abs().max())


def copy_to(ours, theirs):
    theirs.load_state_dict(ours.state_dict())
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "ours, theirs, shape",
    [
        (Linear(5, 3), torch.nn.Linear(5, 3), (2, 7, 5)),
        (Linear(5, 3, bias=False), torch.nn.Linear(5, 3, bias=False), (7, 5)),
        (LayerNorm(6), torch.nn.LayerNorm(6), (2, 3, 6)),
        (GELU(), torch.nn.GELU("tanh"), (4, 6)),
        (GELU("none"), torch.nn.GELU(), (4, 6)),
    ],
    ids=lambda v: getattr(v, "extra_repr", lambda: "")() if isinstance(v, torch.nn.Module) else None,
)
def test_same_bits_as_torch(ours, theirs, shape, dtype):
    ours, theirs = ours.to(dtype), copy_to(ours, theirs).to(dtype)
    x = rand(*shape, grad=False).to(dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours(a).square().sum().backward()
    theirs(b).square().sum().backward()
    assert torch.equal(ours(a), theirs(b)) and torch.equal(a.grad, b.grad)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_embedding_same_as_torch():
    ours = Embedding(9, 4)
    theirs = copy_to(ours, torch.nn.Embedding(9, 4))
    tokens = torch.tensor([[1, 8, 1], [0, 1, 8]])
    ours(tokens).square().sum().backward()
    theirs(tokens).square().sum().backward()
    assert torch.equal(ours(tokens), theirs(tokens)) and torch.equal(ours.weight.grad, theirs.weight.grad)


BY_HAND = {
    "linear": (LinearByHand.apply, F.linear, lambda: (rand(4, 5), rand(3, 5), rand(3)), 20),
    "layer norm": (
        lambda x, w, b: LayerNormByHand.apply(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5),
        lambda: (rand(2, 3, 6), rand(6), rand(6, seed=1)),
        40,
    ),
    "gelu": (GELUByHand.apply, F.gelu, lambda: (rand(4, 5),), 4),
    "softmax": (SoftmaxByHand.apply, lambda x: F.softmax(x, -1), lambda: (rand(3, 7),), 14),
    "cross-entropy": (
        lambda x: CrossEntropyByHand.apply(x, torch.tensor([0, 6, 2])),
        lambda x: F.cross_entropy(x, torch.tensor([0, 6, 2])),
        lambda: (rand(3, 7),),
        14,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    """The written-out gradient equals finite differences, and torch's."""
    ours, theirs, inputs, terms = BY_HAND[name]
    assert gradcheck(ours, inputs())
    a, b = inputs(), inputs()
    out, expected = ours(*a), theirs(*b)
    assert close(out, expected, terms)
    up = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(up)
    expected.backward(up)
    for x, y in zip(a, b, strict=True):
        assert close(x.grad, y.grad, terms)
        off = y.grad.clone()
        off.view(-1)[-1] += 10 * 4 * EPS * terms * y.grad.abs().max()  # ten times the bound, in one element
        assert not close(off, y.grad, terms)


def test_softmax_by_hand_does_not_overflow():
    x = torch.tensor([[1000.0, 999.0]], dtype=torch.float64)
    assert close(SoftmaxByHand.apply(x), torch.softmax(x, -1), 2)


def test_cross_entropy():
    logits, targets = rand(2, 3, 11), torch.tensor([[1, 2, -100], [0, 10, 3]])
    each = cross_entropy(logits, targets, reduction="none")
    assert each.shape == (2, 3) and each[0, 2] == 0
    assert close(cross_entropy(logits, targets), each.sum() / 5, 66)  # the ignored one is not in the mean
    assert cross_entropy(logits.to(torch.bfloat16), targets).dtype == torch.float32
    assert cross_entropy(logits, targets).dtype == torch.float64
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        cross_entropy(logits, targets.T)


def test_dropout_statistics():
    x = torch.ones(200, 500, dtype=torch.float64)
    y = dropout(x, 0.3, generator=torch.Generator().manual_seed(1))
    kept = (y != 0).double().mean().item()
    assert abs(kept - 0.7) < 6 * math.sqrt(0.3 * 0.7 / x.numel())  # six standard deviations
    assert torch.equal(y, (y != 0).double() * (1 / 0.7))
    assert not torch.equal(dropout(x, 0.3), dropout(x, 0.3))  # a fresh mask each time


def test_dropout_mask_does_not_depend_on_dtype():
    """So a float64 oracle drops the same places as a float32 or bfloat16 run."""
    masks = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        masks.append(dropout(torch.ones(64, 33, dtype=dtype), 0.5) != 0)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_dropout_gradient_and_modes():
    x = rand(5, 7)

    def same_mask(x):
        return dropout(x, 0.4, generator=torch.Generator().manual_seed(3))

    assert gradcheck(same_mask, (x,))
    layer = Dropout(0.4)
    assert layer.eval()(x) is x and layer.train()(x) is not x and Dropout(0.0)(x) is x
    for p in (-0.1, 1, 1.5):
        with pytest.raises(ValueError, match="allowed"):
            Dropout(p)


def test_layer_refusals():
    with pytest.raises(ValueError, match="at least 1"):
        Linear(0, 3)
    for size in (2.0, "3", None):
        with pytest.raises(ValueError, match="whole numbers"):
            Linear(size, 3)
    for token in (5, -1):
        with pytest.raises(ValueError, match=f"token {token}; the table has rows 0 to 4"):
            Embedding(5, 2)(torch.tensor([[1, token]]))
    with pytest.raises(ValueError, match="tanh"):
        GELU("fast")


def test_one_token_alone_has_the_loss_of_a_batch_of_one():
    logits = torch.tensor([0.1, 2.0, -1.0])
    for reduction in ("mean", "sum", "none"):
        alone = cross_entropy(logits, torch.tensor(1), reduction=reduction)
        assert alone.shape == () and torch.equal(alone, cross_entropy(logits[None], torch.tensor([1]), reduction=reduction).sum())
