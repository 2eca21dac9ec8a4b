"""The two ends of the model on t ranks: a shared token table, and a loss for which no rank ever holds all logits."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import GPTConfig
from fourwalls.nn.init import draw, initialise
from fourwalls.nn.layers import Embedding, cross_entropy
from fourwalls.parallel.tensor_gpt import TensorGPT
from fourwalls.parallel.tensor_hints import explain
from fourwalls.parallel.tensor_shards import Cut, join, whole_gradients
from fourwalls.parallel.tensor_vocabulary import VocabularyEmbedding, vocabulary_cross_entropy, vocabulary_rows

NETWORK = uniform(1e-6, 1e9)
F64 = {"dtype": torch.float64}
SMALL = GPTConfig(vocabulary=13, length=8, width=16, layers=2, heads=8, seed=3)
EPS = torch.finfo(torch.float64).eps


def bound_of(want, terms=200):
    """8 eps of the tensor's size for each of `terms` roundings; where all cancels (a key's bias), of its neighbours' size."""
    size = {name: float(w.detach().abs().max()) for name, w in want.items()}
    return {name: 8 * EPS * terms * max(size[name], 0.02 * max(size.values()), 1e-2) for name in want}


class Largest(TorchDispatchMode):
    """The most elements that any tensor of this rank had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def loss_on_ranks(comm, whole, targets, reduction, dtype):
    vocabulary = whole.shape[-1]
    first, _, width = vocabulary_rows(vocabulary, comm.rank, comm.size)
    columns = torch.arange(first, first + width).clamp(max=vocabulary - 1)
    logits = whole.index_select(-1, columns).to(dtype).requires_grad_()  # the filling holds numbers, too
    with Largest() as seen:
        loss = vocabulary_cross_entropy(comm, logits, targets, vocabulary=vocabulary, reduction=reduction)
        (loss * draw("up", loss.shape, std=1.0).to(loss.dtype)).sum().backward()
    return {"loss": loss.detach(), "gradient": join(comm, logits.grad, Cut(2, vocabulary))}, seen.most, logits.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("vocabulary, t", [(10, 1), (10, 4), (10, 8), (16, 8), (1001, 2), (3, 4)])
def test_loss_over_a_shared_vocabulary(vocabulary, t, reduction):
    """Large logits that overflow exp; targets that do not count; a rank that holds nothing but filling."""
    whole = draw("logits", (2, 7, vocabulary), std=400.0)
    targets = torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(1))
    targets[0, 3] = targets[1, 6] = -100
    logits = whole.clone().requires_grad_()
    loss = cross_entropy(logits, targets, reduction=reduction)
    (loss * draw("up", loss.shape, std=1.0)).sum().backward()
    want = {"loss": loss.detach(), "gradient": logits.grad}
    for got, most, grad in fw.simulate(loss_on_ranks, whole, targets, reduction, torch.float64, ranks=t, cluster=NETWORK).values:
        assert explain(got, want, t=t, bound=bound_of(want, 4 * vocabulary)) == []
        assert t == 1 or most < whole.numel()  # no rank ever holds all logits
        assert torch.isfinite(grad).all()


def test_loss_in_16_bits_is_taken_in_32():
    whole, targets = draw("logits", (2, 7, 16), std=4.0), torch.zeros(2, 7, dtype=torch.int64)
    for got, _, grad in fw.simulate(loss_on_ranks, whole, targets, "mean", torch.bfloat16, ranks=2, cluster=NETWORK).values:
        assert got["loss"].dtype == torch.float32 and grad.dtype == torch.bfloat16
        want = F.cross_entropy(whole.bfloat16().float().flatten(0, 1), targets.flatten())
        assert abs(float(got["loss"] - want)) < 1e-5


def whole_run(comm, config):
    tokens = torch.arange(2 * config.length).remainder(config.vocabulary).view(2, -1)
    model = TensorGPT(config, comm)
    with Largest() as seen:
        model.loss(tokens, tokens).backward()
    return seen.most


def test_no_rank_ever_holds_all_logits():
    config = dataclasses.replace(SMALL, vocabulary=4001, layers=1)
    for most in fw.simulate(whole_run, config, ranks=4, cluster=NETWORK).values:
        assert most == max(2 * 8 * 1001, 1001 * 16) < 2 * 8 * 4001  # its share of logits, and of the table


def table_on_ranks(comm, tokens, rows):
    table = VocabularyEmbedding(comm, rows, 6, std=1.0, **F64)
    y = table(tokens)
    (y * draw("up", y.shape, std=1.0)).sum().backward()
    return {"output": y.detach()} | whole_gradients(table, comm)


@pytest.mark.parametrize("rows, t", [(10, 1), (10, 4), (3, 4), (16, 8)])
def test_a_shared_table(rows, t):
    tokens = torch.tensor([[0, 1, rows - 1], [1, 1, 2]])
    whole = initialise(Embedding(rows, 6, std=1.0, **F64))
    whole.init_parameters()
    y = whole(tokens)
    (y * draw("up", y.shape, std=1.0)).sum().backward()
    want = {"output": y.detach(), "weight": whole.weight.grad}
    for got in fw.simulate(table_on_ranks, tokens, rows, ranks=t, cluster=NETWORK).values:
        assert explain(got, want, t=t, bound=bound_of(want)) == []


@pytest.mark.parametrize("token, target, hint", [(13, 0, "token 13; with vocabulary 13"), (0, -1, "target -1;.*or -100")])
def test_a_token_that_no_rank_has(token, target, hint):
    def program(comm):
        TensorGPT(SMALL, comm).loss(torch.tensor([[token]]), torch.tensor([[target]]))

    with pytest.raises(fw.RankError, match=hint):
        fw.simulate(program, ranks=2, cluster=NETWORK)
