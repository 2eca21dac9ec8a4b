"""Planted bugs of a step over three axes: each is caught by the comparison with one device, by name."""

import pytest
import torch

import fourwalls as fw
from fourwalls.parallel.mesh import Mesh
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.zero import Zero1
from fourwalls.train import step as step_module
from fourwalls.train.step import Step

from .one_device import BOUND, NETWORK, configuration, distance, grid_of, on_mesh, one_device, schedule_of

_everything, _sync, _init = Step._everything, Step._sync, Zero1.__init__


def all_copies_count(self):
    """Also what every rank of the tensor axis holds."""
    for name, p, counts in _everything(self):
        yield name, p, counts or not (name in self._tied and self._last in self.stages)


def both_ends_count(self):
    """Also the second copy of a tied table."""
    for name, p, counts in _everything(self):
        yield name, p, counts or name in self._tied


def swapped(axis, other):
    """A mesh whose communicator of one axis is that of the other."""
    return property(lambda self: self.comm(other))


MUTANTS = {  # name -> (object, attribute, what is planted), mesh, schedule, m, rounds, options
    "norm counted twice over t": ((Step, "_everything", all_copies_count), (1, 1, 2), "1f1b", 2, 1, {}),
    "norm counts both ends of a tied table": ((Step, "_everything", both_ends_count), (1, 2, 1), "1f1b", 2, 1, {}),
    "norm of one stage only": ((Step, "norm", lambda self: norm_here(self)), (1, 2, 1), "1f1b", 2, 1, {}),
    "zero: norm of one replica's shards": (
        (Step, "norm", lambda self: norm_here(self, self._replica)), (2, 2, 1), "1f1b", 2, 1, {"zero": True},
    ),
    "division over d forgotten": ((step_module, "total_tokens", lambda comm, count: count), (2, 1, 1), "1f1b", 2, 1, {}),
    "mean of the replicas' means": (
        (step_module, "total_tokens", lambda comm, count: count * comm.size), (2, 1, 1), "1f1b", 2, 1, {},
    ),
    "tied gradients not summed": ((step_module, "sum_tied", lambda *args: None), (1, 2, 1), "1f1b", 2, 1, {}),
    "zero: tied gradients not summed": ((Zero1, "__init__", lambda self, *args, **options: _init(
        self, *args, **{**options, "tied": None})), (2, 2, 1), "1f1b", 2, 1, {"zero": True}),
    "shared table summed before its last gradient": (
        (Step, "_units", lambda self, where: [[s] for s in self.stages]), (2, 1, 1), "zb-v", 2, 1, {},
    ),
    "groups of d and t swapped": ((Mesh, "d", swapped("d", "t")), (2, 1, 2), "1f1b", 2, 1, {}),
    "groups of p and t swapped": ((Mesh, "p", swapped("p", "t")), (1, 2, 2), "1f1b", 2, 1, {}),
    "replicas never summed": ((Step, "_sync", lambda self, last: None), (2, 1, 1), "1f1b", 2, 1, {}),
    "replicas summed in every round": (
        (Step, "_sync", lambda self, last: _sync(self, True)), (2, 1, 1), "1f1b", 2, 2, {},
    ),
    "sequence: copies' gradients not summed": (
        (SequenceRegion, "sum_gradients", lambda self, model: None), (1, 1, 2), "1f1b", 2, 1, {"sequence": True},
    ),
}  # fmt: skip


def norm_here(step, comm=None):
    """The norm over too few ranks."""
    owned = [grad for _, grad, counts in step._gradients() if counts]
    return step_module.global_norm(owned, comm=comm)


def run_case(mesh, name, m, accumulate, options):
    grid, schedule = grid_of(*mesh), schedule_of(name, mesh[1], m)
    config = configuration(layers=4 if name == "zb-v" else 2)
    run = fw.simulate(
        on_mesh, config, grid, schedule, steps=2, accumulate=accumulate, ranks=grid.ranks, cluster=NETWORK, **options
    )
    return distance(run.values, one_device(config, steps=2))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name, monkeypatch):
    planted, *case = MUTANTS[name]
    monkeypatch.setattr(*planted)
    try:
        far = run_case(*case)
    except (fw.RankError, fw.CommError):
        return
    assert far > 1e6 * BOUND, far


@pytest.mark.parametrize("case", list({str(m[1:]): m[1:] for m in MUTANTS.values()}.values()), ids=str)
def test_without_a_bug_the_same_case_passes(case):
    assert run_case(*case) < BOUND


def test_a_norm_counted_twice_is_not_hidden_by_clipping_off():
    """The mutants above need the clip: a norm alone is compared with one device's, too."""
    want = one_device(configuration(layers=2), steps=2)
    off = [*want[:3], [n * (1 + 1e-9) for n in want[3]]]
    assert distance([tuple(off)], want) > BOUND
    assert torch.isfinite(torch.tensor(want[3])).all()
