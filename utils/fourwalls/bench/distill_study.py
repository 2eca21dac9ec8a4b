"""When is a teacher worth more than labels? A small byte GPT beside a larger one, with few windows of text and with all of it.

The teacher learns from the whole training text. Two equal students start alike and take the same steps on the same windows, one
from the next byte alone, one from the teacher's opinion, too. At temperature 1 the opinion helps, at 2 it hardly does, though ten
digits bear 3: `unseen_share` says how much of a softened opinion lies on bytes that never come.

    gain = loss(student alone) - loss(student with teacher),  nats a byte of held-out text

Reference: Hinton, Vinyals, Dean 2015 (arXiv:1503.02531), section 6, where soft targets keep a model that sees 3% of the data from
overfitting.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch

from ..nn import text
from ..nn.gpt import GPT, GPTConfig
from ..numerics.distill import distill_loss
from .descend import descend

__all__ = ["TextStudy", "follow_text", "text_loss", "text_students", "unseen_share"]


class TextStudy:
    """Sizes. windows: how many pieces of `length` bytes the students see, again and again; None: new ones in each step."""

    def __init__(
        self, *, length=64, batch=8, windows: int | None = 64, steps=300, teacher_steps=600, held_out=256, temperature=1.0
    ):
        self.length, self.batch, self.windows = length, batch, windows
        self.steps, self.teacher_steps, self.held_out = steps, teacher_steps, held_out
        self.large = partial(GPTConfig, length=length, width=128, layers=2, heads=4)
        self.small = partial(GPTConfig, length=length, width=64, layers=1, heads=4)
        self.temperature, self.soft = temperature, 0.9

    def teacher(self, seed: int) -> GPT:
        """A GPT of this seed, trained on the whole training text."""
        model = GPT(self.large(seed=seed))
        return follow_text(model, model.loss, self, seed, steps=self.teacher_steps, lr=3e-3, batch=2 * self.batch)


def follow_text(
    model: GPT,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    study: TextStudy,
    seed: int,
    *,
    steps: int,
    lr: float,
    batch: int,
    windows: int | None = None,
) -> GPT:
    """`steps` steps of AdamW down loss_of(tokens (b, s), targets (b, s)); the rate rises, then falls to nearly 0. Returns the
    model. windows: how many of the training text come again and again (drawn by the seed); None: new ones in each step.
    """
    draw = partial(text.batch, length=study.length)
    few = None if windows is None else draw(seed, 0, batch=windows)
    dice = torch.Generator().manual_seed(seed)

    def batch_of(step):
        if few is None:
            return draw(seed, step, batch=batch)
        rows = torch.randint(windows, (batch,), generator=dice)
        return few[0][rows], few[1][rows]

    return descend(model, loss_of, batch_of, steps=steps, lr=lr)


@torch.no_grad()
def text_loss(model: GPT, study: TextStudy) -> float:
    """Nats a byte of text that nobody has seen."""
    return float(model.loss(*text.batch(5, 0, batch=study.held_out, length=study.length, split="held-out")))


@torch.no_grad()
def unseen_share(teacher: GPT, study: TextStudy) -> float:
    """How much of the teacher's softened opinion of held-out text lies on bytes that the training text does not hold."""
    absent = torch.ones(text.VOCABULARY, dtype=torch.bool)
    cut = len(text.text()) - len(text.text()) // text.HELD_OUT
    absent[list(set(text.text()[:cut]))] = False
    x, _ = text.batch(5, 0, batch=study.held_out, length=study.length, split="held-out")
    return float(torch.softmax(teacher(x) / study.temperature, -1)[..., absent].sum(-1).mean())


def text_students(teacher: GPT, study: TextStudy, seed: int) -> dict[str, float]:
    """Losses of held-out text, nats a byte: of the teacher, and of two equal students, who differ only in what they follow."""
    start = GPT(study.small(seed=10 + seed))
    alone, taught = copy.deepcopy(start), copy.deepcopy(start)

    def beside(x, y):
        with torch.no_grad():
            opinion = teacher(x)
        return distill_loss(taught(x), opinion, y, temperature=study.temperature, soft=study.soft)

    same = {"steps": study.steps, "lr": 5e-3, "batch": study.batch, "windows": study.windows}
    follow_text(alone, alone.loss, study, seed, **same)
    follow_text(taught, beside, study, seed, **same)
    return {name: text_loss(model, study) for name, model in (("teacher", teacher), ("alone", alone), ("with teacher", taught))}
