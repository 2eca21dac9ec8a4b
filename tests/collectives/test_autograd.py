"""Conjugate pairs: gradients by finite differences in float64, for even and uneven chunks; wrong twins must be caught."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import autograd, ring
from fourwalls.collectives.chunks import chunk_sizes
from fourwalls.cost.hardware import uniform

NETWORK = uniform(1e-6, 1e9)
STEP = 1e-6
# what each rank holds before and after: the same tensor on all ("same"), a tensor of its own ("own"), its chunk ("chunk")
KINDS = {
    "copy_to": ("same", "own"),
    "reduce_from": ("own", "same"),
    "scatter_to": ("same", "chunk"),
    "gather_from": ("chunk", "same"),
    "all_gather": ("chunk", "own"),
    "reduce_scatter": ("own", "chunk"),
    "all_reduce": ("own", "own"),
    "all_to_all": ("own", "own"),
}
SHAPE = (4, 6)


def numbers(seed, shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def operate(comm, name, x, dim, size):
    function = getattr(autograd, name)
    if name in ("gather_from", "all_gather"):
        return function(comm, x, dim, size)
    return function(comm, x, dim) if name in ("scatter_to", "reduce_scatter") else function(comm, x)


def inputs_of(name, n, shape, dim):
    """What the ranks hold: one tensor in all where it is "same", else one each."""
    if KINDS[name][0] == "same":
        return [numbers(1, shape)]
    if KINDS[name][0] == "chunk":
        return list(numbers(1, shape).split(chunk_sizes(shape[dim], n), dim))
    return [numbers(1 + r, shape) for r in range(n)]


def loss_of(comm, name, y):
    """This rank's part of the loss: curved, so that a gradient depends on the value; other weights on each rank, unless all
    hold the same and count the loss once.
    """
    return ((y + 0.1 * y**2) * numbers(100 + (comm.rank if KINDS[name][1] != "same" else 0), y.shape)).sum()


def forward(comm, name, inputs, dim, size):
    x = inputs[comm.rank % len(inputs)].clone()
    loss = loss_of(comm, name, operate(comm, name, x, dim, size))
    return float(loss) if KINDS[name][1] != "same" or comm.rank == 0 else 0.0


def backward(comm, name, inputs, dim, size, twin):
    x = inputs[comm.rank % len(inputs)].clone().requires_grad_()
    loss_of(comm, name, operate(comm, name, x, dim, size)).backward()
    return x.grad * {"right": 1, "n times": comm.size, "zero": 0}[twin]


def finite_differences(name, n, inputs, dim, size):
    """dL/dx of every element by central differences of the whole loss, L = the sum over ranks."""

    def loss(values):
        return sum(fw.simulate(forward, name, values, dim, size, ranks=n, cluster=NETWORK, checks=False).values)

    gradients = []
    for which, x in enumerate(inputs):
        gradient = torch.zeros_like(x)
        for place in range(0, x.numel(), max(1, x.numel() // 5)):  # a handful of places in every rank's tensor
            moved = []
            for sign in (1, -1):
                copy = [t.clone() for t in inputs]
                copy[which].view(-1)[place] += sign * STEP
                moved.append(loss(copy))
            gradient.view(-1)[place] = (moved[0] - moved[1]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


def worst(gradients, wanted, n):
    """The largest difference at the places that were probed, over all ranks."""
    return max(float((g - w)[w != 0].abs().max()) for r in range(n) for g, w in [(gradients[r], wanted[r % len(wanted)])])


# The loss is a polynomial of degree 2, so a central difference has no error but rounding: |L| eps / step, far below this.
BOUND = 1e-6


@pytest.mark.parametrize("name", KINDS)
def test_gradients_by_finite_differences_and_wrong_twins(name):
    for n, shape, dim in ((1, (4, 6), 0), (2, (4, 6), 1), (3, (6, 4), 1), (4, (4, 7), -1), (3, (2, 4), 0)):
        if name == "all_to_all" and shape[0] % n:
            shape = (n * 2, 3)
        inputs = [x.contiguous() for x in inputs_of(name, n, shape, dim)]
        wanted = finite_differences(name, n, inputs, dim, shape[dim])
        for twin in ("right", "n times", "zero"):
            got = fw.simulate(backward, name, inputs, dim, shape[dim], twin, ranks=n, cluster=NETWORK).values
            error = worst([g for g in got if g.numel()] or got, [w for w in wanted if w.numel()], sum(g.numel() > 0 for g in got))
            if twin == "right" or n == 1 and twin == "n times":
                assert error < BOUND, (n, shape, dim)
            else:
                assert error > 10 * BOUND, (n, shape, dim, twin)


def swapped(comm, name, other, inputs, dim, size):
    """The forward of one operator with the backward of a neighbour: right values, wrong gradients."""
    x = inputs[comm.rank % len(inputs)].clone().requires_grad_()
    right = operate(comm, name, x.detach(), dim, size)
    y = operate(comm, other, x, dim, size)
    y = y + (right - y).detach()
    loss_of(comm, name, y).backward()
    return x.grad


@pytest.mark.parametrize(
    ("name", "other"),
    [("all_gather", "gather_from"), ("gather_from", "all_gather"), ("reduce_from", "all_reduce"), ("all_reduce", "reduce_from")],
)
def test_the_neighbours_backward_is_caught(name, other):
    """Nothing where an all-reduce is due, or the reverse: the mistake that f and g exist for."""
    inputs = [x.contiguous() for x in inputs_of(name, 4, (4, 8), 1)]
    wanted = finite_differences(name, 4, inputs, 1, 8)
    assert worst(fw.simulate(swapped, name, other, inputs, 1, 8, ranks=4, cluster=NETWORK).values, wanted, 4) > 10 * BOUND


def unequal(comm, probe, known):
    counts = [(comm.rank + 2 * q) % 4 for q in range(comm.size)]
    x = numbers(comm.rank, (sum(counts), 2)).requires_grad_()
    with torch.no_grad():
        if probe and probe[0] == comm.rank:
            x.view(-1)[probe[1]] += probe[2] * STEP
    y, came = autograd.all_to_all(comm, x, counts)
    assert came == [(q + 2 * comm.rank) % 4 for q in range(comm.size)] and len(y) == sum(came)
    loss = ((y + 0.1 * y**2) * numbers(50 + comm.rank, y.shape)).sum()
    if known:
        loss.backward()
    return x.grad if known else float(loss.detach())


def test_unequal_all_to_all_sends_gradients_home():
    grads = fw.simulate(unequal, None, True, ranks=3, cluster=NETWORK).values
    for rank, grad in enumerate(grads):
        for place in range(grad.numel()):
            up, down = (sum(fw.simulate(unequal, (rank, place, s), False, ranks=3, cluster=NETWORK).values) for s in (1, -1))
            assert abs(float(grad.view(-1)[place]) - (up - down) / (2 * STEP)) < BOUND


def experts(comm, routes):
    """Rank r has routes[r][q] tokens for the expert on rank q; there and back, and the gradients of tokens and expert."""
    x, w = numbers(comm.rank, (sum(routes[comm.rank]), 2)).requires_grad_(), numbers(60 + comm.rank, (2, 2)).requires_grad_()
    here, came = autograd.all_to_all(comm, x, routes[comm.rank])
    y, _ = autograd.all_to_all(comm, here @ w, came)
    (y + 0.1 * y**2).sum().backward()
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize(
    "routes",
    [
        [[3, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],  # every token to expert 0, and none on rank 2
        [[0, 5, 0, 3]] * 4,
        [[0, 0, 0, 0]] * 4,
    ],
)
def test_c43_c44_experts_without_a_token_have_gradients_of_zeros(routes):
    """And nobody waits for them: an idle rank takes part in forward and backward with empty pieces."""
    weights = [numbers(60 + q, (2, 2)).requires_grad_() for q in range(4)]
    for rank, (y, dx, _) in enumerate(values := fw.simulate(experts, routes, ranks=4, cluster=NETWORK).values):
        x = numbers(rank, (sum(routes[rank]), 2)).requires_grad_()
        want = torch.cat([part @ w for part, w in zip(x.split(routes[rank]), weights, strict=True)])
        (want + 0.1 * want**2).sum().backward()
        torch.testing.assert_close((y, dx), (want.detach(), x.grad), rtol=1e-13, atol=1e-13)
    for (*_, dw), w in zip(values, weights, strict=True):
        torch.testing.assert_close(dw, torch.zeros_like(w) if w.grad is None else w.grad, rtol=1e-13, atol=1e-13)


def traffic(comm, name):
    x = numbers(comm.rank).requires_grad_()
    y = operate(comm, name, x, 0, 4 * comm.size)
    middle = comm.clock()
    y.sum().backward()
    return middle, comm.clock()


def test_each_pair_costs_what_its_collectives_cost():
    """f: nothing, then an all-reduce; g: the reverse. Gather and scatter: half an all-reduce, on the other side."""
    one = NETWORK.link(0, 1).picoseconds
    nbytes = 4 * 6 * 8
    cost = {"all_reduce": 6 * one(nbytes // 4), "all_gather": 3 * one(nbytes), "keep": 0, "reduce_scatter": 3 * one(nbytes // 4)}
    expected = {
        "copy_to": (0, cost["all_reduce"]),
        "reduce_from": (cost["all_reduce"], 0),
        "scatter_to": (0, 3 * one(nbytes // 4)),
        "gather_from": (cost["all_gather"], 0),
        "all_gather": (cost["all_gather"], 3 * one(nbytes)),
        "reduce_scatter": (cost["reduce_scatter"], 3 * one(nbytes // 4)),
    }
    for name, (there, back) in expected.items():
        for middle, end in fw.simulate(traffic, name, ranks=4, cluster=NETWORK).values:
            assert (middle, end - middle) == (there, back), name


def my_all_reduce(comm, x):
    """A learner's own, which counts its calls."""
    my_all_reduce.calls = getattr(my_all_reduce, "calls", 0) + 1
    return ring.all_reduce_blocking(comm, x)


def tensor_parallel(comm, hidden, all_reduce):
    """Y = relu(X A) B with A cut by columns and B by rows, between f and g: value and every gradient of the one-device run."""
    x, a, b = numbers(1, (3, 5)).requires_grad_(), numbers(2, (5, hidden)), numbers(3, (hidden, 5))
    sizes = chunk_sizes(hidden, comm.size)
    mine_a = a.split(sizes, 1)[comm.rank].clone().requires_grad_()
    mine_b = b.split(sizes, 0)[comm.rank].clone().requires_grad_()
    inside = torch.relu(autograd.copy_to(comm, x, all_reduce=all_reduce) @ mine_a)
    y = autograd.reduce_from(comm, inside @ mine_b, all_reduce=all_reduce)
    (y**2).sum().backward()
    return y.detach(), x.grad, mine_a.grad, mine_b.grad


def test_a_tensor_parallel_layer_equals_the_whole_one():
    x, a, b = numbers(1, (3, 5)).requires_grad_(), numbers(2, (5, 7)).requires_grad_(), numbers(3, (7, 5)).requires_grad_()
    y = torch.relu(x @ a) @ b
    (y**2).sum().backward()
    runs = [fw.simulate(tensor_parallel, 7, my_all_reduce, ranks=n, cluster=NETWORK) for n in (1, 3)]
    assert my_all_reduce.calls == 2 * (1 + 3)
    runs.append(fw.run(tensor_parallel, 7, ring.all_reduce, ranks=2, stream=False))
    for run in runs:
        for got in run.values:
            torch.testing.assert_close(got[:2], (y.detach(), x.grad), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([v[2] for v in run.values], 1), a.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([v[3] for v in run.values], 0), b.grad, rtol=1e-12, atol=1e-12)


def twice(comm):
    x = numbers(1, (4,)).requires_grad_()
    y = autograd.copy_to(comm, x)
    (grad,) = torch.autograd.grad((y**3).sum() * (comm.rank + 1), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)[0]


def test_second_derivatives():
    """Each backward is the conjugate's forward, so it has a backward too: d2/dx2 of x^3 (1 + 2 + 3), each rank adding its own."""
    for second in fw.simulate(twice, ranks=3, cluster=NETWORK).values:
        assert torch.allclose(second, 6 * 6 * numbers(1, (4,)))


def second_order(comm, name):
    """(d/dx of c.g, with g the gradient of sum y^3, c a constant; what it must be: the backward of 6 y (A c), where y = A x)."""
    shape = (2, 3) if KINDS[name][0] == "chunk" else (2 * comm.size, 3)
    x, c = numbers(1 + comm.rank, shape).requires_grad_(), numbers(50 + comm.rank, shape)
    y = operate(comm, name, x, 0, 2 * comm.size)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((g * c).sum(), x)
    weights = 6 * y.detach() * operate(comm, name, c, 0, 2 * comm.size)
    (wanted,) = torch.autograd.grad((operate(comm, name, x, 0, 2 * comm.size) * weights).sum(), x)
    return found, wanted


@pytest.mark.parametrize("name", KINDS)
def test_second_derivatives_of_every_operator(name):
    for found, wanted in fw.simulate(second_order, name, ranks=3, cluster=NETWORK).values:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


TAKES = {
    "copy_to": ("all_reduce",),
    "reduce_from": ("all_reduce",),
    "all_reduce": ("all_reduce",),
    "scatter_to": ("all_gather",),
    "gather_from": ("all_gather",),
    "all_gather": ("all_gather", "reduce_scatter"),
    "reduce_scatter": ("all_gather", "reduce_scatter"),
}


def with_own(comm, name):
    """Calls of the collectives that were handed in: (in forward, in backward, in the backward of the backward)."""
    calls, counts = [], []

    def counting(kind):
        return lambda comm, x, **options: calls.append(kind) or getattr(ring, kind)(comm, x, **options)

    own = {kind: counting(kind) for kind in TAKES[name]}
    x = numbers(1, (2, 3) if KINDS[name][0] == "chunk" else (2 * comm.size, 3)).requires_grad_()
    y = getattr(autograd, name)(comm, x, **({} if TAKES[name] == ("all_reduce",) else {"dim": 0}), **own)
    counts.append(tuple(calls))
    calls.clear()
    (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    counts.append(tuple(calls))
    calls.clear()
    torch.autograd.grad((g**2).sum(), x)
    return counts, tuple(calls)


def test_the_collectives_handed_in_are_the_ones_used():
    once = ("all_reduce",)
    wanted = {
        "copy_to": ((), once),
        "reduce_from": (once, ()),
        "all_reduce": (once, once),
        "scatter_to": ((), ("all_gather",)),
        "gather_from": (("all_gather",), ()),
        "all_gather": (("all_gather",), ("reduce_scatter",)),
        "reduce_scatter": (("reduce_scatter",), ("all_gather",)),
    }
    for name, (forward, backward) in wanted.items():
        for counts, further in fw.simulate(with_own, name, ranks=2, cluster=NETWORK).values:
            assert tuple(counts) == (forward, backward), name
            assert sorted(further) == sorted(forward + backward), name  # of its backward, and of its own


def messages_home(comm):
    x = numbers(comm.rank, (comm.size, 2)).requires_grad_()
    y, _ = autograd.all_to_all(comm, x, [1] * comm.size)
    middle = comm.clock()
    y.sum().backward()
    return middle, comm.clock() - middle


def test_the_way_back_of_unequal_pieces_knows_its_counts():
    """Checks off, no counts are sent a second time: n - 1 messages of 16 bytes, after n - 1 of 8 and n - 1 of 16."""
    one = NETWORK.link(0, 1).picoseconds
    for there, back in fw.simulate(messages_home, ranks=3, cluster=NETWORK, checks=False).values:
        assert (there, back) == (2 * (one(8) + one(16)), 2 * one(16))


def test_chunks_that_do_not_fit_are_named():
    def program(comm, size):
        autograd.gather_from(comm, torch.ones(2, 3), 1, size)

    with pytest.raises(fw.RankError, match="holds 3 along dim 1; its chunk of 7 on 2 ranks is 4"):
        fw.simulate(program, 7, ranks=2, cluster=NETWORK)
    with pytest.raises(ValueError, match="dim is 2; a tensor of shape \\(2, 3\\) has dims -2 to 1"):
        autograd.scatter_to(None, torch.ones(2, 3), 2)
