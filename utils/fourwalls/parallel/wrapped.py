"""Who wraps this model? A mark on it, so that two strategies never sum the same gradients without knowing of each other.

Hooks of a strategy hang on the parameters, where nobody sees them. A second strategy on the same model would sum what is summed
already, and nothing would look wrong. The mark does not keep its owner alive, and a copy of the model does not carry it: the copy
has none of the hooks.

    allowed:  one wrapper that works during backward, or any number that only work when they are called

Reference: torch's DistributedDataParallel, which two wrappers of one model deceive.
"""

import weakref
from collections.abc import Callable

import torch

__all__ = ["Hook", "claim", "release"]

_PLACE = "_wrapped"


class _Mark:
    """On `model.__dict__`: a weak reference to the wrapper, and whether it works during backward. Copies are empty."""

    def __init__(self, owner: object = None, alone: bool = False):
        self.owner, self.alone = (lambda: None) if owner is None else weakref.ref(owner), alone

    def __deepcopy__(self, memo):
        return _Mark()

    def __reduce__(self):
        return _Mark, ()


class Hook:
    """A function that is hung on a module and belongs to one wrapper: whoever copies or pickles the module is told why not."""

    def __init__(self, function: Callable, why: str):
        self.function, self.why = function, why

    def __call__(self, *args):
        return self.function(*args)

    def __deepcopy__(self, memo):
        raise ValueError(self.why)

    def __reduce__(self):
        raise ValueError(self.why)


def claim(model: torch.nn.Module, owner: object, *, alone: bool) -> None:
    """Mark `model` as wrapped by `owner`. alone: it works during backward, or changes the parameters' memory.

    Raises ValueError where another wrapper lives that does not bear company, or where `owner` bears none.
    """
    mark = model.__dict__.get(_PLACE)
    other = None if mark is None else mark.owner()
    if other is not None and other is not owner and (alone or mark.alone):
        raise ValueError(f"this model is wrapped by {type(other).__name__} already; close() that one first")
    model.__dict__[_PLACE] = _Mark(owner, alone)


def release(model: torch.nn.Module, owner: object) -> None:
    """Take the mark of `owner` off, if it is there."""
    mark = model.__dict__.get(_PLACE)
    if mark is not None and mark.owner() is owner:
        del model.__dict__[_PLACE]
