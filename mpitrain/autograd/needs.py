"""What backward needs of an array that forward saves, where that is less than all of it.

    class Relu(Function):
        needs = (SIGN,)                              # of the first array that it saves

An operation says so, and a `SavePolicy` may make use of it: what is not said to be less is kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

EXACT = "exact"
"""The array, to the last bit."""

NEAR = "near"
"""The array, but values close to it will do: it is a factor, and gradients are then those at a point nearby.

Not so where a value is divided by, or put beside a statistic that was taken of the exact ones; nor where it may be a
rank's summand of a value (what experts give, under tensor parallelism), for the sum of what is rounded is not the
rounding of the sum."""

SIGN = "sign"
"""Of each element whether it is above 0.  Backward compares what it gets with 0, be it the array or `array > 0`."""


class Below(NamedTuple):
    """Whole numbers from 0 up to, and without, a count.

    count: gives it, for the keyword arguments with which the operation was called.
    """

    count: Callable[..., int]


Need = str | Below
"""One of the above."""


def need_of(function: Any, place: int) -> Need:
    """What a function's backward needs of the array that its forward saves at a place.

    Args:
        function: a class of `Function`.
        place: number of the array among what forward returns as `saved`.
    """
    needs: tuple[Need, ...] = function.needs
    return needs[place] if place < len(needs) else EXACT


def count_of(need: Below, static: dict[str, Any]) -> int:
    """How many numbers there are."""
    return need.count(**static)
