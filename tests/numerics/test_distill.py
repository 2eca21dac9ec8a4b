"""Distillation: the loss and its gradient against float64 and finite differences, wrong twins by name, students of teachers."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.text import batch
from fourwalls.numerics.distill import (
    Distillation,
    HiddenMatch,
    check_student,
    chosen_layers,
    distill_loss,
    hidden_states,
    soft_loss,
    student_of,
)

torch.set_num_threads(1)
T, ROWS, V = 3.0, 6, 11


def floats(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def oracle(z, t, temperature=T):
    """T^2 KL(p || q), sum over the vocabulary, mean over rows, by the definition and loops in float64."""
    total = 0.0
    for ours, theirs in zip(z.double().reshape(-1, z.shape[-1]), t.double().reshape(-1, t.shape[-1]), strict=True):
        p, q = (torch.exp(x / temperature) / torch.exp(x / temperature).sum() for x in (theirs, ours))
        total += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / (z.numel() // z.shape[-1])


def slopes(loss, z, h=1e-6):
    """dL/dz by central differences."""
    found = torch.zeros_like(z)
    for k in range(z.numel()):
        ahead, behind = z.clone(), z.clone()
        ahead.view(-1)[k] += h
        behind.view(-1)[k] -= h
        found.view(-1)[k] = (float(loss(ahead)) - float(loss(behind))) / (2 * h)
    return found


TWINS = {
    "none": lambda z, t: soft_loss(z, t, temperature=T),
    "sum for mean over rows": lambda z, t: soft_loss(z, t, temperature=T) * ROWS,
    "mean for sum over the vocabulary": lambda z, t: soft_loss(z, t, temperature=T) / V,  # F.kl_div's "mean"
    "T squared forgotten": lambda z, t: soft_loss(z, t, temperature=T) / T**2,
    "T for T squared": lambda z, t: soft_loss(z, t, temperature=T) / T,
    "student and teacher exchanged": lambda z, t: soft_loss(t, z, temperature=T),
    "temperature of the student alone": lambda z, t: (
        T**2 * F.kl_div((z / T).log_softmax(-1), t.softmax(-1), reduction="batchmean")
    ),
    "softmax over rows": lambda z, t: soft_loss(z.t(), t.t(), temperature=T),
    "one value off by ten times the bound": lambda z, t: soft_loss(z, t, temperature=T) + 1e-11,
}  # fmt: skip


def wrong(loss):
    """Whether a twin's value is another than the oracle's; about 100 float64 operations on numbers near 10 err below 1e-12."""
    return any(abs(float(loss(z, t)) - oracle(z, t)) > 1e-12 for z, t in ((floats(ROWS, V), floats(ROWS, V, seed=1)),))


@pytest.mark.parametrize("name", TWINS)
def test_the_loss_is_the_definitions_and_each_wrong_twin_is_caught(name):
    """Row "mean for sum in distillation" of the issue, both ways round, among others."""
    assert wrong(TWINS[name]) is (name != "none")


def test_the_gradient_is_that_of_finite_differences_and_of_the_formula():
    z, t = floats(ROWS, V).requires_grad_(), floats(ROWS, V, seed=1).requires_grad_()
    targets = torch.arange(ROWS) % V
    for soft in (0.0, 0.3, 1.0):
        z.grad = None
        distill_loss(z, t, targets, temperature=T, soft=soft).backward()
        expected = slopes(lambda x, s=soft: distill_loss(x, t, targets, temperature=T, soft=s), z.detach())
        assert (z.grad - expected).abs().max() < 1e-8  # h^2 and rounding / h, for numbers of order 1
        assert t.grad is None  # the teacher is not taught
    formula = T * ((z / T).softmax(-1) - (t / T).softmax(-1)) / ROWS  # soft is 1.0 here
    assert (z.grad - formula).abs().max() < 1e-14
    assert (z.grad * ROWS - formula).abs().max() > 1e-3  # the mutant "sum for mean" would be seen


def test_with_t_squared_the_temperature_does_not_change_the_size_of_the_gradient():
    sizes, without = [], []
    for temperature in (20.0, 40.0, 80.0):
        z = floats(ROWS, V).requires_grad_()
        soft_loss(z, floats(ROWS, V, seed=1), temperature=temperature).backward()
        sizes.append(float(z.grad.norm()))
        without.append(float(z.grad.norm()) / temperature**2)
    assert max(sizes) / min(sizes) < 1.05 and max(without) / min(without) > 14


def test_sixteen_bits_extreme_logits_and_equal_opinions():
    z, t = floats(4, V, dtype=torch.float32), floats(4, V, seed=1, dtype=torch.float32)
    half = soft_loss(z.bfloat16(), t.bfloat16())
    assert half.dtype == torch.float32 and abs(float(half) - oracle(z.bfloat16(), t.bfloat16(), 2.0)) < 1e-4
    assert float(soft_loss(z, z)) == 0.0
    sure = torch.zeros(1, V).index_fill_(1, torch.tensor([3]), 3e4)
    assert torch.isfinite(soft_loss(z[:1], sure)) and torch.isfinite(soft_loss(sure, z[:1]))
    assert torch.equal(soft_loss(z.view(2, 2, V), t.view(2, 2, V)), soft_loss(z, t))


def test_what_is_refused():
    z = floats(2, V)
    teacher = GPT(GPTConfig(layers=3, width=8, heads=2, length=8, vocabulary=16))
    other = GPT(GPTConfig(layers=1, width=8, heads=2, length=8, vocabulary=20))
    for call, says in (
        (lambda: soft_loss(z, floats(2, V + 1)), "one vocabulary"),
        (lambda: soft_loss(z[:0], z[:0]), "hold no row"),
        (lambda: soft_loss(z, z, temperature=0.0), "temperature is 0.0"),
        (lambda: soft_loss(z, z, temperature=float("nan")), "temperature is nan"),
        (lambda: distill_loss(z, z, torch.zeros(2, dtype=torch.int64), soft=1.1), "soft is 1.1"),
        (lambda: distill_loss(z, z, torch.zeros(3, dtype=torch.int64)), "targets"),
        (lambda: student_of(teacher, layers=4), "student of 4 layers from a teacher of 3; allowed: 1 to 3"),
        (lambda: student_of(teacher, which=[0, 3]), "different ones of 0 to 2"),
        (lambda: student_of(teacher, which=[1, 1]), "different ones"),
        (lambda: student_of(teacher), "give either"),
        (lambda: check_student(other, teacher), "vocabulary is 20, the teacher's 16"),
        (lambda: HiddenMatch(8, 8, []), "no pair of layers"),
        (lambda: HiddenMatch(8, 8, [(0, 3)])([z], [z]), "the teacher 1"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_a_student_larger_than_its_teacher_is_warned_of():
    small, large = (GPT(GPTConfig(layers=k, width=8, heads=2, length=8, vocabulary=16)) for k in (1, 2))
    with pytest.warns(RuntimeWarning, match="it is larger, so distillation saves nothing"):
        Distillation(large, small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Distillation(small, large).student is small


def test_a_student_takes_evenly_spread_layers_and_shares_nothing():
    assert [chosen_layers(6, k) for k in (1, 2, 3, 6)] == [[0], [0, 5], [0, 2, 5], list(range(6))]
    for options in ({}, {"rotary": True, "tied": False, "kv_heads": 1, "bias": False}):
        teacher = GPT(GPTConfig(layers=3, width=8, heads=2, length=8, vocabulary=16, **options))
        tokens = torch.arange(16).view(2, 8)
        assert torch.equal(student_of(teacher, layers=3)(tokens), teacher(tokens))
        student = student_of(teacher, layers=2)
        assert student.config.layers == 2 and torch.equal(student.blocks[1].mlp.up.weight, teacher.blocks[2].mlp.up.weight)
        assert sum(p.numel() for p in student.parameters()) == student.config.shape().parameter_count
        before = [p.clone() for p in teacher.parameters()]
        student.loss(tokens, tokens).backward()
        with torch.no_grad():
            for p in student.parameters():
                p -= p.grad
        assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, teacher.parameters(), strict=True))


def test_hidden_states_are_those_of_the_model_and_matching_is_a_mean():
    model = GPT(GPTConfig(layers=2, width=8, heads=2, length=8, vocabulary=16), dtype=torch.float64)
    tokens = torch.arange(16).view(2, 8)
    states = hidden_states(model, tokens)
    assert len(states) == 2 and torch.equal(model.logits(states[-1]), model(tokens))
    wide = [floats(2, 8, 12, seed=k) for k in range(3)]
    match = HiddenMatch(8, 12, [(0, 0), (1, 2)], dtype=torch.float64)
    first, second = match.projections
    expected = [
        ((states[i] @ layer.weight.t() - wide[j]) ** 2).sum() / (2 * 8 * 12)
        for layer, (i, j) in zip((first, second), match.pairs, strict=True)
    ]
    assert torch.allclose(match(states, wide), sum(expected) / 2, rtol=1e-14)
    match(states, wide).backward()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in match.projections)
    assert HiddenMatch(8, 8, [(0, 0)], dtype=torch.float64)(states, states).item() == 0.0  # the identity, to begin with


def test_one_step_follows_student_and_projections_and_leaves_the_teacher_alone():
    teacher = GPT(GPTConfig(layers=3, width=16, heads=2, length=8, vocabulary=256, dropout=0.3))
    student = GPT(GPTConfig(layers=1, width=8, heads=2, length=8, vocabulary=256))
    both = Distillation(student, teacher, match=HiddenMatch(8, 16, [(0, 2)]), hidden=0.5)
    x, y = batch(0, 0, batch=4, length=8)
    loss = both.loss(x, y)
    assert torch.equal(loss, both.loss(x, y))  # the teacher's dropout is off
    parts = distill_loss(student(x), teacher(x), y) + 0.5 * both.match(hidden_states(student, x), hidden_states(teacher, x))
    assert torch.allclose(loss, parts, rtol=1e-6)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters()) and all(p.grad is not None for p in both.parameters())
    assert len(both.parameters()) == len(list(student.parameters())) + 1
