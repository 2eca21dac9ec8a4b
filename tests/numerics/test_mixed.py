"""Autocast beside torch's, operator by operator and step by step; master weights; bytes a parameter, measured; planted bugs."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from fourwalls.cost.memory import bytes_per_parameter
from fourwalls.memory.ledger import step_profile
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.layers import LayerNorm
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import SGD, Adam
from fourwalls.nn.text import batch
from fourwalls.numerics.autocast import Autocast, through
from fourwalls.numerics.loss_scale import LossScaler
from fourwalls.numerics.mixed import MasterWeights, lower

LOW, FULL = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So many small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the table ------------------------------------------------------------------------------------------------------
# x (4, 8), w (8, 8), both of one dtype; t (4,) of whole numbers
T = torch.tensor([0, 3, 7, 1])
OPERATORS = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "x @ w": lambda x, w: x @ w,
    "matmul": lambda x, w: torch.matmul(x, w),
    "mm": lambda x, w: x.mm(w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :4, None]),
    "conv2d": lambda x, w: F.conv2d(x[None, None], w[None, None, :3, :3]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,)),
    "cross_entropy": lambda x, w: F.cross_entropy(x, T),
    "nll_loss": lambda x, w: F.nll_loss(x, T),
    "mse_loss": lambda x, w: F.mse_loss(x, x * 2),
    "l1_loss": lambda x, w: F.l1_loss(x, x * 2),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, x * 2),
    "bce_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "sum": lambda x, w: x.sum(),
    "mean": lambda x, w: x.mean(),
    "cumsum": lambda x, w: x.cumsum(0),
    "prod": lambda x, w: x.prod(),
    "norm": lambda x, w: x.norm(),
    "logsumexp": lambda x, w: torch.logsumexp(x, -1),
    "exp": lambda x, w: x.exp(),
    "pow": lambda x, w: x.pow(2),
    "gelu": lambda x, w: F.gelu(x, approximate="tanh"),
    "relu": lambda x, w: x.relu(),
    "add": lambda x, w: x + x,
    "mul": lambda x, w: x * 2,
    "cat": lambda x, w: torch.cat([x, w.float()]),
    "stack": lambda x, w: torch.stack([x, x.float()]),
    "embedding": lambda x, w: F.embedding(T, w),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "amax": lambda x, w: x.amax(),
}
# beyond torch's list for CPUs
IN_FULL = ("softmax", "log_softmax", "layer_norm", "rms_norm", "sum", "cumsum", "norm", "logsumexp", "exp", "pow")


def operands(dtype):
    dice = torch.Generator().manual_seed(0)
    return torch.randn(4, 8, generator=dice).to(dtype), torch.randn(8, 8, generator=dice).to(dtype)


@pytest.mark.parametrize("dtype", [FULL, LOW])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_gives_torchs_dtype_and_bits(name, dtype):
    x, w = operands(dtype)
    with torch.autocast("cpu", LOW):
        torch.manual_seed(0)
        want = OPERATORS[name](x, w)
    with Autocast("bf16", table="cpu"):
        torch.manual_seed(0)
        got = OPERATORS[name](x, w)
    assert got.dtype == want.dtype and torch.equal(got, want)
    with Autocast("bf16"):  # the careful table
        careful = OPERATORS[name](x, w)
    assert careful.dtype == (FULL if name in IN_FULL else want.dtype)


def test_fp64_and_whole_numbers_pass_untouched():
    x = torch.ones(2, 2, dtype=torch.float64)
    with Autocast("bf16"):
        assert torch.softmax(x, -1).dtype == torch.float64
        assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype == torch.int64


# --- a model --------------------------------------------------------------------------------------------------------
def region(kind):
    if kind == "torch":
        return torch.autocast("cpu", LOW)
    return Autocast("bf16", **({"arithmetic": "float32"} if kind == "float32" else {"table": kind}))


@cache
def losses(kind, steps=6):
    """The losses of a small GPT, and its gradients in the last step."""
    model = GPT(GPTConfig(length=16, width=32, layers=1, heads=2))
    optimizer = Adam(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(0, step, 0, batch=4, length=16)
        if kind == "fp32":
            loss = model.loss(x, y)
        else:
            with region(kind):
                loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, {name: p.grad for name, p in model.named_parameters()}


def test_a_model_in_the_same_table_has_torchs_losses_and_gradients():
    (ours, grads), (theirs, want) = losses("cpu"), losses("torch")
    assert ours == theirs and ours != losses("fp32")[0]
    assert all(g.dtype == FULL and torch.equal(g, want[name]) for name, g in grads.items())


@pytest.mark.parametrize("kind", ["careful", "float32"])
def test_other_arithmetic_stays_close_to_torchs_and_to_fp32(kind):
    """Each logit passes through about a dozen roundings of 2^-9; logits here are below 1, losses near ln 256."""
    bound = 12 * 2**-9
    for other in ("torch", "fp32"):
        gaps = [abs(a - b) for a, b in zip(losses(kind)[0], losses(other)[0], strict=True)]
        assert 0 < max(gaps) < bound
        assert max(abs(a + 10 * bound - b) for a, b in zip(losses(kind)[0], losses(other)[0], strict=True)) > bound


def test_float32_arithmetic_rounds_what_goes_in_and_comes_out_and_the_gradient():
    x, w = torch.tensor([[1.001, 300.0]], requires_grad=True), torch.tensor([[1.0, 300.0]])
    with Autocast("fp16", arithmetic="float32"):
        y = F.linear(x, w)
    assert y.dtype == FULL and y.isinf().all()  # 90001 is beyond fp16
    with Autocast("bf16", arithmetic="float32"):
        y = F.linear(x, w)
    # bf16(1.001) = 1 and bf16(300) = 300; 90001 lies between ticks 512 apart
    assert y.item() == torch.tensor(90001.0).bfloat16().item()
    z = torch.tensor([3.0], requires_grad=True)
    through(z, torch.float16).backward(torch.tensor([2e-8]))
    assert z.grad.item() == 0  # below fp16's last tick


def test_a_weight_is_cast_once_and_again_after_a_step():
    w, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    region_ = Autocast("bf16")
    with region_:
        first = region_._to_low(w)
        assert F.linear(x, w).tolist() == [[2.0, 2.0]] and region_._to_low(w) is first
        with torch.no_grad():
            w.add_(1)
        assert F.linear(x, w).tolist() == [[4.0, 4.0]]  # torch's own cache would still say 2
    assert not region_._copies
    with region_, torch.no_grad():
        assert not region_._to_low(w).requires_grad
    with region_:
        with torch.no_grad():
            region_._to_low(w)
        assert region_._to_low(w).requires_grad  # a copy made without gradients does not serve a step


def test_a_step_inside_a_region_is_refused_by_name():
    w = torch.nn.Parameter(torch.ones(2, dtype=LOW))
    opt = MasterWeights([w], lambda masters: SGD(masters, lr=1.0))
    w.grad = torch.ones_like(w)
    with Autocast("bf16"), pytest.raises(ValueError, match="leave the with-block"):
        opt.step()


@pytest.mark.parametrize("options", [{"format": "fp8_e4m3"}, {"table": "gpu"}, {"arithmetic": "fp16"}])
def test_other_words_are_refused(options):
    with pytest.raises(ValueError, match="allowed: "):
        Autocast(**{"format": "bf16", **options})
    if "format" in options:
        with pytest.raises(ValueError, match="allowed: bf16, fp16"):
            lower(MLP((2, 2)), "fp8_e4m3")


# --- master weights -------------------------------------------------------------------------------------------------
class NoMasters(MasterWeights):
    """The bug: the optimiser steps the 16-bit weights themselves."""

    def __init__(self, params, make_optimizer):
        super().__init__(params, make_optimizer)
        self.optimizer = make_optimizer(self.params)

    def step(self):
        self.optimizer.step()


class ReadsTheWeightBack(MasterWeights):
    """The bug: each step starts from the rounded weight instead of from the master."""

    def step(self):
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                master.copy_(p)
        return super().step()


def after_100_steps(kind, dtype=LOW):
    """c38: w = 1, a hundred times w -= 6e-4."""
    w = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    opt = kind([w], lambda masters: SGD(masters, lr=6e-4))
    for _ in range(100):
        w.grad = torch.ones_like(w)
        opt.step()
    return w.item(), opt.masters[0].item()


def test_small_updates_are_kept_by_a_master_copy():
    weight, master = after_100_steps(MasterWeights)
    assert abs(master - 0.94) < 100 * 2**-24 and weight == torch.tensor(master).bfloat16().item()
    assert after_100_steps(MasterWeights, FULL)[0] == master  # fp32 is its own master
    for bug in (NoMasters, ReadsTheWeightBack):
        assert after_100_steps(bug)[0] == 1.0


def test_steps_are_those_of_fp32_on_rounded_gradients():
    """The oracle: fp32 weights, gradients taken at their rounding and rounded themselves."""
    model, oracle = lower(MLP((6, 5, 3), seed=1)), MLP((6, 5, 3), seed=1)
    opt = MasterWeights(model.parameters(), lambda masters: Adam(masters, lr=1e-2))
    adam = Adam(oracle.parameters(), lr=1e-2)
    # masters start from the rounded weights
    with torch.no_grad():
        for p, q in zip(oracle.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    for step in range(5):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        for p, q in zip(oracle.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.float()
        adam.step()
        opt.step()
        assert all(p.grad is None for p in [*opt.params, *opt.masters])
        for p, q, m in zip(oracle.parameters(), model.parameters(), opt.masters, strict=True):
            assert torch.equal(m, p) and torch.equal(q, p.bfloat16())


def test_with_a_scaler_and_a_clip_the_order_is_kept():
    w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float16))
    scaler = LossScaler(scale=2.0**14)
    opt = MasterWeights([w], lambda masters: SGD(masters, lr=1.0), scaler=scaler)
    scaler.scale(0.5 * w.float().sum()).backward()
    assert w.grad.dtype == torch.float16 and w.grad.item() == 2.0**13
    assert opt.step(clip=1.0) and w.item() == 1.5
    w.grad = torch.full((1,), torch.inf, dtype=torch.float16)
    assert not opt.step() and w.item() == 1.5 and scaler.value == 2.0**13 and w.grad is None


@pytest.mark.parametrize("gradient", [0.0, 6e-8, torch.inf, torch.nan])
def test_zero_denormal_infinite_and_nan_gradients(gradient):
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    w.grad = torch.tensor([gradient, 0.0, 0.0], dtype=torch.float16)
    opt = MasterWeights([w], lambda masters: SGD(masters, lr=1.0))
    assert opt.step() is math.isfinite(gradient)
    assert w.tolist() == [1.0] * 3 and (opt.masters[0][0] < 1) == (gradient == 6e-8)


def test_norms_may_stay_and_states_go_on():
    model = lower(GPT(GPTConfig(length=8, width=16, layers=1, heads=2)), keep=(LayerNorm,))
    dtypes = {p.dtype for name, p in model.named_parameters() if "norm" in name}
    assert dtypes == {FULL} and model.tokens.weight.dtype == LOW
    mlp = lower(MLP((4, 3)))
    opts = [MasterWeights(mlp.parameters(), lambda m: Adam(m, lr=0.1), scaler=LossScaler(scale=4.0)) for _ in range(2)]
    mlp(torch.ones(2, 4, dtype=LOW)).sum().backward()
    opts[0].step()
    opts[1].load_state_dict(opts[0].state_dict())
    assert all(torch.equal(a, b) for a, b in zip(opts[0].masters, opts[1].masters, strict=True))
    assert opts[1].optimizer.state_dict()["state"][0]["step"] == 1 and opts[1].scaler.good == 1
    with pytest.raises(ValueError, match="saved masters have shapes"):
        MasterWeights(lower(MLP((4, 2))).parameters(), lambda m: SGD(m)).load_state_dict(opts[0].state_dict())
    with pytest.raises(ValueError, match="parameters are floats"):
        MasterWeights([torch.nn.Parameter(torch.ones(1, dtype=torch.int32), requires_grad=False)], SGD)


# --- bytes ----------------------------------------------------------------------------------------------------------
def measured(precision):
    """Bytes a parameter by category after backward (in the second step), and at the end of the optimiser's step."""
    model = MLP((64, 128, 64))
    if precision == "mixed":
        model = lower(model)
        optimizer = MasterWeights(model.parameters(), lambda masters: Adam(masters, lr=1e-3))
    else:
        optimizer = Adam(model.parameters(), lr=1e-3)
    x = torch.ones(1, 64, dtype=next(model.parameters()).dtype)
    count = sum(p.numel() for p in model.parameters())
    for _ in range(2):
        ledger = step_profile(model, lambda m: m(x).float().square().mean(), optimizer)
    story = ledger.story()
    after, end = story.at("backward").bytes, story.at("optimizer").bytes
    return {k: v / count for k, v in after.items()}, {k: v / count for k, v in end.items()}, story, count


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_measured_bytes_are_the_table_and_the_table_adds_up(precision):
    """i10: fp16 mixed 2 + 2 + 12, fp32 4 + 4 + 8; both 16."""
    table = bytes_per_parameter("adam", precision)
    lines = {term.name: int(term.total) for term in table}
    after, end, _, _ = measured(precision)
    assert after["parameters"] == lines["weights"] and after["gradients"] == lines["gradients"]
    assert after["optimizer"] == sum(lines.values()) - lines["weights"] - lines["gradients"]
    assert after["parameters"] + after["gradients"] + after["optimizer"] == sum(lines.values()) == table.total == 16
    assert end["parameters"] == lines["weights"] and end["optimizer"] == after["optimizer"]


def test_at_the_step_two_bytes_more_for_a_moment():
    _, _, story, count = measured("mixed")
    curve = story.curve()
    first = story.ends()["backward"]
    most = max(m.total for m in curve[first:]) / count
    assert 16 < most < 2 + 4 + 12 + 4 + 2 + 0.5  # and Adam's own square root for one tensor, the largest half of all
