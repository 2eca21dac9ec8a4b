"""Sequence parallelism, layer by layer: both forms against one device, what backward needs, norms' gradients, frozen weights."""

import dataclasses

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import Block, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor_gpt import TensorBlock
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.tensor_shards import load_whole, whole_gradients

NETWORK = uniform(1e-6, 1e9)
F64 = {"dtype": torch.float64}
CONFIG = GPTConfig(vocabulary=13, length=8, width=16, layers=2, heads=8, kv_heads=8, rotary=True, seed=3)


def state_of(config):
    return {n: p.data + draw(n, p.shape, seed=9, std=0.3) for n, p in Block(config, **F64).named_parameters()}


def on_ranks(comm, config, keep, frozen, with_input):
    region = SequenceRegion(comm, keep=keep)
    block = TensorBlock(config, comm, region=region, **F64)
    load_whole(block, state_of(config), comm)
    for name, p in block.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    x = region.own(draw("x", (3, 8, 16), std=1.0), 1).clone().requires_grad_(with_input)
    y = block(x)
    up = region.own(draw("up", (3, 8, 16), std=1.0), 1)
    (y * up).sum().backward()
    region.sum_gradients(block)
    found = {"output": region.gather(y.detach())} | whole_gradients(block, comm)
    return found | ({"input gradient": region.gather(x.grad)} if with_input else {})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "t, frozen, with_input",
    [(1, ("none",), True), (2, ("attention.query", "norm1"), True), (4, ("mlp", "norm2"), False), (8, ("none",), True)],
)
def test_a_block_equals_the_whole_one(t, keep, frozen, with_input):
    """Also with frozen parameters, and with an input that asks for no gradient."""
    config = dataclasses.replace(CONFIG, bias=t != 4)
    want = one_device(config, frozen, with_input)
    runs = fw.simulate(on_ranks, config, keep, frozen, with_input, ranks=t, cluster=NETWORK).values
    assert explain_ranks(runs) == []
    assert explain(runs[0], want, t=t, bound=bounds(want)) == []


def one_device(config, frozen=("none",), with_input=True):
    """The oracle: output, every gradient, and the input's."""
    whole = Block(config, **F64)
    whole.load_state_dict(state_of(config))
    for name, p in whole.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    x = draw("x", (3, 8, 16), std=1.0).requires_grad_(with_input)
    y = whole(x)
    (y * draw("up", (3, 8, 16), std=1.0)).sum().backward()
    want = {"output": y.detach()} | {n: p.grad for n, p in whole.named_parameters()}
    if with_input:
        want["input gradient"] = x.grad
    return want


def bounds(want):
    eps = torch.finfo(torch.float64).eps
    return {n: 0.0 if w is None else 8 * eps * 200 * max(float(w.abs().max()), 1e-2) for n, w in want.items()}


def test_the_kept_input_on_real_ranks():
    """Output, every gradient and the input's on 2 real ranks: one device's within the bound, the simulator's to the bit."""
    want = one_device(CONFIG)
    run = fw.run(on_ranks, CONFIG, True, ("none",), True, ranks=2, stream=False)
    assert explain_ranks(run.values) == []
    assert explain(run.values[0], want, t=2, bound=bounds(want)) == []
    modelled = fw.simulate(on_ranks, CONFIG, True, ("none",), True, ranks=2, cluster=NETWORK).values[0]
    assert set(modelled) == set(want) and all(torch.equal(run.values[0][n], modelled[n]) for n in want)
    off = {n: v.clone() for n, v in run.values[0].items()}
    off["input gradient"].view(-1)[-1] += 10 * bounds(want)["input gradient"]
    assert explain(off, want, t=2, bound=bounds(want)), "ten times the bound is seen"


def test_both_forms_give_the_same_numbers():
    a, b = (fw.simulate(on_ranks, CONFIG, keep, ("none",), True, ranks=4, cluster=NETWORK).values[0] for keep in (False, True))
    eps = torch.finfo(torch.float64).eps
    assert all((a[n] - b[n]).abs().max() <= 100 * eps * max(1.0, float(a[n].abs().max())) for n in a)


def frozen_products(comm):
    """Nothing to train in the shared part: the second form of gathering is not done at all."""
    region = SequenceRegion(comm)
    block = TensorBlock(CONFIG, comm, region=region, **F64)
    for p in block.parameters():
        p.requires_grad_(False)
    x = region.own(draw("x", (3, 8, 16), std=1.0), 1).clone().requires_grad_()
    block(x).sum().backward()
    return x.grad is not None


def test_nothing_is_gathered_again_for_frozen_weights():
    run = fw.simulate(frozen_products, ranks=2, cluster=NETWORK)
    assert all(run.values) and run.trace.messages_sent(0) == 4 + 4  # not 6 all-gathers


def summing(comm):
    """One all-reduce for each dtype, of all uncut gradients together."""
    region = SequenceRegion(comm)
    block = TensorBlock(CONFIG, comm, region=region)
    for p in block.parameters():
        p.grad = torch.full_like(p, comm.rank + 1.0)
    before = comm.clock()
    region.sum_gradients(block)
    return {n: float(p.grad.view(-1)[0]) for n, p in block.named_parameters()}, comm.clock() - before


def test_only_whole_parameters_are_summed():
    run = fw.simulate(summing, ranks=4, cluster=NETWORK)
    numbers = 6 * 16  # two norms with shift, two biases after an exit
    for rank, (values, took) in enumerate(run.values):
        for name, value in values.items():
            whole = name.startswith("norm") or name in ("attention.output.bias", "mlp.down.bias")
            assert value == (10 if whole else rank + 1), name
        assert took == 6 * NETWORK.link(0, 1).picoseconds(numbers * 4 // 4)


def my_gather(comm, x):
    my_gather.calls = getattr(my_gather, "calls", 0) + 1
    return ring.all_gather(comm, x)


def own_collectives(comm):
    region = SequenceRegion(comm, all_gather=my_gather)
    block = TensorBlock(CONFIG, comm, region=region, **F64)
    x = region.own(draw("x", (3, 8, 16), std=1.0), 1).clone().requires_grad_()
    block(x).sum().backward()


def test_the_collectives_can_be_your_own():
    fw.simulate(own_collectives, ranks=2, cluster=NETWORK)
    assert my_gather.calls == 2 * 6


def test_lengths_that_do_not_divide():
    for length, hint in ((6, "length: 4 or 8"), (1, "length: 4 ")):
        with pytest.raises(fw.RankError, match=hint):
            fw.simulate(lambda comm, n: SequenceRegion(comm).check_length(n), length, ranks=4, cluster=NETWORK)
