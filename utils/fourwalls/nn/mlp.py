"""A stack of linear layers with a nonlinearity between them: the smallest model on which a parallel strategy can be tried.

    x -> W_1 x + b_1 -> f -> W_2 ... -> W_n f(...) + b_n

Every hidden layer keeps two tensors for backward, its input and the input of its nonlinearity, which is where activation memory
grows with depth. Reference: Rumelhart, Hinton, Williams, Nature 323 (1986).
"""

from collections.abc import Sequence

import torch
from torch import nn

from .init import initialise
from .layers import GELU, Dropout, Linear

__all__ = ["ACTIVATIONS", "MLP"]

ACTIVATIONS = {"gelu": lambda: GELU("tanh"), "relu": nn.ReLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """MLP((64, 128, 10)): two linear layers, a nonlinearity (and dropout) between them. (..., sizes[0]) -> (..., sizes[-1]).

    The initial standard deviation is 1 / sqrt(inputs) of each layer, a function of (seed, layer) alone.
    """

    def __init__(self, sizes: Sequence[int], *, activation="gelu", bias=True, dropout=0.0, seed=0, device=None, dtype=None):
        super().__init__()
        sizes = tuple(sizes)
        if len(sizes) < 2:
            raise ValueError(f"sizes {sizes}; an MLP needs at least an input and an output size, such as (64, 10)")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        self.sizes = sizes
        layers: list[nn.Module] = []
        for k, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            layers.append(Linear(inputs, outputs, bias=bias, std=inputs**-0.5, device=device, dtype=dtype))
            if k < len(sizes) - 2:
                layers.append(ACTIVATIONS[activation]())
                if dropout:
                    layers.append(Dropout(dropout))
        self.layers = nn.Sequential(*layers)
        initialise(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
