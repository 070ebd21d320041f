"""GELU in its two forms, with their slopes, and the error function that the exact one needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks, rows_of
from mpitrain.kernels.reference.halves import in_single
from mpitrain.kernels.reference.products import sum_rows

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBE = 0.044715


@in_single(0, 0, 1)
def gelu_tanh(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """GELU of x + bias in its tanh form, and its slope.

        y = z/2 (1 + tanh u),   u = sqrt(2/pi) (z + 0.044715 z^3),   z = x + bias

    The slope shares the tanh and is as large as x, so it waits for backward in x's place, and backward is one product.

    Args:
        x: any shape.
        bias: as long as x's last dim, or None.

    Returns:
        (y, dy/dz), of x's shape and dtype.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    return _by_blocks(_tanh_block, x, bias)


@in_single(0, 0, 1)
def gelu_erf(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """GELU of x + bias in its exact form, and its slope.

        y = z Phi(z),   Phi(z) = (1 + erf(z / sqrt 2)) / 2,   dy/dz = Phi(z) + z phi(z),   z = x + bias

    Args:
        x: any shape.
        bias: as long as x's last dim, or None.

    Returns:
        (y, dy/dz), of x's shape and dtype.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    return _by_blocks(_erf_block, x, bias)


@in_single(1, 0)
def gelu_backward(grad: Array, slope: Array, with_bias: bool) -> tuple[Array, Array | None]:
    """Gradients of x and, if asked for, of the bias: grad slope, and its sum over all dims but the last.

    The second in at least float32.
    """
    dx = grad * slope
    return dx, sum_rows(dx) if with_bias else None


def _by_blocks(
    formula: Callable[[Any, Array, Array, Array], None], x: Array, bias: Array | None
) -> tuple[Array, Array]:
    """`formula(xp, z, y, slope)` for blocks z of x + bias; y and slope are written."""
    xp = array_module(x)
    y, slope = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
    shape = (x.size, 1) if bias is None else rows_of(x)
    rows, rows_y, rows_slope = x.reshape(shape), y.reshape(shape), slope.reshape(shape)
    for block in row_blocks(xp, *shape):
        z = rows[block]
        formula(xp, z if bias is None else z + bias, rows_y[block], rows_slope[block])
    return y, slope


def _tanh_block(xp: Any, z: Array, y: Array, slope: Array) -> None:
    square = z * z
    t = square * (_GELU_SCALE * _GELU_CUBE)
    t += _GELU_SCALE
    t *= z
    xp.tanh(t, out=t)
    gate = t * 0.5
    gate += 0.5
    xp.multiply(z, gate, out=y)  # z (1 + t)/2
    t *= t
    xp.subtract(1.0, t, out=t)
    square *= 1.5 * _GELU_SCALE * _GELU_CUBE
    square += 0.5 * _GELU_SCALE
    square *= z
    t *= square
    xp.add(gate, t, out=slope)  # (1 + t)/2 + z/2 (1 - t^2) du/dz


def _erf_block(xp: Any, z: Array, y: Array, slope: Array) -> None:
    gate, bell = (_short_erf_and_bell if z.dtype == np.float32 else _erf_and_bell)(xp, z * math.sqrt(0.5))
    gate *= 0.5
    gate += 0.5
    xp.multiply(z, gate, out=y)
    bell *= 1.0 / math.sqrt(2.0 * math.pi)
    bell *= z
    xp.add(gate, bell, out=slope)


# Rational approximations of erf.  Source: W. J. Cody 1969, "Rational Chebyshev Approximations for the Error Function",
# Mathematics of Computation 23:631-637; coefficients as in his program CALERF of 1990.
_NEAR_P = (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
           3.20937758913846947e3)  # fmt: skip
_NEAR_Q = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_FAR_P = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
          2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
          1.23033935479799725e3)  # fmt: skip
_FAR_Q = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
          3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3)  # fmt: skip
_NEAR = 0.46875


@in_single(0, 0)
def erf(x: Array) -> Array:
    """The error function 2/sqrt(pi) * integral of exp(-t^2) from 0 to x; absolute error below 2e-16 in float64."""
    xp = array_module(x)
    y = xp.empty(x.shape, x.dtype)
    flat, flat_y = x.reshape(-1), y.reshape(-1)
    for block in row_blocks(xp, flat.size, 1):
        flat_y[block] = _erf_and_bell(xp, flat[block])[0]
    return y


def _erf_and_bell(xp: Any, z: Array) -> tuple[Array, Array]:
    """(erf z, exp(-z^2)), new arrays."""
    size = xp.abs(z)
    xp.minimum(size, 30.0, out=size)  # exp(-900) is 0 in every dtype; the square must not overflow
    bell = size * size
    xp.minimum(bell, _NEAR * _NEAR, out=(near_square := xp.empty_like(bell)))
    xp.negative(bell, out=bell)
    xp.exp(bell, out=bell)
    # |z| >= 0.46875: 1 - exp(-z^2) R(|z|).  Cody has a third formula from 4 on, but there erfc is below 2e-8 and R is
    # still good to nine digits, until at 6 erf is 1 to the last.
    far = size
    xp.maximum(far, _NEAR, out=far)
    tail = _horner(far, _FAR_P)
    tail /= _horner(far, _FAR_Q)
    tail *= bell
    value = 1.0 - tail
    value = xp.copysign(value, z)
    # |z| < 0.46875: z R(z^2)
    near = _horner(near_square, _NEAR_P)
    near /= _horner(near_square, _NEAR_Q)
    near *= z
    xp.copyto(value, near, where=xp.abs(z) < _NEAR)
    return value, bell


# Abramowitz and Stegun 1964, "Handbook of Mathematical Functions", 7.1.26: absolute error below 1.5e-7.
_SHORT_SCALE = 0.3275911
_SHORT = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _short_erf_and_bell(xp: Any, z: Array) -> tuple[Array, Array]:
    """(erf z, exp(-z^2)), new arrays; erf is right to 1.5e-7, all that 1 + erf in single precision holds."""
    size = xp.abs(z)
    xp.minimum(size, 14.0, out=size)  # exp(-196) is 0; the square must not overflow
    bell = size * size
    xp.negative(bell, out=bell)
    xp.exp(bell, out=bell)
    size *= _SHORT_SCALE
    size += 1.0
    t = xp.divide(1.0, size, out=size)
    tail = _horner(t, _SHORT)
    tail *= t
    tail *= bell
    xp.subtract(1.0, tail, out=tail)
    return xp.copysign(tail, z, out=tail), bell


def _horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    """The polynomial with the given coefficients, highest power first."""
    value = x * coefficients[0]
    for c in coefficients[1:-1]:
        value += c
        value *= x
    value += coefficients[-1]
    return value
