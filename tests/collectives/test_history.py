"""The recorder sees what ranks really hold, whatever style the function is written in, and never what the transport does."""

import pytest
import torch

from fourwalls.collectives import history, ring, star, tree
from fourwalls.collectives.history import broken_ring, record
from fourwalls.collectives.watched import decode, encode
from fourwalls.ranks.comm import DeadlockError, MismatchError, RankError


def naive_in_place(comm, x):
    """Changes x itself, chunk by chunk, and returns nothing."""
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunk = list(x.chunk(n))
    for s in range(n - 1):
        buf = torch.empty_like(chunk[(comm.rank - s - 2) % n])
        comm.exchange(chunk[(comm.rank - s - 1) % n], right, buf, left)
        chunk[(comm.rank - s - 2) % n] += buf
    for s in range(n - 1):
        comm.exchange(chunk[(comm.rank - s) % n], right, chunk[(comm.rank - s - 1) % n], left)


def naive_out_of_place(comm, x):
    """Keeps a list of chunks, replaces them, and joins them at the end."""
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunk = list(x.chunk(n))
    for s in range(n - 1):
        k = (comm.rank - s - 2) % n
        buf = torch.empty_like(chunk[k])
        comm.exchange(chunk[(comm.rank - s - 1) % n].clone(), right, buf, left)
        chunk[k] = chunk[k] + buf
    for s in range(n - 1):
        buf = torch.empty_like(chunk[0])
        comm.exchange(chunk[(comm.rank - s) % n], right, buf, left)
        chunk[(comm.rank - s - 1) % n] = buf
    return torch.cat(chunk)


def cells(step):
    return [["+".join(f"{n}r{r}" for r, n in sorted(cell.items())) for cell in row] for row in step.after]


@pytest.mark.parametrize("function", [naive_in_place, naive_out_of_place, ring.all_reduce])
def test_three_ways_to_write_the_ring_have_one_history(function):
    seen, full = record(function, 3), "1r0+1r1+1r2"
    assert [cells(s) for s in seen.steps] == [
        [["1r0"] * 3, ["1r1"] * 3, ["1r2"] * 3],
        [["1r0", "1r0+1r2", "1r0"], ["1r1", "1r1", "1r0+1r1"], ["1r1+1r2", "1r2", "1r2"]],
        [[full, "1r0+1r2", "1r0"], ["1r1", full, "1r0+1r1"], ["1r1+1r2", "1r2", full]],
        [[full, "1r0+1r2", full], [full, full, "1r0+1r1"], ["1r1+1r2", full, full]],
        [[full] * 3] * 3,
    ]
    assert [sorted(s.changed) for s in seen.steps[:2]] == [[], [(0, 1), (1, 2), (2, 0)]]
    assert [s.end // 10**6 for s in seen.steps] == [0, 2, 4, 6, 8], "1 µs a message and 1 µs a cell"


@pytest.mark.parametrize("module", [ring, tree, star])
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (4, 4), (5, 7), (8, 13)])
def test_the_library_ends_with_the_sum_everywhere(module, ranks, count):
    seen = record(module.all_reduce, ranks, count)
    assert seen.correct
    assert (len(seen.steps) == 1) == (ranks == 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ring_bytes_and_the_step_after_which_each_rank_owns_one_chunk(ranks):
    seen = record(ring.all_reduce, ranks)
    assert [seen.bytes_sent(r) for r in range(ranks)] == [2 * (ranks - 1) * 8] * ranks
    full = {r: 1 for r in range(ranks)}
    assert seen.first_step(lambda after: all(row.count(full) == 1 for row in after)) == ranks - 1


def test_messages_say_what_they_carry():
    first = record(ring.all_reduce, 4).steps[1].messages
    assert sorted((m.src, m.dst, m.bytes, m.carried) for m in first) == [
        (0, 1, 8, ((3, {0: 1}),)),
        (1, 2, 8, ((0, {1: 1}),)),
        (2, 3, 8, ((1, {2: 1}),)),
        (3, 0, 8, ((2, {3: 1}),)),
    ]


def test_the_broken_ring_holds_r1_twice_in_one_cell_first():
    seen = record(broken_ring, 4)
    twice = [[(r, c) for r, row in enumerate(s.after) for c, cell in enumerate(row) if cell.get(1) == 2] for s in seen.steps]
    assert twice[:2] == [[], [(2, 0)]]
    assert twice[-1] == [(r, 0) for r in range(4)]
    assert not seen.correct


def test_a_part_that_lands_in_the_wrong_chunk_is_seen():
    def shifted(comm, x):
        buf = torch.empty(1, dtype=x.dtype)
        comm.exchange(x[:1], (comm.rank + 1) % comm.size, buf, (comm.rank - 1) % comm.size)
        x[1:2] += buf
        return x

    last = record(shifted, 3).steps[-1].after
    assert all(-1 in row[1] for row in last) and all(-1 not in row[0] for row in last)


def test_a_finished_chunk_that_is_overwritten_is_seen_as_lost():
    def spoils(comm, x):
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        else:
            buf = torch.empty_like(x)
            comm.recv(buf, 0)
            mine = x.clone()
            x += buf
            comm.send(mine, 0)

    last = record(spoils, 2).steps[-1].after
    assert last[0] == ({1: 1}, {1: 1}) and last[1] == ({0: 1, 1: 1}, {0: 1, 1: 1})


def test_a_receive_buffer_is_not_the_cell_until_it_is_added():
    def collects(comm, x):
        if comm.rank:
            comm.send(x, 0)
            return
        bufs = [torch.empty_like(x), torch.empty_like(x)]
        for r, buf in enumerate(bufs, 1):
            comm.recv(buf, r)
        for buf in bufs:
            x += buf

    seen = record(collects, 3, 1)
    assert [s.after[0][0] for s in seen.steps] == [{0: 1}, {0: 1}, {0: 1, 1: 1, 2: 1}]


def test_looking_at_an_old_tensor_does_not_bring_it_back():
    def looks(comm, x):
        other, buf = 1 - comm.rank, torch.empty_like(x)
        comm.exchange(x, other, buf, other)
        total = x + buf
        old = x[:1]
        comm.exchange(total, other, buf, other)
        return None if old.sum() < 0 else total

    assert record(looks, 2, 1).steps[1].after == (({0: 1, 1: 1},), ({0: 1, 1: 1},))


def test_a_slow_link_changes_times_and_nothing_else():
    fast, slow = record(ring.all_reduce, 4), record(ring.all_reduce, 4, slow_link=(1, 2, 10))
    assert slow.makespan > 3 * fast.makespan
    assert slow.correct and slow.bytes_sent() == fast.bytes_sent()
    assert slow.slow == (1, 2, 10)


def test_twice_the_same():
    assert record(tree.all_reduce, 5) == record(tree.all_reduce, 5)


def test_communicators_made_by_split_and_nonblocking_calls_are_watched_too():
    def two_groups(comm, x):
        pair = comm.split(comm.rank % 2)
        buf = torch.empty_like(x)
        incoming, outgoing = pair.irecv(buf, 1 - pair.rank), pair.isend(x, 1 - pair.rank)
        incoming.wait()
        outgoing.wait()
        return x + buf

    last = record(two_groups, 4).steps[-1].after
    assert last[0][0] == {0: 1, 2: 1} and last[3][3] == {1: 1, 3: 1}


def test_errors_of_the_run_come_through():
    def waits(comm, x):
        return comm.recv(x, (comm.rank + 1) % comm.size)

    def fails(comm, x):
        raise KeyError("mine")

    def differs(comm, x):
        return ring.all_reduce(comm, x, op="max" if comm.rank else "sum")

    with pytest.raises(DeadlockError):
        record(waits, 3)
    with pytest.raises(MismatchError, match="max"):
        record(differs, 3)
    with pytest.raises(RankError, match="mine"):
        record(fails, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(ranks=9), "1 to 8"),
        (dict(ranks=0), "1 to 8"),
        (dict(ranks=2, cells=17), "1 to 16"),
        (dict(ranks=2, slow_link=(0, 0, 2)), "different"),
        (dict(ranks=2, slow_link=(0, 2, 2)), "below 2"),
        (dict(ranks=2, function="ring"), "callable"),
    ],
)
def test_bad_arguments(arguments, words):
    arguments = {"function": ring.all_reduce, **arguments}
    with pytest.raises(ValueError, match=words):
        record(**arguments)


def test_numbers_tell_who_is_in_them_how_often_and_where():
    total = sum(encode(r, 16) for r in (0, 3, 3, 7))
    assert [decode(v, 8, 16) for v in total.tolist()] == [(p, {0: 1, 3: 2, 7: 1}) for p in range(16)]
    mixed = encode(0, 4)[0] + encode(1, 4)[3]
    assert decode(mixed.item(), 8, 4) == (None, {0: 1, 1: 1})
    assert decode(0.0, 8, 4) == (None, {})
    for foreign in (0.5, -1.0, float("nan"), float("inf"), 2.0**60, 3e-310):
        assert decode(foreign, 8, 4) is None


def test_no_two_different_cells_average_to_a_third():
    """Else a sum over the wrong pair of cells would pass for a sum over one cell."""
    values = [encode(0, history.MAX_CELLS)[p].item() for p in range(history.MAX_CELLS)]
    for a in range(16):
        for b in range(a):
            assert decode(values[a] + values[b], 1, 16)[0] is None
