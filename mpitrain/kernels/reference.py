"""The reference kernels: NumPy (or CuPy) that reads like the formula and passes over memory in cache-sized blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks, rows_of, wide

# ------------------------------------------------------------------------------------------------- matrices and sums


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """`a @ b` over the last two dims, by BLAS whatever the strides and dtypes; half precision multiplies in float32.

    Args:
        a: (..., n, k) or (k,).
        b: (..., k, m) or (k,).
        out: where to write; its dtype may be wider than that of a and b.
    """
    xp = array_module(a, b)
    dtype = np.result_type(a.dtype, b.dtype)
    compute = wide(dtype)
    a, b = _for_blas(xp, a, compute), _for_blas(xp, b, compute)
    if out is not None and out.dtype == compute:
        return xp.matmul(a, b, out=out)
    product = xp.matmul(a, b)
    if out is not None:
        out[...] = product
        return out
    return product if compute == dtype else product.astype(dtype)


def _for_blas(xp: Any, x: Array, dtype: Any) -> Array:
    # NumPy falls back to a plain triple loop, a hundred times slower, where neither of the last two dims has unit
    # stride or a broadcast dim has stride 0.
    if x.dtype != dtype:
        return x.astype(dtype)
    if x.ndim < 2 or x.size == 0:
        return x
    near, far, size = x.strides[-1], x.strides[-2], x.itemsize
    if (near == size and far >= size * x.shape[-1]) or (far == size and near >= size * x.shape[-2]):
        return x
    return xp.ascontiguousarray(x)


def sum_rows(x: Array) -> Array:
    """Sum over all dims but the last, in at least float32: the gradient of a bias.

    A row of ones times a matrix: BLAS reads the matrix once, twice as fast as NumPy's own sum over rows.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    matrix = x.reshape(num_rows, width)
    return matmul(xp.ones(num_rows, x.dtype), matrix)


# --------------------------------------------------------------------------------------------------------------- gelu

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBE = 0.044715


def gelu_tanh(x: Array) -> tuple[Array, Array]:
    """GELU in its tanh form, and its slope.

        y = x/2 (1 + tanh u),   u = sqrt(2/pi) (x + 0.044715 x^3)

    The slope shares the tanh and is as large as x, so it waits for backward in x's place, and backward is one product.

    Returns:
        (y, dy/dx), of x's shape and dtype.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    xp = array_module(x)
    y, slope = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
    flat, flat_y, flat_slope = x.reshape(-1), y.reshape(-1), slope.reshape(-1)
    for block in row_blocks(xp, flat.size, 1):
        z = flat[block].astype(wide(x.dtype), copy=False)
        square = z * z
        t = square * (_GELU_SCALE * _GELU_CUBE)
        t += _GELU_SCALE
        t *= z
        xp.tanh(t, out=t)
        gate = t * 0.5
        gate += 0.5
        xp.multiply(z, gate, out=flat_y[block])  # x (1 + t)/2
        t *= t
        xp.subtract(1.0, t, out=t)
        square *= 1.5 * _GELU_SCALE * _GELU_CUBE
        square += 0.5 * _GELU_SCALE
        square *= z
        t *= square
        xp.add(gate, t, out=flat_slope[block])  # (1 + t)/2 + x/2 (1 - t^2) du/dx
    return y, slope


def gelu_erf(x: Array) -> tuple[Array, Array]:
    """GELU in its exact form, y = x Phi(x) with Phi(x) = (1 + erf(x / sqrt 2)) / 2, and its slope Phi(x) + x phi(x).

    Returns:
        (y, dy/dx), of x's shape and dtype.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    xp = array_module(x)
    y, slope = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
    flat, flat_y, flat_slope = x.reshape(-1), y.reshape(-1), slope.reshape(-1)
    for block in row_blocks(xp, flat.size, 1):
        z = flat[block].astype(wide(x.dtype), copy=False)
        gate, bell = (_short_erf_and_bell if z.dtype == np.float32 else _erf_and_bell)(xp, z * math.sqrt(0.5))
        gate *= 0.5
        gate += 0.5
        xp.multiply(z, gate, out=flat_y[block])
        bell *= 1.0 / math.sqrt(2.0 * math.pi)
        bell *= z
        xp.add(gate, bell, out=flat_slope[block])
    return y, slope


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


def erf(x: Array) -> Array:
    """The error function 2/sqrt(pi) * integral of exp(-t^2) from 0 to x; absolute error below 2e-16 in float64."""
    xp = array_module(x)
    y = xp.empty(x.shape, x.dtype)
    flat, flat_y = x.reshape(-1), y.reshape(-1)
    for block in row_blocks(xp, flat.size, 1):
        flat_y[block] = _erf_and_bell(xp, flat[block].astype(wide(x.dtype), copy=False))[0]
    return y


def _erf_and_bell(xp: Any, z: Array) -> tuple[Array, Array]:
    """(erf z, exp(-z^2)), new arrays."""
    size = xp.abs(z)
    xp.minimum(size, 30.0, out=size)  # exp(-900) is 0 in every dtype; the square must not overflow
    bell = size * size
    xp.minimum(bell, _NEAR * _NEAR, out=(near_square := xp.empty_like(bell)))
    xp.negative(bell, out=bell)
    xp.exp(bell, out=bell)
    # |z| >= 0.46875: 1 - exp(-z^2) R(|z|).  Cody has a third formula from 4 on; there erfc is below 2e-8, and R is good
    # to 1e-9 up to 6, where erf is 1 to the last digit.
    far = size
    xp.maximum(far, _NEAR, out=far)
    xp.minimum(far, 6.0, out=far)
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


# --------------------------------------------------------------------------------------------------------- layer norm


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Normalise each row (last dim) to mean 0 and variance 1, then scale and shift.

    The first element of the row is subtracted before anything is summed, so that rows far from zero keep their digits
    and constant rows give the bias exactly.

    Returns:
        (y, center, rstd): center (rows, 1) is the mean minus the row's first element, rstd (rows, 1) the reciprocal of
        the standard deviation, both in at least float32.

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization", arXiv:1607.06450.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    compute = wide(x.dtype)
    rows, y = x.reshape(num_rows, width), xp.empty((num_rows, width), x.dtype)
    center, rstd = xp.empty((num_rows, 1), compute), xp.empty((num_rows, 1), compute)
    ones = xp.ones(width, compute)
    for block in row_blocks(xp, num_rows, width):
        z = _shifted(rows[block], compute)
        center[block, 0] = z @ ones / width
        z -= center[block]
        r = xp.einsum("ij,ij->i", z, z)[:, None]
        r /= width
        r += eps
        xp.sqrt(r, out=r)
        xp.divide(1.0, r, out=rstd[block])
        z *= rstd[block]
        z *= weight
        xp.add(z, bias, out=y[block])
    return y.reshape(x.shape), center, rstd


def layer_norm_backward(grad: Array, x: Array, center: Array, rstd: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias.

    With n = (x - mean) rstd and h = grad weight:
    dx = rstd (h - mean(h) - n mean(h n)),  dw = sum of grad n,  db = sum of grad.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    compute = wide(x.dtype)
    rows, grads = x.reshape(num_rows, width), grad.reshape(num_rows, width)
    dx = xp.empty((num_rows, width), x.dtype)
    scale = weight.astype(compute, copy=False)
    dw, db = xp.zeros(width, compute), xp.zeros(width, compute)
    for block in row_blocks(xp, num_rows, width):
        g = grads[block].astype(compute, copy=False)
        n = _shifted(rows[block], compute)
        n -= center[block]
        n *= rstd[block]
        ones = xp.ones(g.shape[0], compute)
        h = g * n
        dw += ones @ h
        db += ones @ g
        n *= (h @ scale / width)[:, None]
        mean = (g @ scale / width)[:, None]
        xp.multiply(g, scale, out=h)
        h -= mean
        h -= n
        xp.multiply(h, rstd[block], out=dx[block])
    return dx.reshape(x.shape), dw.astype(weight.dtype, copy=False), db.astype(weight.dtype, copy=False)


def _shifted(rows: Array, dtype: Any) -> Array:
    """Rows minus their first element, a new array in `dtype`."""
    rows = rows.astype(dtype, copy=False)
    return rows - rows[:, :1]


# ------------------------------------------------------------------------------------------------------------ softmax


def softmax(x: Array, dim: int, mask: Array | None) -> Array:
    """exp(x) over its sum along `dim`; 0 where the bool mask is False, also if it is False for a whole row."""
    xp = array_module(x)
    y = x.astype(wide(x.dtype), copy=True)
    if mask is not None:
        xp.copyto(y, -math.inf, where=~mask)
    # A row without any key has maximum -inf; -inf minus the lowest finite number stays -inf, whose exp is 0.
    y -= xp.maximum(y.max(axis=dim, keepdims=True), xp.finfo(y.dtype).min) if y.size else 0
    xp.exp(y, out=y)
    # The largest element contributes exactly 1, so only a row without any key has a sum below 1.
    y /= xp.maximum(y.sum(axis=dim, keepdims=True), 1.0)
    return y.astype(x.dtype, copy=False)


def softmax_backward(grad: Array, y: Array, dim: int) -> Array:
    """y (grad - sum(grad y)) along `dim`."""
    compute = wide(y.dtype)
    p, g = y.astype(compute, copy=False), grad.astype(compute, copy=False)
    gp = g * p
    total = gp.sum(axis=dim, keepdims=True)
    gp -= p * total
    return gp.astype(y.dtype, copy=False)


# ------------------------------------------------------------------------------------------------------ cross-entropy


def cross_entropy(logits: Array, targets: Array, ignore: int) -> tuple[Array, Array]:
    """Sum over rows of log(sum(exp(logits))) - logits[target], rows whose target is `ignore` left out.

    Args:
        logits: (n, v).
        targets: (n,) integers.
        ignore: the target that does not count.

    Returns:
        (total, lse): total () in at least float32; lse (n,), the logarithm of the sum.  With the logits it is all
        that backward needs: no array of probabilities is kept.
    """
    xp = array_module(logits)
    num_rows, width = logits.shape
    compute = wide(logits.dtype)
    lse, picked = xp.empty(num_rows, compute), xp.empty(num_rows, compute)
    valid = targets != ignore
    columns = xp.where(valid, targets, 0)
    for block in row_blocks(xp, num_rows, width):
        z = logits[block].astype(compute, copy=False)
        highest = z.max(axis=1, keepdims=True)
        picked[block] = z[xp.arange(z.shape[0]), columns[block]]
        z = z - highest
        xp.exp(z, out=z)
        total = z.sum(axis=1)
        xp.log(total, out=total)
        total += highest[:, 0]
        lse[block] = total
    losses = xp.where(valid, lse - picked, 0)
    return xp.asarray(losses.sum(dtype=np.float64), dtype=compute), lse


def cross_entropy_backward(grad: Array, logits: Array, targets: Array, lse: Array, ignore: int) -> Array:
    """grad (softmax(logits) - one_hot(target)), exactly 0 in rows that do not count."""
    xp = array_module(logits)
    num_rows, width = logits.shape
    compute = wide(logits.dtype)
    d_logits = xp.empty((num_rows, width), logits.dtype)
    valid = targets != ignore
    columns = xp.where(valid, targets, 0)
    scale = xp.where(valid, grad.astype(compute, copy=False), 0).astype(compute, copy=False)[:, None]
    for block in row_blocks(xp, num_rows, width):
        p = logits[block].astype(compute, copy=False) - lse[block, None]
        xp.exp(p, out=p)
        p[xp.arange(p.shape[0]), columns[block]] -= 1.0
        xp.multiply(p, scale[block], out=d_logits[block])
    return d_logits
