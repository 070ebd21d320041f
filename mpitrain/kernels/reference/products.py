"""Products and sums of matrices: the formulas in NumPy (or CuPy)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import rows_of, wide


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """`a @ b` over the last two dims, by BLAS whatever the strides and dtypes; half precision multiplies in float32.

    Args:
        a: (..., n, k) or (k,).
        b: (..., k, m) or (k,).
        out: where to write; its dtype may be wider than that of a and b.
    """
    xp = array_module(a, b)
    dtype = a.dtype if a.dtype == b.dtype else np.result_type(a.dtype, b.dtype)
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
    if x.ndim < 2 or x.size == 0 or x.flags.c_contiguous:
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


def row_sum(ids: Array, rows: Array, out: Array) -> None:
    """out[ids[i]] += rows[i], repeated ids included: the gradient of an embedding table.

    The rows of one id are added in the order in which they stand, so the result is the same on every run.

    Args:
        ids: (n,) int64, each in [0, t).
        rows: (n, m).
        out: (t, m), added to.
    """
    # Sorted by id (stably), each run of equal ids is one slice and `add.reduceat` sums it: no scatter whose order is
    # left to the hardware, and no loop over rows.
    xp = array_module(rows)
    if not ids.size:
        return
    order = xp.argsort(ids, kind="stable")
    ids = ids[order]
    starts = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]]))
    out[ids[starts]] += xp.add.reduceat(rows[order], starts, axis=0)
