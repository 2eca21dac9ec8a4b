"""Every change of every half of a layout: what ranks then hold, and what they have sent; conjugates; what is refused."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import get_cluster, get_link, uniform
from fourwalls.plan.execute import change_half, own_part
from fourwalls.plan.layouts import (
    ALIKE,
    COPIED,
    PARTIAL,
    Layout,
    Prices,
    collective_of,
    cut_dim,
    divides,
    is_cut,
    local_shape,
    split,
)

HALVES = ("broadcast", "partial", "split(0)", "split(1)")
NETWORK = uniform(1e-6, 1e9)


def whole(n):
    return torch.arange(2 * n * 3 * n, dtype=torch.float64).view(2 * n, 3 * n) + 1


def held(comm, half):
    """What this rank holds of `whole`; of a sum, a random part, so that no rank's part is the sum."""
    if half != "partial":
        return own_part(comm, whole(comm.size), half).clone()
    parts = torch.rand(comm.size, 2 * comm.size, 3 * comm.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return parts[comm.rank] - parts.mean(0) + whole(comm.size) / comm.size


def joined(values, half):
    """The whole tensor, from what all ranks hold."""
    if half == "partial":
        return torch.stack(values).sum(0)
    if half == "broadcast":
        assert all(torch.equal(v, values[0]) for v in values), "ranks differ"
        return values[0]
    return torch.cat(values, cut_dim(half))


def change(comm, start, end):
    return change_half(comm, held(comm, start), start, end)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("start", "end"), [*itertools.product(HALVES, HALVES)])
def test_a_change_keeps_the_tensor_and_sends_what_it_costs(start, end, n):
    run = fw.simulate(change, start, end, ranks=n, cluster=NETWORK)
    assert torch.allclose(joined(run.values, end), whole(n), rtol=0, atol=1e-11)
    dim = cut_dim(end)
    assert run.values[0].shape == local_shape(Layout(end, end), (2 * n, 3 * n), n) and (dim is None or n > 1)
    move = Prices(n, NETWORK).move(start, end, (2 * n, 3 * n), 8)
    assert tuple(run.trace.bytes_sent(r) for r in range(n)) == move.bytes_sent and move.bytes == run.trace.bytes_sent()
    assert bool(move.collective) is (run.trace.bytes_sent() > 0) and move.collective == collective_of(start, end)


def test_what_a_change_sends():
    sends = {pair: collective_of(*pair) for pair in itertools.permutations(HALVES, 2)}
    assert {pair: name for pair, name in sends.items() if name} == {
        ("partial", "broadcast"): "all_reduce",
        ("partial", "split(0)"): "reduce_scatter",
        ("partial", "split(1)"): "reduce_scatter",
        ("split(0)", "broadcast"): "all_gather",
        ("split(1)", "broadcast"): "all_gather",
        ("split(0)", "split(1)"): "all_to_all",
        ("split(1)", "split(0)"): "all_to_all",
    }


@pytest.mark.parametrize("layout", [COPIED, PARTIAL, split(0), split(2)])
def test_the_gradient_is_the_conjugate(layout):
    conjugate = {"broadcast": "partial", "partial": "broadcast"}
    assert layout.gradient == conjugate.get(layout.value, layout.value)
    assert ALIKE.gradient == ALIKE.value, "all ranks do the same: nothing to add"


def test_words_and_sizes():
    assert [str(x) for x in (ALIKE, COPIED, PARTIAL, split(1))] == ["broadcast", "copied", "partial", "split(1)"]
    assert [is_cut(x) for x in (ALIKE, COPIED, PARTIAL, split(1))] == [False, False, False, True]
    assert divides(split(1), (3, 8), 4) and not divides(split(0), (3, 8), 4) and not divides(split(2), (3, 8), 1)
    assert local_shape(split(1), (3, 8), 4) == (3, 2) and local_shape(PARTIAL, (3, 8), 4) == (3, 8)


def test_one_rank_sends_nothing():
    move = Prices(1, get_link("nvlink3")).move("partial", "broadcast", (4, 4), 8)
    assert move == ("", (0,), 0) and Prices(1, get_cluster("a100-selene")).device.name == "A100"


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1"])
def test_no_such_dim(bad):
    with pytest.raises(ValueError, match="number of a dim"):
        split(bad)


@pytest.mark.parametrize("bad", [0, 2.0, True])
def test_no_such_number_of_ranks(bad):
    with pytest.raises(ValueError, match="at least 1"):
        Prices(bad, NETWORK)
