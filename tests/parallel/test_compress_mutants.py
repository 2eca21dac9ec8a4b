"""Wrong twins of compressed all-reduces: each fails the check of the value, by name."""

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.collectives.reductions import wrong_elements
from fourwalls.parallel.compress import Bfloat16, Int8, TopK
from fourwalls.ranks.comm import CommError

from .compressors import NETWORK, allowed, gradient, once


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
