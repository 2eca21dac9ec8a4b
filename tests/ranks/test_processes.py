"""Real ranks that do what they should: functions by value, messages of every kind, settings, and nothing left."""

import functools
import io
import os
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import psutil
import pytest
import torch

import fourwalls as fw
from fourwalls.ranks import processes, servers
from fourwalls.ranks.comm import DeadlockError, MismatchError, RankError
from fourwalls.ranks.machine import allowed_cores, seed_of
from fourwalls.ranks.processes import choose_backend

pytestmark = pytest.mark.usefixtures("nothing_left")
UTILS = str(Path(fw.__file__).parents[1])
CONSTANT = 40


@pytest.fixture(scope="module", autouse=True)
def warm():
    fw.run(lambda comm: None, ranks=1)


def helper(x):
    return x + CONSTANT


def uses_helper(comm, x):
    return helper(x) + comm.rank


class Adder:
    def __init__(self, n):
        self.n = n

    def __call__(self, comm, x):
        return x + self.n

    def method(self, comm, x):
        return x - self.n


# --- what travels -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("start", "ranks"), [("fork", 2), ("spawn", 1)])  # each fresh rank imports torch anew: one will do
def test_a01_a02_functions_travel_by_value(start, ranks, monkeypatch):
    """A module function with its global and helper, a lambda, a nested function, a partial, an object and its method.

    The environment asks for fresh ranks here; the next test asks by argument.
    """
    monkeypatch.setenv("FOURWALLS_START", start)
    local = 5

    def nested(comm, x):
        return x + local

    with fw.pool(ranks=ranks) as pool:
        assert pool.run(uses_helper, 2).values == [42, 43][:ranks]
        assert pool.run(lambda comm, x: x * 2, 3).values == [6] * ranks
        assert pool.run(nested, 1).values == [6] * ranks
        assert pool.run(functools.partial(nested, x=4)).values == [9] * ranks
        assert pool.run(Adder(3), 1).values == [4] * ranks
        assert pool.run(Adder(3).method, 1).values == [-2] * ranks
        for parent, own in pool.run(lambda comm: (psutil.Process(os.getppid()).cmdline(), psutil.Process().cmdline())).values:
            assert "fourwalls.ranks.forkserver" in parent[-2]
            assert ("fourwalls.ranks.worker" in own[-2]) == (start == "spawn")


@pytest.mark.parametrize(("start", "ranks"), [("fork", 2), ("spawn", 1)])
def test_a02_an_object_that_cannot_be_rebuilt_in_a_rank_is_an_error_not_a_hang(start, ranks):
    class Refuses:
        def __reduce__(self):
            return (int, ("not a number",))

    began = time.monotonic()
    with pytest.raises(RankError, match="not a number"):
        fw.run(lambda comm, x: x, Refuses(), ranks=ranks, start=start)
    assert time.monotonic() - began < 10


def test_modules_that_are_objects_of_their_own_class_travel_by_name():
    assert fw.run(lambda comm: torch.backends.mkldnn.is_available(), ranks=1).values == [torch.backends.mkldnn.is_available()]


def test_a08_the_callers_objects_are_not_changed_and_results_come_back():
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def train(comm, model):
        with torch.no_grad():
            model.weight += comm.rank + 1
        return model

    run = fw.run(train, model, ranks=2)
    assert torch.equal(model.weight, before)
    assert torch.equal(run.values[1].weight, before + 2)
    assert isinstance(run.values[1].weight, torch.nn.Parameter)


def test_per_rank_arguments_and_shared_structure():
    tied = torch.nn.Parameter(torch.ones(2))

    def program(comm, mine, both, *, word):
        return mine, both[0] is both[1], word

    run = fw.run(program, fw.per_rank(["a", "b"]), [tied, tied], ranks=2, word=fw.per_rank([1, 2]))
    assert run.values == [("a", True, 1), ("b", True, 2)]


def test_tensors_of_every_kind_come_back_as_they_were():
    base = torch.arange(6.0)
    given = [
        torch.tensor(3.0),
        torch.empty(0, 2),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        base.view(2, 3).t(),
        base[::2],
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ]
    (back,) = fw.run(lambda comm, x: x, given, ranks=1).values
    for a, b in zip(given, back, strict=True):
        assert (a.dtype, a.shape, a.requires_grad, a.layout, a.device) == (b.dtype, b.shape, b.requires_grad, b.layout, b.device)
        if not a.is_meta:
            assert torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)


def test_views_that_share_memory_still_share_it():
    base = torch.zeros(4)

    def program(comm, base, part):
        part += 1
        return base

    assert fw.run(program, base, base[1:3], ranks=1).values[0].tolist() == [0, 1, 1, 0]


def test_large_arguments_and_results():
    x = torch.randn(4_000_000)
    run = fw.run(lambda comm, x: x * 2, x, ranks=2)
    assert all(torch.equal(v, x * 2) for v in run.values)


def test_an_argument_that_does_not_pickle_is_named_before_ranks_start():
    lines = (x for x in ())
    for program, args, words in [
        (lambda comm: lines, (), "lines (generator)"),
        (lambda comm, x: x, ([1, lines],), "argument 1"),
        (lambda comm, x: x, (fw.per_rank([1, lines]),), "item 1"),
    ]:
        with pytest.raises(ValueError) as caught:
            fw.run(program, *args, ranks=2)
        assert words in str(caught.value)


# --- messages ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("checks", [True, False])
def test_messages_of_every_kind(checks):
    tensors = [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.int16),
        torch.randn(3).half(),
        torch.randn(3).bfloat16(),
        torch.randn(3).double(),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(4, 2)[:, 0],
        torch.randn(2, 3).t(),
        torch.ones(1).expand(5),
        torch.randn(3).to(torch.float8_e4m3fn),
    ]

    def program(comm, tensors):
        got = []
        for k, x in enumerate(tensors):
            if comm.rank == 0:
                comm.send(x, 1, tag=k)
            else:
                got.append(comm.recv(torch.empty(x.shape, dtype=x.dtype), 0, tag=k))
        return got

    got = fw.run(program, tensors, ranks=2, checks=checks).values[1]
    assert all(
        torch.equal(a.float() if "float8" in str(a.dtype) else a, b.float() if "float8" in str(b.dtype) else b)
        for a, b in zip(tensors, got, strict=True)
    )


def test_c02_a_receive_into_a_column_leaves_its_neighbours_alone():
    def program(comm):
        x = torch.arange(8.0).view(4, 2)
        if comm.rank == 0:
            comm.send(x[:, 0] + 100, 1)
        else:
            comm.recv(x[:, 0], 0)
        return x

    assert fw.run(program, ranks=2).values[1].tolist() == [[100, 1], [102, 3], [104, 5], [106, 7]]


def test_receiving_into_memory_that_overlaps_is_refused():
    with pytest.raises(RankError, match="expanded tensor"):
        fw.run(lambda comm: comm.irecv(torch.zeros(1).expand(3), 1 - comm.rank), ranks=2)


def test_receiving_counts_as_a_write_for_autograd():
    def program(comm):
        w = torch.ones(2, requires_grad=True)
        x = torch.ones(2)
        y = (w * x).sum()
        if comm.rank == 0:
            comm.send(torch.zeros(2), 1)
        else:
            comm.recv(x, 0)
        y.backward()

    with pytest.raises(RankError, match="modified by an inplace operation") as caught:
        fw.run(program, ranks=2)
    assert caught.value.rank == 1


def test_b11_tags_are_honoured():
    def program(comm):
        a, b = torch.zeros(1), torch.zeros(1)
        if comm.rank == 0:
            one, two = comm.isend(torch.tensor([1.0]), 1, tag=1), comm.isend(torch.tensor([2.0]), 1, tag=2)
            one.wait(), two.wait()
        else:
            comm.recv(b, 0, tag=2)
            comm.recv(a, 0, tag=1)
        return a.item(), b.item()

    assert fw.run(program, ranks=2).values[1] == (1.0, 2.0)


def test_b08_interleaved_isend_and_irecv():
    def program(comm):
        x, a, b = torch.full((2,), float(comm.rank)), torch.zeros(2), torch.zeros(2)
        if comm.rank == 0:
            todo = [comm.irecv(a, 1), comm.isend(x, 1), comm.irecv(b, 1)]
        else:
            todo = [comm.irecv(a, 0), comm.isend(x, 0), comm.isend(x + 5, 0)]
        for request in todo:
            request.wait()
        return a.tolist(), b.tolist()

    assert fw.run(program, ranks=2).values == [([1, 1], [6, 6]), ([0, 0], [0, 0])]


def test_a_send_behind_a_posted_receive_is_safe():
    """Both post a receive, then send and only then wait: legal, and a transport that checks only in wait() would hang."""

    def program(comm):
        x, y = torch.full((300_000,), float(comm.rank)), torch.empty(300_000)
        request = comm.irecv(y, 1 - comm.rank)
        comm.send(x, 1 - comm.rank)
        return request.wait()[0].item()

    assert fw.run(program, ranks=2).values == [1.0, 0.0]


def test_messages_to_oneself():
    def program(comm):
        x, y = torch.arange(3.0), torch.empty(3)
        first = comm.irecv(y, comm.rank)
        assert not first.done
        comm.send(x, comm.rank)
        assert first.done
        comm.exchange(x + 1, comm.rank, x2 := torch.empty(3), comm.rank, tag=4)
        return first.wait().tolist(), x2.tolist()

    assert fw.run(program, ranks=1).values == [([0, 1, 2], [1, 2, 3])]
    with pytest.raises(RankError, match="sends to itself"):
        fw.run(lambda comm: comm.send(torch.ones(1), 0), ranks=1)


def test_done_never_blocks_and_tells_the_truth():
    def program(comm):
        x = torch.ones(4)
        if comm.rank == 0:
            time.sleep(0.3)
            comm.send(x * 7, 1)
            return None
        request = comm.irecv(x, 0)
        began, asked = time.perf_counter(), 1
        first = request.done
        asked = time.perf_counter() - began
        while not request.done:
            time.sleep(0.01)
        return first, asked < 0.1, request.wait().tolist()

    assert fw.run(program, ranks=2).values[1] == (False, True, [7, 7, 7, 7])


def test_split_groups_by_colour_and_key_and_keeps_messages_apart():
    def program(comm):
        half = comm.split(comm.rank % 2, key=-comm.rank)
        nobody = comm.split(None if comm.rank else 7)
        again = half.split(0)
        x = torch.tensor([comm.rank])
        a, b = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        # the same tag and the same pair of processes, in two communicators, received in the other order
        peer = (half.rank + 1) % half.size
        sends = [half.isend(x, peer), again.isend(x + 100, peer)]
        again.recv(b, peer)
        half.recv(a, peer)
        for s in sends:
            s.wait()
        return half.rank, half.size, a.item(), b.item(), nobody is None

    assert fw.run(program, ranks=4).values == [
        (1, 2, 2, 102, False),
        (1, 2, 3, 103, True),
        (0, 2, 0, 100, True),
        (0, 2, 1, 101, True),
    ]


def test_b19_groups_named_in_another_order_are_not_cross_wired():
    def program(comm):
        pair = comm.split(0 if comm.rank in (0, 3) else 1)
        x, y = torch.tensor([comm.rank]), torch.zeros(1, dtype=torch.int64)
        pair.exchange(x, 1 - pair.rank, y, 1 - pair.rank)
        return int(x + y)

    assert fw.run(program, ranks=4).values == [3, 3, 3, 3]


def test_bad_peers_tags_and_tensors_name_what_is_allowed():
    for call, words in [
        (lambda comm: comm.send(torch.ones(1), 2), "ranks are 0 to 1"),
        (lambda comm: comm.send(torch.ones(1), True), "ranks are 0 to 1"),
        (lambda comm: comm.recv(torch.ones(1), 0, tag=-1), "tag -1"),
        (lambda comm: comm.send([1.0], 0), "takes a tensor, not list"),
        (lambda comm: comm.send(torch.ones(1, device="meta"), 1 - comm.rank), "meta tensor"),
        (lambda comm: comm.send(torch.ones(2).to_sparse(), 1 - comm.rank), "to_dense"),
    ]:
        with pytest.raises(RankError) as caught:
            fw.run(call, ranks=2)
        assert words in str(caught.value) and caught.value.kind == "ValueError"


def test_many_messages_in_flight():
    """More than the book has lines for: no check for those, but nothing is lost and nothing is called a deadlock."""

    def program(comm):
        n = 1500
        buffers = [torch.zeros(1) for _ in range(n)]
        if comm.rank == 0:
            todo = [comm.isend(torch.tensor([float(k)]), 1) for k in range(n)]
            time.sleep(0.8)
        else:
            time.sleep(0.8)
            todo = [comm.irecv(b, 0) for b in buffers]
        for request in todo:
            request.wait()
        return [int(b) for b in buffers]

    assert fw.run(program, ranks=2).values[1] == list(range(1500))


# --- what a rank finds ------------------------------------------------------------------------------------------------
def test_seeds_differ_by_rank_and_run_and_repeat():
    draw = lambda comm: (torch.initial_seed(), torch.rand(1).item(), comm.seed)  # noqa: E731
    first, again, other = (fw.run(draw, ranks=2, seed=s).values for s in (1, 1, 2))
    assert first == again
    assert first[0][0] == seed_of(1, 0)
    assert len({v[1] for v in first + other}) == 4
    assert first[0][2] == 1


def test_surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("FOURWALLS_TEST_WORD", "from here")
    monkeypatch.chdir(tmp_path)
    look = lambda comm: (os.environ.get("FOURWALLS_TEST_WORD"), os.environ.get("MORE"), os.getcwd())  # noqa: E731
    assert fw.run(look, ranks=1, env={"MORE": 5}).values == [("from here", "5", str(tmp_path))]


def test_a19_a_single_machine_uses_the_loopback_interface_unless_told_otherwise(monkeypatch):
    look = lambda comm: os.environ["GLOO_SOCKET_IFNAME"]  # noqa: E731
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert fw.run(look, ranks=1).values == ["lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,")
    assert processes._environment(1, None)["GLOO_SOCKET_IFNAME"] == "lo,"


def test_h23_threads_per_rank():
    look = lambda comm: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])  # noqa: E731
    assert fw.run(look, ranks=4).values == [(max(1, allowed_cores() // 4),) * 1 + (str(max(1, allowed_cores() // 4)),)] * 4
    assert fw.run(look, ranks=1, threads=3).values == [(3, "3")]


def test_native_collectives_work():
    def program(comm):
        x = torch.ones(3) * (comm.rank + 1)
        comm.native.all_reduce(x)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2) * comm.rank).sum().backward()
        return x.tolist(), model.module.weight.grad.tolist(), comm.native.get_world_size()

    assert fw.run(program, ranks=2).values == [([3, 3, 3], [[0.5, 0.5]], 2)] * 2


def test_trace_counts_bytes_and_marks_waits_and_pacing():
    def program(comm):
        with comm.compute("forward", kind="forward", seconds=0.05, microbatch=3, stage=1):
            pass
        if comm.rank == 0:
            time.sleep(0.1)
            with comm.compute("to the right"):
                comm.send(torch.ones(10), 1)
        else:
            comm.recv(torch.ones(10), 0)
        comm.mark_live(123)
        return comm.clock()

    run = fw.run(program, ranks=2)
    trace = run.trace
    assert trace.bytes_sent(0) == 40 and trace.bytes_sent(1) == 0
    (paced,) = trace.where(rank=0, kind="forward")
    assert paced.source == "paced" and 0.05 <= paced.seconds < 0.2 and (paced.microbatch, paced.stage) == (3, 1)
    (recv,) = trace.where(kind="recv")
    (send,) = trace.where(kind="send")
    assert (recv.rank, recv.peer, recv.bytes) == (1, 0, 40) and (send.rank, send.peer, send.name) == (0, 1, "to the right")
    (wait,) = trace.where(rank=1, kind="wait")
    assert 0.05 < wait.seconds < 1 and wait.peer == 0
    assert [e.bytes for e in trace.where(kind="live")] == [123, 123]
    assert trace.sources == ("measured", "paced")
    assert 0.1 < run.makespan < 2 and run.values[0] > 10**11
    assert trace.ranks == 2 and run.backend == "gloo" and run.seconds > run.makespan


def test_a29_running_twice_is_the_same():
    program = lambda comm: torch.rand(2).tolist()  # noqa: E731
    assert fw.run(program, ranks=2).values == fw.run(program, ranks=2).values


def test_a04_a05_a_driver_that_the_caller_has_started_does_not_matter(monkeypatch):
    """A module that belongs to the process that loaded it, as a driver's binding does, and a torch that has started CUDA: ranks
    are no forks of the caller, so they meet neither.
    """
    driver = types.ModuleType("a_driver_of_the_caller")
    driver.process = os.getpid()
    monkeypatch.setitem(sys.modules, driver.__name__, driver)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    look = lambda comm: ("a_driver_of_the_caller" in sys.modules, torch.cuda.is_initialized())  # noqa: E731
    assert fw.run(look, ranks=2).values == [(False, False)] * 2


def leaves_a_mess(comm):
    drawn = torch.rand(2).tolist()
    torch.manual_seed(7)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    os.environ["FOURWALLS_TEST_MESS"] = "left"
    sys.modules["fourwalls_test_mess"] = sys
    return drawn


def finds_a_mess(comm):
    mess = os.environ.get("FOURWALLS_TEST_MESS"), "fourwalls_test_mess" in sys.modules
    return torch.rand(2).tolist(), torch.is_grad_enabled(), str(torch.get_default_dtype()), mess


def test_a31_what_ran_before_does_not_matter():
    """Two programs in both orders, the second time after the caller has drawn numbers: the same from each."""
    found = []
    for order in ((leaves_a_mess, finds_a_mess), (finds_a_mess, leaves_a_mess)):
        found.append({program: fw.run(program, ranks=2).values for program in order})
        torch.rand(1)
    assert found[0] == found[1]
    assert [rest for _, *rest in found[0][finds_a_mess]] == [[True, "torch.float32", (None, False)]] * 2


def test_world_of_one():
    def program(comm):
        comm.barrier()
        return comm.split(0).size, comm.rank, comm.size

    assert fw.run(program, ranks=1).values == [(1, 0, 1)]


def test_communication_inside_backward():
    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            got, comm = torch.empty_like(grad), ctx.comm
            comm.exchange(grad * (comm.rank + 1), 1 - comm.rank, got, 1 - comm.rank)
            return got, None

    def program(comm):
        x = torch.ones(2, requires_grad=True)
        Shift.apply(x, comm).sum().backward()
        return x.grad.tolist()

    assert fw.run(program, ranks=2).values == [[2, 2], [1, 1]]


# --- bad arguments ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": -1}, "ranks=-1"),
        ({"ranks": True}, "ranks=True"),
        ({"ranks": 2.0}, "ranks=2.0"),
        ({"ranks": 500}, "fw.simulate"),
        ({"backend": "mpi"}, "'gloo', 'nccl'"),
        ({"timeout": 0}, "timeout=0"),
        ({"limit": -1}, "limit=-1"),
        ({"threads": 0}, "threads=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": 10**6 + 1}, "at most 1000000"),
        ({"limit": float("nan")}, "math.inf"),
        ({"seed": "1"}, "seed='1'"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"seed": True}, "seed=True"),
        ({"env": 5}, "env=5"),
        ({"env": {"A=B": "1"}}, "'A=B'"),
        ({"env": {"A\0": "1"}}, "'A\\x00'"),
        ({"env": {"": "1"}}, "''"),
        ({"env": {1: "1"}}, "name 1"),
        ({"env": {"A": "\0"}}, "A='\\x00'"),
        ({"env": {"A": None}}, "A=None"),
        ({"start": "thread"}, "start='thread'"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, words, monkeypatch):
    monkeypatch.setattr(processes, "open_session", lambda *a, **k: pytest.fail("ranks were started"))
    with pytest.raises(ValueError) as caught:
        fw.run(lambda comm: None, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("run", [fw.run, fw.simulate])
def test_a_program_whose_call_runs_nothing_is_refused(run, monkeypatch):
    monkeypatch.setattr(processes, "open_session", lambda *a, **k: pytest.fail("ranks were started"))

    async def waits(comm):
        pass

    async def streams(comm):
        yield 1

    def yields(comm, x=0):
        yield x

    class Waits:
        async def __call__(self, comm):
            pass

    for program, word in [
        (waits, "async"),
        (streams, "async"),
        (Waits(), "async"),
        (Waits().__call__, "async"),
        (yields, "generator"),
        (functools.partial(functools.partial(yields), x=1), "generator"),
    ]:
        with pytest.raises(ValueError, match=word):
            run(program, ranks=2)


def test_per_rank_needs_a_list():
    for what in (5, None, "ab"):
        with pytest.raises(ValueError, match="one item for each rank"):
            fw.per_rank(what)
    assert list(fw.per_rank(range(2))) == [0, 1]


def test_no_limit_and_numbers_of_other_kinds():
    numpy = pytest.importorskip("numpy")
    run = fw.run(lambda comm: comm.seed, ranks=1, limit=float("inf"), timeout=numpy.float32(5), seed=numpy.int64(3))
    assert run.values == [3] and type(run.values[0]) is int


@pytest.mark.parametrize("run", [fw.run, fw.simulate])
def test_a_peer_that_is_no_int_is_told_how(run):
    numpy = pytest.importorskip("numpy")
    for call in ("send", "isend", "recv", "irecv"):
        with pytest.raises(RankError, match=r"use int\("):
            run(lambda comm, call: getattr(comm, call)(torch.ones(1), numpy.int64(1 - comm.rank)), call, ranks=2)


def test_bad_programs_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(processes, "open_session", lambda *a, **k: pytest.fail("ranks were started"))
    for program, args in [
        ("text", ()),
        (lambda: None, ()),
        (lambda comm, x: x, ()),
        (lambda comm: None, (fw.per_rank([1, 2, 3]),)),
    ]:
        with pytest.raises(ValueError):
            fw.run(program, *args, ranks=2)


def test_a28_nccl_needs_a_gpu_for_each_rank():
    with pytest.raises(ValueError, match=r"2 ranks need 2 GPUs, this machine has 1"):
        choose_backend("nccl", 2, gpus=lambda: 1)
    assert choose_backend("nccl", 2, gpus=lambda: 2) == "nccl"
    assert choose_backend(None, 2, gpus=lambda: 1) == "gloo"
    assert choose_backend(None, 2, gpus=lambda: 4) == "nccl"
    assert choose_backend("gloo", 2, gpus=lambda: pytest.fail("gloo needs no GPU")) == "gloo"


def test_windows_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match=r"simulate.*WSL"):
        processes.check_count(2)


# --- pools, concurrency, surroundings of the caller -------------------------------------------------------------------
def test_a_pool_keeps_its_processes_and_closes_when_a_program_fails():
    with fw.pool(ranks=2) as pool:
        first = pool.run(lambda comm: os.getpid()).values
        assert pool.run(lambda comm: os.getpid()).values == first
        run = pool.run(lambda comm: print("third"), stream=False)
        assert run.outputs == ["third\n", "third\n"]
        with pytest.raises(DeadlockError):
            pool.run(lambda comm: comm.recv(torch.ones(1), 1 - comm.rank))
        with pytest.raises(ValueError, match="closed"):
            pool.run(lambda comm: 1)
        assert not any(psutil.pid_exists(p) for p in first)


def test_a_pool_trace_starts_anew():
    def ring(comm):
        comm.exchange(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)

    with fw.pool(ranks=2) as pool:
        assert [pool.run(ring).trace.messages_sent() for _ in range(3)] == [2, 2, 2]


def test_a_pool_compares_no_statement_with_an_earlier_programs():
    def program(comm, op):
        if comm.rank == 1:
            time.sleep(0.1)
        comm.agree((("collective", "all_reduce"), ("op", op)))

    with fw.pool(ranks=2) as pool:
        for op in ("sum", "max"):
            pool.run(program, op)
        with pytest.raises(MismatchError, match="rank 0 says op=0, rank 1 says op=1"):
            pool.run(lambda comm: comm.agree((("collective", "all_reduce"), ("op", comm.rank))))


def test_twenty_runs_at_once():
    def program(comm, k):
        comm.barrier()
        return k, comm.rank

    with ThreadPoolExecutor(20) as pool:
        runs = list(pool.map(lambda k: fw.run(program, k, ranks=2, stream=False, timeout=60), range(20)))
    assert [r.values for r in runs] == [[(k, 0), (k, 1)] for k in range(20)]


def test_a17_a_taken_port_is_of_no_interest(monkeypatch):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert fw.run(lambda comm: comm.rank, ranks=2).values == [0, 1]


def test_a19_a20_h22_h26_no_network_no_host_name_no_shared_memory_no_home():
    """In namespaces of its own: loopback alone, a name that nobody knows, /dev/shm read-only, a home that does not exist."""
    code = f"import sys; sys.path.insert(0, {UTILS!r}); import fourwalls as fw; "
    code += "print(fw.run(lambda comm: comm.rank, ranks=2).values)"
    wrap = "hostname foo.invalid; ip link set lo up 2>/dev/null || ifconfig lo up; mount -t tmpfs -o ro none /dev/shm; "
    command = ["unshare", "--uts", "--net", "--mount", "sh", "-c", wrap + 'exec "$@"', "sh", sys.executable, "-c", code]
    if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode:
        command = command[-3:]  # this machine does not let a test make a namespace
    environment = {**os.environ, "HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.stdout.strip(), done.stderr) == ("[0, 1]", "")


def test_a26_standard_output_need_not_be_a_file(monkeypatch):
    stream = io.StringIO()
    with redirect_stdout(stream):
        fw.run(lambda comm: print("hello"), ranks=2)
    assert sorted(stream.getvalue().splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    for broken in (None, io.StringIO()):
        if broken is not None:
            broken.close()
        monkeypatch.setattr(sys, "stdout", broken)
        assert fw.run(lambda comm: print("hello"), ranks=1).output == "[rank 0] hello\n"


def test_a_run_from_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(fw.run(lambda comm: comm.rank, ranks=2, stream=False).values))
    thread.start()
    thread.join()
    assert found == [[0, 1]]


def test_a_killed_caller_leaves_nothing(tmp_path):
    """SIGKILL to the process that runs the program: its ranks, what they started and the fork server are gone."""
    code = f"""
import sys; sys.path.insert(0, {UTILS!r})
import fourwalls as fw, os, subprocess, time
def program(comm):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print("pids", os.getpid(), child.pid, os.getppid())
    for _ in range(10000): print("x" * 100)  # more than is shown: a file
    print("ready")
    time.sleep(60)
fw.run(program, ranks=2)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        seen = []
        while sum("pids" in line for line in seen) < 2 or not list(tmp_path.glob("fourwalls-*/output*")):
            seen.append(process.stdout.readline())
            assert seen[-1], "ended early"
        pids = [int(word) for line in seen if "pids" in line for word in line.split()[3:]]
        assert len(pids) == 6 and all(map(psutil.pid_exists, pids))
        process.kill()
        process.stdout.close()
    deadline = time.monotonic() + 5
    while (alive := [p for p in pids if psutil.pid_exists(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def test_a_forked_caller_starts_its_own_server():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, repr(fw.run(lambda comm: comm.rank, ranks=2, stream=False).values).encode())
            servers.Server.close_all()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 100) == b"[0, 1]"
    os.close(read)
    assert fw.run(lambda comm: comm.rank, ranks=2).values == [0, 1]


def test_the_fork_server_has_one_thread():
    found = [p for p in psutil.Process().children() if "forkserver" in " ".join(p.cmdline())]
    assert found and all(p.num_threads() == 1 for p in found)


def test_a_rank_that_ends_between_two_programs_is_named():
    def program(comm):
        if comm.rank == 1:
            threading.Timer(0.2, os._exit, (0,)).start()

    with fw.pool(ranks=2) as pool:
        pool.run(program)
        time.sleep(0.5)
        with pytest.raises(RankError, match="rank 1 ended its process"):
            pool.run(lambda comm: None)
