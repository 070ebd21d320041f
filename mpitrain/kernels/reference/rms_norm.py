"""RMS norm: the formulas in NumPy (or CuPy), over blocks of rows that stay in cache."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks, rows_of
from mpitrain.kernels.reference.halves import in_single
from mpitrain.kernels.reference.residual import residual


@in_single(0, 0)
def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Divide each row (last dim) by the root of its mean square, then scale.

    Returns:
        (y, rstd): rstd (rows, 1) is 1 / sqrt(mean square + eps), in at least float32.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    rows, y = x.reshape(num_rows, width), xp.empty((num_rows, width), x.dtype)
    rstd = xp.empty((num_rows, 1), x.dtype)
    for block in row_blocks(xp, num_rows, width):
        z = rows[block]
        r = xp.einsum("ij,ij->i", z, z)[:, None]
        r /= width
        r += eps
        xp.sqrt(r, out=r)
        xp.divide(1.0, r, out=rstd[block])
        xp.multiply(z, rstd[block], out=y[block])
        y[block] *= weight
    return y.reshape(x.shape), rstd


@in_single(1, 0)
def rms_norm_backward(
    grad: Array, x: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array]:
    """Gradients of x and weight.  `extra`, a gradient that x has from elsewhere, is added to that of x.

    With n = x rstd and h = grad weight:
    dx = rstd (h - n mean(h n)),  dw = sum of grad n,  the sum in at least float32.
    """
    xp = array_module(x)
    num_rows, width = rows_of(x)
    rows, grads = x.reshape(num_rows, width), grad.reshape(num_rows, width)
    dx = xp.empty((num_rows, width), x.dtype)
    scale = weight.astype(x.dtype, copy=False)
    dw = xp.zeros(width, x.dtype)
    for block in row_blocks(xp, num_rows, width):
        g = grads[block].astype(x.dtype, copy=False)
        n = rows[block] * rstd[block]
        h = g * n
        dw += xp.ones(g.shape[0], x.dtype) @ h
        n *= (h @ scale / width)[:, None]
        xp.multiply(g, scale, out=h)
        h -= n
        xp.multiply(h, rstd[block], out=dx[block])
    if extra is not None:
        dx += extra.reshape(num_rows, width)
    return dx.reshape(x.shape), dw


def residual_rms_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, eps: float
) -> tuple[Array, Array, Array]:
    """The sum that `residual` makes, and its RMS norm while it is at hand: of halves, that of the rounded sum.

    Args:
        x, y, branch_bias, rows, p: as for `residual`.
        weight, eps: as for `rms_norm`.

    Returns:
        (sum, normalised, rstd), the last as `rms_norm` gives it.
    """
    total = residual(x, y, branch_bias, rows, p)
    return total, *rms_norm(total, weight, eps)
