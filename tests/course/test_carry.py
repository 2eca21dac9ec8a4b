"""A kept ring of lab 1 really carries labs 2 and 3, one that does not fit is left out with a word, and messages show the way."""

import json
import random

import pytest
import torch

import fourwalls as fw
from fourwalls.course import carry, lab_data, lab_zero
from fourwalls.course.lab import Lab
from fourwalls.course.problem import Session, apart_for
from fourwalls.ranks.trace import Event, Trace

HOWS = [
    {"step": step, "offset": offset, "odd": odd, "weighted": weighted}
    for step, offset, odd, weighted in ((1, 0, "first", False), (-1, 1, "last", True), (1, 2, "last", False))
]


def whole_numbers(numel, n, seed=0):
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(-99, 100, (numel,), generator=dice) for _ in range(n)]


def all_three(comm, how, xs):
    given = carry.hand_in({}, how)
    part = given["reduce_scatter"](comm, xs[comm.rank])
    return given["all_reduce"](comm, xs[comm.rank].view(1, -1)), part, given["all_gather"](comm, part, xs[0].numel())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("root", [None, 1])
@pytest.mark.parametrize(("n", "numel"), [(1, 3), (2, 5), (4, 9), (5, 3)])
def test_what_is_handed_in_sums_cuts_and_weighs_as_lab_1_does(how, root, n, numel):
    xs = whole_numbers(numel, n)
    total = sum(carry.weight(how, r) * x for r, x in enumerate(xs))
    parts = total.split(carry.cut_sizes(numel, n, how["odd"]))
    run = fw.simulate(all_three, how if root is None else how | {"root": root % n}, xs, ranks=n)
    for r, (reduced, part, gathered) in enumerate(run.values):
        assert torch.equal(reduced, total.view(1, -1)) and torch.equal(gathered, total)
        assert torch.equal(part, parts[(r + how["offset"]) % n])
    if root is None:
        assert run.trace.bytes_sent() == 4 * (n - 1) * numel * 8
        assert {(e.peer - e.rank) % n for e in run.trace if e.kind == "send"} <= {how["step"] % n}
    elif n > 1:
        assert carry.off_the_way(run.trace, root % n) == ""


def test_a_message_beside_the_root_is_told_and_so_is_none():
    def sent(rank, peer):
        return Event(rank, "send", "send", "send", 0, 1, 8, peer)

    assert carry.off_the_way(Trace([sent(0, 2), sent(2, 1)], ranks=3), 2) == ""
    assert carry.off_the_way(Trace([sent(0, 2), sent(0, 1)], ranks=3), 2) == "rank 0 sent 8 bytes to rank 1"
    assert carry.off_the_way(Trace([], ranks=3), 2) == "no message was sent at all"


# --- kept functions -----------------------------------------------------------------------------------------------------
LEFT = """
import torch


def halves(comm, x):
    n, r = comm.size, comm.rank
    flat = x.reshape(-1).clone()
    sizes = [flat.numel() // n + (k < flat.numel() % n) for k in range(n)]
    return flat, flat.split(sizes)


def reduce_scatter(comm, x):
    n, r = comm.size, comm.rank
    flat, chunks = halves(comm, x)
    for hop in range(1, n):
        take = chunks[(r + hop + 1) % n]
        take += comm.exchange(chunks[(r + hop) % n], (r - 1) % n, torch.empty_like(take), (r + 1) % n)
    return chunks[r].clone()


def all_gather(comm, part, numel):
    n, r = comm.size, comm.rank
    flat, chunks = halves(comm, torch.empty(numel, dtype=part.dtype))
    chunks[r].copy_(part)
    for hop in range(n - 1):
        comm.exchange(chunks[(r + hop) % n], (r - 1) % n, chunks[(r + hop + 1) % n], (r + 1) % n)
    return flat


def all_reduce(comm, x):
    return all_gather(comm, reduce_scatter(comm, x), x.numel()).reshape(x.shape)
"""  # a ring of lab 1 that goes to the left: the reference of the plain class goes to the right

BROKEN = {
    "def all_reduce(comm, x):\n    return x.clone()\n": "gives something else on 3 ranks",
    "def all_reduce(comm, x):\n    return comm.recv(x, (comm.rank + 1) % comm.size)\n": "does not run (DeadlockError",
    LEFT.replace(
        "def all_reduce(comm, x):", "def all_reduce(comm, x):\n    reduce_scatter(comm, x)"
    ): "costs more than lab 1 allows",
}


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = all_reduce(comm, torch.zeros_like(p) if p.grad is None else p.grad) / comm.size


def reduce_grads2(params, comm, reduce_scatter):
    mine = [None] * len(params)

    def arrived(p, k):
        mine[k] = reduce_scatter(comm, p.grad.reshape(-1)) / comm.size
        p.grad = None

    for k, p in enumerate(params):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, k=k: arrived(p, k))
    return mine


@pytest.fixture(scope="module")
def apart():
    """One process for all: it is the start that takes time."""
    with apart_for(lab_data.problems().values()) as made:
        yield made


def keep(project, name, text):
    (project / "my" / "kept").mkdir(exist_ok=True)
    (project / "my" / "kept" / f"{name}.py").write_text(text)


def first_check(apart, lab, function):
    """The finding of the first check of a task, and the steps of its messages round the ring."""
    problem = {"data": lab_data, "zero": lab_zero}[lab].problems()[function.__name__]
    apart.load(**{problem.asked: function})
    carry.bring(apart, lab)
    session = Session(apart, random.Random(5), problem.twist, (problem.asked,), problem.driver, problem.cluster)
    finding = problem.checks[0].run(session)
    steps = {
        (e.peer - e.rank) % o.trace.ranks for o in session.outcomes if o.trace.ranks > 2 for e in o.trace if e.kind == "send"
    }
    return finding, {step if step == 1 else -1 for step in steps}


def test_a_kept_all_reduce_carries_the_gradients_and_the_report_says_so(project, apart):
    keep(project, "all_reduce", LEFT)
    finding, steps = first_check(apart, "data", average_grads)
    assert finding.passed and finding.said == "carried by your all_reduce of lab 1"
    assert steps == {-1}, "its messages go to the left"


def test_without_one_the_reference_does_and_the_report_says_so(project, apart):
    finding, steps = first_check(apart, "data", average_grads)
    assert finding.passed and finding.said == "No all_reduce kept yet: using the reference"
    assert steps == {1}


@pytest.mark.parametrize("text", BROKEN, ids=["no sum", "deadlock", "dear"])
def test_one_that_does_not_fit_is_left_out_with_the_reason(project, apart, text):
    keep(project, "all_reduce", text)
    finding, steps = first_check(apart, "data", average_grads)
    assert finding.passed and steps == {1}
    assert finding.said.startswith(f"your all_reduce of lab 1 {BROKEN[text]}") and finding.said.endswith(": using the reference")


def test_one_that_does_not_load_is_left_out(project, apart):
    keep(project, "all_reduce", "def all_reduce(comm, x:\n")
    finding, steps = first_check(apart, "data", average_grads)
    assert finding.passed and steps == {1} and "does not load (SyntaxError" in finding.said


def test_both_halves_carry_lab_3_each_for_itself(project, apart):
    keep(project, "reduce_scatter", LEFT)
    finding, steps = first_check(apart, "zero", reduce_grads2)
    assert finding.passed and steps == {-1}
    assert finding.said == "carried by your reduce_scatter of lab 1; No all_gather kept yet: using the reference"


def test_in_a_notebook_the_check_brings_it(project, apart):
    keep(project, "all_reduce", LEFT)
    lab = Lab("data", None, lab_data.problems())
    lab._apart = apart.copy()
    try:
        report = lab.check(average_grads)
    finally:
        lab.close()
    assert report.passed and report.points == 5 and "carried by your all_reduce" in repr(report)
    assert json.loads((project / "my" / "progress.json").read_text())
