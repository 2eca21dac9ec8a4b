"""Context parallelism under hostile use: odd strides, frozen inputs, several backwards, ranks that are not of one mind.

The last is the worst: with another cut, mask, batch or set of frozen weights on one rank every message fits, and all numbers are
wrong. With checks on it is said before anything moves.
"""

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.attention import attend
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.parallel.context import FORMS, ContextGPT
from fourwalls.parallel.context_cuts import join, part

torch.set_num_threads(1)
NETWORK, F64 = uniform(1e-6, 1e9), torch.float64
BOUND = 1e-12  # float64, sums of 16 numbers of size 1, a few in a row
SMALL = GPTConfig(vocabulary=11, length=8, width=8, layers=1, heads=2)


def whole(b=2, s=16, a=4, kv=2, d=3):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(b, heads, s, d, dtype=F64, generator=g) for heads in (a, kv, kv, a)]


def one_device(tensors):
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    (out * tensors[3]).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def turned(x):
    """The same numbers with other strides."""
    return x.transpose(0, 3).contiguous().transpose(0, 3)


def in_use(comm, form, tensors, how, wants="qkv"):
    """[output, gradient of q, k, v], joined; a gradient None where it must be, an error where it must not."""
    q, k, v, up = (part(x, "zigzag", comm.size, comm.rank, dim=2) for x in tensors)
    q, k, v, up = (turned(x) if how == "strides" else x for x in (q, k, v, up))
    for word, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(word in wants)
    out = FORMS[form](comm, q, k, v, cut="zigzag", rows=3)
    if how == "sum":
        out.sum().backward()  # a gradient of one number, seen everywhere
    elif how == "parts":  # backward twice, in two parts of the loss
        (out * up / 4).sum().backward(retain_graph=True)
        (out * up * 3 / 4).sum().backward()
    else:
        out.backward(up)
    return [None if x is None else join(comm, x, "zigzag", dim=2) for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("form, how, wants", [
    ("ring", "strides", "qkv"), ("gather", "strides", "qkv"), ("ulysses", "strides", "qkv"),
    ("ring", "sum", "qkv"), ("gather", "parts", "qkv"), ("ring", "parts", "qkv"), ("ulysses", "parts", "qkv"),
    ("ring", "frozen", "q"), ("ring", "frozen", "k"), ("gather", "frozen", "v"), ("gather", "frozen", "q"),
    ("ulysses", "frozen", "kv"), ("ulysses", "frozen", "q"),
])  # fmt: skip
def test_hostile_use_equals_one_device(form, how, wants):
    """Trial e01 among them: frozen inputs get no gradient, and the others theirs."""
    tensors = whole()
    if how == "sum":
        tensors[3] = torch.ones_like(tensors[3])
    want = one_device(tensors)
    for got in fw.simulate(in_use, form, tensors, how, wants, ranks=2, cluster=NETWORK).values:
        for word, mine, right in zip("oqkv", got, want, strict=True):
            if word in f"o{wants}":
                assert float((mine - right).detach().abs().max()) < BOUND
            else:
                assert mine is None


@pytest.mark.parametrize("form", FORMS)
def test_inputs_that_need_no_gradient_and_a_batch_of_nothing(form):
    def program(comm):
        tensors = (torch.zeros(0, heads, 4, 3) for heads in (4, 2, 2))
        return tuple(FORMS[form](comm, *tensors).shape), FORMS[form](
            comm, *(torch.ones(1, 2, 4, 2) for _ in range(3))
        ).requires_grad

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [((0, 4, 4, 3), False)] * 2


# --- ranks that are not of one mind ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("word, values", [("cut", ("equal", "zigzag")), ("causal", (True, False))])
def test_another_cut_or_mask_on_one_rank_is_refused(form, word, values):
    """Shapes and bytes fit, so nothing else would notice."""

    def program(comm):
        tensors = (torch.ones(1, heads, 4, 2) for heads in (4, 2, 2))
        return FORMS[form](comm, *tensors, **{word: values[comm.rank]}).shape

    with pytest.raises(fw.MismatchError, match=f"rank 0 says {word}={values[0]}, rank 1 says {word}={values[1]}"):
        fw.simulate(program, ranks=2, cluster=NETWORK)
    assert fw.simulate(program, ranks=2, cluster=NETWORK, checks=False).values == [(1, 4, 4, 2)] * 2


def test_another_form_on_one_rank_is_no_deadlock():
    def program(comm):
        FORMS[("ring", "gather")[comm.rank]](comm, *(torch.ones(1, 2, 4, 2) for _ in range(3)))

    with pytest.raises(fw.MismatchError, match="rank 0 says collective=ring attention, rank 1 says collective=gather attention"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def text(seed=0):
    numbers = torch.randint(SMALL.vocabulary, (2, 9), generator=torch.Generator().manual_seed(seed))
    return numbers[:, :-1], numbers[:, 1:]


def test_ranks_that_bring_their_own_batches_are_refused():
    """As data parallelism would have it: here each rank takes its part of the same sequences."""

    def program(comm):
        return ContextGPT(SMALL, comm).loss(*text(comm.rank))

    with pytest.raises(fw.MismatchError, match="rank 0 says tokens="):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def test_ranks_that_freeze_other_weights_are_refused():
    """A norm's weight here and its bias there have one shape: their gradients would be added."""

    def program(comm):
        model = ContextGPT(SMALL, comm)
        (model.norm.bias if comm.rank else model.norm.weight).requires_grad_(False)
        model.loss(*text()).backward()
        model.sum_gradients()

    with pytest.raises(fw.MismatchError, match="says without_gradient=norm.weight, rank 1 says without_gradient=norm.bias"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def accumulated(comm, often):
    """Gradients of two micro-batches, summed over the ranks once at the end, or after each."""
    model = ContextGPT(SMALL, comm, dtype=F64)
    for seed in (0, 1):
        model.loss(*text(seed)).backward()
        if often:
            model.sum_gradients()
    model.sum_gradients()
    return {name: p.grad for name, p in model.named_parameters()}


def test_micro_batches_are_summed_over_ranks_once():
    """What was summed before would count once for each rank more; zero_grad() makes a new start."""
    model = GPT(SMALL, dtype=F64)
    for seed in (0, 1):
        model.loss(*text(seed)).backward()
    for got in fw.simulate(accumulated, False, ranks=2, cluster=NETWORK).values:
        assert all(float((got[name] - p.grad).abs().max()) < BOUND for name, p in model.named_parameters())
    with pytest.raises(fw.RankError, match="tokens.weight still has the sum over all ranks of an earlier backward.* 2 times"):
        fw.simulate(accumulated, True, ranks=2, cluster=NETWORK)

    def two_steps(comm):
        model = ContextGPT(SMALL, comm, dtype=F64)
        for _ in range(2):
            model.zero_grad()
            model.loss(*text()).backward()
            model.sum_gradients()
        return model.norm.weight.grad

    again = fw.simulate(two_steps, ranks=2, cluster=NETWORK).values
    model.zero_grad()
    model.loss(*text()).backward()
    assert all(float((g - model.norm.weight.grad).abs().max()) < BOUND for g in again)


def test_frozen_layers_below_trained_ones():
    frozen = GPTConfig(vocabulary=11, length=8, width=8, layers=2, heads=2)

    def freeze(model):
        for module in (model.tokens, model.positions, model.blocks[0]):
            module.requires_grad_(False)
        return model

    def program(comm, form, cut):
        model = freeze(ContextGPT(frozen, comm, form=form, cut=cut, dtype=F64))
        model.loss(*text()).backward()
        model.sum_gradients()
        return {name: p.grad for name, p in model.named_parameters()}

    model = freeze(GPT(frozen, dtype=F64))
    model.loss(*text()).backward()
    for form, cut in (("ring", "striped"), ("gather", "zigzag"), ("ulysses", "equal")):
        for got in fw.simulate(program, form, cut, ranks=2, cluster=NETWORK).values:
            for name, p in model.named_parameters():
                assert (got[name] is None) is (p.grad is None)
                assert p.grad is None or float((got[name] - p.grad).abs().max()) < BOUND


def test_what_is_said_of_calls_that_make_no_sense():
    ones = [torch.ones(1, 2, 4, 2) for _ in range(3)]
    for options, tensors, words in (
        ({"p": 0.5}, ones, "p is 0.5 without draw; give draw"),
        ({}, [ones[0], ones[1].bfloat16(), ones[2]], "k torch.bfloat16, v torch.float32; allowed: one dtype for all three"),
    ):
        with pytest.raises(fw.RankError, match=words):
            fw.simulate(lambda comm, o=options, x=tensors: FORMS["ring"](comm, *x, **o), ranks=2, cluster=NETWORK)
