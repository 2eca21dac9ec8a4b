"""A backward pass in two halves: I makes nothing that W makes, and together they give the gradients of the whole."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from fourwalls.parallel.pipeline.running import RunningStage
from fourwalls.parallel.pipeline.split_backward import Later, splitting

from .small_stages import BOUND, W, batch, layer


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
