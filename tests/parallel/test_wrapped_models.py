"""Models that are copied, saved, changed, wrapped again, or whose step breaks off: nothing is lost or counted twice unseen."""

import copy
import gc
import io
import threading
import time

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import clip_
from fourwalls.parallel.data import MODES, DataParallel
from fourwalls.parallel.zero import zero

NETWORK = uniform(1e-6, 1e9)
DOUBLE = torch.float64


def simulate(program, *args, ranks=2, **kwargs):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **kwargs).values


def build():
    return MLP((4, 5, 3), dtype=DOUBLE)


def rows(rank):
    return torch.full((2, 4), 1.0 + rank, dtype=DOUBLE)


def total(model):
    return sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)


def on_one(ranks=2, times=1):
    """The sum of all elements of the mean gradient, `times` over."""
    model = build()
    for rank in range(ranks):
        (model(rows(rank)).square().sum() * times / ranks).backward()
    return pytest.approx(total(model), rel=1e-13)


# --- copies -----------------------------------------------------------------------------------------------------------
def copied(comm, wrap):
    """A copy of a wrapped model is a model like any other; and so is what was saved."""
    model = build()
    wrapper = wrap(model, comm)
    twin, saved = copy.deepcopy(model), io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    other = torch.load(saved, weights_only=False)
    model.load_state_dict(twin.state_dict())
    for one in (twin, other):
        dp = DataParallel(one, comm)
        dp(rows(comm.rank)).square().sum().backward()
        dp.synchronise()
    return total(twin), total(other), total(model), wrapper is not None


WRAPS = {
    "overlapped": lambda model, comm: DataParallel(model, comm),
    "bucketed": lambda model, comm: DataParallel(model, comm, mode="bucketed"),
    "stage 1": lambda model, comm: zero(model, comm, stage=1),
    "stage 2": lambda model, comm: zero(model, comm, stage=2),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_copies_of_wrapped_models_are_free(wrap):
    for twin, other, own, _ in simulate(copied, wrap):
        assert twin == other == on_one() and own == 0


def comes_back(comm):
    model = build()
    DataParallel(model, comm)
    return model


def test_a_wrapped_model_comes_back_from_real_ranks():
    models = fw.run(comes_back, ranks=2, stream=False).values
    assert all(torch.equal(p, q) for p, q in zip(models[1].parameters(), build().parameters(), strict=True))


def wrapped_by_two(comm, first, second, close):
    model = build()
    one = WRAPS[first](model, comm)
    if close:
        one.close()
    two = WRAPS[second](model, comm)
    return one is not two


def test_two_wrappers_of_one_model_are_refused_where_one_works_in_backward():
    for first, second in (
        ("overlapped", "bucketed"),
        ("bucketed", "overlapped"),
        ("overlapped", "stage 2"),
        ("stage 1", "bucketed"),
    ):
        with pytest.raises(fw.RankError, match=r"this model is wrapped by \w+ already; close\(\) that one first"):
            simulate(wrapped_by_two, first, second, False)
        assert simulate(wrapped_by_two, first, second, True) == [True, True]
    assert simulate(wrapped_by_two, "bucketed", "bucketed", False) == [True, True]


# --- parameters that change -------------------------------------------------------------------------------------------
def changed(comm, wrap, how):
    model = build()
    if how == "thaws":
        model.layers[0].weight.requires_grad_(False)
    wrapper = wrap(model, comm)
    if how == "thaws":
        model.layers[0].weight.requires_grad_(True)
    if how == "freezes":
        model.layers[0].weight.requires_grad_(False)
    scale = 1.0
    if how == "comes":
        scale = model.late = torch.nn.Parameter(torch.ones((), dtype=DOUBLE))
    (model(rows(comm.rank)).square().sum() * scale).backward()
    wrapper.step() if hasattr(wrapper, "step") else wrapper.synchronise()
    return total(model)


@pytest.mark.parametrize("wrap", [*WRAPS.values(), lambda model, comm: zero(model, comm, stage=3)], ids=[*WRAPS, "stage 3"])
def test_parameters_that_thaw_or_come_late_are_named(wrap):
    with pytest.raises(fw.RankError, match=r"layers.0.weight was frozen when \w+ was made"):
        simulate(changed, wrap, "thaws")
    with pytest.raises(fw.RankError, match=r"late has come after \w+ was made"):
        simulate(changed, wrap, "comes")


def test_a_parameter_that_freezes_is_named_by_data_parallel():
    with pytest.raises(
        fw.RankError, match="layers.0.weight was trained when DataParallel was made and is frozen now; make a new"
    ):
        simulate(changed, WRAPS["overlapped"], "freezes")


# --- steps that go on or break off ------------------------------------------------------------------------------------
def without_zero_grad(comm, average, mode, clear):
    model = build()
    dp = DataParallel(model, comm, average=average, mode=mode)
    for step in range(2):
        if step and clear:
            model.zero_grad(set_to_none=clear == "none")
        dp(rows(comm.rank)).square().sum().backward()
        dp.synchronise(tokens=1 if average == "tokens" else None)
    return total(model)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_add_up_over_steps_or_say_that_they_cannot(mode):
    """A sum that every rank holds, summed again, counts n times: only the mean may be added to."""
    assert simulate(without_zero_grad, "ranks", mode, "") == [on_one(times=2)] * 2
    for average, clear in (("none", "none"), ("tokens", "zeros")):
        factor = 2 if average == "none" else 1
        assert simulate(without_zero_grad, average, mode, clear) == [on_one(times=factor)] * 2
        with pytest.raises(
            fw.RankError, match=r"step 1: layers\S+ still has the gradient of the last step.*zero_grad\(\) comes betw"
        ):
            simulate(without_zero_grad, average, mode, "")
        assert simulate(without_zero_grad, average, mode, "", ranks=1) == [on_one(1, times=2)]


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise KeyError("the reader's own")


def breaks_off(comm, how):
    """Backward raises half way, on every rank; the step is repeated."""
    model = build()
    stage = {"overlapped": 0}.get(how, how)
    wrapper = zero(model, comm, stage=stage) if stage else DataParallel(model, comm, bucket_bytes=1)
    in_the_middle = model.layers[1].register_forward_hook(lambda module, args, out: Breaks.apply(out))
    with pytest.raises(KeyError, match="own"):
        model(rows(comm.rank)).square().sum().backward()
    in_the_middle.remove()
    if how in (2, 3):
        with pytest.raises(RuntimeError, match="the last backward did not come to its end"):
            wrapper.reduce()
    if not stage:
        wrapper.synchronise(shadow=True)
    wrapper.zero_grad() if stage else model.zero_grad()
    model(rows(comm.rank)).square().sum().backward()
    if not stage:
        wrapper.synchronise()
        return total(model)
    return sum(float(g.sum()) for g in wrapper.full_gradients().values())


@pytest.mark.parametrize("how", ["overlapped", 1, 2, 3])
def test_a_backward_that_raised_can_be_repeated(how):
    assert simulate(breaks_off, how) == [on_one()] * 2


def forgets(comm):
    """Gradients that were made and forgotten are none: a step needs others."""
    model = build()
    sharded = zero(model, comm, stage=1)
    model(rows(comm.rank)).sum().backward()
    sharded.zero_grad()
    sharded.step()


def test_a_step_after_zero_grad_has_no_gradient():
    with pytest.raises(fw.RankError, match=r"step\(\) without a backward"):
        simulate(forgets)


def an_old_graph(comm, stage):
    """Backward of a forward that came before the step: its weights are others now, and autograd must know."""
    model = build()
    sharded = zero(model, comm, stage=stage)
    old = model(rows(comm.rank)).square().sum()
    model(rows(comm.rank)).sum().backward()
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_a_graph_from_before_the_step_is_refused(stage):
    assert simulate(an_old_graph, stage) == [True, True]


def all_inside(comm, mode):
    """All micro-batches inside no_sync, one of which raises; nested; then the sum."""
    model = build()
    dp = DataParallel(model, comm, mode=mode)
    with dp.no_sync():
        with pytest.raises(KeyError), dp.no_sync():
            raise KeyError
        for _ in range(2):
            dp(rows(comm.rank)).square().sum().backward()
        assert dp.all_reduces == 0
    dp.synchronise()
    return total(model)


@pytest.mark.parametrize("mode", MODES)
def test_everything_inside_no_sync_is_still_summed(mode):
    assert simulate(all_inside, mode) == [on_one(times=2)] * 2


def left_behind(comm, waits):
    """Threads of this rank after its wrapper is gone, with work given or done."""

    def use():
        model = build()
        dp = DataParallel(model, comm, bucket_bytes=1)
        dp(rows(comm.rank)).sum().backward()
        if waits:
            dp.synchronise()

    use()
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [t.name for t in threading.enumerate()]


def test_no_thread_outlives_its_wrapper():
    with fw.pool(ranks=2) as ranks:
        assert ranks.run(left_behind, True, stream=False).values == [["MainThread"]] * 2
        with pytest.raises(fw.CommError, match="never waited for what it had begun"):
            ranks.run(left_behind, False, stream=False)


# --- numbers and dtypes that are unusual ------------------------------------------------------------------------------
class Odd(torch.nn.Module):
    """A number, a matrix on its side, nothing, complex numbers; buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))
        self.side = torch.nn.Parameter(torch.arange(12.0, dtype=DOUBLE).view(3, 4).sin().t())
        self.nothing = torch.nn.Parameter(torch.zeros(0, dtype=DOUBLE))
        self.waves = torch.nn.Parameter(torch.ones(3, dtype=torch.complex128) * (1 + 2j))
        self.register_buffer("whole", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x):
        return (x @ self.side * self.number * self.waves.abs()).square().sum() + self.nothing.sum()


def odd_step(comm, mode, buffers):
    model = Odd()
    dp = DataParallel(model, comm, mode=mode, buffers=buffers)
    model.whole += comm.rank
    model.turned += comm.rank
    model.flags[0] = comm.rank == 0
    dp(rows(comm.rank)).backward()
    dp.synchronise()
    return {n: p.grad for n, p in model.named_parameters()}, model.whole.item(), model.turned[2].tolist(), model.flags.tolist()


@pytest.mark.parametrize("mode, buffers", [("overlapped", "first"), ("naive", "average"), ("bucketed", "local")])
def test_odd_parameters_and_buffers(mode, buffers):
    model = Odd()
    (sum(model(rows(r)) for r in range(2)) / 2).backward()
    values = simulate(odd_step, mode, buffers)
    for grads, *_ in values:
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-13, atol=0)
    kept = [v[1:] for v in values]
    shift = {"first": (0, 0), "average": (0.5, 0.5), "local": (0, 1)}[buffers]
    assert [turned for _, turned, _ in kept] == [[2.0 + s, 5.0 + s] for s in shift]
    assert [(whole, flags[0]) for whole, _, flags in kept] == [(3, True), (3, True) if buffers == "first" else (4, False)]


def sparse_table(comm):
    model = torch.nn.Embedding(5, 2, sparse=True)
    dp = DataParallel(model, comm, start="broadcast")
    model(torch.tensor([1, comm.rank])).sum().backward()
    dp.synchronise()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sparse_gradient_is_named(ranks):
    with pytest.raises(fw.RankError, match="the gradient of weight is sparse.*sparse=False"):
        simulate(sparse_table, ranks=ranks)


def counts(comm, tokens):
    model = build()
    dp = DataParallel(model, comm, average="tokens")
    dp(rows(0)).sum().backward()
    return dp.synchronise(tokens=tokens)


def test_tokens_are_whole_numbers():
    assert simulate(counts, torch.tensor(3)) == [6, 6]
    for tokens in (1.5, -3, True, "4"):
        with pytest.raises(fw.RankError, match="tokens is .*; a whole number of at least 0"):
            simulate(counts, tokens)


def test_clipping_to_nothing_and_with_gradients_that_are_no_numbers():
    def clipped(largest, spoil=None):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0 if spoil is None else spoil])
        return float(clip_([p], largest)), p.grad.tolist()

    assert clipped(0) == (5.0, [0.0, 0.0]) and clipped(float("inf")) == (5.0, [3.0, 4.0])
    norm, grads = clipped(1.0, float("inf"))
    assert norm == float("inf") and grads[0] == 0.0 and grads[1] != grads[1]  # as torch has it: seen, not hidden
    for largest in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="the largest norm is a number of at least 0"):
            clipped(largest)
    with pytest.raises(fw.RankError, match="at least 0"):
        simulate(lambda comm: zero(build(), comm, stage=1).clip_(-1.0))
