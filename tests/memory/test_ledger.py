"""The ledger against bytes counted by hand, on a CPU and on meta; and what it must not do."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fourwalls.cost.memory import end_activations, layer_activations, training_memory
from fourwalls.cost.shape import Shape
from fourwalls.memory.ledger import CATEGORIES, Ledger, step_profile
from fourwalls.nn.attention import attend
from fourwalls.nn.gpt import GPT, Block, GPTConfig
from fourwalls.nn.layers import GELU, LayerNorm, Linear
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import SGD, Adam

DEVICES = ["cpu", "meta"]


def small(device, dtype=torch.float32):
    kinds = {"device": device, "dtype": dtype}
    return torch.nn.Sequential(Linear(8, 16, **kinds), GELU(), LayerNorm(16, **kinds))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, w", [(torch.float32, 4), (torch.float64, 8)])
def test_linear_gelu_norm_to_the_byte(device, dtype, w):
    """n = 10 rows. Kept: the input (an input), Linear's output for GELU, GELU's output for the norm, a mean and 1/std a row."""
    model, x = small(device, dtype), torch.ones(10, 8, device=device, dtype=dtype)
    ledger = step_profile(model, lambda m: m(x).sum(), Adam(model.parameters()))
    params = (8 * 16 + 16 + 16 + 16) * w
    statistics = 2 * 10 * (w if device == "cpu" or w == 8 else 4)
    saved = 2 * 10 * 16 * w + statistics
    story = ledger.story()
    start, forward, backward, end = ledger.curve()[0], story.at("forward"), story.at("backward"), story.at("optimizer")
    assert start.bytes == dict.fromkeys(CATEGORIES, 0) | {"parameters": params, "inputs": 80 * w}
    assert forward.bytes == start.bytes | {"activations": saved, "temporary": w}  # the loss; the norm's output is gone
    assert backward.bytes["gradients"] == params and backward.bytes["activations"] == 0
    assert end.bytes["optimizer"] == 2 * params
    assert ledger.saved() == ledger.saved("forward") == saved == sum(t.bytes for t in ledger.saved_tensors())
    assert [(t.shape, t.bytes) for t in ledger.saved_tensors()] == [
        ((10, 16), 160 * w),
        ((10, 16), 160 * w),
        ((10, 1), statistics // 2),
        ((10, 1), statistics // 2),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_views_count_once_and_frees_are_seen(device):
    with Ledger() as ledger:
        a = torch.empty(1000, dtype=torch.uint8, device=device)
        views = [a[:10], a.view(10, 100), a[::2].unsqueeze(0), a.detach()]
        assert ledger.live == 1000
        b = a.clone()
        assert ledger.live == 2000
        del a
        assert ledger.live == 2000  # views hold the storage
        del views
        assert ledger.live == 1000
        del b
        assert ledger.live == 0
        c = torch.empty(300, dtype=torch.uint8, device=device)
        c.resize_(700)
        assert ledger.live == 700
    assert ledger.peak == 2000
    assert ledger.curve()[-1].total == 700
    assert all(m.total == sum(m.bytes.values()) for m in ledger.curve())


def test_same_wrapper_or_not():
    """A storage whose Python objects come and go, while autograd alone holds it, is neither lost nor counted twice."""
    with Ledger() as ledger:
        x = torch.ones(100, requires_grad=True)
        y = x.exp()  # 400 B, saved by exp, then only by the graph
        z = y.sum()
        del y
        gc.collect()
        torch.ones(1)
        assert ledger.live == 400 + 400 + 4
        z.backward()
        torch.ones(1)
    assert ledger.live == 400 + 400 + 4  # x, its gradient, z


def test_a_released_activation_is_no_longer_saved():
    with Ledger() as ledger:
        x = torch.ones(100, requires_grad=True)
        y = x.exp()
        z = y.sum()
        ledger.phase("backward")
        before = ledger.story().curve()[-1].bytes
        z.backward()
    after = ledger.curve()[-1].bytes
    assert before["activations"] == 400 and before["temporary"] == 404  # x was made in the block; z
    assert after["activations"] == 0 and after["temporary"] == 1204  # x, y, z and the gradient, which no model claims
    assert y.shape == (100,)


def korthikanti_case(dtype, device, p, b=3, s=32, h=64, a=4):
    config = GPTConfig(width=h, heads=a, length=s, layers=1, dropout=p)
    block = Block(config, device=device, dtype=dtype)
    x = torch.zeros(b, s, h, device=device, dtype=dtype).requires_grad_()
    ledger = step_profile(block, lambda m: m(x).sum())
    formula = layer_activations(config.shape(), b, dropout=p > 0, element=dtype.itemsize)
    return ledger, formula, x.numel() * x.element_size(), s * b


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "device, dtype, statistic",
    [("meta", torch.bfloat16, 4), ("cpu", torch.bfloat16, 2), ("cpu", torch.float32, 4), ("meta", torch.float64, 8)],
)
def test_one_block_equals_the_papers_formula(device, dtype, statistic, p):
    """34 s b h + 5 a s^2 b in 16 bits, to the byte: the block's input is counted as an input, and a norm keeps two numbers a
    row.
    """
    ledger, formula, block_input, rows = korthikanti_case(dtype, device, p)
    assert ledger.saved("forward") == formula.total - block_input + 2 * 2 * rows * statistic
    if p and dtype == torch.bfloat16:
        assert formula.total == 34 * 32 * 3 * 64 + 5 * 4 * 32 * 32 * 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_whole_model_equals_the_formula(p, tied):
    """All layers and both ends, in 16 bits: the formula, two float32 statistics a row of each norm, the loss's count."""
    config = GPTConfig(vocabulary=50, width=32, heads=2, length=16, layers=3, dropout=p, tied=tied)
    model = GPT(config, device="meta", dtype=torch.bfloat16)
    x = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    ledger = step_profile(model, lambda m: m.loss(x, x))
    layers = layer_activations(config.shape(), 2, dropout=p > 0).times(3).total
    ends = end_activations(config.shape(), 2, dropout=p > 0).total
    statistics = (2 * 3 + 1) * 2 * 4 * 2 * 16
    assert ledger.saved("forward") == layers + ends + statistics + 4
    state = training_memory(config.shape(), 2, optimizer="none", precision="half", dropout=p > 0)
    assert ledger.curve()[0].bytes["parameters"] == state["weights"].bytes


def test_175b_layer_on_meta():
    """Trial i04's bigger sister: s = 2048, b = 1, h = 12288, a = 96 without allocating any of it."""
    ledger, formula, block_input, rows = korthikanti_case(torch.bfloat16, "meta", 0.1, 1, 2048, 12288, 96)
    assert formula.total == 34 * 2048 * 12288 + 5 * 96 * 2048**2
    assert ledger.saved("forward") == formula.total - block_input + 16 * rows


def test_trial_i14_gated_mlp():
    """h = 4096, ff = 11008, s = 4096: every saved tensor is a line of the formula."""
    kinds = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
    up, gate, down = Linear(4096, 11008, **kinds), Linear(4096, 11008, **kinds), Linear(11008, 4096, **kinds)
    x = torch.empty(1, 4096, 4096, device="meta", dtype=torch.bfloat16).requires_grad_()
    with Ledger(torch.nn.ModuleList([up, gate, down]), inputs=[x]) as ledger:
        y = down(torch.nn.functional.silu(gate(x)) * up(x))
    formula = layer_activations(Shape(1, 4096, 32, 4096, 32000, ff=11008, gated=True), 1, dropout=False, flash=True)
    lines = ("input of the activation", "activation's output", "gated factor", "input of MLP down")
    assert ledger.saved() == sum(formula[name].bytes for name in lines) == 4 * 2 * 4096 * 11008
    assert len(ledger.saved_tensors()) == 4 and y.shape == x.shape


def test_fused_attention_keeps_no_square():
    sizes = {"width": 64, "heads": 4, "length": 128, "layers": 1}
    kept = []
    for fused in (False, True):
        block = Block(GPTConfig(fused=fused, **sizes))
        x = torch.zeros(2, 128, 64, requires_grad=True)
        kept.append(step_profile(block, lambda m, x=x: m(x).sum()))
    square = 2 * 4 * 128 * 128 * 4
    assert kept[0].saved() - kept[1].saved() > square - 2 * 128 * 64 * 4 * 2
    assert not any(t.bytes >= square for t in kept[1].saved_tensors())


def test_activations_grow_with_depth_and_not_parameters_with_batch():
    def saved(depth, rows):
        model = MLP((16,) * (depth + 1), activation="tanh")
        x = torch.zeros(rows, 16)
        ledger = step_profile(model, lambda m: m(x).sum())
        return ledger.saved("forward")

    assert saved(5, 8) - saved(4, 8) == saved(4, 8) - saved(3, 8) == 8 * 16 * 4  # Tanh keeps its output, which Linear also needs
    assert saved(5, 16) == 2 * saved(5, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer, factor", [(None, 0), (SGD, 0), (Adam, 2)])
def test_states(device, optimizer, factor):
    """Trial i13: the optimiser's bytes are its own; a second step finds them there."""
    model = GPT(GPTConfig(width=16, heads=2, layers=1, length=8), device=device)
    params = 4 * sum(p.numel() for p in model.parameters())
    x = torch.zeros(2, 8, dtype=torch.int64, device=device)
    opt = optimizer and optimizer(model.parameters())
    for again in (False, True):
        ledger = step_profile(model, lambda m: m.loss(x, x), opt)
        last = ledger.curve()[-1].bytes
        assert last["parameters"] == params == last["gradients"] and last["optimizer"] == factor * params
        assert ledger.curve()[0].bytes["optimizer"] == (factor * params if again else 0)
        assert ledger.curve()[0].bytes["inputs"] == 2 * 8 * 8


def test_torch_optimizer_is_seen_too():
    model, x = small("cpu"), torch.ones(3, 8)
    ledger = step_profile(model, lambda m: m(x).sum(), torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False))
    assert ledger.curve()[-1].bytes["optimizer"] == ledger.curve()[-1].bytes["parameters"]


def test_lines_and_modules():
    model, x = small("cpu"), torch.ones(10, 8)
    scale = torch.full((10, 16), 2.0, requires_grad=True)

    def loss(m):
        y = m(x)
        return (y * y.exp() * scale).sum()  # this line is the learner's own

    ledger = step_profile(model, loss)
    by_line = ledger.by_line()
    mine = {key: n for key, n in by_line.items() if key[0] == __file__}
    assert set(k[2] for k in mine) == {"loss"} and sum(mine.values()) == 3 * 640  # y, its exp, their product; scale is an input
    assert "this line is the learner's own" in ledger.lines()
    assert ledger.by_module()["1"] == 640 and ledger.by_module()["2"] == 640 + 80
    assert sum(by_line.values()) == sum(ledger.by_module().values()) == sum(t.bytes for t in ledger.saved_tensors())


def test_recompute_shows_a_sawtooth():
    """With the core recomputed nothing of size a s^2 is kept after forward, and it comes back in backward."""
    square, after, peaks = 2 * 64 * 64 * 4, [], []
    for again in (False, True):
        q, k, v = (torch.zeros(1, 2, 64, 8, requires_grad=True) for _ in range(3))
        with Ledger() as ledger:
            out = checkpoint(attend, q, k, v, use_reentrant=False) if again else attend(q, k, v)
            ledger.phase("forward")
            loss = out.sum()
            ledger.phase("backward")
            loss.backward()
        after.append(ledger.story().at("forward").total)
        peaks.append(ledger.peak)
    assert after[0] - after[1] >= square and after[1] < square
    assert min(peaks) > square


def test_trace_and_on_change():
    model, x = small("cpu"), torch.ones(10, 8)
    seen = []
    ledger = step_profile(model, lambda m: m(x).sum(), SGD(model.parameters()), on_change=seen.append)
    assert max(seen) == ledger.peak and len(seen) == len(ledger.curve()) - 1
    assert seen == [m.total for m in ledger.curve()[1:]] or max(seen) >= max(m.total for m in ledger.curve())
    trace = ledger.trace(rank=2)
    live = trace.where(kind="live")
    assert [e.bytes for e in live] == [m.total for m in ledger.curve()] and {e.rank for e in trace} == {2}
    assert [e.name for e in trace.where(kind="mark")] == ["forward", "backward", "optimizer"]
    assert all(a.start <= b.start for a, b in zip(live.events, live.events[1:], strict=False))
    assert [(name, begin < end) for name, begin, end in ledger.phases()] == [
        (n, True) for n in ("forward", "backward", "optimizer")
    ]
    assert [a[2] for a in ledger.phases()[:2]] == [b[1] for b in ledger.phases()[1:]] and len(ledger.rows()) == len(live)
    table = ledger.table()
    assert "after backward" in table and f"{ledger.peak:,}" in table and all(c in table for c in CATEGORIES if c != "buffers")


def test_values_do_not_change():
    """Watching a step must not alter it: same loss, same gradients, same errors."""
    grads = []
    for watch in (False, True):
        model, x = MLP((4, 8, 2), dropout=0.5), torch.ones(3, 4)
        torch.manual_seed(0)
        if watch:
            step_profile(model, lambda m, x=x: m(x).square().sum())
        else:
            model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), Ledger():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_what_out_overwrites_is_written():
    """`out=` is written as an argument by place is; and a saved tensor in it is refused, as torch itself refuses it."""
    for write in (lambda y: y.add_(1), lambda y: torch.add(y, 1, out=y), lambda y: torch.ones(3, out=y)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), Ledger() as ledger:
            x = torch.ones(3, requires_grad=True)
            y = x.exp()
            with torch.no_grad():
                write(y)
            y.sum().backward()
        assert [s.writes for s in ledger.story().storages[:2]] == [0, 1]


def test_leaves_nothing_behind():
    model, x = small("cpu"), torch.ones(3, 8)
    with pytest.raises(ZeroDivisionError), Ledger(model):
        model(x)
        raise ZeroDivisionError
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    out = model(x)
    assert out.grad_fn is not None and not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    ledger = Ledger()
    with ledger:
        pass
    assert ledger.peak == 0
    with ledger.__class__() as second:
        torch.ones(1)
    with pytest.raises(RuntimeError, match="make a new one"), second:
        pass
    with pytest.raises(ValueError, match="no phase"):
        second.saved("forward")


def test_peak_is_above_both_ends():
    """Backward's peak: most activations are still there when the first gradients arrive."""
    model = GPT(GPTConfig(layers=3, length=16))
    x = torch.zeros(2, 16, dtype=torch.int64)
    ledger = step_profile(model, lambda m: m.loss(x, x), Adam(model.parameters()))
    story = ledger.story()
    assert ledger.peak == max(m.total for m in ledger.curve()) > story.at("forward").total
    assert story.at("backward").bytes["activations"] == 0 < story.at("forward").bytes["activations"]
