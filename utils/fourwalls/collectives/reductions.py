"""What may be combined: sum, avg, max, min, prod, and for which dtypes each has a meaning.

An operation is a torch function that combines two equal buffers in place, an identity, and a last step (only `avg`
has one: divide by the number of *ranks*). Arithmetic happens in the tensor's own dtype, one rounding per addition,
which gives the error bound that tests, labs and benchmarks use.

    |computed sum - exact sum|  <=  ((1 + u)^(n-1) - 1) * (|x_0| + ... + |x_(n-1)|),      u = eps / 2

Reference: Higham, "Accuracy and Stability of Numerical Algorithms", chapter 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from ..ranks.comm import Comm

__all__ = ["OPS", "Reduction", "combine", "exact_and_bound", "get_reduction", "wrong_elements"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
BOOL = (torch.bool,)
OTHER_NAMES = {"mean": "avg", "average": "avg", "add": "sum", "product": "prod", "mul": "prod"}


@dataclass(frozen=True)
class Reduction:
    """One operation. `combine(a, b, out=a)` works in place; `dtypes` lists what it is defined for; `note` says how, where it
    surprises.
    """

    name: str
    combine: Callable
    dtypes: tuple[torch.dtype, ...]
    note: str = ""
    divides: bool = False

    @property
    def verb(self) -> str:
        """The label of this work in a Trace."""
        return {"sum": "add", "avg": "add", "prod": "multiply"}.get(self.name, self.name)

    def finish(self, x: torch.Tensor, n: int) -> None:
        """What is still to do, in place, once all n contributions are in `x`."""
        if self.divides:
            x.div_(n)

    def identity(self, dtype: torch.dtype):
        """The value e with combine(e, x) == x."""
        if self.name in ("max", "min"):
            if dtype == torch.bool:
                return self.name == "min"
            if dtype.is_floating_point:
                return float("-inf") if self.name == "max" else float("inf")
            limits = torch.iinfo(dtype)
            return limits.min if self.name == "max" else limits.max
        return 1 if self.name == "prod" else 0


OPS = {
    "sum": Reduction("sum", torch.add, FLOATS + INTEGERS + COMPLEX + BOOL, "bool: logical or; integers wrap around"),
    "avg": Reduction("avg", torch.add, FLOATS + COMPLEX, "the sum divided by the number of ranks", divides=True),
    "max": Reduction("max", torch.maximum, FLOATS + INTEGERS + BOOL, "nan wins; bool: logical or"),
    "min": Reduction("min", torch.minimum, FLOATS + INTEGERS + BOOL, "nan wins; bool: logical and"),
    "prod": Reduction("prod", torch.mul, FLOATS + INTEGERS + BOOL, "bool: logical and; integers wrap around"),
}


def get_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """The operation called `op`, if it is defined for `dtype`. Raises ValueError, which says what is allowed, otherwise."""
    if not isinstance(op, str) or op not in OPS:
        near = [OTHER_NAMES[op]] if str(op) in OTHER_NAMES else get_close_matches(str(op).lower(), OPS, n=1)
        raise ValueError(f"op is {op!r}; the operations are {', '.join(OPS)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    chosen = OPS[op]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{op} takes torch tensors, and this is an array of numpy's {dtype}; try torch.as_tensor(x)")
    if dtype not in chosen.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in chosen.dtypes)
        hint = ""
        if op == "avg" and not dtype.is_floating_point:
            hint = "; an average of whole numbers is no whole number: use x.double(), or op='sum' and divide as you mean it"
        elif dtype.is_complex:
            hint = "; complex numbers have no order, and are only summed or averaged here"
        raise ValueError(f"{op} of {str(dtype).removeprefix('torch.')} is not defined; {op} takes {names}{hint}")
    return chosen


def combine(comm: Comm, reduction: Reduction, mine: torch.Tensor, arrived: torch.Tensor) -> None:
    """mine = mine (op) arrived, in place.

    Recorded as work, one FLOP an element and three passes over memory, unless the communicator says that it tells nothing.
    """
    if comm.records_work:
        size = mine.numel()
        with comm.compute(reduction.verb, flops=size, bytes=3 * size * mine.element_size(), kind="reduce"):
            reduction.combine(mine, arrived, out=mine)
    else:
        reduction.combine(mine, arrived, out=mine)


def exact_and_bound(inputs: list[torch.Tensor], op: str = "sum") -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: what reducing `inputs` (one tensor per rank, equal shapes) must give, and how far off a right answer may be.

    Computed apart from any algorithm: floats in float64, complex in complex128, integers in int64 (then wrapped to the dtype),
    bool as any/all. The bound is float64 of the same shape (for complex: for each of the two parts), 0 where the answer is exact.
    """
    n, dtype = len(inputs), inputs[0].dtype
    get_reduction(op, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([x.detach().cpu() for x in inputs])
    if dtype == torch.bool:
        value = stack.any(0) if op in ("sum", "max") else stack.all(0)
        return value, torch.zeros(value.shape, dtype=torch.float64)
    w = stack.to(wide)
    if op in ("max", "min"):
        value = w.amax(0) if op == "max" else w.amin(0)
        return value.to(dtype), torch.zeros(value.shape, dtype=torch.float64)
    value = w.prod(0) if op == "prod" else w.sum(0)
    if wide == torch.int64:
        return value.to(dtype), torch.zeros(value.shape, dtype=torch.float64)
    if op == "avg":
        value = value / n
    info = torch.finfo(dtype)
    roundings = n if op == "avg" else n - 1
    growth = (1 + info.eps / 2) ** roundings - 1
    if op == "prod":
        size = value.abs()
    elif dtype.is_complex:
        size = torch.view_as_real(w).abs().sum(0).amax(-1)
    else:
        size = w.abs().sum(0)
    size = size / n if op == "avg" else size
    # the oracle rounds too, in float64; a product or quotient may land among the subnormals
    oracle = n * torch.finfo(torch.float64).eps * size
    return value, growth * size + oracle + (info.smallest_normal * info.eps * n if op in ("prod", "avg") else 0.0)


def wrong_elements(result: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> int:
    """How many elements of `result` lie further from `exact` than `bound` allows (nan where the oracle has nan is right)."""
    if result.shape != exact.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the oracle {tuple(exact.shape)}")
    result = result.detach().cpu()
    if not (result.dtype.is_floating_point or result.dtype.is_complex):
        return int((result != exact).sum())
    if result.dtype.is_complex:
        got, want = torch.view_as_real(result.to(torch.complex128)), torch.view_as_real(exact.to(torch.complex128))
        return int((~_near(got, want, bound.unsqueeze(-1))).any(-1).sum())
    return int((~_near(result.double(), exact.double(), bound)).sum())


def _near(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    close = ((got - want).abs() <= bound) & bound.isfinite()  # where inputs overflow, only the same infinity is right
    return close | (got == want) | (got.isnan() & want.isnan())
