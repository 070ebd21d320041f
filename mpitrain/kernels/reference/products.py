"""Products and sums of matrices: the formulas in NumPy (or CuPy)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.reference.halves import narrow, widen


def matmul(a: Array, b: Array, out: Array | None = None, dtype: Any = None, add: bool = False) -> Array:
    """`a @ b` over the last two dims, by BLAS whatever the strides and dtypes; half precision multiplies in float32.

    Args:
        a: (..., n, k) or (k,).
        b: (..., k, m) or (k,).
        out: where to write; its dtype may be wider than that of a and b, and a product of halves then is not rounded.
        dtype: of the result, where `out` does not say; None: that of a and b together.
        add: to what is in `out`.

    Raises:
        ShapeError: a is float16 and b bfloat16, or the other way round.
    """
    if add:
        assert out is not None, "there is nothing to add to"
        out += matmul(a, b, dtype=wide(out.dtype))
        return out
    xp = array_module(a, b)
    common = product_dtype(a, b)
    compute = wide(common)
    a, b = (x if x.dtype == compute else x.astype(compute) for x in (a, b))
    if out is not None and out.dtype == compute:
        return multiply(xp, a, b, out)
    product = multiply(xp, a, b)
    result = out.dtype if out is not None else common if dtype is None else np.dtype(dtype)
    if is_half(result):
        return narrow(product, result, out)
    if out is not None:
        out[...] = product
        return out
    return product if product.dtype == result else product.astype(result)


def linear(x: Array, w: Array, bias: Array, dtype: Any = None) -> Array:
    """`x @ w + bias`, of halves rounded once.

    Args:
        x: (..., k).
        w: (k, m).
        bias: (m,).
        dtype: of the result; None: that of x and w together.
    """
    dtype = product_dtype(x, w) if dtype is None else np.dtype(dtype)
    return shifted(matmul(x, w, dtype=wide(dtype)), bias, dtype)


def shifted(product: Array, bias: Array, dtype: Any) -> Array:
    """A product, which is changed, plus a bias, in a dtype."""
    product += bias
    return product if product.dtype == dtype else narrow(product, dtype)


def factor(x: Array) -> Array:
    """x as a factor of several products: halves in float32, so that those which multiply in that widen it once."""
    return widen(x) if is_half(x.dtype) else x


def product_dtype(a: Array, b: Array) -> Any:
    """The dtype of a product: that of both factors, or to which they promote."""
    if a.dtype == b.dtype:
        return a.dtype
    if is_half(a.dtype) and is_half(b.dtype):
        raise ShapeError(f"matmul: {a.dtype} {a.shape} and {b.dtype} {b.shape} do not go together: cast one of them")
    return np.result_type(a.dtype, b.dtype)


def multiply(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """`a @ b` of one dtype that BLAS knows."""
    return xp.matmul(_for_blas(xp, a), _for_blas(xp, b), out=out)


def _for_blas(xp: Any, x: Array) -> Array:
    # NumPy falls back to a plain triple loop, a hundred times slower, where neither of the last two dims has unit
    # stride or a broadcast dim has stride 0.
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
    return matmul(xp.ones(num_rows, x.dtype), matrix, dtype=wide(x.dtype))


def row_sum(ids: Array, rows: Array, out: Array) -> None:
    """out[ids[i]] += rows[i], repeated ids included: the gradient of an embedding table.

    The rows of one id are added in the order in which they stand, so the result is the same on every run.

    Args:
        ids: (n,) int64, each below t; a negative one is nobody's, and its row is left out.
        rows: (n, m); the sums of halves are formed in float32.
        out: (t, m), added to; its dtype may be wider than that of rows.
    """
    # Sorted by id (stably), each run of equal ids is one slice and `add.reduceat` sums it: no scatter whose order is
    # left to the hardware, and no loop over rows.
    xp = array_module(rows)
    if not ids.size:
        return
    order = xp.argsort(ids, kind="stable")
    ids = ids[order]
    starts = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]]) & (ids >= 0))
    if not starts.size:
        return
    sums = xp.add.reduceat(rows[order].astype(wide(rows.dtype), copy=False), starts, axis=0)
    if is_half(out.dtype):
        sums += out[ids[starts]]
        sums = narrow(sums, out.dtype)
        out[ids[starts]] = sums
    else:
        out[ids[starts]] += sums
