"""Short filters with few multiplications: the matrices, derived exactly from points on a line.

Two polynomials are multiplied by evaluating both at enough points, multiplying the values, and interpolating: one multiplication
a point. A filter that slides over numbers is that product read backwards (transposed), so the same points give m outputs of an
r-tap filter with m + r - 1 multiplications instead of m r. One point may be infinity, where a polynomial's value is its leading
coefficient. All arithmetic here is in fractions: what is derived is checked without rounding.

    y = output [ (filter g) * (input d) ],     sum_i output[k,i] filter[i,t] input[i,j]  =  1 if j = k + t else 0

Reference: Toom 1963; Cook 1966; Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray 2016 (arXiv:1509.09308).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

__all__ = ["POINTS", "Transforms", "cook_toom"]

# small numbers first: their powers grow slowly, so that rounding does, too
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2", "4", "-4"))

Rows = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Transforms:
    """F(m, r): m outputs of a filter of r taps from n = m + r - 1 inputs. output (m, n), filter (n, r), input (n, n)."""

    m: int
    r: int
    output: Rows
    filter: Rows
    input: Rows

    @property
    def n(self) -> int:
        """Inputs of a tile, and multiplications for m outputs, in one dimension."""
        return self.m + self.r - 1

    @property
    def exact(self) -> bool:
        """Whether the equation above holds for every k, t and j: then the result is right for all numbers."""
        return all(
            sum(self.output[k][i] * self.filter[i][t] * self.input[i][j] for i in range(self.n)) == (j == k + t)
            for k in range(self.m)
            for t in range(self.r)
            for j in range(self.n)
        )

    @property
    def absolute(self) -> "Transforms":
        """The same with all entries positive: what rounding errors are bounded by."""
        made = {name: _rows([abs(c) for c in row] for row in getattr(self, name)) for name in ("output", "filter", "input")}
        return replace(self, **made)

    def steps(self, name: str) -> int:
        """Additions and scalings that one product of `name` ("output", "filter", "input") with a vector takes: a term more is an
        addition, an entry other than 1 and -1 a scaling. Terms that several rows share are not shared.
        """
        rows = getattr(self, name)
        return sum(sum(c != 0 for c in row) - 1 + sum(abs(c) not in (0, 1) for c in row) for row in rows)

    def tile_steps(self, name: str) -> int:
        """The same for a two-dimensional tile, columns first: output n columns and m rows, filter r and n, input n and n."""
        return self.steps(name) * {"output": self.n + self.m, "filter": self.r + self.n, "input": 2 * self.n}[name]

    def most_terms(self, name: str) -> int:
        """The most terms that a row of `name` adds up."""
        return max(sum(c != 0 for c in row) for row in getattr(self, name))

    def show(self, name: str) -> str:
        """The matrix `name` as text, in fractions."""
        rows = [[str(c) for c in row] for row in getattr(self, name)]
        width = max(len(c) for row in rows for c in row)
        return "\n".join("  ".join(c.rjust(width) for c in row) for row in rows)


def cook_toom(m: int, r: int = 3, *, points: Iterable | None = None) -> Transforms:
    """The matrices of F(m, r) from m + r - 2 finite points (None: the first of POINTS) and infinity.

    Raises ValueError for fewer than one output or tap, and for a wrong number of points or a point given twice.
    """
    for name, value in (("m", m), ("r", r)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}; outputs and taps are whole numbers of at least 1")
    needed = m + r - 2
    if points is None and needed > len(POINTS):
        raise ValueError(f"F({m}, {r}) needs {needed} points, POINTS has {len(POINTS)}; give points=, or m={len(POINTS) + 2 - r}")
    chosen = POINTS[:needed] if points is None else tuple(Fraction(p) for p in points)
    if len(chosen) != needed or len(set(chosen)) != needed:
        raise ValueError(f"points={[str(p) for p in chosen]}: F({m}, {r}) needs {needed} different ones, and infinity by itself")
    filters, inputs = [], []
    for point in chosen:
        others = [p for p in chosen if p != point]
        scale = prod((point - p for p in others), start=Fraction(1))
        sign = 1 if scale > 0 else -1  # where it stands is free: with it here, the filter's first column is positive
        filters.append([point**t / abs(scale) for t in range(r)])
        inputs.append([sign * c for c in _with_roots(others)] + [Fraction(0)])
    filters.append([Fraction(t == r - 1) for t in range(r)])  # infinity: the leading coefficient
    inputs.append(_with_roots(chosen))
    outputs = [[point**k for point in chosen] + [Fraction(k == m - 1)] for k in range(m)]
    found = Transforms(m, r, _rows(outputs), _rows(filters), _rows(inputs))
    assert found.exact
    return found


def _with_roots(roots: Iterable[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), the constant first."""
    made = [Fraction(1)]
    for root in roots:
        made = [a - root * b for a, b in zip([Fraction(0), *made], [*made, Fraction(0)], strict=True)]
    return made


def _rows(rows: Iterable[Iterable]) -> Rows:
    return tuple(tuple(row) for row in rows)
