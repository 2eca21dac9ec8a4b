"""The judge: a learner's code in a process of its own gives values and costs, and cannot reach what it is compared with."""

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import fourwalls as fw
from fourwalls.course.judge import Apart
from fourwalls.course.stand_in import Failed

FORBIDDEN = ("fourwalls.collectives", "fourwalls.parallel")


@pytest.fixture(scope="module")
def apart():
    with Apart(FORBIDDEN) as made:
        yield made


def run(apart, function, *args, ranks=3, limit=10.0, **options):
    apart.load(f=function)
    return apart.run("fourwalls.course.drivers.call", ["f"], args, ranks=ranks, limit=limit, **options)


def every_verb(comm, x):
    n, r = comm.size, comm.rank
    right, left = (r + 1) % n, (r - 1) % n
    a = comm.exchange(x + r, right, torch.empty_like(x), left).clone()
    got = comm.irecv(torch.empty(2), left, 3)
    gone = comm.isend(torch.tensor([1.0, r]), right, 3)
    b = got.wait()
    gone.wait()
    comm.barrier()
    group = comm.split(r % 2, -r)
    with comm.compute("work", seconds=1e-3 * (r + 1)):
        pass
    if r == 0:
        comm.send(x, 1)
    elif r == 1:
        x = comm.recv(torch.empty_like(x), 0)
    comm.mark_live(64)
    return [a, b, group.rank, group.size, comm.clock(), torch.rand(1), comm.agree((("collective", "own"),))]


def test_a_program_gives_what_it_gives_in_the_simulator_to_the_picosecond(apart):
    outcome = run(apart, every_verb, torch.arange(4.0), ranks=5, seed=3)
    wanted = fw.simulate(every_verb, torch.arange(4.0), ranks=5, seed=3)
    assert outcome.failure is None
    for ours, theirs in zip(outcome.values, wanted.values, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert ours[2:5] == theirs[2:5]
    assert [e[:7] for e in outcome.trace] == [e[:7] for e in wanted.trace]


def sends_first(comm):
    comm.send(torch.ones(1), (comm.rank + 1) % comm.size)


def never_ends(comm):
    while comm.rank == 1:
        pass


def swallows(comm):
    while True:
        try:
            comm.recv(torch.empty(1), (comm.rank + 1) % comm.size)
        except BaseException:
            pass


def leaves(comm):
    sys.exit(0)


def dies(comm):
    os._exit(0)


def killed(comm):
    os.kill(os.getpid(), 9)


def wrong_shape(comm):
    if comm.rank == 0:
        comm.send(torch.ones(2), 1)
    elif comm.rank == 1:
        comm.recv(torch.empty(3), 0)


def divides(comm):
    return 1 / 0


def no_such_rank(comm):
    comm.send(torch.ones(1), comm.size)


def changes_early(comm):
    x = torch.zeros(3)
    gone = comm.isend(x, (comm.rank + 1) % comm.size)
    x += 1
    comm.recv(torch.empty(3), (comm.rank - 1) % comm.size)
    gone.wait()


def an_object(comm):
    class Right:
        def __eq__(self, other):
            return True

    return Right()


def imports_the_answer(comm):
    from fourwalls.collectives import ring

    return ring.all_reduce(comm, torch.ones(1))


def asks_torch(comm):
    torch.distributed.init_process_group("gloo")


def talks_rubbish(comm):
    comm._line.stream.sendall(b"\xff" * 64)
    time.sleep(30)


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        (sends_first, "DeadlockError", "0 -> 1 -> 2 -> 0"),
        (swallows, "DeadlockError", "0 -> 1 -> 2 -> 0"),
        (never_ends, "hang", "in never_ends: "),
        (leaves, "SystemExit", "in leaves"),
        (dies, "dead", "rank 0 ended"),
        (killed, "dead", "rank 0 ended"),
        (wrong_shape, "MismatchError", r"\(2,\) and \(3,\)"),
        (divides, "ZeroDivisionError", "return 1 / 0"),
        (no_such_rank, "ValueError", "rank 3 of 3"),
        (changes_early, "MismatchError", "changed before"),
        (an_object, "NotPlain", "a Right"),
        (imports_the_answer, "Forbidden", "fourwalls.collectives cannot be imported"),
        (asks_torch, "RuntimeError", "build it from messages"),
        (talks_rubbish, "NotPlain", "frame"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_each_way_to_fail_is_one_verdict_and_the_next_run_is_sound(apart, program, kind, says):
    outcome = run(apart, program, limit=1.0 if program is never_ends else 10.0)
    assert outcome.failure is not None and outcome.failure.kind == kind
    assert re.search(says, str(outcome.failure)), str(outcome.failure)
    after = run(apart, every_verb, torch.arange(4.0), ranks=3)
    assert after.failure is None


def test_a_hang_costs_its_limit_and_no_more(apart):
    began = time.monotonic()
    outcome = run(apart, never_ends, limit=0.5)
    assert outcome.failure.kind == "hang" and time.monotonic() - began < 5


def looks_around(comm):
    import gc

    words = ("secret_oracle_value",)
    found = [w for o in gc.get_objects() for w in words if isinstance(o, (dict, list, str)) and w in str(o)[:10000]]
    frames, frame = [], sys._getframe()
    while frame:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    modules = [name for name in sys.modules if name.startswith(("fourwalls.course.lab_", "fourwalls.course.problem"))]
    return [len(found) > 2, [Path(f).name for f in frames], modules]


def test_nothing_of_the_judge_is_in_the_learners_process(apart):
    secret_oracle_value = torch.full((3,), 12345.0)
    outcome = run(apart, looks_around, ranks=1)
    found, frames, modules = outcome.values[0]
    assert not found and modules == [] and not {"judge.py", "stand_in.py", "problem.py"} & set(frames)
    assert secret_oracle_value[0] == 12345


def patches(comm):
    torch.equal = torch.allclose = lambda *_, **__: True
    from fourwalls.ranks.trace import Trace

    Trace.bytes_sent = lambda *_: 0
    comm.send(torch.ones(10), 1) if comm.rank == 0 else comm.recv(torch.empty(10), 0)


def test_counts_are_the_judges_own(apart):
    outcome = run(apart, patches, ranks=2)
    assert outcome.trace.bytes_sent() == 40 and not torch.equal(torch.ones(1), torch.zeros(1))


def shares(comm):
    STORE.append(comm.rank)
    comm.barrier()
    return len(STORE)


STORE: list = []


def test_ranks_share_no_memory(apart):
    assert run(apart, shares, ranks=3).values == [1, 1, 1]


def test_prints_without_end_are_cut_and_cost_nothing(apart):
    def floods(comm):
        for _ in range(500):
            print("x" * 10_000)
        return 1

    assert run(apart, floods, ranks=1).values == [1]
    assert len(apart.output) <= 64 * 1024


def test_a_learner_who_ends_the_whole_process_gets_a_verdict():
    def ends_it(comm):
        os.kill(os.getppid(), 9)
        time.sleep(1)

    with Apart() as made:
        outcome = run(made, ends_it, ranks=2)
        assert outcome.failure is not None and outcome.failure.kind == "dead"
        assert not made.alive


def test_cells_of_a_notebook_run_in_order_and_nothing_is_left_at_the_end():
    with Apart(FORBIDDEN) as made:
        sources = ("import torch\nk = 2", "1 / 0", "raise SystemExit", "def f(comm, x):\n    return k * x")
        said = made.load_cells([(f"cell-{i}", source) for i, source in enumerate(sources)])
        assert said == [None, "ZeroDivisionError: division by zero", "SystemExit", None]
        outcome = made.run("fourwalls.course.drivers.call", ["f"], [torch.ones(2)], ranks=1)
        assert outcome.failure is None and torch.equal(outcome.values[0], torch.full((2,), 2.0))
        assert made.run("fourwalls.course.drivers.call", ["absent"], [], ranks=1).failure.kind == "NameError"
        run(made, never_ends, limit=0.5)
        mine = [psutil.Process(made.pid), *psutil.Process(made.pid).children(recursive=True)]
        with pytest.raises(Failed, match="more than 0.5 s"):
            made.load_cells([("cell-1", "while True: pass")], limit=0.5)
    gone, alive = psutil.wait_procs(mine, timeout=5)
    assert len(gone) >= 1 and alive == []
