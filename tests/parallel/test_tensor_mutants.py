"""The classic faults of tensor parallelism, planted one by one: each is caught, by the check that its row names, in its words.

Most of them leave something right: the output, the weights' gradients, the loss. So a mutant names what it leaves right, too.
"""

import pytest
import torch
import torch.nn.functional as F

import fourwalls as fw
from fourwalls.collectives import autograd, ring
from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.init import draw
from fourwalls.nn.layers import dropout
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor import Region, RowLinear
from fourwalls.parallel.tensor_dropout import Streams
from fourwalls.parallel.tensor_gpt import TensorGPT
from fourwalls.parallel.tensor_hints import explain, explain_ranks
from fourwalls.parallel.tensor_shards import global_norm, load_whole, whole_gradients
from fourwalls.parallel.tensor_vocabulary import VocabularyEmbedding, _VocabularyLoss

T, SEED = 4, 5
NETWORK = uniform(1e-6, 1e9)
CONFIG = GPTConfig(vocabulary=10, length=8, width=16, layers=1, heads=4, ff=16, tied=False, dropout=0.3, seed=3)
BIASES = ("blocks.0.attention.output.bias", "blocks.0.mlp.down.bias")


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocabulary, (2, 2, CONFIG.length), generator=g).unbind()


def start(config):
    model = GPT(config, dtype=torch.float64)
    return {n: p.data + draw(n, p.shape, seed=9, std=0.3) for n, p in model.named_parameters()}


def run_one(model, seen, tokens, targets):
    """(seen, gradients) of one step: what the first block gets and gives, the loss, and the gradient of what it gets."""
    x = model.embed(tokens)
    x.retain_grad()
    y = model.blocks[0](x)
    return x, y, model.logits(y)


def one_device(config):
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict(start(config))
    torch.manual_seed(SEED)
    tokens, targets = batch()
    x, y, logits = run_one(model, {}, tokens, targets)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    return {"block's output": y.detach(), "loss": loss.detach(), "input gradient": x.grad, "norm": norm}, grads


def on_ranks(comm, config, change):
    streams = Streams(comm, SEED, exact=True)
    region = SequenceRegion(comm) if change.kind == "sequence" else Region(comm)
    region = change.region(region) or region
    change.streams(streams)
    model = TensorGPT(config, comm, region=region, streams=streams, dtype=torch.float64)
    load_whole(model, start(config), comm)
    change.model(model)
    tokens, targets = batch()
    x, y, logits = run_one(model, {}, tokens, targets)
    _, real, _ = model.rows()
    losses = change.loss.apply(logits.flatten(0, 1), targets.flatten(), comm, model.rows()[0], real, -100, ring.all_reduce)
    losses.mean().backward()
    region.sum_gradients(model)
    norm = change.norm(model, comm)
    out = {
        "block's output": region.gather(y.detach()),
        "loss": losses.mean().detach(),
        "input gradient": region.gather(x.grad),
        "norm": norm,
    }
    return out, whole_gradients(model, comm)


class Right:
    """Nothing wrong. A mutant overrides one thing; `says` is what must be said, `right` what it leaves right."""

    kind, says, right = "whole", None, ()
    loss = _VocabularyLoss

    def region(self, region):
        return None

    def streams(self, streams):
        pass

    def model(self, model):
        pass

    def norm(self, model, comm):
        return global_norm(model, comm)


class RightSequence(Right):
    kind = "sequence"


# --- the bias of a product that is cut by rows ------------------------------------------------------------------------
def rows_of(model):
    return [m for m in model.modules() if isinstance(m, RowLinear)]


class BiasAddedTimesT(Right):  # trial c28
    says = "block's output differs"
    right = ()

    def model(self, model):
        for layer in rows_of(model):
            layer.forward = lambda x, layer=layer: layer.region.leave(F.linear(x, layer.weight, layer.bias))


class BiasDividedByT(Right):  # trial c29
    says = "blocks.0.mlp.down.bias is 4 times too small, and t is 4"
    right = ("block's output", "loss", "input gradient", "blocks.0.mlp.down.weight", "tokens.weight")

    def model(self, model):
        for layer in rows_of(model):
            layer.forward = lambda x, layer=layer: layer.region.leave(F.linear(x, layer.weight, layer.bias / T))


# --- the conjugate pairs ------------------------------------------------------------------------------------------------
class IdentityBackward(Right):
    """No all-reduce of the input's gradient: forward right, everything below the layer wrong, and differing between ranks."""

    says = "input gradient differs between ranks"
    right = ("block's output", "loss", "head.weight")

    def region(self, region):
        region.enter = lambda x, layers: [F.linear(x, m.weight, m.bias) for m in layers]


class AllReduceBothWays(Right):
    """The exit all-reduces in backward as well: t times, where it was whole."""

    says = "blocks.0.mlp.down.weight is 4 times too large, and t is 4"
    right = ("block's output", "loss", "head.weight", "norm.weight")

    def region(self, region):
        region.leave = lambda partial: autograd.all_reduce(region.comm, partial)


class LossOnEveryRank(Right):
    """Every rank's loss is counted: the sum over ranks of one number that all hold."""

    says = "head.weight is 4 times too large, and t is 4"
    right = ("block's output", "loss")

    class loss:
        @staticmethod
        def apply(*rest):
            losses = _VocabularyLoss.apply(*rest)
            return losses + (T - 1) * (losses - losses.detach())


# --- dropout ------------------------------------------------------------------------------------------------------------
class OneMaskOnShards(Right):
    """Each rank drops the places of the first shard in its own."""

    says = "block's output differs"

    def streams(self, streams):
        def first(dim):
            def mask(shape, p, device):
                whole = list(shape)
                whole[dim] *= T
                drawn = torch.empty(whole, dtype=torch.bool).bernoulli_(1 - p, generator=streams.shared)
                return drawn.narrow(dim, 0, shape[dim]).clone()

            return mask

        streams._part = first


class OneMaskOnShardsOfTheSequence(OneMaskOnShards):
    kind = "sequence"


class OtherMaskOnCopies(Right):
    """torch's default stream, which differs from rank to rank, on what all ranks hold."""

    says = "block's output differs between ranks"

    def model(self, model):
        model.blocks[0].drop = lambda x: dropout(x, CONFIG.dropout)


# --- sequence parallelism -----------------------------------------------------------------------------------------------
class UnsummedNorms(RightSequence):
    says = "blocks.0.norm1.weight differs between ranks"
    right = ("block's output", "loss", "input gradient", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "tokens.weight")

    def region(self, region):
        region.sum_gradients = lambda model: None


class GatherWithoutSum(RightSequence):
    """The entrance's backward takes this rank's slice of its own gradient, and forgets the others' parts."""

    says = "input gradient differs"
    right = ("block's output", "loss", "head.weight")

    def region(self, region):
        def enter(x, layers):
            whole = autograd.gather_from(region.comm, x, 1)
            return [F.linear(whole, m.weight, m.bias) for m in layers]

        region.enter = enter


class FirstSlice(torch.autograd.Function):
    """Gather, whose backward sums but then gives every rank the first slice."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.width = comm, x.shape[1]
        return autograd.gather_from(comm, x, 1)

    @staticmethod
    def backward(ctx, grad):
        return ring.all_reduce(ctx.comm, grad.contiguous())[:, : ctx.width].contiguous(), None


class GatherWithoutSlice(RightSequence):
    says = "input gradient differs"
    right = ("block's output", "loss", "head.weight")

    def region(self, region):
        region.enter = lambda x, layers: [F.linear(FirstSlice.apply(x, region.comm), m.weight, m.bias) for m in layers]


class StaleShard(RightSequence):
    """The gradient of the weights is taken with this rank's own tokens repeated, not with the gathered ones."""

    says = "blocks.0.mlp.up.weight differs"
    right = ("block's output", "loss")

    def region(self, region):
        def enter(x, layers):
            own = torch.cat([x.detach()] * T, 1)
            right = SequenceRegion.enter(region, x, [m for m in layers])
            wrong = [F.linear(own, m.weight) - F.linear(own, m.weight).detach() for m in layers]
            less = [F.linear(autograd.gather_from(region.comm, x.detach(), 1), m.weight) for m in layers]
            return [y + w - (z - z.detach()) for y, w, z in zip(right, wrong, less, strict=True)]

        region.enter = enter


# --- the vocabulary -----------------------------------------------------------------------------------------------------
class FillingCounts(Right):
    """Rows that stand for no token are summed into the denominator."""

    says = "loss differs"
    right = ("block's output",)

    class loss:
        @staticmethod
        def apply(logits, targets, comm, first, real, *rest):
            return _VocabularyLoss.apply(logits, targets, comm, first, logits.shape[-1], *rest)


class LocalMaximum(Right):
    """Each rank subtracts its own largest logit."""

    says = "loss differs"
    right = ("block's output",)

    class loss:
        @staticmethod
        def apply(logits, targets, *rest):
            return _VocabularyLoss.apply(logits - logits.detach().amax(-1, keepdim=True), targets, *rest)


class RowsOfOthers(Right):
    """A token that another rank owns is not wiped out."""

    says = "block's output differs"

    def model(self, model):
        table = model.tokens
        assert isinstance(table, VocabularyEmbedding)
        table.forward = lambda tokens: table.region.leave(F.embedding(tokens % table.weight.shape[0], table.weight))


class NormCountsCopies(Right):
    """Clipping counts what every rank holds t times."""

    says = "norm differs"
    right = ("block's output", "loss", "input gradient", "tokens.weight")

    def norm(self, model, comm):
        own = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        return ring.all_reduce(comm, own).sqrt()


MUTANTS = [m for m in list(globals().values()) if isinstance(m, type) and issubclass(m, Right) and m.says]


def outcome(change):
    """Everything that the checks say about a run, and the names that stand in it."""
    out, grads = one_device(CONFIG)
    rows = fw.simulate(on_ranks, CONFIG, change, ranks=T, cluster=NETWORK).values
    eps = torch.finfo(torch.float64).eps
    want = out | grads
    bound = {name: 8 * eps * 400 * max(float(w.abs().max()), 1e-2) for name, w in want.items()}
    biases = {name: value for name, value in start(CONFIG).items() if name in BIASES}
    said = explain_ranks([row[0] | row[1] for row in rows])
    return said + explain(rows[0][0] | rows[0][1], want, t=T, bound=bound, biases=biases)


@pytest.mark.parametrize("right", [Right, RightSequence])
def test_the_right_ones_pass(right):
    assert outcome(right()) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_mutant_is_caught_by_name(mutant):
    said = outcome(mutant())
    assert any(word.startswith(mutant.says) for word in said), said
    for name in mutant.right:
        assert not any(word.startswith(f"{name} ") for word in said), (name, said)


def linear_8_to_6(comm, fault):
    """Trials c28 and c29: Linear 8 to 6 on 4 ranks, cut by rows."""
    layer = RowLinear(comm, 8, 6, std=1.0, split_input=True, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.copy_(draw("bias", (6,), std=1.0))
    x = draw("x", (5, 8), std=1.0).requires_grad_()
    if fault is None:
        y = layer(x)
    else:
        bias = layer.bias if fault == "t times" else layer.bias / comm.size
        y = autograd.reduce_from(comm, F.linear(autograd.scatter_to(comm, x), layer.weight, bias))
    (y * draw("up", (5, 6), std=1.0)).sum().backward()
    return {"output": y.detach(), "bias gradient": layer.bias.grad, "input gradient": x.grad}


@pytest.mark.parametrize(
    "fault, wanted",
    [
        (None, []),
        ("t times", ["output is too large by 3 times the bias, and t is 4: added on every rank, before the sum"]),
        ("divided", ["bias gradient is 4 times too small, and t is 4"]),
    ],
)
def test_bias_of_a_row_linear(fault, wanted):
    weight, bias = draw("linear.weight", (6, 8), std=1.0), draw("bias", (6,), std=1.0).requires_grad_()
    x = draw("x", (5, 8), std=1.0).requires_grad_()
    y = F.linear(x, weight, bias)
    (y * draw("up", (5, 6), std=1.0)).sum().backward()
    want = {"output": y.detach(), "bias gradient": bias.grad, "input gradient": x.grad}
    for got in fw.simulate(linear_8_to_6, fault, ranks=4, cluster=NETWORK).values:
        said = explain(got, want, t=4, bound=1e-12, biases={"the bias": bias})
        assert len(said) == len(wanted) and all(s.startswith(w) for s, w in zip(said, wanted, strict=True)), said


def test_words_for_shapes_and_missing_tensors():
    a = torch.ones(2)
    assert explain({"x": a}, {"y": a}, t=2, bound=0.1) == ["x is on one side only", "y is on one side only"]
    assert "nothing here" in explain({"x": None}, {"x": a}, t=2, bound=0.1)[0]
    assert "shape (3,)" in explain({"x": torch.ones(3)}, {"x": a}, t=2, bound=0.1)[0]
    assert "differs at 1 of 2 places, first [1]" in explain({"x": torch.tensor([1, float("nan")])}, {"x": a}, t=2, bound=0.1)[0]
    assert explain({"x": None}, {"x": None}, t=2, bound=0.1) == []
