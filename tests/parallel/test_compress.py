"""Compressed all-reduces: how far off the sum may be, what they send, that nothing is lost with feedback, and wrong twins."""

import math

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.collectives.reductions import exact_and_bound, wrong_elements
from fourwalls.cost.hardware import uniform
from fourwalls.nn.mlp import MLP
from fourwalls.parallel.compress import SCHEMES, Bfloat16, Int8, LowRank, TopK
from fourwalls.parallel.compress.low_rank import matrix_shape, orthonormal
from fourwalls.parallel.data import DataParallel
from fourwalls.ranks.comm import CommError, MismatchError

NETWORK = uniform(1e-6, 1e9)
U16 = 2.0**-8  # half the distance of two bfloat16 near 1
MAKERS = {
    "bfloat16": Bfloat16,
    "int8": Int8,
    "int8 blocks": lambda **o: Int8(block=16, **o),
    "int8 wide": lambda **o: Int8(wide=True, **o),
    "top-k": lambda **o: TopK(k=5, **o),
    "top-k all": lambda **o: TopK(ratio=1.0, **o),
    "low rank": lambda **o: LowRank(rank=2, **o),
}


def gradient(rank, shape, dtype=torch.float32, step=0, scale=True):
    """Different on every rank, in size too, so that an own scale is a wrong one."""
    generator = torch.Generator().manual_seed(101 * rank + step)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * (3.0**rank if scale else 1.0)).to(dtype)


def once(comm, make, shape, dtype=torch.float32, op="sum", **options):
    x = gradient(comm.rank, shape, dtype)
    before = x.clone()
    total = make(**options)(comm, x, op=op)
    assert torch.equal(x, before), "the gradient was changed"
    return total


def kept_by_top_k(x, k):
    """What top-k keeps of one tensor, by sorting: the oracle."""
    flat = x.reshape(-1).double()
    keep = flat.abs().argsort(descending=True, stable=True)[:k]
    return torch.zeros_like(flat).index_copy(0, keep, flat[keep]).view(x.shape)


def allowed(make, inputs, op="sum"):
    """(exact, bound) for one message without a history, from the dtype of the wire and the number of terms."""
    scheme, n = make(), len(inputs)
    wide = [x.double() for x in inputs]
    if isinstance(scheme, TopK):
        wide = [kept_by_top_k(x, scheme.count(x.numel())) for x in inputs]
    exact, size = sum(wide), sum(x.abs() for x in wide)
    bound = ((1 + 2.0**-24) ** (n + 3) - 1) * size  # float32 additions, and a division where the mean is wanted
    if isinstance(scheme, Bfloat16):
        bound = bound + ((1 + U16) ** n - 1) * size  # each is rounded once, each addition rounds
    if isinstance(scheme, Int8):
        flat = torch.stack([x.reshape(-1) for x in wide])
        width = scheme.block or flat.shape[1]
        scales = [part.abs().max().expand(part.shape[1]) for part in flat.split(width, 1)]
        bound = bound + (n / (2 * scheme.levels(n)) * (1 + 1e-5) * torch.cat(scales)).view(exact.shape)
    return (exact / n, bound / n) if op == "avg" else (exact, bound)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "low rank"])
@pytest.mark.parametrize(
    ("n", "shape", "op"), [(2, (67,), "sum"), (3, (5, 13), "avg"), (4, (2,), "sum"), (8, (40,), "avg"), (1, (9,), "sum")]
)
def test_the_sum_is_within_its_bound_and_the_same_on_all_ranks(name, n, shape, op):
    make = MAKERS[name]
    values = fw.simulate(once, make, shape, op=op, ranks=n, cluster=NETWORK).values
    exact, bound = allowed(make, [gradient(r, shape) for r in range(n)], op)
    if n == 1:
        exact = gradient(0, shape)
    assert all(torch.equal(values[0], other) for other in values) and values[0].dtype == torch.float32
    assert wrong_elements(values[0], exact, bound) == 0
    place, tampered = int(bound.argmax()), values[0].double()
    tampered.view(-1)[place] = exact.double().view(-1)[place] + 10 * bound.view(-1)[place]
    assert wrong_elements(tampered, exact, bound) == 1


@pytest.mark.parametrize("n", [2, 4])
def test_low_rank_gives_back_matrices_of_that_rank_and_the_best_column_space_of_others(n):
    def program(comm, r, noise):
        generator = torch.Generator().manual_seed(5)
        left = torch.randn(12, r, generator=generator, dtype=torch.float64)  # all ranks share the columns' space
        own = gradient(comm.rank, (r, 9), torch.float64)
        x = left @ own + noise * gradient(comm.rank, (12, 9), torch.float64, step=3)
        return LowRank(rank=2)(comm, x), x

    for r in (1, 2):
        values = fw.simulate(program, r, 0.0, ranks=n, cluster=NETWORK).values
        exact = sum(x for _, x in values)
        # each product rounds by at most 12 u of the size of its terms; three products and the orthonormal columns follow
        bound = torch.full_like(exact, 12 * 8 * 2.0**-53 * 1e3 * float(exact.norm()))
        assert wrong_elements(values[0][0], exact, bound) == 0 and float(bound[0, 0]) < 1e-8
        assert wrong_elements(values[0][0] + 10 * bound, exact, bound) == exact.numel()
    values = fw.simulate(program, 2, 1.0, ranks=n, cluster=NETWORK).values
    total, exact = values[0][0], sum(x for _, x in values)
    assert torch.linalg.matrix_rank(total) == 2 and 0 < (total - exact).norm() < exact.norm()


SHAPES = [
    ((10,), None),
    ((3, 7), None),
    ((1,), None),
    ((2,), None),
    ((40,), ((5, 6), (10,))),
    ((60,), ((4, 3, 5),)),
    ((0,), None),
]


def counted(comm, make, shape, shapes, dtype):
    scheme = make(shapes={0: shapes} if shapes else None)
    scheme(comm, gradient(comm.rank, shape, dtype))
    return scheme.bytes_sent(comm.size, shape, dtype=dtype, shapes=shapes)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float32), (3, torch.float64), (4, torch.bfloat16), (5, torch.float32)])
def test_bytes_of_the_trace_are_the_formula(name, n, dtype):
    for shape, shapes in SHAPES:
        run = fw.simulate(counted, MAKERS[name], shape, shapes, dtype, ranks=n, cluster=NETWORK)
        sent = tuple(run.trace.bytes_sent(r) for r in range(n))
        assert sent == (run.values[0] if shape != (0,) else (0,) * n), (shape, shapes)


def test_bytes_beside_float32():
    numel, n, plain = 10_000, 4, 2 * 3 * 10_000 * 4 // 4
    share = {name: make().bytes_sent(n, (100, 100))[0] / plain for name, make in MAKERS.items()}
    assert share["bfloat16"] == 0.5 and share["int8 wide"] == pytest.approx(0.5, abs=1e-3)
    assert share["int8"] == (2 * 3 * numel // 4 + 3 * 4) / plain  # and a scale of 4 bytes to each other rank
    assert share["low rank"] == 2 * (100 + 100) / numel
    all_of_it = share["top-k all"]
    assert all_of_it == n * (4 + 4) / (2 * 4) == 4, "more than the ring: that grows with n"
    few = TopK(ratio=0.01)
    assert few.bytes_sent(2, (numel,))[0] == 100 * 8 and few.bytes_sent(8, (numel,))[0] == 7 * 100 * 8


# --- feedback ------------------------------------------------------------------------------------------------------


def train(comm, make, steps, shape=(12, 10), constant=True, **options):
    """Sums over all steps of what came out and what went in, and the residual's norm after each step."""
    scheme = make(**options)
    out, into, owed = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), []
    for step in range(steps):
        g = gradient(comm.rank, shape, torch.float64, step=0 if constant else step, scale=False)
        into += g
        out += scheme(comm, g)
        owed.append(float(scheme.residual().norm()) if scheme.residual() is not None else 0.0)
    return out, into, owed, scheme.residual()


def drift(make, steps, n=3, **options):
    """(largest element by which the outputs' sum is off the inputs', the norms owed on rank 0)."""
    values = fw.simulate(train, make, steps, ranks=n, cluster=NETWORK, **options).values
    off = values[0][0] - sum(v[1] for v in values)
    return float(off.abs().max()), values[0][2], off + sum(v[3].view_as(off) if v[3] is not None else 0 for v in values)


FED_BACK = ["int8", "int8 blocks", "int8 wide", "top-k", "low rank"]


@pytest.mark.parametrize("name", FED_BACK)
def test_with_feedback_the_sum_of_all_outputs_stays_near_and_without_it_drifts(name):
    short, _, unexplained = drift(MAKERS[name], 20)
    long, owed, also = drift(MAKERS[name], 80)
    assert max(float(unexplained.abs().max()), float(also.abs().max())) < 1e-9, "sum of outputs + residuals = sum of gradients"
    assert long < 2.5 * short, "what all ranks together owe is bounded"
    assert name == "low rank" or max(owed[40:]) < 1.25 * max(owed[:40]), "what one owes, too"
    lost_short, _, _ = drift(MAKERS[name], 20, feedback=False)
    lost_long, _, _ = drift(MAKERS[name], 80, feedback=False)
    assert lost_long > 3 * lost_short and lost_long > 5 * long


def test_the_residual_keeps_its_bound():
    """Of g + e at most a share is left: e <= c (G + e), so e <= c G / (1 - c), step after step."""
    most = max(float(gradient(r, (12, 10), torch.float64, step=s, scale=False).abs().max()) for r in range(3) for s in range(60))
    norm = max(float(gradient(r, (12, 10), torch.float64, step=s, scale=False).norm()) for r in range(3) for s in range(60))
    left = math.sqrt(1 - 5 / 120)  # the 5 largest of 120 hold at least 5/120 of the squares
    bounds = {
        "bfloat16": (math.inf, U16 * most / (1 - U16)),
        "int8": (math.inf, most / (2 * 42) / (1 - 1 / (2 * 42))),
        "int8 wide": (math.inf, most / (2 * 127) / (1 - 1 / (2 * 127))),
        "top-k": (2, left * norm / (1 - left)),
    }
    for name, (order, bound) in bounds.items():
        values = fw.simulate(train, MAKERS[name], 60, constant=False, ranks=3, cluster=NETWORK).values
        for _, _, owed, residual in values:
            reached = max(owed) if order == 2 else float(residual.abs().max())
            assert 0 < reached <= bound, name


def test_bfloat16_feeds_back_its_own_rounding_and_not_that_of_the_additions():
    said = []

    def listening(comm, x):
        said.append((comm.rank, x.double()))
        return ring.all_reduce(comm, x)

    def sums(feedback):
        said.clear()
        _, into, _, _ = fw.simulate(
            train, Bfloat16, 200, feedback=feedback, all_reduce=listening, ranks=2, cluster=NETWORK
        ).values[0]
        return (sum(x for rank, x in said if rank == 0) - into.view(-1)).abs().max()

    assert sums(True) < 0.02 and sums(False) > 0.3


def test_what_feedback_costs_in_memory_and_how_it_is_forgotten():
    def program(comm):
        scheme, forgetful = TopK(k=1), TopK(k=1, feedback=False)
        for each in (scheme, forgetful):
            each(comm, torch.ones(100), bucket="a")
            each(comm, torch.ones(20), bucket="b")
        found = scheme.state_bytes(), forgetful.state_bytes(), scheme.residual("a").sum().item(), scheme.residual("none")
        scheme.reset()
        return (*found, scheme.state_bytes())

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values[0] == (480, 0, 99.0, None, 0)


# --- wrong twins ---------------------------------------------------------------------------------------------------


class Twice(TopK):
    def __call__(self, comm, x, **options):
        return super().__call__(comm, x if self.residual() is None else x + self.residual().view_as(x), **options)


class Undivided(Bfloat16):
    def __call__(self, comm, x, *, op="sum", **rest):
        return super().__call__(comm, x, op="sum", **rest)


class AllLevels(Int8):
    def levels(self, n):
        return 127


class Halved(Bfloat16):
    def exchange(self, *args):
        total, sent = super().exchange(*args)
        return total / 2, sent


class LastRankLost(Bfloat16):
    def exchange(self, comm, message, *rest):
        return super().exchange(comm, message * (comm.rank != comm.size - 1), *rest)


def own_scale(comm, x):
    """Every rank believes that all scales are its own."""
    return torch.stack([x] * comm.size)


def _doubled(comm, x):
    packed = ring.all_gather(comm, x).clone()
    packed[:, 4:8] = packed[:, 0:4]  # the second index becomes the first
    return packed


def _unsorted(comm, x):
    packed = ring.all_gather(comm, x).clone()
    packed[:, :8] = packed[:, :8].view(-1, 2, 4).flip(1).reshape(-1, 8)  # indices swapped, values not
    return packed


def value_is_right(make, op="avg", checks=True):
    """The named check of the value: 4 ranks, sizes that do not divide, gradients of different size."""
    values = fw.simulate(once, make, (67,), op=op, ranks=4, cluster=NETWORK, checks=checks).values
    maker = {Bfloat16: Bfloat16, Int8: Int8, TopK: lambda **o: TopK(k=5, **o)}[
        next(c for c in (Bfloat16, Int8, TopK) if isinstance(make(), c))
    ]
    exact, bound = allowed(maker, [gradient(r, (67,)) for r in range(4)], op)
    return all(torch.equal(values[0], v) for v in values) and wrong_elements(values[0], exact, bound) == 0


def nothing_is_lost(make, steps=60):
    """The named check of feedback: what is owed stays bounded, and outputs and residuals add up to the gradients."""
    off, owed, unexplained = drift(make, steps)
    norm = float(gradient(0, (12, 10), torch.float64, scale=False).norm())
    return 0 < owed[-1] < 50 * norm and float(unexplained.abs().max()) < 1e-9


VALUE_MUTANTS = {
    "not averaged": Undivided,
    "divided twice": Halved,
    "a rank dropped": LastRankLost,
    "scale not agreed": lambda **o: Int8(all_gather=own_scale, **o),
    "int8 sum overflows": AllLevels,
    "index repeated": lambda **o: TopK(k=5, all_gather=_doubled, **o),
    "indices swapped": lambda **o: TopK(k=5, all_gather=_unsorted, **o),
}


@pytest.mark.parametrize("fault", VALUE_MUTANTS)
def test_each_wrong_twin_fails_the_check_of_the_value(fault):
    assert not value_is_right(VALUE_MUTANTS[fault], checks=False), fault


@pytest.mark.parametrize("make", [Bfloat16, Int8, lambda **o: TopK(k=5, **o)])
def test_the_right_ones_pass_it(make):
    assert value_is_right(make) and value_is_right(make, op="sum")


@pytest.mark.parametrize("fault", ["index repeated", "indices swapped"])
def test_indices_that_do_not_rise_are_named_when_checks_are_on(fault):
    with pytest.raises(CommError, match="rank 0 sent top-k indices .* must rise strictly, within 0 to 66"):
        value_is_right(VALUE_MUTANTS[fault])


def test_residuals_dropped_or_added_twice_fail_the_check_of_feedback():
    assert nothing_is_lost(lambda **o: TopK(k=5, **o))
    assert not nothing_is_lost(lambda **o: TopK(k=5, feedback=False, **o))
    assert not nothing_is_lost(lambda **o: Twice(k=5, **o))


def test_a_wrong_byte_formula_is_seen():
    class NoScale(Int8):
        def bytes_sent(self, n, shape, **options):
            return tuple(b - 4 * (n - 1) for b in super().bytes_sent(n, shape, **options))

    run = fw.simulate(counted, NoScale, (10,), None, torch.float32, ranks=2, cluster=NETWORK)
    assert run.trace.bytes_sent(0) != run.values[0][0]


# --- odd tensors ---------------------------------------------------------------------------------------------------


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


def test_after_a_step_of_zeros_low_rank_finds_its_columns_again():
    def program(comm):
        scheme = LowRank(rank=2)
        scheme(comm, torch.zeros(6, 8))
        return scheme(comm, torch.outer(torch.arange(1.0, 7.0), torch.ones(8)))

    total = fw.simulate(program, ranks=2, cluster=NETWORK).values[0]
    torch.testing.assert_close(total, 2 * torch.outer(torch.arange(1.0, 7.0), torch.ones(8)), rtol=1e-5, atol=1e-5)


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


def test_out_and_the_names():
    def program(comm):
        x = torch.ones(2, 3)
        return Int8()(comm, x, out=x) is x and torch.equal(x, torch.full((2, 3), 2.0))

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [True, True]
    assert {name: make().name for name, make in SCHEMES.items()} == {
        "bfloat16": "bfloat16", "int8": "int8", "int8-wide": "int8", "top-k": "top-k", "low-rank": "low rank"}  # fmt: skip


def train_a_model(comm, make, mode, steps=3):
    """A small model under DataParallel: gradients of the last step, what each bucket owes, bytes by the formula."""
    model, scheme = MLP((6, 5, 5, 3), dtype=torch.float64), make()
    dp = DataParallel(model, comm, mode=mode, bucket_bytes=150, all_reduce=scheme)
    scheme.shapes = {b.index: [p.shape for p in b.parameters] for b in dp.buckets}
    for step in range(steps):
        dp(gradient(comm.rank, (4, 6), torch.float64, step=step)).square().mean().backward()
        dp.synchronise()
    dp.close()
    owed = [None if scheme.residual(b.index) is None else scheme.residual(b.index).numel() for b in dp.buckets]
    sent = sum(
        scheme.bytes_sent(comm.size, (b.numel,), dtype=b.dtype, shapes=scheme.shapes[b.index])[comm.rank] for b in dp.buckets
    )
    grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) if steps else None
    return grads, owed, [b.numel for b in dp.buckets], steps * sent


@pytest.mark.parametrize("name", MAKERS)
def test_it_stands_where_data_parallel_takes_an_all_reduce(name):
    for mode in ("bucketed", "overlapped"):
        run = fw.simulate(train_a_model, MAKERS[name], mode, ranks=3, cluster=NETWORK)
        grads, owed, sizes, _ = run.values[0]
        assert all(torch.equal(grads, other[0]) for other in run.values) and len(sizes) > 2
        assert owed == sizes, "a residual for each bucket"
        start = fw.simulate(train_a_model, MAKERS[name], mode, 0, ranks=3, cluster=NETWORK).trace
        assert [run.trace.bytes_sent(r) - start.bytes_sent(r) for r in range(3)] == [value[3] for value in run.values]


def test_token_counts_go_uncompressed_through_data_parallel():
    def program(comm):
        model = MLP((6, 3), dtype=torch.float64)
        dp = DataParallel(model, comm, average="tokens", all_reduce=TopK(ratio=1.0))
        dp(gradient(comm.rank, (2 + comm.rank, 6), torch.float64)).sum().backward()
        return dp.synchronise(tokens=2 + comm.rank)

    assert fw.simulate(program, ranks=3, cluster=NETWORK).values == [2 + 3 + 4] * 3


# --- real ranks, and the reader's own ring -------------------------------------------------------------------------


def my_ring(comm, x):
    """As in notebook 03: whole chunks, one exchange after the other."""
    n, r = comm.size, comm.rank
    total = x.reshape(-1).clone()
    chunk = total.tensor_split(n)
    for s in range(n - 1):
        give, take = chunk[(r - 1 - s) % n], chunk[(r - 2 - s) % n]
        take += comm.exchange(give, (r + 1) % n, torch.empty_like(take), (r - 1) % n)
    for s in range(n - 1):
        comm.exchange(chunk[(r - s) % n], (r + 1) % n, chunk[(r - 1 - s) % n], (r - 1) % n)
    return total.view(x.shape)


def everything(comm, all_reduce, forbid=False):
    if forbid:  # whatever torch would send by itself
        comm.native.all_reduce = comm.native.all_gather = None
    found = {}
    for name, make in MAKERS.items():
        scheme = make(all_reduce=all_reduce)
        for step in range(2):
            found[name] = scheme(comm, gradient(comm.rank, (7, 11), step=step))
        found[name, "owed"] = scheme.residual()
    return found


def test_real_ranks_give_the_simulators_bits_over_the_readers_ring():
    with fw.pool(ranks=4) as pool:
        real = pool.run(everything, my_ring, True, stream=False)
    modelled = fw.simulate(everything, my_ring, ranks=4, cluster=NETWORK)
    for here, there in zip(real.values, modelled.values, strict=True):
        for name, value in here.items():
            assert torch.equal(value, there[name]), name
            assert isinstance(name, tuple) or torch.equal(value, real.values[0][name]), name
    expected = sum(2 * make().bytes_sent(4, (7, 11))[0] for make in MAKERS.values())
    assert real.trace.bytes_sent(0) == modelled.trace.bytes_sent(0) == expected, "the ring that was given carried all of it"


def test_a_share_of_the_entries_is_rounded_up():
    assert [TopK(ratio=0.1).count(n) for n in (1, 10, 11, 19, 20, 21)] == [1, 1, 2, 2, 2, 3]


def owed_over(comm, steps, cancels):
    """Norms of what this rank owes after each step, of steady gradients; `cancels`: how large a part cancels."""
    scheme, sizes = LowRank(rank=1), []
    common = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    apart = torch.outer(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])).double() * (1 - 2 * comm.rank)
    for _ in range(steps):
        scheme(comm, common + cancels * apart)
        sizes.append(scheme.residual().clone())
    return sizes


@pytest.mark.parametrize("cancels", [0.0, 1.0])
def test_what_low_rank_owes_on_one_rank_stays_bounded(cancels):
    """The warm start turns P towards what is owed most, so nothing piles up, even where a part of the gradients cancels."""
    owed = fw.simulate(owed_over, 200, cancels, ranks=2, cluster=NETWORK).values
    for of_rank in owed:
        norms = [float(e.norm()) for e in of_rank]
        assert max(norms[100:]) <= max(norms[:100]) * 1.5 < 50  # of gradients of norm 3.8
