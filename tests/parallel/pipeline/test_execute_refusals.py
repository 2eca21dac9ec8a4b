"""What an executed schedule refuses, what it carries (changing sizes), and where its loss is read."""

import time

import pytest
import torch

import fourwalls as fw
from fourwalls.parallel.pipeline import schedules
from fourwalls.parallel.pipeline.actions import Action, placement
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.microbatches import MicroBatch, check_numbers, split_batch
from fourwalls.parallel.pipeline.shapes import output_shape
from fourwalls.parallel.pipeline.stages import check_cuts, even_cuts

from .small_stages import BOUND, NETWORK, W, batch, layer, run_once, squares


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
    for bad in (torch.tensor(3.0), [1, 2, 3]):
        with pytest.raises(ValueError, match="a tensor whose first dim counts the rows"):
            split_batch(bad, count=1)


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
    elif what == "infinite":
        options["divide_by"] = float("inf")
    elif what == "list":
        modules = [layer(comm.rank)]
    elif what == "float loss":
        options["loss"] = lambda y, t: 1.0
    elif what == "nan":
        options["loss"] = lambda y, t: (y - t).sum() * (float("nan") if t is micro[1].targets else 1.0)
    elif what == "no rows":
        micro[1] = MicroBatch(1, micro[1].inputs[:0], micro[1].targets[:0])
    elif what == "lower case":
        schedule = "0f0 0f1 0f2 0b0 0b1 0b2\n1f0 1f1 1f2 1b0 1b1 1b2"
    elif what == "no stage":
        schedule = "0F0 0F1 0F2 0B0 0B1 0B2\n."
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
        ("infinite", "divide_by is inf; allowed"),
        ("list", "stages is a list; allowed: a dict, stage -> its module"),
        ("float loss", "the loss is a float; allowed: a tensor"),
        ("nan", "rank 1 .*micro-batch 1: the loss is nan"),
        ("no rows", "micro-batch 1 has no rows; allowed: at least one"),
        ("lower case", "kinds are capital letters; did you mean 0F0"),
        ("no stage", "rank 1 was given stages .1.; by the schedule it runs .."),
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
