"""What is inside of what: the span around each span of a rank, and the time that is a span's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.debug.trace.records import KIND

Array = np.ndarray[Any, Any]

NESTED = tuple(KIND[kind] for kind in ("action", "op", "message", "wait", "unit"))
"""Kinds that are calls of the rank's own thread; the others are points, or may overlap."""


def parents(spans: Array) -> Array:
    """The number of the span around each, -1 where there is none.

    Args:
        spans: array of SPAN, by start, of one rank.

    Where a full trace has lost the span around, there is none: what encloses nothing is not believed.
    """
    found = np.full(spans.size, -1)
    nested = np.isin(spans["kind"], NESTED)
    outer = np.flatnonzero(nested & (spans["depth"] == 0))
    for depth in range(1, int(spans["depth"][nested].max(initial=0)) + 1):
        inner = np.flatnonzero(nested & (spans["depth"] == depth))
        at = np.searchsorted(outer, inner) - 1
        around = outer[np.maximum(at, 0)] if outer.size else np.zeros(inner.size, np.int64)
        inside = (at >= 0) & (spans["start"][inner] >= spans["start"][around])
        inside &= spans["stop"][inner] <= spans["stop"][around]
        found[inner[inside]] = around[inside]
        outer = inner
    return found


def own_time(spans: Array, around: Array) -> Array:
    """ns of each span that are of no span inside it.

    Args:
        spans: array of SPAN.
        around: their `parents`.
    """
    length = (spans["stop"] - spans["start"]).astype(np.int64)
    inside = around >= 0
    own = length.copy()
    np.subtract.at(own, around[inside], length[inside])
    return np.maximum(own, 0)
