"""What must hold of an optimizer's state before an update uses it.

A NaN in a moment makes a NaN of its weight, although loss and gradients are finite; a negative mean of squares makes
one of its root.  Neither a norm nor a loss shows it before the weight is lost, so each update looks at its state first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain import kernels
from mpitrain.backend import Array, array_module
from mpitrain.optim.runs import is_elsewhere

MEANS_OF_SQUARES = ("second_moment", "row_sums", "column_sums")
"""Kinds of state whose elements are never below 0."""

State = Mapping[str, Mapping[str, Array]]
"""Kind -> parameter's name -> array, as `Optimizer.state_dict` gives it."""


def look(state: State) -> list[Any]:
    """What `is_sound` needs to know: of each array its sum of squares, of means of squares also the lowest.

    Returns:
        Numbers; of arrays on a device they stay there, as arrays (), so that it is waited for once, with others.

    Cost: one pass over the state, a second one over means of squares.
    """
    sums = [kernels.sum_of_squares(array) for of_kind in state.values() for array in of_kind.values()]
    return sums + [array.min() for array in _means(state)]


def is_sound(state: State, looks: Sequence[float]) -> bool:
    """Whether all elements are finite, and no mean of squares is negative.

    Args:
        state: of which.
        looks: the numbers of `look`.
    """
    sums = len(looks) - len(_means(state))
    if any(lowest < 0.0 for lowest in looks[sums:]):
        return False
    # Squares of finite numbers of double precision may overflow when they are added up.
    return all(map(math.isfinite, looks[:sums])) or all(_is_finite(a) for of in state.values() for a in of.values())


def unsound(state: State) -> Iterator[tuple[str, str, Array]]:
    """What is not as it must be: kind, parameter's name, array; what lives elsewhere comes one tensor at a time."""
    for kind, arrays in state.items():
        for name, held in arrays.items():
            array = held.here() if is_elsewhere(held) else held
            if not _is_finite(array) or (kind in MEANS_OF_SQUARES and array.size and float(array.min()) < 0.0):
                yield kind, name, array


def _means(state: State) -> list[Array]:
    return [array for kind in MEANS_OF_SQUARES for array in state.get(kind, {}).values() if array.size]


def _is_finite(array: Array) -> bool:
    return bool(array_module(array).isfinite(array).all())
