"""torch's random state, kept and put back: in memory where that is all of it, torch's own way elsewhere."""

import ctypes
import struct

import pytest
import torch

import fourwalls as fw
from fourwalls.ranks import random_state
from fourwalls.ranks.meter import Meter
from fourwalls.ranks.random_state import keep_and_put_back


@pytest.fixture(params=["as found", "torch's own way", "not where it used to be", "not all of it"])
def way(request, monkeypatch):
    monkeypatch.setattr(random_state, "_known", [])
    if request.param == "torch's own way":
        monkeypatch.setattr(random_state, "_known", [random_state._torch_way()])
    elif request.param == "not where it used to be":
        monkeypatch.setattr(random_state, "_place", lambda: None)
    elif request.param == "not all of it":
        start, nbytes = random_state._place()
        monkeypatch.setattr(random_state, "_place", lambda: (start, nbytes - 8))
    return request.param


def _numbers():
    return torch.cat([torch.randn(1), torch.rand(5), torch.randn(700), torch.randperm(9).float(), torch.randn(1)])


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 1000])
def test_the_same_numbers_come_again(way, drawn):
    torch.manual_seed(3)
    keep, put_back = keep_and_put_back()
    torch.rand(drawn)
    torch.randn(drawn % 2)  # leaves a normal number over
    kept, first = keep(), _numbers()
    other = keep()
    torch.manual_seed(8)
    put_back(kept)
    assert torch.equal(_numbers(), first)
    torch.manual_seed(9)
    put_back(other)
    after = _numbers()
    put_back(other)
    assert torch.equal(_numbers(), after) and not torch.equal(after, first)


def test_to_find_out_changes_nothing(way):
    torch.manual_seed(4)
    torch.randn(1)
    before = torch.default_generator.get_state()
    keep_and_put_back()
    assert torch.equal(torch.default_generator.get_state(), before)


def test_copies_are_taken_only_if_they_are_all(way):
    keep, _ = keep_and_put_back()
    assert (keep == torch.default_generator.get_state) == (way != "as found")


@pytest.mark.parametrize("less", [4, 8, 12, 16, 20, 24, 28])
def test_a_copy_that_is_not_all_is_seen(less):
    start, nbytes = random_state._place()
    assert random_state._is_all(*random_state._copies(start, nbytes))
    if less > 4:  # the last bytes only fill up
        assert not random_state._is_all(*random_state._copies(start, nbytes - less))
    assert not random_state._is_all(*random_state._copies(start + less, nbytes - less))


def test_every_rank_draws_as_if_it_were_alone(way):
    """One normal number at a time, between hand-overs: a pair is made at once, and the second one waits for its rank."""

    def program(comm, talk):
        drawn = []
        for k in range(40):
            if talk:
                comm.exchange(torch.ones(1), (comm.rank + 1) % comm.size, torch.empty(1), (comm.rank - 1) % comm.size)
            drawn.append(torch.randn(1) if k % 3 else torch.rand(17).sum().view(1))
            if comm.rank == 2 and k == 20:
                torch.manual_seed(77)
        return torch.cat(drawn)

    quiet, talking = (fw.simulate(program, talk, ranks=5).values for talk in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(quiet, talking, strict=True))
    assert len({tuple(v.tolist()) for v in quiet}) == 5


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("meta"),
        lambda: torch._subclasses.fake_tensor.FakeTensorMode(),
        lambda: Meter(),
        lambda: torch.inference_mode(),
    ],
    ids=["default device meta", "fake tensors", "meter", "inference"],
)
def test_the_first_simulation_may_stand_in_any_mode(monkeypatch, mode):
    monkeypatch.setattr(random_state, "_known", [])
    with mode() as entered:
        assert fw.simulate(lambda comm: comm.rank, ranks=2).values == [0, 1]
    assert not isinstance(entered, Meter) or entered.flops == 0


def test_to_find_out_seeds_no_other_generator(monkeypatch):
    seeded = []
    monkeypatch.setattr(random_state, "_known", [])
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded.append(seed))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeded.append(seed))
    keep_and_put_back()
    assert not seeded


def test_what_another_thread_is_in_the_middle_of_is_not_copied():
    """left and next belong together; a copy in which they do not would be read past its end."""
    start, nbytes = random_state._place()
    own = (ctypes.c_ubyte * nbytes).from_buffer_copy(ctypes.string_at(start, nbytes))
    keep, _ = random_state._copies(ctypes.addressof(own), nbytes)
    assert keep().__class__ is bytes
    struct.pack_into("=i", own, 8, 624)
    struct.pack_into("=I", own, 16, 624)
    assert keep().__class__ is torch.Tensor


def test_a_watcher_that_draws_changes_no_rank():
    def program(comm):
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(1).item())
            comm.exchange(torch.ones(1), 1 - comm.rank, torch.empty(1), 1 - comm.rank)
        return [*drawn, torch.rand(1).item()]

    watchers = (lambda **message: torch.rand(3), lambda **message: torch.manual_seed(0))
    quiet = fw.simulate(program, ranks=2).values
    assert all(fw.simulate(program, ranks=2, on_message=watcher).values == quiet for watcher in watchers)
