"""Tensors that a recomputed block takes from outside, and answers that no operation made: neither may be wrong in silence."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

from fourwalls.memory.graph import record_graph
from fourwalls.memory.recompute import checkpoint
from fourwalls.memory.reuse import buffers_of, place, replay
from fourwalls.nn.optim import Adam

torch.set_num_threads(1)


def block_with(outside):
    return lambda x: (x * outside).sin() * outside


OUTSIDE = {
    "a weight": lambda: torch.nn.Parameter(torch.full((3,), 2.0)),
    "a mask": lambda: torch.ones(3),
    "an activation": lambda: torch.full((3,), 2.0, requires_grad=True) * 1,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_changed_between_forward_and_backward_is_refused_as_without_recomputation(name):
    """The second run would see the new values: torch's checkpoint gives the gradient of another function, without a word."""
    for run in (lambda f, x: f(x), checkpoint):
        outside, x = OUTSIDE[name](), torch.ones(3, requires_grad=True)
        y = run(block_with(outside), x)
        with torch.no_grad():
            outside.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    outside, x = OUTSIDE[name](), torch.ones(3, requires_grad=True)
    right = torch.autograd.grad(block_with(outside)(x).sum(), x)[0]
    for way in (lambda f, x: torchs(f, x, use_reentrant=False), lambda f, x: checkpoint(f, x, checks=False)):
        outside, x = OUTSIDE[name](), torch.ones(3, requires_grad=True)
        y = way(block_with(outside), x)
        with torch.no_grad():
            outside.mul_(3)
        y.sum().backward()
        assert not torch.allclose(x.grad, right)


def writes_by_name(x):
    y = x.exp()
    with torch.no_grad():
        torch.add(y, 1, out=y)
    return y * y


def test_writing_to_a_saved_tensor_by_out_is_refused_too():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        writes_by_name(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: add writes to float32"):
        checkpoint(writes_by_name, x)


def test_a_step_that_comes_too_early_is_named():
    linear = torch.nn.Linear(4, 4)
    optimizer = Adam(linear.parameters())
    linear(torch.ones(2, 4)).sum().backward()
    loss = checkpoint(lambda x: linear(x).tanh(), torch.ones(2, 4, requires_grad=True)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"float32 \(4, 4\) on cpu from outside.*an optimiser's step"):
        loss.backward()


@torch.no_grad()
def step_one(p):
    p.sub_(p.grad)


def test_weights_may_be_stepped_while_backward_is_under_way():
    """Each parameter as soon as its gradient is there: no block needs it any more."""
    found = []
    for run in (lambda f, x: f(x), checkpoint):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        for layer in layers:
            for p in layer.parameters():
                p.register_post_accumulate_grad_hook(step_one)
        x = torch.randn(2, 4).requires_grad_()
        y = x
        for layer in layers:
            y = run(lambda h, layer=layer: layer(h).tanh(), y)
        y.sum().backward()
        found.append([x.grad, *(p.detach() for layer in layers for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_answer_that_no_operation_made_is_what_it_was():
    """A parameter among a step's results has no place in the arena, and is read where it is."""
    w, x = torch.full((16,), 3.0), torch.ones(16)
    for answer in (w, w.view(4, 4)):
        graph = record_graph(lambda answer=answer: [x * 2, answer])
        first, second = replay(graph, place(buffers_of(graph)))
        assert torch.equal(first, x * 2) and torch.equal(second, answer)
