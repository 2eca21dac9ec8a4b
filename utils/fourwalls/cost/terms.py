"""A total is only believed with its parts: each line has a name, a formula, a size and a count, and the lines sum to the total.

Sizes are kept exact: a whole number, or a fraction where something is shared among ranks that do not divide it.

    total = sum over lines of count * each

Reference: none; this is bookkeeping.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

from .units import both, format_bytes, format_count

__all__ = ["Term", "Terms", "exact"]


def exact(value: Real) -> int | Fraction:
    """A whole number as int, anything else as an exact Fraction."""
    value = Fraction(value)
    return value.numerator if value.denominator == 1 else value


@dataclass(frozen=True)
class Term:
    """One line: `count` times `each` of `unit`, by `formula`."""

    name: str
    formula: str
    each: int | Fraction
    count: int | Fraction = 1
    unit: str = "B"

    @property
    def total(self) -> int | Fraction:
        return exact(self.each * self.count)

    @property
    def bytes(self) -> int | Fraction:
        """The line's total, for lines whose unit is bytes."""
        if self.unit != "B":
            raise ValueError(f"{self.name!r} is in {self.unit}, not in bytes")
        return self.total

    def times(self, count: int | Fraction) -> "Term":
        return Term(self.name, self.formula, self.each, exact(self.count * count), self.unit)


class Terms:
    """An ordered table of terms of one unit. `title` says for which sizes it holds. `terms["name"]` is a line, `.total` the
    sum.
    """

    def __init__(self, terms: Iterable[Term] = (), *, title: str = ""):
        self.terms, self.title = tuple(terms), title
        units, names = {t.unit for t in self.terms}, [t.name for t in self.terms]
        if len(units) > 1:
            raise ValueError(f"terms of different units cannot be summed: {sorted(units)}")
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            raise ValueError(f"two terms have the same name: {doubled}")
        self.unit = units.pop() if units else "B"

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, name: str) -> Term:
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(f"no term {name!r}; there are {[t.name for t in self.terms]}")

    def __contains__(self, name: str) -> bool:
        return any(t.name == name for t in self.terms)

    def __add__(self, other: "Terms") -> "Terms":
        return Terms([*self, *other], title=self.title or other.title)

    @property
    def total(self) -> int | Fraction:
        return exact(sum((t.total for t in self.terms), Fraction(0)))

    def times(self, count: int | Fraction) -> "Terms":
        """Every line `count` times as often (layers, micro-batches in flight)."""
        return Terms([t.times(count) for t in self], title=self.title)

    def rows(self) -> list[dict]:
        """One dict a line, for a DataFrame: name, formula, each, count, total, unit."""
        return [
            {"name": t.name, "formula": t.formula, "each": t.each, "count": t.count, "total": t.total, "unit": t.unit}
            for t in self
        ]

    def __str__(self) -> str:
        show = format_bytes if self.unit == "B" else lambda value: format_count(value, self.unit)
        lines = [(t.name, t.formula, f"{float(t.count):g}", show(t.total)) for t in self]
        last = ("total", "", "", both(self.total) if self.unit == "B" else show(self.total))
        widths = [max(len(row[k]) for row in [*lines, last]) for k in range(3)]
        text = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  x {c:>{widths[2]}}  {d:>12}" for a, b, c, d in lines]
        total = f"{last[0]:<{widths[0]}}  {'':<{widths[1]}}    {'':>{widths[2]}}  {last[3]:>12}"
        return "\n".join(([self.title] if self.title else []) + text + [total])

    __repr__ = __str__
