"""Bytes of each axis: GPT-3's by hand, and their limits. tests/train holds them to the messages of a real step."""

import pytest

from fourwalls.cost.axes import axis_bytes
from fourwalls.cost.shape import MODELS

GPT3, TOKENS = MODELS["175B"], 1536 * 2048  # the batch of Narayanan et al. 2021, section 5.1


def test_tensor_parallelism_moves_85_times_the_bytes_of_data_parallelism():
    """Two ranks, the whole batch between them: 4 L T h against P numbers."""
    tensor = axis_bytes(GPT3, tokens=TOKENS, t=2)["t"]["layers: 2 forward, 2 backward"].total
    data = axis_bytes(GPT3, tokens=TOKENS // 2, d=2)["d"].total
    pipeline = axis_bytes(GPT3, tokens=TOKENS, p=2)["p"]["activations"].total
    assert tensor == 4 * 96 * TOKENS * 12288 * 2 and data == GPT3.parameter_count * 2
    assert tensor / data == pytest.approx(85.0, abs=0.1) and tensor / data == pytest.approx(TOKENS / 3 / 12288, rel=0.01)
    assert tensor / pipeline == 4 * 96


def test_one_rank_sends_nothing():
    assert [terms.total for terms in axis_bytes(GPT3, tokens=TOKENS).values()] == [0, 0, 0]


def test_every_parameter_is_summed_by_somebody():
    """All stages together hold the model once, and a tied table twice."""
    for p in (1, 2, 4):
        sent = sum(axis_bytes(GPT3, tokens=1, d=2, p=p, stage=k, element=1)["d"].total for k in range(p))
        assert sent == GPT3.parameter_count + (p > 1) * GPT3.vocabulary * GPT3.width


def test_the_middle_of_a_pipeline_sends_both_ways():
    sent = [axis_bytes(GPT3, tokens=TOKENS, p=4, stage=k)["p"] for k in range(4)]
    assert [terms["activations"].total > 0 for terms in sent] == [True, True, True, False]
    assert [terms["gradients"].total > 0 for terms in sent] == [False, True, True, True]
    assert ["tied table" in terms for terms in sent] == [True, False, False, True]


@pytest.mark.parametrize(("word", "value"), [("d", 0), ("p", 1.5), ("t", True), ("stage", 2)])
def test_what_does_not_exist_is_refused(word, value):
    with pytest.raises(ValueError, match=f"{word}.*(whole number|allowed)"):
        axis_bytes(GPT3, tokens=1, **{"p": 2, word: value})
