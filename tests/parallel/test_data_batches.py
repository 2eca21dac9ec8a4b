"""Who gets which rows, uneven ends, norms of shards, batch norm: more faults seen elsewhere, by their numbers in the trials."""

import math
import time

import pytest
import torch

import fourwalls as fw
from fourwalls import collectives as C
from fourwalls.cost.hardware import uniform
from fourwalls.nn.init import draw
from fourwalls.nn.layers import Linear
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import clip_, global_norm
from fourwalls.parallel.batch_norm import BatchNorm
from fourwalls.parallel.batches import Shuffled, own_part, reseed, together
from fourwalls.parallel.compare import explain_difference
from fourwalls.parallel.data import MODES, DataParallel

NETWORK = uniform(1e-6, 1e9)


def simulate(program, *args, ranks=2, **kwargs):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **kwargs)


# --- order and random numbers -----------------------------------------------------------------------------------------
def test_c19_each_epoch_has_its_own_order():
    loaders = [Shuffled(8, rank=r, size=2, batch=2, seed=5) for r in range(2)]
    epochs = [[torch.cat(list(loader)).tolist() for loader in loaders] for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch[0] + epoch[1]) == list(range(8))  # all rows, each once
    assert epochs[0] != epochs[1] != epochs[2]
    again = Shuffled(8, rank=1, size=2, batch=2, seed=5)
    again.epoch = 2
    assert torch.cat(list(again)).tolist() == epochs[2][1]
    # the rows of a step are the same for any number of ranks
    alone = list(Shuffled(8, rank=0, size=1, batch=4, seed=5))
    halves = [list(Shuffled(8, rank=r, size=2, batch=2, seed=5)) for r in range(2)]
    assert all(torch.equal(whole, torch.cat(parts)) for whole, *parts in zip(alone, *halves, strict=True))


def test_the_last_rows_are_split_or_dropped():
    def split(last):
        return [[len(s) for s in Shuffled(11, rank=r, size=3, batch=3, last=last)] for r in range(3)]

    assert split("split") == [[3, 1], [3, 1], [3, 0]] and split("drop") == [[3]] * 3
    assert len(Shuffled(11, rank=0, size=3, batch=3)) == 2 and len(Shuffled(11, rank=0, size=3, batch=3, last="drop")) == 1
    for words, says in (({"rank": 3}, "ranks are 0 to 2"), ({"batch": 0}, "at least 1"), ({"last": "keep"}, "'split' or 'drop'")):
        with pytest.raises(ValueError, match=says):
            Shuffled(**({"count": 11, "rank": 0, "size": 3, "batch": 3} | words))
    with pytest.raises(ValueError, match="largest batch: 3, or last='split'"):
        Shuffled(11, rank=0, size=3, batch=4, last="drop")
    with pytest.raises(ValueError, match="a batch of 3 rows on 4 ranks leaves 1 without any; nearest legal: 4 rows, or 3 ranks"):
        own_part(torch.zeros(3), 0, 4)
    assert [len(own_part(torch.zeros(3), r, 4, empty=True)) for r in range(4)] == [1, 1, 1, 0]
    for rank in (-1, 4):  # a negative one would be given another rank's rows
        with pytest.raises(ValueError, match="ranks are 0 to 3"):
            own_part(torch.zeros(8), rank, 4)


def builds_a_loader(comm):
    """c26: only rank 0 builds and walks through a loader."""
    torch.manual_seed(1)
    if comm.rank == 0:
        list(Shuffled(100, rank=0, size=2, batch=5))
        iter(Shuffled(100, rank=0, size=2, batch=5))
    return torch.rand(1).item()


def test_c26_a_loader_leaves_random_numbers_alone():
    first, second = simulate(builds_a_loader).values
    assert first == second


def shards_of_linear(comm):
    weight = Linear(4, 6).weight  # (6, 4): from the seed alone
    return C.all_gather(comm, weight.detach().tensor_split(comm.size)[comm.rank].reshape(-1), numel=24).view(6, 4)


def dropped(comm):
    """Six micro-batches dealt to the ranks; what is dropped in each depends on its number alone."""
    found = []
    for number in range(6 // comm.size * comm.rank, 6 // comm.size * (comm.rank + 1)):
        reseed(7, 2, number)
        found.append(torch.rand(4))
    return torch.cat(found)


def test_c25_weights_and_dropout_do_not_depend_on_the_number_of_ranks():
    whole = draw("linear.weight", (6, 4)).float()
    for ranks in (1, 2, 3):
        assert all(torch.equal(w, whole) for w in simulate(shards_of_linear, ranks=ranks).values)
        assert torch.equal(torch.cat(simulate(dropped, ranks=ranks).values), torch.cat(simulate(dropped, ranks=1).values))


# --- uneven ends ------------------------------------------------------------------------------------------------------
def uneven(comm, when, mode="overlapped"):
    """c20: 3 batches on rank 0, 2 on the others; then a metric is summed."""
    model = MLP((3, 2), dtype=torch.float64)
    dp = DataParallel(model, comm, mode=mode, average="tokens")
    mine = [torch.full((2, 3), 1.0 + k + comm.rank, dtype=torch.float64) for k in range(3 if comm.rank == 0 else 2)]
    steps = []
    for x in together(comm, mine, when=when):
        model.zero_grad()
        if x is not None:
            dp(x).square().sum().backward()
        dp.synchronise(tokens=0 if x is None else len(x), shadow=x is None)
        steps.append(model.layers[0].weight.grad.clone())
    dp.check_equal()
    metric = C.all_reduce(comm, torch.tensor(len(mine)))
    return steps, int(metric)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_c20_a_rank_that_has_run_out_takes_part_with_nothing(ranks, mode):
    values = simulate(uneven, "shadow", mode, ranks=ranks).values
    assert [len(steps) for steps, _ in values] == [3] * ranks and {metric for _, metric in values} == {2 * ranks + 1}
    for k in range(3):
        model = MLP((3, 2), dtype=torch.float64)
        x = torch.cat([torch.full((2, 3), 1.0 + k + r, dtype=torch.float64) for r in range(ranks if k < 2 else 1)])
        (model(x).square().sum() / len(x)).backward()
        assert all((steps[k] - model.layers[0].weight.grad).abs().max() < 1e-14 for steps, _ in values)


def test_c20_or_all_stop_or_the_rank_is_named():
    assert [len(s) for s, _ in simulate(uneven, "shortest").values] == [2, 2]
    with pytest.raises(fw.RankError, match="rank 1 ran out of batches after 2, and rank 0 has more"):
        simulate(uneven, "refuse")
    with pytest.raises(fw.RankError, match="one of 'shadow'"):
        simulate(uneven, "join")
    assert [len(s) for s, _ in fw.run(uneven, "shadow", ranks=2, stream=False).values] == [3, 3]


def until(seconds, rank):
    """Batches until this rank's own clock says stop, with sleeps that differ by rank."""
    dice, end = torch.Generator().manual_seed(rank), time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.02 * torch.rand(1, generator=dice).item() * (1 + rank))
        yield 1


def timed(comm):
    """b17: each rank would stop by its own clock."""
    done = 0
    for _ in together(comm, until(0.3, comm.rank), when="shortest"):
        C.all_reduce(comm, torch.ones(3))
        done += 1
    return done


def test_b17_loops_that_end_by_the_clock_end_together():
    counts = fw.run(timed, ranks=3, stream=False).values
    assert len(set(counts)) == 1 and counts[0] > 0


# --- norms ------------------------------------------------------------------------------------------------------------
def clipped(comm, largest, order):
    """c31: shards with norms 3 and 4; rank 2 holds nothing."""
    shard = torch.nn.Parameter(torch.zeros([2, 1, 0][comm.rank]))
    shard.grad = [torch.tensor([1.8, -2.4]), torch.tensor([4.0]), torch.zeros(0)][comm.rank]
    before = clip_([shard], largest, order=order, comm=comm)
    return float(before), shard.grad, float(global_norm([], order=order, comm=comm))


@pytest.mark.parametrize("ranks", [2, 3])
def test_c31_norms_of_shards_are_those_of_the_whole(ranks):
    values = simulate(clipped, 1.0, 2.0, ranks=ranks).values
    assert [v[0] for v in values] == pytest.approx([5.0] * ranks) and [v[2] for v in values] == [0.0] * ranks
    after = torch.cat([v[1] for v in values])
    assert float(after.norm()) == pytest.approx(1.0, abs=1e-5) and after[0] == pytest.approx(0.36, abs=1e-5)
    assert [v[0] for v in simulate(clipped, 9.0, math.inf, ranks=ranks).values] == [4.0] * ranks
    halved = simulate(clipped, 2.0, math.inf, ranks=ranks).values
    assert torch.cat([v[1] for v in halved]) == pytest.approx(torch.tensor([0.9, -1.2, 2.0]), abs=1e-5)
    with pytest.raises(ValueError, match="allowed: 2.0, or math.inf"):
        global_norm([], order=1)


def clips(comm):
    model = MLP((3, 2), dtype=torch.float64)
    dp = DataParallel(model, comm)
    dp(torch.full((2, 3), 5.0 + comm.rank, dtype=torch.float64)).square().sum().backward()
    dp.synchronise()
    sent = comm.clock()
    before = dp.clip_(0.5)
    assert comm.clock() == sent  # every rank holds all gradients: no message
    return float(before), float(global_norm(p.grad for p in model.parameters()))


def test_replicas_clip_alike():
    values = simulate(clips, ranks=3).values
    assert len(set(values)) == 1 and values[0][0] > 0.5 and values[0][1] == pytest.approx(0.5, abs=1e-5)


# --- batch norm -------------------------------------------------------------------------------------------------------
def normed(comm, parts, synchronised, buffers="local"):
    model = torch.nn.Sequential(MLP((3, 4), dtype=torch.float64))
    model.append(BatchNorm(4, comm=comm if synchronised else None, dtype=torch.float64))
    dp = DataParallel(model, comm, average="tokens", buffers=buffers)
    x = parts[comm.rank]
    y = dp(x)
    (y * torch.arange(4.0) * x[:, :1]).sum().backward()
    dp.synchronise(tokens=len(x))
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}, {n: b.clone() for n, b in model.named_buffers()}


def test_synchronised_batch_norm_is_one_devices():
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [x[:4], x[4:5], x[5:]]
    one = torch.nn.Sequential(MLP((3, 4), dtype=torch.float64), torch.nn.BatchNorm1d(4, dtype=torch.float64))
    y = one(x)
    ((y * torch.arange(4.0) * x[:, :1]).sum() / 7).backward()
    want, state = {n: p.grad for n, p in one.named_parameters()}, dict(one.named_buffers())
    values = simulate(normed, parts, True, ranks=3).values
    assert (torch.cat([v[0] for v in values]) - y).abs().max() < 1e-12
    for _, grads, buffers in values:
        assert explain_difference(grads, want, bound=1e-12, world_size=3) == ""
        assert all((buffers[n] - state[n]).abs().max() < 1e-13 for n in buffers)
    local = simulate(normed, [x[:4], x[4:]], False).values
    said = explain_difference(local[0][1], want, bound=1e-12, world_size=2)
    assert "differ from one device's" in said and "exactly" not in said  # no factor mends it


def test_batch_norm_of_16_bits_sums_in_32():
    """3,000 rows of values near 100: their sum is beyond fp16, and so is the sum of their squares."""
    x = (torch.randn(3000, 2, generator=torch.Generator().manual_seed(0)) + 100).half()
    layer = BatchNorm(2, dtype=torch.float16)
    y, want = layer(x), torch.nn.functional.batch_norm(x.float(), None, None, training=True)
    assert y.dtype == torch.float16 and (y.float() - want).abs().max() <= 2**-10 * want.abs().max()
    assert (layer.running_mean.float() - x.float().mean(0) / 10).abs().max() <= 2**-10 * 10
    assert layer.running_var.isfinite().all()


def test_buffers_are_the_first_ranks_or_averaged_or_local():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [x[:4], x[4:]]
    ways = ("local", "first", "average")
    found = {how: [v[2]["1.running_mean"] for v in simulate(normed, parts, False, how).values] for how in ways}
    (a, b) = found["local"]
    assert not torch.equal(a, b)
    assert all(torch.equal(x, a) for x in found["first"]) and all(torch.equal(x, (a + b) / 2) for x in found["average"])


def evaluates(comm, right):
    """b13: rank 0 evaluates while the others wait at a barrier."""
    model = torch.nn.Sequential(MLP((3, 4)), BatchNorm(4, comm=comm))
    dp = DataParallel(model, comm)
    if comm.rank == 0:
        if right:
            model.eval()
            with torch.no_grad():
                dp(torch.ones(2, 3))
        else:
            dp(torch.ones(2, 3))
    comm.barrier()
    return True


@pytest.mark.parametrize("real", [False, True])
def test_b13_one_rank_evaluates(real):
    start = (lambda *a: fw.run(*a, ranks=2, stream=False)) if real else simulate
    assert start(evaluates, True).values == [True, True]
    with pytest.raises(fw.CommError) as found:
        start(evaluates, False)
    assert "barrier" in str(found.value) and "rank 0" in str(found.value) and "dp(torch.ones(2, 3))" in str(found.value)


def test_batch_norm_refuses_and_evaluates_alone():
    layer = BatchNorm(3)
    with pytest.raises(ValueError, match="allowed: \\(batch, 3, ...\\)"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match="needs at least 2"):
        layer(torch.ones(1, 3))
    layer(torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0)))
    one = layer.eval()(torch.ones(1, 3))
    assert one.shape == (1, 3)
