"""Odd tensors, settings and calls of compressed all-reduces: zeros, nan, more than there is, and what is refused."""

import math

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives.reductions import exact_and_bound, wrong_elements
from fourwalls.parallel.compress import Bfloat16, Int8, LowRank, TopK
from fourwalls.parallel.compress.low_rank import matrix_shape, orthonormal
from fourwalls.ranks.comm import MismatchError

from .compressors import MAKERS, NETWORK, allowed, gradient, once


def of(comm, make, x):
    scheme = make()
    return scheme(comm, x), scheme.residual()


@pytest.mark.parametrize("name", MAKERS)
def test_zeros_constants_one_element_and_none(name):
    for x in (torch.zeros(9), torch.full((4,), 3.0), torch.tensor([2.5]), torch.tensor(-1.5), torch.empty(0), torch.empty(0, 3)):
        scheme = MAKERS[name]()
        for total, _ in fw.simulate(of, MAKERS[name], x, ranks=3, cluster=NETWORK).values:
            assert total.shape == x.shape
            if isinstance(scheme, LowRank):
                torch.testing.assert_close(total, 3 * x, rtol=1e-5, atol=0)
            else:
                assert torch.equal(total, 3 * x), (name, x)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_nan_is_seen_by_all_ranks_and_remembered_by_none(name, odd):
    def program(comm):
        scheme = MAKERS[name]()
        scheme(comm, gradient(comm.rank, (6, 8)))
        owed = scheme.residual().clone()
        x = gradient(comm.rank, (6, 8), step=1)
        if comm.rank == 1:
            x[2, 3] = odd
        seen = scheme(comm, x)
        kept = torch.equal(scheme.residual(), owed)
        return bool(seen[2, 3].isfinite()), kept, bool(scheme(comm, gradient(comm.rank, (6, 8), step=2)).isfinite().all())

    assert fw.simulate(program, ranks=3, cluster=NETWORK).values == [(False, True, True)] * 3


def test_a_nan_ruins_its_block_only():
    def program(comm):
        x = torch.ones(8)
        x[5] = math.nan if comm.rank else 1.0
        return Int8(block=4)(comm, x)

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values[0].isnan().tolist() == [False] * 4 + [True] * 4


def test_a_block_of_zeros_beside_others_and_the_smallest_numbers():
    x = torch.cat([torch.zeros(4), torch.full((4,), 1e-44), torch.full((4,), 3.0e38)])
    total, _ = fw.simulate(of, lambda: Int8(block=4), x, ranks=1, cluster=NETWORK).values[0]
    assert torch.equal(total, x)
    for total, owed in fw.simulate(of, lambda: Int8(block=4), x / 4, ranks=2, cluster=NETWORK).values:
        assert torch.equal(total, 2 * (x / 4)) and torch.equal(owed, torch.zeros(12))


def test_more_than_there_is():
    for make in (lambda: TopK(k=10**6), lambda: LowRank(rank=50), lambda: Int8(block=10**6)):
        values = fw.simulate(once, make, (3, 4), ranks=4, cluster=NETWORK).values
        inputs = [gradient(r, (3, 4)) for r in range(4)]
        exact, bound = allowed(make, inputs) if not isinstance(make(), LowRank) else exact_and_bound(inputs)
        assert wrong_elements(values[0], exact, bound) == 0


def test_int8_levels_and_how_many_ranks_fit():
    assert [Int8().levels(n) for n in (2, 3, 4, 8, 127)] == [63, 42, 31, 15, 1]
    assert [Int8(wide=True).levels(n) for n in (2, 258, 259, 32767)] == [127, 127, 126, 1]
    for n in (2, 3, 7, 50, 127):
        assert n * Int8().levels(n) <= 127
    with pytest.raises(ValueError, match="128 ranks: .* use wide=True"):
        Int8().levels(128)
    with pytest.raises(ValueError, match="32768 ranks"):
        Int8(wide=True).levels(32768)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_dtypes_come_back_as_they_went(name, dtype):
    values = fw.simulate(once, MAKERS[name], (6, 4), dtype, ranks=2, cluster=NETWORK).values
    exact = sum(gradient(r, (6, 4), dtype).double() for r in range(2))
    assert values[0].dtype == dtype and torch.equal(values[0], values[1])
    if name in ("bfloat16", "int8 wide", "top-k all"):
        assert float((values[0].double() - exact).abs().max()) <= 0.03 * float(exact.abs().max())


def test_low_rank_pieces():
    assert [matrix_shape(s) for s in ((3, 4, 5), (7,), (), (1,), (16,), (0,))] == [
        (3, 20),
        (3, 3),
        (1, 1),
        (1, 1),
        (4, 4),
        (1, 0),
    ]
    p = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 1.0]], dtype=torch.float64)
    q = orthonormal(p)
    assert torch.equal(q[:, 1], torch.zeros(2)) and float((q.T @ q - torch.diag(torch.tensor([1.0, 0, 1]))).abs().max()) < 1e-15
    assert torch.equal(orthonormal(torch.zeros(4, 2)), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(), "give one of them"),
        (lambda: TopK(k=1, ratio=0.1), "give one of them"),
        (lambda: TopK(k=0), "from 1 on"),
        (lambda: TopK(ratio=1.5), "at most 1"),
        (lambda: TopK(ratio=math.nan), "at most 1"),
        (lambda: LowRank(rank=0), "from 1 on"),
        (lambda: Int8(block=0), "from 1 on"),
        (lambda: Int8(block=True), "from 1 on"),
    ],
)
def test_settings_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_calls_that_make_no_sense():
    def program(comm, x, **options):
        scheme = Bfloat16(shapes={"s": ((2,),)})
        scheme(comm, torch.ones(3), bucket="k")
        return scheme(comm, x, **options)

    for x, options, words in (
        (torch.ones(3, dtype=torch.int64), {}, "of torch.int64; gradients of float64"),
        ([1.0], {}, "of list"),
        (torch.ones(3), {"op": "max"}, "does 'sum' and 'avg'"),
        (torch.ones(4), {"bucket": "k"}, "had 3 elements, now 4; give every tensor a bucket"),
        (torch.ones(4), {"bucket": "s"}, "shapes of bucket 's' hold 2 elements, the tensor 4"),
    ):
        with pytest.raises(Exception, match=words):
            fw.simulate(program, x, ranks=2, cluster=NETWORK, **options)


def test_what_is_no_gradient_is_summed_as_it_is():
    def program(comm):
        count = torch.tensor([3 + comm.rank])
        scheme = TopK(k=1)
        return scheme(comm, count, bucket=None).tolist(), scheme(comm, count, bucket=None, out=count) is count, count.tolist()

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [([7], True, [7])] * 2


def test_ranks_that_differ_are_named():
    def program(comm):
        return TopK(k=1 + comm.rank)(comm, torch.ones(4))

    with pytest.raises(MismatchError, match="k"):
        fw.simulate(program, ranks=2, cluster=NETWORK)
