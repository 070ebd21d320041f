"""Layer norm: the formulas in NumPy (or CuPy), over blocks of rows that stay in cache."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks, rows_of
from mpitrain.kernels.reference.halves import in_single


@in_single(0, 0)
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
    rows, y = x.reshape(num_rows, width), xp.empty((num_rows, width), x.dtype)
    center, rstd = xp.empty((num_rows, 1), x.dtype), xp.empty((num_rows, 1), x.dtype)
    ones = xp.ones(width, x.dtype)
    for block in row_blocks(xp, num_rows, width):
        z = _shifted(rows[block])
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


@in_single(1, 0)
def layer_norm_backward(
    grad: Array, x: Array, center: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias.  `extra`, a gradient that x has from elsewhere, is added to that of x.

    With n = (x - mean) rstd and h = grad weight:
    dx = rstd (h - mean(h) - n mean(h n)),  dw = sum of grad n,  db = sum of grad,  the sums in at least float32.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    rows, grads = x.reshape(num_rows, width), grad.reshape(num_rows, width)
    dx = xp.empty((num_rows, width), x.dtype)
    scale = weight.astype(x.dtype, copy=False)
    dw, db = xp.zeros(width, x.dtype), xp.zeros(width, x.dtype)
    for block in row_blocks(xp, num_rows, width):
        g = grads[block].astype(x.dtype, copy=False)
        n = _shifted(rows[block])
        n -= center[block]
        n *= rstd[block]
        ones = xp.ones(g.shape[0], x.dtype)
        h = g * n
        dw += ones @ h
        db += ones @ g
        n *= (h @ scale / width)[:, None]
        mean = (g @ scale / width)[:, None]
        xp.multiply(g, scale, out=h)
        h -= mean
        h -= n
        xp.multiply(h, rstd[block], out=dx[block])
    if extra is not None:
        dx += extra.reshape(num_rows, width)
    return dx.reshape(x.shape), dw, db


def _shifted(rows: Array) -> Array:
    """Rows minus their first element, a new array."""
    return rows - rows[:, :1]
