"""Initial weights that are the same on every machine and for every number of ranks.

A whole parameter is drawn from a generator seeded by its name and the seed; a rank that holds a shard draws the whole and cuts.
The draw is uniform with the wanted standard deviation: it takes only integer arithmetic and one product, so the bits are the
same everywhere, while the logarithm and cosine of a normal draw differ in the last digit between processors.

    w ~ U(-sqrt(3) std, sqrt(3) std)        generator seed = hash(seed, name)

Reference: Radford et al. 2019 for std 0.02, and for 1/sqrt(2L) on the two projections that add to the residual stream.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

__all__ = ["draw", "fill", "initialise", "name_seed"]


def name_seed(seed: int, name: str) -> int:
    """A 32-bit seed that depends on every bit of (seed, name), the same in every process (`hash` of a string is not)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def draw(name: str, shape: Sequence[int], *, seed: int = 0, std: float = 0.02) -> torch.Tensor:
    """The whole parameter `name` in float64 on the CPU: uniform with mean 0 and standard deviation `std`."""
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    unit = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)  # multiples of 2^-53: exact
    return unit.sub_(0.5).mul_(2 * math.sqrt(3) * std)


@torch.no_grad()
def fill(parameter: torch.Tensor, name: str, *, seed: int = 0, std: float = 0.02) -> None:
    """Set a parameter to its draw, rounded to its dtype. On the device meta there is nothing to set."""
    if parameter.device.type != "meta":
        parameter.copy_(draw(name, parameter.shape, seed=seed, std=std))


def initialise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Call `init_parameters(name, seed)` of every module that has one; returns the model. The name is the module's path."""
    for name, module in model.named_modules():
        begin = getattr(module, "init_parameters", None)
        if begin is not None:
            begin(name, seed)
    return model
