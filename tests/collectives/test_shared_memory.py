"""All-reduce through common memory: the ring's bits on real ranks, no message, no name, and no hang when something goes wrong."""

import os
import random
import re
import signal
import time

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring, shared_memory
from fourwalls.collectives.reductions import OPS, exact_and_bound, wrong_elements
from fourwalls.cost.hardware import uniform
from fourwalls.ranks import shared

NETWORK = uniform(1e-6, 1e9)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (1000,), (200_003,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


def data(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.3
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return (torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5 + 1).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def cases():
    for k, dtype in enumerate(DTYPES):
        for op in OPS:
            if dtype in OPS[op].dtypes:
                k += 1
                yield SHAPES[k % len(SHAPES)], dtype, op, (None, 1, 24, 4096)[k % 4] if k % len(SHAPES) < 6 else None


def every_case(comm):
    """Results that are not exactly the ring's; the small ones are returned."""
    found, differ = [], []
    for shape, dtype, op, segment_bytes in cases():
        x = data(comm.rank, shape, dtype)
        kept = x.clone()
        result = shared_memory.all_reduce(comm, x, op=op, segment_bytes=segment_bytes)
        assert torch.equal(x, kept)
        if not torch.equal(result, ring.all_reduce(comm, x, op=op)):
            differ.append((shape, dtype, op, segment_bytes))
        found.append(result if result.numel() < 10**4 else None)
    return found, differ


@pytest.mark.parametrize(("n", "checks"), [(1, True), (2, False), (3, True), (4, False)])
def test_the_bits_of_the_ring_and_right(n, checks):
    run = fw.run(every_case, ranks=n, checks=checks, stream=False)
    for results, differ in run.values:
        assert differ == []
        for (shape, dtype, op, _), result, first in zip(cases(), results, run.values[0][0], strict=True):
            if result is not None:
                assert result.dtype == dtype and torch.equal(result, first)
                assert wrong_elements(result, *exact_and_bound([data(r, shape, dtype) for r in range(n)], op)) == 0


def many_calls(comm, seed):
    """Sizes, dtypes and cuts at random, ranks out of step: is a block ever used again too early?"""
    same, own = random.Random(seed), random.Random(seed + 1 + comm.rank)
    wrong = 0
    for call in range(120):
        numel, dtype = same.choice([1, 5, 300, 5000, 70_000]), same.choice([torch.float32, torch.int64])
        segment_bytes = same.choice([None, 8192]) if numel > 1 else 8
        x = ((torch.arange(numel) + call) * (comm.rank + 1)).remainder(1009).to(dtype)
        if own.random() < 0.15:
            time.sleep(0.002 * own.random())
        result = shared_memory.all_reduce(comm, x, segment_bytes=segment_bytes, out=x if call % 2 else None)
        want = sum(((torch.arange(numel) + call) * (r + 1)).remainder(1009) for r in range(comm.size))
        wrong += int((result != want.to(dtype)).sum())
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_many_calls_out_of_step(n):
    assert fw.run(many_calls, n, ranks=n, checks=False, stream=False).values == [0] * n


def what_is_left(comm):
    x, descriptors = torch.ones(1000), len(os.listdir("/proc/self/fd"))
    shared_memory.all_reduce(comm, x)
    room, descriptors = comm._room, descriptors + 1  # the mapping keeps one
    for _ in range(5):
        shared_memory.all_reduce(comm, x)
    more = len(os.listdir("/proc/self/fd")) - descriptors
    group = comm.split(0)
    assert shared_memory.all_reduce(group, x)[0] == comm.size and group._room is not room
    with open("/proc/self/maps") as file:
        maps = [line.split()[-2] for line in file if "fourwalls-shared" in line or "/dev/shm" in line]
    return comm._room is room, more, maps


def test_made_once_without_a_name():
    before = set(os.listdir("/dev/shm"))
    run = fw.run(what_is_left, ranks=2, stream=False)
    assert run.values == [(True, 0, ["/memfd:fourwalls-shared"] * 2)] * 2  # one for each communicator, each without a name
    assert set(os.listdir("/dev/shm")) <= before


def in_place(comm):
    matrix = torch.arange(8.0).view(4, 2) + 100 * comm.rank
    column = matrix[:, 0]
    assert shared_memory.all_reduce(comm, column, out=column) is column
    shared_memory.all_reduce(comm, torch.ones(4096), segment_bytes=3000)  # a chunk of 2048 in blocks of 750 at most: 3
    return matrix


def test_a_column_in_place_spares_its_neighbour_and_nothing_is_sent():
    run = fw.run(in_place, ranks=2, stream=False)
    assert run.trace.bytes_sent() == 0 and run.trace.messages_sent() == 0
    # checks on: additions are recorded, one for the column and one for each block
    assert [len(run.trace.where(rank=r, kind="reduce")) for r in range(2)] == [1 + 3] * 2
    for rank, matrix in enumerate(run.values):
        assert torch.equal(matrix[:, 0], torch.tensor([100.0, 104.0, 108.0, 112.0]))
        assert torch.equal(matrix[:, 1], torch.tensor([1.0, 3.0, 5.0, 7.0]) + 100 * rank)


def signs(comm):
    """What two ranks must not decide for themselves: the sign of a zero, and of a nan."""
    found = []
    for op, values in (("max", [0.0, -0.0]), ("min", [-0.0, 0.0]), ("sum", [float("nan"), -float("nan")])):
        for numel in (1, 40, 200_001):
            x = torch.tensor(values, dtype=torch.float32)[comm.rank].repeat(numel)
            found.append(shared_memory.all_reduce(comm, x, op=op).view(torch.int32).unique().tolist())
    return found


def test_two_ranks_agree_on_the_sign_of_zero_and_of_nan():
    first, second = fw.run(signs, ranks=2, checks=False, stream=False).values
    assert first == second


def with_fault(comm, name, value):
    """What a machine without the means would answer: the function `name` of ranks/shared.py returns value[rank]."""
    setattr(shared, name, lambda *_: value[comm.rank])
    x = data(comm.rank, (50,), torch.float32)
    return [torch.equal(shared_memory.all_reduce(comm, x), ring.all_reduce(comm, x)) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("_boot", ["a", "a", "b"], "ranks 0 and 2 are on different hosts"),
        ("_processes", ["1", "2", "1"], "ranks 0 and 1 are on different hosts \\(or in containers"),
        ("_make", [(-1, 28), None, None], "rank 0 cannot: No space left on device"),
        ("_open", [None, (None, 13), (None, 0)], "rank 1 cannot: Permission denied"),
        ("_unable", [0, 0, 38], "rank 2 cannot: its system has no memfd"),
    ],
)
def test_where_there_is_no_common_memory_the_ring_stands_in_with_a_word(name, value, word):
    run = fw.run(with_fault, name, value, ranks=3, stream=False)
    assert run.values == [[True, True]] * 3
    assert run.output.count("shared memory: ") == 1 and "the ring stands in" in run.outputs[0]
    assert re.search(word, run.outputs[0])


def no_addresses(*_):
    raise OSError(12, "Cannot allocate memory")


def awkward(comm):
    """A group whose first rank cannot even look at the memory that it made; what has no data; what is still to be read."""
    group, prepare, files = comm.split(0), shared.Area.prepare, len(os.listdir("/proc/self/fd"))
    shared.Area.prepare = staticmethod(no_addresses)
    said = [float(shared_memory.all_reduce(group, torch.ones(3))[0])]
    shared.Area.prepare, more = prepare, len(os.listdir("/proc/self/fd")) - files
    whole = torch.ones(1_000_001)  # several blocks: what is written would be read again
    for x, out in ((torch.ones(3, device="meta"), None), (whole[1:], whole[:-1])):
        try:
            shared_memory.all_reduce(comm, x, out=out)
        except ValueError as error:
            said.append(str(error))
    return said, more, not isinstance(comm._room, str)


def test_no_addresses_no_data_and_no_memory_of_its_own():
    run = fw.run(awkward, ranks=2, stream=False)
    assert "rank 0 cannot: Cannot allocate memory; the ring stands in" in run.outputs[0]
    for (total, meta, overlap), more, shares in run.values:
        assert (total, more, shares) == (2.0, 0, True)  # no file is left open
        assert "meta tensor" in meta and "out shares memory with x" in overlap


def test_simulated_ranks_use_the_ring_and_say_so():
    def program(comm):
        return shared_memory.all_reduce(comm, data(comm.rank, (37,), torch.float32))

    run = fw.simulate(program, ranks=4, cluster=NETWORK)
    assert "simulated ranks have no memory of a host to share; the ring stands in" in run.outputs[0]
    real = fw.run(program, ranks=4, stream=False)
    assert all(torch.equal(a, b) for a, b in zip(run.values, real.values, strict=True))
    assert run.trace.messages_sent() == 4 * 6


def dies(comm, how):
    x = torch.ones(2_000_000)
    shared_memory.all_reduce(comm, x)
    if comm.rank == 1:
        if how == "kill":
            from fourwalls.collectives.reductions import OPS

            after, add = [0], OPS["sum"].combine

            def last_one(*args, **kwargs):  # in the middle of the reduction, with some blocks done
                after[0] += 1
                if after[0] == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return add(*args, **kwargs)

            object.__setattr__(OPS["sum"], "combine", last_one)
        else:
            raise RuntimeError("no more")
    shared_memory.all_reduce(comm, x, segment_bytes=65536)


@pytest.mark.parametrize(("how", "word"), [("kill", "SIGKILL"), ("raise", "no more")])
def test_a_rank_lost_in_the_middle_lets_the_others_go(how, word):
    before, began = set(os.listdir("/dev/shm")), time.monotonic()
    with pytest.raises(fw.RankError, match=word) as caught:
        fw.run(dies, how, ranks=3, stream=False, checks=False)
    assert caught.value.rank == 1 and time.monotonic() - began < 10  # 5 on a machine of its own
    assert set(os.listdir("/dev/shm")) <= before


def leaves(comm):
    shared_memory.all_reduce(comm, torch.ones(3))
    if comm.rank == 0:
        shared_memory.all_reduce(comm, torch.ones(3))


def crosses(comm):
    shared_memory.all_reduce(comm, torch.ones(3))
    if comm.rank == 0:
        shared_memory.all_reduce(comm, torch.ones(3))
    else:
        comm.recv(torch.ones(3), 0)


@pytest.mark.parametrize(
    ("program", "word"),
    [(leaves, "waiting for rank 1, which returned without making the matching call"), (crosses, "0 -> 1 -> 0")],
)
def test_a_deadlock_in_shared_memory_is_seen_and_named(program, word):
    began = time.monotonic()
    with pytest.raises(fw.DeadlockError, match=word) as caught:
        fw.run(program, ranks=2, stream=False)
    assert "rank 0: all_reduce(from 1)" in str(caught.value) and "test_shared_memory.py" in str(caught.value)
    assert time.monotonic() - began < 10


def late(comm):
    total = 0.0
    for turn in range(3):
        if comm.rank == turn % 2:
            time.sleep(0.7)  # long enough for the others' wait to be written into the book, and answered there
        total += float(shared_memory.all_reduce(comm, torch.ones(1))[0])
    return total


def test_a_late_rank_is_no_deadlock_and_its_others_waits_are_recorded():
    run = fw.run(late, ranks=3, stream=False)
    assert run.values == [9.0] * 3
    waits = [e for e in run.trace.where(rank=2, kind="wait") if e.peer in (0, 1) and e.end - e.start > 3 * 10**11]
    assert {e.peer for e in waits} == {0, 1}


def kept_waiting(comm):
    shared_memory.all_reduce(comm, torch.ones(1))
    if comm.rank == 1:
        time.sleep(20)
    shared_memory.all_reduce(comm, torch.ones(1))


def test_a_straggler_ends_the_run_at_its_timeout():
    with pytest.raises(fw.RankError, match="rank 1 kept the others waiting"):
        fw.run(kept_waiting, ranks=2, timeout=1.0, stream=False)


def test_the_memory_is_a_few_mebibytes():
    for n in range(2, 65):
        row, layer = shared_memory.row_bytes(n), shared_memory.layer_bytes(n)
        assert row % (n * 64) == 0 and row >= n * 64 and layer % 64 == 0
        assert shared_memory.SMALL_BYTES // n <= layer  # a small tensor fits
        assert shared_memory._Room.bytes(n) <= 25 * 2**20
    with pytest.raises(ValueError, match="segment_bytes is 0"):
        shared_memory.all_reduce(None, torch.ones(1), segment_bytes=0)
    with pytest.raises(ValueError, match="complex numbers have no order"):
        shared_memory.all_reduce(None, torch.tensor([2 + 3j]), op="max")
