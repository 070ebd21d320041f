"""The numbers of a step by name, of its line in `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Routed(NamedTuple):
    """How a layer used its experts.

    Attributes:
        busiest: choices of the most wanted expert, as a multiple of an even share.
        dropped: share of choices that found no place.
        entropy: of the router's probabilities, in nats; None: it was not finite.
    """

    busiest: float
    dropped: float
    entropy: float | None


def number(record: Mapping[str, Any], name: str) -> float | int | None:
    """A number of a line, also one that was not finite; None: it has none of this name."""
    found = record.get(name)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return found
    nonfinite = record.get("nonfinite")
    word = nonfinite.get(name) if isinstance(nonfinite, dict) else None
    return float(word) if word in ("nan", "inf", "-inf") else None


def routed(record: Mapping[str, Any]) -> dict[str, Routed]:
    """What a line says of each layer of experts, by its name."""
    layers = record.get("routing")
    found: dict[str, Routed] = {}
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        load = layer.get("load") if isinstance(layer, dict) else None
        if not isinstance(load, list) or not load or not all(type(count) is int for count in load):
            continue
        choices = max(sum(load), 1)
        dropped, entropy = number(layer, "dropped") or 0, number(layer, "entropy")
        share = dropped / choices if math.isfinite(dropped) else 0.0
        found[str(name)] = Routed(max(load) * len(load) / choices, share, entropy)
    return found
