"""Recomputation against a run that keeps everything: the same operations on the same numbers, so the same bits."""

import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

from fourwalls.memory.ledger import Ledger
from fourwalls.memory.recompute import checkpoint, recompute_model, run_plan
from fourwalls.memory.schedule import Again, Tape, keep_all, revolve, runs, segments, show, square_root
from fourwalls.nn.gpt import GPT, Block, GPTConfig
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import Adam

torch.set_num_threads(1)  # the tensors are tiny
NESTED = (Tape(0), Again((Again((Tape(1),)), Tape(2, 1))), Tape(3, 1), Again((Tape(4),)))
HOW = ["full", "selective", 1, 2, square_root(5), revolve(5, 1), NESTED]


def training(how, *, tied, dtype, dropout=0.2, steps=5, wrap=None):
    """Every loss, every gradient of every step, every parameter at the end, and what the generator draws next."""
    config = GPTConfig(vocabulary=11, width=8, heads=2, length=6, layers=5, dropout=dropout, tied=tied)
    model = GPT(config, dtype=dtype)
    if wrap is None:
        recompute_model(model, how)
    else:
        for block in model.blocks:
            block.forward = partial(wrap, block.forward)
    optimizer, seen = Adam(model.parameters(), lr=1e-2), []
    torch.manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (2, 6))
        optimizer.zero_grad()
        loss = model.loss(tokens, tokens.roll(-1, 1))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*seen, *(p.detach() for p in model.parameters()), torch.rand(3)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def oracle():
    return {
        (tied, dtype): training("none", tied=tied, dtype=dtype)
        for tied in (True, False)
        for dtype in (torch.float64, torch.float32)
    }


@pytest.mark.parametrize("k", range(len(HOW)))
def test_training_equals_one_that_keeps_everything(k, oracle):
    """Dropout on; tied and untied, both precisions, pairwise; five steps of Adam; the generator goes on from the same place."""
    for tied, dtype in ((k % 2 == 0, torch.float64), (k % 2 == 1, torch.float32)):
        assert same(training(HOW[k], tied=tied, dtype=dtype), oracle[tied, dtype]), (HOW[k], tied, dtype)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_gives_the_same_bits(reentrant, oracle):
    wrap = partial(torchs, use_reentrant=reentrant)
    assert same(training(None, tied=True, dtype=torch.float64, wrap=wrap), oracle[True, torch.float64])


def test_the_comparison_sees_one_element():
    ours = training("none", tied=True, dtype=torch.float64, steps=1)
    theirs = [x.clone() for x in ours]
    theirs[3].view(-1)[0] = torch.nextafter(theirs[3].view(-1)[0], torch.tensor(9.0, dtype=torch.float64))
    assert not same(ours, theirs)


def of_block(run, *, needs_grad=True, frozen=False, non_leaf=False):
    """Gradients of a block with dropout, its input's too; the input may be a leaf or not, the block frozen."""
    block = Block(GPTConfig(width=8, heads=2, length=6, layers=1, dropout=0.3), dtype=torch.float64)
    block.requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator).requires_grad_(needs_grad)
    torch.manual_seed(2)
    y = run(block, x.sin() if non_leaf else x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("options", [{}, {"needs_grad": False}, {"frozen": True}, {"non_leaf": True}])
@pytest.mark.parametrize("checks, early_stop", [(True, True), (False, False)])
def test_inputs_without_gradient_frozen_blocks_and_non_leaf_inputs(options, checks, early_stop):
    """Trial e01 among them: with an input that needs no gradient the parameters still get theirs."""
    ours = of_block(partial(checkpoint, checks=checks, early_stop=early_stop), **options)
    for a, b in zip(ours, of_block(lambda block, x: block(x), **options), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_trial_e01_the_old_variant_loses_every_gradient():
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        old = torchs(linear, x, use_reentrant=True)
    assert not old.requires_grad
    assert torchs(linear, x, use_reentrant=False).requires_grad and checkpoint(linear, x).requires_grad


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def structured(batch, *more, scale=1.0, form="dict"):
    x, (y, z) = batch["x"], batch["yz"]
    a, b = (x * y).exp() * scale, (z * more[0]).sin() * x
    return {"dict": lambda: {"a": a, "rest": [b, None, 3]}, "tuple": lambda: (a, [b]), "class": lambda: Pair(a, b)}[form]()


def first_two(out):
    if isinstance(out, Pair):
        return out.left, out.right
    return (out["a"], out["rest"][0]) if isinstance(out, dict) else (out[0], out[1][0])


@pytest.mark.parametrize("form", ["dict", "tuple", "class"])
def test_trial_e02_tuples_dicts_and_dataclasses(form):
    """In: nested tuples and dicts. Out: whatever the block returns, a dataclass too."""
    grads = []
    for run in (structured, partial(checkpoint, structured)):
        x, y, z, w = (torch.full((3,), 0.1 * k, dtype=torch.float64, requires_grad=True) for k in range(1, 5))
        a, b = first_two(run({"x": x, "yz": (y, z)}, w, scale=2.0, form=form))
        (a.sum() + 2 * b.sum()).backward()
        grads.append([t.grad for t in (x, y, z, w)])
    assert same(*grads)


def test_trial_e02_a_dataclass_among_the_arguments_is_refused_in_words():
    pair = Pair(torch.ones(2, requires_grad=True), torch.ones(2))
    with pytest.raises(ValueError, match="Pair is a dataclass, in which tensors cannot be found; give a dict"):
        checkpoint(lambda pair: pair.left * pair.right, pair)
    with pytest.raises(ValueError, match="Tensor cannot be called"):
        checkpoint(torch.ones(2), torch.ones(2))


def test_trial_e02_relu_in_place_after_a_norm():
    grads = []
    for run in (lambda f, x: f(x), checkpoint):
        torch.manual_seed(0)
        norm, linear = torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)
        block = torch.nn.Sequential(norm, torch.nn.ReLU(inplace=True), linear, torch.nn.ReLU(inplace=True))
        x = torch.randn(5, 6, requires_grad=True)
        run(block, x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in block.parameters())])
    assert same(*grads)


def writes_to_what_exp_saved(x):
    y = x.exp()
    y.add_(1)
    return y * y


def test_writing_to_a_saved_tensor_is_refused_where_torchs_checkpoint_is_silently_wrong():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: add_ writes to float32"):
        checkpoint(writes_to_what_exp_saved, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as without any checkpoint
        writes_to_what_exp_saved(x).sum().backward()
    torchs(writes_to_what_exp_saved, x, use_reentrant=False).sum().backward()
    right = 2 * (x.detach().exp() + 1) * x.detach().exp()
    assert (x.grad - right).abs().min() > 5  # it took e + 1 for e


def test_writing_to_the_input_is_refused():
    def doubles(x):
        return x.mul_(2).exp()

    for checks in (True, False):
        h = torch.ones(3, requires_grad=True) * 1
        with pytest.raises(RuntimeError, match="changes its input in place .*x = x.clone()"):
            checkpoint(doubles, h, checks=checks)
    h = torch.ones(3, requires_grad=True) * 1
    out = checkpoint(torch.exp, h)
    h.add_(1)  # later, by somebody else
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def own_noise(x, generator):
    return x * torch.rand(x.shape, generator=generator, dtype=x.dtype) * x


def test_trial_e04_generators_of_ones_own():
    """Among the arguments they are found; hidden in the block they must be named, and who forgets it is told."""
    grads = []
    for how in ("plain", "argument", "named"):
        generator, x = torch.Generator().manual_seed(3), torch.ones(4, dtype=torch.float64, requires_grad=True)
        if how == "plain":
            y = own_noise(x, generator)
        elif how == "argument":
            y = checkpoint(own_noise, x, generator)
        else:
            y = checkpoint(lambda x, g=generator: own_noise(x, g), x, generators=[generator])
        after = torch.rand(1, generator=generator)
        y.sum().backward()
        grads.append([x.grad, after, torch.rand(1, generator=generator)])
    assert same(grads[0], grads[1]) and same(grads[0], grads[2])
    with pytest.raises(RuntimeError, match="rand draws from a generator that checkpoint does not know.*generators="):
        checkpoint(lambda x: own_noise(x, generator), x)
    with pytest.raises(ValueError, match="generators holds a int"):
        checkpoint(torch.exp, x, generators=[3])


def test_random_numbers_by_hand():
    """A block that seeds, or takes and puts back a state, is run again as it was."""

    def by_hand(x):
        torch.manual_seed(9)
        first = torch.rand(3)
        state = torch.get_rng_state()
        second = torch.rand(3)
        torch.set_rng_state(state)
        return x * first * x * second * torch.rand(3)

    grads = []
    for run in (by_hand, partial(checkpoint, by_hand)):
        torch.manual_seed(0)
        x = torch.ones(3, requires_grad=True)
        y, after = run(x), torch.rand(1)
        y.sum().backward()
        grads.append([x.grad, after, torch.rand(1)])
    assert same(*grads)


def test_autocast_is_put_back():
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    grads = []
    for run in (linear, partial(checkpoint, linear)):
        x.grad = linear.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        grads.append([x.grad, linear.weight.grad])
    assert same(*grads)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_nested_to_any_depth(depth):
    grads = []
    for run in (lambda f, x: f(x), checkpoint):
        layers = MLP((6,) * 9, dropout=0.4).double().layers

        def level(k, x, layers=layers, run=run):
            half = layers[: len(layers) // 2] if k == 1 else layers
            inner = half if k == 1 else partial(level, k - 1)
            return run(inner, x) if k < depth else inner(run(torch.sin, x))

        torch.manual_seed(0)
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        run(partial(level, depth), x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)])
    assert same(*grads) and len(grads[0]) > 4


def test_backward_twice_and_in_parts():
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_()
    w = torch.full((5,), 1.5, dtype=torch.float64, requires_grad=True)

    def f(x):
        return (x * w).exp() * x

    want = torch.autograd.grad(f(x).sum(), (x, w))
    out = checkpoint(f, x).sum()
    assert same(torch.autograd.grad(out, (x,), retain_graph=True), want[:1])
    assert same(torch.autograd.grad(out, (w,), retain_graph=True), want[1:])
    assert same(torch.autograd.grad(out, (x, w)), want)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()

    def penalty(x):  # a gradient inside the block
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return g.square()

    assert same(torch.autograd.grad(checkpoint(penalty, x).sum(), (x, w)), torch.autograd.grad(penalty(x).sum(), (x, w)))


def test_without_gradients_it_just_runs():
    calls = []

    def f(x):
        calls.append(1)
        return x.exp()

    with torch.no_grad():
        assert torch.equal(checkpoint(f, torch.ones(2)), torch.ones(2).exp())
    checkpoint(f, torch.ones(2))
    assert not checkpoint(f, torch.ones(2)).requires_grad and len(calls) == 3


def test_a_block_that_is_not_the_same_twice_is_named():
    state = {"calls": 0}

    def longer(x):
        state["calls"] += 1
        for _ in range(state["calls"]):
            x = x.exp()
        return x * x

    out = checkpoint(longer, torch.ones(2, requires_grad=True), early_stop=False)
    with pytest.raises(RuntimeError, match="did not do the same twice: run again, it saved more than 3 tensors"):
        out.sum().backward()

    def shorter(x):
        state["calls"] += 1
        return x.exp().exp() if state["calls"] == 1 else x * 2

    state["calls"] = 0
    with pytest.raises(RuntimeError, match="did not do the same twice: run again, it saved 0 of 2 tensors"):
        checkpoint(shorter, torch.ones(2, requires_grad=True)).sum().backward()

    def wider(x):
        state["calls"] += 1
        return x.repeat(state["calls"]).exp()[:2]

    state["calls"] = 0
    with pytest.raises(RuntimeError, match=r"was float32 \(2,\) on cpu and is float32 \(4,\) on cpu"):
        checkpoint(wider, torch.ones(2, requires_grad=True)).sum().backward()


PLANS = [keep_all(5), segments(5, 2), segments(5, 5), square_root(5), revolve(5, 0), revolve(5, 2), NESTED]


@pytest.mark.parametrize("plan", PLANS, ids=show)
def test_every_step_runs_as_often_as_the_plan_says(plan):
    count = [0] * 5
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in count]

    def step(k):
        def run(x):
            count[k] += 1
            return layers[k](x)

        return run, run

    run_plan([step(k) for k in range(5)], torch.ones(2, 4, requires_grad=True), plan).sum().backward()
    assert count == runs(plan)


def test_early_stop_leaves_out_what_nobody_waits_for():
    calls = []

    def f(x):
        y = x.exp()
        calls.append("between")
        y = y * 3
        calls.append("end")
        return y + 1

    for early_stop, second in ((True, []), (False, ["between", "end"])):
        calls.clear()
        checkpoint(f, torch.ones(2, requires_grad=True), early_stop=early_stop).sum().backward()
        assert calls == ["between", "end", *second]


def test_nothing_stays_alive_after_backward():
    block, x = MLP((4, 4, 4)), torch.ones(2, 4, requires_grad=True)
    inner = {}

    def f(x):
        y = x * 1
        inner["y"] = weakref.ref(y.untyped_storage())
        return block(y)

    h = x * 2
    given = weakref.ref(h.untyped_storage())
    out = checkpoint(f, h)
    assert inner["y"]() is None  # forgotten at once
    del h
    assert given() is not None  # the input is kept
    out.sum().backward()
    del out
    gc.collect()
    assert given() is None and inner["y"]() is None
    unused = checkpoint(f, x * 2)
    del unused
    gc.collect()
    assert inner["y"]() is None


def test_the_random_state_is_kept_only_if_the_block_drew():
    """5,056 bytes of a CPU's generator: a named term of what a recomputed block keeps."""
    for p, extra in ((0.0, 0), (0.3, 5056)):
        block = Block(GPTConfig(width=8, heads=2, length=6, layers=1, dropout=p))
        with Ledger(block) as ledger:
            x = torch.zeros(2, 6, 8).requires_grad_()
            y = checkpoint(block, x)
            ledger.phase("backward")
            y.sum().backward()
        begin, _ = ledger.story().phases[0]  # forward is over: the phase that begins here is backward's
        after = ledger.curve()[begin].bytes
        assert after["activations"] == x.nbytes and after["temporary"] == y.nbytes + extra


def test_words_and_plans_that_do_not_fit():
    model = GPT(GPTConfig(layers=2))
    with pytest.raises(ValueError, match="recompute is 'some'; allowed: none, selective, full, 1 to 2 segments"):
        recompute_model(model, "some")
    with pytest.raises(ValueError, match="2 steps in 3 segments; allowed: 1 to 2"):
        recompute_model(model, 3)
    with pytest.raises(ValueError, match="the model has blocks 0 to 1"):
        recompute_model(model, keep_all(3))
    names = list(model.state_dict())
    assert list(recompute_model(model, "full").state_dict()) == names
    assert recompute_model(model, "none").hidden.__func__ is GPT.hidden
