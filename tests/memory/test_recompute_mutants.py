"""Wrong checkpoints must be caught, each by the check that names its fault."""

import contextlib
from functools import partial

import pytest
import torch

from fourwalls.memory import random_state, recompute
from fourwalls.memory.recompute import checkpoint, run_plan
from fourwalls.memory.schedule import runs, segments
from fourwalls.nn.gpt import Block, GPTConfig


def of_block(run, *, dropout):
    block = Block(GPTConfig(width=8, heads=2, length=6, layers=1, dropout=dropout), dtype=torch.float64)
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 6, 8).requires_grad_()
    torch.manual_seed(2)
    run(block, x).square().sum().backward()
    return x.grad, [p.grad for p in block.parameters()]


def with_own_generator(run):
    generator = torch.Generator().manual_seed(3)
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    run(lambda x, g: x * torch.rand(4, generator=g, dtype=x.dtype) * x, x, generator).sum().backward()
    return x.grad


def counted(run_chain):
    count = [0] * 4

    def step(k, x):
        count[k] += 1
        return torch.tanh(x * (k + 1))

    run_chain([partial(step, k) for k in range(4)], torch.ones(3, requires_grad=True), segments(4, 2)).sum().backward()
    return count


def faults():
    """The names of the checks that fail for the library as it is now."""
    plain = lambda f, *args: f(*args)  # noqa: E731
    found = []
    for name, p in (("the same without random numbers", 0.0), ("random state", 0.3)):
        (x, ws), (x0, ws0) = of_block(recompute.checkpoint, dropout=p), of_block(plain, dropout=p)
        if x is None or not torch.equal(x, x0):
            found.append("input gradient" if p == 0 else name)
        if not all(a is not None and torch.equal(a, b) for a, b in zip(ws, ws0, strict=True)):
            found.append("parameter gradients" if p == 0 else name)
    if not torch.equal(with_own_generator(recompute.checkpoint), with_own_generator(plain)):
        found.append("own generator")
    if counted(recompute.run_plan) != runs(segments(4, 2)):
        found.append("number of runs")
    return set(found)


def not_restored(self):
    return contextlib.nullcontext()


@contextlib.contextmanager
def only_the_default(self, restored=random_state.RandomState.restored):
    everything = self.generators, self._taken
    keep = [g is torch.default_generator for g in self.generators]
    self.generators, self._taken = ([x for x, k in zip(xs, keep, strict=True) if k] for xs in everything)
    with restored(self):
        yield
    self.generators, self._taken = everything


def run_for_each_place(self):
    self.node = None
    self.block.run_again()
    return self.node.saved_tensors[0]


def loses_the_input(function, *args, **kwargs):
    return checkpoint(function, *(x.detach() if isinstance(x, torch.Tensor) else x for x in args), **kwargs)


def next_place(self, x, rules, empty_place=recompute._Block.empty_place):
    place = empty_place(self, x, rules)
    if len(self.places) == 3:  # two places change places
        self.places[1], self.places[2] = self.places[2], self.places[1]
    return place


def segment_inside_segment(functions, x, plan, **options):
    return checkpoint(lambda x: run_plan(functions, x, plan, **options), x)


MUTANTS = {
    "random state not restored": (random_state.RandomState, "restored", not_restored, {"random state", "own generator"}),
    "own generator not restored": (random_state.RandomState, "restored", only_the_default, {"own generator"}),
    "a segment run for each tensor": (recompute._Place, "open", run_for_each_place, {"number of runs"}),
    "a segment run inside a further one": (recompute, "run_plan", segment_inside_segment, {"number of runs"}),
    "gradient of the input lost": (recompute, "checkpoint", loses_the_input, {"input gradient", "random state", "own generator"}),
}


def test_the_library_has_none_of_them():
    assert faults() == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_name(name, monkeypatch):
    where, what, wrong, caught = MUTANTS[name]
    monkeypatch.setattr(where, what, wrong)
    try:
        found = faults()
    except RuntimeError as error:  # a lost gradient may leave nothing to run backward from
        found = {"input gradient", "random state", "own generator"} if "does not require grad" in str(error) else {str(error)}
    assert found == caught


def test_places_that_change_places_are_noticed(monkeypatch):
    """The k-th tensor of the second run belongs into the k-th place; other shapes are refused, equal ones give wrong bits."""
    monkeypatch.setattr(recompute._Block, "empty_place", next_place)
    try:
        assert "parameter gradients" in faults()
    except RuntimeError as error:
        assert "did not do the same twice" in str(error)
