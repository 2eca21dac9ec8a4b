"""Gathered product: equal to one device's product, bytes and times by the formula, overlap seen, faults caught."""

import pytest
import torch

import fourwalls as fw
from fourwalls.bench.gathered_product import PacedLink, paced
from fourwalls.cost.hardware import Link, uniform
from fourwalls.kernels import gathered_product as library
from fourwalls.kernels.gathered_product import gathered_product, sent_bytes
from fourwalls.ranks.trace import PS

from .judge import planted

torch.set_num_threads(1)

NETWORK = uniform(1e-6, 1e9)
RAGGED = {1: (3,), 2: (2, 5), 3: (4, 0, 1), 4: (1, 2, 3, 4), 5: (0, 3, 0, 2, 1)}
K, M = 6, 5


def numbers(name, *shape, whole=False, dtype=torch.float64):
    dice = torch.Generator().manual_seed(sum(map(ord, name)))
    made = torch.randint(-9, 10, shape, generator=dice) if whole else torch.randn(shape, generator=dice, dtype=torch.float64)
    return made.to(dtype)


def on_rank(comm, product, rows, whole, dtype, options):
    """(y, dx, dw) of this rank, whose w and upstream gradient are its own."""
    x = numbers("x", sum(rows), K, whole=whole, dtype=dtype).split(rows)[comm.rank].clone().requires_grad_()
    w = numbers(f"w{comm.rank}", K, M + comm.rank, whole=whole, dtype=dtype).requires_grad_()
    y = product(comm, x, w, rows=rows, **options)
    up = numbers(f"up{comm.rank}", *y.shape, whole=whole, dtype=dtype)
    (y * up).sum().backward()
    return y.detach(), x.grad, w.grad


def faults(values, rows, whole, dtype):
    """Names of what lies outside the bound of one device in float64: (y, dx, dw) of every rank."""
    x = numbers("x", sum(rows), K, whole=whole, dtype=dtype).double()
    ws = [numbers(f"w{r}", K, M + r, whole=whole, dtype=dtype).double() for r in range(len(rows))]
    ups = [numbers(f"up{r}", sum(rows), M + r, whole=whole, dtype=dtype).double() for r in range(len(rows))]
    dx = sum(up @ w.t() for up, w in zip(ups, ws, strict=True)).split(rows)
    size_dx = sum(up.abs() @ w.abs().t() for up, w in zip(ups, ws, strict=True)).split(rows)
    wrong = []
    for r, (w, up) in enumerate(zip(ws, ups, strict=True)):
        want = (x @ w, dx[r], x.t() @ up)
        size = (x.abs() @ w.abs(), size_dx[r], x.abs().t() @ up.abs())
        terms = (K, sum(len(w.t()) + 1 for w in ws), sum(rows))
        for name, got, exact, most, count in zip(("y", "dx", "dw"), values[r], want, size, terms, strict=True):
            bound = 0 if whole else 2 * count * torch.finfo(dtype).eps * most
            if got.shape != exact.shape or not bool(((got.double() - exact).abs() <= bound).all()):
                wrong.append(f"{name} of rank {r}")
    return wrong


def outcome(product, n, *, whole=False, dtype=torch.float64, **options):
    rows = RAGGED[n]
    run = fw.simulate(on_rank, product, rows, whole, dtype, options, ranks=n, cluster=NETWORK)
    return faults(run.values, rows, whole, dtype), run


# --- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", RAGGED)
def test_product_and_gradients_are_those_of_one_device(n):
    for overlap in (True, False):
        assert outcome(gathered_product, n, overlap=overlap)[0] == []
        assert outcome(gathered_product, n, overlap=overlap, dtype=torch.float32)[0] == []
    both = [outcome(gathered_product, n, overlap=overlap, whole=True, dtype=torch.float32) for overlap in (True, False)]
    assert both[0][0] == both[1][0] == []
    for mine, apart in zip(both[0][1].values, both[1][1].values, strict=True):  # whole numbers: the same bits
        assert all(torch.equal(a, b) for a, b in zip(mine, apart, strict=True))


def test_the_bound_bites():
    _, run = outcome(gathered_product, 3)
    for k, name in enumerate(("y", "dx", "dw")):
        values = [[part.clone() for part in value] for value in run.values]
        values[0][k][1, 2] += 1e-12  # more than ten bounds: sums of at most 18 terms of size 3 in float64
        assert faults(values, RAGGED[3], False, torch.float64) == [f"{name} of rank 0"]


def test_equal_rows_need_not_be_told_and_only_one_gradient_is_possible():
    def program(comm, x_needs, w_needs):
        x = numbers("x", 2, K).requires_grad_(x_needs)
        w = numbers(f"w{comm.rank}", K, M).requires_grad_(w_needs)
        gathered_product(comm, x, w).sum().backward()
        return x.grad, w.grad

    for needs in ((True, False), (False, True)):
        run = fw.simulate(program, *needs, ranks=3, cluster=NETWORK)
        assert all((x is not None, w is not None) == needs for x, w in run.values)
        assert run.trace.messages_sent() == 3 * 2 * (1 + needs[0])


# --- cost -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", RAGGED)
def test_bytes_and_messages_are_those_of_the_formula(n):
    runs = [outcome(gathered_product, n, overlap=overlap)[1].trace for overlap in (True, False)]
    for trace in runs:
        for r in range(n):
            assert trace.bytes_sent(r) == sum(sent_bytes(RAGGED[n], K, 8, r))
            assert trace.messages_sent(r) == 2 * (n - 1)
    assert sent_bytes((2, 3, 5), 10, 4, 1) == (5 * 40, 7 * 40)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("message_ps", [10 * 10**9, 30 * 10**9])
def test_time_is_that_of_the_formula_to_the_picosecond(n, message_ps):
    rows, product_ps = 8, 20 * 10**9
    wire = uniform(0, rows * K * 8 / (message_ps / PS))
    assert wire.link(0, 1).picoseconds(rows * K * 8) == message_ps

    def program(comm, overlap):
        gathered_product(comm, torch.ones(rows, K, dtype=torch.float64), torch.ones(K, M, dtype=torch.float64),
                         overlap=overlap, seconds=product_ps / PS / rows)  # fmt: skip

    apart, overlapped = (fw.simulate(program, o, ranks=n, cluster=wire).trace.makespan_ps for o in (False, True))
    assert apart == (n - 1) * message_ps + n * product_ps
    assert overlapped == (n - 1) * max(message_ps, product_ps) + product_ps


def test_backward_overlaps_too():
    """Each sum travels while the next product is made, the last one while this rank's own is."""
    n, rows, step = 4, 8, 20 * 10**9
    wire = uniform(0, rows * K * 8 / (step / PS))

    def program(comm, overlap):
        x = torch.ones(rows, K, dtype=torch.float64, requires_grad=True)
        y = gathered_product(comm, x, torch.ones(K, M, dtype=torch.float64), overlap=overlap, seconds=step / PS / rows)
        begin = comm.clock()
        y.sum().backward()
        return comm.clock() - begin

    apart, overlapped = (max(fw.simulate(program, o, ranks=n, cluster=wire).values) for o in (False, True))
    assert (apart, overlapped) == ((n - 1) * step + n * step, n * step)


def seen_overlapping(trace, rank):
    """Picoseconds in which `rank` received while it multiplied."""
    works = [(e.start, e.end) for e in trace.where(rank=rank, kind="forward")]
    return sum(max(0, min(e.end, end) - max(e.start, start)) for e in trace.where(rank=rank, kind="recv") for start, end in works)


def test_two_real_ranks_overlap_and_the_bits_are_those_of_simulated_ones():
    link = Link("stated", 0.001, 64 * 256 * 4 / 0.019)

    def program(comm, overlap):
        wire = comm if comm.simulated else PacedLink(comm, link)
        x, w = (numbers(*given, whole=True, dtype=torch.float32) for given in ((f"x{comm.rank}", 64, 256), ("w", 256, 64)))
        return gathered_product(wire, x, w, overlap=overlap, seconds=0.02 / 64)

    with fw.pool(ranks=2) as pool:
        real = {overlap: pool.run(program, overlap) for overlap in (True, False)}
        taken = pool.run(paced, 0.02, link, 1).values
    assert all(v["right"] and min(v["apart"] + v["overlapped"]) >= 0.02 for v in taken)
    model = {o: fw.simulate(program, o, ranks=2, cluster=uniform(link.alpha, link.bandwidth)) for o in (True, False)}
    for overlap, run in real.items():
        for r in range(2):
            assert torch.equal(run.values[r], model[overlap].values[r])
            assert run.trace.bytes_sent(r) == 64 * 256 * 4
            for trace in (run.trace, model[overlap].trace):
                assert (seen_overlapping(trace, r) >= 0.019 * PS) is overlap


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "w", "rows", "words"),
    [
        ((2, 3), (4, 5), None, r"allowed: x \(rows, k\), w \(k, columns\)"),
        ((2, 3, 4), (4, 5), None, "flatten other dims"),
        ((2, 3), (3, 5), (2,), "one number of at least 0 for each of 2 ranks"),
        ((2, 3), (3, 5), (3, -1), "at least 0"),
        ((2, 3), (3, 5), (3, 2), "says 3 here, but x has 2"),
    ],
)
def test_bad_input_is_refused(x, w, rows, words):
    def program(comm):
        gathered_product(comm, torch.ones(x), torch.ones(w), rows=rows)

    with pytest.raises(fw.RankError, match=words):
        fw.simulate(program, ranks=2)


def test_ranks_that_say_different_rows_are_named():
    def program(comm):
        gathered_product(comm, torch.ones(2 + comm.rank, 3), torch.ones(3, 4))

    with pytest.raises(fw.MismatchError):
        fw.simulate(program, ranks=2)

    def dtypes(comm):
        gathered_product(comm, torch.ones(2, 3), torch.ones(3, 4).double())

    with pytest.raises(fw.RankError, match="one float dtype"):
        fw.simulate(dtypes, ranks=1)


# --- mutants ----------------------------------------------------------------------------------------------------------
FORWARD, BACKWARD = "owner = (me - hop) % size", "owner = (me - 1 - hop) % size"
FAULTS = {  # name: (the fault, what it spoils, what it leaves right)
    "own block multiplied for every rank": (("torch.mm(blocks[owner], w", "torch.mm(blocks[me], w"), ("y",), ("dx", "dw")),
    "a chunk multiplied twice": (
        ("torch.mm(blocks[owner], w", "torch.mm(blocks[owner if hop < size - 1 else me], w"), ("y",), ("dx", "dw")),
    "sums added twice": (("mine += arriving", "mine += 2 * arriving"), ("dx",), ("y", "dw")),
    "only the last rank adds": (("mine += arriving", "mine = arriving"), ("dx",), ("y", "dw")),
    "sums one hop from home": ((BACKWARD, "owner = (me - hop) % size"), ("dx",), ("y", "dw")),
    "weights' gradient from own rows alone": (
        ("ctx.save_for_backward(whole, w)", "ctx.save_for_backward(torch.zeros_like(whole).copy_(whole) * 0, w)"),
        ("dw",), ("y", "dx")),
    "gradient without the transpose of its sign": (("grad.split(rows)", "(-grad).split(rows)"), ("dx",), ("y", "dw")),
}  # fmt: skip


@pytest.fixture
def fresh_memory_is_nan():
    """What nobody has written must not look right because an earlier test has left it there."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    change, wrong, right = FAULTS[name]
    rows = (2, 2, 2)
    wrong_product = planted(library, *change).gathered_product
    run = fw.simulate(on_rank, wrong_product, rows, False, torch.float64, {}, ranks=3, cluster=NETWORK)
    said = faults(run.values, rows, False, torch.float64)
    assert all(any(word.startswith(part) for word in said) for part in wrong), said
    assert not any(word.startswith(part) for word in said for part in right), said


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    "change",
    [
        (FORWARD, "owner = (me + hop) % size"),
        ("            for message in messages:\n                message.wait()\n", ""),
        ("        for message in messages:\n            message.wait()\n        if hop:", "        if hop:"),
        ("messages = [comm.irecv(arriving, (me - 1) % size), ", "messages = [comm.irecv(arriving, (me - 2) % size), "),
    ],
    ids=["wrong order of chunks", "missing wait", "missing wait in backward", "wrong neighbour"],
)
def test_a_fault_in_the_messages_is_caught(change):
    """Refused by the ranks, or other numbers come out: what was not waited for is not there."""
    rows = (2, 2, 2)
    try:
        wrong_product = planted(library, *change).gathered_product
        run = fw.simulate(on_rank, wrong_product, rows, True, torch.float64, {}, ranks=3, cluster=NETWORK)
    except (fw.CommError, RuntimeWarning):
        return
    assert faults(run.values, rows, True, torch.float64)


def test_gathering_first_is_seen_as_such():
    """Waiting before the product gives the right numbers, and no overlap: only time and Trace can tell."""
    slow = planted(library,
                   "            if overlap:\n                with work(f\"rows of {owner}\", rows[owner], item, \"forward\"):",
                   "            for message in messages:\n                message.wait()\n            if overlap:\n"
                   "                with work(f\"rows of {owner}\", rows[owner], item, \"forward\"):")  # fmt: skip
    found, run = outcome(slow.gathered_product, 4, seconds=1e-3)
    right = outcome(gathered_product, 4, seconds=1e-3)[1]
    assert found == [] and sum(seen_overlapping(run.trace, r) for r in range(4)) == 0
    assert all(seen_overlapping(right.trace, r) > 0 for r in range(4))
