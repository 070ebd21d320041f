"""Clipping by the global norm: one number, the same bits on every rank, decides the length of every gradient.

    norm^2 = sum over ranks of the squares that each rank counts      every logical element once
    coefficient = min(1, max_norm / (norm + 1e-6))                    every gradient is multiplied by it

Which gradients a rank counts follows from each parameter's spec and is the caller's business, as is the sum over ranks.
Squares are summed in float64, so the norm of float32 gradients neither overflows nor drifts.

`clip` is the whole of it for a loop of one's own.  The executor takes the parts: there gradients may carry scales, and
norm, loss and flags share one message (pipeline/update.py).

Paper: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpitrain import kernels
from mpitrain.backend import Array, array_module, floats
from mpitrain.kernels.several import Several
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.runs import is_elsewhere


class Clipped(NamedTuple):
    """What `clip` found and did.

    Attributes:
        norm: global norm before clipping; not finite where a gradient is not.
        coefficient: what the gradients were multiplied by; NaN where the norm is not finite: they were left alone.
    """

    norm: float
    coefficient: float

    @property
    def finite(self) -> bool:
        """Whether the step may be made; the same on every rank."""
        return math.isfinite(self.norm)


def clip(
    owned: Iterable[Array], grads: Iterable[Array], max_norm: float | None, sum_over_ranks: Callable[[float], float]
) -> Clipped:
    """Measure the global norm and scale all gradients where it is above `max_norm`.

    Args:
        owned: the gradients that this rank counts.
        grads: all gradients that this rank holds, scaled in place.
        max_norm: the longest that the gradient may be; None or infinity only measures.
        sum_over_ranks: the sum of one float64 over all ranks that count; called exactly once, on every rank.

    Returns:
        The norm and the coefficient.  A norm that is not finite changes nothing: the caller skips the update or stops.
    """
    norm = global_norm(sum_of_squares(owned), sum_over_ranks)
    factor = coefficient(norm, max_norm)
    if factor < 1.0:
        scale(grads, factor)
    return Clipped(norm, factor)


def sum_of_squares(arrays: Iterable[Array]) -> float:
    """Sum of the squares of all elements, in float64; infinity or NaN where an element is."""
    return sum(squares(arrays))


def squares(arrays: Iterable[Array]) -> list[float]:
    """For each array the sum of the squares of its elements, in float64; infinity or NaN where an element is."""
    return floats(found_squares(Several([*arrays])))


def found_squares(arrays: Several[Array]) -> list[Any]:
    """The same for `floats`, with which a device is waited for.

    Of an array that lives elsewhere it is what was noted when it left.
    """
    if any(map(is_elsewhere, arrays)):
        return [array.squares if is_elsewhere(array) else kernels.sum_of_squares(array) for array in arrays]
    return [kernels.sums_of_squares(arrays)] if arrays else []


def global_norm(local_squares: float, sum_over_ranks: Callable[[float], float]) -> float:
    """The root of the sum over ranks; NaN and infinity come through as they are."""
    squares = sum_over_ranks(local_squares)
    return math.sqrt(squares) if squares >= 0 else math.nan


def coefficient(norm: float, max_norm: float | None) -> float:
    """min(1, max_norm / (norm + 1e-6)); 1 without a bound, NaN for a norm that is not finite."""
    if not math.isfinite(norm):
        return math.nan
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def scale(grads: Iterable[Array], factor: float) -> None:
    """Multiply each gradient in place; one that lives elsewhere is multiplied when it is taken."""
    for grad in grads:
        if is_elsewhere(grad):
            grad.scale_by(factor)
        else:
            array_module(grad).multiply(grad, factor, out=grad)


def first_not_finite(parameters: Iterable[Parameter]) -> str | None:
    """Name of the first parameter whose gradient on this rank holds NaN or infinity: for the report of a bad norm."""
    for p in parameters:
        if not bool(array_module(p.grad).isfinite(p.grad).all()):
            return p.name
    return None
