"""What is noted of a step while it runs: sums of each value over its passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.debug.digests.following import CUT, REPLICAS, SUMMANDS
from mpitrain.debug.digests.passes import Which
from mpitrain.debug.digests.sums import Sums

Record = dict[str, Any]
"""What is written of a moment: JSON."""


@dataclass
class Entry:
    """Sums of one value, or of one gradient, over the passes of a step.

    lies: what ranks hold of it, by axis; passes: in how many it was; crc: of its bytes in all of them.
    """

    which: Which
    kind: str
    index: int
    lies: Mapping[str, str]
    of: Sums
    crc: int
    passes: int = 1
    spoiled: bool = False

    def add(self, of: Sums, crc: int) -> None:
        """One more pass."""
        self.passes += 1
        way = self.lies.get(REPLICAS)
        if way in (CUT, SUMMANDS):
            cut = way == CUT
            old = self.of
            self.spoiled = self.spoiled or (not cut and old.elements != of.elements)
            self.of = Sums(
                old.elements + of.elements if cut else old.elements,
                old.plain + of.plain,
                _plus(old.size, of.size) if cut else None,
                old.squares + of.squares,
                *(_plus(a, b) for a, b in zip(old[4:], of[4:], strict=True)),
            )
            self.crc = (self.crc * 1000003 + crc) & 0xFFFFFFFF
        elif crc != self.crc:
            self.spoiled = True  # it should be the same in every pass, but is that of one slice, say


@dataclass
class Noted:
    """What is known of a step that is under way."""

    entries: dict[tuple[Any, ...], Entry] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    boundaries: dict[str, int] = field(default_factory=dict)
    more: Record = field(default_factory=dict)
    trouble: list[Any] | None = None


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def told(of: Sums) -> list[Any]:
    """Sums as JSON holds them."""
    return [of.elements, *(as_json(value) for value in of[1:])]


def as_json(value: float | None) -> float | str | None:
    """A number as strict JSON has it: what is not finite by its name."""
    return value if value is None or math.isfinite(value) else repr(float(value))
