"""Every collective x algorithm against an oracle that knows no algorithm: sizes, shapes, dtypes, operations, in the simulator."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives
from fourwalls.collectives.chunks import chunk_sizes
from fourwalls.collectives.reductions import OPS, exact_and_bound, wrong_elements
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import uniform

WORLD_SIZES = range(1, 17)
SHAPES = [(), (0,), (1,), (7,), (16,), (3, 5), (2, 0, 3), (33,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
DTYPES += [torch.bool, torch.complex64, torch.complex128]
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "all_gather", "gather", "scatter")
PAIRS = [(c, a) for c in (*REDUCING, *MOVING) for a in collectives.ALGORITHMS[c]]
NETWORK = uniform(1e-6, 1e9)


def data(rank, shape, dtype, *, strided=False, seed=0):
    """Values of rank `rank`: distinct for every rank and place, small enough that no sum or product of 16 overflows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if strided and len(shape) > 0:
        return data(rank, (*shape, 2), dtype, seed=seed)[..., 0]
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.3
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return (torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5 + 1).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def program(comm, collective, algorithm, shape, dtype, strided, options):
    x = data(comm.rank, shape, dtype, strided=strided)
    kept = x.clone()
    result = collectives.get_algorithm(collective, algorithm)(comm, x, **options)
    assert torch.equal(x, kept), "the input was changed"
    return result


def expected(collective, inputs, n, op, root):
    """By rank: (value, bound), or None where nothing is returned."""
    if collective in REDUCING:
        value, bound = exact_and_bound(inputs, op)
        if collective == "all_reduce":
            return [(value, bound)] * n
        if collective == "reduce":
            return [(value, bound) if r == root else None for r in range(n)]
        sizes = chunk_sizes(value.numel(), n)
        return list(zip(value.reshape(-1).split(sizes), bound.reshape(-1).split(sizes), strict=True))
    exact = lambda t: (t, torch.zeros(t.shape, dtype=torch.float64))  # noqa: E731
    if collective == "broadcast":
        return [exact(inputs[root])] * n
    if collective == "scatter":
        return [exact(piece) for piece in inputs[root].reshape(-1).split(chunk_sizes(inputs[root].numel(), n))]
    stack = exact(torch.stack(inputs))
    return [stack if collective == "all_gather" or r == root else None for r in range(n)]


def check(collective, algorithm, n, shape, dtype, op="sum", root=0, strided=False):
    options = {"op": op} if collective in REDUCING else {}
    if collective in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = root
    run = fw.simulate(program, collective, algorithm, shape, dtype, strided, options, ranks=n, cluster=NETWORK)
    inputs = [data(r, shape, dtype, strided=strided) for r in range(n)]
    for rank, want in enumerate(expected(collective, inputs, n, op, root)):
        got = run.values[rank]
        if want is None:
            assert got is None
            continue
        assert got.dtype == dtype and wrong_elements(got, *want) == 0, (rank, got, want)
    if collective in ("all_reduce", "all_gather", "broadcast"):
        assert all(torch.equal(v, run.values[0]) for v in run.values)
    return run


# Every world size with every algorithm; shape, dtype, operation and root change from case to case.
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_against_the_oracle(collective, algorithm):
    shapes, dtypes = itertools.cycle(SHAPES), itertools.cycle(DTYPES)
    for n in WORLD_SIZES:
        for k in range(4):
            dtype = next(dtypes)
            allowed = [op for op in OPS if dtype in OPS[op].dtypes]
            check(
                collective,
                algorithm,
                n,
                next(shapes),
                dtype,
                allowed[(n + k) % len(allowed)],
                (n * 7 + k) % n,
                strided=k % 2 == 1,
            )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_operation_and_dtype(op, dtype):
    if dtype not in OPS[op].dtypes:
        with pytest.raises(ValueError, match=f"{op} of .* is not defined; {op} takes"):
            collectives.get_algorithm("all_reduce")(None, torch.ones(3, dtype=dtype), op=op)
        return
    for algorithm in collectives.ALGORITHMS["all_reduce"]:
        for n in (1, 3, 4):
            check("all_reduce", algorithm, n, (5, 2), dtype, op)


COUNTED = ((1, 12), (2, 9), (3, 3), (4, 32), (5, 2), (6, 36), (8, 37), (13, 5), (16, 48))  # (ranks, elements)
IN_TWO_PARTS = {("reduce_scatter", "tree"): ("reduce", "scatter"), ("all_gather", "tree"): ("gather", "broadcast")}
CHAINS = (("broadcast", "ring"), ("reduce", "ring"))
NOT_MODELLED = (("all_reduce", "shared_memory"),)  # sends nothing; on simulated ranks the ring stands in


@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in PAIRS if pair not in CHAINS + NOT_MODELLED])
def test_bytes_messages_and_time_equal_the_formula(collective, algorithm):
    name = algorithm.removesuffix("_blocking")
    for n, numel in COUNTED:
        total = numel * n if collective in ("all_gather", "gather") else numel
        parts = IN_TWO_PARTS.get((collective, algorithm), (collective,))
        costs = [collective_cost(part, name, n, total, NETWORK) for part in parts]
        trace = check(collective, algorithm, n, (numel,), torch.float32).trace
        assert [trace.bytes_sent(r) for r in range(n)] == [sum(c.bytes_sent[r] for c in costs) for r in range(n)]
        assert [trace.messages_sent(r) for r in range(n)] == [sum(c.messages_sent[r] for c in costs) for r in range(n)]
        assert trace.makespan_ps == sum(c.picoseconds for c in costs)


@pytest.mark.parametrize(("collective", "algorithm"), CHAINS)
def test_a_chain_sends_everything_once_from_every_rank_but_the_last(collective, algorithm):
    for n, numel in COUNTED:
        trace = check(collective, algorithm, n, (numel,), torch.float32).trace
        last = n - 1 if collective == "broadcast" else 0
        assert [trace.bytes_sent(r) for r in range(n)] == [0 if r == last else 4 * numel for r in range(n)]
        assert trace.messages_sent() == n - 1
        assert trace.makespan_ps == (n - 1) * NETWORK.link(0, 1).picoseconds(4 * numel)


def gather_chunks(comm, algorithm, numel):
    x = torch.arange(float(numel)).view(1, -1) + comm.rank
    mine = collectives.reduce_scatter(comm, x, algorithm=algorithm)
    on_root = collectives.gather(
        comm, mine, root=comm.size - 1, numel=numel, algorithm="tree" if algorithm == "ring" else algorithm
    )
    return collectives.all_gather(comm, mine, numel=numel, algorithm=algorithm), on_root


@pytest.mark.parametrize("algorithm", ["ring", "tree", "star"])
def test_all_reduce_is_reduce_scatter_then_all_gather(algorithm):
    for n, numel in ((1, 4), (3, 7), (4, 2), (5, 5), (16, 40)):
        run = fw.simulate(gather_chunks, algorithm, numel, ranks=n, cluster=NETWORK)
        want = torch.arange(float(numel)) * n + n * (n - 1) / 2
        assert all(torch.equal(joined, want) for joined, _ in run.values)
        assert torch.equal(run.values[-1][1], want) and all(on_root is None for _, on_root in run.values[:-1])


def late(comm, algorithm, who):
    with comm.compute("late", seconds=float(comm.rank == who)):
        pass
    collectives.barrier(comm, algorithm=algorithm)
    return comm.clock()


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["barrier"])
def test_nobody_leaves_a_barrier_before_the_last_has_come(algorithm):
    for n in WORLD_SIZES:
        for who in {0, n // 2, n - 1}:
            assert min(fw.simulate(late, algorithm, who, ranks=n, cluster=NETWORK).values) >= 10**12


def test_segments_overlap_and_change_nothing():
    """With k segments a chain of n ranks takes n - 2 + k short messages, not (n - 1) k; and bits do not depend on segments."""

    def chain(comm, segment_bytes):
        return collectives.broadcast(
            comm, torch.arange(64.0) * (comm.rank == 1), root=1, algorithm="ring", segment_bytes=segment_bytes
        )

    def around(comm, segment_bytes):
        return collectives.all_reduce(comm, data(comm.rank, (65,), torch.float32), segment_bytes=segment_bytes)

    run = fw.simulate(chain, 16, ranks=5, cluster=NETWORK)
    assert run.trace.makespan_ps == (5 - 2 + 16) * NETWORK.link(0, 1).picoseconds(16)
    assert all(torch.equal(v, torch.arange(64.0)) for v in run.values)
    whole = fw.simulate(around, None, ranks=4, cluster=NETWORK).values[0]
    for segment_bytes in (1, 4, 12, 28, 10**6):
        run = fw.simulate(around, segment_bytes, ranks=4, cluster=NETWORK)
        assert all(torch.equal(v, whole) for v in run.values)
        assert run.trace.bytes_sent() == 2 * 3 * 65 * 4
        per_chunk = -(-17 // max(1, segment_bytes // 4))
        assert run.trace.messages_sent(2) == 6 * per_chunk


def additions_priced(comm):
    collectives.all_reduce(comm, torch.zeros(400), algorithm="ring")


def test_additions_are_priced_where_the_device_has_a_price():
    from fourwalls.cost.hardware import Cluster, Device, Link

    link = Link("wire", 1e-6, 1e9)
    device = Device("adder", {"float32": 1e9}, 2**30, 1e12)
    run = fw.simulate(additions_priced, ranks=4, cluster=Cluster("c", device, link, link))
    adds = run.trace.where(rank=0, kind="reduce")
    assert [e.end - e.start for e in adds] == [100 * 1000] * 3  # 100 elements at 1 ns an addition
    assert run.trace.makespan_ps == collective_cost("all_reduce", "ring", 4, 400, link).picoseconds + 3 * 100 * 1000


def in_place(comm, algorithm, strided):
    if strided:  # a column of a matrix: its neighbour must stay as it is
        matrix = torch.arange(8.0).view(4, 2) + 100 * comm.rank
        x = matrix[:, 0]
    else:
        matrix = torch.arange(4.0) * 2 + 100 * comm.rank
        x = matrix
    result = collectives.all_reduce(comm, x, algorithm=algorithm, out=x)
    assert result is x
    return matrix


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_out_writes_in_place_and_spares_the_neighbour(algorithm):
    for n in (1, 2, 5):
        sums = torch.tensor([0.0, 2.0, 4.0, 6.0]) * n + 100 * sum(range(n))
        for rank, matrix in enumerate(fw.simulate(in_place, algorithm, True, ranks=n, cluster=NETWORK).values):
            assert torch.equal(matrix[:, 0], sums)
            assert torch.equal(matrix[:, 1], torch.tensor([1.0, 3.0, 5.0, 7.0]) + 100 * rank)
        assert all(torch.equal(m, sums) for m in fw.simulate(in_place, algorithm, False, ranks=n, cluster=NETWORK).values)


def test_out_elsewhere_must_fit():
    x = torch.ones(2, 3)

    def program(comm, out):
        return collectives.all_reduce(comm, x, out=out)

    out = torch.zeros(3, 2).T  # right shape, other strides
    assert torch.equal(fw.simulate(program, out, ranks=2, cluster=NETWORK).values[0], 2 * x)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(fw.RankError, match="ValueError: out is .*; the result is torch.float32 \\(2, 3\\)"):
            fw.simulate(program, wrong, ranks=2, cluster=NETWORK)


def awkward(comm, algorithm):
    x = (torch.arange(6.0) + 1j * comm.rank).view(2, 3).T.conj()  # strided, and conjugated only on paper
    grad = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    return collectives.all_reduce(comm, x, algorithm=algorithm), collectives.all_reduce(comm, grad, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_lazily_conjugated_and_autograd_inputs(algorithm):
    for x, grad in fw.simulate(awkward, algorithm, ranks=3, cluster=NETWORK).values:
        assert torch.equal(x, (torch.arange(6.0) * 3 - 3j).view(2, 3).T)
        assert torch.equal(grad, torch.full((3,), 6.0)) and not grad.requires_grad


def on_a_group(comm):
    group = comm.split(comm.rank % 2, -comm.rank)
    return collectives.all_reduce(group, torch.tensor(comm.rank)), collectives.broadcast(group, torch.tensor(comm.rank), root=0)


def test_collectives_of_a_group_stay_in_the_group():
    values = fw.simulate(on_a_group, ranks=7, cluster=NETWORK).values
    assert [(int(s), int(b)) for s, b in values] == [(12, 6) if r % 2 == 0 else (9, 5) for r in range(7)]


def nearly(comm):
    return collectives.all_reduce(comm, torch.tensor([[1e8, 1.0, -1e8, 1.0][comm.rank]] * 8))


def test_rounding_depends_on_the_place_but_not_on_the_rank():
    """1e8 + 1 - 1e8 + 1 in float32, added in other orders in other chunks: the sums may differ by place, never by rank."""
    values = fw.simulate(nearly, ranks=4, cluster=NETWORK).values
    assert all(torch.equal(v, values[0]) for v in values)
    assert len(set(values[0].tolist())) > 1
    exact, bound = exact_and_bound([torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)])
    assert all(wrong_elements(v.reshape(1), exact, bound) == 0 for v in values[0])


def test_meta_tensors_cost_as_much_as_real_ones():
    def program(comm, device):
        return collectives.all_reduce(comm, torch.empty(10, device=device)).is_meta

    real, meta = (fw.simulate(program, device, ranks=4, cluster=NETWORK) for device in ("cpu", "meta"))
    assert meta.values == [True] * 4 and meta.trace.makespan_ps == real.trace.makespan_ps


def test_an_absent_algorithm_or_operation_is_named():
    with pytest.raises(ValueError, match="no algorithm 'ring' for scatter; it can be done by tree, star"):
        collectives.get_algorithm("scatter", "ring")
    with pytest.raises(ValueError, match="did you mean 'star'"):
        collectives.get_algorithm("reduce", "start")
    with pytest.raises(ValueError, match="no collective 'allreduce'"):
        collectives.get_algorithm("allreduce")
    with pytest.raises(ValueError, match="op is 'mean'; .*did you mean 'avg'"):
        collectives.all_reduce(None, torch.ones(1), op="mean")
    with pytest.raises(ValueError, match="an average of whole numbers is no whole number"):
        collectives.all_reduce(None, torch.ones(1, dtype=torch.int64), op="avg")
    with pytest.raises(ValueError, match="complex numbers have no order"):
        collectives.all_reduce(None, torch.tensor([2 + 3j, 3 + 2j]), op="max")


@pytest.mark.parametrize("name", [name for name in collectives.ALGORITHMS if name != "barrier"])
def test_what_is_no_tensor_is_refused_in_words(name):
    for x in ([1.0, 2.0], 3.0, None):
        with pytest.raises(ValueError, match=f"{name} takes a tensor, not {type(x).__name__}; try torch.as_tensor"):
            getattr(collectives, name)(None, x)
    with pytest.raises(ValueError, match="takes a dense tensor, not torch.sparse_coo"):
        getattr(collectives, name)(None, torch.eye(2).to_sparse())
