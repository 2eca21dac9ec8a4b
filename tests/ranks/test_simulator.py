"""The simulator: values are real, time is exact, order is deterministic, and nothing hangs."""

import _thread
import contextlib
import random
import threading
import time

import numpy as np
import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import Cluster, Device, Link, uniform
from fourwalls.ranks import simulated
from fourwalls.ranks.comm import call_site
from fourwalls.ranks.trace import PS

WIRE = uniform(1e-6, 1e9)  # one microsecond, one nanosecond a byte
US = PS // 10**6
NS = PS // 10**9


def spans(run, kind, rank=None):
    """(name or peer, start, end) of the events of one kind."""
    return [(e.peer, e.start, e.end) for e in run.trace if e.kind == kind and rank in (None, e.rank)]


def test_a_message_carries_values_and_costs_alpha_plus_bytes():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.arange(4, dtype=torch.int64), 1)
            return None
        return comm.recv(torch.empty(4, dtype=torch.int64), 0)

    run = fw.simulate(program, ranks=2, cluster=WIRE)
    assert run.values[1].tolist() == [0, 1, 2, 3]
    assert spans(run, "send") == [(1, 0, US + 32 * NS)]
    assert spans(run, "recv") == [(0, 0, US + 32 * NS)]
    assert run.trace.bytes_sent() == 32
    assert run.trace.messages_sent(1) == 0


def test_a_send_waits_for_its_receive():
    def program(comm):
        x = torch.zeros(1)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            with comm.compute("busy", seconds=5e-6):
                pass
            comm.recv(x, 0)
        return comm.clock()

    run = fw.simulate(program, ranks=2, cluster=WIRE)
    assert run.values == [5 * US + US + 4 * NS] * 2
    assert spans(run, "wait", 0) == [(1, 0, 6 * US + 4 * NS)]


def test_isend_does_not_wait():
    def program(comm):
        x = torch.zeros(1)
        if comm.rank == 0:
            request = comm.isend(x, 1)
            posted = comm.clock()
            request.wait()
            return posted
        with comm.compute("busy", seconds=5e-6):
            pass
        return comm.recv(x, 0)

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[0] == 0


def test_ports_carry_one_message_at_a_time():
    def program(comm):  # everybody to rank 0: its way in is the bottleneck
        if comm.rank:
            comm.send(torch.zeros(250), 0)
            return
        requests = [comm.irecv(torch.empty(250), r) for r in range(1, comm.size)]
        for r in requests:
            r.wait()

    run = fw.simulate(program, ranks=5, cluster=WIRE)
    assert run.trace.makespan_ps == 4 * (US + 1000 * NS)


def test_full_duplex():
    def program(comm):
        return comm.exchange(torch.ones(250), 1 - comm.rank, torch.empty(250), 1 - comm.rank)

    assert fw.simulate(program, ranks=2, cluster=WIRE).trace.makespan_ps == US + 1000 * NS


def test_ports_go_to_the_message_that_is_ready_first():
    # rank 0 posts a send to 1 first, whose receive comes late; its send to 2 can go at once and must not queue behind it
    def program(comm):
        x = torch.zeros(250)
        if comm.rank == 0:
            late, early = comm.isend(x, 1), comm.isend(x, 2)
            late.wait()
            early.wait()
        elif comm.rank == 1:
            with comm.compute("busy", seconds=1e-3):
                pass
            comm.recv(x, 0)
        else:
            comm.recv(x, 0)

    run = fw.simulate(program, ranks=3, cluster=WIRE)
    assert sorted(spans(run, "send", 0)) == [(1, 1000 * US, 1000 * US + US + 1000 * NS), (2, 0, US + 1000 * NS)]


@pytest.mark.parametrize("side", ["out", "in"])
def test_a_port_is_not_promised_to_a_message_while_an_earlier_one_may_still_come(side):
    # rank 0's message with rank 1 is ready at 100 us only, as rank 1 computes; rank 0 meanwhile hears from rank 2 and then
    # opens another message on the same port, which must go first
    def program(comm):
        x, first = torch.zeros(250), (comm.isend if side == "out" else comm.irecv)
        then, answer = (comm.send, comm.recv) if side == "out" else (comm.recv, comm.send)
        if comm.rank == 0:
            late = first(torch.zeros(250), 1)
            comm.recv(torch.zeros(0), 2) if side == "out" else comm.send(torch.zeros(0), 2)
            then(x, 3)
            late.wait()
        elif comm.rank == 1:
            with comm.compute("busy", seconds=100e-6):
                pass
            answer(x, 0)
        elif comm.rank == 2:
            with comm.compute("busy", seconds=9e-6):
                pass
            comm.send(torch.zeros(0), 0) if side == "out" else comm.recv(torch.zeros(0), 0)
        else:
            answer(x, 0)

    run = fw.simulate(program, ranks=4, cluster=WIRE)
    lane = [(peer, start) for peer, start, _ in spans(run, "send" if side == "out" else "recv", 0)]
    assert sorted(lane) == [(1, 100 * US), (3, 10 * US)]


def test_shared_nic_makes_ranks_of_a_node_queue():
    link = Link("wire", 1e-6, 1e9)

    def program(comm):
        x = torch.zeros(250)
        if comm.rank < 2:
            comm.send(x, comm.rank + 2)
        else:
            comm.recv(x, comm.rank - 2)

    one = US + 1000 * NS
    for shared, expected in ((False, one), (True, 2 * one)):
        cluster = Cluster("two nodes", None, link, link, ranks_per_node=2, shared_nic=shared)
        assert fw.simulate(program, ranks=4, cluster=cluster).trace.makespan_ps == expected


def test_slow_link_and_straggler():
    def program(comm):
        with comm.compute("work", seconds=1e-6):
            pass
        start = comm.clock()
        comm.exchange(torch.zeros(250), (comm.rank + 1) % comm.size, torch.empty(250), (comm.rank - 1) % comm.size)
        return start

    cluster = WIRE.with_faults(slow={(0, 1): 10}, straggler={2: 3})
    run = fw.simulate(program, ranks=3, cluster=cluster)
    assert run.values == [US, US, 3 * US]
    assert (1, US, US + 10 * (US + 1000 * NS)) in spans(run, "send", 0)


def test_roofline_of_a_stated_block_and_of_counted_operations():
    device = Device("toy", {"float32": 1e9}, 10**9, 1e9)
    cluster = uniform(0, 1e9, device=device)

    def program(comm):
        with comm.compute("stated", flops=2000, bytes=10):
            torch.ones(100, 100) @ torch.ones(100, 100)  # stated: not counted
        with comm.compute("counted"):
            torch.ones(4, 8, device="meta") @ torch.ones(8, 16, device="meta")
        torch.ones(50) + 1  # outside: free under clock="stated"
        return comm.clock()

    counted = max(2 * 4 * 8 * 16, (32 + 128 + 64) * 4)  # FLOPs at 1 FLOP/ns, bytes at 1 B/ns
    ones = (32 + 128) * 4  # writing the two operands
    assert fw.simulate(program, ranks=1, cluster=cluster).values[0] == (2000 + counted + ones) * NS
    everything = fw.simulate(program, ranks=1, cluster=cluster, clock="roofline").values[0]
    assert everything == (2000 + counted + ones + 50 * 4 + (50 + 50) * 4) * NS


def test_measured_clock_counts_this_machine_and_says_so():
    def program(comm):
        with comm.compute("sum"):
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
        return comm.clock()

    run = fw.simulate(program, ranks=2, cluster=WIRE, clock="measured")
    assert all(0.01 * PS < v < 1.0 * PS for v in run.values)
    assert "measured" in run.trace.sources


def _random_program(comm, plan):
    """plan: for each rank a list of steps ("c", us) | ("s", peer, n) | ("r", peer, n) | ("w", k): wait for the k-th request, or
    ("p", k): ask whether it is done. Returns the clock and the answers.
    """
    requests, answers = [], []
    for step in plan[comm.rank]:
        if step[0] == "c":
            with comm.compute("work", seconds=step[1] * 1e-6):
                pass
        elif step[0] == "s":
            requests.append(comm.isend(torch.full((step[2],), float(comm.rank)), step[1]))
        elif step[0] == "r":
            requests.append(comm.irecv(torch.empty(step[2]), step[1]))
        elif step[0] == "p":
            answers.append(requests[step[1]].done)
        else:
            requests[step[1]].wait()
    return comm.clock(), answers


def _random_plan(generator, ranks, messages, in_any_order=False):
    plan = [[] for _ in range(ranks)]
    order = {}
    for _ in range(messages):
        src, dst = generator.sample(range(ranks), 2)
        n = order.setdefault((src, dst), generator.choice((1, 25, 250)))  # one size a pair, so that any order of posts fits
        plan[src].append(("s", dst, n))
        plan[dst].append(("r", src, n))
    for steps in plan:
        generator.shuffle(steps)
        for _ in range(3):
            steps.insert(generator.randrange(len(steps) + 1), ("c", generator.randrange(4)))
        waits = [("w", k) for k in range(sum(step[0] != "c" for step in steps))]
        if in_any_order:
            generator.shuffle(waits)
        steps += waits
    return plan


@pytest.mark.parametrize("seed", range(40))
def test_running_ahead_changes_nothing(seed):
    """The exact local rule (deliver early where no earlier message can want the port) against strict order of time."""
    ranks = 5 if seed < 20 else 3  # fewer: more messages of a channel under way at once
    plan = _random_plan(random.Random(seed), ranks, 30, in_any_order=seed % 2 == 1)
    cluster = WIRE if seed % 3 else uniform(0, 1e12)  # nearly everything happens at the same time
    ahead = fw.simulate(_random_program, plan, ranks=ranks, cluster=cluster)
    seen = []
    strict = fw.simulate(_random_program, plan, ranks=ranks, cluster=cluster, on_message=lambda **m: seen.append(m["start"]))
    assert ahead.values == strict.values
    assert sorted(ahead.trace.events, key=repr) == sorted(strict.trace.events, key=repr)
    assert len(seen) == 30


def test_a_rank_that_waits_takes_no_port_that_one_behind_it_can_still_want():
    """Rank 1 asks for rank 0's message at 1000 us. Rank 0 stands at 4 us then, and its next message, to rank 2, goes first."""

    def program(comm):
        x, small = torch.zeros(1000), torch.zeros(1)
        if comm.rank == 0:
            first = comm.isend(x, 1)
            comm.recv(small, 3)
            second = comm.isend(x, 2)
            second.wait()
            first.wait()
        elif comm.rank == 1:
            comm.recv(small, 3)
            with comm.compute("long", seconds=1e-3):
                pass
            comm.recv(x, 0)
        elif comm.rank == 2:
            comm.recv(x, 0)
        else:
            comm.send(small, 1)
            comm.send(small, 0)
        return comm.clock()

    expected = [1001 * US + 4 * NS + 5 * US] * 2 + [2 * US + 8 * NS + 5 * US, 2 * US + 8 * NS]
    assert fw.simulate(program, ranks=4, cluster=WIRE).values == expected
    assert fw.simulate(program, ranks=4, cluster=WIRE, on_message=lambda **message: None).values == expected


def _plan_with_waits(generator, ranks, messages, polls=0.0):
    """Waits, and with a chance of `polls` questions, between the posts. No two things happen at one time."""
    plan = [[] for _ in range(ranks)]
    posted = [0] * ranks
    late = [[] for _ in range(ranks)]
    for _ in range(messages):
        src, dst = generator.sample(range(ranks), 2)
        for rank, kind, peer in ((src, "s", dst), (dst, "r", src)):
            plan[rank] += [("c", generator.random() * 3), (kind, peer, 25)]
            late[rank].append(posted[rank])
            posted[rank] += 1
        for rank in (src, dst):  # both have posted: what they wait for now can end
            while late[rank] and generator.random() < polls:
                plan[rank] += [("c", generator.random() * 3), ("p", generator.choice(late[rank]))]
            while late[rank] and generator.random() < 0.4:
                plan[rank].append(("w", late[rank].pop(generator.randrange(len(late[rank])))))
    for rank in range(ranks):
        plan[rank] += [("w", k) for k in late[rank]]
    return plan


@pytest.mark.parametrize("seed", range(10))
def test_running_ahead_changes_nothing_where_ranks_wait_in_between(seed):
    """As above, with waits between the posts: a rank that waits is often behind those that go on."""
    plan = _plan_with_waits(random.Random(seed), 4, 25)
    ahead = fw.simulate(_random_program, plan, ranks=4, cluster=WIRE)
    strict = fw.simulate(_random_program, plan, ranks=4, cluster=WIRE, on_message=lambda **message: None)
    assert ahead.values == strict.values
    assert sorted(ahead.trace.events, key=repr) == sorted(strict.trace.events, key=repr)


@pytest.mark.parametrize(("ranks", "messages", "seed"), [(n, m, s) for n, m in ((4, 25), (40, 120), (90, 300)) for s in range(8)])
def test_what_a_rank_is_told_does_not_depend_on_who_ran_first(ranks, messages, seed):
    """Questions too ("is it done?") are answered by the clock."""
    plan = _plan_with_waits(random.Random(seed), ranks, messages, polls=0.4)
    ahead = fw.simulate(_random_program, plan, ranks=ranks, cluster=WIRE)
    strict = fw.simulate(_random_program, plan, ranks=ranks, cluster=WIRE, on_message=lambda **message: None)
    assert {answer for _, answers in strict.values for answer in answers} == {True, False}
    assert ahead.values == strict.values
    assert sorted(ahead.trace.events, key=repr) == sorted(strict.trace.events, key=repr)


def test_a_question_is_answered_by_the_clock_even_to_a_rank_that_ran_first():
    """Rank 0 asks at 10 us for what rank 1, which has not run yet, sends at 0: it is there, and asking takes no time."""

    def program(comm):
        if comm.rank == 1:
            comm.send(torch.ones(250), 0)
            return None
        request = comm.irecv(torch.empty(250), 1)
        with comm.compute("work", seconds=10e-6):
            pass
        return request.done, comm.clock(), request.wait().sum().item()

    assert fw.simulate(program, ranks=2, cluster=WIRE).values[0] == (True, 10 * US, 250.0)


@pytest.mark.parametrize("seed", range(10))
def test_no_port_carries_two_messages_at_once(seed):
    plan = _random_plan(random.Random(100 + seed), 6, 40)
    run = fw.simulate(_random_program, plan, ranks=6, cluster=WIRE)
    for lane in ("send", "recv"):
        for rank in range(6):
            busy = sorted((start, end) for _, start, end in spans(run, lane, rank))
            assert all(a[1] <= b[0] for a, b in zip(busy, busy[1:], strict=False))


def test_twice_the_same():
    plan = _random_plan(random.Random(7), 8, 80)
    one, two = (fw.simulate(_random_program, plan, ranks=8, cluster="a100-selene") for _ in range(2))
    assert one.trace == two.trace
    assert len(one.trace) > 160


def test_each_rank_has_its_own_random_state_and_the_kernels_is_left_alone():
    def program(comm, talk):
        first = torch.rand(2)
        if talk:
            comm.barrier()
        return torch.cat([first, torch.nn.functional.dropout(torch.ones(64), 0.5)])

    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    quiet, talking = (fw.simulate(program, talk, ranks=4).values for talk in (False, True))
    assert torch.equal(torch.default_generator.get_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(quiet, talking, strict=True))
    assert len({tuple(v.tolist()) for v in quiet}) == 4
    other = fw.simulate(program, True, ranks=4, seed=1).values
    assert not any(torch.equal(a, b) for a in quiet for b in other)


def test_communication_inside_backward():
    def program(comm):
        class SumOfNeighbours(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                heard = comm.exchange(grad, (comm.rank + 1) % comm.size, torch.empty_like(grad), (comm.rank - 1) % comm.size)
                return grad + heard

        x = torch.ones(3, requires_grad=True)
        (SumOfNeighbours.apply(x) * float(comm.rank)).sum().backward()
        return x.grad[0].item()

    assert fw.simulate(program, ranks=5).values == [0 + 4, 1 + 0, 2 + 1, 3 + 2, 4 + 3]


def test_a_receive_leaves_its_buffer_alone_until_wait():
    """So that a forgotten wait shows itself, always, and not only on a busy machine."""

    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
            return None
        buf = torch.zeros(1)
        request = comm.irecv(buf, 0)
        with comm.compute("long", seconds=1):
            pass
        early = buf.item()
        request.wait()
        return early, buf.item()

    for checks in (True, False):
        assert fw.simulate(program, ranks=2, checks=checks).values[1] == (0.0, 1.0)


def test_a_buffer_changed_while_it_is_on_its_way_is_named():
    def program(comm):
        x = torch.zeros(4)
        if comm.rank == 0:
            request = comm.isend(x, 1)
            x[2] = 1
            request.wait()
        else:
            comm.recv(x, 0)

    with pytest.raises(fw.MismatchError, match=r"changed before its wait") as caught:
        fw.simulate(program, ranks=2)
    assert caught.value.rank == 0

    def neighbour(comm):  # writing beside it is fine
        x = torch.zeros(4)
        if comm.rank == 0:
            request = comm.isend(x[:2], 1)
            x[2] = 1
            request.wait()
            return None
        return comm.recv(x[:2], 0).tolist()

    assert fw.simulate(neighbour, ranks=2).values[1] == [0, 0]


@pytest.mark.parametrize(
    ("sent", "asked", "word"),
    [
        (torch.zeros(3), torch.zeros(5), "shapes differ"),
        (torch.zeros(5), torch.zeros(3), "shapes differ"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shapes differ"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtypes differ"),
    ],
)
def test_b23_mismatch_names_both_sides(sent, asked, word):
    def program(comm):
        if comm.rank == 0:
            comm.send(sent, 1)  # the sender's line
        else:
            comm.recv(asked, 0)  # the receiver's line

    with pytest.raises(fw.MismatchError, match=word) as caught:
        fw.simulate(program, ranks=2)
    assert "the sender's line" in str(caught.value)
    assert "the receiver's line" in str(caught.value)


@pytest.mark.parametrize("numel", [1, 2_000_000])
def test_b07_both_send_first(numel):
    def program(comm):
        x = torch.zeros(numel)
        comm.send(x, 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)

    with pytest.raises(fw.DeadlockError, match=r"0 -> 1 -> 0") as caught:
        fw.simulate(program, ranks=2)
    assert set(caught.value.waits) == {0, 1}
    assert "exchange" in str(caught.value)


def test_b08_interleaved_isend_and_irecv():
    def program(comm):
        a, b = torch.full((1,), float(comm.rank)), torch.empty(2)
        if comm.rank == 0:
            requests = [comm.irecv(b[:1], 1), comm.isend(a, 1), comm.irecv(b[1:], 1)]
        else:
            requests = [comm.irecv(b[:1], 0), comm.isend(a, 0), comm.isend(a + 1, 0)]
        for r in requests:
            r.wait()
        return b[: 2 - comm.rank].tolist()

    assert fw.simulate(program, ranks=2).values == [[1.0, 2.0], [0.0]]


def test_b11_tags_are_honoured():
    def program(comm):
        a, b = torch.zeros(1), torch.zeros(1)
        if comm.rank == 0:
            requests = [comm.isend(torch.ones(1), 1, tag=1), comm.isend(torch.full((1,), 2.0), 1, tag=2)]
            for r in requests:
                r.wait()
        else:
            comm.recv(b, 0, tag=2)
            comm.recv(a, 0, tag=1)
        return a.item(), b.item()

    assert fw.simulate(program, ranks=2).values[1] == (1.0, 2.0)


def test_tags_that_differ_are_said():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.zeros(1), 1, tag=1)
        else:
            comm.recv(torch.zeros(1), 0, tag=2)

    with pytest.raises(fw.DeadlockError, match=r"tag 1, but rank 1 asks for tag 2"):
        fw.simulate(program, ranks=2)


@pytest.mark.parametrize("start", [fw.simulate, fw.run])
def test_b10_a_batch_of_two_against_a_batch_of_one(start):
    def program(comm):
        x, y = torch.ones(1), torch.zeros(1)
        batch = [comm.isend(x, 1), comm.irecv(y, 1)] if comm.rank == 0 else [comm.irecv(y, 0)]
        for request in batch:
            request.wait()

    with pytest.raises(fw.DeadlockError, match="rank 1, which returned without making the matching call") as caught:
        start(program, ranks=2)
    assert caught.value.rank == 0 and list(caught.value.waits) == [0]


def test_b10_a_receive_that_nobody_sends_and_a_rank_that_left():
    def program(comm):
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1)

    with pytest.raises(fw.DeadlockError, match="rank 1, which returned"):
        fw.simulate(program, ranks=2)


def test_one_rank_fails_and_the_others_are_released():
    ended = []

    def program(comm):
        try:
            comm.barrier()
            if comm.rank == 2:
                helper()
            comm.barrier()
        finally:
            ended.append(comm.rank)

    def helper():
        raise ValueError("the learner's words")

    alive = threading.active_count()
    with pytest.raises(fw.RankError, match="rank 2 of 4 raised ValueError: the learner's words") as caught:
        fw.simulate(program, ranks=4)
    assert "in helper" in str(caught.value)
    assert caught.value.rank == 2
    assert sorted(ended) == [0, 1, 2, 3]
    assert threading.active_count() == alive


def test_an_endless_loop_can_be_interrupted():
    def program(comm):
        while True:
            pass

    alive = threading.active_count()
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match=r"rank 0: at .* in program: ") as caught:
        fw.simulate(program, ranks=3)
    assert "rank 1: at an unknown line" in str(caught.value)  # it had not begun
    assert time.monotonic() - began < 5
    time.sleep(0.1)
    assert threading.active_count() <= alive


def test_asking_again_and_again_lets_time_pass():
    def program(comm):
        if comm.rank == 0:
            request = comm.irecv(torch.zeros(1), 1)
            asked = 0
            while not request.done:
                asked += 1
            request.wait()
            return asked
        with comm.compute("busy", seconds=1e-4):
            pass
        comm.send(torch.zeros(1), 0)
        return None

    assert 100 <= fw.simulate(program, ranks=2, cluster=WIRE).values[0] <= 103


def test_a_message_that_nobody_waits_for_is_named_as_on_real_ranks():
    def program(comm):
        got = torch.zeros(2)
        comm.isend(torch.ones(2), 1 - comm.rank)
        comm.irecv(got, 1 - comm.rank)  # no wait
        return got.tolist()

    with pytest.warns(
        RuntimeWarning, match=r"4 messages were begun but never waited for:\n  rank 0: isend\(to 1, float32 \(2,\)\)"
    ):
        assert fw.simulate(program, ranks=2).values == [[0, 0], [0, 0]]

    def half(comm):
        if comm.rank == 0:
            comm.irecv(torch.zeros(2), 1)

    with pytest.raises(fw.CommError, match="begun and never answered"):
        fw.simulate(half, ranks=2)


def test_split_makes_groups_by_colour_and_key():
    def program(comm):
        group = comm.split(comm.rank % 2, key=-comm.rank)
        got = group.exchange(
            torch.tensor(comm.rank), (group.rank + 1) % group.size, torch.tensor(0), (group.rank - 1) % group.size
        )
        none = comm.split(None if comm.rank else 7)
        return group.rank, group.size, got.item(), none is None or none.size

    values = fw.simulate(program, ranks=5).values
    assert values == [(2, 3, 2, 1), (1, 2, 3, True), (1, 3, 4, True), (0, 2, 1, True), (0, 3, 0, True)]


def test_a_group_and_its_parent_do_not_hear_each_other():
    def program(comm):
        group = comm.split(0)
        x = torch.empty(1)
        if comm.rank == 0:
            a, b = comm.isend(torch.ones(1), 1), group.isend(torch.full((1,), 2.0), 1)
            a.wait()
            b.wait()
            return None
        group.recv(x, 0)
        return x.item(), comm.recv(x, 0).item()

    assert fw.simulate(program, ranks=2).values[1] == (2.0, 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_barrier_holds_everybody_until_the_last(ranks):
    def program(comm):
        with comm.compute("work", seconds=comm.rank * 1e-3):
            pass
        comm.barrier()
        return comm.clock()

    run = fw.simulate(program, ranks=ranks, cluster=WIRE)
    assert min(run.values) >= (ranks - 1) * 1000 * US
    assert run.trace.messages_sent(0) == (ranks - 1).bit_length()


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0),
        torch.zeros(0),
        torch.arange(8).view(4, 2)[:, 0],
        torch.tensor([True]),
        torch.tensor([1 + 2j]),
        torch.ones(2).bfloat16(),
    ],
)
def test_any_tensor_travels(x):
    def program(comm):
        wide = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]  # not contiguous
        return comm.exchange(x, 1 - comm.rank, wide, 1 - comm.rank)

    assert all(torch.equal(v, x) for v in fw.simulate(program, ranks=2).values)


def test_a_message_to_oneself():
    def program(comm):
        return comm.exchange(torch.ones(2), comm.rank, torch.zeros(2), comm.rank).tolist()

    assert fw.simulate(program, ranks=2).values == [[1, 1]] * 2


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, 4097])
def test_world_sizes_that_do_not_exist(ranks):
    with pytest.raises(ValueError, match="ranks"):
        fw.simulate(lambda comm: None, ranks=ranks)


def test_bad_arguments_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match="must be a function"):
        fw.simulate(3)
    with pytest.raises(ValueError, match="does not fit"):
        fw.simulate(lambda comm: None, 1)
    with pytest.raises(ValueError, match="3 items for 2 ranks"):
        fw.simulate(lambda comm, x: None, fw.per_rank([1, 2, 3]), ranks=2)
    with pytest.raises(ValueError, match="seed"):
        fw.simulate(lambda comm: None, seed="x")
    with pytest.raises(ValueError, match="did you mean a100-selene"):
        fw.simulate(lambda comm: None, cluster="a100-seleen")


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda c: c.isend(torch.zeros(1), 9), "rank 9 of 2"),
        (lambda c: c.irecv(torch.zeros(1), -1), "rank -1 of 2"),
        (lambda c: c.isend(torch.zeros(1), 1, tag=-1), "tag -1"),
        (lambda c: c.isend(torch.zeros(1), 1, tag=True), "tag True"),
        (lambda c: c.isend(torch.zeros(1), 1, tag="barrier"), "tag 'barrier'"),
        (lambda c: [c.isend(torch.zeros(1), 1, tag=1), c.isend(torch.zeros(1), 1, tag=1.0)], "tag 1.0"),
        (lambda c: [c.isend(torch.zeros(1), 1), c.isend(torch.zeros(1), True)], "rank True of 2"),
        (lambda c: c.isend(torch.zeros(1), 1, tag=np.int64(3)), r"use int\(np.int64\(3\)\)"),
        (lambda c: c.compute("f", flops="3").__enter__(), "flops='3'"),
        (lambda c: c.isend([1.0], 1), "takes a tensor"),
        (lambda c: c.exchange([1.0], 1, torch.zeros(1), 1), "takes a tensor"),
        (lambda c: c.isend(torch.eye(2).to_sparse(), 1), "to_dense"),
        (lambda c: c.irecv(torch.zeros(1).expand(3), 1), "share memory"),
        (lambda c: c.native, "simulated"),
        (lambda c: c.split(-1), "color -1"),
    ],
)
def test_bad_calls_are_named(call, word):
    with pytest.raises(fw.RankError, match=word):
        fw.simulate(call, ranks=2)


def test_a_meta_tensor_is_no_answer_to_a_real_receive():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.zeros(2, device="meta"), 1)
        else:
            comm.recv(torch.zeros(2), 0)

    with pytest.raises(fw.MismatchError, match="meta tensor, which has no numbers"):
        fw.simulate(program, ranks=2)


def test_all_of_a_runs_chance_comes_from_its_seed_and_none_is_taken_from_the_caller():
    program = lambda comm: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, again, other = (fw.simulate(program, ranks=3, seed=seed).values for seed in (1, 1, 2))
    assert first == again and len(set(first)) == 3
    assert all(a != b for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_meta_tensors_travel_and_cost_time():
    def program(comm):
        comm.exchange(torch.empty(10**12, device="meta"), 1 - comm.rank, torch.empty(10**12, device="meta"), 1 - comm.rank)
        return comm.clock()

    assert fw.simulate(program, ranks=2, cluster=WIRE).values == [US + 4 * 10**12 * NS] * 2


def test_hundreds_of_ranks_fit_into_small_memory():
    import psutil

    def program(comm):
        comm.barrier()
        return psutil.Process().memory_info().rss if comm.rank == 0 else torch.ones(2, 2) @ torch.ones(2, 2)

    before = psutil.Process().memory_info().rss
    run = fw.simulate(program, ranks=512)
    assert run.values[0] - before < 300e6


def test_what_ranks_print_is_told_apart_and_shown_in_order(capsys):
    import sys

    def program(comm):
        print("first", comm.rank)
        comm.barrier()
        print("second", end="")
        print("to stderr", file=sys.stderr) if comm.rank else None

    run = fw.simulate(program, ranks=2)
    assert run.outputs == ["first 0\nsecond\n", "first 1\nsecondto stderr\n"]
    assert run.output == "[rank 0] first 0\n[rank 0] second\n[rank 1] first 1\n[rank 1] secondto stderr\n"
    assert capsys.readouterr().out == run.output
    fw.simulate(program, ranks=2, stream=False)
    assert capsys.readouterr().out == ""

    def failing(comm):
        print("before")
        raise ValueError("stop")

    with pytest.raises(fw.RankError):
        fw.simulate(failing, ranks=1)
    assert capsys.readouterr().out == "[rank 0] before\n"


@pytest.mark.parametrize("ranks", [17, 100])
def test_endless_recursion_through_c_is_an_error_not_a_crash(ranks):
    def deeper(n=0):
        return sorted([1, 2], key=deeper)

    with pytest.raises(fw.RankError, match="RecursionError"):
        fw.simulate(lambda comm: deeper(), ranks=ranks)


def test_a_thread_of_the_learners_own_is_refused():
    def program(comm):
        errors = []

        def other():
            try:
                comm.send(torch.ones(1), 1 - comm.rank)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return errors

    for errors in fw.simulate(program, ranks=2).values:
        assert len(errors) == 1
        assert "another thread" in errors[0]


def test_a_program_that_catches_everything_is_parked():
    def program(comm):
        while True:
            try:
                comm.recv(torch.zeros(1), 1 - comm.rank)
            except BaseException:
                pass

    began = time.monotonic()
    with pytest.raises(fw.DeadlockError):
        fw.simulate(program, ranks=2)
    assert time.monotonic() - began < 4
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.15  # nobody spins


def test_a_released_rank_that_talks_to_itself_for_ever_is_let_go():
    def program(comm):
        if comm.rank == 0:
            raise ValueError("boom")
        try:
            comm.recv(torch.zeros(1), 0)
        finally:
            while True:
                place, request = torch.zeros(1), comm.isend(torch.ones(1), comm.rank, 5)
                comm.recv(place, comm.rank, 5)
                request.wait()

    before, begun = threading.active_count(), time.perf_counter()
    with pytest.raises(fw.RankError, match="boom"):
        fw.simulate(program, ranks=2, cluster=WIRE)
    assert time.perf_counter() - begun < 2 and threading.active_count() <= before


def test_exchange_in_place_and_inference_buffers():
    def program(comm):
        x = torch.full((2,), float(comm.rank))
        comm.exchange(x, 1 - comm.rank, x, 1 - comm.rank)
        with torch.inference_mode():
            buf = torch.empty(2)
        comm.exchange(x, 1 - comm.rank, buf, 1 - comm.rank)
        return x.tolist(), buf.tolist()

    assert fw.simulate(program, ranks=2).values == [([1, 1], [0, 0]), ([0, 0], [1, 1])]


def test_an_error_that_cannot_be_shown():
    class Odd(Exception):
        def __str__(self):
            raise SystemExit(3)

    def program(comm):
        raise Odd

    with pytest.raises(fw.RankError, match="Odd: .its message cannot be shown"):
        fw.simulate(program, ranks=2)

    def long(comm):
        raise ValueError("x" * 10**6)

    with pytest.raises(fw.RankError) as caught:
        fw.simulate(long, ranks=1)
    assert len(str(caught.value)) < 70_000


RINGS = [ring.all_reduce, ring.all_reduce_blocking]


@pytest.mark.parametrize("function", RINGS)
def test_a_ring_looks_for_the_learners_line_once(function, monkeypatch):
    asked = []
    monkeypatch.setattr(simulated, "call_site", lambda depth: asked.append(depth) or call_site(depth + 1))
    fw.simulate(lambda comm: function(comm, torch.ones(64)).sum().item(), ranks=8)
    assert len(asked) == 2 * 8  # for its statement (agree) and for its 28 messages
    asked.clear()
    fw.simulate(lambda comm: function(comm, torch.ones(64)).sum().item(), ranks=8, checks=False)
    assert not asked


@pytest.mark.parametrize("function", RINGS)
def test_a_ring_that_has_failed_does_not_lend_its_line_to_what_comes_after(function):
    def program(comm):
        comm.agree = lambda call: None  # it would refuse the call before any message
        with contextlib.suppress(fw.MismatchError):
            function(comm, torch.ones(4, dtype=torch.float64 if comm.rank else torch.float32))  # in the ring
        comm.recv(torch.zeros(1), 1 - comm.rank)  # after the ring

    with pytest.raises(fw.DeadlockError) as caught:
        fw.simulate(program, ranks=2)
    assert str(caught.value).count("# in the ring") == str(caught.value).count("# after the ring") == 1


def two_receives(comm, kind):
    """Rank 0 has two messages under way that touch the same bytes, one of them arriving; `kind` says how."""
    x = torch.zeros(6)
    if comm.rank == 1:
        return [request.wait() for request in [comm.isend(torch.ones(4), 0), comm.isend(torch.full((4,), 2.0), 0)]]
    first = comm.irecv(x[:4], 1)
    second = {"same": x[:4], "overlap": x[2:], "strided": x.as_strided((4,), (1,), 1)}.get(kind)
    if kind == "send":
        comm.isend(x[3:], 1, 7)
    comm.irecv(second, 1).wait()
    return first.wait()


@pytest.mark.parametrize("kind", ["same", "overlap", "strided", "send"])
def test_two_messages_into_the_same_bytes_are_refused(kind):
    with pytest.raises(fw.MismatchError, match="two messages touch the same memory at the same time") as caught:
        fw.simulate(two_receives, kind, ranks=2, cluster=WIRE)
    assert str(caught.value).count("rank 0: irecv(from 1, float32 (4,))") == (1 if kind == "send" else 2)


def test_real_ranks_refuse_them_with_the_same_words():
    with pytest.raises(fw.MismatchError, match="two messages touch the same memory at the same time"):
        fw.run(two_receives, "overlap", ranks=2, stream=False)


def test_neighbouring_columns_and_a_buffer_that_is_free_again_are_not_the_same_bytes():
    def program(comm):
        x = torch.zeros(4, 2)
        if comm.rank == 1:
            for k in range(4):
                comm.send(torch.full((4,), float(k)), 0)
            return None
        left, right = comm.irecv(x[:, 0], 1), comm.irecv(x[:, 1], 1)
        left.wait()
        right.wait()
        found = x.clone()
        comm.recv(x[:, 0], 1)
        comm.irecv(x[:, 0], 1).wait()
        return found.tolist(), x.tolist()

    found, again = fw.simulate(program, ranks=2, cluster=WIRE).values[0]
    assert found == [[0.0, 1.0]] * 4 and again == [[3.0, 1.0]] * 4
    assert fw.simulate(_meta_twice, ranks=2).values == [True] * 2


def _meta_twice(comm):
    """Meta tensors have no bytes, so no two of them share any."""
    buffers = [torch.empty(3, device="meta") for _ in range(2)]
    requests = [comm.irecv(buffer, 1 - comm.rank) for buffer in buffers]
    requests += [comm.isend(torch.empty(3, device="meta"), 1 - comm.rank) for _ in range(2)]
    for request in requests:
        request.wait()
    return True


@pytest.mark.parametrize("cost", [{"seconds": -1}, {"flops": -1.0}, {"bytes": -8}, {"seconds": float("nan")}])
def test_no_work_takes_less_than_nothing(cost):
    def program(comm):
        with comm.compute("forward", **cost):
            pass

    name = next(iter(cost))
    with pytest.raises(fw.RankError, match=f"ValueError: rank 0: compute.'forward', {name}=.*a cost is at least 0"):
        fw.simulate(program, ranks=1, cluster=WIRE)


def test_real_ranks_have_the_default_dtype_of_the_caller_and_no_negative_work():
    def program(comm):
        dtype = torch.ones(1).dtype
        try:
            with comm.compute("forward", seconds=-1):
                return dtype, "went on"
        except ValueError as error:
            return dtype, str(error)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        real, modelled = fw.run(program, ranks=2, stream=False).values, fw.simulate(program, ranks=2).values
    finally:
        torch.set_default_dtype(before)
    assert real == modelled and [dtype for dtype, _ in real] == [torch.float64] * 2
    assert all("seconds=-1): a cost is at least 0" in text for _, text in real)
