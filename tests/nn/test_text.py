"""Real text: batches that depend on (seed, step, rank) alone, disjoint, and equal to one large batch."""

import sys

import pytest
import torch

from fourwalls.nn.text import VOCABULARY, batch, fingerprint, starts, text, windows


def test_text_is_real_and_named():
    assert len(text()) > 300_000 and b"statement" in text() and max(text()) < VOCABULARY
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in fingerprint() and str(len(text())) in fingerprint()


def test_targets_are_the_next_bytes():
    x, y = batch(0, 3, 1, batch=5, length=40)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (5, 40)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert all(bytes([*row.tolist(), last]) in text() for row, last in zip(x, y[:, -1].tolist(), strict=True))


@pytest.mark.parametrize("ranks, b", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_ranks_together_see_the_one_large_batch(ranks, b):
    x, y = batch(5, 11, batch=8, length=16)
    parts = [batch(5, 11, r, batch=b, length=16) for r in range(ranks)]
    assert torch.equal(torch.cat([p[0] for p in parts]), x) and torch.equal(torch.cat([p[1] for p in parts]), y)


@pytest.mark.parametrize("length", [1, 16, 64, 200])
@pytest.mark.parametrize("step", [0, 1, 17])
def test_rows_of_a_step_do_not_overlap(length, step):
    """Even a batch that takes every window: all inputs lie apart, inside the text."""
    rows = sorted(starts(1, step, batch=windows(length), length=length))
    assert rows[0] >= 0 and all(b - a >= length for a, b in zip(rows, rows[1:], strict=False))
    assert rows[-1] + length < len(text()) - len(text()) // 10
    assert windows(length) >= (len(text()) * 9 // 10) // length - 1


def test_rows_are_the_text_at_their_starts():
    x, _ = batch(2, 3, 4, batch=3, length=20)
    where = starts(2, 3, 4, batch=3, length=20)
    assert [bytes(r.tolist()) for r in x] == [text()[s : s + 20] for s in where]


def test_steps_seeds_and_ranks_differ():
    first = batch(0, 0, batch=4, length=32)[0]
    assert torch.equal(first, batch(0, 0, batch=4, length=32)[0])
    for other in (batch(0, 1, batch=4, length=32), batch(1, 0, batch=4, length=32), batch(0, 0, 1, batch=4, length=32)):
        assert not torch.equal(first, other[0])
    state = torch.random.get_rng_state()
    batch(0, 0, batch=4, length=32)
    assert torch.equal(state, torch.random.get_rng_state())


def test_held_out_text_is_never_trained_on():
    cut = len(text()) - len(text()) // 10
    for step in range(20):
        rows = batch(0, step, batch=3, length=100, split="held-out")[0]
        assert all(bytes(r.tolist()) in text()[cut:] for r in rows)
        rows = batch(0, step, batch=3, length=100)[0]
        assert all(bytes(r.tolist()) in text()[:cut] for r in rows)


@pytest.mark.parametrize(
    "kwargs, hint",
    [
        ({"step": -1}, "at least 0"),
        ({"rank": 1.0}, "whole number"),
        ({"batch": 0}, "at least 1"),
        ({"length": 0}, "at least 1"),
        ({"split": "test"}, "held-out"),
        ({"length": 10**6}, "largest batch for this rank: 0"),
        ({"batch": 10**6}, "largest batch"),
    ],
)
def test_refusals(kwargs, hint):
    with pytest.raises(ValueError, match=hint):
        batch(**{"seed": 0, "step": 0, "rank": 0, "batch": 2, "length": 8, **kwargs})


@pytest.mark.parametrize("rows", [1, 2])
def test_targets_can_be_masked_without_touching_tokens(rows):
    tokens, targets = batch(0, 0, batch=rows, length=8)
    before = tokens.clone()
    targets[:, 3:] = -100
    assert torch.equal(tokens, before) and tokens.is_contiguous() and targets.is_contiguous()
