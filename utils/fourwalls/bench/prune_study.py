"""Pruned and distilled nets, trained here on handwritten digits with several seeds: what zeros cost, what a teacher is worth.

A deep net learns the digits in a second. A share of all its weights becomes zero in three ways: the same everywhere, the vital
layers spared, the least vital spared instead; the number of zeros is the same. Then a small student learns twice for the same
steps on the same pictures from the same start, once from labels alone, once beside the teacher.

    rise = loss(pruned) - loss(whole), nats;      gain = accuracy(student with teacher) - accuracy(student alone), points

Reference: Hinton et al. 2015 (arXiv:1503.02531); Han et al. 2015 (arXiv:1506.02626).
"""

import copy
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..nn.layers import cross_entropy
from ..nn.mlp import MLP
from ..nn.optim import AdamW
from ..numerics.digits import accuracy, digits
from ..numerics.distill import distill_loss
from ..numerics.prune import Sensitivity, prune_masks, scan, spare
from .record import Row

__all__ = ["PruneStudy", "follow", "loss", "of_seed", "right", "students", "summary", "weights_of", "zeros"]

MEASURES = {"zeros": ("rise of the loss", "gain", "nat"), "distillation": ("accuracy", "points", "%")}  # metric, of a gain, unit


class PruneStudy:
    """Sizes of the study. share: of all weights, to become zero. pictures: how many the students see; the teacher sees all."""

    def __init__(self, *, sizes=(64,) * 7 + (10,), small=(64, 32, 10), steps=400, lessons=200, pictures=100, share=0.5):
        self.sizes, self.small, self.steps, self.lessons = sizes, small, steps, lessons
        self.pictures, self.share = pictures, share
        self.temperature, self.soft = 3.0, 0.9

    def teacher(self, seed: int) -> MLP:
        """A net of this seed, trained `steps` steps on all training pictures."""
        model = MLP(self.sizes, seed=seed)
        return follow(model, lambda x, y: cross_entropy(model(x), y), seed, steps=self.steps)


def _pictures(held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, far_x, far_y = digits()
    return (far_x.flatten(1), far_y) if held_out else (x.flatten(1), y)


def follow(
    model: nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    seed: int,
    *,
    steps: int,
    pictures: int | None = None,
    lr: float = 2e-3,
    batch: int = 64,
) -> nn.Module:
    """`steps` steps of AdamW down loss_of(pictures (b, 64), labels (b,)); the rate falls to 0. Returns the model.

    Batches are drawn from the first `pictures` of training (None: all).
    """
    x, y = _pictures(held_out=False)
    dice, optimizer = torch.Generator().manual_seed(seed), AdamW(model.parameters())
    for step in range(steps):
        rows = torch.randint(pictures or len(y), (batch,), generator=dice)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss_of(x[rows], y[rows]).backward()
        optimizer.step()
    return model


@torch.no_grad()
def loss(model: nn.Module) -> float:
    """Cross-entropy of the held-out pictures, nats."""
    x, y = _pictures(held_out=True)
    return float(cross_entropy(model(x), y))


def right(model: nn.Module) -> float:
    """Per cent of the held-out pictures that are named right."""
    return accuracy(model, *_pictures(held_out=True))


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weight matrices by name: what is pruned."""
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


def zeros(model: nn.Module, share: float) -> tuple[dict[str, float], list[Sensitivity]]:
    """({form: rise of the loss}, the scan): `share` of all weights zero, by magnitude, equally many in each form.

    "vital spared" leaves the matrix alone that the scan puts first; "another spared" the least vital of the same size.
    """
    sizes = {name: p.numel() for name, p in weights_of(model).items()}
    lines = scan(model, loss, names=list(sizes), share=share)
    first = lines[0].name
    last = next(line.name for line in reversed(lines) if sizes[line.name] == sizes[first])
    forms = {
        "same share everywhere": share,
        "vital spared": spare(sizes, [first], share),
        "another spared": spare(sizes, [last], share),
    }
    base, found = loss(model), {}
    for form, shares in forms.items():
        pruned = copy.deepcopy(model)
        prune_masks(weights_of(pruned), shares).apply_()
        found[form] = loss(pruned) - base
    return found, lines


def students(teacher: nn.Module, study: PruneStudy, seed: int) -> dict[str, float]:
    """Accuracies, in per cent, of the teacher and of two equal students: only the loss they follow differs."""
    start = MLP(study.small, seed=seed)
    alone, taught = copy.deepcopy(start), copy.deepcopy(start)

    def beside(x, y):
        with torch.no_grad():
            opinion = teacher(x)
        return distill_loss(taught(x), opinion, y, temperature=study.temperature, soft=study.soft)

    same = {"steps": study.lessons, "pictures": study.pictures, "lr": 1e-2}
    follow(alone, lambda x, y: cross_entropy(alone(x), y), seed, **same)
    follow(taught, beside, seed, **same)
    return {"teacher": right(teacher), "alone": right(alone), "with teacher": right(taught)}


def of_seed(seed: int, study: PruneStudy, say: Callable[[str], None] = lambda text: None) -> dict[tuple[str, str], float]:
    """{(what, form): figure} for one seed."""
    say(f"prune, seed {seed}")
    teacher = study.teacher(seed)
    found = {("zeros", form): rise for form, rise in zeros(teacher, study.share)[0].items()}
    points = students(teacher, study, seed)
    found |= {("distillation", form): value for form, value in points.items()}
    found["distillation", "gain"] = points["with teacher"] - points["alone"]
    return found


def summary(runs: list[dict]) -> Iterator[Row]:
    """One row for each (what, form) over several seeds: the mean, the smallest and the largest."""
    for what, form in runs[0]:
        values = [run[what, form] for run in runs]
        metric, gain, unit = MEASURES.get(what, ("loss", "gain", "nat"))
        yield Row(
            benchmark="prune",
            case={"what": what, "form": form, "seeds": len(runs)},
            metric=gain if form == "gain" else metric,
            value=statistics.mean(values),
            unit=unit,
            low=min(values),
            high=max(values),
        )
