"""Handwritten digits and a convolutional net small enough to train while one waits: a model to quantise, with batch norms.

The pictures come with scikit-learn (1,797 of 8 by 8), so nothing is downloaded. The split is fixed: every fourth picture is held
out.

    8 x 8 x 1  ->  conv, norm, ReLU  ->  conv, norm, ReLU, pool  ->  linear  ->  10

Reference: Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI), as in scikit-learn's load_digits.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["accuracy", "digits", "digits_net", "train_digits"]


@functools.lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train pictures (n, 1, 8, 8) in 0..1, train labels, held-out pictures, held-out labels)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(found.target, dtype=torch.int64)
    held = torch.arange(len(y)) % 4 == 3
    return x[~held], y[~held], x[held], y[held]


def digits_net(seed: int = 0, *, width: int = 16) -> nn.Sequential:
    """Two convolutions with batch norm and a linear layer; initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )


def train_digits(model: nn.Module, *, steps: int = 200, seed: int = 0, batch: int = 64, lr: float = 2e-3) -> nn.Module:
    """`steps` steps of Adam on random batches, drawn by the seed; leaves the model in eval. Returns it."""
    x, y, _, _ = digits()
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(y), (batch,), generator=dice)
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> float:
    """Per cent right, of the held-out pictures if none are given."""
    _, _, held, labels = digits()
    x, y = (held, labels) if x is None else (x, y)
    return 100 * float((model(x).argmax(1) == y).double().mean())
