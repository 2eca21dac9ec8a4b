"""How much is a weight worth? Its size, or the way it is going; and the same for whole heads and neurons.

Magnitude asks where a weight is. Movement asks where training takes it: a weight that moves away from zero gains, one that moves
towards it loses, whatever its size now. A unit (a head, a neuron) is worth what goes in times what comes out of it.

    magnitude  S = |w|;        movement  S = - sum over steps of w * dL/dw;        neuron i  S = |up_i| |down_i|

Reference: Han et al. 2015 (arXiv:1506.02626); Sanh, Wolf, Rush 2020 (arXiv:2005.07683); Li et al. 2017 (arXiv:1608.08710).
"""

from collections.abc import Mapping

import torch

from ...nn.attention import Attention
from ...nn.gpt import FeedForward

__all__ = ["Movement", "head_scores", "magnitude", "neuron_scores"]


def magnitude(weight: torch.Tensor) -> torch.Tensor:
    """|w|, of the weight's shape, without a gradient."""
    return weight.detach().abs()


class Movement:
    """Scores that grow while training runs: call `collect()` after each backward, before the step. `scores`: {name: tensor}.

    Sums are kept in at least float32. ValueError where a named parameter has no gradient.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.parameters = dict(parameters)
        self.scores = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def collect(self) -> None:
        lost = [name for name, p in self.parameters.items() if p.grad is None]
        if lost:
            raise ValueError(f"{lost[0]!r} has no gradient; call collect() after backward() and before zero_grad()")
        for name, p in self.parameters.items():
            score = self.scores[name]
            score.sub_(p.to(score.dtype) * p.grad.to(score.dtype))


@torch.no_grad()
def neuron_scores(mlp: FeedForward) -> torch.Tensor:
    """(ff,): the norm of what a hidden neuron reads (its row of `up`, bias included) times that of what it writes."""
    reads = mlp.up.weight.square().sum(1)
    if mlp.up.bias is not None:
        reads = reads + mlp.up.bias.square()
    return reads.sqrt() * mlp.down.weight.norm(dim=0)


@torch.no_grad()
def head_scores(attention: Attention) -> torch.Tensor:
    """(heads,): the norm of a head's values (those of its group, where several heads share them) times that of what it writes."""
    values = attention.value.weight.unflatten(0, (attention.kv_heads, -1)).flatten(1).norm(dim=1)
    written = attention.output.weight.unflatten(1, (attention.heads, -1)).transpose(0, 1).flatten(1).norm(dim=1)
    return values.repeat_interleave(attention.heads // attention.kv_heads) * written
