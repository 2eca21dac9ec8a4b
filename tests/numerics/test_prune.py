"""Zeros: exactly as many as asked, where the pattern allows, kept through steps; and the scan that says where to put none."""

import copy
import math

import pytest
import torch
from torch import nn

from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.optim import SGD, Adam
from fourwalls.numerics.prune import (
    Masks,
    Movement,
    Pruned,
    check_two_of_four,
    gradual,
    keep_largest,
    prune_masks,
    scan,
    scan_blocks,
    spare,
    two_of_four,
)

torch.set_num_threads(1)


def floats(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ("n", "share", "zeros"), ((10, 0.5, 5), (7, 0.5, 3), (100, 0.29, 29), (1, 0.9, 0), (9, 0.0, 0), (0, 0.5, 0))
)
def test_the_smallest_go_and_exactly_as_many_as_asked(n, share, zeros):
    scores = floats(n).abs()
    mask = keep_largest(scores, share)
    assert int((~mask).sum()) == zeros and mask.dtype == torch.bool
    if zeros:
        assert scores[~mask].max() < scores[mask].min()
        assert not scores[mask].max() < scores[~mask].min()  # the mutant "the largest go" would be seen


def test_ties_fall_the_same_way_every_time():
    assert keep_largest(torch.ones(6), 0.5).tolist() == [True] * 3 + [False] * 3
    assert keep_largest(torch.tensor([1.0, 2, 1, 2]), 0.75).tolist() == [False, True, False, False]
    assert two_of_four(torch.ones(2, 8)).tolist() == [[True, True, False, False] * 2] * 2
    assert two_of_four(torch.tensor([[0.0, 1, 1, 1]])).tolist() == [[False, True, True, False]]


def test_two_of_four_along_the_inputs():
    w = floats(6, 16)
    mask = two_of_four(w.abs())
    fours = mask.unflatten(1, (4, 4))
    assert (fours.sum(-1) == 2).all()
    for row in range(6):
        for j in range(4):
            best = sorted(range(4), key=lambda k: -abs(float(w[row, 4 * j + k])))[:2]
            assert sorted(best) == fours[row, j].nonzero().flatten().tolist()
    check_two_of_four(w * mask)
    wrong_axis = two_of_four(w[:4].t().contiguous().abs()).t()  # the mutant: fours along the outputs
    assert (wrong_axis.unflatten(0, (1, 4)).sum(1) == 2).all()
    with pytest.raises(ValueError, match=r"values are not zero; allowed: 2"):
        check_two_of_four(w[:4] * wrong_axis)
    one_more = w * mask
    one_more[3, 9:12] = 1.0
    with pytest.raises(ValueError, match="row 3, inputs 8 to 11"):
        check_two_of_four(one_more)


def test_what_is_refused():
    w = {"a": floats(4, 8), "b": floats(4, 8, seed=1) / 1000}
    for call, says in (
        (lambda: keep_largest(w["a"], 1.0), "pruning everything leaves no model"),
        (lambda: keep_largest(w["a"], -0.1), "share is -0.1"),
        (lambda: keep_largest(w["a"], math.nan), "share is nan"),
        (lambda: keep_largest(torch.full((3,), math.nan), 0.5), "3 scores are NaN"),
        (lambda: two_of_four(floats(3, 6)), "6 inputs cannot be cut into fours; nearest legal: 4 or 8"),
        (lambda: prune_masks(w, 0.5, scope="global"), "b: the mask keeps nothing"),
        (lambda: prune_masks(w, 0.5, pattern="1:2"), "pattern is '1:2'"),
        (lambda: prune_masks(w, 0.5, scope="all"), "scope is 'all'"),
        (lambda: prune_masks(w, 0.3, pattern="2:4"), "half of each four"),
        (lambda: prune_masks(w, {"a": 0.5}), "no share for 'b'"),
        (lambda: prune_masks({}, 0.5), "no parameter to prune"),
        (lambda: prune_masks(w, 0.5, scores={"a": w["a"]}), "no scores for 'b'"),
        (lambda: Masks(w, {"c": torch.ones(4, 8, dtype=torch.bool)}), "no such parameter; there are a, b"),
        (lambda: Masks(w, {"a": torch.ones(8, dtype=torch.bool)}), "allowed: \\(4, 8\\) of torch.bool"),
        (lambda: Masks(w, {"a": torch.zeros(4, 8, dtype=torch.bool)}), "keeps nothing"),
        (lambda: Movement({"a": w["a"]}).collect(), "'a' has no gradient"),
        (lambda: gradual(0, begin=3, end=3, final=0.5), "begin < end"),
        (lambda: gradual(0, begin=0, end=3, final=1.0), "final < 1"),
        (lambda: spare({"a": 10, "b": 10}, ["a"], 0.5), "too few to make 50% of all zero"),
        (lambda: spare({"a": 10}, ["z"], 0.5), "no layer 'z'"),
        (lambda: scan(nn.Linear(4, 4), float, names=["w"]), "no parameter 'w'"),
        (lambda: scan_blocks(GPT(GPTConfig(layers=1, width=8, heads=2)), float), "at least two"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_global_and_per_layer_shares():
    w = {"a": floats(8, 8), "b": floats(8, 8, seed=1) / 2}
    each, together = prune_masks(w, 0.5), prune_masks(w, 0.5, scope="global")
    assert [int(m.sum()) for m in each.masks.values()] == [32, 32] and each.share() == together.share() == 0.5
    assert together.masks["a"].sum() > together.masks["b"].sum()
    values, kept = torch.cat([p.abs().flatten() for p in w.values()]), torch.cat([m.flatten() for m in together.masks.values()])
    assert values[kept].min() > values[~kept].max()
    named = prune_masks(w, {"a": 0.25, "b": 0.75})
    assert [int(m.sum()) for m in named.masks.values()] == [48, 16]


def test_infinite_and_nan_weights_become_zero_where_pruned():
    w = {"a": torch.tensor([[math.nan, 1.0], [math.inf, -1.0]])}
    Masks(w, {"a": torch.tensor([[False, True], [False, True]])}).apply_()
    assert w["a"].tolist() == [[0.0, 1.0], [0.0, -1.0]]


@pytest.mark.parametrize("make", (lambda p: Adam(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)))
@pytest.mark.parametrize("pattern", ("unstructured", "2:4"))
def test_masks_are_kept_through_steps(make, pattern):
    layer, x = nn.Linear(8, 4), floats(16, 8)
    plain = make(layer.parameters())
    masks = prune_masks({"weight": layer.weight}, 0.5, pattern=pattern)
    optimizer = Pruned(plain, masks)
    for held in (True, False):  # the mutant: stepping without the masks
        for _ in range(3):
            optimizer.zero_grad()
            (layer(x) - 1).square().mean().backward()
            (optimizer if held else plain).step()
        assert ((layer.weight == 0) == ~masks.masks["weight"]).all() == held
    assert optimizer.param_groups is plain.param_groups


def test_movement_keeps_what_leaves_zero_and_lets_go_what_returns_to_it():
    w = nn.Parameter(torch.tensor([0.1, 2.0, -0.1, -2.0], dtype=torch.float64))
    target = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    movement, expected = Movement({"w": w}), torch.zeros(4, dtype=torch.float64)
    for _ in range(5):
        w.grad = None
        (w - target).square().sum().backward()
        movement.collect()
        expected -= w.detach() * 2 * (w.detach() - target)
        with torch.no_grad():
            w -= 0.05 * w.grad
    assert torch.allclose(movement.scores["w"], expected, rtol=1e-12)
    assert prune_masks({"w": w}, 0.5, scores=movement.scores).masks["w"].tolist() == [True, False, True, False]
    assert prune_masks({"w": w}, 0.5).masks["w"].tolist() == [
        False,
        True,
        False,
        True,
    ]  # magnitude, and a wrong sign, say otherwise


def test_the_gradual_schedule_rises_from_initial_to_final():
    share = [gradual(t, begin=10, end=50, final=0.8, initial=0.2) for t in range(70)]
    assert share[:11] == [0.2] * 11 and share[50:] == [0.8] * 20 and share == sorted(share)
    assert share[30] == pytest.approx(0.8 - 0.6 / 8)
    assert share[20] - share[10] > 3 * (share[50] - share[35])  # much at first


def far_from(model, tokens):
    """A loss that needs no training: how far the logits are from those of the model as it is now."""
    right = model(tokens).detach()
    return lambda m: float((m(tokens) - right).square().mean())


@pytest.mark.parametrize("vital", (0, 1, 2))
def test_the_scan_ranks_a_planted_vital_layer_first_and_leaves_the_model_alone(vital):
    model = GPT(GPTConfig(layers=3, width=16, heads=2, length=8, vocabulary=32), dtype=torch.float64)
    with torch.no_grad():
        for k, block in enumerate(model.blocks):
            block.attention.output.weight.mul_(1e-3)
            block.mlp.down.weight.mul_(1e-3 if k != vital else 20.0)
    tokens = torch.arange(16).view(2, 8)
    before = copy.deepcopy(model.state_dict())
    lines = scan(model, far_from(model, tokens))
    assert {line.name for line in lines[:2]} == {f"blocks.{vital}.mlp.up.weight", f"blocks.{vital}.mlp.down.weight"}
    assert len(lines) == 18 and lines[1].rise > 10 * lines[2].rise > 0  # neither tokens nor positions are scanned
    blocks = scan_blocks(model, far_from(model, tokens))
    assert blocks[0].name == f"blocks.{vital}" and len(blocks) == 3 and blocks[0].rise > 10 * blocks[1].rise
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items()) and len(model.blocks) == 3


def test_a_scan_survives_losses_that_fail_and_puts_weights_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())

    def breaks_on_zeros(m):
        return math.nan if bool((m[1].weight == 0).any()) else 1.0

    first, second = scan(model, breaks_on_zeros)
    assert first.name == "1.weight" and math.isinf(first.rise) and second.rise == 0

    def raises_on_zeros(m):
        if bool((m[0].weight == 0).any()):
            raise RuntimeError("no loss")
        return 1.0

    with pytest.raises(RuntimeError, match="no loss"):
        scan(model, raises_on_zeros)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_sparing_moves_the_zeros_and_keeps_their_number():
    sizes = {"a": 100, "b": 300, "c": 600}
    shares = spare(sizes, ["a"], 0.5)
    assert shares["a"] == 0 and sum(shares[k] * n for k, n in sizes.items()) == pytest.approx(500)
    assert shares["b"] == shares["c"] and spare(sizes, [], 0.5) == dict.fromkeys(sizes, 0.5)
