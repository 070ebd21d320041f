"""Runs without digests: by the numbers of each step, `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

NUMBERS = ("loss", "grad_norm", "lr", "tokens", "val_loss", "loss_scale", "skipped")
"""Those that two runs must agree on, in the order in which a step makes them; not its speed."""
EXACT = ("tokens", "loss_scale", "skipped")


class Parting(NamedTuple):
    """The first number that differs by more than is allowed."""

    step: int
    name: str
    values: tuple[float, float]

    @property
    def relative(self) -> float:
        """Their distance in units of the larger."""
        largest = max(map(abs, self.values))
        return abs(self.values[0] - self.values[1]) / largest if largest else 0.0


class Curves(NamedTuple):
    """What came of it: where they part, how many steps both have, the largest relative distance before."""

    first: Parting | None
    steps: int
    largest: float


def compare(one: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], tolerance: float) -> Curves:
    """Compare step by step.

    Args:
        one, other: step -> its record.
        tolerance: relative distance that does not count.
    """
    largest, steps = 0.0, 0
    for step in sorted({*one} & {*other}):
        steps += 1
        for name in NUMBERS:
            a, b = value(one[step], name), value(other[step], name)
            if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
                continue
            found = Parting(step, name, (a, b))
            if name in EXACT or not found.relative <= tolerance:
                return Curves(found, steps, largest)
            largest = max(largest, found.relative)
    return Curves(None, steps, largest)


def value(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record, also one that was not finite; None: it has none."""
    found = record.get(name)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found)
    named = record.get("nonfinite")
    word = named.get(name) if isinstance(named, dict) else None
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(word) if isinstance(word, str) else None
