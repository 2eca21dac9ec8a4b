"""Judges stage 3 of lab 3: layers whose weights are there only while they are used.

A chain of layers goes forward and back; loss and gradients are those of one device. What a block leaves behind is seen by
references that keep nothing alive, and weighed by the system. An error inside the last block must come out and leave nothing.

    whole weights at a time <= two layers          elements all ranks send = 3 (n - 1) Psi

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.2.2.
"""

import torch

from . import carry
from .expect import close, draw, expect, tensor
from .lab_zero_checks import LAYERS, SLACK, WIDE, bounds, mean_over_ranks, on_the_way, ready
from .problem import Session
from .process_memory import Scale, weigh

__all__ = ["borrow_cost", "given_back", "live_weights", "loss_and_gradients"]


def _borrowed(s: Session, n, widths, *, root=None, rows=2, each=None):
    """(outcome, by rank loss and gradient slices that are right) of a chain of layers."""
    how = ready(s, root)
    shapes = list(zip(widths, widths[1:], strict=False))
    weights = [draw(s, *shape) / shape[0] ** 0.5 for shape in shapes]
    xs = [draw(s, rows, widths[0]) for _ in range(n)]
    cuts = [[slice(*bounds(how, w.numel(), n, r)) for w in weights] for r in range(n)]
    args = [(xs[r], [w.reshape(-1)[cut].clone() for w, cut in zip(weights, cuts[r], strict=True)]) for r in range(n)]
    outcome = s.run(how, [list(shape) for shape in shapes], ranks=n, per_rank=args, each=each)
    losses, grads = [], []
    for x in xs:
        leaves = [w.clone().requires_grad_() for w in weights]
        for w in leaves:
            x = torch.tanh(x @ w)
        loss = x.square().sum() / rows
        grads.append(torch.autograd.grad(loss, leaves))
        losses.append(loss.detach())
    means = [mean_over_ranks(how, [grads[r][k] for r in range(n)]).reshape(-1) for k in range(len(weights))]
    return outcome, [(losses[r], [mean[cut] for mean, cut in zip(means, cuts[r], strict=True)]) for r in range(n)]


def loss_and_gradients(s: Session):
    """A chain of layers of odd sizes, also of fewer elements than ranks."""
    for n, widths in ((4, (5, 4, 6, 3)), (1, (3, 2)), (s.dice.choice((2, 3)), (4, 7, 1)), (5, (1, 2, 2))):
        outcome, exact = _borrowed(s, n, widths)
        _compare(outcome, exact, f"{n} ranks, widths {', '.join(map(str, widths))}")
        s.remembered[n, "borrowed"] = outcome, widths
    return carry.words(s)


def _compare(outcome, exact, where):
    for r, value in enumerate(outcome.values):
        loss, parts = exact[r]
        close(tensor(value["loss"], (), torch.float64, "the loss"), loss, 1e-9, f"{where}: the loss of rank {r}")
        for k, (got, wanted) in enumerate(zip(value["grads"], parts, strict=True)):
            got = tensor(got, wanted.shape, torch.float64, f"{where}: rank {r}: the gradient of layer {k}")
            close(got, wanted, 1e-9, f"{where}: rank {r}: the gradient of layer {k}", "which weight was it computed with?")


def _first_borrowed(s: Session):
    if (4, "borrowed") not in s.remembered:
        widths = (5, 4, 6, 3)
        s.remembered[4, "borrowed"] = _borrowed(s, 4, widths)[0], widths
    return s.remembered[4, "borrowed"]


def given_back(s: Session):
    """Nothing whole is left after a block, or after an error in it."""
    outcome, _ = _first_borrowed(s)
    for r, value in enumerate(outcome.values):
        left = value["left"]
        expect(not left, f"4 ranks: rank {r}: {left} bytes of a whole weight are left behind a block", "who still points at it?")
        expect(value["came"] is True, f"4 ranks: rank {r}: an error inside the block did not come out of it")
        left = value["left by an error"]
        expect(not left, f"4 ranks: rank {r}: an error inside the block leaves {left} bytes", "what runs after an error, too?")


def live_weights(s: Session):
    """Whole weights at a time, as the blocks saw them, and the growth of processes with megabytes."""
    outcome, widths = _first_borrowed(s)
    largest = sorted(a * b * 8 for a, b in zip(widths, widths[1:], strict=False))
    for r, value in enumerate(outcome.values):
        said = f"4 ranks: rank {r} held {value['most']} bytes of whole weights at a time; all layers have {sum(largest)}"
        expect(value["most"] <= sum(largest[-2:]), said, "which layers does it need at once?")
    scale, n, whole = Scale(s.apart.pid), 2, LAYERS * WIDE * WIDE * 8
    _compare(*_borrowed(s, n, (WIDE,) * (LAYERS + 1), each=scale), f"{n} ranks, {LAYERS} layers of {WIDE} x {WIDE}")
    return weigh(scale, n, 2 * whole // n + 2 * WIDE * WIDE * 8 + SLACK, whole, "weights")  # shards of weights and gradients


def borrow_cost(s: Session):
    """Two gathers by the learner's block, one reduce-scatter of ours."""
    outcome, widths = _first_borrowed(s)
    psi, sent = sum(a * b for a, b in zip(widths, widths[1:], strict=False)), outcome.trace.bytes_sent()
    # the error at the end opens the first block once more
    wanted = 3 * (3 * psi + widths[0] * widths[1]) * 8
    expect(sent == wanted, f"4 ranks: {sent:,} bytes in all, target {wanted:,}", "what is gathered, how often, and by whom?")
    root = s.dice.randrange(3)
    outcome, exact = _borrowed(s, 3, (3, 4, 2), root=root)
    _compare(outcome, exact, "3 ranks, widths 3, 4, 2")
    on_the_way(outcome, root)
