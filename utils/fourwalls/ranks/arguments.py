"""The bad input that can be refused before any rank starts: is it a program, can it be called so, does every rank have its item?

A mistake in the call should cost no process and no thread, and be told in the learner's own process.

    program(comm, *args, **kwargs) must be callable as it stands

Reference: inspect.signature in the Python library.
"""

import functools
import inspect
import operator
from collections.abc import Callable

from .result import PerRank

__all__ = ["rank_arguments", "whole_seed"]


def rank_arguments(program: Callable, args: tuple, kwargs: dict, ranks: int) -> Callable[[int], tuple[tuple, dict]]:
    """rank -> (args, kwargs) of that rank. ValueError if the program cannot take them, or a per_rank list has the wrong
    length.
    """
    if not callable(program):
        raise ValueError(f"the program is {program!r}; it must be a function def program(comm, ...)")
    _check_kind(program)
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank) and len(value) != ranks:
            raise ValueError(f"per_rank has {len(value)} items for {ranks} ranks; it needs one for each")
    try:
        inspect.signature(program).bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(program, "__name__", repr(program))
        few = "; is its first argument comm?" if "too many" in str(error) else ""
        raise ValueError(f"{name}(comm, ...) does not fit the arguments given: {error}{few}") from None
    except ValueError:
        pass  # some built-in callables have no signature to look at

    def given(rank: int) -> tuple[tuple, dict]:
        def own(value):
            return value[rank] if isinstance(value, PerRank) else value

        return tuple(map(own, args)), {k: own(v) for k, v in kwargs.items()}

    return given


def whole_seed(seed) -> int:
    """The seed as an int. ValueError unless it is a whole number."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ValueError(f"seed={seed!r}: a whole number")
    return operator.index(seed)


def _check_kind(program: Callable) -> None:
    """ValueError for a function whose call only makes an object that nobody would run."""
    function = program
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    name = getattr(function, "__name__", "program")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{name} is an async function, which a rank does not run; write it without async")
    if inspect.isgeneratorfunction(function):
        raise ValueError(f"{name} is a generator (it has a yield), so calling it runs nothing; use return, or a list")
