"""Plans against counting, against all plans there are, and against memory that was measured."""

import itertools
import math
import random

import pytest
import torch

from fourwalls.memory.chain import chain_of, model_chain, step_of
from fourwalls.memory.ledger import Ledger
from fourwalls.memory.planner import best_plan, least_bytes
from fourwalls.memory.recompute import block_ways, recompute_model, run_plan
from fourwalls.memory.schedule import (
    Again,
    Step,
    Tape,
    Way,
    cost,
    forecast,
    keep_all,
    revolve,
    revolve_runs,
    runs,
    segments,
    show,
    square_root,
    steps_of,
)
from fourwalls.nn.gpt import GPT, GPTConfig

torch.set_num_threads(1)
MEBI = 2**20
LAYER = Step(1.0, MEBI, saves_output=True, forward_extra=MEBI, backward_extra=MEBI)  # Linear 512 and Tanh, batch 512, float32


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans_as_text():
    assert show(keep_all(3)) == "0 1 2" and show(segments(5, 2)) == "[0 1] [2 3 4]" and show(square_root(4)) == "[0 1] [2 3]"
    assert show(segments(4, 2, wrap_last=False)) == "[0 1] 2 3" and show((Tape(0, 1), Again((Tape(1),)))) == "0.1 [1]"
    assert show(revolve(4, 0)) == "[[[0] 1] 2] 3"


@pytest.mark.parametrize(
    "plan, words",
    [
        ((Tape(1), Tape(0)), "do not follow each other"),
        ((Again(()),), "something in it"),
        ((0, 1), "found 0"),
    ],
)
def test_what_is_no_plan(plan, words):
    with pytest.raises(ValueError, match=words):
        steps_of(plan)
    with pytest.raises(ValueError, match="3 steps in 4 segments; allowed: 1 to 3"):
        segments(3, 4)
    with pytest.raises(ValueError, match="at least 1 step and 0 slots"):
        revolve(3, -1)
    with pytest.raises(ValueError, match=r"the plan has steps \[0, 1\], the chain has 3"):
        forecast([LAYER] * 3, keep_all(2), input=1)


@pytest.mark.parametrize("n", [1, 2, 7, 16, 64])
def test_runs_of_the_simple_plans(n):
    assert runs(keep_all(n)) == [1] * n
    for pieces in range(1, n + 1):
        assert runs(segments(n, pieces)) == [2] * n
        tail = len(segments(n, pieces, wrap_last=False)) - (pieces - 1)
        assert sum(runs(segments(n, pieces, wrap_last=False))) == 2 * n - tail


def test_revolve_equals_its_closed_form():
    """Claim on trial: recomputation is O(n²). With no slot it is n (n + 1) / 2; with log2 n slots it is below n log2 n."""
    for n in range(1, 30):
        for slots in range(6):
            assert sum(runs(revolve(n, slots))) == revolve_runs(n, slots), (n, slots)
        assert revolve_runs(n, 0) == n * (n + 1) // 2 and revolve_runs(n, n) == 2 * n - 1
    for n in (64, 256, 1024):
        assert revolve_runs(n, round(math.log2(n))) < n * math.log2(n) < n * n / 8
    assert revolve_runs(1000, 0) == 500_500 and revolve_runs(1000, 10) < 5000


def every_plan(first, end):
    """All plans of steps first to end - 1 that forget no last stretch (which never helps)."""
    if first == end:
        yield ()
        return
    for rest in every_plan(first + 1, end):
        yield (Tape(first), *rest)
    for k in range(first + 1, end):
        for inner, rest in itertools.product(every_plan(first, k), every_plan(k, end)):
            yield (Again(inner), *rest)


def random_chain(rng, n, *, ways=1):
    return [
        Step(
            float(rng.randint(1, 9)),
            rng.randint(1, 9),
            tuple(Way(str(k), rng.randint(0, 20), float(k * rng.randint(0, 5))) for k in range(ways)),
            rng.random() < 0.5,
            rng.randint(0, 5),
            rng.randint(0, 5),
        )
        for _ in range(n)
    ]


def test_the_best_plan_is_the_best_of_all():
    """Brute force over every plan of up to 6 steps, for every limit that matters."""
    rng, compared = random.Random(0), 0
    for n in (1, 2, 3, 4, 5, 6):
        for equal in (False, True):
            chain = random_chain(rng, n)
            chain = [chain[0]] * n if equal else chain
            grad = rng.choice((None, 0))
            known = [(forecast(chain, p, input=3, output_grad=grad).peak, cost(chain, p)) for p in every_plan(0, n)]
            assert least_bytes(chain, input=3, output_grad=grad) == min(peak for peak, _ in known)
            for limit in sorted({peak for peak, _ in known}):
                best = best_plan(chain, limit, input=3, output_grad=grad)
                assert forecast(chain, best, input=3, output_grad=grad).peak <= limit
                assert cost(chain, best) == min(c for peak, c in known if peak <= limit)
                compared += 1
            with pytest.raises(ValueError, match=f"are too few for these {n} steps; least: "):
                best_plan(chain, min(peak for peak, _ in known) - 1, input=3, output_grad=grad)
    assert compared > 60


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_square_root_or_any_other(seed):
    """At the peak of each simple plan, the best one costs at most as much: chains of unequal steps, with ways to choose from."""
    rng = random.Random(seed)
    for n in (1, 4, 9, 12):
        chain = random_chain(rng, n, ways=2)
        for plan in [square_root(n), keep_all(n), revolve(n, 1), *(segments(n, k) for k in range(1, n + 1, 3))]:
            limit = forecast(chain, plan, input=3).peak
            best = best_plan(chain, limit, input=3)
            assert forecast(chain, best, input=3).peak <= limit and cost(chain, best) <= cost(chain, plan)


def test_what_a_way_costs_more_is_counted_once_and_where_it_is_taken():
    chain = [Step(10.0, 1, (Way("all", 8), Way("selective", 2, 3.0))), Step(20.0, 1)]
    assert cost(chain, (Tape(0, 1), Tape(1))) == 33 and cost(chain, keep_all(2)) == 30
    assert cost(chain, (Again((Tape(0, 1),)), Tape(1))) == 43  # run twice, its core once more in backward


def test_64_equal_layers():
    """Square root: 8 kept, a peak of 18 and 128 runs; the best plan with the same peak needs fewer."""
    chain = [LAYER] * 64
    eight = forecast(chain, segments(64, 8), input=MEBI)
    assert (eight.kept, eight.peak) == (8 * MEBI, 18 * MEBI) and square_root(64) == segments(64, 8)
    assert forecast(chain, keep_all(64), input=MEBI).kept == 65 * MEBI
    best = best_plan(chain, eight.peak, input=MEBI)
    assert sum(runs(best)) == 117 and forecast(chain, best, input=MEBI).peak == eight.peak
    assert least_bytes(chain, input=MEBI) == 5 * MEBI


# --- beside what is measured -----------------------------------------------------------------------------------------


def measured(functions, plan, x):
    """(bytes kept after forward, peak, runs) of activations alone: parameters and their gradients left out."""
    model = torch.nn.ModuleList(functions)
    for p in model.parameters():
        p.grad = None
    count = [0] * len(functions)

    def step(k):
        def run(x):
            count[k] += 1
            return functions[k](x)

        return run

    with Ledger(model, inputs=[x], lines=False) as ledger:
        h = x * 1
        ledger.phase("forward")
        y = run_plan([step(k) for k in range(len(functions))], h, plan)
        del h
        s = y.sum()
        del y
        ledger.phase("backward")
        s.backward()
        del s
    beside = [m.total - sum(m.bytes[c] for c in ("parameters", "gradients", "inputs")) for m in ledger.curve()]
    return beside[ledger.story().ends()["forward"]], max(beside), count


def layers(n, width):
    return [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(n)]


@pytest.mark.parametrize("pieces", [0, 1, 2, 4, 8])
def test_trial_e07_peak_and_kept_are_those_forecast(pieces):
    """8 Linear(256, 256) with Tanh: all, whole, per 4, per 2, per layer. To the byte, but for the loss and its gradient."""
    functions, x = layers(8, 256), torch.ones(256, 256)
    plan = segments(8, pieces) if pieces else keep_all(8)
    chain = chain_of(functions, x)
    a = 256 * 256 * 4
    assert chain == [Step(2 * 256**3 + 256**2, a, saves_output=True, forward_extra=a, backward_extra=a)] * 8
    told = forecast(chain, plan, input=a, output_grad=0)
    kept, peak, count = measured(functions, plan, x)
    assert kept == told.kept + 4 and told.peak <= peak <= told.peak + 8 + 5056 and count == runs(plan)


def test_whole_wrapped_saves_nothing_at_the_peak():
    """Trial e07's complaint: one checkpoint around everything recomputes all of it at once."""
    functions, x = layers(8, 64), torch.ones(64, 64)
    without, whole, halves = (measured(functions, p, x)[1] for p in (keep_all(8), segments(8, 1), segments(8, 2)))
    assert abs(whole - without) < 6000 and halves < 0.8 * without


@pytest.mark.parametrize("limit", [1.0, 0.7, 0.45, 0.3])
def test_a_plan_for_a_gpt_fits_when_it_is_run(limit):
    """Chain measured on meta, plan made, model run on it: the peak stays below the limit and within 5% of the forecast."""
    config = GPTConfig(width=32, heads=4, length=32, layers=6, dropout=0.1)
    chain, size = model_chain(GPT(config, device="meta"), 4), 4 * 32 * 32 * 4
    peak = forecast(chain, keep_all(6), input=size).peak
    plan = best_plan(chain, math.ceil(limit * peak) + 6, input=size)
    told = forecast(chain, plan, input=size)
    model = recompute_model(GPT(config), plan)
    with Ledger(model, lines=False) as ledger:
        x = torch.zeros(4, 32, 32).requires_grad_()
        ledger.phase("forward")
        y = model.hidden(x)
        ledger.phase("backward")
        y.backward(torch.ones_like(y))
        del y
    beside = [m.total - sum(m.bytes[c] for c in ("parameters", "gradients", "inputs")) for m in ledger.curve()]
    drawn = 5056 * sum(1 for node in plan if isinstance(node, Again) or node.way)  # random states, which meta does not have
    spare = 2 * size  # y and its gradient are held by this test to the end
    assert told.kept + size <= beside[ledger.story().ends()["forward"]] <= told.kept + size + drawn
    assert 0.95 * told.peak <= max(beside) <= 1.05 * told.peak + drawn + spare


def test_a_step_that_keeps_less_in_another_way():
    block = GPT(GPTConfig(width=32, heads=4, length=64, layers=1), device="meta").blocks[0]
    b, s, h, a = 2, 64, 32, 4
    product, square = 2 * b * s * s * h, a * s * s * b  # one product of the core; one matrix of scores
    for early_stop, products in ((False, 2), (True, 1)):
        ways = block_ways(block, early_stop=early_stop)
        step = step_of(ways, torch.zeros(b, s, h, device="meta"), names=("all", "selective"))
        everything, less = step.ways
        assert everything.kept - less.kept == 4 * square and everything.extra == 0  # without dropout: the softmax's output alone
        assert (
            products * product <= less.extra <= products * product + 5 * square
        )  # the second product's result is owed to nobody
        assert step.forward >= 24 * b * s * h * h + 2 * product
