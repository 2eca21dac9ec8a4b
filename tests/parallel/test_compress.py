"""Compressed all-reduces: how far off the sum may be, what they send, and where they stand: under DataParallel, on real ranks."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives.reductions import wrong_elements
from fourwalls.nn.mlp import MLP
from fourwalls.parallel.compress import SCHEMES, Int8, LowRank, TopK
from fourwalls.parallel.data import DataParallel

from .compressors import MAKERS, NETWORK, allowed, gradient, once


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


def test_a_wrong_byte_formula_is_seen():
    class NoScale(Int8):
        def bytes_sent(self, n, shape, **options):
            return tuple(b - 4 * (n - 1) for b in super().bytes_sent(n, shape, **options))

    run = fw.simulate(counted, NoScale, (10,), None, torch.float32, ranks=2, cluster=NETWORK)
    assert run.trace.bytes_sent(0) != run.values[0][0]


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


def test_a_share_of_the_entries_is_rounded_up():
    assert [TopK(ratio=0.1).count(n) for n in (1, 10, 11, 19, 20, 21)] == [1, 1, 2, 2, 2, 3]


def test_out_and_the_names():
    def program(comm):
        x = torch.ones(2, 3)
        return Int8()(comm, x, out=x) is x and torch.equal(x, torch.full((2, 3), 2.0))

    assert fw.simulate(program, ranks=2, cluster=NETWORK).values == [True, True]
    assert {name: make().name for name, make in SCHEMES.items()} == {
        "bfloat16": "bfloat16", "int8": "int8", "int8-wide": "int8", "top-k": "top-k", "low-rank": "low rank"}  # fmt: skip


# --- under DataParallel ----------------------------------------------------------------------------------------------
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


# --- real ranks, and the reader's own ring ---------------------------------------------------------------------------
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
