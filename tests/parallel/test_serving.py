"""Weights pushed while requests are answered: never half a version, and a writer that is killed loses nothing.

All on real processes at full speed. Version v of the weights is v everywhere, so a request that sees two values, or another
value than its version, has seen a half-written one; the check knows nothing of how the shelf keeps them apart, and wrong shelves
fail it.
"""

import signal
import subprocess
import sys
import time

import pytest
import torch

import fourwalls as fw
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import Adam
from fourwalls.parallel.serving import Shelf, ShelfError, receive_weights, send_weights

REQUESTS, PUSHES, READERS = 10_000, 200, 2
ROWS = 40_000  # of a table of 8 numbers each: 1.28 MB, which takes the writer long enough to be met half way


def version_of(number):
    """Weights that tell their version."""
    return {"table": torch.full((ROWS, 8), float(number)), "dense": torch.full((64,), float(number))}


class Sample:
    """One request: some rows and the dense part, as they lie there. Its answer: the smallest and largest number that it saw."""

    def __init__(self, seed):
        self.dice = torch.Generator().manual_seed(seed)

    def __call__(self, tensors):
        ids = torch.randint(ROWS, (32,), generator=self.dice)
        rows, dense = tensors["table"][ids], tensors["dense"]
        return min(float(rows.min()), float(dense.min())), max(float(rows.max()), float(dense.max()))


class SlowSample(Sample):
    """Looks at the dense part, thinks, and only then at the rows."""

    def __call__(self, tensors):
        low = float(tensors["dense"].min())
        time.sleep(0.003)
        ids = torch.randint(ROWS, (32,), generator=self.dice)
        return min(low, float(tensors["table"][ids].min())), max(low, float(tensors["table"][ids].max()))


def push_and_ask(comm, path, kind, sample, requests, pushes, wrong=False, pause=0.0):
    """Rank 0 pushes at full speed until all others have asked enough; they ask at full speed until it has pushed enough
    (and, of a wrong shelf, until a half-written version was seen, at most 20 s).
    """
    torch.set_num_threads(1)
    if comm.rank == 0:
        shelf = kind.create(path, version_of(1))
        comm.barrier()
        done = [comm.irecv(torch.empty(1), r) for r in range(1, comm.size)]
        while shelf.version <= pushes or not all(request.done for request in done):
            shelf.publish(version_of(shelf.version + 1))
            if shelf.version % 3 == 0:
                time.sleep(pause)
        for request in done:
            request.wait()
        return {"pushed": shelf.version - 1}
    comm.barrier()
    shelf, question = kind.open(path, patience=5), sample(comm.rank)
    torn, asked, versions, last, deadline = 0, 0, set(), 0, time.monotonic() + 20
    while asked < requests or last <= pushes or (wrong and not torn and time.monotonic() < deadline):
        version, (low, high) = shelf.ask(question)
        torn += not low == high == version
        assert version >= last, "versions never go back"
        asked, last = asked + 1, version
        versions.add(version)
    comm.send(torch.zeros(1), 0)
    return {"asked": asked, "torn": torn, "versions": len(versions), "again": shelf.again, "first": min(versions), "last": last}


def test_ten_thousand_requests_during_two_hundred_pushes(tmp_path):
    run = fw.run(push_and_ask, tmp_path / "shelf", Shelf, Sample, REQUESTS // READERS, PUSHES, ranks=1 + READERS, stream=False)
    writer, *readers = run.values
    assert sum(v["asked"] for v in readers) >= REQUESTS and writer["pushed"] >= PUSHES
    assert [v["torn"] for v in readers] == [0] * READERS
    # they were really at it together: requests saw many different versions, over the whole span of pushes
    assert all(v["versions"] >= 10 and v["last"] > PUSHES for v in readers), readers


class InPlace(Shelf):
    """No double buffer: the published place is written over, and nobody looks back."""

    def _free_place(self):
        return 0

    def _still(self, place, version):
        return True


class TurnsFirst(Shelf):
    """The new version is published, and then written."""

    def _open_place(self, place):
        self._close_place(place, self.version + 1)
        self._turn(place, self.version + 1)

    def publish(self, tensors):
        version, place = self.version + 1, self._free_place()
        self._open_place(place)
        self._fill(place, tensors)
        return version


class NeverLooksBack(Shelf):
    """A reader that does not ask whether the writer has come by: two places do not help a slow one."""

    def _still(self, place, version):
        return True


@pytest.mark.parametrize(
    ("kind", "sample", "requests"),
    [(InPlace, Sample, 3000), (TurnsFirst, Sample, 3000), (NeverLooksBack, SlowSample, 200)],
    ids=["InPlace", "TurnsFirst", "NeverLooksBack"],
)
def test_wrong_shelves_tear(tmp_path, kind, sample, requests):
    values = fw.run(push_and_ask, tmp_path / "shelf", kind, sample, requests, 50, True, ranks=2, stream=False).values
    assert values[1]["torn"] > 0


def test_a_slow_reader_answers_again_and_is_right(tmp_path):
    # the writer comes in bursts: at full speed it may lap an answer of 3 ms every time, however often that is made again
    arguments = (tmp_path / "shelf", Shelf, SlowSample, 100, 50, False, 0.02)
    writer, reader = fw.run(push_and_ask, *arguments, ranks=2, stream=False).values
    assert reader["torn"] == 0 and reader["again"] > 0, (writer, reader)


# --- killed in mid-push ------------------------------------------------------------------------------------------------------
WRITER = """
import time, torch
from fourwalls.parallel.serving import Shelf
torch.set_num_threads(1)

def version_of(number):
    return {{"table": torch.full(({rows}, 8), float(number)), "dense": torch.full((64,), float(number))}}

class StopsHalfWay(Shelf):
    def _fill(self, place, tensors):
        if self.version + 1 == {stop}:
            super()._fill(place, {{**self._views[place], "table": tensors["table"]}})  # the table is written, the rest is not
            print("half", flush=True)
            time.sleep(60)
        super()._fill(place, tensors)

shelf = StopsHalfWay.open({path!r})
print("ready", flush=True)
while True:
    shelf.publish(version_of(shelf.version + 1))
"""


def start_writer(path, stop):
    code = WRITER.format(rows=ROWS, path=str(path), stop=stop)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().strip() == "ready"
    return child


@pytest.fixture
def children():
    started = []
    yield started
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def whole(shelf):
    version, (low, high) = shelf.ask(Sample(0))
    taken, tensors = shelf.take()
    assert taken == version and all((x == version).all() for x in tensors.values())
    return version if low == high == version else None


def test_a_writer_killed_in_mid_push_loses_nothing(tmp_path, children):
    shelf = Shelf.create(tmp_path / "shelf", version_of(1))
    children.append(start_writer(shelf.path, 7))
    assert children[0].stdout.readline().strip() == "half"
    assert whole(shelf) == 6  # while version 7 is half there
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    assert whole(shelf) == 6  # requests go on
    version, tensors = Shelf.open(shelf.path).restore()  # a new training server starts from it, and goes on
    assert version == 6 and all((x == 6).all() for x in tensors.values())
    successor = Shelf.open(shelf.path)
    assert successor.publish(version_of(7)) == 7 and whole(shelf) == 7


def test_a_writer_killed_at_any_moment_loses_nothing(tmp_path, children):
    shelf, last = Shelf.create(tmp_path / "shelf", version_of(1)), 1
    children.append(start_writer(shelf.path, -1))
    deadline = time.monotonic() + 20
    while shelf.version < 20 and time.monotonic() < deadline:
        time.sleep(0.001)
    children[0].kill()
    children[0].wait()
    last = whole(shelf)
    assert last >= 20 and shelf.restore()[0] == last
    assert shelf.publish(version_of(last + 1)) == last + 1 == whole(shelf)


def states(model, adam):
    """All that a training server needs to go on: weights, and the optimiser's state."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state = adam.state.get(p, {"m": torch.zeros_like(p), "v": torch.zeros_like(p)})
        found |= {f"m.{name}": state["m"], f"v.{name}": state["v"]}
    return found


def test_training_goes_on_as_if_nobody_had_been_killed(tmp_path):
    def start(published=None, steps=0):
        model = MLP((3, 4, 2), dtype=torch.float64)
        adam = Adam(model.parameters(), lr=0.01)
        if published is not None:
            for name, p in model.named_parameters():
                p.data.copy_(published[name])
                adam.state[p] = {"step": steps, "m": published[f"m.{name}"].clone(), "v": published[f"v.{name}"].clone()}
        return model, adam

    def step(model, adam, number):
        x = torch.rand(5, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        (model(x) - x[:, :2]).square().mean().backward()
        adam.step()
        adam.zero_grad()

    model, adam = start()
    shelf = Shelf.create(tmp_path / "shelf", states(model, adam))  # version 1: no step yet
    for number in range(4):
        step(model, adam, number)
        shelf.publish(states(model, adam))
    step(model, adam, 4)
    place = shelf._free_place()  # the fifth step is trained, its push dies half way
    shelf._open_place(place)
    shelf._views[place]["layers.0.weight"].fill_(float("nan"))
    version, published = Shelf.open(shelf.path).restore()
    again, its_adam = start(published, version - 1)
    assert version == 5
    for number in range(version - 1, 8):
        step(again, its_adam, number)
    for number in range(5, 8):
        step(model, adam, number)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))  # the same bits


# --- from a training rank to a serving rank -------------------------------------------------------------------------------
def train_and_serve(comm, path):
    if comm.rank == 0:
        for version in (10, 20, 30):
            send_weights(comm, version_of(version), version, 1)
        return None
    shelf, seen = Shelf.create(path, version_of(0)), []
    for _ in range(3):
        seen.append((receive_weights(comm, shelf, 0), shelf.ask(Sample(0))))
    return seen


@pytest.mark.parametrize("start", [fw.simulate, fw.run])
def test_versions_travel_between_ranks(tmp_path, start):
    run = start(train_and_serve, tmp_path / "shelf", ranks=2, stream=False)
    assert run.values[1] == [(10, (2, (10, 10))), (20, (3, (20, 20))), (30, (4, (30, 30)))]
    assert run.trace.bytes_sent(0) == 3 * (16 + (ROWS * 8 + 64) * 4) and run.trace.bytes_sent(1) == 0


# --- bad input ---------------------------------------------------------------------------------------------------------------
def test_a_shelf_refuses(tmp_path):
    shelf = Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.int64)})
    with pytest.raises(FileExistsError, match="Shelf.open"):
        Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"'a' is \('float32', \(4,\)\) here and \('float32', \(3,\)\) on the shelf: not wr"):
        shelf.publish({"a": torch.zeros(4), "b": torch.tensor(1)})
    with pytest.raises(ValueError, match="'c' is"):
        shelf.publish({"a": torch.zeros(3), "b": torch.tensor(1), "c": torch.zeros(1)})
    assert shelf.version == 1
    with pytest.raises(FileNotFoundError, match="no shelf at .*Shelf.create"):
        Shelf.open(tmp_path / "none", patience=0.01)
    (tmp_path / "other").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="other is not a shelf"):
        Shelf.open(tmp_path / "other")
    with pytest.raises(ValueError, match="at least one"):
        Shelf.create(tmp_path / "empty", {})


def test_an_answers_own_error_is_raised_and_rubbish_forgiven(tmp_path):
    shelf = Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3)})
    with pytest.raises(ZeroDivisionError):
        shelf.ask(lambda tensors: 1 // 0)
    tries = []

    def disturbed(tensors):
        tries.append(1)
        if len(tries) == 1:  # the writer laps this reader, which then sees what is no version
            shelf.publish({"a": torch.ones(3)})
            shelf.publish({"a": torch.ones(3)})
            raise KeyError("rubbish")
        return float(tensors["a"].sum())

    assert shelf.ask(disturbed) == (3, 3.0) and shelf.again == 1
    with pytest.raises(ShelfError, match="has come by 3 times"):
        shelf.ask(lambda tensors: [shelf.publish({"a": torch.ones(3)}) for _ in range(2)], tries=3)


def test_a_version_that_was_damaged_is_not_restored(tmp_path):
    shelf = Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3)})
    shelf._views[shelf._published()[1]]["a"][1] = 5
    with pytest.raises(ShelfError, match="version 1 on the shelf shelf is not what was written"):
        shelf.restore()


def test_a_nan_is_not_published(tmp_path):
    shelf = Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3), "n": torch.tensor(1)})
    with pytest.raises(ValueError, match="'a' holds a nan: not written, the shelf stays at version 1"):
        shelf.publish({"a": torch.tensor([1.0, float("nan"), 2.0]), "n": torch.tensor(2)})
    assert shelf.ask(lambda tensors: tensors["a"].tolist()) == (1, [0.0, 0.0, 0.0])
    assert shelf.publish({"a": torch.tensor([float("inf"), -float("inf"), 0.0]), "n": torch.tensor(2)}) == 2  # a mask may be inf


def test_shelves_that_are_closed_or_cut_off(tmp_path):
    shelf = Shelf.create(tmp_path / "shelf", {"a": torch.zeros(3)})
    whole = (tmp_path / "shelf").read_bytes()
    shelf.close()
    with pytest.raises(ShelfError, match="was closed"):
        shelf.take()
    for size in (0, 100, 4200):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut (is not a shelf|has 4200 bytes of 12288)"):
            Shelf.open(tmp_path / "cut")


def test_nobody_opens_a_shelf_before_its_first_version_is_there(tmp_path):
    path = tmp_path / "shelf"

    class Looks(Shelf):
        def publish(self, tensors):
            assert not path.exists(), "whoever waits for the file would find no version in it"
            return super().publish(tensors)

    assert Looks.create(path, {"a": torch.zeros(3)}).version == 1 and path.exists()


def mixed_up(comm, path, case):
    """The sender's names stand in another order, or one is missing; the shapes are the same."""
    a, b = torch.zeros(3), torch.ones(3)
    if comm.rank == 0:
        send_weights(comm, {"b": b, "a": a} if case == "order" else {"a": a}, 5, 1)
        return None
    return receive_weights(comm, Shelf.create(path, {"a": a, "b": b}), 0)


@pytest.mark.parametrize("case", ["order", "missing"])
def test_weights_of_other_names_are_not_taken_for_the_shelfs(tmp_path, case):
    with pytest.raises(fw.CommError, match="rank 0 sends tensors of other names.* the shelf holds a, b"):
        fw.simulate(mixed_up, tmp_path / "shelf", case, ranks=2)
