"""torch.compile with its price said apart: who compiles, how long it took, and what runs where nothing can be compiled.

The compiler sees all operators of a function at once, writes one loop in C++ (Triton on a GPU) that reads each input once and
writes each result once, and has it compiled. That costs seconds, once; a function that is called rarely never gets them back.

    worth it  <=>  calls x (time eager - time compiled) > compile time

Reference: Ansel et al. 2024, "PyTorch 2", ASPLOS; torch._inductor.
"""

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["Compiled", "compiled", "compiler"]


def compiler() -> str | None:
    """The C++ compiler that torch.compile would call (the environment's CXX first), or None where there is none."""
    usual = "cl" if sys.platform == "win32" else "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", usual))


def compiled(fn: Callable, *, say: Callable[[str], None] = print) -> Callable:
    """`fn` through torch.compile, as a `Compiled`. Where there is no C++ compiler, says so in one sentence and returns fn itself.

    Never raises for want of a tool: where compiling fails in the first call, that too is said in one sentence, and fn runs.
    """
    if compiler() is None:
        say(f"There is no C++ compiler here, so {_name(fn)} runs as separate operators (install g++ or clang++ to compile it).")
        return fn
    try:
        return Compiled(fn, say=say)
    except Exception as error:  # a Python or a system that torch.compile does not know
        say(f"torch.compile does not work here ({type(error).__name__}), so {_name(fn)} runs as separate operators.")
        return fn


class Compiled:
    """A function that is compiled when it is first called; again for another shape, dtype or number of threads.

    The first call runs it twice, so it may change nothing but its result. seconds: what the first call took beyond a second one,
    or None before it. fell_back: why the eager function runs instead, or None. fresh: without the compiler's cache on disk, so
    that `seconds` is what a new machine would need.
    """

    def __init__(self, fn: Callable, *, say: Callable[[str], None] = print, fresh: bool = False):
        self.fn, self.fell_back, self.seconds, self._say = fn, None, None, say
        self._fresh = fresh
        # compiling in this process: no helper outlives the cell
        self._run = torch.compile(fn, fullgraph=True, dynamic=False, options={"compile_threads": 1})

    def __call__(self, *args, **kwargs):
        if self.fell_back is not None:
            return self.fn(*args, **kwargs)
        if self.seconds is not None:
            return self._again(*args, **kwargs)
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(), _no_cache() if self._fresh else nullcontext():
                warnings.simplefilter("ignore")  # of the compiler's own; those of fn come with the next call
                self._run(*args, **kwargs)
        except Exception as error:  # whatever the compiler stumbles over, the function itself may be right
            return self._fall_back(error, *args, **kwargs)
        first = time.perf_counter() - start
        start = time.perf_counter()
        result = self._run(*args, **kwargs)
        self.seconds = max(first - (time.perf_counter() - start), 0.0)
        return result

    def _again(self, *args, **kwargs):
        try:
            return self._run(*args, **kwargs)
        except Exception as error:  # torch compiles one function for so many shapes only, and then refuses
            return self._fall_back(error, *args, **kwargs)

    def _fall_back(self, error, *args, **kwargs):
        result = self.fn(*args, **kwargs)  # and where the function is wrong itself, its own error is the one to see
        self.fell_back = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self._say(f"Compiling {_name(self.fn)} failed ({self.fell_back}), so it runs as separate operators.")
        return result

    def __repr__(self) -> str:
        state = self.fell_back or ("not called yet" if self.seconds is None else f"compiled in {self.seconds:.1f} s")
        return f"Compiled({_name(self.fn)}, {state})"


@contextmanager
def _no_cache():
    """An empty cache of the compiler's, for this process, which is gone afterwards."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
