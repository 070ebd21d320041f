"""How far values may be from each other in the course of two runs: more with each op, and with each update."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpitrain.compare.bounds import COARSEST, Precision
from mpitrain.compare.sides import Records, Side
from mpitrain.compare.wholes import number

UPDATES = 4.0  # of the learning rate: how far an update moves a weight, also with a factor of its group


class Drift:
    """What one executor of both runs may have drifted apart so far.

    Args:
        sides: both runs.
        executor: which.
        precision: of the coarser one.

    Attributes:
        updates: of the weights so far.
    """

    def __init__(self, sides: Sequence[Side], executor: int, precision: Precision) -> None:
        self.updates = 0
        self._sides = sides
        self._executor = executor
        self._precision = precision
        self._drift = 0.0  # of weights, in the mean over those of a parameter
        told = [of for side in sides if type(of := side.begin(executor).get("saved_digits")) is int]
        self._digits = max(0, min(told)) if told else None

    def forward(self, ops: int) -> float:
        """What an element may be wrong by after so many ops of this step, in units of the root mean square.

        Weights that rounding has moved make other values; in float64 that is far below the bound.
        """
        if self._precision.name == "float64":
            return self._precision.relative(ops)
        return min(COARSEST, self._precision.relative(ops) * math.sqrt(1.0 + self.updates) + 2 * self._drift)

    def back(self, ops: int) -> float:
        """The same of gradients, for which values may have waited in fewer digits.

        Of elements that rounding has moved by eps, as many as eps 2^digits fall on the other side when they lose their
        digits, and then are 2^-digits apart: a root mean square of sqrt(eps 2^-digits), here with room for few of them.
        """
        flips = 0.0
        if self._digits is not None and self._precision.name != "float64":
            flips = 4.0 * math.sqrt(self._precision.eps * 2.0**-self._digits)
        return min(COARSEST, self.forward(ops) + flips)

    def moved(self, records: Sequence[Records], moved: float) -> dict[str, float]:
        """What rounding may have moved each weight by, of all elements together, in all updates so far."""
        found: dict[str, float] = {}
        for side, of in zip(self._sides, records, strict=True):
            largest = max((number(record.get("largest")) or 0.0 for record in of.values()), default=0.0)
            mine: dict[str, float] = {}
            for rank, record in of.items():
                here = number(record.get("largest")) or 0.0
                scale = largest / here if here else 1.0
                for (name, _, _), noise in zip(
                    side.slabs(self._executor, rank, "weight"), record.get("noise", []), strict=False
                ):
                    mine[name] = mine.get(name, 0.0) + scale * (number(noise) or 0.0)
            for name, noise in mine.items():
                found[name] = max(found.get(name, 0.0), noise * moved * max(1, self.updates))
        first = self._sides[0]
        sizes = {
            name: math.prod(shape) for name, shape, _ in first.slabs(self._executor, next(iter(first.ranks)), "weight")
        }
        self._drift = max((found.get(name, 0.0) / max(size, 1) for name, size in sizes.items()), default=0.0)
        return found
