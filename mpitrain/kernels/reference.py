"""Products, norms and softmax: the formulas in NumPy (or CuPy), over cache-sized blocks of rows."""

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
