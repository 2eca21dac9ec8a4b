"""How tensors are cut, and what the oracle and its bound say."""

import pytest
import torch

from fourwalls.collectives.chunks import chunk_sizes, chunk_start, cut, gather_layout, segment_count, working_copy
from fourwalls.collectives.reductions import OPS, exact_and_bound, get_reduction, wrong_elements


def test_chunks_are_those_of_tensor_split():
    for numel in (0, 1, 5, 16, 17, 31):
        for n in range(1, 9):
            pieces = torch.arange(numel).tensor_split(n)
            assert chunk_sizes(numel, n) == [p.numel() for p in pieces]
            assert all(torch.equal(a, b) for a, b in zip(cut(torch.arange(numel), n), pieces, strict=True))
            assert [chunk_start(numel, n, c) for c in range(n + 1)] == [sum(chunk_sizes(numel, n)[:c]) for c in range(n + 1)]


def test_no_segment_is_larger_than_asked_and_no_fewer_would_do():
    for numel in (1, 7, 64, 1000):
        for n in (1, 3, 8):
            for segment_bytes in (4, 12, 100, 10**6):
                count = segment_count(numel, 4, n, segment_bytes)
                largest = chunk_sizes(numel, n)[0]
                assert max(chunk_sizes(largest, count)) * 4 <= segment_bytes
                assert count == 1 or max(chunk_sizes(largest, count - 1)) * 4 > segment_bytes
    assert segment_count(0, 4, 2, 16) == segment_count(100, 4, 2, None) == 1
    for wrong, word in (
        (0, "is 0"),
        (-4, "is -4"),
        (1e6, "is 1000000.0 .int.1000000.0. would do"),
        ("4", "is '4'"),
        (True, "is T"),
    ):
        with pytest.raises(ValueError, match=f"segment_bytes {word}.*a whole number of at least 1"):
            segment_count(1, 4, 1, wrong)


def test_working_copy_never_shares_memory_unless_asked():
    for x in (
        torch.arange(6.0),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(3) * (1 + 1j),
        (torch.arange(3) * (1 + 1j)).conj(),
        torch.tensor(2.0),
    ):
        flat = working_copy(x)
        kept = x.clone()
        flat.add_(1)
        assert torch.equal(x, kept) and torch.equal(flat.view(x.shape), kept + 1)
    x = torch.arange(6.0)
    assert working_copy(x, x).data_ptr() == x.data_ptr()


def test_gather_layout():
    assert gather_layout(torch.ones(2, 3), 4, 0, None) == ([6] * 4, (4, 2, 3))
    assert gather_layout(torch.tensor(1.0), 4, 0, None) == ([1] * 4, (4,))
    assert gather_layout(torch.ones(2), 3, 1, 7) == ([3, 2, 2], (7,))
    with pytest.raises(ValueError, match="rank 1 gives 3 elements; chunk 1 of 7 elements on 3 ranks has 2"):
        gather_layout(torch.ones(3), 3, 1, 7)
    for wrong in (-1, 6.0, True):
        with pytest.raises(ValueError, match="numel is .*a whole number of at least 0"):
            gather_layout(torch.ones(2), 3, 1, wrong)


@pytest.mark.parametrize("op", OPS)
def test_identity_changes_nothing(op):
    for dtype in OPS[op].dtypes:
        x = torch.tensor([0, 1, 3]).to(dtype)
        e = torch.full_like(x, get_reduction(op, dtype).identity(dtype))
        assert torch.equal(OPS[op].combine(e, x), x), (op, dtype)


def test_bool_sums_are_logical():
    a, b = torch.tensor([True, False, False, True]), torch.tensor([False, False, True, True])
    for op, want in (("sum", a | b), ("max", a | b), ("min", a & b), ("prod", a & b)):
        assert torch.equal(OPS[op].combine(a, b), want)
        assert torch.equal(exact_and_bound([a, b], op)[0], want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_ten_times_the_bound_is_wrong_and_a_plain_loop_is_right(op, dtype):
    if op == "prod" and dtype.is_complex:
        return
    inputs = [
        (
            torch.randn(50, dtype=torch.float64).add(2 if op == "prod" else 0) + (1j * torch.randn(50) if dtype.is_complex else 0)
        ).to(dtype)
        for _ in range(6)
    ]
    loop = inputs[0].clone()
    for x in inputs[1:]:
        OPS[op].combine(loop, x, out=loop)
    OPS[op].finish(loop, 6)
    exact, bound = exact_and_bound(inputs, op)
    assert wrong_elements(loop, exact, bound) == 0
    off = loop.clone().to(exact.dtype)
    off[7] = exact[7] + 10 * bound[7]
    assert wrong_elements(off, exact, bound) == 1
    off[7] = exact[7] + 0.9 * bound[7]
    assert wrong_elements(off, exact, bound) == 0


def test_the_bound_is_that_of_n_minus_one_roundings_and_no_looser():
    for dtype, n in ((torch.float32, 2), (torch.bfloat16, 5), (torch.float16, 3)):
        u = torch.finfo(dtype).eps / 2
        for op, roundings, size in (("sum", n - 1, n * 2.0), ("avg", n, 2.0), ("prod", n - 1, 2.0**n)):
            bound = exact_and_bound([torch.tensor([2.0], dtype=dtype)] * n, op)[1].item()
            exact = ((1 + u) ** roundings - 1) * size
            assert exact <= bound <= 1.001 * exact, (dtype, op)


def test_nan_is_wrong_where_the_oracle_has_none():
    exact, bound = exact_and_bound([torch.tensor([1.0, float("nan"), float("inf")])] * 2)
    assert wrong_elements(torch.tensor([2.0, float("nan"), float("inf")]), exact, bound) == 0
    assert wrong_elements(torch.tensor([float("nan"), 1.0, -float("inf")]), exact, bound) == 3


def test_integers_wrap_and_must_be_equal():
    exact, bound = exact_and_bound([torch.tensor([100], dtype=torch.int8)] * 2)
    assert exact.dtype == torch.int8 and exact.item() == -56 and bound.item() == 0
    assert wrong_elements(torch.tensor([-55], dtype=torch.int8), exact, bound) == 1
