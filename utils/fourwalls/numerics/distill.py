"""Distillation: a small student learns from a trained teacher's whole opinion, not from the one right answer alone.

The teacher gives every token a probability. Divided by a temperature T its logits become soft, and the student sees which wrong
answers are nearly right. A gradient of soft targets shrinks by T^2 (once for the student's logits, once because both opinions
draw near each other), so the loss is multiplied by T^2, and T does not change how hard labels and soft ones are mixed. The sum
runs over the vocabulary, the mean over rows: a mean over both would make the teacher V times too quiet.

    L = (1 - w) CE(z, y) + w T^2 mean_rows KL(softmax(t/T) || softmax(z/T))
    dL_soft/dz = T (softmax(z/T) - softmax(t/T)) / rows

Reference: Hinton, Vinyals, Dean 2015 (arXiv:1503.02531); Jiao et al. 2020 (arXiv:1909.10351) for hidden states; Sanh et al. 2019
(arXiv:1910.01108) for a student made of its teacher's layers.
"""

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ..nn.gpt import GPT
from ..nn.layers import Linear, cross_entropy

__all__ = [
    "Distillation",
    "HiddenMatch",
    "check_student",
    "chosen_layers",
    "distill_loss",
    "hidden_states",
    "soft_loss",
    "student_of",
]


def soft_loss(student: torch.Tensor, teacher: torch.Tensor, *, temperature: float = 2.0) -> torch.Tensor:
    """T^2 KL(teacher || student) of logits (..., V), summed over V, mean over all rows; 0-d, in nats times T^2.

    No gradient reaches the teacher. 16-bit logits are taken to float32 first. ValueError for shapes that differ, for no rows, and
    for a temperature that is not above 0 and finite.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"the teacher's logits {tuple(teacher.shape)} do not fit the student's {tuple(student.shape)}; allowed: equal shapes "
            "(one vocabulary, the same tokens)"
        )
    if student.dim() == 0 or not student.numel():
        raise ValueError(f"logits {tuple(student.shape)} hold no row; allowed: (..., V) with at least one")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature is {temperature!r}; allowed: above 0 and finite, such as 2.0 (1.0 leaves the logits as they are)"
        )
    wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    ours = F.log_softmax(student.to(wide) / temperature, -1)
    theirs = F.log_softmax(teacher.detach().to(wide) / temperature, -1)
    share = theirs.exp()
    # what the teacher rules out (a logit of -inf) adds 0, not 0 * inf, which F.kl_div takes; its "mean" divides by V as well
    apart = torch.where(share == 0, 0.0, theirs - ours)
    return temperature**2 * (share * apart).sum(-1).mean()


def distill_loss(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, *, temperature: float = 2.0, soft: float = 0.5
) -> torch.Tensor:
    """(1 - soft) * cross-entropy of hard targets (...) + soft * `soft_loss`; logits (..., V). ValueError for another `soft`."""
    if not 0 <= soft <= 1:
        raise ValueError(f"soft is {soft!r}, the teacher's share of the loss; allowed: 0 (labels alone) to 1 (the teacher alone)")
    return (1 - soft) * cross_entropy(student, targets) + soft * soft_loss(student, teacher, temperature=temperature)


def check_student(student: nn.Module, teacher: nn.Module) -> None:
    """ValueError where the vocabularies differ; a RuntimeWarning where the student is larger: it may learn, nothing shrinks."""
    ours, theirs = (getattr(getattr(m, "config", None), "vocabulary", None) for m in (student, teacher))
    if ours != theirs:
        raise ValueError(f"the student's vocabulary is {ours}, the teacher's {theirs}; their opinions are about different words")
    small, large = (sum(p.numel() for p in m.parameters()) for m in (student, teacher))
    if small > large:
        warnings.warn(
            f"the student has {small:,} parameters, its teacher {large:,}: it is larger, so distillation saves nothing here",
            RuntimeWarning,
            stacklevel=3,
        )


def chosen_layers(layers: int, kept: int) -> list[int]:
    """Which of a teacher's layers a student of `kept` layers takes: evenly spread, first and last among them.

    chosen_layers(6, 3) -> [0, 2, 5]. One layer: the first, which can read embeddings. ValueError for more than there are.
    """
    if not isinstance(kept, int) or isinstance(kept, bool) or not 1 <= kept <= layers:
        raise ValueError(f"a student of {kept!r} layers from a teacher of {layers}; allowed: 1 to {layers}")
    return [0] if kept == 1 else [k * (layers - 1) // (kept - 1) for k in range(kept)]


def student_of(teacher: GPT, *, layers: int | None = None, which: Sequence[int] | None = None) -> GPT:
    """A GPT with some of the teacher's layers (`layers` many, evenly spread, or those of `which`) and all its tables, copied.

    Later training of one leaves the other alone. ValueError for layers that the teacher does not have, or that come twice.
    """
    depth = len(teacher.blocks)
    if (layers is None) == (which is None):
        raise ValueError(f"give either layers=..., a number from 1 to {depth}, or which=..., a list of the teacher's layers")
    which = chosen_layers(depth, layers) if which is None else list(which)
    if not which or len(set(which)) < len(which) or not all(0 <= k < depth for k in which):
        raise ValueError(f"layers {which} of a teacher of {depth}; allowed: different ones of 0 to {depth - 1}, at least one")
    student = GPT(replace(teacher.config, layers=len(which)), device="meta")
    for name, module in teacher.named_children():
        if name != "blocks":
            setattr(student, name, copy.deepcopy(module))
    student.blocks = nn.ModuleList(copy.deepcopy(teacher.blocks[k]) for k in which)
    return student.requires_grad_(True)


def hidden_states(model: GPT, tokens: torch.Tensor) -> list[torch.Tensor]:
    """tokens (b, s) -> what stands on the residual stream after each block, L tensors (b, s, h)."""
    states = [model.embed(tokens)]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states[1:]


class HiddenMatch(nn.Module):
    """Mean squared distance between the student's hidden states, projected, and the teacher's: one projection a pair of layers.

    pairs: (student's layer, teacher's layer). forward(student's states, teacher's states) -> 0-d, the mean over pairs, tokens and
    channels. A projection of equal widths starts as the identity. The projections are trained and thrown away afterwards.
    """

    def __init__(self, width: int, teacher_width: int, pairs: Sequence[tuple[int, int]], *, device=None, dtype=None):
        super().__init__()
        self.pairs = [tuple(pair) for pair in pairs]
        if not self.pairs:
            raise ValueError("no pair of layers to match; give (student's layer, teacher's layer), such as [(0, 1)]")
        kinds = {"bias": False, "std": width**-0.5, "device": device, "dtype": dtype}
        self.projections = nn.ModuleList(Linear(width, teacher_width, **kinds) for _ in self.pairs)
        for k, layer in enumerate(self.projections):
            layer.init_parameters(f"match.{k}")
            if width == teacher_width:
                nn.init.eye_(layer.weight)

    def forward(self, student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
        far = [(i, j) for i, j in self.pairs if not (0 <= i < len(student) and 0 <= j < len(teacher))]
        if far:
            raise ValueError(f"no pair of layers {far[0]}; the student has {len(student)}, the teacher {len(teacher)}")
        losses = [
            (layer(student[i]) - teacher[j].detach()).square().mean()
            for layer, (i, j) in zip(self.projections, self.pairs, strict=True)
        ]
        return torch.stack(losses).mean()


class Distillation:
    """The loss of a student beside a teacher that only looks on: no gradient, no dropout, no step ever changes it.

    loss(tokens, targets) -> 0-d. match: a HiddenMatch, weighted by `hidden`; its parameters are to be trained with the student's.
    """

    def __init__(self, student: GPT, teacher: GPT, *, temperature=2.0, soft=0.5, match: HiddenMatch | None = None, hidden=1.0):
        check_student(student, teacher)
        self.student, self.teacher = student, teacher.eval()
        self.options = {"temperature": temperature, "soft": soft}
        self.match, self.hidden = match, hidden

    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the student's parameters and those of the projections."""
        return [*self.student.parameters(), *(self.match.parameters() if self.match else ())]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ours = hidden_states(self.student, tokens)
        with torch.no_grad():
            theirs = hidden_states(self.teacher, tokens)
            opinion = self.teacher.logits(theirs[-1])
        loss = distill_loss(self.student.logits(ours[-1]), opinion, targets, **self.options)
        return loss if self.match is None else loss + self.hidden * self.match(ours, theirs)
