"""Clicks from a known law: the ids are Zipf's, the batch does not depend on the ranks, and a model that learns nears the law."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fourwalls.cost.sparse import expected_different, zipf_probabilities
from fourwalls.nn.clicks import ClickConfig, ClickModel, Clicks, auc, clicks, law_logits, uniform, zipf_ids
from fourwalls.nn.layers import Embedding
from fourwalls.nn.optim import Adam, adam_
from fourwalls.nn.sparse import RowAdagrad, RowAdam, merge_rows

SMALL = ClickConfig(fields=(50, 40, 7), width=4, inputs=3, hidden=5)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on two
    yield
    torch.set_num_threads(threads)


def test_ranks_see_the_one_batch():
    whole = clicks(SMALL, 3, batch=24)
    for n in (2, 3, 4):
        parts = [clicks(SMALL, 3, r, batch=24 // n) for r in range(n)]
        assert torch.equal(torch.cat([p.ids for p in parts]), whole.ids)
        assert torch.equal(torch.cat([p.inputs for p in parts]), whole.inputs)
        assert torch.equal(torch.cat([p.clicked for p in parts]), whole.clicked)
    assert not torch.equal(clicks(SMALL, 4, batch=24).ids, whole.ids)
    assert not torch.equal(clicks(SMALL, 3, batch=24, seed=9).ids, whole.ids)
    assert len(clicks(SMALL, 3, batch=0)) == 0


def test_uniform_is_uniform_and_the_same_everywhere():
    x = uniform(5, range(20_000), 4)
    assert x.shape == (20_000, 4) and x.min() >= 0 and x.max() < 1
    assert torch.equal(uniform(5, range(100, 200), 4), x[100:200])
    assert (x.mean(0) - 0.5).abs().max() < 5 / (12 * 20_000) ** 0.5  # five standard deviations of a mean
    assert (torch.corrcoef(x.T) - torch.eye(4)).abs().max() < 5 / 20_000**0.5
    assert uniform(0, range(1), 1).item() == 0.8833108082136426  # splitmix64 from 0: 0xE220A8397B1DCDAF / 2^64


def test_ids_follow_zipf():
    rows, draws = 1000, 40_000
    ids = zipf_ids(uniform(1, range(draws), 1)[:, 0], rows, 1.1)
    p = torch.tensor(zipf_probabilities(rows, 1.1), dtype=torch.float64)
    assert abs(p.sum().item() - 1) < 1e-12 and abs((p[0] / p[9]).item() - 10**1.1) < 1e-9
    seen = torch.bincount(ids, minlength=rows).double()
    assert ids.min() == 0 and ids.max() < rows
    head = slice(0, 50)  # enough of each for a normal bound
    assert ((seen[head] - draws * p[head]).abs() < 5 * (draws * p[head]).sqrt()).all()
    different, expected = len(ids.unique()), expected_different(p.tolist(), draws)
    assert abs(different - expected) < 5 * expected**0.5
    assert zipf_ids(torch.tensor([0.0, 1 - 2**-53]), 3, 0.0).tolist() == [0, 2]  # exponent 0: all alike, and never out of range


def test_labels_follow_the_law():
    batch = clicks(SMALL, 0, batch=20_000, dtype=torch.float64)
    p = torch.sigmoid(law_logits(SMALL, batch.ids, batch.inputs))
    for low, high in ((0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1)):
        here = (p >= low) & (p < high)
        sigma = (p[here] * (1 - p[here])).sum().sqrt()
        assert here.sum() > 100 and (batch.clicked[here].sum() - p[here].sum()).abs() < 5 * sigma
    assert 0.70 < auc(p, batch.clicked) < 0.95  # clicks are noisy: even the law is not always right


def test_auc_equals_sklearn():
    scores, clicked = uniform(2, range(500), 1)[:, 0], uniform(3, range(500), 1)[:, 0] < 0.3
    for s in (scores, (scores * 5).floor(), torch.zeros(500)):  # all different, many equal, all equal
        assert auc(s, clicked) == pytest.approx(roc_auc_score(clicked.numpy(), s.numpy()), abs=1e-12)
    with pytest.raises(ValueError, match="0 samples with a click and 5 without"):
        auc(scores[:5], torch.zeros(5))
    with pytest.raises(ValueError, match="1 of 2 scores are nan, the first at 1"):
        auc(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0]))


def test_the_model_learns_the_law():
    config = ClickConfig(fields=(200, 100, 20), width=4, inputs=2, hidden=16)
    model = ClickModel(config)
    dense, rows = Adam(model.dense_parameters(), lr=0.02), RowAdam(model.embedding.weight.data, lr=0.02)
    held_out = clicks(config, 0, batch=4000, seed=77)
    law = auc(law_logits(config, held_out.ids, held_out.inputs), held_out.clicked)
    before = auc(model(held_out.ids, held_out.inputs), held_out.clicked)
    for step in range(100):
        step_once(model, clicks(config, step, batch=256), dense, rows)
    scores = model(held_out.ids, held_out.inputs)
    after = auc(scores, held_out.clicked)
    assert before < 0.6 and after > law - 0.03 and after < law + 0.01, (before, after, law)
    assert torch.corrcoef(torch.stack([scores.double(), law_logits(config, held_out.ids, held_out.inputs)]))[0, 1] > 0.9


def step_once(model, batch, dense, rows):
    loss = model.loss(batch)
    loss.backward()
    dense.step()
    table = model.embedding.weight
    ids = torch.unique(batch.ids + model.offsets)
    rows.step(ids, table.grad[ids])
    dense.zero_grad()
    table.grad = None
    return loss.item()


def test_the_loss_sums_over_parts():
    model, batch = ClickModel(SMALL, dtype=torch.float64), clicks(SMALL, 0, batch=10, dtype=torch.float64)
    parts = [model.loss(batch.rows(a, b), samples=10) for a, b in ((0, 3), (3, 3), (3, 10))]
    assert abs(sum(parts).item() - model.loss(batch).item()) < 1e-15
    assert parts[1].item() == 0 and parts[1].requires_grad and model.loss(batch.rows(0, 0)).item() == 0


def test_initial_weights_do_not_depend_on_where_the_rows_are():
    class Elsewhere(torch.nn.Module): ...

    a, b = ClickModel(SMALL), ClickModel(SMALL, embedding=Elsewhere())
    assert all(torch.equal(p, q) for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True))
    assert sum(p.numel() for p in a.dense_parameters()) == (3 * 4 + 3) * 5 + 5 + 5 + 1
    assert isinstance(a.embedding, Embedding) and a.embedding.weight.shape == (97, 4)


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (torch.tensor([[0, 0, 0], [0, 40, 0]]), "sample 1, field 1: id 40 is out of range; this field has ids 0 to 39"),
        (torch.tensor([[-1, 0, 0]]), "sample 0, field 0: id -1"),
        (torch.zeros(2, 2, dtype=torch.int64), r"allowed: \(batch, 3\)"),
        (torch.zeros(2, 3), "float32; allowed: .* int32 or int64"),
    ],
)
def test_bad_ids(ids, word):
    with pytest.raises(ValueError, match=word):
        ClickModel(SMALL)(ids, torch.zeros(len(ids), 3))


def test_int32_ids_give_the_same():
    model, batch = ClickModel(SMALL), clicks(SMALL, 0, batch=6)
    short = batch.to(ids=torch.int32)
    assert short.ids.dtype == torch.int32 and isinstance(short, Clicks)
    assert torch.equal(model(short.ids, short.inputs), model(batch.ids, batch.inputs))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fields": ()}, "at least one"),
        ({"fields": (3, 0)}, "whole number of rows"),
        ({"width": 0}, "width is 0"),
        ({"zipf": -1}, "exponent"),
    ],
)
def test_bad_configuration(change, word):
    with pytest.raises(ValueError, match=word):
        ClickConfig(**change)


def test_bad_batch():
    with pytest.raises(ValueError, match="rank is -1"):
        clicks(SMALL, 0, -1, batch=4)


# --- optimisers of rows ------------------------------------------------------------------------------------------------
def random_rows(step, ids, width=3):
    return uniform(100 + step, range(len(ids)), width) - 0.5


def test_row_adam_equals_torchs_sparse_adam():
    start = uniform(1, range(9), 3)
    theirs = torch.nn.Parameter(start.clone())
    ours, tiny = start.clone(), 1e-18  # torch divides eps by another correction: keep it out
    a, b = RowAdam(ours, lr=0.05, eps=tiny), torch.optim.SparseAdam([theirs], lr=0.05, eps=tiny)
    for step, ids in enumerate([[0, 3, 8], [3, 4], [], [0, 8, 1], [3]]):
        ids = torch.tensor(ids, dtype=torch.int64)
        grads = random_rows(step, ids)
        a.step(ids, grads)
        theirs.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), grads, start.shape, check_invariants=True).coalesce()
        b.step()
    assert (ours - theirs).abs().max() < 1e-12
    assert torch.equal(ours[2], start[2]) and torch.equal(ours[5:8], start[5:8])  # never touched, never moved


def test_row_adam_with_every_row_is_adam():
    start = uniform(1, range(5), 3)
    whole, rows, m, v = start.clone(), start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    lazy = RowAdam(rows, lr=0.05)
    for step in range(4):
        g = random_rows(step, start)
        adam_(whole, g, m, v, step + 1, lr=0.05)
        lazy.step(torch.arange(5), g)
    assert torch.equal(whole, rows)
    lazy.step(torch.tensor([0]), random_rows(9, [0]))
    adam_(whole, torch.cat([random_rows(9, [0]), torch.zeros(4, 3)]), m, v, 5, lr=0.05)
    assert torch.equal(whole[0], rows[0]) and not torch.equal(whole[1], rows[1])  # dense Adam moves rows that nobody touched


def test_row_adagrad_by_hand_and_zero_gradients():
    rows = torch.ones(3, 2, dtype=torch.float64)
    adagrad = RowAdagrad(rows, lr=0.1, eps=0.0)
    adagrad.step(torch.tensor([1]), torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert adagrad.squares.tolist() == [0, 12.5, 0]  # (9 + 16) / 2
    assert rows[1].tolist() == pytest.approx([1 - 0.3 / 12.5**0.5, 1 - 0.4 / 12.5**0.5]) and rows[0].tolist() == [1, 1]
    other = RowAdagrad(before := rows.clone(), lr=0.1)
    other.step(torch.arange(3), torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(before, rows) and other.squares.tolist() == [0, 0, 0]


def test_state_bytes():
    rows = torch.zeros(100, 16)
    assert RowAdam(rows).state_bytes == 2 * 100 * 16 * 4 and RowAdagrad(rows).state_bytes == 100 * 4


def test_merge_rows():
    ids, grads = torch.tensor([4, 1, 4, 4]), torch.tensor([[1.0], [2.0], [3.0], [5.0]])
    unique, total = merge_rows(ids, grads)
    assert unique.tolist() == [1, 4] and total.tolist() == [[2.0], [9.0]]
    assert [x.shape for x in merge_rows(ids[:0], grads[:0])] == [(0,), (0, 1)]


@pytest.mark.parametrize("kind", [RowAdam, RowAdagrad])
def test_row_optimisers_refuse(kind):
    with pytest.raises(ValueError, match="row 4 is given twice in one step; merge_rows"):
        kind(torch.zeros(6, 2)).step(torch.tensor([1, 4, 4]), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\(rows, width\)"):
        kind(torch.zeros(6))
    with pytest.raises(ValueError, match="at least 0"):
        kind(torch.zeros(6, 2), lr=-1)
