"""The best cuts are the best of all cuts, memory and links count, and a GPT with a heavy head is cut otherwise than equally."""

import itertools
import random

import pytest

from fourwalls.cost.shape import Shape, get_model
from fourwalls.parallel.pipeline.microbatches import split_batch
from fourwalls.parallel.pipeline.partition import Layer, equal_cuts, gpt_layers, partition


def every_cut(count, stages):
    for inner in itertools.combinations(range(1, count), stages - 1):
        yield (0, *inner, count)


def price(layers, ends, overlap):
    """The slowest stage of these cuts, written out."""
    worst = 0
    for k, (a, b) in enumerate(itertools.pairwise(ends)):
        link = layers[b - 1].link if k < len(ends) - 2 else 0
        work = sum(layer.seconds for layer in layers[a:b])
        worst = max(worst, max(work, link) if overlap else work + link)
    return worst


def memory(layers, ends, microbatches):
    p = len(ends) - 1
    return max(
        sum(x.states for x in layers[a:b]) + min(p - k, microbatches) * sum(x.activation for x in layers[a:b])
        for k, (a, b) in enumerate(itertools.pairwise(ends))
    )


def random_layers(rng):
    def some(most):
        return rng.randint(0, most)

    return [Layer(str(k), rng.randint(1, 9), some(5), some(3), some(6)) for k in range(rng.randint(1, 9))]


@pytest.mark.parametrize("seed", range(60))
def test_against_every_cut(seed):
    rng = random.Random(seed)
    layers = random_layers(rng)
    stages, m, overlap = rng.randint(1, len(layers)), rng.randint(1, 6), rng.random() < 0.5
    cuts = list(every_cut(len(layers), stages))
    best = partition(layers, stages, overlap=overlap)
    assert best.bottleneck == min(price(layers, c, overlap) for c in cuts)
    assert [layer for r in best.stages for layer in r] == list(range(len(layers))) and all(best.stages)
    limit = rng.choice([memory(layers, c, m) for c in cuts])
    fits = [c for c in cuts if memory(layers, c, m) <= limit]
    found = partition(layers, stages, limit=limit, microbatches=m, overlap=overlap)
    assert found.bottleneck == min(price(layers, c, overlap) for c in fits) and max(found.memory) <= limit
    least = min(memory(layers, c, m) for c in cuts)
    if least > 0:
        with pytest.raises(ValueError, match=f"the least that one needs is {least} bytes"):
            partition(layers, stages, limit=least - 1, microbatches=m)


def test_the_head_of_a_gpt_is_heavy():
    layers = gpt_layers(get_model("gpt2"))
    assert [layers[0].name, layers[1].name, layers[-1].name, len(layers)] == ["embedding", "block 0", "head", 14]
    assert layers[0].seconds == 0 and layers[-1].seconds > 4 * layers[1].seconds
    assert layers[0].states > 5 * layers[1].states
    equal, best = equal_cuts(layers, 4), partition(layers, 4)
    assert best.bottleneck < 0.75 * equal.bottleneck and best.balance > 0.9 > 0.7 > equal.balance
    assert best.stages[-1] == range(13, 14), "the head stands alone"
    assert sum(best.seconds) == pytest.approx(sum(equal.seconds))


def test_a_tight_memory_moves_the_cut():
    layers = [Layer("a", 1, states=10), Layer("b", 1, states=10), Layer("c", 1), Layer("d", 3)]
    free, tight = partition(layers, 2), partition(layers, 2, limit=15)
    assert (free.bottleneck, max(free.memory), free.stages) == (3, 20, (range(3), range(3, 4)))
    assert (tight.bottleneck, max(tight.memory), tight.stages) == (5, 10, (range(1), range(1, 4)))
    shape = gpt_layers(Shape(8, 64, 4, 64, 256))
    assert partition(shape, 4, microbatches=1).memory != partition(shape, 4, microbatches=8).memory


def test_a_slow_link_is_not_cut():
    layers = [Layer("a", 1), Layer("b", 1, link=50), Layer("c", 1), Layer("d", 1)]
    assert partition(layers, 2).stages in ((range(1), range(1, 4)), (range(3), range(3, 4)))
    assert equal_cuts(layers, 2).bottleneck == 50 and partition(layers, 2).bottleneck == 3


@pytest.mark.parametrize("stages", [0, 5, -1, 2.0, True, "2"])
def test_a_stage_with_no_layer_is_refused(stages):
    with pytest.raises(ValueError, match="a stage has at least one layer; allowed: 1 to 4"):
        partition([Layer("x", 1)] * 4, stages)
    with pytest.raises(ValueError, match="allowed: 1 to 4"):
        equal_cuts([Layer("x", 1)] * 4, stages)


def test_trials_d02_and_d16_micro_batches_are_never_silently_empty():
    import torch

    x = torch.zeros(8, 2)
    assert [b.rows for b in split_batch(x, count=3)] == [3, 3, 2]
    assert [b.rows for b in split_batch(x[:6], size=4)] == [4, 2]
    for rows, wish in ((2, {"count": 4}), (6, {"size": 4, "count": 3})):
        with pytest.raises(ValueError):
            split_batch(x[:rows], **wish)
    with pytest.raises(ValueError):
        split_batch(x[:0], count=1)
