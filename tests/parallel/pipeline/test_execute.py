"""Every schedule, run on ranks, gives the loss and all gradients of one device."""

from functools import cache

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.layers import cross_entropy
from fourwalls.nn.optim import Adam, clip_
from fourwalls.parallel.pipeline import interleaved, schedules, v_shape, zero_bubble
from fourwalls.parallel.pipeline.actions import microbatches_of, placement, stages_of
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.microbatches import count_targets, split_batch
from fourwalls.parallel.pipeline.outcome import clip_pipeline_, sum_tied
from fourwalls.parallel.pipeline.running import RunningStage
from fourwalls.parallel.pipeline.shapes import table_bytes
from fourwalls.parallel.pipeline.stages import GPTStage, even_cuts, tied_ranks

NETWORK = uniform(1e-6, 1e10)
WIDTH = 5
BOUND = 1e-12  # float64: some hundred terms of size about 1, each rounded to 1e-16

SCHEDULES = {
    "naive": lambda p, m, v: schedules.naive(p, m),
    "gpipe": lambda p, m, v: schedules.gpipe(p, m),
    "1f1b": lambda p, m, v: schedules.one_f_one_b(p, m),
    "1f1b doubled": lambda p, m, v: schedules.one_f_one_b(p, m, doubled=True),
    "interleaved": interleaved.interleaved_one_f_one_b,
    "breadth first": interleaved.looped_breadth_first,
    "zb-h1": lambda p, m, v: zero_bubble.zb_h1(p, m),
    "zb-h2": lambda p, m, v: zero_bubble.zb_h2(p, m),
    "zb-v": lambda p, m, v: v_shape.zb_v(p, m),
    "dualpipe-v": lambda p, m, v: v_shape.dualpipe_v(p, m),
}
CHUNKED = ("interleaved", "breadth first")
FEW = (1, 3, 7, 8, 9, 12)  # micro-batches on 8 ranks, where all 12 take as long as all other cases: few, p - 1, p, p + 1, uneven


def layer(k):
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
    generator = torch.Generator().manual_seed(k)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.6)
    return module


def batch(rows=13):
    generator = torch.Generator().manual_seed(99)
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def squares(y, target):
    return (y - target).square().sum()


@cache
def one_device(layers, rows=13):
    """(loss, gradients by (layer, name)) of the whole batch at once. Every schedule of so many stages is held to the same one."""
    x, target = batch(rows)
    model = [layer(k) for k in range(layers)]
    for module in model:
        x = module(x)
    loss = squares(x, target) / rows
    loss.backward()
    return float(loss.detach()), {(k, n): p.grad for k, module in enumerate(model) for n, p in module.named_parameters()}


@cache
def cases(p):
    """[(name, m, v), schedule, layers] of everything that is legal on p ranks, each list of actions once: with one micro-batch
    naive, GPipe and 1F1B are the same list, and so are 1F1B and one chunk of interleaved 1F1B. Made once for all ranks.
    """
    found = {}
    for name, make in SCHEDULES.items():
        for v in (1, 2, 3) if name in CHUNKED else (1,):
            for m in range(1, 13) if p < 8 else FEW:
                try:
                    schedule = make(p, m, v)
                except ValueError:
                    continue
                found.setdefault(str(schedule), []).append(((name, m, v), schedule))
    return [([which for which, _ in same], same[0][1]) for same in found.values()]


def all_schedules(comm, p):
    """On each rank: the cases that came out wrong, and how many were tried. A layer for each stage."""
    x, target = batch()
    wrong, tried, layers = [], 0, {}
    for names, schedule in cases(p):
        (_, m, _), stages, where = names[0], stages_of(schedule), placement(schedule)
        want_loss, want = one_device(stages)
        mine = {s: layers.setdefault(s, layer(s)) for s in where if where[s] == comm.rank}
        for module in mine.values():
            module.zero_grad()
        out = execute(schedule, mine, comm, split_batch(x, target, count=m), squares, divide_by=len(x))
        pairs = [(q.grad, want[s, n]) for s, module in mine.items() for n, q in module.named_parameters()]
        far = max(float((got - one).abs().max()) for got, one in pairs)
        loss = abs(float(out.loss) - want_loss) if where[stages - 1] == comm.rank else 0.0
        if not max(far, loss) < BOUND:
            wrong.append((names, far, loss))
        tried += len(names)
    return wrong, tried


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_every_schedule_equals_one_device(p):
    """All schedules, m = 1 to 12 (six of them on 8 ranks), v = 1, 2, 3 where legal; 13 rows, so that micro-batches are uneven."""
    # what checks see on 1 to 4 ranks they see on 8: without them 8 ranks take half of the time
    run = fw.simulate(all_schedules, p, ranks=p, cluster=NETWORK, checks=p < 8)
    assert [value[0] for value in run.values] == [[]] * p
    assert run.values[0][1] > {1: 60, 8: 40}.get(p, 90), run.values[0][1]


def test_the_comparison_sees_one_element():
    """The bound is tight enough: an element that is off by ten times the bound is seen."""
    _, want = one_device(3)
    for grad in want.values():
        off = grad.clone()
        off[(0,) * off.dim()] += 10 * BOUND
        assert float((off - grad).abs().max()) > BOUND


# --- a GPT: dropout, tied ends, sum and mean, accumulation, recompute ---------------------------------------------------
CONFIG = GPTConfig(vocabulary=11, length=6, width=8, layers=4, heads=2)


def text(rows=6, length=6, step=0):
    generator = torch.Generator().manual_seed(7 + step)
    x, y = (torch.randint(0, 11, (rows, length), generator=generator) for _ in range(2))
    y[0, :3] = -100  # tokens that do not count
    return x, y


def token_loss(logits, targets):
    return cross_entropy(logits, targets, reduction="sum")


def step_on_ranks(comm, schedule, config, *, steps=1, accumulate=1, mean=True, dropout_seed=None, recompute=False, clip=None):
    """Train for some steps; (losses, gradients of the last step, parameters) by name, this rank's."""
    where, stages = placement(schedule), stages_of(schedule)
    cuts = even_cuts(config.layers, stages)
    mine = {s: GPTStage(config, cuts, s, dtype=torch.float64) for s in sorted(where) if where[s] == comm.rank}
    parameters = [p for module in mine.values() for p in module.parameters()]
    optimizer = Adam(parameters, lr=1e-2)
    tied = tied_ranks(where, config)
    apart = tied and len(set(tied["tokens.weight"])) > 1
    losses = []
    for step in range(steps):
        whole = [split_batch(*text(step=10 * step + a), count=microbatches_of(schedule)) for a in range(accumulate)]
        divide_by = sum(map(count_targets, whole)) if mean else 1
        optimizer.zero_grad()
        total = 0.0
        for a, micro in enumerate(whole):
            seed = None if dropout_seed is None else dropout_seed + 10 * step + a
            options = {"divide_by": divide_by, "seed": seed, "recompute": recompute, "step": step}
            total += float(execute(schedule, mine, comm, micro, token_loss, **options).fetch())
        held = {n: p for module in mine.values() for n, p in module.tied_parameters.items()}
        copies = [module.tied_parameters["tokens.weight"] for module in mine.values() if module.tied_parameters]
        if apart:
            sum_tied(comm, held, tied)
        elif len(copies) == 2:  # both ends on one rank
            copies[0].grad = copies[1].grad = copies[0].grad + copies[1].grad
        if clip is not None:
            second = [p for module in mine.values() if module.last and module.tied for p in [module.tokens.weight]]
            clip_pipeline_(comm, [p for p in parameters if not any(p is q for q in second)], clip, also=second)
        losses.append(total)
        optimizer.step()
    named = [(n, p) for module in mine.values() for n, p in module.named_parameters()]
    return losses, {n: p.grad for n, p in named}, {n: p.detach() for n, p in named}


def step_on_one(config, *, steps=1, accumulate=1, mean=True, clip=None, stages=None, dropout_seed=None, count=1):
    """The same on one device. With dropout: the same stages, one micro-batch after the other, with the same seeds."""
    model = GPT(config, dtype=torch.float64)
    optimizer = Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        whole = [text(step=10 * step + a) for a in range(accumulate)]
        divide_by = sum(int((y != -100).sum()) for _, y in whole) if mean else 1
        optimizer.zero_grad()
        total = 0.0
        for a, (x, y) in enumerate(whole):
            if dropout_seed is None:
                loss = model.loss(x, y, reduction="sum") / divide_by
            else:
                loss = staged(model, stages, split_batch(x, y, count=count), divide_by, dropout_seed + 10 * step + a)
            loss.backward()
            total += float(loss.detach())
        if clip is not None:
            clip_(model.parameters(), clip)
        losses.append(total)
        optimizer.step()
    return losses, {n: p.grad for n, p in model.named_parameters()}, {n: p.detach() for n, p in model.named_parameters()}


def staged(model, stages, micro, divide_by, seed):
    """The loss of one device whose layers draw their random numbers as the stages of a pipeline do."""
    cuts = even_cuts(model.config.layers, stages)

    def part(s):
        def run(x):
            x = model.embed(x) if s == 0 else x
            for k in range(cuts[s], cuts[s + 1]):
                x = model.blocks[k](x)
            return model.logits(x) if s == stages - 1 else x

        return run

    loss = 0.0
    for m in micro:
        x = m.inputs
        for s in range(stages):
            stage = RunningStage(part(s), s, stages, loss=token_loss, divide_by=divide_by, seed=seed)
            x = stage._compute(m.index, x, m.targets if s == stages - 1 else None)
        loss = loss + x
    return loss


def together(values):
    """One dict of the ranks' dicts; copies of a tied parameter must be equal."""
    whole = {}
    for value in values:
        for name, x in value.items():
            assert name not in whole or torch.equal(whole[name], x), name
            whole[name] = x
    return whole


def assert_as_on_one_device(run, want, bound=1e-11):
    losses, grads, parameters = want
    for value in run.values:
        assert value[0] == pytest.approx(losses, abs=bound)
    for got, one in ((together(v[1] for v in run.values), grads), (together(v[2] for v in run.values), parameters)):
        assert set(got) == set(one)
        for name in one:
            assert float((got[name] - one[name]).abs().max()) < bound, name


PAIRWISE = [  # schedule, p, m, v, tied, dropout, accumulation, mean, recompute, steps
    ("1f1b", 2, 4, 1, True, 0.0, 3, True, False, 5),
    ("1f1b", 4, 3, 1, False, 0.2, 1, False, True, 2),
    ("gpipe", 4, 4, 1, True, 0.2, 3, False, False, 2),
    ("naive", 2, 2, 1, False, 0.2, 3, True, True, 2),
    ("interleaved", 2, 4, 2, True, 0.0, 1, False, True, 2),
    ("interleaved", 2, 4, 2, False, 0.2, 3, True, False, 2),
    ("breadth first", 2, 3, 2, False, 0.0, 3, False, False, 2),
    ("zb-h1", 4, 5, 1, True, 0.2, 1, True, False, 5),
    ("zb-h1", 2, 3, 1, False, 0.0, 3, False, True, 2),
    ("zb-h2", 4, 6, 1, False, 0.0, 1, True, False, 2),
    ("zb-v", 2, 4, 1, True, 0.2, 3, True, False, 2),
    ("zb-v", 2, 4, 1, False, 0.0, 1, False, True, 2),
    ("dualpipe-v", 2, 4, 1, True, 0.0, 1, True, False, 2),
    ("dualpipe-v", 2, 5, 1, False, 0.2, 3, False, True, 2),
]


@pytest.mark.parametrize(("name", "p", "m", "v", "tied", "dropout", "accumulate", "mean", "recompute", "steps"), PAIRWISE)
def test_pairwise(name, p, m, v, tied, dropout, accumulate, mean, recompute, steps):
    """Rows d10 and c23 of the trials among them: one factor for micro-batches, tokens and accumulation; tied ends."""
    config = GPTConfig(vocabulary=11, length=6, width=8, layers=4, heads=2, tied=tied, dropout=dropout)
    schedule = SCHEDULES[name](p, m, v)
    options = {"steps": steps, "accumulate": accumulate, "mean": mean, "dropout_seed": 3 if dropout else None}
    run = fw.simulate(step_on_ranks, schedule, config, recompute=recompute, ranks=p, cluster=NETWORK, **options)
    assert_as_on_one_device(run, step_on_one(config, stages=stages_of(schedule), count=m, **options))


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_c41_clipping_counts_each_parameter_once(clip):
    """Parameters after five clipped steps; the clip factor is the same to the last digits, in float64."""
    run = fw.simulate(step_on_ranks, schedules.one_f_one_b(4, 3), CONFIG, steps=5, clip=clip, ranks=4, cluster=NETWORK)
    assert_as_on_one_device(run, step_on_one(CONFIG, steps=5, clip=clip))


def clip_factor(comm, gradients, cut):
    """What a rank's part of the gradients is multiplied by, and the norm before."""
    mine = gradients[cut[comm.rank] : cut[comm.rank + 1]]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in mine]
    for p, g in zip(parameters, mine, strict=True):
        p.grad = g.clone()
    return float(clip_pipeline_(comm, parameters, 0.5)), [p.grad for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_c41_the_clip_factor_of_four_stages_is_that_of_one(dtype):
    """The same on every rank that has gradients, to the last bit; that of one device within the roundings of the sum."""
    dice = torch.Generator().manual_seed(1)
    gradients = [torch.randn(k % 7 + 1, 9, generator=dice, dtype=torch.float64).to(dtype) for k in range(23)]
    whole = [g.clone() for g in gradients]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in whole]
    for p, g in zip(parameters, whole, strict=True):
        p.grad = g
    norm = float(clip_(parameters, 0.5))
    terms, sums = sum(g.numel() for g in gradients), torch.promote_types(dtype, torch.float32)
    bound = terms * torch.finfo(sums).eps
    for cut in ((0, 6, 12, 18, 23), (0, 0, 1, 22, 23)):  # a stage may have no parameter
        values = fw.simulate(clip_factor, gradients, cut, ranks=4, cluster=NETWORK).values
        assert len({before for before, part in values if part}) == 1  # who has nothing to scale may have it in float32
        assert all(abs(before / norm - 1) <= (bound if part else 2.0**-23) for before, part in values)
        for got, want in zip([g for _, part in values for g in part], whole, strict=True):
            assert ((got.double() - want.double()).abs() <= (bound + torch.finfo(dtype).eps) * want.double().abs()).all()


@pytest.mark.parametrize("largest", [-1.0, float("nan")])
def test_a_norm_to_clip_to_is_a_number_of_at_least_0(largest):
    """A negative one would turn every gradient round; nan would clip nothing."""
    with pytest.raises(fw.RankError, match="the largest norm is a number of at least 0"):
        fw.simulate(lambda comm: clip_pipeline_(comm, [], largest), ranks=2, cluster=NETWORK)


def on_real(comm, names, steps):
    results = {}
    for name in names:
        schedule = SCHEDULES[name](comm.size, 4, 2)
        results[name] = step_on_ranks(comm, schedule, CONFIG if stages_of(schedule) <= 4 else WIDE, steps=steps, accumulate=2)
    return results


WIDE = GPTConfig(vocabulary=11, length=6, width=8, layers=8, heads=2)


@pytest.mark.parametrize(("p", "steps"), [(2, 2), (4, 1)])
def test_on_real_ranks(p, steps):
    names = [n for n in SCHEDULES if n != "dualpipe-v" or p == 2]  # needs 2 p micro-batches
    run = fw.run(on_real, names, steps, ranks=p)
    for name in names:
        config = CONFIG if stages_of(SCHEDULES[name](p, 4, 2)) <= 4 else WIDE
        losses, grads, parameters = step_on_one(config, steps=steps, accumulate=2)
        for value in run.values:
            assert value[name][0] == pytest.approx(losses, abs=1e-11)
        for k, one in ((1, grads), (2, parameters)):
            got = together(value[name][k] for value in run.values)
            assert set(got) == set(one)
            assert max(float((got[n] - one[n]).abs().max()) for n in one) < 1e-11, name


def test_bytes_and_messages_are_the_formula():
    """Activations down and gradients up once for each crossing and micro-batch, and one table of shapes a crossing."""

    def program(comm):
        mine = {comm.rank: layer(comm.rank)}
        execute(schedules.one_f_one_b(4, 6), mine, comm, split_batch(*batch(12), count=6), squares)

    run = fw.simulate(program, ranks=4, cluster=NETWORK)
    sent = [e for e in run.trace if e.kind == "send"]
    assert sum(e.bytes for e in sent) == 3 * (2 * 6 * 2 * WIDTH * 8 + table_bytes(6))
    assert len(sent) == 3 * (2 * 6 + 1)
