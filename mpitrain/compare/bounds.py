"""How far two sums may be from each other without two runs being other runs.

Of a value with n elements whose root mean square is q, let each element be wrong by

    d = t q + f Q        Q: the largest root mean square of all values of that kind in that step

In float64 t is 1e-10, by which `mpitrain verify` judges elements; in other precisions rounding adds up, as a random
walk, over the ops before and over the length of the sums in them: t = eps/2 sqrt(ops) sqrt(length).  The second term is
for values whose true size is zero, of which rounding of others is left (the gradient of a key's bias): f = 16 eps.
Then with all errors of one sign

    plain, size, rows, columns    n d          root of squares    sqrt(n) d          both    8 sqrt(n) d

for where rows and columns have factors of both signs, errors do not add up.  The 8 leaves room for chance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpitrain.compare.wholes import Part

FLOAT64 = 1e-10
FLOOR = 16.0
CHANCE = 8.0
COARSEST = 0.25


class Precision(NamedTuple):
    """eps of the coarser of two runs, and how long its sums are."""

    eps: float
    length: int
    name: str

    def relative(self, ops: int) -> float:
        """What an element may be wrong by, after so many ops, in units of the root mean square."""
        if self.name == "float64":
            return FLOAT64
        return min(COARSEST, 0.5 * self.eps * math.sqrt(max(ops, 1)) * math.sqrt(self.length))


def precision_of(dtypes: list[str], length: int) -> Precision:
    """Of runs in these precisions, whose longest sums have so many terms; unknown ones count as float16."""
    eps = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    name = max(dtypes, key=lambda name: eps.get(name, 2.0**-10))
    return Precision(eps.get(name, 2.0**-10), 1 if name in ("float16", "bfloat16") else max(length, 1), name)


class Gap(NamedTuple):
    """The sum in which two values differ most, in units of what is allowed.

    what: "plain", "size", "rows" ...; values: in both runs; error: their distance; allowed: the bound.
    """

    what: str
    values: tuple[float, float]
    error: float
    allowed: float

    @property
    def share(self) -> float:
        """The error in units of its bound; infinite where one of the two is no number and the other is."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    @property
    def relative(self) -> float:
        """The distance in units of the larger of the two."""
        largest = max(abs(value) for value in self.values)
        return self.error / largest if largest and math.isfinite(largest) else math.nan


def gap(one: Part, other: Part, relative: float, floor: float, more: float = 0.0) -> Gap | None:
    """How far two values are from each other; None where they have not as many elements, or nothing in common.

    Args:
        one, other: their sums.
        relative: t.
        floor: f Q.
        more: what all elements together may be wrong by besides.
    """
    n = one.elements
    if n != other.elements:
        return None
    if not n:
        return Gap("plain", (0.0, 0.0), 0.0, 0.0)
    squares = _finite_max(one.squares, other.squares)
    root = math.sqrt(squares / n)
    d = relative * root + floor
    found = [_gap("plain", one.plain, other.plain, n * d + more)]
    for name in ("rows", "columns", "both"):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None and b is not None:
            allowed = min(CHANCE * math.sqrt(n), 1.5 * n) if name == "both" else 1.5 * n
            found.append(_gap(name, a, b, allowed * d + 1.5 * more))
    if one.size is not None and other.size is not None:
        found.append(_gap("size", one.size, other.size, n * d + more))
        a, b = math.sqrt(max(one.squares, 0.0)), math.sqrt(max(other.squares, 0.0))
        if not (math.isnan(one.squares) or math.isnan(other.squares)):
            found.append(_gap("root of squares", a, b, math.sqrt(n) * d + more))
    return max(found, key=lambda gap: gap.share)


def _gap(what: str, a: float, b: float, allowed: float) -> Gap:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return Gap(what, (a, b), 0.0, allowed)
    error = abs(a - b)
    if not math.isfinite(error):
        error = math.nan
    return Gap(what, (a, b), error, allowed)


def _finite_max(*values: float) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def root_mean_square(of: Part) -> float:
    """Of an element; of a value of one element 0, which stands for no others."""
    if of.elements < 2 or not math.isfinite(of.squares) or of.squares <= 0:
        return 0.0
    return math.sqrt(of.squares / of.elements)
