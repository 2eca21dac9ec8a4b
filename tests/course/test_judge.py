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
from fourwalls.course import arrivals, stand_in
from fourwalls.course.judge import Apart, environment
from fourwalls.course.stand_in import Failed

FORBIDDEN = ("fourwalls.collectives", "fourwalls.parallel")


@pytest.fixture(scope="module")
def apart():
    with Apart(FORBIDDEN, ["fourwalls.course.drivers.call"]) as made:
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


def passes_on(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, torch.empty_like(x), (comm.rank - 1) % comm.size)


def test_a_run_can_be_one_in_which_messages_are_others(apart):
    for x in (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.tensor([True, False])):
        assert torch.equal(run(apart, passes_on, x, ranks=2).values[0], x)
        altered = run(apart, passes_on, x, ranks=2, alter=arrivals.altered).values[0]
        assert altered.dtype == x.dtype and not bool((altered == x).any())


def floods_the_judge(comm):
    for k in range(100):
        comm.isend(torch.zeros(2**16), (comm.rank + 1) % comm.size, k)


def test_what_the_judge_keeps_of_a_run_is_bounded(apart, monkeypatch):
    monkeypatch.setattr(stand_in, "MOST_HEARD", 2**20)
    assert "sent more than 1 MiB in one run" in str(run(apart, floods_the_judge, ranks=2).failure)


def looks_elsewhere(comm, file, link):
    import subprocess

    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_Guard"]
    os.chdir(os.path.dirname(file))
    os.symlink(file, link)

    def imports():
        from fourwalls.collectives import ring

        return ring

    ways = (
        imports,
        lambda: Path(file).read_text(),
        lambda: Path(os.path.basename(file)).read_text(),
        lambda: os.open(link, os.O_RDONLY),
        lambda: subprocess.run(["true"]),
        lambda: setattr(type(comm).send, "__code__", imports.__code__),
    )
    said = []
    for way in ways:
        try:
            said.append(str(way()))
        except PermissionError as error:
            said.append(str(error))
    return said


def test_answers_are_not_read_from_their_files_and_no_other_program_is_started(apart, tmp_path):
    file = Path(fw.__file__).with_name("collectives") / "ring.py"
    (said,) = run(apart, looks_elsewhere, str(file), str(tmp_path / "link"), ranks=1).values
    assert said == ["this file cannot be read here: it holds what a task asks you to write"] * 4 + [
        "no other program is started here",
        "the library's functions are not yours to change",
    ]


def test_what_shuts_a_submission_in_has_no_secrets_of_the_teachers(monkeypatch):
    monkeypatch.setenv("TEACHERS_TOKEN", "s3cret")
    assert "TEACHERS_TOKEN" not in environment(wrapped=True) and "PATH" in environment(wrapped=True)
    assert "TEACHERS_TOKEN" in environment(wrapped=False), "a learner's own process, on their own machine"


def test_a_driver_is_the_one_that_was_there_before_the_learners_code(apart):
    with apart.copy() as made:
        cheat = "import fourwalls.course.drivers as d\nd.call = lambda *_: 7\ndef f(comm):\n    return 1"
        assert made.load_cells([("cell", cheat)]) == [None]
        assert made.run("fourwalls.course.drivers.call", ["f"], ranks=1).values == [1]


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
        first = "import torch\ndisplay(3)\nget_ipython().run_line_magic('time', '1')\nk = 2"
        sources = (first, "1 / 0", "raise SystemExit", "def f(comm, x):\n    return k * x")
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
