"""A check that reads as a list of what must hold: the first thing that does not hold ends it, with words and a hint.

Words say what was found and where, a hint asks for place or shape; neither tells an expected value. Whatever comes from a learner
is looked at as a plain tensor of a known shape and dtype before it is compared, and NaN is never close to anything.

    |value - exact| <= bound, element by element, in float64

Reference: course/problem.py, whose Check and Finding these make.
"""

from collections.abc import Callable

import torch

from .problem import Check, Finding, Session, Stopped

__all__ = ["Wrong", "close", "draw", "expect", "judged", "own_products", "tensor"]


class Wrong(Exception):
    """What does not hold, and a hint."""

    def __init__(self, said: str, hint: str = ""):
        super().__init__(said)
        self.hint = hint


def judged(name: str, function: Callable, *args) -> Check:
    """The check that function(session, *args) makes: it raises Wrong, or returns what there is to say, or None."""

    def run(session: Session) -> Finding:
        try:
            return Finding(True, function(session, *args) or "")
        except Wrong as wrong:
            return Finding(False, str(wrong), wrong.hint)
        except Stopped:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            # who replaces our half of the driver sends what no driver sends
            return Finding(False, f"what your process sent cannot be judged ({type(error).__name__})")

    return Check(name, run)


def expect(holds: bool, said: str, hint: str = "") -> None:
    """Raise Wrong unless it holds."""
    if not holds:
        raise Wrong(said, hint)


def tensor(value, shape, dtype, what: str) -> torch.Tensor:
    """`value`, a tensor of this shape and dtype (or one of several), or Wrong."""
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    expect(isinstance(value, torch.Tensor) and not value.is_meta, f"{what} is {type(value).__name__}, not a tensor with numbers")
    expect(tuple(value.shape) == tuple(shape), f"{what} has shape {tuple(value.shape)}", f"wanted is {tuple(shape)}")
    words = " or ".join(str(d).removeprefix("torch.") for d in allowed)
    expect(value.dtype in allowed, f"{what} is {str(value.dtype).removeprefix('torch.')}", f"wanted is {words}")
    return value


def close(value, exact, bound, what: str, hint: str = "") -> None:
    """Wrong, with how many elements and where the first is, unless all are within the bound (a number or a tensor)."""
    wrong = ~((value.double() - exact).abs() <= bound)
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        at = f", the first at {first if len(first) != 1 else first[0]}" if first else ""
        raise Wrong(f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong{at}", hint)


def draw(s: Session, *shape, dtype=torch.float64) -> torch.Tensor:
    """Fresh normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(s.dice.randrange(2**31)), dtype=torch.float64).to(dtype)


def own_products(seen: dict, sizes) -> list:
    """The products [name, dtype, shapes] of a Probe's report that are the learner's own, its two marks taken off."""
    a, b, c = sizes
    wanted, found = ["aten::mm", "float32", [[a, b], [b, c]]], seen["products"]
    blind = "the probe in your process does not see what it must: a part of torch, or of the probe, was replaced"
    expect(len(found) >= 2 and found[0] == wanted and found[-1] == wanted, blind)
    return found[1:-1]
