"""What compressed all-reduces leave out comes later: with feedback nothing is lost, and what is owed stays bounded."""

import math

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.parallel.compress import Bfloat16, LowRank, TopK

from .compressors import MAKERS, NETWORK, U16, drift, gradient, train

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


def test_after_a_step_of_zeros_low_rank_finds_its_columns_again():
    def program(comm):
        scheme = LowRank(rank=2)
        scheme(comm, torch.zeros(6, 8))
        return scheme(comm, torch.outer(torch.arange(1.0, 7.0), torch.ones(8)))

    total = fw.simulate(program, ranks=2, cluster=NETWORK).values[0]
    torch.testing.assert_close(total, 2 * torch.outer(torch.arange(1.0, 7.0), torch.ones(8)), rtol=1e-5, atol=1e-5)


# --- wrong twins -----------------------------------------------------------------------------------------------------
class Twice(TopK):
    def __call__(self, comm, x, **options):
        return super().__call__(comm, x if self.residual() is None else x + self.residual().view_as(x), **options)


def nothing_is_lost(make, steps=60):
    """The named check of feedback: what is owed stays bounded, and outputs and residuals add up to the gradients."""
    off, owed, unexplained = drift(make, steps)
    norm = float(gradient(0, (12, 10), torch.float64, scale=False).norm())
    return 0 < owed[-1] < 50 * norm and float(unexplained.abs().max()) < 1e-9


def test_residuals_dropped_or_added_twice_fail_the_check_of_feedback():
    assert nothing_is_lost(lambda **o: TopK(k=5, **o))
    assert not nothing_is_lost(lambda **o: TopK(k=5, feedback=False, **o))
    assert not nothing_is_lost(lambda **o: Twice(k=5, **o))
