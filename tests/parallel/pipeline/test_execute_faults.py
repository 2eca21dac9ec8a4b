"""Random legal schedules run right; corrupted ones are refused; planted faults are seen; paced time is the simulated one."""

import random

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.pipeline import running as running_module
from fourwalls.parallel.pipeline import schedules, zero_bubble
from fourwalls.parallel.pipeline.actions import Action, stages_of
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.legality import IllegalSchedule
from fourwalls.parallel.pipeline.microbatches import split_batch
from fourwalls.parallel.pipeline.outcome import sum_tied
from fourwalls.parallel.pipeline.routes import Routes
from fourwalls.parallel.pipeline.running import RunningStage
from fourwalls.parallel.pipeline.simulate import Times, simulate
from fourwalls.parallel.pipeline.split_backward import Later

from .small_stages import BOUND, NETWORK, batch, far, layer, oracle, run_once, squares


def random_schedule(rng, p, m, stages):
    """A legal list: stages are dealt to ranks at random, and any action whose inputs exist may come next."""
    where = [rng.randrange(p) for _ in range(stages)]
    for r in range(p):
        where[r % stages] = r if stages >= p else where[r % stages]
    rows, done = [[] for _ in range(p)], set()
    halves = {(s, k): rng.random() < 0.5 for s in range(stages) for k in range(m)}
    open_ = [Action(s, kind, k) for s in range(stages) for k in range(m) for kind in ("FIW" if halves[s, k] else "FB")]
    while open_:

        def free(a):
            if a.kind == "F":
                return a.stage == 0 or (a.stage - 1, "F", a.microbatch) in done
            if a.kind == "W":
                return (a.stage, "G", a.microbatch) in done
            later = a.stage == stages - 1 or (a.stage + 1, "G", a.microbatch) in done
            return later and (a.stage, "F", a.microbatch) in done

        action = rng.choice([a for a in open_ if free(a)])
        open_.remove(action)
        done.add((action.stage, {"B": "G", "I": "G"}.get(action.kind, action.kind), action.microbatch))
        rows[where[action.stage]].append(action)
    return rows


def many(comm, grids):
    wrong = []
    for text in grids:
        mine, _ = run_once(comm, text)
        if not far(mine, oracle(stages_of(text))) < BOUND:
            wrong.append(text)
    return wrong


def test_random_legal_schedules_run_right_and_corrupted_ones_are_refused():
    rng = random.Random(3)
    for p in (2, 3):
        grids = [random_schedule(rng, p, rng.randint(1, 4), rng.randint(p, 5)) for _ in range(12)]
        run = fw.simulate(many, grids, ranks=p, cluster=NETWORK)
        assert run.values == [[]] * p
        for grid in grids:
            rank = rng.choice([r for r in range(p) if grid[r]])
            grid[rank].pop(rng.randrange(len(grid[rank])))

            def bad(comm, grid=grid):
                execute(grid, {}, comm, [], squares)

            with pytest.raises(fw.RankError, match=IllegalSchedule.__name__):
                fw.simulate(bad, ranks=p, cluster=NETWORK)


def planted(comm, fault, monkeypatch=None):
    """One step of 1F1B (or ZB-H1) on 3 ranks with a fault; the distance from one device."""
    schedule = zero_bubble.zb_h1(3, 4) if fault == "w" else schedules.one_f_one_b(3, 4)
    options = {"divide_by": 8.0}
    if fault == "divide":
        options = {"divide_by": 2.0}  # the rows of a micro-batch instead of the batch's
    mine, _ = run_once(comm, schedule, **options)
    return far(mine, oracle(3, divide_by=8.0))


FAULTS = {
    "none": None,
    "divide": None,
    "w": (Later, "run", lambda self: self._open.clear()),
    "gradient": (RunningStage, "backward", lambda self, m, kind, grad: _right(self, 0 if m == 1 else m, kind, grad)),
    "sign": (RunningStage, "backward", lambda self, m, kind, grad: _right(self, m, kind, None if grad is None else -grad)),
    "detached": (RunningStage, "backward", lambda self, m, kind, grad: _zero(_right(self, m, kind, grad))),
    "tag": (Routes, "tag", lambda self, product: 1 + (product[0] == "G")),
}
_right = RunningStage.backward


def _zero(x):
    return None if x is None else torch.zeros_like(x)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    if FAULTS[fault] is not None:
        monkeypatch.setattr(*FAULTS[fault])
    try:
        caught = max(fw.simulate(planted, fault, ranks=3, cluster=NETWORK).values) > 10 * BOUND
    except fw.CommError:
        caught = True
    assert caught == (fault not in ("none", "tag")), fault  # in 1F1B, order alone would tell messages apart


def test_fault_one_random_stream_for_all_microbatches_is_caught(monkeypatch):
    """Recompute must see the numbers that the first pass saw: with one generator for all, it sees others."""

    def program(comm, recompute):
        module = torch.nn.Sequential(layer(comm.rank), torch.nn.Dropout(0.5))
        options = {"seed": 4, "recompute": recompute}
        execute(schedules.gpipe(2, 3), {comm.rank: module}, comm, split_batch(*batch(6), count=3), squares, **options)
        return [p.grad for p in module.parameters()]

    def distance():
        one, two = (fw.simulate(program, r, ranks=2, cluster=NETWORK).values for r in (False, True))
        return max(float((a - b).abs().max()) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))

    assert distance() < BOUND
    monkeypatch.setattr(running_module.RunningStage, "_own_random_numbers", lambda self, m: torch.random.fork_rng(enabled=False))
    assert distance() > 1e-3


def test_tied_gradients_are_summed_with_the_same_bits():
    def program(comm, fault):
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = torch.tensor([1e8, 1.0, comm.rank + 1.0]) if comm.rank else torch.tensor([-1e8, 1.0, 0.1])
        where = {"w": (0, 2)}
        held = {"w": weight} if comm.rank in where["w"] and not (fault and comm.rank == 2) else {}
        sum_tied(comm, held, where)
        return weight.grad

    run = fw.simulate(program, False, ranks=3, cluster=NETWORK)
    assert torch.equal(run.values[0], run.values[2]) and run.values[0].tolist() == pytest.approx([0.0, 2.0, 3.1])
    assert run.values[1][2] == 2.0  # a rank that does not hold it is left alone
    with pytest.raises(fw.CommError, match="held by ranks .0, 2. by `where`, but rank 2 has none"):
        fw.simulate(program, True, ranks=3, cluster=NETWORK)


def paced(comm, schedule, times):
    mine = {comm.rank: layer(comm.rank)}
    execute(schedule, mine, comm, split_batch(*batch(8), count=4), squares, seconds=times)


def test_paced_in_the_simulator_is_the_paper_simulation():
    """Seconds given, a free network: ranks that really run the list take exactly the time that simulate() says."""
    times = Times(forward=0.03, input=0.04, weight=0.02)
    for schedule in (schedules.one_f_one_b(4, 4), zero_bubble.zb_h1(4, 4), schedules.gpipe(4, 4)):
        run = fw.simulate(paced, schedule, times, ranks=4, cluster=uniform(0.0, 1e30))
        spans = [e for e in run.trace if e.kind in ("forward", "backward", "weight")]
        assert abs(max(e.end for e in spans) - simulate(schedule, times).makespan_ps) < 1000  # ps; a message takes one
