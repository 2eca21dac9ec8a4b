"""Layers that ranks share: values and all gradients, shards, dropout's streams, the vocabulary, and what is refused."""

import dataclasses
import math

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.nn.attention import Attention
from fourwalls.nn.gpt import GPT, FeedForward, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.nn.layers import Linear
from fourwalls.nn.optim import global_norm as norm_one_device
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor import ColumnLinear, Region, RowLinear, TensorFeedForward
from fourwalls.parallel.tensor_attention import TensorAttention, check_attention, legal_sizes
from fourwalls.parallel.tensor_dropout import Streams
from fourwalls.parallel.tensor_gpt import TensorGPT, check_tensor_parallel
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.tensor_shards import (
    Cut,
    clip_,
    cuts_of,
    global_norm,
    join,
    load_whole,
    shard,
    whole_gradients,
    whole_state,
)
from fourwalls.parallel.tensor_vocabulary import vocabulary_cross_entropy

NETWORK = uniform(1e-6, 1e9)
F64 = {"dtype": torch.float64}
SMALL = GPTConfig(vocabulary=13, length=8, width=16, layers=2, heads=8, seed=3)
EPS = torch.finfo(torch.float64).eps


def bound_of(want, terms=200):
    """8 eps of the tensor's size for each of `terms` roundings; where all cancels (a key's bias), of its neighbours' size."""
    size = {name: float(w.detach().abs().max()) for name, w in want.items()}
    return {name: 8 * EPS * terms * max(size[name], 0.02 * max(size.values()), 1e-2) for name in want}


LAYERS = {
    "column": (lambda: Linear(12, 16, **F64), lambda comm: ColumnLinear(comm, 12, 16, gather_output=True, **F64)),
    "row": (lambda: Linear(16, 12, **F64), lambda comm: RowLinear(comm, 16, 12, split_input=True, **F64)),
    "column, no bias": (
        lambda: Linear(12, 8, bias=False, **F64),
        lambda comm: ColumnLinear(comm, 12, 8, bias=False, gather_output=True, **F64),
    ),
    "mlp": (lambda: FeedForward(12, 24, **F64), lambda comm: TensorFeedForward(comm, 12, 24, **F64)),
    "attention": (
        lambda: Attention(16, 8, kv_heads=8, rotary=True, **F64),
        lambda comm: TensorAttention(comm, 16, 8, kv_heads=8, rotary=True, **F64),
    ),
    "fused attention": (
        lambda: Attention(16, 8, kv_heads=8, fused=True, **F64),
        lambda comm: TensorAttention(comm, 16, 8, kv_heads=8, fused=True, **F64),
    ),
}


def input_of(name, b, s):
    width = {"row": 16, "attention": 16, "fused attention": 16}.get(name, 12)
    return draw("x", (b, s, width), std=1.0).requires_grad_()


def weights_of(model):
    return {n: p.data + draw(n, p.shape, seed=9, std=0.5) for n, p in model.named_parameters()}


def layer_on_ranks(comm, name, state, b, s):
    layer = LAYERS[name][1](comm)
    load_whole(layer, state, comm)
    x = input_of(name, b, s)
    y = layer(x)
    (y * draw("up", y.shape, std=1.0)).sum().backward()
    return {"output": y.detach(), "input gradient": x.grad} | whole_gradients(layer, comm)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_whole_one(name, t):
    """Also for a batch of one token."""
    for b, s in ((2, 5), (1, 1)):
        whole = LAYERS[name][0]()
        state = weights_of(whole)
        whole.load_state_dict(state)
        x = input_of(name, b, s)
        y = whole(x)
        (y * draw("up", y.shape, std=1.0)).sum().backward()
        want = {"output": y.detach(), "input gradient": x.grad} | {n: p.grad for n, p in whole.named_parameters()}
        runs = fw.simulate(layer_on_ranks, name, state, b, s, ranks=t, cluster=NETWORK).values
        assert explain_ranks(runs) == []
        assert explain(runs[0], want, t=t, bound=bound_of(want)) == []


# --- shards -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, t", [(12, 1), (12, 4), (10, 4), (5, 4), (1, 4), (50257, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_cut_and_join(size, t, dim):
    """Also with fewer rows than ranks (trial c34): the last shards are all filling."""
    whole = torch.arange(size * 3.0).view((size, 3) if dim == 0 else (3, size)) + 1
    cut = Cut(dim, size)
    parts = [shard(whole, cut, r, t) for r in range(t)]
    assert all(part.shape[dim] == -(-size // t) for part in parts)
    assert torch.equal(torch.cat(parts, dim).narrow(dim, 0, size), whole)
    assert float(torch.cat(parts, dim).narrow(dim, size, t * -(-size // t) - size).abs().sum()) == 0
    if size < 100:
        for joined in fw.simulate(lambda comm: join(comm, parts[comm.rank], cut), ranks=t, cluster=NETWORK).values:
            assert torch.equal(joined, whole)


def start_on_ranks(comm, config):
    return whole_state(TensorGPT(config, comm), comm), {n: p.numel() for n, p in TensorGPT(config, comm).named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_start_is_that_of_one_device(t, tied):
    """Trial c25, bit by bit; and trial i02: what a rank holds is the formula's, norms and biases after a sum not divided by t."""
    config = dataclasses.replace(SMALL, tied=tied, vocabulary=16)
    model = GPT(config)
    for state, counts in fw.simulate(start_on_ranks, config, ranks=t, cluster=NETWORK).values:
        assert list(state) == [n for n, _ in model.named_parameters()]
        assert all(torch.equal(state[n], p) for n, p in model.named_parameters())
        assert sum(counts.values()) == config.shape().rank_parameters(t).total
        assert counts["blocks.0.norm1.weight"] == 16 and counts["blocks.0.mlp.down.bias"] == 16
        assert counts["blocks.0.mlp.up.weight"] == 64 * 16 // t


def bad_load(comm, change):
    model = TensorGPT(SMALL, comm)
    state = {n: p.detach() for n, p in GPT(SMALL).named_parameters()}
    change(state)
    load_whole(model, state, comm)


@pytest.mark.parametrize(
    "change, hint",
    [
        (lambda s: s.pop("tokens.weight"), "no tensor for tokens.weight"),
        (lambda s: s.update({"head.weight": torch.zeros(13, 16)}), "no place for head.weight .*tied"),
        (
            lambda s: s.update({"tokens.weight": torch.zeros(14, 16)}),
            r"\(14, 16\) in the state; the whole parameter is \(13, 16\)",
        ),
    ],
)
def test_a_state_that_does_not_fit(change, hint):
    """Trial c23: nothing stays at its random start in silence."""
    with pytest.raises(fw.RankError, match=hint):
        fw.simulate(bad_load, change, ranks=2, cluster=NETWORK)


def norms_on_ranks(comm, gradients):
    model = TensorGPT(SMALL, comm, **F64)
    cuts = cuts_of(model)
    for name, p in model.named_parameters():
        p.grad = shard(gradients[name], cuts[name], comm.rank, comm.size)
    norms = global_norm(model, comm), global_norm(model, comm, order=math.inf)
    before = clip_(model, comm, 0.3)
    return norms, before, whole_gradients(model, comm)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_clipping_counts_each_parameter_once(t):
    gradients = {n: draw(n, p.shape, seed=4, std=1.0) for n, p in GPT(SMALL).named_parameters()}
    norm = norm_one_device(gradients.values())
    largest = max(g.abs().max() for g in gradients.values())
    for (two, most), before, clipped in fw.simulate(norms_on_ranks, gradients, ranks=t, cluster=NETWORK).values:
        assert float(two) == pytest.approx(float(norm), rel=1e-12) and before == two
        assert most == largest
        assert all(torch.allclose(clipped[n], g * 0.3 / (norm + 1e-6), rtol=1e-12) for n, g in gradients.items())


@pytest.mark.parametrize("largest", [-1.0, math.nan])
def test_a_norm_to_clip_to_is_a_number_of_at_least_0(largest):
    with pytest.raises(fw.RankError, match="the largest norm is a number of at least 0"):
        fw.simulate(lambda comm: clip_(ColumnLinear(comm, 1, 2), comm, largest), ranks=2, cluster=NETWORK)


def two_shards(comm):
    """Trial c31: rank norms 3 and 4."""
    layer = ColumnLinear(comm, 1, 2, bias=False)
    layer.weight.grad = torch.full((1, 1), 3.0 + comm.rank)
    return float(global_norm(layer, comm)), float(global_norm(layer, comm, order=math.inf))


def test_norms_of_three_and_four():
    assert fw.simulate(two_shards, ranks=2, cluster=NETWORK).values == [(5.0, 4.0)] * 2
    with pytest.raises(fw.RankError, match="allowed: 2, or math.inf"):
        fw.simulate(lambda comm: global_norm(ColumnLinear(comm, 1, 2), comm, order=1), ranks=2, cluster=NETWORK)


# --- dropout ------------------------------------------------------------------------------------------------------------
def masks(comm, exact):
    streams = Streams(comm, 7, exact=exact)
    ones = torch.ones(4, 2 * comm.size, 50)
    copy = streams.drop(ones, 0.5)
    part = streams.drop(ones[:, :2], 0.5, dim=1)
    return copy, part, streams.drop(ones, 0.5), streams.drop(ones, 0.5, training=False)


@pytest.mark.parametrize("exact", [False, True])
def test_same_mask_on_copies_and_different_ones_on_shards(exact):
    runs = fw.simulate(masks, exact, ranks=4, cluster=NETWORK).values
    for copy, part, later, off in runs:
        assert torch.equal(copy, runs[0][0]) and torch.equal(later, runs[0][2]) and not torch.equal(copy, later)
        assert torch.equal(off, torch.ones_like(off))
        assert 0.3 < float((part != 0).float().mean()) < 0.7
    for a in range(4):
        for b in range(a):
            alike = float((runs[a][1] == runs[b][1]).float().mean())
            assert 0.3 < alike < 0.7  # independent masks agree at half of the places
    if exact:  # the bits of one device
        torch.manual_seed(7)
        whole = torch.empty(4, 8, 50, dtype=torch.bool)
        first, second = whole.bernoulli_(0.5).clone(), whole.bernoulli_(0.5)
        assert torch.equal(runs[0][0] != 0, first) and torch.equal(torch.cat([r[1] for r in runs], 1) != 0, second)


def own_streams(comm, t):
    """Dropout from each rank's own stream in a whole model: ranks agree on all that they share."""
    config = dataclasses.replace(SMALL, dropout=0.3)
    model = TensorGPT(config, comm, streams=Streams(comm, 1), **F64)
    tokens = torch.arange(16).remainder(13).view(2, 8)
    loss = model.loss(tokens, tokens)
    loss.backward()
    whole = whole_gradients(model, comm)
    return {"loss": loss.detach(), **whole}


def test_a_model_with_its_own_streams_stays_together():
    runs = fw.simulate(own_streams, 4, ranks=4, cluster=NETWORK).values
    assert explain_ranks(runs) == []
    again = fw.simulate(own_streams, 4, ranks=4, cluster=NETWORK).values
    assert torch.equal(runs[0]["loss"], again[0]["loss"])


# --- refusals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "heads, kv, t, legal",
    [
        (12, 12, 8, "12 heads cannot be shared by t 8; legal t: 1, 2, 3, 4, 6, 12"),
        (28, 4, 8, "28 heads with 4 key and value heads cannot be shared by t 8; legal t: 1, 2, 4"),
        (28, 4, 3, "legal t: 1, 2, 4"),
        (4, 4, 8, r"legal t: 1, 2, 4\. For more ranks cut another axis: p \(layers\), c \(the sequence\) or d"),
    ],
)
def test_heads_that_do_not_divide(heads, kv, t, legal):
    """Trial c32: the valid sizes and the other axes are named, before ranks start."""
    with pytest.raises(ValueError, match=legal):
        check_attention(heads, kv, t)
    width = heads * 2
    config = GPTConfig(width=width, heads=heads, kv_heads=kv, ff=64 * t)
    with pytest.raises(ValueError, match=legal):
        check_tensor_parallel(config, t)
    with pytest.raises(fw.RankError, match=legal):
        fw.simulate(lambda comm: TensorAttention(comm, width, heads, kv_heads=kv), ranks=t, cluster=NETWORK)


def test_other_sizes_that_do_not_divide():
    config = dataclasses.replace(SMALL, ff=20)
    with pytest.raises(ValueError, match="ff 20 cannot be shared by t 8; nearest legal t: 5 or 10 .or ff 16 or 24."):
        check_tensor_parallel(config, 8)
    with pytest.raises(ValueError, match="length 6 cannot be shared by t 4.*length 4 or 8"):
        check_tensor_parallel(SMALL, 4, sequence=True, length=6)
    check_tensor_parallel(SMALL, 8, sequence=True)
    for t in (0, True, 2.0):
        with pytest.raises(ValueError, match="at least 1"):
            check_tensor_parallel(SMALL, t)
    with pytest.raises(ValueError, match="fused, or dropout"):
        check_tensor_parallel(dataclasses.replace(SMALL, fused=True, dropout=0.1), 2)
    for make, hint in (
        (lambda comm: ColumnLinear(comm, 4, 5), "outputs 5 cannot be shared by t 2"),
        (lambda comm: RowLinear(comm, 5, 4), "inputs 5 cannot be shared by t 2"),
        (lambda comm: TensorFeedForward(comm, 4, 5), "ff 5 cannot be shared by t 2"),
        (lambda comm: TensorGPT(SMALL, comm)(torch.zeros(1, 9, dtype=torch.int64)), "length at most 8"),
        (
            lambda comm: vocabulary_cross_entropy(comm, torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64), vocabulary=10),
            r"allowed: \(1, 5\)",
        ),
    ):
        with pytest.raises(fw.RankError, match=hint):
            fw.simulate(make, ranks=2, cluster=NETWORK)
    assert legal_sizes(12, 8) == [1, 2, 4]


@pytest.mark.parametrize("kind", [Region, SequenceRegion])
def test_a_batch_of_one_token(kind):
    """One token: tensor parallelism holds it whole; a sequence of one cannot be cut, and is refused with the way out."""

    def program(comm):
        model = TensorGPT(SMALL, comm, region=kind(comm), **F64)
        loss = model.loss(torch.tensor([[5]]), torch.tensor([[7]]))
        loss.backward()
        return loss.detach()

    if kind is SequenceRegion:
        with pytest.raises(fw.RankError, match="a sequence of 1 cannot be shared by t 4; nearest legal length: 4 .or tensor"):
            fw.simulate(program, ranks=4, cluster=NETWORK)
        return
    want = GPT(SMALL, **F64).loss(torch.tensor([[5]]), torch.tensor([[7]])).detach()
    assert all(abs(float(got - want)) < 1e-12 for got in fw.simulate(program, ranks=4, cluster=NETWORK).values)


# --- communication, counted in the Trace ------------------------------------------------------------------------------
def counted(trace, rank, t):
    """(reduce-scatters, all-gathers) of a rank by the ring, where an all-reduce is one of each: only the first adds."""
    adds = sum(1 for e in trace.where(rank=rank, kind="reduce"))
    return adds / (t - 1), (trace.messages_sent(rank) - adds) / (t - 1)


def one_layer(comm, config, kind, part):
    """A step through one block; `part` "forward" leaves the backward out."""
    from fourwalls.parallel.tensor_gpt import TensorBlock

    regions = {"whole": Region, "again": SequenceRegion, "keep": lambda comm: SequenceRegion(comm, keep=True)}
    region = regions[kind](comm)
    block = TensorBlock(config, comm, region=region)
    x = draw("x", (2, config.length, config.width), std=1.0).float()
    x = region.own(x, 1).clone().requires_grad_()
    y = block(x)
    if part == "both":
        y.sum().backward()


EXPECTED = {  # (all-reduces, further all-gathers, further reduce-scatters) forward; and of the whole step
    "whole": ((2, 0, 0), (4, 0, 0)),
    "again": ((0, 2, 2), (0, 6, 4)),
    "keep": ((0, 2, 2), (0, 4, 4)),
}


@pytest.mark.parametrize("t", [2, 4])
def test_collectives_of_a_layer_on_real_ranks(t):
    """4 all-reduces; 6 all-gathers and 4 reduce-scatters, 1.25 times the bytes; 4 and 4, as many bytes. Trial of the claim."""
    config = dataclasses.replace(SMALL, dropout=0.1)
    tensor_bytes = 2 * config.length * config.width * 4
    with fw.pool(ranks=t) as ranks:
        for kind, counts in EXPECTED.items():
            for part, (reduces, gathers, scatters) in zip(("forward", "both"), counts, strict=True):
                trace = ranks.run(one_layer, config, kind, part, stream=False).trace
                pieces = 2 * reduces + gathers + scatters
                for r in range(t):
                    assert counted(trace, r, t) == (reduces + scatters, reduces + gathers), (kind, part)
                    assert trace.bytes_sent(r) == pieces * tensor_bytes * (t - 1) // t
                if part == "both":
                    assert pieces / 8 == {"whole": 1, "again": 1.25, "keep": 1}[kind]


def my_all_reduce(comm, x):
    my_all_reduce.calls = getattr(my_all_reduce, "calls", 0) + 1
    return ring.all_reduce_blocking(comm, x)


def test_the_all_reduce_can_be_your_own():
    def program(comm):
        model = TensorGPT(SMALL, comm, region=Region(comm, all_reduce=my_all_reduce))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        model.loss(tokens, tokens).backward()

    fw.simulate(program, ranks=2, cluster=NETWORK)
    # 2 layers of 4, the table's exit forward, the head's entrance backward; on each of 2 ranks
    assert my_all_reduce.calls == 2 * (2 * 4 + 1 + 1)
