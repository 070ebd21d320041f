"""What a step says of its routing: a vector of sums a layer, and what to read in it.

    asked (E)   choices of each expert, before any was dropped
    dropped     choices for which the expert had no place
    held_back   second choices that GShard's draw did not take
    tokens      that are no padding
    entropy     of the router's probabilities in nats, summed over tokens
    balance, z  the router's losses, summed over rows; 0 where they have no coefficient

Sums can be added over micro-batches and ranks, so that is what travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.routing import Routing

OTHERS = ("dropped", "held_back", "tokens", "entropy", "balance", "z")


def length(experts: int) -> int:
    """Numbers of a layer with so many experts."""
    return experts + len(OTHERS)


def vector(asked: np.ndarray, **others: float) -> np.ndarray:
    """The numbers of one pass in their order; what is not given is 0."""
    return np.array([*asked, *(others.get(name, 0.0) for name in OTHERS)], np.float64)


class Load(NamedTuple):
    """How a step used the experts of one layer.

    asked: choices of each expert, before any was dropped; dropped, held_back: choices; entropy: of the router's
    probabilities, the mean over tokens in nats (log E: it has no opinion); balance_loss, z_loss: means over rows,
    without coefficients.
    """

    asked: tuple[int, ...]
    dropped: int
    held_back: int
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def dropped_share(self) -> float:
        """Of all choices, those that found no place."""
        return self.dropped / max(sum(self.asked), 1)

    @property
    def busiest(self) -> float:
        """Choices of the most wanted expert, as a multiple of an even share."""
        return max(self.asked) * len(self.asked) / max(sum(self.asked), 1)


def read(numbers: Sequence[float], rows: int) -> Load:
    """What the sums of a layer over a step come to.

    Args:
        numbers: as `StepReport.counted` has them.
        rows: of the step.
    """
    asked, others = numbers[: -len(OTHERS)], dict(zip(OTHERS, numbers[-len(OTHERS) :], strict=True))
    rows = max(rows, 1)
    return Load(
        tuple(int(number) for number in asked),
        int(others["dropped"]),
        int(others["held_back"]),
        others["entropy"] / max(others["tokens"], 1.0),
        others["balance"] / rows,
        others["z"] / rows,
    )


def of_model(counted: Mapping[str, Sequence[float]], rows: int) -> dict[str, Load]:
    """What a step says of each layer of experts, by name."""
    return {name: read(numbers, rows) for name, numbers in counted.items()}


def for_metrics(loads: Mapping[str, Load]) -> dict[str, Any]:
    """What the file of metrics has of a step: the losses that the layers have, as means over them, and `routing`."""
    if not loads:
        return {}
    layers = {
        name: {
            "load": list(load.asked),
            "dropped": load.dropped,
            "held_back": load.held_back,
            "entropy": load.entropy if math.isfinite(load.entropy) else None,
        }
        for name, load in loads.items()
    }
    losses = {"balance_loss": _balance(loads), "z_loss": sum(load.z_loss for load in loads.values()) / len(loads)}
    return {**{name: mean for name, mean in losses.items() if mean != 0.0}, "routing": layers}


def in_words(loads: Mapping[str, Load], routing: Routing) -> str:
    """The least even layer in one line; the balance loss as a multiple of that of even use."""
    name, load = max(loads.items(), key=lambda item: item[1].busiest)
    balance = _balance(loads) / routing.least_balance
    return (
        f"busiest of {len(load.asked)} has {load.busiest:.2f} times its share ({name}), "
        f"{100 * max(each.dropped_share for each in loads.values()):.1f} % of choices dropped at most"
        + (f", balance loss {balance:.3f} times that of even use" if balance else "")
    )


def _balance(loads: Mapping[str, Load]) -> float:
    """The mean over layers; 0 where none has the loss, whose least value is above it."""
    return sum(load.balance_loss for load in loads.values()) / len(loads)
