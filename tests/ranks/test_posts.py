"""A simulated message: the copy that travels, the buffer that it reaches, the bytes that two messages may not share."""

import pickle

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import Device, uniform
from fourwalls.ranks import simulated
from fourwalls.ranks.buffers import raw_address
from fourwalls.ranks.trace import PS, Event, Trace

WIRE = uniform(1e-6, 1e9)  # one microsecond, one nanosecond a byte
US = PS // 10**6

RAW = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
CONJUGATE = torch.tensor([1 + 2j, 3 - 4j]).conj()
KINDS = {
    **{str(dtype): torch.arange(1, 6).to(dtype) for dtype in RAW},
    "bool": torch.tensor([True, False, True]),
    "float8": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugate": CONJUGATE,
    "imaginary part of a conjugate": CONJUGATE[:1].imag,
    "imaginary parts of a conjugate": CONJUGATE.imag,
    "contiguous view that negates": CONJUGATE.imag.as_strided((3,), (1,)),
    "0-d": torch.tensor(3.0),
    "empty": torch.zeros(0),
    "matrix": torch.arange(6.0).view(2, 3),
    "column": torch.arange(6.0).view(2, 3)[:, 1],
    "turned": torch.arange(6.0).view(2, 3).T,
    "inside": torch.arange(6.0)[2:5],
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
    "leaf with gradient": torch.arange(3.0).requires_grad_(),
    "expanded": torch.ones(1).expand(4),
    "large": torch.arange(100_000.0),
}


def same(a, b):
    """Equal as numbers; compared in a wide dtype, which holds all of these exactly."""
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach().to(wide), b.detach().to(wide))


BUFFERS = {kind: ["plain", "strided"] + ["conjugated"] * x.dtype.is_complex for kind, x in KINDS.items()}


@pytest.mark.parametrize("kind,buffer", [(kind, buffer) for kind, buffers in BUFFERS.items() for buffer in buffers])
@pytest.mark.parametrize("checks", [True, False])
def test_any_tensor_reaches_any_buffer(kind, buffer, checks):
    x = KINDS[kind]

    def program(comm):
        if comm.rank:
            comm.send(x, 0)
            return None
        if buffer == "plain":
            place = torch.zeros(x.shape, dtype=x.dtype)
        elif buffer == "strided":
            place = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]
        else:
            place = torch.zeros(x.shape, dtype=x.dtype).conj()
        return comm.recv(place, 1)

    run = fw.simulate(program, ranks=2, cluster=WIRE, checks=checks)
    assert same(run.values[0], x)
    assert run.trace.bytes_sent() == x.numel() * x.element_size()


def test_only_tensors_that_are_nothing_but_bytes_travel_as_bytes():
    by_torch = {
        *("float8", "complex", "conjugate", "imaginary part of a conjugate", "imaginary parts of a conjugate"),
        *("contiguous view that negates", "empty", "column", "turned", "expanded", "parameter"),
    }
    assert {kind for kind, x in KINDS.items() if not raw_address(x)} == by_torch
    assert raw_address(torch.zeros(2, device="meta")) == 0
    assert raw_address(torch.zeros(2).to_sparse()) == 0
    assert raw_address("tensor") == 0


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(3, 2).T, torch.zeros(3, dtype=torch.complex64)], ids=str)
def test_receiving_counts_as_a_write_for_autograd(x):
    def program(comm):
        if comm.rank:
            comm.send(x, 0)
            return None
        place, w = torch.zeros_like(x), torch.ones_like(x).requires_grad_()
        y = (w * place).abs().sum()
        comm.recv(place, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        return True

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[0]


@pytest.mark.parametrize("x", [torch.arange(3.0), torch.arange(6.0)[::2]], ids=["bytes", "by torch"])
def test_what_was_given_is_what_travels_and_a_later_write_is_named(x):
    def program(comm, undo):
        mine = x.clone() if x.is_contiguous() else torch.stack([x, x], 1)[:, 0]
        if comm.rank == 0:
            request = comm.isend(mine, 1)
            mine += 1
            if undo:
                mine -= 1
            request.wait()
            return None
        return comm.recv(torch.zeros(3), 0)

    assert fw.simulate(program, True, ranks=2, cluster=WIRE).values[1].tolist() == x.tolist()
    with pytest.raises(fw.MismatchError, match=r"changed before its wait\(\)"):
        fw.simulate(program, False, ranks=2, cluster=WIRE)


@pytest.mark.parametrize("side", ["send", "receive", "pending receive"])
def test_memory_that_was_given_back_is_an_error_in_words(side):
    def program(comm):
        x = torch.ones(1000)
        if comm.rank == 0:
            if side == "send":
                x.untyped_storage().resize_(0)
            comm.send(x, 1)
            return
        if side == "receive":
            x.untyped_storage().resize_(0)
        request = comm.irecv(x, 0)
        if side == "pending receive":
            x.untyped_storage().resize_(0)
        request.wait()

    with pytest.raises(fw.RankError, match="memory was given back") as error:
        fw.simulate(program, ranks=2, cluster=WIRE)
    assert error.value.rank == (0 if side == "send" else 1)


def test_a_buffer_that_has_moved_gets_its_message_where_it_is_now():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.arange(4.0), 1)
            return None
        x = torch.zeros(4)
        request = comm.irecv(x, 0)
        x.set_(torch.zeros(4))
        return request.wait()

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((8,), lambda b, big: b.resize_(2)),
        ((8,), lambda b, big: b.resize_(16)),
        ((8,), lambda b, big: b.set_(big[:2])),
        ((2, 3), lambda b, big: b.t_()),
    ],
    ids=["smaller", "larger", "part of another", "turned"],
)
def test_a_buffer_that_was_given_another_shape_is_named(shape, change):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(shape), 1)
            return
        b, big = torch.zeros(shape), torch.zeros(8)
        request = comm.irecv(b, 0)
        change(b, big)
        with pytest.raises(fw.MismatchError, match="another shape") as error:
            request.wait()
        assert error.value.rank == 1 and not big.any()
        request.wait()  # it is over

    fw.simulate(program, ranks=2, cluster=WIRE)


def test_a_square_that_was_turned_holds_what_was_sent():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.arange(4.0).view(2, 2), 1)
            return None
        b = torch.zeros(2, 2)
        request = comm.irecv(b, 0)
        b.t_()
        return request.wait()

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[1].tolist() == [[0, 1], [2, 3]]


def test_a_wait_that_failed_is_over():
    def program(comm):
        if comm.rank == 1:
            return comm.recv(torch.zeros(4), 0).tolist()
        x = torch.zeros(4)
        request = comm.isend(x, 1)
        x[0] = 1
        with pytest.raises(fw.MismatchError, match="changed before"):
            request.wait()
        request.wait()
        return request.done

    assert fw.simulate(program, ranks=2, cluster=WIRE).values == [True, [0, 0, 0, 0]]


def test_bytes_are_remembered_as_they_were_posted():
    """A buffer that moves while it waits: its old bytes still belong to it, and nothing of it stays behind afterwards."""

    def program(comm):
        big = torch.zeros(64)
        if comm.rank == 1:
            comm.send(torch.ones(8), 0)
            return
        a = big[20:28]
        request = comm.irecv(a, 1)
        a.set_(torch.zeros(8))
        with pytest.raises(fw.MismatchError, match="touch the same memory"):
            comm.irecv(big[24:32], 1, tag=1)
        assert request.wait().tolist() == [1] * 8 and not big.any() and not comm._spans

    fw.simulate(program, ranks=2, cluster=WIRE)


def test_a_watcher_sees_what_was_sent_even_if_the_sender_changes_its_tensor():
    seen = []

    def program(comm):
        if comm.rank == 0:
            x = torch.arange(6.0).view(2, 3)
            request = comm.isend(x, 1)
            x.resize_(60)
            with pytest.raises(fw.MismatchError, match="changed before"):
                request.wait()
        else:
            comm.recv(torch.zeros(2, 3), 0)

    fw.simulate(program, ranks=2, cluster=WIRE, on_message=lambda **message: seen.append(message["tensor"].tolist()))
    assert seen == [[[0, 1, 2], [3, 4, 5]]]


def test_columns_under_way_do_not_make_every_other_message_slow():
    def program(comm, columns):
        places = [torch.zeros(2, 2)[:, 0] for _ in range(columns)] + [torch.zeros(0)]
        requests = [comm.irecv(place, 1 - comm.rank) for place in places]
        requests += [comm.irecv(torch.zeros(2), 1 - comm.rank, tag=1) for _ in range(300)]
        requests += [comm.isend(torch.ones(place.shape), 1 - comm.rank) for place in places]
        requests += [comm.isend(torch.ones(2), 1 - comm.rank, tag=1) for _ in range(300)]
        for request in requests:
            request.wait()
        return all(bool((place == 1).all()) for place in places)

    asked = []
    share_memory = simulated.share_memory
    simulated.share_memory = lambda a, b: asked.append(1) or share_memory(a, b)
    try:
        assert all(fw.simulate(program, 100, ranks=2, cluster=WIRE).values)
    finally:
        simulated.share_memory = share_memory
    assert len(asked) < 100  # only where reaches meet, not once for every pair


PLACES = {  # (first element, length) of a receive under way, of a second message; whether they touch
    "the same": ((4, 4), (4, 4), True),
    "inside": ((4, 4), (5, 1), True),
    "around": ((4, 4), (2, 8), True),
    "begins before": ((4, 4), (2, 3), True),
    "ends behind": ((4, 4), (7, 3), True),
    "the first element": ((4, 4), (4, 1), True),
    "the last element": ((4, 4), (7, 1), True),
    "just before": ((4, 4), (0, 4), False),
    "just behind": ((4, 4), (8, 4), False),
}


@pytest.mark.parametrize("second", ["isend", "irecv", "send", "recv"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("others", [(), ((0, 2),), ((14, 2),), ((0, 2), (14, 2)), ((2, 2), (12, 2))], ids=str)
def test_bytes_of_a_receive_under_way_belong_to_it(second, where, others):
    (a, n), (b, m), touch = PLACES[where]
    others = [(k, length) for k, length in others if k + length <= b or b + m <= k]

    def program(comm):
        x = torch.zeros(16)
        if comm.rank:
            requests = [comm.isend(torch.ones(length), 0, tag=9) for _, length in others]
            requests += [comm.isend(torch.ones(n), 0)]
            requests += [comm.irecv(torch.zeros(m), 0, tag=1) if "send" in second else comm.isend(torch.ones(m), 0, tag=1)]
        else:
            requests = [comm.irecv(x[k : k + length], 1, tag=9) for k, length in others]
            requests += [comm.irecv(x[a : a + n], 1)]
            posted = getattr(comm, second)(x[b : b + m], 1, tag=1)
            requests += [posted] if second[0] == "i" else []
        for request in requests:
            request.wait()
        return x

    if touch:
        with pytest.raises(fw.MismatchError, match="touch the same memory"):
            fw.simulate(program, ranks=2, cluster=WIRE)
    else:
        x = fw.simulate(program, ranks=2, cluster=WIRE).values[0]
        written = {i for k, length in [*others, (a, n), *([(b, m)] if "recv" in second else [])] for i in range(k, k + length)}
        assert x.nonzero().flatten().tolist() == sorted(written)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(("give", "take"), [((0, 6), (0, 6)), ((0, 4), (2, 6)), ((2, 6), (0, 4)), ((0, 3), (3, 6))], ids=str)
@pytest.mark.parametrize("column", [False, True])
def test_an_exchange_sends_what_was_there_before_and_leaves_nothing_behind(give, take, checks, column):
    def program(comm):
        x = (torch.arange(6) + 10 * comm.rank).view(6, 1).repeat(1, 2)[:, 0] if column else torch.arange(6) + 10 * comm.rank
        kept = torch.zeros(2, dtype=x.dtype)
        under_way = comm.irecv(kept, 1 - comm.rank, tag=3)
        before = len(comm._spans), len(comm._scattered)
        got = comm.exchange(x[slice(*give)], 1 - comm.rank, x[slice(*take)], 1 - comm.rank)
        assert (len(comm._spans), len(comm._scattered)) == before and list(comm._receives_open) == [under_way]
        for wrong in (-1, 2, True, 1.0, "1"):  # refused before anything is posted
            with pytest.raises((TypeError, ValueError)):
                comm.exchange(x, wrong, torch.empty_like(x), 1 - comm.rank)
            with pytest.raises((TypeError, ValueError)):
                comm.exchange(x, 1 - comm.rank, torch.empty_like(x), wrong)
        with pytest.raises(ValueError, match="sparse"):
            comm.exchange(x.float().to_sparse(), 1 - comm.rank, torch.empty(6), 1 - comm.rank)
        assert list(comm._receives_open) == [under_way] and not comm._sends_open
        comm.send(x[:2], 1 - comm.rank, tag=3) if comm.rank else under_way.wait()
        under_way.wait() if comm.rank else comm.send(x[:2], 1 - comm.rank, tag=3)
        assert not comm._spans and not comm._scattered and not comm._receives_open and not comm._sends_open
        return got.tolist()

    values = fw.simulate(program, ranks=2, cluster=WIRE, checks=checks).values
    assert values == [[10 * (1 - rank) + i for i in range(*give)] for rank in (0, 1)]


@pytest.mark.parametrize("call", ["send", "exchange"])
def test_a_buffer_that_all_ranks_share_and_another_one_changes_is_named(call):
    """Arguments and globals are one object for all simulated ranks; on real ranks each has its own."""

    def program(comm, x):
        other = torch.empty_like(x)
        if call == "exchange":
            x *= comm.rank + 1
            comm.exchange(x, 1 - comm.rank, other, 1 - comm.rank)
        elif comm.rank == 0:
            comm.send(x, 1)
        else:
            x += 1
            comm.recv(other, 0)
        return other

    with pytest.raises(fw.MismatchError, match="was changed before its wait"):
        fw.simulate(program, torch.ones(3), ranks=2, cluster=WIRE)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=str)
def test_bytes_are_free_again_after_the_wait(order):
    """Three neighbours are received, waited for in any order; each place is used again at once while the others are under way."""

    def program(comm):
        x = torch.zeros(9)
        places = x.split(3)
        if comm.rank:
            for tag in (0, 1, 2):
                comm.isend(torch.full((3,), float(tag)), 0, tag=tag).wait()
            for tag in order:
                comm.send(torch.full((3,), 10.0 + tag), 0, tag=tag)
            return None
        under_way = {tag: comm.irecv(places[tag], 1, tag=tag) for tag in (0, 1, 2)}
        again = []
        for tag in order:
            assert comm._spans == sorted(end for p in places for end in (p.data_ptr(), p.data_ptr() + p.nbytes))
            under_way.pop(tag).wait()
            left = [places[other] for other in (*under_way, *(t for t in order if t not in under_way and t != tag))]
            assert comm._spans == sorted(end for p in left for end in (p.data_ptr(), p.data_ptr() + p.nbytes))
            again.append(comm.irecv(places[tag], 1, tag=tag))
            for place in places:
                with pytest.raises(fw.MismatchError, match="touch the same memory"):
                    comm.isend(place[1:2], 1, tag=7)
        for request in again:
            request.wait()
        assert not comm._spans and not comm._receives_open and not comm._sends_open
        return x

    x = fw.simulate(program, ranks=2, cluster=WIRE).values[0]
    assert x.tolist() == [10.0] * 3 + [11.0] * 3 + [12.0] * 3


@pytest.mark.parametrize("kind", ["torch.float32", "complex", "matrix", "parameter"])
@pytest.mark.parametrize("checks", [True, False])
def test_copies_of_messages_are_no_work_of_the_modelled_device(kind, checks):
    x = KINDS[kind]
    here = [x, torch.zeros(x.shape, dtype=x.dtype)]  # made outside: nothing but the message takes time

    def program(comm):
        if comm.rank == 0:
            comm.send(here[0], 1)
        else:
            comm.recv(here[1], 0)
        return comm.clock()

    cluster = uniform(1e-6, 1e9, device=Device("toy", {"float32": 1e9}, 10**9, 1e9))
    run = fw.simulate(program, ranks=2, cluster=cluster, clock="roofline", checks=checks)
    assert run.values == [US + x.numel() * x.element_size() * US // 1000] * 2


def test_messages_of_one_channel_arrive_in_order_whichever_is_waited_for_first():
    def program(comm):
        a, b = torch.zeros(1000), torch.zeros(1000)
        if comm.rank == 0:
            with comm.compute("late", seconds=1e-3):
                pass
            requests = [comm.isend(a, 1), comm.isend(b, 1)]
            for request in requests:
                request.wait()
            return None
        first, second = comm.irecv(a, 0), comm.irecv(b, 0)
        second.wait()
        there = comm.clock()
        first.wait()
        return there, comm.clock()

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[1] == (1000 * US + 10 * US, 1000 * US + 10 * US)


@pytest.mark.parametrize("n", [13, 16])
def test_a_ring_takes_the_same_time_whether_messages_are_watched_or_not(n):
    """Watched messages are delivered strictly by time; the others by the local rule, which must come to the same."""

    def program(comm):
        ring.all_reduce(comm, torch.ones(1000))
        return comm.clock()

    ahead = fw.simulate(program, ranks=n, cluster="a100-selene")
    strict = fw.simulate(program, ranks=n, cluster="a100-selene", on_message=lambda **message: None)
    assert ahead.values == strict.values
    assert sorted(map(repr, ahead.trace)) == sorted(map(repr, strict.trace))


def test_a_trace_is_made_when_asked_for_once_and_can_be_copied():
    def program(comm):
        comm.exchange(torch.ones(2), comm.rank, torch.zeros(2), comm.rank)  # to oneself
        comm.exchange(torch.ones(2), 1 - comm.rank, torch.zeros(2), 1 - comm.rank)

    trace = fw.simulate(program, ranks=2, cluster=WIRE).trace
    copy = pickle.loads(pickle.dumps(fw.simulate(program, ranks=2, cluster=WIRE).trace))
    assert copy == trace and len(trace) == len(trace.events) and trace.events is trace.events
    assert [(e.kind, e.peer) for e in trace if e.rank == 0 and e.kind != "wait"][:2] == [("send", 0), ("recv", 0)]
    assert trace.messages_sent() == 4
    rows = [Event(0, "mark", "mark", "a", 0, 0)]
    made = Trace(rows)
    rows.append(Event(1, "mark", "mark", "b", 0, 0))
    assert len(made) == 1
