"""Plans of buffer reuse: proven, close to what is possible, and run."""

import random

import pytest
import torch

from fourwalls.memory.graph import record_graph
from fourwalls.memory.recompute import recompute_model
from fourwalls.memory.reuse import Arena, Buffer, buffers_of, clash, lower_bound, naive_bytes, place, replay
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.mlp import MLP

torch.set_num_threads(1)


def training_graph(config, how="none", batch=2):
    """(graph, results) of one step of a GPT: loss and gradients."""
    model = recompute_model(GPT(config), how, checks=False)
    tokens = torch.randint(0, config.vocabulary, (batch, config.length), generator=torch.Generator().manual_seed(0))
    results = []

    def step():
        loss = model.loss(tokens, tokens)
        loss.backward()
        results.extend([loss.detach(), *(p.grad for p in model.parameters())])
        return results

    return record_graph(step), results


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("sizes", [{"dropout": 0.1}, {"tied": False, "fused": True, "layers": 3}])
def test_a_training_step_in_one_arena(sizes, how):
    """At most 1.1 times the lower bound; proven; and run in the arena, where every result has the same bits."""
    graph, results = training_graph(GPTConfig(**({"width": 32, "length": 32} | sizes)), how)
    buffers = buffers_of(graph)
    arena = place(buffers)
    assert lower_bound(buffers) <= arena.bytes <= 1.1 * lower_bound(buffers)
    assert naive_bytes(buffers) > 2 * arena.bytes
    assert clash(buffers, arena) is None
    assert all(torch.equal(a, b) for a, b in zip(replay(graph, arena), results, strict=True))


def test_inference_needs_two_layers_at_a_time():
    """An MLP's forward: two hidden vectors alive at once, whatever the depth."""
    model, x = MLP((64,) * 9, activation="relu"), torch.ones(32, 64)
    with torch.no_grad():
        graph = record_graph(lambda: [model(x)])
    buffers = buffers_of(graph)
    assert place(buffers).bytes == lower_bound(buffers) == 2 * 32 * 64 * 4
    assert naive_bytes(buffers) == 15 * 32 * 64 * 4


def test_lives_by_hand():
    x = torch.ones(16)
    graph = record_graph(lambda: [(x * 2).exp().view(4, 4).sum(0) + 1])
    made = sorted(buffers_of(graph))
    assert [(b.bytes, b.born, b.last) for b in made] == [(64, 0, 1), (64, 1, 3), (16, 3, 4), (16, 4, 5)]
    names = [op.func.name().removeprefix("aten::").partition(".")[0] for op in graph.ops]
    assert names == ["mul", "exp", "view", "sum", "add"]
    assert lower_bound(made) == 128  # exp reads one buffer and makes another


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed):
    """The lower bound by counting at every moment; the proof by marking every byte at every moment."""
    rng = random.Random(seed)
    buffers = []
    for k in range(rng.randint(1, 25)):
        born = rng.randint(0, 30)
        buffers.append(Buffer(k, rng.randint(1, 900), born, born + rng.randint(0, 8)))
    arena = place(buffers)
    up = lambda n: -(-n // 64) * 64  # noqa: E731
    assert lower_bound(buffers) == max(sum(up(b.bytes) for b in buffers if b.born <= t <= b.last) for t in range(40))
    assert lower_bound(buffers) <= arena.bytes <= naive_bytes(buffers) and clash(buffers, arena) is None
    assert marks_twice(buffers, arena) is False
    if len(buffers) > 1:
        broken = dict(arena.offsets)
        mover, other = rng.sample(buffers, 2)
        broken[mover.number] = arena.offsets[other.number]
        moved = Arena(broken, arena.bytes + 1024)
        assert (clash(buffers, moved) is None) == (not marks_twice(buffers, moved))


def marks_twice(buffers, arena):
    for t in range(40):
        owner = {}
        for b in buffers:
            if b.born <= t <= b.last:
                for byte in range(arena.offsets[b.number], arena.offsets[b.number] + b.bytes):
                    if owner.setdefault(byte, b.number) != b.number:
                        return True
    return False


@pytest.mark.parametrize("fault", ["dies too early", "is born too late", "one byte too far", "outside"])
def test_a_wrong_plan_is_noticed(fault):
    """By the proof; and a plan made from wrong lives gives other numbers when it is run."""
    graph, results = training_graph(GPTConfig(width=16, length=16, layers=2))
    buffers = buffers_of(graph)
    if fault in ("dies too early", "is born too late"):
        early = fault == "dies too early"
        wrong = [b._replace(last=max(b.born, b.last - 1)) if early else b._replace(born=min(b.last, b.born + 1)) for b in buffers]
        arena = place(wrong)
        assert arena.bytes <= lower_bound(buffers)
        assert not all(torch.equal(a, b) for a, b in zip(replay(graph, arena), results, strict=True))
    else:
        arena = place(buffers)
        if fault == "outside":
            arena = Arena(arena.offsets, arena.bytes - 64)
        else:  # a small buffer begins 64 bytes before a large one ends
            big = max(buffers, key=lambda b: b.bytes)
            other = next(b for b in buffers if b is not big and b.born <= big.last and big.born <= b.last)
            arena = Arena(arena.offsets | {other.number: arena.offsets[big.number] + big.bytes - 1}, 2 * arena.bytes)
    assert clash(buffers, arena) is not None
