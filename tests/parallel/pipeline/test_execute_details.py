"""What an executed schedule costs and refuses: live bytes, the two halves of backward, replicas, shapes, and planted faults."""

import random
import time
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.mesh import Grid, Mesh
from fourwalls.parallel.pipeline import interleaved, schedules, v_shape, zero_bubble
from fourwalls.parallel.pipeline import running as running_module
from fourwalls.parallel.pipeline.actions import Action, parts, placement, stages_of
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.legality import IllegalSchedule
from fourwalls.parallel.pipeline.microbatches import MicroBatch, check_numbers, split_batch
from fourwalls.parallel.pipeline.outcome import sum_tied
from fourwalls.parallel.pipeline.routes import Routes
from fourwalls.parallel.pipeline.running import RunningStage
from fourwalls.parallel.pipeline.shapes import output_shape
from fourwalls.parallel.pipeline.simulate import Times, simulate
from fourwalls.parallel.pipeline.split_backward import Later, splitting
from fourwalls.parallel.pipeline.stages import check_cuts, even_cuts
from fourwalls.parallel.tensor import TensorFeedForward

NETWORK = uniform(1e-6, 1e10)
W = 6
BOUND = 1e-12


def layer(k, width=W):
    module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()).double()
    generator = torch.Generator().manual_seed(k)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def batch(rows=8, width=W, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))


def squares(y, target):
    return (y - target).square().sum()


def oracle(layers, rows=8, divide_by=1.0, seed=5):
    x, target = batch(rows, seed=seed)
    model = [layer(k) for k in range(layers)]
    for module in model:
        x = module(x)
    (squares(x, target) / divide_by).backward()
    return [[p.grad for p in module.parameters()] for module in model]


def far(modules, want):
    """The largest distance between the gradients of {stage: module} and the oracle's."""
    return max(
        float((p.grad - w).abs().max()) if p.grad is not None else float("inf")
        for s, module in modules.items()
        for p, w in zip(module.parameters(), want[s], strict=True)
    )


def run_once(comm, schedule, rows=8, **options):
    where = placement(schedule)
    mine = {s: layer(s) for s in where if where[s] == comm.rank}
    count = 1 + max(a.microbatch for row in schedule for cell in row for a in parts(cell))
    out = execute(schedule, mine, comm, split_batch(*batch(rows), count=count), squares, **options)
    return mine, out


# --- the two halves of backward ---------------------------------------------------------------------------------------
def flops_of(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_i_does_not_make_what_w_makes():
    """I and W each run half of B's products, and no more; after I only x and dy are kept; after W nothing."""
    rows, width, depth = 16, 32, 4
    module = torch.nn.Sequential(*[layer(k, width) for k in range(depth)])
    x, dy = batch(rows, width)
    counts = {}
    for split in (False, True):
        stage = RunningStage(module, 1, 3, split=split)
        stage.forward(0, x, None)
        if split:
            counts["I"] = flops_of(lambda stage=stage: stage.backward(0, "I", dy))
            later = stage._kept[0].later
            assert later.waiting == depth
            assert later.bytes == 2 * depth * rows * width * 8  # x and dy of each layer
            assert stage.holds == 1
            counts["W"] = flops_of(lambda stage=stage: stage.backward(0, "W", None))
        else:
            counts["B"] = flops_of(lambda stage=stage: stage.backward(0, "B", dy))
        assert stage.holds == 0
    product = 2 * rows * width * width
    assert counts == {"B": 2 * depth * product, "I": depth * product, "W": depth * product}


def test_halves_give_the_gradients_of_the_whole():
    """With a frozen layer, a frozen bias, no bias, one weight used twice, norms and 3-d inputs: exactly the same numbers."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = torch.nn.Linear(W, W), torch.nn.Linear(W, W, bias=False)
            self.frozen, self.norm = torch.nn.Linear(W, W), torch.nn.LayerNorm(W)
            self.frozen.requires_grad_(False)
            self.a.bias.requires_grad_(False)

        def forward(self, x):
            return self.b(torch.tanh(self.frozen(self.norm(self.a(x))))) + self.b(x)

    module, x, dy = Odd().double(), *(t.view(2, 4, W) for t in batch())
    grads = {}
    for kinds in ("B", "IW"):
        module.zero_grad()
        stage = RunningStage(module, 1, 3, split=kinds == "IW")
        for m in (0, 1):
            stage.forward(m, x * (m + 1), None)
        came = [stage.backward(m, k, dy) for m in (0, 1) for k in kinds]
        grads[kinds] = [c for c in came if c is not None] + [p.grad for p in module.parameters() if p.requires_grad]
    for one, two in zip(grads["B"], grads["IW"], strict=True):
        assert torch.allclose(one, two, rtol=0, atol=BOUND)
    assert module.frozen.weight.grad is None and module.a.bias.grad is None


def test_without_a_queue_nothing_is_put_off():
    later = Later()
    with splitting(later), torch.no_grad():
        torch.nn.functional.linear(torch.ones(2, 3), torch.nn.Parameter(torch.ones(4, 3)))
    assert later.waiting == 0


# --- live bytes -------------------------------------------------------------------------------------------------------
MEMORY = {
    "naive": schedules.naive(4, 5),
    "gpipe": schedules.gpipe(4, 6),
    "1f1b": schedules.one_f_one_b(4, 7),
    "1f1b doubled": schedules.one_f_one_b(4, 9, doubled=True),
    "interleaved": interleaved.interleaved_one_f_one_b(4, 8, 2),
    "breadth first": interleaved.looped_breadth_first(4, 6, 2),
    "zb-h1": zero_bubble.zb_h1(4, 7),
    "zb-h2": zero_bubble.zb_h2(4, 8),
    "zb-v": v_shape.zb_v(4, 8),
    "dualpipe-v": v_shape.dualpipe_v(4, 8),
}


class Saved:
    """What autograd keeps for backward: bytes by storage, counted while anybody holds it; parameters are left out."""

    def __init__(self, modules):
        self.own = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self.held = Counter()

    @property
    def bytes(self):
        return sum(nbytes for (_, nbytes), holders in self.held.items() if holders)

    def pack(self, tensor):
        key = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        return _Held(self.held if key[0] not in self.own else Counter(), key, tensor)


class _Held:
    def __init__(self, held, key, tensor):
        self.held, self.key, self.tensor = held, key, tensor
        held[key] += 1

    def __del__(self):
        self.held[self.key] -= 1


def live_bytes(comm, names):
    """name -> after each action: (action, bytes that autograd keeps, bytes of put-off products). A received buffer that waits for
    its F is a message, not an activation.
    """
    found = {}
    for name in names:
        schedule = MEMORY[name]
        where = placement(schedule)
        mine = {s: layer(s) for s in where if where[s] == comm.rank}
        count = 1 + max(a.microbatch for row in schedule for cell in row for a in parts(cell))
        micro = [MicroBatch(m.index, m.inputs.clone(), m.targets) for m in split_batch(*batch(4 * count), count=count)]
        seen, stages, saved = [], {}, Saved(mine.values())

        def watch(action, running, stages=stages, seen=seen, saved=saved):
            stages[action.stage] = running
            apart = sum(k.later.bytes for s in stages.values() for k in s._kept.values() if k.later and k.edge is None)
            seen.append((action, saved.bytes, apart))

        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            execute(schedule, mine, comm, micro, squares, watch=watch)
        found[name] = seen
    return found


def test_live_bytes_of_every_stage_are_as_simulated():
    """On real ranks, after every action of every schedule: what autograd keeps is what the list of actions says, to the byte."""
    run = fw.run(live_bytes, list(MEMORY), ranks=4)
    full, half = {}, {}  # kind of stage -> bytes of one micro-batch after F, and after I
    for value in run.values:
        first, then = value["naive"][:2]
        assert first[1] > 0 and then[1] == 0
    for name, schedule in MEMORY.items():
        split, last = any(a.kind == "I" for row in schedule for cell in row for a in parts(cell)), stages_of(schedule) - 1

        def kind_of(stage, split=split, last=last):  # the last stage keeps what its loss needs too
            return split, stage == last
        for rank, value in enumerate(run.values):
            held = {}  # (stage, micro-batch) -> what it holds, "F" or "I"
            for action, activations, apart in value[name]:
                key = action.stage, action.microbatch
                if action.kind == "F":
                    held[key] = "F"
                elif action.kind == "I":
                    held[key] = "I"
                else:
                    del held[key]
                alone = [k for k, what in held.items() if what == "F"]
                if len(alone) == 1 and activations:
                    assert full.setdefault(kind_of(alone[0][0]), activations) == activations
                if len(held) - len(alone) == 1:
                    put_off = next(k[0] for k, what in held.items() if what == "I")
                    assert half.setdefault(put_off == last, apart) == apart
                assert apart == sum(half[k[0] == last] for k, what in held.items() if what == "I"), (name, action)
                if all(kind_of(k[0]) in full for k in alone):
                    # the output of a stage is the input of the next one: on one rank they are one tensor
                    twice = sum((s + 1, m) in alone for s, m in alone) * 4 * W * 8
                    assert activations == sum(full[kind_of(k[0])] for k in alone) - twice, (name, rank, action)
            assert not held
        if not split:
            sizes = [full[kind_of(s)] for s in range(last + 1)]
            peaks = [max(a for _, a, _ in value[name]) for value in run.values]
            assert peaks == list(simulate(schedule, activation=sizes).peaks), name


# --- replicas, tensor parallel, messages ------------------------------------------------------------------------------
def replicas(comm, schedule, early=False):
    """d = 2 x p = 2: each replica has half of the rows; a stage sums over its replicas once its last gradient is there."""
    mesh = Mesh(comm, Grid(d=2, p=2))
    x, target = (t[mesh.d.rank :: 2] for t in batch(8))
    mine = {mesh.p.rank: layer(mesh.p.rank)}

    def sum_up(stage):
        for p in mine[stage].parameters():
            p.grad = ring.all_reduce(mesh.d, p.grad)

    done = []

    def watch(action, running):
        if early and action.kind in "BW" and not done:
            done.append(sum_up(action.stage))

    hook = None if early else sum_up
    execute(schedule, mine, mesh.p, split_batch(x, target, count=4), squares, divide_by=8, after_stage=hook, watch=watch)
    return mesh.p.rank, far(mine, oracle(2, divide_by=8.0)), [p.grad for p in mine[mesh.p.rank].parameters()]


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(2, 4), zero_bubble.zb_h1(2, 4), schedules.gpipe(2, 4)])
def test_d11_replicas_of_every_stage_are_equal(schedule):
    run = fw.simulate(replicas, schedule, ranks=4, cluster=NETWORK)
    for stage in (0, 1):
        one, two = (grads for s, _, grads in run.values if s == stage)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert max(value[1] for value in run.values) < BOUND


def test_mutant_summing_replicas_before_the_last_microbatch_is_caught():
    run = fw.simulate(replicas, schedules.one_f_one_b(2, 4), True, ranks=4, cluster=NETWORK)
    assert max(value[1] for value in run.values) > 1e-3


def tensor_stages(comm, schedule):
    """t = 2 x p = 2: each stage is an MLP whose products two ranks share."""
    mesh = Mesh(comm, Grid(p=2, t=2))
    torch.manual_seed(0)
    module = TensorFeedForward(mesh.t, W, 2 * W, std=0.4, out_std=0.4, dtype=torch.float64)
    for m in (module.up, module.down):
        m.init_parameters(f"{mesh.p.rank}", 0)
    x, target = batch(6)
    execute(schedule, {mesh.p.rank: module}, mesh.p, split_batch(x, target, count=3), squares)
    return mesh.place, {n: (p.detach(), p.grad) for n, p in module.named_parameters()}


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(2, 3), zero_bubble.zb_h1(2, 3)])
def test_tensor_parallel_stages(schedule):
    run = fw.simulate(tensor_stages, schedule, ranks=4, cluster=NETWORK)
    parts_of = {(place.p, place.t): tensors for place, tensors in run.values}

    def whole(p, name, k):
        one, two = parts_of[p, 0][name][k], parts_of[p, 1][name][k]
        if name == "down.bias":
            assert torch.equal(one, two)
            return one
        return torch.cat([one, two], dim=1 if name == "down.weight" else 0)

    names = list(parts_of[0, 0])
    weights = {(p, n): whole(p, n, 0).clone().requires_grad_() for p in (0, 1) for n in names}
    x, target = batch(6)
    for p in (0, 1):
        x = torch.nn.functional.linear(x, weights[p, "up.weight"], weights[p, "up.bias"])
        x = torch.nn.functional.gelu(x, approximate="tanh")
        x = torch.nn.functional.linear(x, weights[p, "down.weight"], weights[p, "down.bias"])
    squares(x, target).backward()
    for (p, n), w in weights.items():
        assert float((whole(p, n, 1) - w.grad).abs().max()) < BOUND, (p, n)


def lengths(comm):
    """Row d13: 128 tokens, then 129, then 128 again; and micro-batches of different shapes in one step (d14)."""
    where = placement(schedules.one_f_one_b(2, 2))
    mine = {comm.rank: layer(comm.rank)}
    losses = []
    for step, (rows, length) in enumerate([(2, 128), (2, 129), (3, 128)]):
        x, target = (t.view(rows, length, W) for t in batch(rows * length))
        out = execute(schedules.one_f_one_b(2, 2), mine, comm, split_batch(x, target, count=2), squares, step=step)
        losses.append(float(out.fetch()))
    assert len(where) == 2
    return losses


def test_d13_sequences_may_change_their_length():
    run = fw.simulate(lengths, ranks=2, cluster=NETWORK)
    want = []
    for rows, length in [(2, 128), (2, 129), (3, 128)]:
        x, target = batch(rows * length)
        want.append(float(squares(layer(1)(layer(0)(x)), target).detach()))
    assert run.values[0] == run.values[1] == pytest.approx(want, rel=1e-12)


def test_d02_and_d16_sizes_that_do_not_fit_are_refused_before_anything_runs():
    assert [m.rows for m in split_batch(torch.zeros(8, 1), count=3)] == [3, 3, 2]
    assert [m.rows for m in split_batch(torch.zeros(6, 1), size=4, count=2)] == [4, 2]
    with pytest.raises(ValueError, match="2 rows cannot fill 4 micro-batches; allowed: count from 1 to 2"):
        split_batch(torch.zeros(2, 1), count=4)
    with pytest.raises(ValueError, match="6 rows in micro-batches of 4 make 2, not 3; nearest: count=2"):
        split_batch(torch.zeros(6, 1), size=4, count=3)
    for bad in ({"count": 0}, {"size": -1}, {"count": 1.5}, {}):
        with pytest.raises(ValueError, match=r"allowed|give count"):
            split_batch(torch.zeros(6, 1), **bad)
    with pytest.raises(ValueError, match="no rows"):
        split_batch(torch.zeros(0, 1), size=3)
    with pytest.raises(ValueError, match="6 rows of inputs and 5 of targets"):
        split_batch(torch.zeros(6, 1), torch.zeros(5, 1), count=2)


def test_d14_labels_of_another_microbatch_are_refused():
    micro = split_batch(*batch(6), count=3)
    swapped = [micro[0], micro[2], micro[1]]
    with pytest.raises(ValueError, match="micro-batch 2 stands at place 1"):
        check_numbers(swapped, 3)
    with pytest.raises(ValueError, match="2 micro-batches for a schedule of 3"):
        check_numbers(micro[:2], 3)

    def program(comm):
        rows = 6 if comm.rank == 0 else 9  # the last stage has the targets of another batch
        execute(schedules.gpipe(2, 3), {comm.rank: layer(comm.rank)}, comm, split_batch(*batch(rows), count=3), squares)

    with pytest.raises(fw.RankError, match="targets are of another batch"):
        fw.simulate(program, ranks=2, cluster=NETWORK)


def refused(comm, what):
    schedule, modules, options = schedules.one_f_one_b(2, 3), {comm.rank: layer(comm.rank)}, {}
    micro = split_batch(*batch(6), count=3)
    if what == "stage":
        modules = {0: layer(0)}
    elif what == "ranks":
        schedule = schedules.one_f_one_b(3, 3)
    elif what == "illegal":
        schedule = [["0F0", "0B0", "0F1", "0F2", "0B1", "0B2"], ["1F0", "1F1", "1F2", "1B1", "1B2"]]
    elif what == "divide":
        options["divide_by"] = 0
    elif what == "tuple":
        modules = {comm.rank: lambda x: (x, x)}
        modules = {comm.rank: torch.nn.Module()}
        modules[comm.rank].forward = lambda x: (x, x)
    elif what == "inputs":
        micro = [MicroBatch(m.index, None, m.targets) for m in micro]
    elif what == "targets":
        micro = [MicroBatch(m.index, m.inputs, None) for m in micro]
    elif what == "vector loss":
        options["loss"] = lambda y, t: (y - t).sum(1)
    elif what == "step":
        options["step"] = comm.rank
    loss = options.pop("loss", squares)
    execute(schedule, modules, comm, micro, loss, **options)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("stage", "rank 1 was given stages .0.; by the schedule it runs .1."),
        ("ranks", "a schedule for 3 ranks on 2"),
        ("illegal", "1F0 has no backward pass; 1B0 is missing"),
        ("divide", "divide_by is 0"),
        ("tuple", "a stage returned a tuple"),
        ("inputs", "needs the inputs of every micro-batch"),
        ("targets", "needs the targets of every micro-batch"),
        ("vector loss", r"the loss has shape \(2,\)"),
        ("step", "rank 1 is in step 1, rank 0 in step 0"),
    ],
)
def test_bad_input(what, words):
    with pytest.raises(fw.RankError, match=words):
        fw.simulate(refused, what, ranks=2, cluster=NETWORK)


def fails_in_cool_down(comm):
    mine = {comm.rank: layer(comm.rank)}

    def watch(action, running):
        if action == Action(1, "B", 2):
            raise ArithmeticError("planted in cool-down")

    execute(schedules.one_f_one_b(4, 4), mine, comm, split_batch(*batch(4), count=4), squares, watch=watch)


def test_a_stage_that_raises_in_cool_down_ends_the_run_at_once():
    begin = time.perf_counter()
    with pytest.raises(fw.RankError, match="rank 1 .*planted in cool-down"):
        fw.run(fails_in_cool_down, ranks=4)
    assert time.perf_counter() - begin < 60  # it does not hang; how fast is tests/ranks/test_faults.py's


def test_the_loss_lives_on_one_rank_and_is_fetched():
    def program(comm):
        _, out = run_once(comm, schedules.one_f_one_b(3, 2))
        with_loss = comm.rank == 2
        try:
            value = float(out.loss)
        except RuntimeError as error:
            value = str(error)
        return with_loss, value, float(out.fetch())

    run = fw.simulate(program, ranks=3, cluster=NETWORK)
    assert [type(v[1]) for v in run.values] == [str, str, float]
    assert "the last stage is on rank 2" in run.values[0][1]
    assert {v[2] for v in run.values} == {run.values[2][1]}


def test_forward_only_gives_the_outputs_and_no_gradients():
    def program(comm):
        mine = {s: layer(s) for s in range(comm.rank, 4, 2)}
        micro = split_batch(batch(6)[0], count=3)
        out = execute(schedules.forward_only(2, 3, chunks=2), mine, comm, micro, forward_only=True)
        return out.loss if comm.rank == 1 else None, [p.grad for m in mine.values() for p in m.parameters()]

    run = fw.simulate(program, ranks=2, cluster=NETWORK)
    x, _ = batch(6)
    for k in range(4):
        x = layer(k)(x)
    assert float((run.values[1][0] - x.detach()).abs().max()) < BOUND
    assert all(g is None for value in run.values for g in value[1])


def test_shapes_are_found_without_computing():
    class Odd(torch.nn.Module):
        def forward(self, x):
            assert not self.training or x.is_meta
            return x.sum(-1).unsqueeze(0).float()

    assert output_shape(Odd(), (3, 4), torch.float64) == ((1, 3), torch.float32)
    module = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.5))
    before = torch.get_rng_state()
    assert output_shape(module, (2, 5, 4), torch.float32) == ((2, 5, 7), torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_cuts():
    assert even_cuts(7, 3) == [0, 3, 5, 7]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        even_cuts(3, 4)
    for bad in ([0, 3], [1, 4], [0, 3, 2, 4], [4]):
        with pytest.raises(ValueError, match="rise from 0 to 4"):
            check_cuts(bad, 4)


# --- random schedules and planted faults ------------------------------------------------------------------------------
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
